"""The tables of `policy.json`, for render.py: what happened to the policy while programs ran."""


def number(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def quantile(figures, name, digits=3):
    """Of `times()`; nothing if nothing was timed."""
    return number(figures[name], digits) if figures else ""


def log(rows):
    """(heading, text, header, rows) of the decision log."""
    text = (
        "Recorded while both ran, then replayed with the same component. What a policy had learned before the recording began "
        "must be in the log if the replay is to be equal."
    )
    cells = [
        [
            row["begun"],
            row["decisions"],
            row["decisions_per_s"],
            f"{row['equal_decisions']} ({'all' if row['equal'] else 'not all'})",
            row["dropped"],
            number(row["bytes"] / row["recorded_s"] / 1024, 0),
            number(row["replay_s"]),
            quantile(row["while_recording"]["service_ms"], "p99"),
        ]
        for row in rows
    ]
    header = ["recording begun", "decisions", "a second", "equal in the replay", "records dropped", "KiB/s", "replay s"]
    return "The decision log", text, [*header, "inference p99 ms meanwhile"], cells


def shadow(row):
    """Of the shadow."""
    text = (
        f"`{row['policy']}` as the shadow of `{row['active']}`: {number(row['agreement_percent'])} % of {row['decisions']} "
        f"decisions equal, {row['skipped']} left out, {row['dropped']} records dropped. It took {number(row['cpu_percent'])} % of a CPU "
        f"(it may take {number(row['cpu_percent_max'], 0)} %)."
    )
    before, after = row["without"]
    cells = [
        [
            name,
            quantile(figures["service_ms"], "p50"),
            quantile(figures["service_ms"], "p99"),
            quantile(figures["queued_ms"], "p99", 2),
            number(figures["be_steps_per_s"]),
        ]
        for name, figures in (("before", before), ("with the shadow", row["with"]), ("after", after))
    ]
    return "A shadow", text, ["window", "inference p50 ms", "p99 ms", "queued p99 ms", "training steps/s"], cells


def interval(effect):
    low, high = effect["low"], effect["high"]
    if low is None or high is None:
        return "" if low is None and high is None else f"{number(low, 3) or 'no bound'} to {number(high, 3) or 'no bound'}"
    return f"{low:.3f} to {high:.3f}"


# What tells rows of A/B tests apart: a run in one sharing mode replaces none of another.
AB_KEY = ("sharing", "test", "metric")


def made_by(content):
    """The run that a result file comes from."""
    machine = content.get("machine", {})
    return {key: machine.get(key) for key in ("device", "commit", "date")} | {"sharing": content["sharing"]}


def ab_rows(content):
    """The rows of the A/B tests, each with its sharing mode and the run that made it."""
    of_part = content.get("made", {}).get("ab") or made_by(content)
    rows = []
    for row in content.get("ab") or []:
        made = row.get("made") or {key: of_part[key] for key in ("device", "commit", "date")}
        rows.append({**row, "sharing": row.get("sharing") or of_part["sharing"], "made": made})
    return rows


def ab_key(row):
    return tuple({**row, "metric": row["plan"]["metric"]}[key] for key in AB_KEY)


def ab(rows):
    """Of the A/B tests."""
    text = (
        "Effect: B's figure over A's, with its 95 % interval. Back: from the moment the test ended until A was active."
    )
    makes = {}
    for row in rows:
        made = row["made"]
        if made["commit"]:
            modes = makes.setdefault((made["device"], made["commit"], made["date"]), [])
            modes += [mode for mode in [f"`{row['sharing']}`"] if mode not in modes]
    runs = [f"{' and '.join(modes)} on an {device}, commit `{commit}`, {date}" for (device, commit, date), modes in makes.items()]
    if runs:
        text = f"In {'; '.join(runs)}. {text}"
    cells = [
        [
            f"{row['test']}: {row['a']['name']}, {row['b']['name']}",
            f"`{row['sharing']}`",
            ", ".join([row["plan"]["metric"], *(f"guard `{guard}`" for guard in row["plan"].get("guards", []))]),
            row["verdict"].replace("_", " "),
            number(row["elapsed_s"], 1),
            row["ended"]["reason"].replace("_", " "),
            row["pairs"],
            number(row["effect"]["ratio"], 3) if row["pairs"] else "",
            interval(row["effect"]),
            f"{number(row['a']['hp_p99_ms'], 3)} / {number(row['b']['hp_p99_ms'], 3)}",
            f"{number(row['a']['be_gpu_ms_per_s'], 0)} / {number(row['b']['be_gpu_ms_per_s'], 0)}",
            "" if row["a_back_after_ns"] is None else number(row["a_back_after_ns"] / 1e6, 1),
        ]
        for row in rows
    ]
    header = ["test: A, B", "sharing mode", "metric", "verdict", "after s", "ended by", "pairs", "effect", "interval"]
    return "A/B tests", text, [*header, "p99 ms, A / B", "best effort GPU ms/s, A / B", "A back after ms"], cells


def chaos(rows):
    """Of policies that misbehave."""
    text = (
        "`chaos` loaded in place of `tally-priority`. Times from when `tallyctl policy load` returned until `tallyctl status`, asked every "
        "20 ms, said so. Around: requests under way in the second after the load was sent. Training: a deterministic one that ran "
        "through it, against the same alone. A policy stalls only while the GPU idles: the inference falls silent 1 s after that load."
    )
    cells = [
        [
            row["fault"],
            number(row["counted_ms"], 0),
            number(row["named_ms"], 0),
            number(row["back_ms"], 0),
            quantile(row["before_ms"], "p99"),
            quantile(row["around_ms"], "p99"),
            quantile(row["around_ms"], "max"),
            quantile(row["around_ms"], "n", 0),
            "bit-identical" if row["training_equal"] else "differs",
        ]
        for row in rows
    ]
    header = ["fault", "first counted ms", "disabled, and why, ms", "good policy back ms", "p99 before ms", "p99 around ms"]
    return "Policies that misbehave", text, [*header, "longest around ms", "requests", "training"], cells


PARTS = {"log": log, "shadow": shadow, "ab": ab, "chaos": chaos}


def merged_ab(old, new):
    """The A/B tests of both files: a row of `new` takes the place of the same test in the same sharing mode."""
    new_rows = {ab_key(row): row for row in ab_rows(new)}
    rows = [new_rows.pop(ab_key(row), row) for row in ab_rows(old)]
    return rows + list(new_rows.values())


def part_of(message):
    """What a failure is about: a part, or for A/B tests `ab in MODE`."""
    return message.split(",")[0].split(":")[0]


def merged(old, new):
    """The parts of `new` in place of those of `old`; how these were made is in `made`, by part, and in each A/B test."""
    parts = [part for part in PARTS if new.get(part)]
    kept = {part: old[part] for part in PARTS if old.get(part) and part not in parts}
    out = {**old, **{part: new[part] for part in parts}} if kept else dict(new)
    if kept:
        others = [part for part in parts if part != "ab"]
        out["made"] = {**old.get("made", {}), **dict.fromkeys(others, made_by(new))}
    if old.get("ab") or new.get("ab"):
        out["ab"] = merged_ab(old, new)
        out.get("made", {}).pop("ab", None)
    measured = {f"ab in {new['sharing']}" if part == "ab" else part for part in parts}
    failures = []
    for message in old.get("failures", []):
        part = part_of(message)
        if part not in measured and (kept or part.startswith("ab in ")):
            failures.append(message)
    return {**out, "failures": failures + new.get("failures", [])}


def lines(content, marks, table):
    """The section below its first lines; `marks` are footnotes, `table` makes a Markdown table."""
    out = [
        (
            f"`{content['hp']}` with Poisson arrivals at load {content['load']} and `{content['be']}`, clients of one core in "
            f"`{content['sharing']}` from start to end, `{content['policy']}` active.{marks}"
        ),
        "",
    ]
    for part, make in PARTS.items():
        if content.get(part):
            heading, text, header, rows = make(ab_rows(content) if part == "ab" else content[part])
            if part != "ab" and (made := content.get("made", {}).get(part)):
                text = f"On an {made['device']}, commit `{made['commit']}`, {made['date']}, in `{made['sharing']}`. {text}"
            out += [f"### {heading}", "", text, "", *table(header, rows)]
    if end := content.get("end"):
        pause = end["swap_pause_us"]
        out += [
            (
                f"In the end {len(end['clients'])} of the 2 clients were connected, after {end['active_policies']} active policies, "
                f"one after the other; each change kept decisions waiting for {pause['p50']:.0f} us (p50), at most {pause['max']:.0f} us."
            ),
            "",
        ]
    return out
