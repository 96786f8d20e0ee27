"""How figures, tables and where they are from are written in `docs/results.md`."""


def percent(ratio):
    """A ratio as a signed difference: 1.072 is `+7.2 %`."""
    if ratio is None:
        return ""
    value = (ratio - 1) * 100
    return f"{value:+.1f} %" if abs(value) < 100 else f"{value:+.0f} %"


def number(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def table(header, rows):
    """A Markdown table; the first column is left, the others are right aligned."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows] + [""]


def made_with(machine, step):
    """Where a section's figures come from and how to get them again."""
    parts = [f"{machine.get('device')}, driver {machine.get('driver')}", f"torch {machine.get('torch')}"]
    parts += [f"commit `{machine.get('commit')}`", str(machine.get("date"))]
    return [f"{', '.join(parts)}. Command: `bench/gpu/run.sh --bundle DIR --out DIR {step}`", ""]
