"""Ways to learn that a kernel has finished: cost on the GPU and on the host. Needs no core."""

import json
import subprocess

from common import clean_environment, compile_program, step_main


def main(suite):
    """Cost of completion tracking, without any part of Tally."""
    program = compile_program(suite, "memops.cu", "memops")
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60, env=clean_environment())
    if done.returncode:
        return [f"memops ended with {done.returncode}: {done.stderr[-800:]}"]
    result = json.loads(done.stdout)
    for row in result["per_kernel"] + result["seen_done"]:
        print(row, flush=True)
    content = suite.read("latency.json")
    content.pop("machine", None)
    suite.write("latency.json", {**content, "memops": {"machine": suite.machine, **result}})
    return []


if __name__ == "__main__":
    step_main("memops", main)
