"""The section of `docs/results.md` on a language model's decode service."""

KEY = ("service", "trace", "layers", "beside", "mode", "policy", "load", "device")


def lines(rows, table, made_of):
    """The section's lines."""
    text = ["## Decode service", "", "Command: `bench/gpu/run.sh --bundle DIR --out DIR decode`. Rows: `results/decode.json`.", ""]
    text += [
        (
            "A decode service of Llama-3.1-8B's shape (random weights, paged KV cache, continuous batching up to 16, a CUDA graph for each batch size) replays "
            "requests of the Azure LLM inference trace beside best-effort work. Load `full` is a backlog; `half` keeps the service, alone, busy half of the time; "
            "`0.5` asks for half of the tokens a second that it makes alone under `full`. *Violations* are decode steps that take longer than the target, a multiple of the p95 step with the GPU to itself. "
            "*Gaps* are times between two tokens of one request, with prefills in between. The best-effort share is the rate over the rate alone without a core; "
            "*of its own* is over the rate that this process has alone in that mode. *Kept by the core*: tokens that kept the target, as the core counted them."
        ),
        "",
    ]
    groups = dict.fromkeys(tuple(row[key] for key in ("service", "trace", "layers", "device")) for row in rows)
    for group in groups:
        of_group = [row for row in rows if tuple(row[key] for key in ("service", "trace", "layers", "device")) == group]
        service, trace, layers, device = group
        text += [f"`{service}` of {layers} layers, trace `{trace}`, {device}, {made_of(of_group)}:", ""]
        header = ["mode", "policy", "beside", "load", "target ms", "violations %", "gaps over the target %", "step p50 / p95 / p99 ms", "tokens/s over solo"]
        text += table([*header, "mean batch", "best-effort share", "kept by the core %", "same tokens"], [cells(row) for row in of_group])
    return text


def cells(row):
    share = "" if row.get("be_share") is None else f"{row['be_share']:.2f} ({row['be_share_of_own']:.2f} of its own)"
    kept = (row.get("core") or {}).get("kept_percent")
    policy = "–" if row["policy"] == "none" else row["policy"]
    beside = row["beside"] if row["beside"] == "-" else f"`{row['beside']}`"
    return [
        row["mode"], policy, beside, row["load"], f"{row['target_ms']:.2f}", f"{row['violations_percent']:.2f}",
        f"{row['violations_gap_percent']:.2f}", " / ".join(f"{row['step_ms'][q]:.2f}" for q in ("p50", "p95", "p99")) if row["step_ms"] else "no step",
        f"{row['tokens_over_solo']:.2f}", f"{row['batch_mean']:.1f}", share, "" if kept is None else f"{kept:.2f}",
        {True: "yes", False: "no", None: ""}[row["same_tokens"]],
    ]  # fmt: skip
