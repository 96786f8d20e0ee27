"""Tests of what needs no GPU: statistics, record counting, processes, the command line. Standard library only.

python3 -m unittest discover -s bench/gpu -p 'test_*.py'
"""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
sys.path.insert(0, str(HERE))

import itertools

import kernel_rows
import launch_records
import procs
import render
import start_times
import stats
import step_forms
import step_frontier
import step_latency
import step_overhead
import step_pairs
import step_start
import step_streams
import step_traces
import steps
import tally
from common import Failures, clean_environment


class Starts(unittest.TestCase):
    def times(self, added, noise=0.0, rounds=12):
        plain = [4.0 + noise * (i % 3 - 1) for i in range(rounds)]
        later = [4.0 + noise * ((i + 1) % 3 - 1) for i in range(rounds)]
        return {"plain": plain, "plain again": later, "high": [p + added for p in plain], "best-effort": [p + 2 * added for p in later]}

    def verdicts(self, added, noise=0.0):
        rows = start_times.rows({"wall": self.times(added, noise), "cpu": self.times(0.0)})
        return {(row["clock"], row["kind"]): row["verdict"] for row in rows}

    def test_a_promise_is_kept_broken_or_cannot_be_told(self):
        self.assertEqual(self.verdicts(0.05)["wall", "high"], "kept")
        self.assertEqual(self.verdicts(0.05)["wall", "best-effort"], "kept")
        self.assertEqual(self.verdicts(0.07)["wall", "best-effort"], "not kept")
        self.assertEqual(self.verdicts(0.1, noise=0.6)["wall", "high"], "cannot tell")
        self.assertEqual(set(self.verdicts(0.1).values()) - {"kept", "not kept"}, set())
        self.assertEqual([start_times.verdict(*bounds) for bounds in ((0.9, 1.03), (1.02, 1.04), (1.031, 1.04))], ["kept", "cannot tell", "not kept"])

    def test_plain_starts_are_compared_with_plain_ones_by_both_clocks(self):
        rows = start_times.rows({"wall": self.times(0.2), "cpu": self.times(0.4)})
        shown = {(row["clock"], row["kind"]): (row["added_s"], row["ratio"]) for row in rows}
        self.assertEqual(shown["wall", "plain again"], (0.0, 1.0))
        self.assertEqual((shown["wall", "high"], shown["cpu", "best-effort"]), ((0.2, 1.05), (0.8, 1.2)))

    def test_a_part_of_the_start_is_compared_with_the_whole(self):
        rows = start_times.rows({"wall": self.times(0.2), "gpu": {kind: [s / 4 for s in all_s] for kind, all_s in self.times(0.2).items()}})
        shown = {(row["clock"], row["kind"]): (row["plain_s"], row["added_s"], row["ratio"]) for row in rows}
        self.assertEqual(shown["gpu", "high"], (1.0, 0.05, 1.0125))

    def test_attainment_counts_requests_that_take_no_longer(self):
        self.assertEqual(step_frontier.attainment([1.0, 2.0, 3.0, 2.0], 2.0), 75.0)
        self.assertEqual(step_frontier.attainment([], 2.0), 0.0)

    def test_each_kind_is_in_each_place_and_behind_each_other(self):
        rounds = [start_times.order(turn) for turn in range(4)]
        for place in range(4):
            self.assertEqual({order[place] for order in rounds}, set(start_times.KINDS))
        behind = {(a, b) for order in rounds for a, b in itertools.pairwise(order)}
        self.assertEqual(len(behind), 12)

    def test_a_process_is_measured_with_its_children_and_must_succeed_in_time(self):
        busy = "i = 0\nwhile i < 3_000_000: i += 1"
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}], check=True)"
        times = step_start.run_once([sys.executable, "-c", child])
        self.assertGreater(times["cpu"], 0.05)
        self.assertGreater(times["wall"], 0.05)
        with self.assertRaisesRegex(RuntimeError, "ended with 3"):
            step_start.run_once([sys.executable, "-c", "import sys; sys.exit(3)"])
        with self.assertRaisesRegex(RuntimeError, "did not end within"):
            step_start.run_once(["sleep", "60"], limit_s=0.1)


class Statistics(unittest.TestCase):
    def test_percentiles_are_measured_values(self):
        values = list(range(1, 101))
        self.assertEqual(stats.percentile(values, 0.5), 50)
        self.assertEqual(stats.percentile(values, 0.99), 99)
        self.assertEqual(stats.percentile(values, 1), 100)
        self.assertEqual(stats.percentile(values, 0), 1)
        self.assertEqual(stats.percentile([7], 0.99), 7)

    def test_an_empty_sample_is_refused(self):
        for function in (stats.median, lambda v: stats.percentile(v, 0.5)):
            with self.assertRaises(ValueError):
                function([])

    def test_arrivals_are_poisson_and_repeatable(self):
        arrivals = stats.poisson_schedule(1000, 20, seed=7)
        self.assertEqual(arrivals, stats.poisson_schedule(1000, 20, seed=7))
        self.assertNotEqual(arrivals, stats.poisson_schedule(1000, 20, seed=8))
        self.assertEqual(arrivals, sorted(arrivals))
        self.assertTrue(0 < arrivals[0] and arrivals[-1] < 20)
        self.assertAlmostEqual(len(arrivals) / 20_000, 1, delta=0.03)
        gaps = [b - a for a, b in itertools.pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
        self.assertAlmostEqual(variance / mean**2, 1, delta=0.06)  # exponential: both moments agree

    def test_a_ratio_pairs_rounds(self):
        plain = [1.0, 2.0, 4.0, 1.0]
        ratio = stats.paired_ratio(plain, [v * 1.01 for v in plain])
        self.assertAlmostEqual(ratio["ratio"], 1.01)
        self.assertAlmostEqual(ratio["ratio_low"], ratio["ratio_high"])
        with self.assertRaises(ValueError):
            stats.paired_ratio([1.0], [])

    def test_the_interval_holds_the_median(self):
        low, high = stats.bootstrap_interval([float(v) for v in range(21)], stats.median)
        self.assertTrue(low <= 10 <= high and low < high)


def api(name, correlation, ts, dur=1, cat="cuda_runtime", tid=1):
    return {"name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def kernel(correlation):
    return {"name": "k", "cat": "kernel", "ts": 0, "dur": 1, "args": {"correlation": correlation}}


REGION = {"name": "r", "cat": "user_annotation", "ts": 100, "dur": 100}
ENTRY_POINTS = {"kernel": 1, "kernel_ex": 2, "cooperative": 0, "graph": 1}
SHIM = {"graph_kernels": 3, "total": 4, "captured": 0}


class LaunchRecords(unittest.TestCase):
    def events(self):
        return [
            REGION,
            api("cudaLaunchKernel", 1, 110),
            kernel(1),
            api("cuLaunchKernel", 9, 110.2, dur=0.5, cat="cuda_driver"),  # within the one before: the same launch
            api("cudaLaunchKernelExC", 2, 120),
            kernel(2),
            api("INVALID", 3, 125, cat="cuda_driver"),  # unnamed, but it caused a kernel
            kernel(3),
            api("cudaGraphLaunch", 4, 130),
            kernel(4),
            kernel(4),
            kernel(4),
            api("cudaMemsetAsync", 5, 140),
            {"name": "Memset", "cat": "gpu_memset", "ts": 141, "dur": 1, "args": {"correlation": 5}},
            api("cudaLaunchKernel", 6, 50),  # before the region
            kernel(6),
        ]

    def test_calls_and_kernels_of_the_region(self):
        records = launch_records.count_records(self.events(), "r")
        self.assertEqual((records["direct_calls"], records["direct_kernels"]), (3, 3))
        self.assertEqual((records["graph_calls"], records["graph_kernels"]), (1, 3))

    def test_equal_and_not(self):
        records = launch_records.count_records(self.events(), "r")
        right = {**SHIM, "by_entry_point": ENTRY_POINTS}
        self.assertTrue(launch_records.compare(records, right)["equal"])
        wrong = [(key, {**right, key: right[key] + 1}) for key in SHIM]
        for key, count in ENTRY_POINTS.items():
            wrong.append((key, {**right, "by_entry_point": {**ENTRY_POINTS, key: count + 1}}))
        for key, shim in wrong:
            entry = launch_records.compare(records, shim)
            self.assertFalse(entry["equal"], key)
            self.assertTrue(entry["differences"])

    def test_counters_of_a_region(self):
        before = {**SHIM, "by_entry_point": {**ENTRY_POINTS, "kernel": 7}}
        after = {**SHIM, "total": 6, "by_entry_point": {**ENTRY_POINTS, "kernel": 9}}
        counted = launch_records.difference(before, after)
        self.assertEqual((counted["total"], counted["by_entry_point"]["kernel"]), (2, 2))
        self.assertEqual(counted["by_entry_point"]["graph"], 0)

    def test_nothing_recorded_is_not_equal(self):
        records = launch_records.count_records([REGION], "r")
        none = {**dict.fromkeys(SHIM, 0), "by_entry_point": dict.fromkeys(ENTRY_POINTS, 0)}
        self.assertFalse(launch_records.compare(records, none)["equal"])

    def test_launch_names(self):
        yes = "cudaLaunchKernel cuLaunchKernelEx cudaLaunchKernelExC_v11060 cuGraphLaunch_ptsz cudaLaunchCooperativeKernel"
        for name in yes.split():
            self.assertTrue(launch_records.LAUNCH_NAME.match(name), name)
        for name in ("cudaLaunchHostFunc", "cuLaunchKernelFoo", "cudaGraphInstantiate"):
            self.assertFalse(launch_records.LAUNCH_NAME.match(name), name)


def recorded(correlation, ts, dur=2.0, **shape):
    args = {"correlation": correlation, "stream": 7, "grid": [4, 2, 1], "block": [128, 1, 1]}
    args |= {"registers per thread": 32, "shared memory": 16, "blocks per SM": 1.5, "est. achieved occupancy %": 9}
    return {"name": "k<1, 2>", "cat": "kernel", "ts": ts, "dur": dur, "args": {**args, **shape}}


def device_wait(correlation, ts, dur):
    return api("cudaDeviceSynchronize", correlation, ts, dur)


class KernelRows(unittest.TestCase):
    def events(self):
        memset = {"name": "Memset (Device)", "cat": "gpu_memset", "ts": 127, "dur": 1, "args": {"correlation": 4, "stream": 7}}
        return [
            {"name": "process_name", "ph": "M", "args": {}},
            device_wait(90, 80, 5),
            api("cudaLaunchKernel", 1, 90),  # a cold iteration
            recorded(1, 95),
            device_wait(91, 96, 4),
            api("cuCtxSynchronize", 92, 97, 2, cat="cuda_driver"),  # within the one before: the same wait
            api("cudaGraphLaunch", 2, 110, dur=3),
            recorded(2, 115),
            recorded(2, 117.5),
            device_wait(93, 118, 10),
            api("cudaMemsetAsync", 4, 126),  # launched before the wait was over
            memset,
            api("cudaStreamSynchronize_v3020", 5, 129),
            api("cuLaunchKernelEx", 6, 131, cat="cuda_driver"),
            recorded(6, 140),
            device_wait(94, 141, 3),
        ]

    def test_rows_have_their_iteration_launch_and_shape(self):
        rows, times, waits = kernel_rows.kernel_rows(self.events(), 2)
        named = [dict(zip(kernel_rows.COLUMNS, row, strict=True)) for row in rows]
        self.assertEqual([r["ts_us"] for r in named], [0, 2.5, 12, 25])
        self.assertEqual([r["iteration"] for r in named], [0, 0, 0, 1])
        self.assertEqual([r["launch_us"] for r in named], [-5, -5, 11, 16])
        self.assertEqual((named[0]["grid"], named[0]["regs"], named[2]["grid"]), ("4x2x1", 32, ""))
        self.assertEqual(times, [{"begin_us": -15, "end_us": 13}, {"begin_us": 13, "end_us": 29}])
        self.assertEqual(waits, [["cudaStreamSynchronize_v3020", 14, 1]])
        # Before its first launch it had waited for the iteration before; the stream's wait came before the last launch.
        self.assertEqual([r["waited_us"] for r in named], [-15, None, None, 15])
        self.assertEqual(kernel_rows.launched_share(rows), 1)
        lines = kernel_rows.to_csv(rows).splitlines()
        self.assertEqual(lines[0].split(","), list(kernel_rows.COLUMNS))
        self.assertIn('"k<1, 2>"', lines[1])

    def test_without_waits_all_rows_are_kept_and_no_iteration_is_claimed(self):
        events = [e for e in self.events() if "ynchronize" not in e["name"]]
        rows, times, _ = kernel_rows.kernel_rows(events, 2)
        self.assertEqual((len(rows), times), (5, []))
        self.assertEqual({row[kernel_rows.COLUMNS.index("iteration")] for row in rows}, {None})

    def test_missing_launches_and_missing_kernels_are_seen(self):
        events = [e for e in self.events() if e["name"] != "cudaGraphLaunch"]
        rows, _, _ = kernel_rows.kernel_rows(events, 2)
        self.assertEqual(kernel_rows.launched_share(rows), 0.5)
        with self.assertRaises(ValueError):
            kernel_rows.kernel_rows([e for e in events if e.get("cat") not in kernel_rows.GPU_CATEGORIES], 2)


class Traces(unittest.TestCase):
    """A process that dies costs the job it was at, and no other."""

    class Suite:
        def __init__(self, folder):
            self.out = self.logs = pathlib.Path(folder)
            self.args = type("Args", (), {"start_timeout_s": 10, "job_timeout_s": 10})
            self.written = []

        def write(self, name, content):
            self.written.append(json.loads(json.dumps(content)))

    def test_the_jobs_after_a_crash_are_served_by_another_process(self):
        import common

        jobs = ["a", "b", "c"]
        with tempfile.TemporaryDirectory() as folder:
            suite, failures = self.Suite(folder), common.Failures()
            script = pathlib.Path(folder) / "trace_job.py"
            script.write_text(
                "import json, os, sys\nsys.stdin.readline()\nfor job in sys.argv[3:]:\n"
                " if job == 'b': os._exit(9)\n"
                " open(os.path.join(sys.argv[2], job + '.csv'), 'w').write(job)\n"
                " print(json.dumps({'job': job, 'took_s': 0, 'ms': {'p50': 1, 'max': 1}}), flush=True)\n"
            )
            here, step_traces.HERE = step_traces.HERE, pathlib.Path(folder)
            try:
                results = step_traces.Results(suite, jobs)
                child = step_traces.Child(suite, "recorded", jobs, {})
                step_traces.run_part(suite, "recorded", child, {}, results, failures)
            finally:
                step_traces.HERE = here
            self.assertEqual(len(failures.messages), 1)
            self.assertIn("recorded, b", failures.messages[0])
            last = suite.written[-1]["jobs"]
            self.assertEqual([j for j in jobs if "error" in last[j]["recorded"]], ["b"])
            with tarfile.open(pathlib.Path(folder) / "traces.tar.gz") as archive:
                self.assertEqual(archive.getnames(), ["a.csv", "c.csv"])

    def test_rows_come_with_what_the_program_takes_alone(self):
        figures = {"ms": {"p50": 2.1, "p99": 2.2}, "launched_ms": {"p50": 0.1}}
        lines = step_traces.timed({"plain": figures, "mps": {"error": "no"}, "recorded": {}})
        self.assertEqual(lines, "# plain_ms=2.1 plain_p99_ms=2.2 plain_launched_ms=0.1\n")


class Pairs(unittest.TestCase):
    def served(self, ms):
        """One request's answer."""
        return {"service_ms": [ms], "queued_ms": [2 * ms], "unserved": 0, "overrun_s": 0.0}

    def line(self, own_be_steps_per_s):
        """A row of a training that made 2 steps a second, and 4 in plain mode."""
        pair = step_pairs.Pair("a+b", "a", "b")
        served = self.served(1.0)
        pair.solo, pair.beside_idle, pair.rate_per_s, pair.be_solo_steps_per_s = self.served(2.0), self.served(0.5), 500.0, 4.0
        suite = types.SimpleNamespace(
            args=types.SimpleNamespace(load=0.5, seconds=8, be_alone_seconds=2.5),
            machine=dict.fromkeys(("device", "driver", "torch", "commit", "date"), "x"),
        )
        return step_pairs.row(suite, pair, "tally-mps", "fifo", served, {"steps_per_s": 2.0}, 1.0, own_be_steps_per_s)

    def test_a_training_runs_alone_until_no_more_of_its_kernels_are_transformed(self):
        def alone(kernels):
            """How often, if the core says that so many are transformed after each time."""
            said, asked = iter(kernels), []

            def ask(do, **arguments):
                asked.append(do)
                return {"steps_per_s": len(asked), "service_ms": [1.0]}

            worker = types.SimpleNamespace(
                ask=ask, send=lambda *_, **__: None, receive=lambda **_: {}, process=types.SimpleNamespace(send=lambda _: None)
            )
            core = types.SimpleNamespace(status=lambda: {"clients": [{"name": "be-a+b", "pid": 1, "transformed": {"kernels": next(said)}}]})
            args = types.SimpleNamespace(be_alone_seconds=3, seconds=8)
            pair = step_pairs.Pair("a+b", "a", "b")
            own = step_pairs.measure_shared(args, pair, worker, worker, core)[3]
            times = asked.count("train")
            self.assertEqual(own, times, "the last is the one that counts")
            return times

        self.assertEqual(alone([4, 4]), 2)
        self.assertEqual(alone([0, 3, 9, 9]), 4)
        self.assertEqual(alone(range(99)), step_pairs.ALONE_TIMES_MAX)

    def test_a_pair_without_solo_figures_is_left_out_and_the_others_are_not(self):
        def ask(do, job, **_):
            if job == "broken":
                raise RuntimeError("no answer")
            return self.served(2.0)

        @contextlib.contextmanager
        def started(_):
            yield [types.SimpleNamespace(ask=ask)]

        pairs = [step_pairs.Pair(name, name, "b") for name in ("a", "broken", "c")]
        args = types.SimpleNamespace(load=0.5, seconds=8, be_alone_seconds=3)
        suite = types.SimpleNamespace(args=args, machine=dict.fromkeys(("device", "driver", "torch", "commit", "date"), "x"))
        failures, rows = Failures(), []
        results = types.SimpleNamespace(add=lambda line, _: rows.append(line["hp"]))
        silenced = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with mock.patch.object(step_pairs, "started", started), mock.patch.object(step_pairs, "Client"), silenced[0], silenced[1]:
            left = step_pairs.measure_solo(suite, pairs, results, failures)
        self.assertEqual(([pair.name for pair in left], rows), (["a", "c"], ["a", "c"]))
        self.assertEqual(pairs[0].rate_per_s, 250.0)
        self.assertTrue(any("broken" in message for message in failures.messages))

    def test_a_row_says_what_it_is_over_solo_and_over_the_same_beside_idle_programs(self):
        line = self.line(None)
        self.assertEqual([line[f"p99_over_{of}"] for of in ("solo", "solo_queued", "beside_idle")], [0.5, 0.5, 2.0])
        self.assertEqual([line[f"{of}_p99_ms"] for of in ("solo", "beside_idle")], [2.0, 0.5])

    def test_a_share_of_its_own_rate_comes_with_how_long_that_was_measured(self):
        line = self.line(2.5)
        self.assertEqual((line["be_share"], line["be_share_of_own"], line["be_alone_seconds"]), (0.5, 0.8, 2.5))
        line = self.line(None)
        self.assertEqual((line["be_share"], line["be_share_of_own"], line["be_alone_seconds"]), (0.5, None, None))

    def test_several_runs_are_told_as_medians_with_their_extremes(self):
        rows = [{**self.line(2.5), "notes": [], "be_share": share, "n_requests": 7} for share in (0.5, 0.3, 0.4)]
        merged = step_pairs.of_runs(rows)
        self.assertEqual((merged["runs"], merged["be_share"], merged["p99_over_solo"], merged["n_requests"]), (3, 0.4, 0.5, 7))
        self.assertEqual(len(merged["notes"]), 1)
        self.assertIn("medians of 3 runs", merged["notes"][0])
        self.assertIn("be_share 0.3 to 0.5", merged["notes"][0])
        rows[0]["own_solo_p50_ms"] = None
        self.assertIsNone(step_pairs.of_runs(rows)["own_solo_p50_ms"], "of two runs it is not the median of three")
        self.assertEqual(step_pairs.of_runs([{**rows[1], "notes": []}] * 2)["notes"], ["medians of 2 runs"], "no extremes")
        self.assertEqual(step_pairs.of_runs(rows[:1]), rows[0], "one is itself")


class Cut(unittest.TestCase):
    @staticmethod
    def row(blocks, block_us, prelude_us, offset_us):
        prelude = [{"flag_mask": mask, "equal": True, "once": True, "complete": True, "turnaround_p99_us": us}
                   for mask, us in ((0, 500.0), (3, prelude_us))]  # fmt: skip
        forms = [{"form": "sass prelude", "load": "CUDA_SUCCESS", "preempted": prelude}]
        if offset_us:
            # In as few slices as the bound of others lets there be, and in as many as the shim makes.
            offset = {"form": "sass sub-grid", "load": "CUDA_SUCCESS", "held_turnaround_p99_us": 5.0}
            forms.append({**offset, "in_use_turnaround_p99_us": offset_us})
        return {"blocks": blocks, "block_us": block_us, "original_us": blocks * block_us / 1_000, "forms": forms}

    def broken(self, *row):
        failures = Failures()
        with contextlib.redirect_stdout(io.StringIO()):
            step_forms.check_row("k", self.row(*row), failures)
        return failures.messages

    def test_what_counts_is_the_form_that_the_shim_uses(self):
        self.assertEqual(self.broken(65536, 1.0, 174.0, 37.0), [], "many blocks: by offset")
        self.assertEqual(len(self.broken(65536, 1.0, 174.0, None)), 1, "there is no such form")
        self.assertEqual(len(self.broken(8192, 1.0, 174.0, 37.0)), 1, "few blocks: the prelude's")
        self.assertEqual(len(self.broken(65536, 1.0, 24.0, 61.0)), 1)
        self.assertEqual(len(self.broken(16384, 19.0, 61.0, 37.0)), 1, "longer blocks: the prelude's")
        other = self.row(65536, 1.5, 174.0, 37.0)
        del other["forms"][1]["in_use_turnaround_p99_us"]
        self.assertIsNone(step_forms.turnaround_in_use(other, "sass"), "the shim's number of slices was not measured")

    def test_longer_blocks_have_longer(self):
        self.assertEqual(len(self.broken(4096, 15.0, 61.0, None)), 1)
        self.assertEqual(self.broken(4096, 52.0, 80.0, None), [])
        self.assertEqual(len(self.broken(4096, 52.0, 151.0, None)), 1)
        self.assertEqual(self.broken(4096, 155.0, 300.0, None), [], "nothing is promised of these")

    @unittest.skipUnless(DOCS.is_dir(), "beside a bundle there are no docs")
    def test_the_figures_in_the_repository_hold(self):
        kernels = json.loads((DOCS / "results" / "forms.json").read_text())["kernels"]
        in_use = {row["kernel"]: step_forms.turnaround_in_use(row, "sass") for row in kernels}
        self.assertLessEqual(in_use["vecadd"], 60)
        failures = Failures()
        for row in kernels:
            step_forms.check_row(row["kernel"], row, failures)
        self.assertEqual(failures.messages, [])


class Overhead(unittest.TestCase):
    def test_what_the_shim_adds_is_told_within_each_process(self):
        runs = [{"p50": 2900 + 100 * i, "added_p50": added} for i, added in enumerate((40, 60, 35))]
        row = step_overhead.launch_row("link", "high", runs, 7)
        self.assertEqual((row["plain_ns"], row["with_shim_ns"], row["noise_ns"]), (3000, 3040, 7))
        self.assertEqual([row["added_ns"][key] for key in ("p50", "min", "max")], [40, 35, 60])


class Latency(unittest.TestCase):
    def test_a_round_trip_is_the_median_of_its_runs(self):
        runs = [
            {"policy": "fifo", "gap_us": 5, "launches": 9, **dict.fromkeys(("p50_ns", "p90_ns", "p99_ns", "p999_ns"), ns)}
            for ns in (900, 5000, 1000)
        ]
        row = step_latency.of_runs(runs)
        self.assertEqual((row["p50_ns"], row["p99_ns"], row["p99_ns_of_runs"], row["runs"]), (1000, 1000, [900, 5000], 3))


class Status(unittest.TestCase):
    def test_a_client_is_found_by_name_and_pid_and_the_last_to_leave_otherwise(self):
        state = {
            "clients": [{"name": "a", "pid": 1}, {"name": "a", "pid": 2}],
            "departed": [{"name": "b", "id": 9}, {"name": "b", "id": 3}],
        }
        self.assertEqual(tally.client(state, "a", 2)["pid"], 2)
        self.assertEqual(tally.client(state, "b")["id"], 9)
        self.assertIsNone(tally.client(state, "c"))


class Processes(unittest.TestCase):
    def test_leftovers_are_found_by_their_token_and_ended(self):
        token = f"/tmp/test-{os.getpid()}"
        environment = {**os.environ, "TALLY_GPU_SUITE": token}
        left = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
        # Popen returns when the exec can no longer fail, a little before the new environment can be read.
        procs.wait_until(lambda: procs.with_token(token), 10, "its environment to be there", every_s=0.01)
        self.assertEqual(procs.sweep(token), [left.pid])
        self.assertNotEqual(left.wait(5), 0)
        self.assertEqual(procs.with_token(token), [])

    def test_a_process_answers_json_lines_and_is_ended(self):
        program = "import sys\nfor line in sys.stdin: print('noise'); print('{\"n\": %d}' % len(line), flush=True)"
        with tempfile.TemporaryDirectory() as folder:
            with procs.Process([sys.executable, "-c", program], f"{folder}/log", clean_environment(), pipe=True) as one:
                one.send({"do": "x"})
                self.assertEqual(one.receive(10), {"n": 12})
                with self.assertRaises(TimeoutError):
                    one.receive(0.1)
            self.assertFalse(one.alive())

    def test_no_client_environment_leaks(self):
        before = {k: os.environ.get(k) for k in ("LD_PRELOAD", "TALLY_NAME", "CUDA_MPS_PIPE_DIRECTORY")}
        try:
            os.environ.update(TALLY_NAME="x", CUDA_MPS_PIPE_DIRECTORY="y")
            self.assertFalse({"LD_PRELOAD", "TALLY_NAME", "CUDA_MPS_PIPE_DIRECTORY"} & set(clean_environment()))
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value


class Steps(unittest.TestCase):
    """That a step is told of wherever it has to be."""

    def test_each_has_a_script_and_each_script_is_a_step(self):
        names = [step.name for step in steps.STEPS]
        self.assertEqual(len(names), len(set(names)))
        scripts = {path.stem.removeprefix("step_") for path in HERE.glob("step_*.py")}
        self.assertEqual(set(names), scripts)
        for step in steps.STEPS:
            self.assertIn(f'step_main("{step.name}"', (HERE / f"step_{step.name}.py").read_text())

    def test_each_result_has_a_section_and_each_section_a_step(self):
        # What `render_decide.py` and `render_core.py` show is of benchmarks, no step.
        made = {name for step in steps.STEPS for name in step.results} | {"decide.json", "stalls.json", "costs.json"}
        self.assertEqual(made, set(render.FILES))
        for step in steps.STEPS:
            text = (HERE / f"step_{step.name}.py").read_text()
            for name in step.results:
                self.assertIn(name, text, step.name)

    def test_a_step_may_take_longer_than_it_does(self):
        for step in steps.STEPS:
            self.assertGreater(step.limit_s, int(step.takes_s.split()[0]), step.name)

    def test_the_readme_tells_of_them(self):
        text = steps.README.read_text()
        self.assertEqual(text, steps.updated(text), "bench/gpu/steps.py --write brings it up to date")
        self.assertEqual(text, steps.updated(text.replace("| 80 |", "| 81 |")))

    def test_run_sh_knows_them(self):
        done = subprocess.run([HERE / "run.sh", "--help"], check=True, capture_output=True, text=True, timeout=60)
        usual = " ".join(step.name for step in steps.STEPS if step.is_usual)
        self.assertIn(f"steps: {usual} (all", done.stdout)


class CommandLine(unittest.TestCase):
    def run_sh(self, *arguments):
        return subprocess.run([HERE / "run.sh", *arguments], check=False, capture_output=True, text=True, timeout=120)

    def test_wrong_arguments_are_refused(self):
        for arguments in ((), ("--bundle", "/tmp"), ("--bundle", "/tmp", "--out", "/tmp/x", "nonsense")):
            self.assertEqual(self.run_sh(*arguments).returncode, 2, arguments)

    def test_a_failing_step_does_not_stop_the_next_and_leaves_its_logs(self):
        with tempfile.TemporaryDirectory() as folder:
            bundle = pathlib.Path(folder) / "bundle"
            (bundle / "bin").mkdir(parents=True)
            demo = bundle / "bin" / "demo-one"
            demo.write_text("#!/bin/sh\necho it runs\n")
            demo.chmod(0o755)
            out = pathlib.Path(folder) / "out"
            done = self.run_sh("--bundle", str(bundle), "--out", str(out), "count", "demo")
            self.assertEqual(done.returncode, 1, done.stderr)
            steps = json.loads((out / "suite.json").read_text())["steps"]
            self.assertEqual([(s["step"], s["state"]) for s in steps], [("count", "failed (1)"), ("demo", "ok")])
            log = (out / "suite.log").read_text()
            self.assertIn("the bundle has no bin/tallyctl", log)
            self.assertIn("it runs", log)


class Streams(unittest.TestCase):
    """What the shim relies on of streams."""

    NOTHING = {"us": 2.0, "holds_up_one": False, "holds_up_many": False, "launches_before_one_is_held_up": 1019}

    def row(self, **event):
        captures = {"event_query, global": {"call": 900, "end": 901}, "event_query, relaxed": {"call": 0, "end": 0}}
        return {"operations": {"nothing": self.NOTHING, "untimed_event": {**self.NOTHING, **event}}, "captures": captures}

    def test_an_event_that_costs_nothing_is_right(self):
        self.assertEqual(step_streams.judge(self.row(us=2.4)), [])

    def test_an_event_that_costs_or_holds_up_is_told(self):
        for wrong in ({"us": 4.0}, {"holds_up_one": True}, {"holds_up_many": True}, {"launches_before_one_is_held_up": 509}):
            self.assertEqual(len(step_streams.judge(self.row(**wrong))), 1, wrong)
        self.assertEqual(step_streams.judge({"error": "no device"}), ["no device"])

    def test_a_capture_that_is_spoilt_by_a_relaxed_thread_is_told(self):
        row = self.row()
        row["captures"]["launch, relaxed"] = {"call": 0, "end": 901}
        self.assertEqual(len(step_streams.judge(row)), 1)


if __name__ == "__main__":
    unittest.main()
