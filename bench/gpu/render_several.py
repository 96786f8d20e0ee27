"""The section of `docs/results.md` on several best-effort programs at once."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Several best-effort programs", ""]
    text += made_with(content["machine"], "several")
    text += [
        (
            f"`{content['hp']}` at load {content['load']} beside two programs `{content['be']}` that started at the same time, in `timeslice`. "
            "Speeds are both trainings' together, over that of one alone."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        alone, together = row["alone_ms"], row["together_ms"]
        one = row["alone_steps_per_s"]
        rows.append(
            [
                row["policy"],
                "/".join(str(us) for us in row["slices_us"].values()),
                row["slice_left_alone_us"],
                max(row["ready_s"].values()),
                f"{alone['p50']:.3f} / {alone['p99']:.3f}",
                *(f"{together[q]:.3f}" for q in ("p50", "p90", "p99")),
                f"{sum(row['together_steps_per_s']) / one:.2f}",
                f"{sum(row['without_requests_steps_per_s']) / one:.2f}",
            ]
        )
    header = ["policy", "slices us", "of the last us", "ready after s", "alone p50 / p99 ms", "p50 ms", "p90 ms", "p99 ms"]
    return text + table([*header, "both trainings", "without requests"], rows)
