"""The section of `docs/results.md` on objectives: best-effort share over the objective, way by way."""

KEY = ("hp", "be", "mode", "policy", "slo_over_p99", "load", "device")
TARGET_PERCENT = 99.0


def lines(rows, table, made_of):
    """The section's lines."""
    text = ["## Objectives", "", "Command: `bench/gpu/run.sh --bundle DIR --out DIR frontier`. Rows: `results/frontier.json`.", ""]
    text += [
        (
            "A service with Poisson arrivals beside a training. The objective is a multiple of the service's p99 with the GPU to itself. Attainment is "
            f"the share of requests whose service time keeps it; a share in brackets is of a way that does not keep it in {TARGET_PERCENT:g} %. "
            "Only `slo-herald` knows the objective."
        ),
        "",
    ]
    for hp, be, load, device in dict.fromkeys((row["hp"], row["be"], row["load"], row["device"]) for row in rows):
        of_pair = [row for row in rows if (row["hp"], row["be"], row["load"], row["device"]) == (hp, be, load, device)]
        factors = sorted({row["slo_over_p99"] for row in of_pair})
        text += [f"`{hp}` beside `{be}`, load {load:g}, {device}, {made_of(of_pair)}:", ""]
        body = []
        for way in dict.fromkeys((row["mode"], row["policy"]) for row in of_pair):
            by_factor = {row["slo_over_p99"]: row for row in of_pair if (row["mode"], row["policy"]) == way}
            body.append([way[0], way[1], *(cell(by_factor.get(factor)) for factor in factors)])
        text += table(["way", "policy", *(f"{factor:g}x: attainment %, share" for factor in factors)], body)
    return text


def cell(row):
    if row is None:
        return "-"
    share = f"{row['be_share']:.2f}"
    kept = row["attainment_percent"] >= TARGET_PERCENT
    return f"{row['attainment_percent']:.1f}, {share if kept else f'({share})'}"
