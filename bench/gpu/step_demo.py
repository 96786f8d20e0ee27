"""Runs the bundle's demo programs (`bin/demo*`), if there are any; what they print is in the log."""

import os
import subprocess

from common import clean_environment, step_main


def main(suite):
    """Run every bin/demo* once."""
    failures, lengths = [], []
    if suite.args.seconds:
        lengths = ["--seconds", str(suite.args.seconds)]
    demos = [p for p in sorted((suite.bundle / "bin").glob("demo*")) if os.access(p, os.X_OK) and p.is_file()]
    if not demos:
        print("the bundle has no bin/demo*: nothing to run")
    for demo in demos:
        try:
            done = subprocess.run(
                [demo, *lengths], check=False, timeout=suite.args.limit_s, env=clean_environment(), cwd=suite.bundle
            )
        except subprocess.TimeoutExpired:
            failures.append(f"{demo.name} did not end in {suite.args.limit_s} s")
            continue
        if done.returncode:
            failures.append(f"{demo.name} ended with {done.returncode}")
    return failures


def add_arguments(parser):
    parser.add_argument("--limit-s", type=float, default=180)
    parser.add_argument("--seconds", type=float, help="length of each of its measurements")


if __name__ == "__main__":
    step_main("demo", main, add_arguments)
