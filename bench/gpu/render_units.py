"""The section of `docs/results.md` on units of work."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Units of work", "", *made_with(content["machine"], "units")]
    text += [
        (
            "Requests that a server counts and times itself, against what the core says of them: told by the program's launches and waits (activity), or by "
            "NVTX marks. With two buffers the next request is launched before the last is waited for. Tokens are graph launches of a decode loop."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        times = [f"{row[key]:.3f} / {row['own'][key]:.3f}" for key in ("p50_ms", "p99_ms")]
        rows.append([row["kind"], row["source"], row["buffers"], f"{row['requests']} / {row['own']['units']}", *times])
    return text + table(["program", "told by", "buffers", "units, core / program", "p50 ms", "p99 ms"], rows)
