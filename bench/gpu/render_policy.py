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


def ab(rows):
    """Of the A/B tests."""
    text = (
        "Effect: B's figure over A's, with its 95 % interval. Back: from the moment the test ended until A was active."
    )
    cells = [
        [
            f"{row['test']}: {row['a']['name']}, {row['b']['name']}",
            row["plan"]["metric"],
            f"{row['ended']['reason']} after {number(row['elapsed_s'], 1)} s",
            row["pairs"],
            number(row["effect"]["ratio"], 3) if row["pairs"] else "",
            interval(row["effect"]),
            row["verdict"].replace("_", " "),
            f"{number(row['a']['hp_p99_ms'], 3)} / {number(row['b']['hp_p99_ms'], 3)}",
            f"{number(row['a']['be_gpu_ms_per_s'], 0)} / {number(row['b']['be_gpu_ms_per_s'], 0)}",
            "" if row["a_back_after_ns"] is None else number(row["a_back_after_ns"] / 1e6, 1),
        ]
        for row in rows
    ]
    header = ["test: A, B", "metric", "ended", "pairs", "effect", "interval", "verdict", "p99 ms, A / B"]
    return "A/B tests", text, [*header, "best effort GPU ms/s, A / B", "A back after ms"], cells


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


def merged(old, new):
    """The parts of `new` in place of those of `old`; how these were made is in `made`, by part."""
    made = {key: new["machine"].get(key) for key in ("device", "commit", "date")} | {"sharing": new["sharing"]}
    parts = [part for part in PARTS if new.get(part)]
    kept = {part: old[part] for part in PARTS if old.get(part) and part not in parts}
    if not kept:
        return new
    return {**old, **{part: new[part] for part in parts}, "made": {**old.get("made", {}), **dict.fromkeys(parts, made)}}


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
            heading, text, header, rows = make(content[part])
            if made := content.get("made", {}).get(part):
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
