"""What transformed forms kept on disk save a program's next start (docs/internals.md, "Cache").

Under a core in `mps`, beside an inference that is connected and idle, the same training is started over
and over with a cache folder of the step's own: with `cache_mib = 0` nothing is kept, with the default the first
start fills the folder and the next ones find it full. For each start: when its kernels were transformed, what that cost
the shim's threads, and that the same kernels were transformed.
"""

import contextlib
import os
import pathlib
import time

from clients import READY_TIMEOUT_S, Client, soon, started
from common import Failures, step_main
from stats import median
from tally import Core, client, shortfalls

HP_JOB = "bert-graph"
# Name of each start: its `cache_mib`. The two kinds take turns, so that what drifts falls on both.
NOT_KEPT, FIRST, KEPT = "not kept", "kept, first start", "kept, found"
STARTS = ((NOT_KEPT, 0), (FIRST, 256), (NOT_KEPT, 0), (KEPT, 256), (NOT_KEPT, 0), (KEPT, 256))
POLL_S = 0.05
# The shim's thread that rewrites, and loads what was rewritten.
REWRITES = "tally-rewrite"


def cpu_s(pid):
    """CPU seconds of a process's `tally-` threads, by name."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            before, _, rest = (task / "stat").read_text().rpartition(")")
            name = before.partition("(")[2]
            if name.startswith("tally-"):
                user, system = rest.split()[11:13]
                found[name] = round(found.get(name, 0) + (int(user) + int(system)) / tick, 2)
    return found


def watch(core, name, came):
    """Note when the client had launched, and when it had how many transformed kernels."""
    entry = client({"clients": core.status()["clients"]}, name)
    if entry and entry["launches"]:
        now, counts = time.monotonic(), entry["transformed"]
        came.setdefault("launched", now)
        came.setdefault("transformed", {}).setdefault(counts["kernels"], now)
        came["refused"] = counts["kernels_refused"]


def start(suite, core, name, cache):
    """One start of the training: its row. Times are from the first launch that the core had been told of."""
    args, came, ready = suite.args, {}, None
    one = Client(suite, name, [args.be], core, "best-effort", {"XDG_CACHE_HOME": str(cache)})
    try:
        begin = time.monotonic()
        while ready is None:
            with contextlib.suppress(TimeoutError):
                one.ready(timeout_s=POLL_S)
                ready = time.monotonic()
            watch(core, name, came)
            if time.monotonic() > begin + READY_TIMEOUT_S:
                raise TimeoutError(f"{name} not ready after {READY_TIMEOUT_S} s")
        one.send("train", job=args.be, start_at=soon(), seconds=args.seconds)
        while time.monotonic() < ready + args.seconds:
            watch(core, name, came)
            time.sleep(POLL_S)
        trained = one.receive(timeout_s=args.seconds + 60)
        cpu = cpu_s(one.pid)
    finally:
        one.process.stop(grace_s=0)
    if "transformed" not in came:
        raise RuntimeError(f"{name} launched nothing under the core")
    kernels = max(came["transformed"])
    return {
        "kernels": kernels,
        "kernels_refused": came["refused"],
        "ready_s": round(ready - came["launched"], 2),
        "transformed_s": {str(n): round(at - came["launched"], 2) for n, at in came["transformed"].items()},
        "all_transformed_s": round(came["transformed"][kernels] - came["launched"], 2),
        "steps_per_s": round(trained["steps_per_s"], 4),
        "cpu_s": cpu,
        "cpu_s_in_all": round(sum(cpu.values()), 2),
    }


def main(suite):
    """The starts, in turns."""
    args, failures, rows = suite.args, Failures(), []
    cache = suite.work / "cache"
    for number, (kind, mib) in enumerate(STARTS):
        file = suite.work / f"kept-{mib}.toml"
        file.write_text(f"[rewrite]\ncache_mib = {mib}\n")
        with failures.guard(kind), contextlib.ExitStack() as stack:
            core = stack.enter_context(Core(suite, f"kept-{number}", "tally-priority", "mps", None, ["--config", file]))
            hp = Client(suite, f"hp-{number}", [HP_JOB], core, "high")
            stack.enter_context(started([hp]))
            row = {"start": kind, "cache_mib": mib, **start(suite, core, f"be-{number}", cache)}
            for note in shortfalls(core.status(), "mps", [hp.name]):
                failures.add(f"{kind}: {note}")
            files = sorted(cache.glob("tally/forms/*.form"))
            row |= {"files": len(files), "files_bytes": sum(f.stat().st_size for f in files)}
            rows.append(row)
            print(row, flush=True)
            suite.write("kept.json", {"hp": HP_JOB, "be": args.be, "seconds": args.seconds, "rows": rows})
    for row in rows:
        if not row["kernels"]:
            failures.add(f"{row['start']}: no kernel was transformed")
    if not any(row["files"] for row in rows if row["start"] == FIRST):
        failures.add(f"{cache}: the first start left nothing there")
    # Which ones are depends on what the policy measured; one or two are had or not.
    kernels = [[row["kernels"] for row in rows if (row["start"] == KEPT) is kept] for kept in (False, True)]
    if all(kernels) and min(kernels[1]) < 0.9 * max(kernels[0]):
        failures.add(f"fewer kernels were transformed where their forms were kept: {kernels[1]}, otherwise {kernels[0]}")
    cpu = {kind: [row["cpu_s"].get(REWRITES, 0) for row in rows if row["start"] == kind] for kind in (NOT_KEPT, KEPT)}
    print(f"CPU seconds of {REWRITES}: {cpu}", flush=True)
    if all(cpu.values()) and median(cpu[KEPT]) >= median(cpu[NOT_KEPT]):
        failures.add(f"finding forms took no less of a CPU than making them: {cpu}")
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--be", default="gpt2-train", help="the training")
    parser.add_argument("--seconds", type=float, default=6, help="how long it trains after it is ready")


if __name__ == "__main__":
    step_main("kept", main, add_arguments)
