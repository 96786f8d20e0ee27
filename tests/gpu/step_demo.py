"""Runs the bundle's demo programs (`bin/demo*`), if there are any; what they print is in the log."""

import os
import subprocess

from common import clean_environment, step_main


def main(suite):
    """Run every bin/demo* once."""
    failures = []
    demos = [p for p in sorted((suite.bundle / "bin").glob("demo*")) if os.access(p, os.X_OK) and p.is_file()]
    if not demos:
        print("the bundle has no bin/demo*: nothing to run")
    for demo in demos:
        try:
            done = subprocess.run(
                [demo], check=False, timeout=suite.args.limit_s, env=clean_environment(), cwd=suite.bundle
            )
        except subprocess.TimeoutExpired:
            failures.append(f"{demo.name} did not end in {suite.args.limit_s} s")
            continue
        if done.returncode:
            failures.append(f"{demo.name} ended with {done.returncode}")
    return failures


if __name__ == "__main__":
    step_main("demo", main, lambda p: p.add_argument("--limit-s", type=float, default=180))
