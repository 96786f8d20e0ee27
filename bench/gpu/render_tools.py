"""The section of `docs/results.md` on developer tools, and on programs that work together across processes."""

from common import merge_rows


def merged(old, new):
    """The rows of an earlier run, each with its machine, but for those that ran again."""
    earlier = [{"machine": old["machine"], **row} for row in old["rows"]]
    shown = {row["row"] for row in earlier if row["outcome"] == "same"}
    # What one GPU cannot show may have been shown on two.
    ran = [row for row in new["rows"] if not row["outcome"].endswith("not run") or row["row"] not in shown]
    return {**new, "rows": merge_rows(earlier, ran, ("row",))}


def found(row):
    """What the tool found, in words."""
    words = []
    for key, value in row["tally"]["found"].items():
        if value is None or value is False or value == []:
            continue
        told = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)
        words.append(f"{key} {told}".strip().replace("_", " "))
    return "; ".join(words)


def cells(row, notes):
    """One line of the table."""
    outcome = row["outcome"]
    if "tally" not in row:
        return [row["shows"], row["sharing"], short(outcome, row, notes), "", "", "", "", ""]
    if outcome == "differs":
        outcome = "**no**" + notes.mark(f"{row['shows']}, {row['sharing']}: {'; '.join(row['problems'])}.")
    elif outcome == "same":
        outcome = "yes"
    else:
        outcome = short(outcome, row, notes)
    who = row["client"]
    why = ", ".join(reason or "–" for reason in who["whole_because"])
    exits = "/".join("hung" if code is None else str(code) for code in row["tally"]["exits"])
    launches = f"{who['launches_held']} of {who['launches']}"
    return [row["shows"], row["sharing"], outcome, exits, found(row), why, launches, who["in_forms"]]


def short(outcome, row, notes):
    """What a row came to that shows nothing; its details in a footnote."""
    word, colon, rest = outcome.partition(": ")
    if not colon or outcome.startswith("one GPU"):
        return outcome
    return word + notes.mark(f"{row['shows']}, {row['sharing']}: {word}: {' '.join(rest.split())[:300]}")


def lines(content, notes, table, made_with):
    """The section's lines."""
    text = ["## Developer tools, and programs that work together", ""]
    text += made_with(content["machine"], "tools")
    text += [
        "Each program runs bare and as a best-effort client beside a high-priority program that has the GPU half of the time. "
        "*As bare*: the same exit status, the same values, and the tool found the same. *Held*: launches that the policy held at "
        "least once. What a tool does not do bare is not compared.",
        "",
    ]
    header = ["program", "sharing", "as bare", "exit", "found", "launches go whole because", "held", "in other forms"]
    rows = []
    for row in content["rows"]:
        name, *others = cells(row, notes)
        machine = row.get("machine", content["machine"])
        if machine != content["machine"]:
            name += notes.mark(f"On {machine['device']}, commit `{machine['commit']}`, {machine['date']}.")
        rows.append([name, *others])
    return text + table(header, rows)
