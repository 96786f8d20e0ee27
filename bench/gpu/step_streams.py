"""What the shim relies on of streams: an untimed event behind a kernel costs nothing and holds nobody up.

For each number of hardware queues, what events and writes behind a kernel add to it, whether they hold up other
streams, how many launches a queue takes, what it costs to ask for an event or a stream, and which calls of another thread
spoil a capture. Needs no core.
"""

import json
import pathlib
import subprocess
import sys

from common import Failures, clean_environment, step_main
from step_shim import driver

JOB = pathlib.Path(__file__).with_name("stream_job.py")
LIMIT_S = 60
CONNECTIONS = (1, 2, 8, 32)


def run(connections):
    """The row of so many hardware queues."""
    env = clean_environment(CUDA_DEVICE_MAX_CONNECTIONS=str(connections))
    command = [sys.executable, str(JOB), "--driver", str(driver())]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    if done.returncode:
        return {"connections": connections, "error": done.stderr[-300:]}
    return {"connections": connections, **json.loads(done.stdout)}


def judge(row):
    """What of a row is not as the shim takes it to be."""
    if "error" in row:
        return [row["error"]]
    nothing, event = (row["operations"][name] for name in ("nothing", "untimed_event"))
    wrong = []
    for key in ("holds_up_one", "holds_up_many", "launches_before_one_is_held_up"):
        if event[key] != nothing[key]:
            wrong.append(f"{key}: {event[key]} with an untimed event, {nothing[key]} without")
    if event["us"] > nothing["us"] * 1.25 + 0.5:
        wrong.append(f"a kernel takes {event['us']:.2f} us with an untimed event, {nothing['us']:.2f} without")
    for call, found in row["captures"].items():
        if call.endswith("relaxed") and found["end"]:
            wrong.append(f"{call}: a capture of another thread ended with CUDA error {found['end']}")
    return wrong


def main(suite):
    """All numbers of queues."""
    failures, rows = Failures(), []
    for connections in CONNECTIONS:
        row = run(connections)
        rows.append(row)
        print(row, flush=True)
        for wrong in judge(row):
            failures.add(f"{connections} queues: {wrong}")
        suite.write("streams.json", {"rows": rows})
    return failures.messages


if __name__ == "__main__":
    step_main("streams", main)
