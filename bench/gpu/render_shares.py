"""The section of `docs/results.md` on weights and floors."""


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Weights and floors", ""]
    text += made_with(content["machine"], "shares")
    text += [
        (
            f"Two programs `{content['be']}` of weights 3 and 1 under `tally-priority`: together, and beside `{content['hp']}` at load {content['load']}, "
            "without and with a floor for the lighter one. Shares are of GPU time as the core charges it, speeds over the same training's alone: heavier / lighter."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        alone = row["alone_steps_per_s"]

        def pair(steps_per_s, shares, alone=alone):
            speeds = [f"{now / one:.2f}" for now, one in zip(steps_per_s, alone, strict=True)]
            return [" / ".join(f"{share:.2f}" for share in shares), " / ".join(speeds)]

        together = pair(row["together_steps_per_s"], row["together_shares"])
        rows.append([row["sharing"], "no requests", *together, "", ""])
        for key, what in (("without_floor", "requests"), ("with_floor", f"requests, floor {row['floor_percent']:g} %")):
            of = row[key]
            p99 = f"{of['ms']['p99'] / row['alone_ms']['p99']:.2f}"
            had = f"{row['floor']['had_percent']:.1f}" if key == "with_floor" else ""
            rows.append([row["sharing"], what, *pair(of["steps_per_s"], of["shares"]), p99, had])
    return text + table(["sharing", "beside", "shares of time", "speeds", "p99 of requests over alone", "had of its time with work, %"], rows)
