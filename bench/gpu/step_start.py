"""How much longer a PyTorch program takes to start as a client: to its first results, process start included.

Plain, high-priority and best-effort processes one after another in turns; ratios to the mean of the round's two plain ones,
medians over rounds. `noise`: what the medians of the plain ones differ by.
"""

import subprocess
import sys
import time

from common import Failures, clean_environment, step_main
from stats import median
from tally import Core

PROGRAM = """
import torch
torch.manual_seed(1)
layers = [torch.nn.Conv2d(3, 64, 7, stride=2), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Flatten()]
model = torch.nn.Sequential(*layers, torch.nn.LazyLinear(1000)).cuda()
loss = model(torch.randn(8, 3, 64, 64, device="cuda")).logsumexp(1).mean()
loss.backward()
print(loss.item())
"""
# The second plain one tells what differs by chance.
KINDS = {"plain": None, "high": "high", "best-effort": "best-effort", "plain again": None}
PROMISE_RATIO_MAX = 1.03
LIMIT_S = 60


def start_s(core, kind):
    """Seconds from start to end of one process."""
    command = [sys.executable, "-c", PROGRAM]
    if core is not None:
        command = core.client_command(KINDS[kind], f"start-{kind}", command)
    begin = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment())
    if done.returncode:
        raise RuntimeError(f"{kind}: ended with {done.returncode}: {done.stderr[-800:]}")
    return time.monotonic() - begin


def main(suite):
    """The cost of starting as a client."""
    failures, times = Failures(), {kind: [] for kind in KINDS}
    with Core(suite, "start", "tally-priority", suite.args.sharing) as core:
        # Files into memory, and the core's first client.
        for kind in KINDS:
            start_s(core if KINDS[kind] else None, kind)
        for turn in range(suite.args.rounds):
            order = list(KINDS) if turn % 2 == 0 else list(KINDS)[::-1]
            for kind in order:
                times[kind].append(start_s(core if KINDS[kind] else None, kind))
    noise = round(abs(median(times["plain again"]) / median(times["plain"]) - 1), 4)
    plain = [sum(both) / 2 for both in zip(times["plain"], times["plain again"], strict=True)]
    rows = []
    for kind in ("high", "best-effort"):
        ratios = [mine / other for mine, other in zip(times[kind], plain, strict=True)]
        row = {"kind": kind, "plain_s": round(median(plain), 3), "with_shim_s": round(median(times[kind]), 3)}
        row |= {"ratio": round(median(ratios), 4), "ratios": [round(r, 4) for r in ratios], "noise": noise}
        rows.append(row)
        print(row, flush=True)
        if row["ratio"] > PROMISE_RATIO_MAX + noise:
            failures.add(f"{kind}: {row['ratio']:.3f} of plain, promised <= {PROMISE_RATIO_MAX}")
    suite.write("start.json", {"sharing": suite.args.sharing, "promise_ratio_max": PROMISE_RATIO_MAX, "times_s": times, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))
    parser.add_argument("--rounds", type=int, default=6)


if __name__ == "__main__":
    step_main("start", main, add_arguments)
