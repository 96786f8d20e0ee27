"""The section of `docs/results.md` on transformed forms that are kept on disk."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Transformed forms kept on disk", ""]
    text += made_with(content["machine"], "kept")
    text += [content["note"], ""] if content.get("note") else []
    text += [
        (
            f"`{content['be']}` started again and again under a core in `mps`, beside an idle `{content['hp']}`, with one cache folder. Seconds from its first "
            "launch under the core; of CPU time those of the thread that rewrites."
        ),
        "",
    ]
    rows = [
        [
            row["start"],
            row["cache_mib"],
            f"{row['files']} ({row['files_bytes'] / 2**20:.0f} MiB)",
            row["kernels"],
            row["all_transformed_s"],
            row["cpu_s"].get("tally-rewrite", 0),
            row["ready_s"],
        ]
        for row in content["rows"]
    ]
    return text + table(["start", "`cache_mib`", "files after it", "kernels transformed", "last one after s", "rewriting, CPU s", "program ready after s"], rows)
