#!/usr/bin/env python3
"""Assembles the PTX files here into the cubins that the tests read: our own code, compiled.
Two of them are linked, by the `nvlink` beside that `ptxas`.

    TALLY_PTXAS=/path/to/ptxas core/rewriter/tests/cubins/make.py
"""

import os
import pathlib
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PTXAS = os.environ["TALLY_PTXAS"]
# Source, architectures, further arguments, suffix of the result's name.
RECIPES = (
    ("ordinary", ("80", "86", "89", "90", "90a"), [], ""),
    ("globals", ("80", "90"), [], ""),
    ("cluster", ("90",), [], ""),
    ("registers", ("90a",), [], ""),
    ("index", ("80", "86", "89", "90"), [], ""),
    ("numbers", ("90",), [], ""),
    ("cluster", ("100", "120"), [], ""),
    ("cluster", ("90",), ["-c"], ".object"),
)


def assemble(name, arch, arguments, out):
    version = "8.7" if int(arch.rstrip("a")) >= 100 else "8.0"
    source = (HERE / f"{name}.ptx").read_text()
    source = source.replace("TARGET", f"sm_{arch}").replace("version 8.0", f"version {version}")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(source)
        file.flush()
        subprocess.run([PTXAS, f"-arch=sm_{arch}", *arguments, file.name, "-o", str(out)], check=True)


for name, architectures, arguments, suffix in RECIPES:
    for arch in architectures:
        assemble(name, arch, arguments, HERE / f"{name}.{arch}{suffix}.cubin")
with tempfile.TemporaryDirectory() as folder:
    parts = [pathlib.Path(folder, f"{name}.cubin") for name in ("linked_a", "linked_b")]
    for part in parts:
        assemble(part.stem, "90", ["-c"], part)
    nvlink = pathlib.Path(PTXAS).with_name("nvlink")
    subprocess.run([nvlink, "-arch=sm_90", *parts, "-o", str(HERE / "linked.90.cubin")], check=True)
