"""The section of `docs/results.md` on programs that each fill the GPU in part."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Programs that fill the GPU in part", ""]
    text += made_with(content["machine"], "trainings")
    text += [
        (
            "One, two and four processes train the same at once. Sums of their rates over that of one process without a core or MPS: medians of "
            "the rounds, and their extremes. *Ungated*: all of them of high priority, so that no launch of theirs is decided."
        ),
        "",
    ]
    if content.get("note"):
        text += [content["note"], ""]
    found = {}
    for row in content["rows"]:
        # Without the base there is no ratio.
        if "over_alone" not in row:
            continue
        way = "ungated" if row["ungated"] else "none" if row["policy"] == "none" else row["policy"]
        least, most = row["over_alone_of_rounds"]
        found.setdefault((row["job"], row["mode"], way), {})[row["programs"]] = f"{row['over_alone']:.2f} ({least:.2f} to {most:.2f})"
    rows = [[f"`{job}`", mode, way, *(sums.get(n, "") for n in (1, 2, 4))] for (job, mode, way), sums in found.items()]
    return text + table(["training", "mode", "policy", "one", "two", "four"], sorted(rows))
