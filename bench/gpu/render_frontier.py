"""The section of `docs/results.md` on objectives: best-effort share over the objective, way by way."""

KEY = ("hp", "be", "mode", "policy", "slo_over_p99", "load", "device")
PAIR = ("hp", "be", "load", "device")
TARGET_PERCENT = 99.0
HERALD, PRIORITY, FIFO = "slo-herald", "tally-priority", "fifo"
# The sharing mode in which policies are compared.
CONCURRENT = "tally-mps"
# The service put its requests off by itself: no sharing mode of a policy.
PUT_OFF = "tally-timeslice, requests put off"


def lines(rows, table, made_of):
    """The section's lines."""
    text = ["## Objectives", "", "Command: `bench/gpu/run.sh --bundle DIR --out DIR frontier`. Rows: `results/frontier.json`.", ""]
    text += [
        (
            "A service with Poisson arrivals beside a training. The objective is a multiple of the service's p99 with the GPU to itself. Attainment is "
            f"the share of requests whose service time keeps it; a share in brackets is of a way that does not keep it in {TARGET_PERCENT:g} %. "
            "Of medians the share's extremes are given. Only `slo-herald` knows the objective. `tallyctl sim --frontier --svg` draws a simulated frontier."
        ),
        "",
    ]
    text += against_others(rows, table)
    text += policies(rows, table)
    for pair in dict.fromkeys(key_of(row) for row in rows):
        hp, be, load, device = pair
        of_pair = [row for row in rows if key_of(row) == pair]
        factors = sorted({row["slo_over_p99"] for row in of_pair})
        text += [f"`{hp}` beside `{be}`, load {load:g}, {device}, {made_of(of_pair)}:", ""]
        body = []
        for way in dict.fromkeys((row["mode"], row["policy"]) for row in of_pair):
            by_factor = {row["slo_over_p99"]: row for row in of_pair if (row["mode"], row["policy"]) == way}
            body.append([way[0], way[1], *(cell(by_factor.get(factor)) for factor in factors)])
        text += table(["way", "policy", *(f"{factor:g}x: attainment %, share" for factor in factors)], body)
    return text


def key_of(row):
    return tuple(row[key] for key in PAIR)


def keeps(row):
    return row["attainment_percent"] >= TARGET_PERCENT


def best(rows):
    """The row with the most left for best effort among those that keep the objective, or None."""
    return max(filter(keeps, rows), key=lambda row: row["be_share"], default=None)


def against_others(rows, table):
    """What `slo-herald` leaves to best effort in its better way, against the best other way that keeps the objective."""
    body = []
    for hp, be, load, device, factor in dict.fromkeys((*key_of(row), row["slo_over_p99"]) for row in rows):
        alike = [row for row in rows if (*key_of(row), row["slo_over_p99"]) == (hp, be, load, device, factor)]
        of_herald, of_others = ([row for row in alike if (row["policy"] == HERALD) is is_herald] for is_herald in (True, False))
        herald = best(of_herald)
        priority = best(row for row in alike if row["policy"] == PRIORITY and row["mode"] != PUT_OFF)
        over = f"{herald['be_share'] / priority['be_share']:.2f}x" if herald and priority else "-"
        body.append([f"`{hp}`", f"`{be}`", f"{factor:g}x", told(of_herald), told(of_others), over])
    header = ["service", "beside", "objective", "most under `slo-herald`", "most under another way", f"over `{PRIORITY}`"]
    intro = (
        "The largest best-effort share among the ways that keep the objective, and in brackets how many requests keep it with queueing. The last "
        f"column compares with `{PRIORITY}` in its better sharing mode."
    )
    return [intro, "", *table(header, body)]


def policies(rows, table):
    """The shipped policies beside the same services under MPS; only pairs of which `fifo` was measured."""
    body = []
    for key in dict.fromkeys((*key_of(row), row["slo_over_p99"]) for row in rows):
        of = {row["policy"]: row for row in rows if (*key_of(row), row["slo_over_p99"]) == key and row["mode"] == CONCURRENT}
        if FIFO not in of:
            continue
        hp, be, *_, factor = key
        ways = [of.get(policy) for policy in (FIFO, PRIORITY, HERALD)]
        body.append([f"`{hp}`", f"`{be}`", f"{factor:g}x", *(compared(way) for way in ways)])
    if not body:
        return []
    intro = "The policies under MPS (`tally-mps`): p99 over the service's own, requests that keep the objective, best-effort share."
    return [intro, "", *table(["service", "beside", "objective", *(f"`{policy}`" for policy in (FIFO, PRIORITY, HERALD))], body)]


def compared(row):
    if row is None:
        return "-"
    return f"{row['p99_ms'] / row['solo_p99_ms']:.1f}x, {row['attainment_percent']:.1f} %, {row['be_share']:.2f}"


def told(rows):
    if not rows:
        return "not measured"
    row = best(rows)
    return f"{row['be_share']:.2f}, {row['mode']} ({row['attainment_queued_percent']:.0f} %)" if row else "none keeps it"


def cell(row):
    if row is None:
        return "-"
    share = f"{row['be_share']:.2f}" if keeps(row) else f"({row['be_share']:.2f})"
    least, most = row.get("of_runs", {}).get("be_share", (None, None))
    extremes = f" [{least:.2f} to {most:.2f}]" if least is not None else ""
    return f"{row['attainment_percent']:.1f}, {share}{extremes}"
