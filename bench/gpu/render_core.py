"""The sections of `docs/results.md` that need no GPU: `stalls.json` and `costs.json`, as benchmarks of the core printed them."""

import statistics


def stalls(content, table):
    """What honest clients' decisions cost while others attack the core."""
    machine = content["machine"]
    worst = max(row["ratio"]["p99"] for row in content["rows"])
    ungated = sum(row["ungated"] for row in content["rows"])
    text = ["## Decisions beside hostile clients", ""]
    text += [
        (
            f"{machine['cpus']} cores, {machine['date']}: `cargo xtask bench -p tally-core stalls -- --out FILE`, as root. An honest client's "
            "decisions by `tally-priority` while another user's connections attack the core, against the same run in which these are "
            f"connected and idle; medians of {content['rows'][0]['runs']} alternating runs of {content['rows'][0]['launches_each']} launches each. The dispatch "
            "thread and the honest client have one CPU, attackers and all else the other, so that the ratio says what the core takes and not "
            f"who has a CPU. At most 2 is promised at p99; the worst here is {worst:.2f}. Launches that would have gone ahead ungated: {ungated}."
        ),
        "",
    ]
    # What holds of some rows only, such as another date or load.
    for note in content.get("notes", []):
        text += [note, ""]
    header = ["attack", "connections", "p50 without us", "p99 without us", "p50 with us", "p99 with us", "p50 ratio", "p99 ratio"]
    rows = []
    for row in content["rows"]:
        without, beside, ratio = row["without_us"], row["with_us"], row["ratio"]
        times = [f"{value:.1f}" for value in (without["p50"], without["p99"], beside["p50"], beside["p99"])]
        rows.append([row["attack"], row["connections"], *times, f"{ratio['p50']:.2f}", f"{ratio['p99']:.2f}"])
    return text + table(header, rows)


def costs(content, table):
    """Promised figures before and after the defences against hostile clients."""
    machine = content["machine"]
    text = ["## What the bounds on clients cost", ""]
    text += [
        (
            f"{machine['cpus']} cores of a virtual machine, shared with other work, {machine['date']}: `cargo xtask bench` of commits "
            f"`{content['before']}` and `{content['after']}` in turns. The least of the runs, which others disturbed least, and the "
            "greatest. Round trips come in two states of the virtual machine, 2.4 apart, in both builds."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        sides = [row["before"], row["after"]]
        told = [f"{min(values):.{row['digits']}f} (to {max(values):.{row['digits']}f})" for values in sides]
        rows.append([row["figure"], row["unit"], len(sides[0]), *told, f"{min(sides[1]) / min(sides[0]):.2f}"])
    text += table(["figure", "unit", "runs", "before", "after", "ratio of the least"], rows)
    return text + since_before_all(content["in_pairs"], machine, table) + simulator(content["simulator"], table)


def since_before_all(content, machine, table):
    """The same since before the first of these defences, by the ratio of each pair of runs."""
    text = [f"Since commit `{content['before']}` (the last without any of the bounds): runs of it and of a later commit in pairs, one after the"]
    text[-1] += " other, in alternating order; medians. " + content["note"]
    if any("machine" in row for row in content["rows"]):
        text[-1] += (
            " Policy calls are by `cargo xtask bench -p tally-wasm-host` (the crate had another name at first), round trips by the"
            " benchmark `latency` of `tally-core`. Where a row names its CPUs, both commits' programs were built elsewhere and ran on these alone."
        )
    first = f"{machine['cpus']} CPUs as above, {content['date']}"
    rows = []
    for row in content["rows"]:
        sides, digits = [row["before"], row["after"]], row["digits"]
        ratios = sorted(after / before for before, after in zip(*sides, strict=True))
        told = [f"{statistics.median(values):.{digits}f}" for values in sides]
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        where = [f"`{row.get('commit', content['after'])}`", row.get("machine", first)]
        rows.append([row["figure"], row["unit"], *where, len(ratios), *told, f"{statistics.median(ratios):.2f}", spread])
    return text + [""] + table(["figure", "unit", "commit", "machine", "pairs", "before", "after", "ratio of a pair", "from, to"], rows)


def simulator(content, table):
    """The simulator's speed before and after its crates and their types were renamed, and since."""
    after = content["after"]
    text = ["## Simulator speed before and after the renames", ""]
    text += [
        (
            f"The machine of the first table, {content['date']}: the simulator's benchmark `launches` of commits `{content['before']}` (the last before the "
            f"renames), `{after['renames']}` (behind them) and `{after['since']}` (with what was added since, such as several high-priority "
            "programs), one after the other in alternating order. The least of the runs, and the median of the ratios of runs next to each "
            "other. Instructions: of two simulations in each mode, counted by `valgrind --tool=callgrind`, which other work does not disturb."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        sides, digits = [row["before"], row["after"]], row["digits"]
        ratios = [new / old for old, new in zip(*sides, strict=True)]
        least = [min(values) for values in sides]
        told = [f"{value:.{digits}f}" for value in least]
        ratio = f"{least[1] / least[0]:.2f}"
        rows.append([row["figure"], row["unit"], len(ratios), f"`{after[row['side']]}`", *told, ratio, f"{statistics.median(ratios):.2f}"])
    return text + table(["figure", "unit", "runs", "commit", "before", "after", "ratio of the least", "ratio of a pair"], rows)
