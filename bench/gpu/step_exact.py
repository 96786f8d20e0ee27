"""Bit-identical training while every kernel that can be transformed is, and yields at random.

Reference: deterministic trainings (ResNet-50, also as a graph, BERT, GPT-2 small) in a process
alone; two runs must agree. Then, for each sharing, with and without kernels
of the vendor's closed libraries: the same trainings as a best-effort client
under the policy `random-forms`, which runs launches preemptible, sliced and (where
offered) on some of the SMs, chosen at random, and asks the client to yield
at random moments. The first run only has the transformed forms made; then runs are
repeated until launches have yielded often enough. Every digest of every run
must be the reference's. Once more while CUPTI runs the client's kernels one at a time, and at last while the client's
width changes at random and most of its launches are leased: the trainings, and a decode service, whose steps are graphs.
"""

import collections

from clients import Client, started
from common import Failures, step_main
from tally import Core, client

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
POLICY = "../test-policies/random-forms"
RUN_TIMEOUT_S = 90
RUNS_MAX = 6
WIDTH_CHANGES = 200
# What has launches that can be limited. Most of a decode service's are graphs with matrix products that fit the GPU at once.
LIMITED = ("trainings",)
# A decode service of fewer layers, and the steps in which it generates tokens.
SERVICE, SERVICE_LAYERS, SERVICE_STEPS = "llama-8b-service", "8", 512


def train(worker, args):
    """Digests of one deterministic run of all models."""
    worker.send("exact", steps=args.steps, names=args.models.split(","))
    while "digests" not in (answer := worker.receive(RUN_TIMEOUT_S)):
        pass
    return answer["digests"], round(answer["seconds"], 2)


def reference(suite):
    """The digests of two runs alone, without Tally; they must agree."""
    worker = Client(suite, "reference", ["exact"], env=DETERMINISTIC)
    with started([worker]):
        (first, _), (second, seconds) = train(worker, suite.args), train(worker, suite.args)
    for name in first:
        if first[name] != second[name]:
            raise RuntimeError(f"{name}: the unshared runs differ from each other")
    return first, seconds


def kernels_by_state(status):
    """How many kernels are in which state, and the longest of each."""
    states = collections.defaultdict(lambda: {"kernels": 0, "longest_us": 0.0, "longest": ""})
    for kernel in status["kernels"]:
        state = states[kernel["transformed"]]
        state["kernels"] += 1
        if kernel["mean_us"] > state["longest_us"]:
            state |= {"longest_us": round(kernel["mean_us"], 1), "longest": kernel["name"][:120]}
    return dict(states)


def record_bytes(worker):
    """CUPTI runs the worker's kernels one at a time from the first call on: bytes of its records so far."""
    worker.send("serial_kernels")
    return worker.receive(RUN_TIMEOUT_S)["record_bytes"]


def decoded(worker):
    """(the service's answer to one run of the fixed schedule, its digest)."""
    answer = worker.ask("decode_exact", job=SERVICE, steps=SERVICE_STEPS, trace="conv", timeout_s=RUN_TIMEOUT_S)
    return answer, answer["digest"]


def decode_reference(suite):
    """(digest, environment) of the service alone, without Tally, in two processes; they must agree."""
    env, digests = {"SUITE_LAYERS": SERVICE_LAYERS}, []
    for number in range(2):
        worker = Client(suite, f"decode-reference-{number}", [SERVICE], env=env)
        with started([worker]):
            answer, digest = decoded(worker)
        env["SUITE_ATTENTION"] = answer["attention"]
        digests.append(digest)
    if digests[0] != digests[1]:
        raise RuntimeError("the decode service's unshared runs differ from each other")
    return digests[0], env


def run_widths(suite, what, job, env, run, failures):
    """One core, one client whose width changes, until it did often enough; `run` tells what differs of a run. A row."""
    args, label, is_limited = suite.args, f"mps-widths-{what}", what in LIMITED
    config = f"form = 6\nlease = 16\ntoggle_us = {args.toggle_us}\nseed = 5\n"
    row = {"machine": suite.machine, "sharing": "mps", "vendor_libraries": False, "what": what, "runs": []}
    with Core(suite, label, POLICY, "mps", config) as core:
        worker = Client(suite, label, [job], core, "best-effort", env)
        with started([worker]):
            for _ in range(RUNS_MAX):
                different = run(worker)
                entry = client(core.status(), label)
                decisions = entry["decisions"]
                # The others were decided to be.
                limited, changes = entry["transformed"]["sm_limited"] - decisions["sm_limited"], decisions["width_changes"]
                row["runs"].append({"different": different, "width_changes": changes, "leased_and_limited": limited})
                print(label, row["runs"][-1], entry["decisions"], flush=True)
                for name in different:
                    failures.add(f"{label}: {name} differs from the unshared run")
                if different or (changes >= WIDTH_CHANGES and (limited or not is_limited)):
                    break
            row |= {"transformed": entry["transformed"], "decisions": entry["decisions"], "width_changes": changes}
    if changes < WIDTH_CHANGES or (is_limited and not limited):
        failures.add(f"{label}: {changes} changes of width and {limited} leased launches that were limited; {WIDTH_CHANGES} and some were wanted")
    return row


def run_mode(suite, sharing, vendor, serial, expected, failures):
    """One core, one client; a row of what happened."""
    args = suite.args
    label = f"{sharing}-{'serial' if serial else 'vendor' if vendor else 'own'}"
    file = suite.work / f"core-{label}.toml"
    file.write_text(f"[rewrite]\nvendor_libraries = {str(vendor).lower()}\nrescue_ms = {args.rescue_ms}\n")
    config = f"form = {args.form}\nslices = 4\nsms = 116\ntoggle_us = {args.toggle_us}\nseed = 5\n"
    row = {"machine": suite.machine, "sharing": sharing, "vendor_libraries": vendor, "serial_kernels": serial, "runs": []}
    with Core(suite, label, POLICY, sharing, config, ["--config", file]) as core:
        worker = Client(suite, label, ["exact"], core, "best-effort", DETERMINISTIC)
        with started([worker]):
            before = record_bytes(worker) if serial else 0
            for _ in range(RUNS_MAX):
                digests, seconds = train(worker, args)
                status = core.status()
                transformed = client(status, label)["transformed"]
                different = [name for name in digests if digests[name] != expected[name]]
                row["runs"].append({"seconds": seconds, "different": different, "launches_yielded": transformed["launches_yielded"]})
                print(label, row["runs"][-1], transformed, flush=True)
                for name in different:
                    failures.add(f"{label}: {name} differs from the unshared run")
                if different or transformed["launches_yielded"] >= args.launches_yielded:
                    break
            if serial and record_bytes(worker) == before:
                failures.add(f"{label}: CUPTI recorded no kernel")
            row |= {"transformed": transformed, "decisions": client(status, label)["decisions"], "kernels": kernels_by_state(status)}
    if row["transformed"]["launches_yielded"] < args.launches_yielded:
        failures.add(f"{label}: only {row['transformed']['launches_yielded']} launches yielded, {args.launches_yielded} were wanted")
    return row


def train_widths(suite, expected, failures):
    """The trainings while their width changes."""

    def run(worker):
        digests, _ = train(worker, suite.args)
        return [name for name in digests if digests[name] != expected[name]]

    return run_widths(suite, "trainings", "exact", DETERMINISTIC, run, failures)


def decode_widths(suite, _expected, failures):
    """A decode service, as a best-effort client, while its width changes."""
    expected, env = decode_reference(suite)
    return run_widths(suite, "decode", SERVICE, env, lambda worker: [] if decoded(worker)[1] == expected else [SERVICE], failures)


WIDTHS = {"trainings": train_widths, "decode": decode_widths}


def main(suite):
    """Bit-identical trainings under random cutting."""
    failures, rows = Failures(), []
    with failures.guard("reference"):
        expected, seconds = reference(suite)
        print(f"reference: {expected} in {seconds} s", flush=True)
        plans = [(sharing, vendor == "on", False) for sharing in suite.args.sharing_modes.split(",") for vendor in suite.args.vendor.split(",")]
        plans += [(sharing, False, True) for sharing in suite.args.serial.split(",") if sharing]
        for sharing, vendor, serial in plans:
            with failures.guard(f"{sharing}, vendor {vendor}, serial {serial}"):
                rows.append(run_mode(suite, sharing, vendor, serial, expected, failures))
            suite.write("exact.json", {"reference": expected, "rows": rows, "failures": failures.messages})
        for what in suite.args.widths:
            with failures.guard(f"widths, {what}"):
                rows.append(WIDTHS[what](suite, expected, failures))
            suite.write("exact.json", {"reference": expected, "rows": rows, "failures": failures.messages})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing-modes", default="timeslice,mps", help="comma-separated")
    parser.add_argument("--vendor", default="off,on", help="comma-separated: off, on")
    parser.add_argument("--serial", default="mps", help="sharing modes in which CUPTI runs kernels one at a time, comma-separated")
    parser.add_argument("--widths", nargs="*", choices=WIDTHS, default=list(WIDTHS), help="what runs while its width changes; nothing: no such run")
    parser.add_argument("--models", default="resnet50,bert,gpt2-small,resnet50-graph", help="comma-separated")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each model in a run")
    parser.add_argument("--launches-yielded", type=int, default=100, help="launches that must have yielded")
    parser.add_argument("--toggle-us", type=int, default=1500, help="longest time between two requests")
    parser.add_argument("--form", type=int, default=3, help="of the policy: 0 preemptible, 1 sliced, 3 mixed")
    parser.add_argument("--rescue-ms", type=int, default=50, help="of the core's configuration")


if __name__ == "__main__":
    step_main("exact", main, add_arguments)
