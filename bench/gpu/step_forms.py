"""Kernels in their transformed forms, against the originals: results, cost, turnaround. Needs no core.

Every kernel of `native/transformed_kernels.cu` stands for something that could break. It is
compiled to machine code and to PTX, both rewritten by the bundle's `tally-rewrite`, and
each form compared with the original by `native/forms.cpp`: bit-equal results, every
block once, the cost with the flag down, in slices and of blocks that do not run, and
the turnaround of a preemption for flags of 1, 16 and 128 words. `native/forms_facts.cpp`
then asks the driver what the launch layer relies on.
"""

import concurrent.futures
import json
import shutil
import subprocess

from common import HERE, Failures, clean_environment, compile_program, first_line, step_main

KERNELS = (
    "vecadd", "matmul", "reduce", "recursion", "spin", "lookback", "globals",
    "cluster_fixed", "cluster_launched", "bulk_copy", "reconfigure",
)  # fmt: skip
# Architectures whose machine code can be patched; others have PTX only.
PATCHED = (80, 86, 89, 90)
SINCE_90 = {"cluster_fixed", "cluster_launched", "bulk_copy"}
ONLY_90A = {"reconfigure"}
# Refused as machine code, since a second copy of the image has its own variables.
REFUSED = {"globals"}
FACTS = ("wait-streams", "wait-cost", "green", "while-busy", "while-held", "raise")
# Ends a series that hangs; a kernel takes about 5 s.
KERNEL_LIMIT_S, FACT_LIMIT_S = 40, 25
MUST_HOLD = (
    "flag_off_equal", "flag_off_once", "flag_off_no_notice", "slices_8_equal", "slices_8_once",
    "whole_equal", "whole_once", "held_equal", "held_once", "held_8_equal", "held_8_once",
    "in_use_equal", "in_use_once",
)  # fmt: skip

# Turnaround p99 promised of blocks shorter than so long, us, in the form that the shim gives a launch
# that is to be preemptible: slices by offset, where there are some, of blocks that take longer to exit
# than half of the kernel to run.
PROMISED_US = ((20, 60), (60, 150))
WHOLE_GRID_MAX, EXIT_NS, FLAG_MASK = 8 * 1024, 2, 3


def call(command, limit_s):
    """Output and exit status of a program, 124 if it was ended."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=limit_s, env=clean_environment()
        )
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else "", "ended: too slow", 124
    return done.stdout, done.stderr, done.returncode


def compile_kernels(suite, target, kind):
    """The kernels as `cubin` or `ptx`; the path."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    path = suite.work / f"transformed_kernels.{kind}"
    source = HERE / "native" / "transformed_kernels.cu"
    _, errors, code = call([nvcc, f"-arch=sm_{target}", f"-{kind}", "-o", str(path), str(source)], 120)
    if code:
        raise RuntimeError(f"compiling transformed_kernels.cu to {kind} failed: {errors[-2000:]}")
    return path


def rewrite(suite, image, form, arch):
    """A transformed form of an image: its path, parameters by kernel, reasons by refused kernel, the error."""
    path = image.with_name(f"{form}-{image.suffix[1:]}.out")
    command = [suite.program("tally-rewrite"), "rewrite", str(image), "-o", str(path), "--form", form, "--arch", str(arch)]
    output, errors, code = call(command, 60)
    transformed, refused = {}, {}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "transformed":
            name, parameters, *_ = rest.split()
            transformed[name] = int(parameters)
        elif word == "refused":
            name, _, why = rest.partition(": ")
            refused[name] = why
    return {"path": path, "transformed": transformed, "refused": refused, "error": errors.strip().splitlines()[0] if code else None}


def turnaround_in_use(row, code):
    """Turnaround p99, us, of a preemptible launch of `code` (sass, ptx); None if it was not measured."""
    forms = {form["form"]: form for form in row["forms"]}
    by_offset = forms.get(f"{code} sub-grid")
    is_short = row["blocks"] > WHOLE_GRID_MAX and row["blocks"] * EXIT_NS / 1e3 > row["original_us"] / 2
    if is_short and by_offset:
        return by_offset.get("in_use_turnaround_p99_us")
    series = forms.get(f"{code} prelude", {}).get("preempted", [])
    return next((s["turnaround_p99_us"] for s in series if s["flag_mask"] == FLAG_MASK), None)


def check_row(name, row, failures):
    """Whatever must hold of a kernel's measurements."""
    promised = next((most for block_us, most in PROMISED_US if row.get("block_us", 1e9) < block_us), None)
    for code in ("sass", "ptx"):
        us = turnaround_in_use(row, code)
        is_transformed = any(form["form"] == f"{code} prelude" for form in row["forms"])
        if promised and is_transformed and us is None:
            failures.add(f"{name} ({code}): turnaround not measured in the form that the shim uses")
        elif promised and us is not None and us > promised:
            failures.add(f"{name} ({code}): turnaround p99 {us} us, promised <= {promised} us")
    for form in row["forms"]:
        where = f"{name} ({form['form']})"
        if form["load"] != "CUDA_SUCCESS":
            failures.add(f"{where}: {form['load']}")
            continue
        for key in ("held_times", "held_8_times", "in_use_times"):
            if form.get(key, 1) == 0:
                failures.add(f"{where}: {key} is 0: all was over before the gate was closed")
        for key in MUST_HOLD:
            if not form.get(key, True):
                failures.add(f"{where}: {key} is false")
        for series in form.get("preempted", []):
            broken = [key for key in ("equal", "once", "complete") if not series[key]]
            if broken:
                failures.add(f"{where}, mask {series['flag_mask']}: not {', '.join(broken)}")


def main(suite):
    """Transformed forms of kernels against the originals, and what the driver allows."""
    capability = first_line(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or "9.0"
    arch = int(capability.replace(".", ""))
    target = "90a" if arch == 90 else str(arch)
    failures = Failures()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {name: pool.submit(compile_program, suite, f"{name}.cpp", name) for name in ("forms", "forms_facts")}
        images = {kind: pool.submit(compile_kernels, suite, target, kind) for kind in ("cubin", "ptx")}
        programs = {name: future.result() for name, future in programs.items()}
        images = {kind: future.result() for kind, future in images.items()}
    forms = {"ptx prelude": rewrite(suite, images["ptx"], "by-claims", arch)}
    forms["ptx sub-grid"] = rewrite(suite, images["ptx"], "by-offset", arch)
    if arch in PATCHED:
        forms = {
            "sass prelude": rewrite(suite, images["cubin"], "by-claims", arch),
            "sass sub-grid": rewrite(suite, images["cubin"], "by-offset", arch),
            **forms,
        }
    for name, form in forms.items():
        print(f"{name}: {len(form['transformed'])} transformed, refused {form['refused']}, error {form['error']}", flush=True)
        if form["error"]:
            failures.add(f"{name}: {form['error']}")
    rows, facts = [], {}
    result = {"arch": arch, "rewritten": {n: {k: f[k] for k in ("refused", "error")} for n, f in forms.items()}}
    for name in suite.args.kernels or KERNELS:
        if (name in SINCE_90 and arch < 90) or (name in ONLY_90A and arch != 90):
            continue
        words = [f"{form}={f['path']}:{f['transformed'][name]}" for form, f in forms.items() if name in f["transformed"]]
        sass = forms.get("sass prelude")
        if sass and not sass["error"] and (name in sass["refused"]) != (name in REFUSED):
            failures.add(f"{name} (machine code): refused {sass['refused'].get(name)}")
        output, errors, code = call([programs["forms"], name, str(images["cubin"]), *words], KERNEL_LIMIT_S)
        if code:
            failures.add(f"{name}: exit {code}: {errors.strip()[-400:]}")
            continue
        row = json.loads(output)
        check_row(name, row, failures)
        rows.append(row)
        print(json.dumps(row), flush=True)
        suite.write("forms.json", {**result, "kernels": rows, "facts": facts})
    if "sass prelude" in forms:
        for fact in suite.args.facts:
            command = [programs["forms_facts"], fact, str(images["cubin"]), str(forms["sass prelude"]["path"])]
            output, errors, code = call(command, FACT_LIMIT_S)
            facts[fact] = json.loads(output) if code == 0 else {"exit": code, "error": errors.strip()[-400:]}
            print(fact, json.dumps(facts[fact]), flush=True)
            if code:
                failures.add(f"{fact}: exit {code}")
            suite.write("forms.json", {**result, "kernels": rows, "facts": facts})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--kernels", nargs="*", choices=KERNELS)
    parser.add_argument("--facts", nargs="*", choices=FACTS, default=FACTS)


if __name__ == "__main__":
    step_main("forms", main, add_arguments)
