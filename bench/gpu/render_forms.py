"""The section of `docs/results.md` on kernels in their transformed forms."""

from common import merge_rows
from markdown import made_with, number, table

FLAG_MASK = 3  # The shim's flag has four words: `core/preempt/src/gate.rs`.
LONG_US = 100  # Shorter kernels are left out of the mean cost.
SLICE_BOUND_US = 31.6  # As `native/forms.cpp`: the policy's bound.


def section(content, notes):
    """The section's lines."""
    lines = ["## Kernels in their transformed forms", ""]
    lines += made_with(content["machine"], "forms")
    lines += [
        (
            "Each form against the original. Flag down, eight slices: GPU time over the original's. Turnaround: from before "
            "the flag is raised until the stream is seen idle; the flag has four words, raised by one batch of writes. "
            f"In the bound: the fewest slices of the sub-grid form that take at most {SLICE_BOUND_US} us each, and their cost. "
            "Right: results bit-equal and every block run exactly once, with the flag down, in slices, and preempted and relaunched."
        ),
        "",
    ]
    rows = []
    for row in content["kernels"]:
        for form in row["forms"]:
            made = row.get("made", content["machine"])
            rows.append(form_cells(row, form, f"`{made['commit']}`", notes))
    header = ["kernel", "form", "commit", "blocks", "us a block", "flag down", "eight slices", "in the bound"]
    lines += table([*header, "turnaround p50 us", "p99 us", "right"], rows)
    lines += mean_costs(content["kernels"])
    refused = sorted(
        (name, why, form)
        for form, rewritten in content["rewritten"].items()
        for name, why in rewritten["refused"].items()
    )
    lines += ["Refused: " + "; ".join(f"`{name}` ({form}: {why})" for name, why, form in refused) + ".", ""]
    return lines + fact_tables(content.get("facts", {}))


def mean_costs(kernels):
    """What the preemptible form costs long kernels."""
    costs = {}
    for row in kernels:
        for form in row["forms"]:
            if "prelude" in form["form"] and row.get("original_us", 0) > LONG_US and form["load"] == "CUDA_SUCCESS":
                costs.setdefault(form["form"], []).append(form[f"flag_off_percent_mask_{FLAG_MASK}"])
    means = [f"{sum(all_) / len(all_):+.1f} % ({form}, {len(all_)} kernels)" for form, all_ in costs.items()]
    return [f"Flag down, mean over kernels of more than {LONG_US} us: {'; '.join(means)}.", ""] if means else []


def merged(old, new):
    """Kernels and facts measured anew replace the old ones; the others keep where they are from."""
    for content in (old, new):
        for row in content["kernels"]:
            row.setdefault("made", {key: content["machine"].get(key) for key in ("device", "commit", "date")})
    return {
        **new,
        "rewritten": {**old["rewritten"], **new["rewritten"]},
        "kernels": merge_rows(old["kernels"], new["kernels"], ("kernel",)),
        "facts": {**old.get("facts", {}), **new.get("facts", {})},
    }


def in_bound(form):
    """Slices within the bound, and their cost."""
    if "slices_in_bound" not in form:
        return ""
    if form["slice_us"] > SLICE_BOUND_US:
        return "none"
    return f"{form['slices_in_bound']}: {form['slices_in_bound_percent']:+.1f} %"


def form_cells(row, form, made, notes):
    """One kernel in one form."""
    if form["load"] != "CUDA_SUCCESS":
        mark = notes.mark(f"{row['kernel']}, {form['form']}: the driver answers {form['load']}.")
        return [row["kernel"], form["form"], made, row["blocks"], number(row["block_us"], 1), *[""] * 5, "no" + mark]
    series = form.get("preempted", [])
    broken = [key for key in form if key.endswith(("_equal", "_once", "_no_notice")) and not form[key]]
    broken += [f"{key} when preempted" for s in series for key in ("equal", "once", "complete") if not s[key]]
    right = "yes" if not broken else "no" + notes.mark(f"{row['kernel']}, {form['form']}: not {', '.join(broken)}.")
    shown = [s for s in series if s["flag_mask"] == FLAG_MASK and s["raised_by"] == "writes"] or series
    # Of slices: from the gate's closing on; in as many as the shim makes, where that was measured.
    held = "in_use" if "slices_in_use" in form else "held"
    times = {q: shown[0][f"turnaround_{q}_us"] if shown else form.get(f"{held}_turnaround_{q}_us") for q in ("p50", "p99")}
    p50, p99 = (number(times[q], 0) for q in ("p50", "p99"))
    if shown and shown[0]["flag_mask"] != FLAG_MASK:
        p99 += notes.mark(f"{row['kernel']}: its flag had {shown[0]['flag_mask'] + 1} word(s) for the turnaround.")
    down = form.get(f"flag_off_percent_mask_{FLAG_MASK}", form.get("whole_percent"))
    cells = [row["kernel"], form["form"], made, row["blocks"], number(row["block_us"], 1)]
    # Adding 0 makes 0 of -0.
    cells += [f"{round(value, 1) + 0:+.1f} %" for value in (down, form["slices_8_percent"])]
    return [*cells, in_bound(form), p50, p99, right]


def fact_tables(facts):
    """What the driver allows; a fact that could not be read is left out."""
    lines = []
    if "words_1" in (raised := facts.get("raise", {})):
        lines += ["### Raising a flag on an idle GPU", ""]
        rows = [
            [name.replace("words_", "batch of writes, words: ").replace("copy_of_", "one copy, words: ")]
            + [number(row.get(key)) for key in ("host_p50_us", "all_seen_p50_us", "all_seen_p99_us")]
            for name, row in raised.items()
        ]
        lines += table(["by", "call p50 us", "all words seen p50 us", "p99 us"], rows)
    if "nothing" in (costs := facts.get("wait-cost", {})):
        lines += ["### What a wait between two kernels costs", ""]
        plain = costs["nothing"]["us_a_kernel"]
        names = {"wait_device": "a device word is waited for", "wait_host": "a host-mapped word is waited for"}
        names |= {"write_host": "a host-mapped word is written"}
        rows = [[names[n], f"{costs[n]['us_a_kernel'] - plain:+.1f}"] for n in names if n in costs]
        lines += table(["between two kernels", "us of GPU time"], rows)
    busy = {n: r for n, r in facts.get("while-busy", {}).items() if isinstance(r, dict)}
    if busy:
        lines += ["### Calls while a kernel runs", ""]
        rows = [[f"`{n}`", number(r["us"], 0), "yes" if r["waited"] else "no"] for n, r in busy.items()]
        lines += table(["call", "us", "waits for the kernel"], rows)
    held = {n: r for n, r in facts.get("while-held", {}).items() if isinstance(r, dict)}
    if held:
        lines += ["### Other threads' calls while one waits for a held stream", ""]
        lines += [
            (
                "A stream is held for 300 ms and a second thread is in the call named. A third thread's first call, in another "
                "stream: until a launch returned, or until a write to memory took effect."
            ),
            "",
        ]
        lines += table(["second thread in", "third thread's first call", "ms"], [held_cells(*i) for i in held.items()])
    return lines


def held_cells(name, row):
    us = {step["call"]: step["us"] for step in row["steps"]}
    call, write = name.removesuffix("_writes_first"), "cuStreamWriteValue32"
    if call == name:
        return [f"`{call}`", "launch", number(us["launch"] / 1e3, 1)]
    return [f"`{call}`", "write", number((us[write] + us["seen"]) / 1e3, 1)]
