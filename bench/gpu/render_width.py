"""The section of `docs/results.md` on what a width costs."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## What a width costs", ""]
    text += made_with(content["machine"], "width")
    text += ["Trainings alone in `mps`: every launch that can be on some of the SMs is. *Put off*: `sm_limits.put_off_joins`. *Leased*: with a width (`widths.set`) and 16 leased launches behind each that is decided. *Over all SMs*: of the speed with all launches whole.", ""]
    base = {row["job"]: row["steps_per_s"] for row in content["rows"] if row["sms"] is None}
    rows = []
    for row in content["rows"]:
        over = f"{row['steps_per_s'] / base[row['job']]:.3f}" if row["job"] in base else ""
        counts = [row["launches"], row["sm_limited"], row["sm_limited_consecutive"]]
        rows.append([row["job"], row["sms"] or "all", "put off" if row["put_off_joins"] else "leased" if row.get("leased") else "", f"{row['steps_per_s']:.2f}", over, *counts])
    header = ["training", "SMs", "how", "steps/s", "over all SMs", "launches", "on some of the SMs", "directly behind another"]
    return text + table(header, rows)
