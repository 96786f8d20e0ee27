"""Tests of step `tools` that need no GPU: what is read of the tools' output, and what counts as the same. Standard
library only.
"""

import argparse
import contextlib
import io
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common
import markdown
import render
import render_tools
import step_tools
import tool_rows
from tool_rows import Result

SAID = '{"digest": "00ff", "launches": 2, "wrong": 0, "error": 0}'
MACHINE = {"device": "GPU", "driver": "1", "torch": "2", "commit": "c", "date": "2026-11-21"}


def row(name):
    return next(row for row in tool_rows.ROWS if row.name == name)


def result(text="", code=0):
    return Result([code], [tool_rows.last_json(text)], text)


def entry(held=3, why="", governed=True, launches=60):
    decisions = {"launches_held": held, "sliced": 1, "preemptible": 0, "sm_limited": 0}
    report = {"whole_because": why}
    return {"name": "x", "pid": 1, "launches": launches, "governed": governed, "not_governed_reason": "r", "decisions": decisions, "report": report}


class Output(unittest.TestCase):
    """What is read of what tools print."""

    def test_the_last_object_counts_wherever_it_stands(self):
        self.assertEqual(tool_rows.last_json(f'x {{"digest": "1"}}\n[New Thread]{SAID}[Thread exited]')["digest"], "00ff")
        self.assertIsNone(tool_rows.last_json('{"ready": true} {"digest": '))
        self.assertIsNone(tool_rows.last_json('{"digest": oops}'))

    def test_compute_sanitizer(self):
        clean = f"========= COMPUTE-SANITIZER\n{SAID}\n========= ERROR SUMMARY: 0 errors\n"
        self.assertTrue(row("memcheck").works(result(clean)))
        self.assertFalse(row("memcheck").works(result(SAID)), "without a summary nothing was checked")
        one = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"
        self.assertEqual(tool_rows.memcheck(result(one)), {"errors": 1, "invalid writes": 1})
        self.assertTrue(row("memcheck-bounds").works(result(one, 9)))
        self.assertFalse(row("memcheck-bounds").works(result(clean, 0)), "the error was not found")
        race = f"{SAID}\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
        self.assertTrue(row("racecheck").works(result(race, 9)))
        self.assertFalse(row("racecheck").works(result(race.replace(" 1 hazard", " 0 hazards"), 0)))

    def test_cuda_gdb(self):
        stop = "$1 = 262144\n$2 = {x = 0, y = 0, z = 0}\n"
        text = f"Breakpoint 1, fill_values<<<(1024,1,1),(256,1,1)>>> (n=262144)\n{stop}{stop}{SAID}\n[Inferior 1 (process 7) exited normally]\n"
        self.assertEqual(tool_rows.debugger(result(text)), {"stops in the kernel": 2, "n": ["262144"] * 2, "ended": True})
        self.assertTrue(row("cuda-gdb").works(result(text)))
        host = text.replace("$2 = {x = 0, y = 0, z = 0}", 'No symbol "threadIdx" in current context.')
        self.assertFalse(row("cuda-gdb").works(result(host)), "it stopped, but not on the GPU")

    def test_ncu(self):
        lines = ['==PROF== Profiling "fill_values(unsigned int *, unsigned int)" - 0: 0%....100% - 1 pass', '==PROF== Profiling "mix_values" - 1: 0%']
        text = "\n".join([*lines, SAID])
        self.assertEqual(tool_rows.profiled(result(text)), {"kernels": 2, "names": ["fill_values", "mix_values"]})
        self.assertTrue(row("ncu").works(result(text)))
        self.assertFalse(row("ncu").works(result(f"{lines[0]}\n{SAID}")), "a kernel was not profiled")

    def test_torch_profiler(self):
        text = '{"digest": "a", "wrong": 0, "launch_calls": 5, "kernels": 7}'
        more = text.replace("7", "9")
        self.assertTrue(row("profiler").works(result(text)))
        self.assertFalse(row("profiler").works(result(text.replace("7", "0"))))
        self.assertEqual(tool_rows.differences(row("profiler"), result(text), result(more)), ["kernels: 9, bare 7"])
        self.assertEqual(tool_rows.differences(row("profiler-forms"), result(text), result(more)), [])
        self.assertEqual(step_tools.fewer_kernels(result(text), result(more)), [])
        self.assertEqual(step_tools.fewer_kernels(result(more), result(text)), ["7 kernels, bare 9"])

    def test_launches_are_told_from_what_the_driver_is_asked(self):
        import tools_job

        events = [{"cat": "cuda_runtime", "name": "cudaLaunchKernel"}, {"cat": "cuda_driver", "name": "cuLaunchKernel"}]
        events += [{"cat": "kernel", "name": "k"}, {"cat": "cuda_runtime", "name": "cudaMalloc"}, "noise"]
        self.assertEqual(tools_job.counted(events), (1, 1))


class Judgement(unittest.TestCase):
    """What counts as bare."""

    def test_exit_values_findings_and_hangs(self):
        bare, of = result(SAID), row("memcheck")
        self.assertEqual(tool_rows.differences(of, bare, bare), [])
        self.assertEqual(tool_rows.differences(of, bare, result(SAID, None)), ["it hung"])
        self.assertEqual(len(tool_rows.differences(of, bare, result(SAID, 1))), 1)
        self.assertEqual(len(tool_rows.differences(of, bare, result(SAID.replace("00ff", "0")))), 1)
        self.assertEqual(tool_rows.differences(of, bare, result(SAID + "ERROR SUMMARY: 2 errors")), ["errors: 2, bare None"])

    def test_clients_must_be_governed_and_held_and_whole_for_the_reason(self):
        self.assertEqual(tool_rows.judge_clients(row("ipc"), [entry(), entry(launches=0, governed=False)]), [])
        for wrong in ([], [entry(held=0)], [entry(governed=False)]):
            self.assertEqual(len(tool_rows.judge_clients(row("ipc"), wrong)), 1, wrong)
        self.assertEqual(len(tool_rows.judge_clients(row("ipc"), [entry()], 2)), 1, "the other process is no client")
        self.assertEqual(len(tool_rows.judge_clients(row("blocking"), [entry()])), 1)
        self.assertEqual(tool_rows.judge_clients(row("blocking"), [entry(why="CUDA_LAUNCH_BLOCKING is set")]), [])

    def settled(self, beside):
        core = types.SimpleNamespace(policy="../test-policies/random-forms")
        return step_tools.settle(row("ipc"), "mps", core, result(SAID), result(SAID, 1), [entry(), entry()], lambda: beside, 2)

    def test_what_fails_beside_a_program_without_tally_is_no_failure_of_tallys(self):
        self.assertEqual(self.settled(result(SAID))["outcome"], "differs")
        other = self.settled(result(SAID, 1))
        self.assertTrue(other["outcome"].startswith("fails bare beside another program: exit status [1]"))
        self.assertEqual(other["problems"], [])


class Arguments(unittest.TestCase):
    def test_rows_are_picked_by_name(self):
        self.assertEqual(step_tools.names_argument("nccl,memcheck"), ["memcheck", "nccl"])
        for wrong in ("memchek", "", ","):
            with self.assertRaises(argparse.ArgumentTypeError):
                step_tools.names_argument(wrong)
        parser = argparse.ArgumentParser()
        step_tools.add_arguments(parser)
        self.assertEqual(parser.parse_args([]).only, [row.name for row in tool_rows.ROWS])
        self.assertEqual(parser.parse_args(["--only", "ipc"]).only, ["ipc"])

    def test_multicast_stays_off_in_every_program(self):
        with mock.patch.dict(os.environ, clear=False):
            for name in common.MULTICAST_OFF:
                os.environ.pop(name, None)
            environment = common.clean_environment()
        self.assertEqual({environment[name] for name in ("NCCL_NVLS_ENABLE",)}, {"0"})
        self.assertEqual({environment[name] for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")}, {"1"})


class Core:
    """Takes programs on as they are."""

    def __init__(self, suite, name, policy, sharing, config=None, environment=None):
        self.name, self.policy, self.socket = name, policy, "/nowhere"

    def client_command(self, priority, name, command):
        return command

    def status(self):
        return {"clients": [], "policy": {"faults": {}}, "sharing": {"in_force": "timeslice", "reason": ""}}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Flow(unittest.TestCase):
    """The whole step with programs that are scripts."""

    def steps(self, script, only, gpus=("0",)):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "program"
            program.write_text(f"#!/bin/sh\ncase $1 in load) echo '{{\"ready\": true}}'; cat;; *) {script};; esac\n")
            program.chmod(0o755)
            written = {}
            suite = types.SimpleNamespace(
                args=types.SimpleNamespace(only=only, sharing_modes="timeslice"), bundle=pathlib.Path(folder),
                work=pathlib.Path(folder), logs=pathlib.Path(folder), write=lambda name, content: written.update(content),
            )  # fmt: skip
            silenced = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
            patches = [
                mock.patch.object(step_tools, "compiled", lambda *_: str(program)),
                mock.patch.object(step_tools, "Core", Core),
                mock.patch.object(step_tools, "shortfalls", lambda *_: []),
                mock.patch.object(step_tools, "gpus", lambda: list(gpus)),
                mock.patch.object(step_tools.Beside, "governed", lambda _: True),
                mock.patch.object(step_tools, "find_tool", lambda name: None),
                mock.patch.object(step_tools, "judge_clients", lambda *_: []),
                *silenced,
            ]
            with contextlib.ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                return step_tools.main(suite), {entry["row"]: entry for entry in written["rows"]}

    def test_rows_are_as_bare_not_there_or_not_run(self):
        failures, rows = self.steps(f"echo '{SAID}'", ["memcheck", "blocking", "ipc", "nccl"])
        self.assertEqual(failures, [])
        outcomes = {name: rows[name]["outcome"] for name in rows}
        self.assertEqual(outcomes, {"memcheck": "compute-sanitizer is not there", "blocking": "same", "ipc": "same", "nccl": "one GPU: not run"})

    def test_a_program_that_fails_bare_is_not_run_again(self):
        failures, rows = self.steps("exit 4", ["blocking"])
        self.assertEqual(failures, [])
        self.assertTrue(rows["blocking"]["outcome"].startswith("fails bare: exit [4]"))
        self.assertNotIn("tally", rows["blocking"])

    def test_a_program_that_differs_as_a_client_fails_the_step(self):
        # Each run but the bare ones has the shim's log.
        script = f"echo '{SAID}'; test -z \"$TALLY_SHIM_LOG\""
        failures, rows = self.steps(script, ["blocking"])
        self.assertEqual(failures, ["timeslice, blocking: exit status [1], bare [0]"])
        self.assertEqual(rows["blocking"]["outcome"], "differs")

    def test_what_hangs_is_ended_with_its_children_and_fails_the_step(self):
        script = f"echo '{SAID}'; test -z \"$TALLY_SHIM_LOG\" || sleep 60"
        with mock.patch.object(step_tools, "LIMIT_S", 5):
            failures, _ = self.steps(script, ["ipc"])
        self.assertEqual(failures, ["timeslice, ipc: it hung"])


class Page(unittest.TestCase):
    def test_each_outcome_is_told(self):
        core = types.SimpleNamespace(policy="fifo")
        clean = result(f"{SAID} ERROR SUMMARY: 0 errors")
        why = "CUDA_LAUNCH_BLOCKING is set"
        rows = [
            step_tools.settle(row("memcheck"), "timeslice", core, clean, clean, [entry(why=tool_rows.INJECTED)], None),
            step_tools.settle(row("blocking"), "mps", core, clean, result(SAID, None), [entry(why=why)], lambda: clean),
            step_tools.line(row("ncu"), "bare", "ncu is not there"),
            step_tools.line(row("cuda-gdb"), "bare", "fails bare: exit [1], found {}: no device"),
            step_tools.line(row("nccl"), "timeslice", "one GPU: not run"),
        ]
        notes = render.Notes()
        text = "\n".join(render_tools.lines({"machine": MACHINE, "rows": rows}, notes, markdown.table, markdown.made_with))
        for expected in (
            "| compute-sanitizer memcheck, no error | timeslice | yes | 0 | errors 0; invalid writes 0 | a tool is injected | 3 of 60 | 1 |",
            f"| CUDA_LAUNCH_BLOCKING=1 | mps | **no**[^1] | hung |  | {why} | 3 of 60 | 1 |",
            "| ncu, every kernel | bare | ncu is not there |",
            "| cuda-gdb, two stops in a kernel | bare | fails bare[^2] |",
            "| all-reduces of two GPUs | timeslice | one GPU: not run |",
        ):
            self.assertIn(expected, text)
        self.assertEqual(notes.texts[0], "CUDA_LAUNCH_BLOCKING=1, mps: it hung.")

    def test_rows_of_other_runs_stay_with_their_machine(self):
        old = {"machine": {**MACHINE, "device": "old"}, "rows": [step_tools.line(row(name), "bare", "not there") for name in ("ncu", "nccl")]}
        new = {"machine": MACHINE, "rows": [step_tools.line(row("nccl"), "timeslice", "one GPU: not run")]}
        merged = render_tools.merged(old, new)
        self.assertEqual([(one["row"], one["sharing"]) for one in merged["rows"]], [("ncu", "bare"), ("nccl", "timeslice")])
        notes = render.Notes()
        text = "\n".join(render_tools.lines(merged, notes, markdown.table, markdown.made_with))
        self.assertIn("| ncu, every kernel[^1] |", text)
        self.assertEqual(notes.texts, ["On old, commit `c`, 2026-11-21."])

    def test_what_two_gpus_showed_stays_when_there_is_one(self):
        old = {"machine": MACHINE, "rows": [step_tools.line(row("nccl"), "timeslice", "same")]}
        new = {"machine": MACHINE, "rows": [step_tools.line(row("nccl"), "timeslice", "one GPU: not run")]}
        self.assertEqual([one["outcome"] for one in render_tools.merged(old, new)["rows"]], ["same"])


if __name__ == "__main__":
    unittest.main()
