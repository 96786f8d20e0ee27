"""The section of `docs/results.md` on driver calls that wait for other streams."""

STATES = {
    "a_waits": "a stream waits for a word",
    "a_runs": "a kernel waits for a word",
    "a_runs_and_waits": "a kernel, and its stream behind it",
}


def told(row):
    """What a case came to."""
    if row is None:
        return ""
    if "error" in row:
        return "error"
    if row.get("hung"):
        return "**for good**"
    if not row["waits"]:
        return "no"
    # The calls had returned: what they launched waits. (Rows of `ab1e461107e3` and before do not tell.)
    return "**waits** on the GPU" if row.get("issued_ms", row["ms"]) < row["ms"] / 2 else "**waits**"


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## Which driver calls wait for other streams", ""]
    text += made_with(content["machine"], "waits")
    text += [
        "One call, and a wait for its own stream, while another stream of the context is held up for 1.5 s: what takes as long has waited for it. "
        "Each in a process of its own; kernels are loaded when first needed unless it says otherwise.",
        "",
    ]
    found = {(row["loading"], row["action"], row["beside"], row["state"]): row for row in content["rows"]}
    kinds = list(dict.fromkeys(key[:3] for key in found))
    rows = []
    for loading, action, beside in kinds:
        name = action.replace("_", " ")
        name += f", another thread: {beside.replace('_', ' ')}" if beside else ""
        name += ", all kernels loaded at once" if loading == "EAGER" else ""
        rows.append([name, *(told(found.get((loading, action, beside, state))) for state in STATES)])
    return text + table(["call", *STATES.values()], rows)
