"""The section of `docs/results.md` on what operations behind a kernel cost, and whom they hold up."""

NAMES = {"nothing": "nothing", "untimed_event": "event without timing", "timed_event": "event with timing", "write": "write of a word"}


def lines(content, table, made_with):
    """The section's lines."""
    text = ["## What an operation behind a kernel costs and holds up", ""]
    text += made_with(content["machine"], "streams")
    text += [
        "Empty kernels in a row, each with the operation behind it. *Held up*: whether another stream, or one of 16, waits for a kernel "
        "that runs and has the operation behind it. *Launches*: how many a stream takes behind a wait before a call is held up.",
        "",
    ]
    rows = []
    for row in content["rows"]:
        if "error" in row:
            rows.append([row["connections"], "error", "", "", "", "", ""])
            continue
        for key, name in NAMES.items():
            found = row["operations"][key]
            held = ["yes" if found[f"holds_up_{which}"] else "no" for which in ("one", "many")]
            rows.append([row["connections"], name, f"{found['us']:.2f}", f"{found['issued_us']:.2f}", *held, found["launches_before_one_is_held_up"] or "more"])
    text += table(["queues", "behind each kernel", "us a kernel", "us of calls", "one held up", "any of 16 held up", "launches"], rows)
    captured = next((row["captures"] for row in content["rows"] if "captures" in row), {})
    if not captured:
        return text
    text += ["Calls of another thread, in its mode, while a thread captures in global mode: their results, and the capture's.", ""]
    return text + table(["call, mode", "result", "capture's end"], [[name, found["call"], found["end"]] for name, found in captured.items()])
