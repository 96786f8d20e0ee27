"""Small programs made from seeds, and those of the audit, bare on this GPU and then under Tally: same values, no hangs.

The programs are run by the bundle's `tally-litmus`, which starts cores and clients itself (tests/litmus/README.md says
how it decides what must come out). First every program runs bare, more than once: one that does not end, or ends with other
values than it must, is reported and not run under Tally, and what misbehaves there runs bare again, many times. Then policies, sharing modes and classes, beside a client of
the other class; and once more under MPS with kernels of closed libraries transformed.
"""

import json
import time

from common import Failures, clean_environment, step_main
from procs import Process

# Findings of a row that are kept with their programs; the others are counted.
FINDINGS_MAX = 20
# What a campaign may take beyond its minutes: it ends what runs, and a hang takes its time.
GRACE_S = 130


def campaign(suite, name, minutes, workers, options):
    """One run of `tally-litmus campaign`: its report, or None with what it said."""
    report = suite.work / f"litmus-{name}.json"
    command = [
        suite.program("tally-litmus"), "campaign", "--cuda", f"--workers={workers}", "--show=0",
        f"--bare-runs={suite.args.bare_runs}", f"--confirm-runs={suite.args.confirm_runs}", f"--limit={suite.args.limit}", f"--bare-limit={suite.args.bare_limit}", f"--minutes={minutes}",
        f"--seed={suite.args.seed}", f"--work-percent={suite.args.work_percent}", f"--json={report}", *options,
    ]  # fmt: skip
    log = suite.logs / f"{name}.log"
    # A backtrace would hide what the error says.
    with Process(command, log, clean_environment(RUST_BACKTRACE="0")) as process:
        code = process.wait(60 * minutes + GRACE_S)
        if code is None:
            return None, f"it still ran after its {minutes:.1f} minutes:\n{process.tail()}"
        if not report.exists():
            return None, f"it ended with {code} and no report:\n{process.tail()}"
    return json.loads(report.read_text()), process.tail(40)


def shortened(row):
    """A row with no more findings than anybody reads."""
    findings = row["findings"]
    return {**row, "findings": findings[:FINDINGS_MAX], "findings_in_all": len(findings)}


def judge(name, report, failures):
    """The rows of a report; what must not be becomes a failure."""
    rows = []
    for part, result in report.items():
        for row in [result["bare"], *result["rows"]]:
            rows.append({"campaign": name, "part": part, **shortened(row)})
            about = f"{name}, {part}, {row['setup']}"
            counts = {k: row[k] for k in ("hangs", "different", "failed", "not_run", "pairs_wrong")}
            print(f"{about}: {row['ended']} ended, {counts}, {row['mechanisms']}", flush=True)
            for finding in row["findings"][:3]:
                print(f"  {finding['kind']} {finding['program']}: {finding['what'][:600]}", flush=True)
            if row["setup"] == "bare":
                # What the GPU does not do as modelled is worth knowing, and no fault of Tally's.
                if row["ended"] == 0 and part == "made":
                    failures.add(f"{about}: no program ended bare")
                continue
            if row["ended"] == 0:
                failures.add(f"{about}: no program ran")
            # What did not fit into the time did not go wrong, but most of it is to run.
            if counts["not_run"] <= row["ended"]:
                del counts["not_run"]
            if bad := {k: n for k, n in counts.items() if n}:
                failures.add(f"{about}: {bad}")
            for finding in row["findings"]:
                if finding["kind"] == "core":
                    failures.add(f"{about}: {finding['what'][:300]}")
    return rows


def main(suite):
    """All setups, then those of MPS with the vendor switch."""
    failures, rows, args = Failures(), [], suite.args
    begin = time.monotonic()
    chosen = [f"--setup={part}" for part in args.setups.split(",") if part]
    every = ["--named", f"--programs={args.programs}", f"--pairs={args.pairs}", *chosen]
    plans = [
        ("at once", args.minutes, args.workers, ["--mode=mps", *every]),
        # One at a time: a GPU has one core, which knows how many clients take turns. With time slices that are too short for
        # the clients of several, none of them gets on.
        ("in turns", args.turns_minutes, 1, ["--mode=timeslice", *every]),
        (
            "vendor",
            args.vendor_minutes,
            args.workers,
            [f"--programs={args.programs // 4}", "--mode=mps", "--class=best-effort", "--vendor", *chosen],
        ),
    ]
    for name, minutes, workers, options in plans:
        if minutes <= 0:
            continue
        with failures.guard(name):
            report, said = campaign(suite, name, minutes, workers, options)
            if report is None:
                failures.add(f"{name}: {said}")
                continue
            rows += judge(name, report, failures)
        suite.write("litmus.json", {"seed": args.seed, "seconds": time.monotonic() - begin, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--programs", type=int, default=2000, help="programs made from seeds, each under one setup")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of images that differ in one byte")
    parser.add_argument("--bare-runs", type=int, default=1, help="how often each runs bare first")
    parser.add_argument("--workers", type=int, default=4, help="setups at one time, under MPS")
    parser.add_argument("--limit", type=float, default=20, help="seconds after which a program counts as hung")
    parser.add_argument("--bare-limit", type=float, default=12, help="the same of bare ones")
    parser.add_argument("--confirm-runs", type=int, default=4000, help="how often what misbehaves runs bare again")
    parser.add_argument("--minutes", type=float, default=3.5, help="of all setups under MPS")
    parser.add_argument("--turns-minutes", type=float, default=3, help="of all setups in which clients take turns; 0: none")
    parser.add_argument("--vendor-minutes", type=float, default=1.5, help="of those with the vendor switch; 0: none")
    parser.add_argument("--setups", default="", help="setups with one of these in their names, comma-separated")
    parser.add_argument("--work-percent", type=int, default=200, help="how long kernels spin")


if __name__ == "__main__":
    step_main("litmus", main, add_arguments)
