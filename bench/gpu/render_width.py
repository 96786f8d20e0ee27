"""The section of `docs/results.md` on what a width costs."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## What a width costs", ""]
    text += made_with(content["machine"], "width")
    text += [
        "Trainings alone in `mps`: every launch that can be on some of the SMs is, each as decided, or most leased, with a width (`widths.set`). *Put off*: `sm_limits.put_off_joins`. *Over all SMs*: of the speed with all launches whole, in the same process and round; median, least and most of the rounds. *Stream waits*: how long the GPU has nothing of a stream's to do before a launch that goes to some of the SMs, as the core tells (`sm_limit_us_p50`); medians of the rounds.",
        "",
    ]
    if content.get("note"):
        text += [content["note"], ""]
    rows = []
    for row in content["rows"]:
        least, most = row["over_all_sms_of_rounds"]
        over = f"{row['over_all_sms']:.3f} ({least:.3f}, {most:.3f})" if row["sms"] else ""
        counts = [row["launches"], row["sm_limited"], row["sm_limited_consecutive"]]
        cost_us = row.get("sm_limit_us_p50")
        how = ["leased"] * row["leased"] + ["put off"] * row["put_off_joins"]
        rows.append([row["job"], row["sms"] or "all", ", ".join(how), f"{row['steps_per_s']:.2f}", over, *counts, f"{cost_us:.1f}" if cost_us else ""])
    header = ["training", "SMs", "how", "steps/s", "over all SMs", "launches", "on some of the SMs", "directly behind another", "stream waits, p50 us"]
    text += table(header, rows)
    if not content["changes"]:
        return text
    text += ["While the width changes after at most 2 ms, and launches that are decided get another one: how long the GPU was idle between two kernels, by CUPTI, also for the program's CPU. *Stream waits*: as above, over the latest 255 changes that the core timed, which leaves out launches that came after the GPU had ended all before them.", ""]
    changes = [[row["job"], *gaps(row["changed"]), *gaps(row["same"]), *waits(row.get("timed"))] for row in content["changes"]]
    header = ["training", "changes of SMs", "idle then: p50 / p95 / p99 us", "other kernels", "idle before: p50 / p95 / p99 us", "timed", "stream waits: p50 / p99 us"]
    return text + table(header, changes)


def gaps(of):
    return of["count"], "-" if not of["count"] else " / ".join(f"{of[key]:.1f}" for key in ("p50_us", "p95_us", "p99_us"))


def waits(timed):
    """How many changes were timed, and how long streams waited."""
    return ("", "") if timed is None else (timed["count"], f"{timed['p50_us']:.1f} / {timed['p99_us']:.1f}")
