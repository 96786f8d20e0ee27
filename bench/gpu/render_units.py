"""The section of `docs/results.md` on units of work."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Units of work", "", *made_with(content["machine"], "units")]
    text += [
        (
            "Requests that a server counts and times itself, against what the core says of them: told by the program's launches and waits (activity), or by "
            "NVTX marks. With two buffers the next request is launched before the last is waited for. Tokens are graph launches of a decode loop. "
            "Of a profiled unit the core also tells the launches, their time on the GPU, and the SMs that they fill, against CUPTI's."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        times = [f"{row[key]:.3f} / {row['own'][key]:.3f}" for key in ("p50_ms", "p99_ms")]
        rows.append([row["kind"], row["source"], row["buffers"], f"{row['requests']} / {row['own']['units']}", *times, *profile(row)])
    header = ["program", "told by", "buffers", "units, core / program", "p50 ms", "p99 ms"]
    return text + table([*header, "launches, core / CUPTI", "GPU ms, core / CUPTI", "SMs"], rows)


def profile(row):
    """Of a row with a profiled unit: launches, GPU time, SMs."""
    told, own = row.get("profile"), row["own"]
    if not told:
        return ["", "", ""]
    return [f"{told['launches']} / {own['launches']}", f"{told['gpu_busy_ms']:.3f} / {own['gpu_busy_ms']:.3f}", told["sms_max"]]
