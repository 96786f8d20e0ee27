#!/usr/bin/env python3
"""Assembles the PTX files here into the cubins that the tests read: our own code, compiled.

    TALLY_PTXAS=/path/to/ptxas core/kernels/tests/cubins/make.py
"""

import os
import pathlib
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Source, architectures, further arguments, suffix of the result's name.
RECIPES = (
    ("ordinary", ("80", "86", "89", "90", "90a"), [], ""),
    ("globals", ("80", "90"), [], ""),
    ("cluster", ("90",), [], ""),
    ("registers", ("90a",), [], ""),
    ("cluster", ("100", "120"), [], ""),
    ("cluster", ("90",), ["-c"], ".object"),
)
for name, architectures, arguments, suffix in RECIPES:
    for arch in architectures:
        version = "8.7" if int(arch.rstrip("a")) >= 100 else "8.0"
        source = (HERE / f"{name}.ptx").read_text().replace("TARGET", f"sm_{arch}").replace("version 8.0", f"version {version}")
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(source)
            file.flush()
            out = HERE / f"{name}.{arch}{suffix}.cubin"
            subprocess.run([os.environ["TALLY_PTXAS"], f"-arch=sm_{arch}", *arguments, file.name, "-o", str(out)], check=True)
