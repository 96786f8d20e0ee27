"""The section of `docs/results.md` on the two speeds of a GPU's context."""


def lines(content, table, made_with):
    """The section's lines."""
    hp, small = content["hp"], "small-kernels-graph"
    text = [f"## A GPU's two speeds{', kernels of closed libraries transformed' if content['vendor_rewrite'] else ''}", ""]
    text += made_with(content["machine"], "speeds")
    if content["vendor_rewrite"]:
        text += ["`SPEEDS_ARGS=--vendor`.", ""]
    text += [f"Medians of `{hp}` and of a graph of 300 kernels of one block. The other program is outside of MPS.", ""]
    rows = [[row["where"], row["state"], f"{row[hp]:.3f}", f"{row[small]:.3f}"] for row in content["alone"]]
    text += table(["", "when", f"{hp} ms", "small kernels ms"], rows)
    vendor = "kernels of closed libraries transformed, too" if content["vendor_rewrite"] else "those of closed libraries whole"
    text += [
        "",
        (
            f"Under `tally-priority` in `mps` beside `{content['be']}` at load {content['load']}, {vendor}; over the fast speed's median, "
            "and of the training alone in the same run."
        ),
        "",
    ]
    rows = []
    for row in content["beside"]:
        served, refreshed = row["requests_ms"], row["refreshed"] or {}
        rows.append(
            [
                # It is the default now, and was not when the first of these were measured.
                row["name"] + ("" if refreshed or "refresh" in row["name"] else ", not refreshed"),
                f"{row['ready_ms'][hp]:.3f}",
                f"{row['trained_ms'][hp]:.3f}",
                f"{served['p50']:.3f}",
                f"{served['p99']:.3f}",
                f"{row['p99_over_alone']:.2f}x",
                f"{row['be_share']:.2f}",
                row["transformed"]["sm_limited"],
                refreshed.get("count", ""),
            ]
        )
    header = ["", "alone, both ready ms", "alone, after training ms", "p50 ms", "p99 ms", "over alone", "best-effort share"]
    return text + table([*header, "on some of the SMs", "refreshed"], rows)
