"""Programs under developer tools, and programs that share memory or wait for each other across processes: as bare.

Every row of `tool_rows.py` runs bare, and then as a best-effort client beside a high-priority program that has the GPU
half of the time, under a policy that holds its launches: same exit status, same values, and the tool finds the same. A
tool that is not there, or that does not work bare, makes the row say so. `nccl` needs two GPUs, each with a core.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import tool_rows
from common import HERE, MULTICAST_OFF, Failures, clean_environment, compile_program, first_line, step_main
from procs import Process, wait_until
from tally import Core, MpsDaemon, client, sharing_of, shortfalls
from tool_rows import ROWS, Result, differences, find_tool, judge_clients

LIMIT_S = 60
# Torch is imported, and NCCL set up, before its minute begins.
NCCL_LIMIT_S = 85
SEEN_EVERY_S = 0.1
RANDOM_FORMS = "../test-policies/random-forms"
# In any form, and held at random.
FORMS_CONFIG = "form = 5\nsms = 16\ntoggle_us = 4000\nhold_us = 1500\nseed = 11\n"
# Held while the high-priority program has the GPU.
WHOLE_POLICY, WHOLE_CONFIG = "tally-priority", "forms = false\n"


def policy_of(suite, kind):
    """(policy, configuration) of a row's kind."""
    if kind == "forms":
        if (suite.bundle / "bin" / "policies" / f"{RANDOM_FORMS}.wasm").exists():
            return RANDOM_FORMS, FORMS_CONFIG
        return "tally-priority", None
    return WHOLE_POLICY, WHOLE_CONFIG


class Programs:
    """The compiled programs."""

    def __init__(self, suite, failures):
        self.paths = {}
        for name, flags in {"native": ("-O2",), "debug": ("-g", "-G")}.items():
            with failures.guard(f"compile {name}"):
                self.paths[name] = compiled(suite, f"tools-{name}", flags)

    def command(self, row):
        """What runs, and under which tool; `None` in place of what is not there."""
        if row.program == "job":
            program = [sys.executable, str(HERE / "tools_job.py")]
        else:
            program = [self.paths.get(row.program)]
        tool = [find_tool(row.tool)] if row.tool else []
        return [*tool, *row.options, *program, *row.arguments]


def compiled(suite, name, flags):
    """For this GPU, or else for any."""
    try:
        return compile_program(suite, "tools.cu", name, (*flags, "-arch=native"))
    except (RuntimeError, subprocess.TimeoutExpired):
        return compile_program(suite, "tools.cu", name, flags)


def end_session(pid):
    """Kill what is left of a session: a debugger's program has a process group of its own."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == pid:
                os.kill(int(process.name), signal.SIGKILL)


def watch(processes, limit_s, cores=(), names=()):
    """Wait for processes; meanwhile note what cores say of clients: the entry with the most launches of each pid."""
    seen, end = {}, time.monotonic() + limit_s
    while any(process.alive() for process in processes) and time.monotonic() < end:
        for core in cores:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired, ValueError):
                for entry in core.status()["clients"]:
                    if entry["name"] in names and entry["launches"] >= seen.get(entry["pid"], entry)["launches"]:
                        seen[entry["pid"]] = entry
        time.sleep(SEEN_EVERY_S)
    return list(seen.values())


def run_all(suite, label, commands, limit_s=None, cores=(), names=()):
    """Run commands (each with its environment) at the same time; their result and the clients that were seen."""
    processes = []
    try:
        for index, (command, environment) in enumerate(commands):
            processes.append(Process(command, suite.logs / f"{label}-{index}.log", clean_environment(**environment)))
        entries = watch(processes, limit_s or LIMIT_S, cores, names)
    finally:
        exits = [process.child.poll() for process in processes]
        for process in processes:
            end_session(process.pid)
            process.stop(grace_s=0)
    # Without the command line, which stands first.
    texts = [process.log.read_text(errors="replace").partition("\n")[2] for process in processes]
    said = [tool_rows.last_json(text) for text in texts]
    return Result(exits, said, "\n".join(texts)), entries


class Beside:
    """The high-priority client, which has its GPU half of the time."""

    def __init__(self, suite, core, program, environment=None):
        self.core, self.name = core, "beside"
        command = core.client_command("high", self.name, [program, "load", "0"])
        log = suite.logs / f"beside-{core.name}.log"
        self.process = Process(command, log, clean_environment(**(environment or {})), pipe=True)

    def __enter__(self):
        try:
            self.process.receive(60)
            wait_until(self.governed, 20, "the program beside to be governed", every_s=0.1)
        except BaseException:
            self.process.stop(grace_s=1)
            raise
        return self

    def governed(self):
        entry = client(self.core.status(), self.name)
        return entry is not None and entry.get("governed")

    def __exit__(self, *_):
        self.process.stop(grace_s=5)


def told(row, result):
    """A result as the file has it."""
    return {"exits": result.exits, "said": result.said, "found": row.found(result)}


def client_figures(entries):
    """What is told of clients that launched."""
    entries = [entry for entry in entries if entry["launches"]]
    decisions = [entry["decisions"] for entry in entries]
    return {
        "clients": len(entries),
        "governed": sum(bool(entry["governed"]) for entry in entries),
        "whole_because": sorted({entry["report"]["whole_because"] for entry in entries}),
        "launches": sum(entry["launches"] for entry in entries),
        "launches_held": sum(one["launches_held"] for one in decisions),
        "in_forms": sum(one[form] for one in decisions for form in ("sliced", "preemptible", "sm_limited")),
    }


def line(row, sharing, outcome, **more):
    """A row of the results."""
    return {"row": row.name, "shows": row.shows, "sharing": sharing, "outcome": outcome, "problems": [], **more}


def run_bare(suite, row, programs, known):
    """(result, why nothing can be compared with it). Rows with the same program share it."""
    command = programs.command(row)
    if None in command:
        return None, f"{row.tool if row.tool and not find_tool(row.tool) else 'the program'} is not there"
    key = (tuple(command), row.environment)
    if key not in known:
        known[key] = run_all(suite, f"{row.name}-bare", [(command, dict(row.environment))])[0]
    result = known[key]
    if row.works(result):
        return result, None
    end = " / ".join(text for text in result.text.splitlines()[-12:] if text.strip())[-600:]
    return result, f"fails bare: exit {result.exits}, found {row.found(result)}: {end}"


def settle(row, sharing, core, bare, result, entries, again, processes=1):
    """The row of a run under Tally; `again` runs bare beside the other program, if need be."""
    problems, outcome = differences(row, bare, result), "same"
    if problems:
        # Is it the company, or is it Tally?
        beside = differences(row, bare, again())
        # Hangs and other values are Tally's, whatever the company does.
        problems = [text for text in problems if text not in beside or text == "it hung" or text.startswith("values ")]
        if not problems:
            outcome = f"fails bare beside another program: {'; '.join(beside)}"[:600]
    problems += judge_clients(row, entries, processes)
    if row.name == "profiler-forms" and outcome == "same" and not problems:
        problems += fewer_kernels(bare, result)
    return line(
        row, sharing, "differs" if problems else outcome, policy=core.policy.rpartition("/")[2],
        bare=told(row, bare), tally=told(row, result), client=client_figures(entries),
    ) | {"problems": problems}  # fmt: skip


def fewer_kernels(bare, result):
    """In parts, a launch has more kernels than whole, and never fewer."""
    before, after = bare.said[0]["kernels"], result.said[0]["kernels"]
    return [f"{after} kernels, bare {before}"] if after < before else []


def measure(suite, row, sharing, core, programs, bare):
    """One row under a core."""
    label, environment = f"{row.name}-{sharing}", dict(row.environment)
    command = programs.command(row)
    as_client = core.client_command("best-effort", label, command)
    shim = {"TALLY_SHIM_LOG": str(suite.logs / f"shim-{label}.log")}
    result, entries = run_all(suite, label, [(as_client, environment | shim)], cores=[core], names=[label])

    def again():
        with MpsDaemon(suite) if sharing == "mps" else contextlib.nullcontext() as daemon:
            return run_all(suite, f"{label}-beside", [(command, environment | (daemon.environment if daemon else {}))])[0]

    return settle(row, sharing, core, bare, result, entries, again, 2 if "ipc" in row.arguments else 1)


def gpus():
    """Of each GPU, what selects it in `CUDA_VISIBLE_DEVICES`."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    count = first_line(["nvidia-smi", "--query-gpu=count", "--format=csv,noheader"])
    return [str(index) for index in range(int(count or 0))]


def reduce_all(suite, label, row, chosen, cores=()):
    """One process a GPU, bare or each as a client of its core."""
    meet, commands = suite.work / f"meet-{label}", []
    for rank, gpu in enumerate(chosen):
        command = [sys.executable, str(HERE / "tools_job.py"), "nccl", str(rank), str(len(chosen)), str(meet)]
        environment = {**dict(row.environment), **MULTICAST_OFF, "CUDA_VISIBLE_DEVICES": gpu}
        if cores:
            command = cores[rank].client_command("best-effort", f"nccl-{rank}", command)
            environment["TALLY_SHIM_LOG"] = str(suite.logs / f"shim-{label}-{rank}.log")
        commands.append((command, environment))
    return run_all(suite, label, commands, NCCL_LIMIT_S, cores, [f"nccl-{rank}" for rank in range(len(chosen))])


def nccl(suite, row, programs):
    """All-reduces of two GPUs; a core and a program beside on each."""
    chosen = gpus()[:2]
    if len(chosen) < 2:
        return line(row, "timeslice", "one GPU: not run")
    bare, _ = reduce_all(suite, "nccl-bare", row, chosen)
    if not row.works(bare):
        return line(row, "timeslice", f"fails bare: exit {bare.exits}: {bare.text[-600:]}")
    policy, config = policy_of(suite, row.policy)
    with contextlib.ExitStack() as stack:
        cores = []
        for gpu in chosen:
            visible = {"CUDA_VISIBLE_DEVICES": gpu}
            name = f"nccl-{len(cores)}"
            cores.append(stack.enter_context(Core(suite, name, policy, "timeslice", config, environment=visible)))
            stack.enter_context(Beside(suite, cores[-1], programs.paths["native"], visible))
        result, entries = reduce_all(suite, "nccl-timeslice", row, chosen, cores)

        def again():
            return reduce_all(suite, "nccl-beside", row, chosen)[0]

        return settle(row, "timeslice", cores[0], bare, result, entries, again, 2)


def note(suite, rows, failures, entry):
    """Keep a row, and write all."""
    rows.append(entry)
    print(json.dumps(entry), flush=True)
    for problem in entry["problems"]:
        failures.add(f"{entry['sharing']}, {entry['row']}: {problem}")
    suite.write("tools.json", {"rows": rows, "failures": failures.messages})


def run_mode(suite, sharing, kind, plan, programs, rows, failures):
    """The rows of one sharing mode and one kind of policy: one core."""
    policy, config = policy_of(suite, kind)
    with Core(suite, f"{sharing}-{kind}", policy, sharing, config) as core:
        with Beside(suite, core, programs.paths["native"]) as beside:
            state = core.status()
            for message in shortfalls(state, sharing, [beside.name]):
                failures.add(f"{sharing}: {message}")
            if sharing_of(state)[0] != sharing:
                return
            for row, bare in plan:
                with failures.guard(f"{sharing}, {row.name}"):
                    note(suite, rows, failures, measure(suite, row, sharing, core, programs, bare))
                if not beside.process.alive():
                    failures.add(f"{sharing}: the program beside ended during {row.name}:\n{beside.process.tail()}")
                    return
        if (faults := core.status()["policy"]["faults"]) and any(faults.values()):
            failures.add(f"{sharing}: the policy failed: {faults}")


def main(suite):
    """Programs under tools, and programs that share memory, bare and as clients."""
    failures, rows = Failures(), []
    programs = Programs(suite, failures)
    if "native" not in programs.paths:
        return failures.messages
    chosen, known, ready = [row for row in ROWS if row.name in suite.args.only], {}, []
    modes = suite.args.sharing_modes.split(",")
    for row in chosen:
        if row.name == "nccl":
            continue
        with failures.guard(f"bare, {row.name}"):
            bare, reason = run_bare(suite, row, programs, known)
            if reason:
                note(suite, rows, failures, line(row, "bare", reason))
            else:
                ready.append((row, bare))
                print(f"{row.name} works bare: {told(row, bare)}", flush=True)
    for sharing in modes:
        for kind in ("forms", "whole"):
            plan = [(row, bare) for row, bare in ready if sharing in row.modes and row.policy == kind]
            if plan:
                with failures.guard(f"{sharing}, {kind}"):
                    run_mode(suite, sharing, kind, plan, programs, rows, failures)
    for row in chosen:
        if row.name == "nccl" and "timeslice" in modes:
            with failures.guard(row.name):
                note(suite, rows, failures, nccl(suite, row, programs))
    suite.write("tools.json", {"rows": rows, "failures": failures.messages})
    return failures.messages


def names_argument(text):
    """As `tool_rows.named`, for argparse."""
    try:
        return tool_rows.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser):
    parser.add_argument("--only", type=names_argument, default=list(tool_rows.NAMES), help=f"rows, comma-separated, of {', '.join(tool_rows.NAMES)}")
    parser.add_argument("--sharing-modes", default="timeslice,mps", help="comma-separated")


if __name__ == "__main__":
    step_main("tools", main, add_arguments)
