"""Tests of the results' page. Standard library only; needs no GPU."""

import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cost_rows
import render
import render_core
import render_frontier
import render_import
import render_policy
import stats
import step_shim
import step_trainings
import wait_job
from common import merge_rows


MACHINE = {"device": "GPU", "driver": "1", "torch": "2", "commit": "c", "date": "2026-11-21"}


def pair_row(**changed):
    row = {
        "hp": "bert-graph",
        "be": "gpt2-train",
        "mode": "tally-mps",
        "policy": "tally-priority",
        "policy_config": None,
    }
    row |= {"vendor_rewrite": False, "load": 0.5, "solo_p50_ms": 1.0, "solo_p99_ms": 1.1, "beside_idle_p50_ms": 0.9, "beside_idle_p99_ms": 1.0, "p50_ms": 1.0, "p99_ms": 1.2}
    row |= {"p99_over_solo": 1.05, "p99_over_beside_idle": 1.15, "p50_queued_ms": 1.5, "p99_queued_ms": 4.0, "p99_over_solo_queued": 1.1, "p99_over_beside_idle_queued": 1.2}
    row |= {"be_share": 0.5, "n_requests": 1000, "unserved": 0, "notes": [], "device": "GPU", "driver": "1", "commit": "c", "date": "d"}
    return {**row, **changed}


class Results(unittest.TestCase):
    def test_the_page_says_what_the_results_say(self):
        docs = render.REPOSITORY / "docs"
        self.assertEqual((docs / "results.md").read_text(), render.render(docs / "results"), "run bench/gpu/render.py")


class Renderer(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.docs = pathlib.Path(self.folder.name)
        (self.docs / "results").mkdir()

    def put(self, name, content, folder=None):
        if isinstance(content, dict):
            content = {"machine": MACHINE, **content}
        (folder or self.docs / "results").joinpath(name).write_text(json.dumps(content))

    def text(self):
        return render.render(self.docs / "results")

    def test_nothing_measured_says_so(self):
        self.assertIn("Not measured yet: pairs, frontier, decode, counts, correct, exact, forms, overhead, latency, decide, stalls, costs, policy, several, shares, trainings, width, shim, speeds, speeds-vendor, units, waits, streams, kept, litmus, jit, start, tools.", self.text())

    def test_a_pair_within_bounds_has_no_footnote_and_one_beyond_has(self):
        self.put("pairs.json", [pair_row()])
        self.assertIn("+5.0 %", self.text())
        self.assertNotIn("[^1]", self.text())
        self.put("pairs.json", [pair_row(p99_over_solo=31.6), pair_row(mode="x", notes=["not governed"])])
        self.assertIn("+3060 %[^1]", self.text())
        self.assertIn("[^2]: bert-graph, x, tally-priority: not governed.", self.text())

    def test_pairs_say_whose_kernels_were_transformed_and_old_rows_stay_readable(self):
        transformed = {"preemptible": 5, "sliced": 4, "sm_limited": 0, "graph_chained": 1, "launches_yielded": 3}
        self.put("pairs.json", [pair_row(), pair_row(mode="new", vendor_rewrite=True, transformed=transformed), pair_row(policy="none")])
        text = self.text()
        self.assertIn("| tally-mps | tally-priority | untouched |", text)
        self.assertIn("| tally-mps | – | – |", text)
        self.assertRegex(text, r"\| new \| tally-priority \| transformed \|.*\| 10 \(3\) \|")

    def test_a_pair_whose_host_had_changed_is_left_out_of_the_means(self):
        rows = [
            pair_row(hp=hp, be=be, beside_idle_p50_ms=1.0, own_solo_p50_ms=1.6 if hp == "resnet50-eager" else 1.2, p99_over_solo=1.5)
            for hp, be in sorted(render.SUMMARY)
        ]
        rows[[r["hp"] for r in rows].index("resnet50-eager")]["p99_over_solo"] = 9.0
        self.put("pairs.json", rows)
        self.assertIn("| tally-mps, without resnet50-eager | tally-priority | untouched | +50.0 % | +50.0 % | +15.0 % | +15.0 % | 0.50 |", self.text())
        self.assertIsNone(stats.host_drift(1.2, 1.0, under_mps=False))
        self.assertEqual(stats.host_drift(1.3, 1.0, under_mps=False), 1.3)
        self.assertIsNone(stats.host_drift(None, 1.0, under_mps=False))

    def test_wrong_results_of_transformed_kernels_have_a_footnote(self):
        counts = dict.fromkeys((*render.FORMS, "kernels", "kernels_refused", "launches_yielded", "rescued"), 1)
        transformed = {**counts, "turnaround_us_p50": 20.4, "turnaround_us_p99": 30.0}
        row = {"sharing": "mps", "vendor_libraries": True, "runs": [{"different": ["bert"]}], "transformed": transformed}
        self.put("exact.json", {"rows": [row]})
        series = {"flag_mask": 3, "raised_by": "writes", "equal": True, "once": False, "complete": True}
        series |= {"turnaround_p50_us": 31, "turnaround_p99_us": 50}
        form = {"form": "sass prelude", "load": "CUDA_SUCCESS", "flag_off_equal": True, "flag_off_percent_mask_3": -0.01}
        form |= {"slices_8_percent": 8.55, "preempted": [series]}
        refused = {"form": "ptx prelude", "load": "CUDA_ERROR_INVALID_IMAGE"}
        kernel = {"kernel": "k", "blocks": 9, "block_us": 1.25, "forms": [form, refused]}
        steps = [{"call": "cuStreamWriteValue32", "us": 40}, {"call": "seen", "us": 960}, {"call": "launch", "us": 5}]
        facts = {"while-held": {"cuMemFree": {"steps": steps}, "cuMemFree_writes_first": {"steps": steps}}}
        facts["raise"] = {"exit": 1, "error": "e"}
        self.put("forms.json", {"rewritten": {"ptx prelude": {"refused": {"g": "why"}}}, "kernels": [kernel], "facts": facts})
        text = self.text()
        for expected in (
            "| mps | transformed | no[^1] |",
            "[^1]: mps, vendor kernels transformed: bert differ.",
            "Not measured: timeslice.",
            "| +0.0 % | +8.6 % |  | 31 | 50 | no[^2] |",
            "[^2]: k, sass prelude: not once when preempted.",
            "the driver answers CUDA_ERROR_INVALID_IMAGE",
            "`g` (ptx prelude: why)",
            "| `cuMemFree` | launch | 0.0 |",
            "| `cuMemFree` | write | 1.0 |",
        ):
            self.assertIn(expected, text)

    def test_every_section_renders(self):
        count = {"job": "j", "priority": "high", "equal": False, "differences": ["kernels: 1, 2"]}
        self.put("counts.json", {"rows": [count, {"job": "k", "priority": "high", "equal": False, "error": "E"}]})
        self.put("correct.json", {"rows": [{"scene": "shared", "sharing": "mps", "passed": True, "required": True}]})
        ratio = {
            "ratio": 1.02,
            "ratio_low": 1.01,
            "ratio_high": 1.03,
            "noise": 0.001,
            "plain_ms": 1,
            "with_shim_ms": 1.02,
        }
        launch = {"entry_point": "link", "kind": "high", "plain_ns": 2500, "with_shim_ns": 2700}
        launch["added_ns"] = {"p50": 200, "min": 190, "max": 210}
        content = {
            "promise_ratio_max": 1.005,
            "eager_launches": 250,
            "requests": [{"job": "r", "kind": "high", **ratio}, {"job": "resnet50-eager", "kind": "high", **ratio}],
            "launches": [launch, {**launch, "entry_point": "dlopen", "noise_ns": 12}],
        }
        self.put("overhead.json", content)
        row = {
            "policy": "fifo",
            "burst": 1,
            "plain_p50_us": 2,
            "decided_p50_us": 3,
            "added_p50_us": 1,
            "added_p99_us": 5,
        }
        memops = {"per_kernel": [{"tracking": "t", "kernel_ns": 2000, "us_per_kernel": 5, "host_us_per_kernel": 1}]}
        memops["seen_done"] = [{"by": "b", "p50_us": 1, "p99_us": 2}]
        state = {"fifo": {"decision_latency": {"p50_us": 0.4, "p99_us": 0.9}}}
        trip = {"policy": "fifo", "gap_us": 0, "p50_ns": 900, "p99_ns": 5000, "p999_ns": 9000, "runs": 3, "p99_ns_of_runs": [4000, 6500]}
        content = {"roundtrip": [trip], "rows": [row], "promise_p99_us": 2.0, "spin_us": 9, "states": state, "memops": memops}
        self.put("latency.json", content)
        text = self.text()
        for expected in (
            "kernels: 1, 2",
            "+2.00 %",
            "costs 200 ns more",
            "| +190 to +210 | 12 |",
            "come to 50 us more of its CPU's time by the dearest of these ways, 5.00 % ",
            "p99 5.00 us, promised at most 2 us",
            "| 4.00 to 6.50 |",
            "0.40 / 0.90",
            "Not measured yet: pairs, frontier, decode, exact, forms, decide, stalls, costs, policy, several, shares, trainings, width, shim, speeds, speeds-vendor, units, waits, streams, kept, litmus, jit, start, tools.",
        ):
            self.assertIn(expected, text)

    def test_the_policys_life(self):
        """What is equal, lost and late is told, and what was not measured is left out."""
        times = {"n": 9, "p50": 1.5, "p99": 2.25, "max": 7.125}
        window = {"service_ms": times, "queued_ms": times, "be_steps_per_s": 12.5}
        log = {"begun": "in mid-run", "decisions": 100, "decisions_per_s": 50, "equal_decisions": 98, "equal": False}
        log |= {"calls_differ": 2, "dropped": 3, "bytes": 20480, "recorded_s": 2, "replay_s": 0.5, "while_recording": window}
        shadow = {"policy": "fifo", "active": "tally-priority", "agreement_percent": 61.5, "decisions": 200, "skipped": 1}
        shadow |= {"dropped": 0, "cpu_percent": 2.4, "cpu_percent_max": 5, "with": window, "without": [window, window]}
        arm = {"name": "fifo", "hp_p99_ms": 1.25, "be_gpu_ms_per_s": 300.0}
        ab = {"test": "a guard", "plan": {"metric": "be_throughput"}, "ended": {"reason": "guard"}, "elapsed_s": 0.25, "pairs": 0}
        ab |= {"effect": {"ratio": 1.0, "low": None, "high": None}, "verdict": "undecided", "a": arm, "b": arm, "a_back_after_ns": 886182}
        fault = {"fault": "stall", "counted_ms": 1998.3, "named_ms": None, "back_ms": 4124.3, "before_ms": times, "around_ms": None}
        fault |= {"training_equal": False}
        pause = {"p50": 40.2, "max": 91.0}
        content = {"hp": "bert-graph", "be": "gpt2-train", "load": 0.5, "sharing": "timeslice", "policy": "tally-priority"}
        content |= {"log": [log], "shadow": shadow, "ab": [ab], "chaos": [fault], "failures": ["it broke"]}
        content["end"] = {"clients": [{}], "active_policies": 40, "swap_pause_us": pause}
        self.put("policy.json", content)
        text = self.text()
        for expected in (
            "| in mid-run | 100 | 50 | 98 (not all) | 3 | 10 | 0.50 | 2.250 |",
            "61.50 % of 200 decisions equal, 1 left out",
            "It took 2.40 % of a CPU",
            "| with the shadow | 1.500 | 2.250 | 2.25 | 12.50 |",
            "| a guard: fifo, fifo | `timeslice` | be_throughput | undecided | 0.2 | guard | 0 |  |  | 1.250 / 1.250 | 300 / 300 | 0.9 |",
            "| stall | 1998 |  | 4124 | 2.250 |  |  |  | differs |",
            "1 of the 2 clients were connected, after 40 active policies",
            "[^1]: Policy: it broke.",
        ):
            self.assertIn(expected, text)
        self.put("policy.json", {key: content[key] for key in ("hp", "be", "load", "sharing", "policy")})
        self.assertNotIn("### A shadow", self.text())
        machine = {"device": "NVIDIA X", "commit": "abc", "date": "2026-01-02"}
        again = {"machine": machine, "sharing": "mps", "shadow": shadow, "failures": ["shadow: late"]}
        self.put("policy.json", render_policy.merged(content, again))
        text = self.text()
        self.assertIn("On an NVIDIA X, commit `abc`, 2026-01-02, in `mps`. `fifo` as the shadow", text)
        self.assertIn("| a guard: fifo, fifo |", text)
        self.assertIn("Policy: it broke.", text)
        self.assertIn("Policy: shadow: late.", text)

    def test_ab_tests_of_both_sharing_modes_stand_in_one_table(self):
        """A run in one mode replaces the same tests of that mode, and nothing else."""
        arm = {"name": "fifo", "hp_p99_ms": 1.25, "be_gpu_ms_per_s": 300.0}
        row = {"test": "compared", "ended": {"reason": "decided"}, "pairs": 10, "a": arm, "b": arm, "a_back_after_ns": None}
        row |= {"effect": {"ratio": 2.0, "low": 1.5, "high": None}}

        def run(sharing, commit, verdict, *metrics, failures=()):
            tests = [{**row, "plan": {"metric": m}, "verdict": verdict, "elapsed_s": 20.0} for m in metrics]
            machine = {"device": "NVIDIA X", "commit": commit, "date": "2026-01-02"}
            content = {"hp": "bert-graph", "be": "gpt2-train", "load": 0.5, "sharing": sharing, "policy": "tally-priority"}
            return {**content, "machine": machine, "ab": tests, "failures": list(failures)}

        def table(content):
            self.put("policy.json", content)
            return [line.split(" | ")[1:5] for line in self.text().splitlines() if line.startswith("| compared")]

        slices = run("timeslice", "aaa", "undecided", "hp_p99", "be_throughput")
        mps = run("mps", "bbb", "keep_a", "hp_p99", failures=["ab in mps, hp_p99: it broke"])
        both = render_policy.merged(slices, mps)
        expected = [["`timeslice`", "hp_p99", "undecided", "20.0"], ["`timeslice`", "be_throughput", "undecided", "20.0"]]
        self.assertEqual(table(both), [*expected, ["`mps`", "hp_p99", "keep a", "20.0"]])
        text = self.text()
        self.assertIn("In `timeslice` on an NVIDIA X, commit `aaa`, 2026-01-02; `mps` on an NVIDIA X, commit `bbb`, 2026-01-02. Effect:", text)
        self.assertIn("Policy: ab in mps, hp_p99: it broke.", text)
        # In the other order, and time-slicing measured again: what `mps` gave stays.
        again = render_policy.merged(render_policy.merged(mps, slices), run("timeslice", "ccc", "promote_b", "be_throughput"))
        modes = [["`mps`", "hp_p99", "keep a", "20.0"], expected[0], ["`timeslice`", "be_throughput", "promote b", "20.0"]]
        self.assertEqual(table(again), modes)
        self.assertEqual(again["failures"], ["ab in mps, hp_p99: it broke"])
        # Another part, measured alone, keeps the tests and their runs.
        log = {**run("mps", "ddd", "keep_a"), "shadow": {"policy": "fifo"}}
        kept = render_policy.merged(both, log)
        self.assertEqual([row["made"]["commit"] for row in kept["ab"]], ["aaa", "aaa", "bbb"])
        # `mps` measured again drops what failed there before.
        mended = render_policy.merged({**both, "log": [{}]}, run("mps", "eee", "keep_a", "hp_p99"))
        self.assertEqual(mended["failures"], [])

    def test_a_share_of_what_the_process_itself_makes_stands_beside_the_other(self):
        self.put("pairs.json", [pair_row(be_share=0.5, be_share_of_own=0.625)])
        self.assertIn("| 0.50 (0.62 of its own) |", self.text())

    def test_several_trainings_are_shown_together(self):
        row = {
            "policy": "fifo",
            "ready_s": {"hp": 9.0, "a": 12.5, "b": 11.0},
            "slices_us": {"a": 350, "b": 350},
            "slice_left_alone_us": 10,
            "alone_ms": {"p50": 1.0, "p99": 1.25},
            "together_ms": {"p50": 1.5, "p90": 2.0, "p99": 3.0},
            "alone_steps_per_s": 10,
            "together_steps_per_s": [2, 1.5],
            "without_requests_steps_per_s": [4, 5],
        }
        self.put("several.json", {"hp": "bert-graph", "be": "gpt2-train", "load": 0.5, "rows": [row]})
        expected = "| fifo | 350/350 | 10 | 12.5 | 1.000 / 1.250 | 1.500 | 2.000 | 3.000 | 0.35 | 0.90 |"
        self.assertIn(expected, self.text())

    def test_weights_and_floors_are_shown_as_shares_and_speeds(self):
        beside = {"ms": {"p99": 1.5}, "steps_per_s": [1, 0.5], "shares": [0.125, 0.25]}
        row = {
            "sharing": "timeslice",
            "floor_percent": 25.0,
            "alone_ms": {"p99": 1.25},
            "alone_steps_per_s": [10, 10],
            "together_steps_per_s": [7.5, 2.5],
            "together_shares": [0.75, 0.24],
            "without_floor": beside,
            "with_floor": beside,
            "floor": {"granted_percent": 25.0, "had_percent": 24.5},
        }
        self.put("shares.json", {"hp": "bert-graph", "be": "gpt2-train", "load": 0.8, "rows": [row]})
        text = self.text()
        self.assertIn("| timeslice | no requests | 0.75 / 0.24 | 0.75 / 0.25 |  |  |", text)
        self.assertIn("| timeslice | requests, floor 25 % | 0.12 / 0.25 | 0.10 / 0.05 | 1.20 | 24.5 |", text)

    def test_sums_of_rates_are_shown_over_one_program_alone(self):
        row = {"job": "lstm-train", "mode": "time-slicing", "policy": "none", "ungated": False, "programs": 1, "steps_per_s": [10.0, 8.0, 11.0]}
        rows = [row, {**row, "mode": "tally-mps", "policy": "throughput", "programs": 2, "steps_per_s": [16.0, 15.0, 18.0]}]
        rows += [{**rows[1], "programs": 4, "steps_per_s": [19.0]}, {**rows[1], "policy": "fifo", "ungated": True}]
        self.put("trainings.json", {"rows": step_trainings.over_alone(rows)})
        text = self.text()
        self.assertIn("| `lstm-train` | time-slicing | none | 1.00 (0.80 to 1.10) |  |  |", text)
        self.assertIn("| `lstm-train` | tally-mps | throughput |  | 1.60 (1.50 to 1.80) | 1.90 (1.90 to 1.90) |", text)
        self.assertIn("| `lstm-train` | tally-mps | ungated |  | 1.60 (1.50 to 1.80) |  |", text)

    def test_what_throughput_lacks_of_mps_and_over_slices_is_told(self):
        def row(mode, policy, over):
            return {"job": "j", "mode": mode, "policy": policy, "programs": 2, "over_alone": over}

        bases = [row("mps", "none", 1.8), row("time-slicing", "none", 1.0)]
        self.assertEqual(step_trainings.shortfall([*bases, row("tally-mps", "throughput", 1.75)]), [])
        found = step_trainings.shortfall([*bases, row("tally-mps", "throughput", 1.4)])
        self.assertEqual(["1.8" in found[0], "1.0" in found[1], len(found)], [True, True, 2])
        # MPS is not so much faster itself.
        slower = [row("mps", "none", 1.4), bases[1], row("tally-mps", "throughput", 1.38)]
        self.assertEqual(step_trainings.shortfall(slower), [])

    def test_a_width_is_shown_over_all_sms(self):
        whole = {"job": "gpt2-train", "sms": None, "put_off_joins": False, "leased": False, "steps_per_s": 10.0, "over_all_sms": 1.0, "over_all_sms_of_rounds": [1.0, 1.0], "launches": 500, "sm_limited": 0, "sm_limited_consecutive": 0}
        some = {**whole, "sms": 112, "put_off_joins": True, "leased": True, "steps_per_s": 8.5, "over_all_sms": 0.85, "over_all_sms_of_rounds": [0.84, 0.9], "sm_limited": 400, "sm_limited_consecutive": 380, "sm_limit_us_p50": 4.21}
        gap = {"count": 300, "p50_us": 1.25, "p95_us": 9.0, "p99_us": 20.0}
        self.put("width.json", {"rows": [whole, some], "changes": [{"job": "gpt2-train", "changed": gap, "same": {"count": 0}}]})
        text = self.text()
        self.assertIn("| gpt2-train | all |  | 10.00 |  | 500 | 0 | 0 |", text)
        self.assertIn("| gpt2-train | 112 | leased, put off | 8.50 | 0.850 (0.840, 0.900) | 500 | 400 | 380 | 4.2 |", text)
        self.assertIn("| gpt2-train | 300 | 1.2 / 9.0 / 20.0 | 0 | - |", text)

    def test_figures_of_hostile_clients(self):
        quantiles = {"p50": 10, "p99": 20}
        row = {"attack": "Noise", "connections": 100, "without_us": quantiles, "with_us": {"p50": 12, "p99": 31}}
        row |= {"ratio": {"p50": 1.2, "p99": 1.55}, "runs": 7, "launches_each": 1000, "ungated": 0}
        stalls = {"machine": {"cpus": 2, "date": "2026-11-24"}, "rows": [row, {**row, "connections": 1, "ungated": 3}]}
        self.put("stalls.json", {**stalls, "notes": ["`Noise`: later."]})
        cost = {"figure": "policy call", "unit": "ns", "digits": 0, "before": [210, 200], "after": [230, 220]}
        launch = {"figure": "ungated launch", "unit": "ns", "digits": 1, "before": [10, 20, 40], "after": [11, 24, 36]}
        pairs = {"date": "2026-11-25", "before": "c", "after": "d", "note": "By hand.", "rows": [launch]}
        costs = {"machine": {"cpus": 2, "date": "2026-11-24"}, "before": "a", "after": "b", "rows": [cost]}
        speed = {"figure": "simulation", "unit": "ms", "digits": 1, "side": "since", "before": [40, 50], "after": [44, 50]}
        simulator = {"date": "2026-11-26", "before": "e", "after": {"renames": "f", "since": "g"}, "rows": [speed]}
        self.put("costs.json", {**costs, "in_pairs": pairs, "simulator": simulator})
        text = self.text()
        self.assertIn("the worst here is 1.55. Launches that would have gone ahead ungated: 3.", text)
        self.assertIn("\n\n`Noise`: later.\n\n| attack |", text)
        self.assertIn("| Noise | 100 | 10.0 | 20.0 | 12.0 | 31.0 | 1.20 | 1.55 |", text)
        self.assertIn("| policy call | ns | 2 | 200 (to 210) | 220 (to 230) | 1.10 |", text)
        self.assertIn("| ungated launch | ns | `d` | 2 CPUs as above, 2026-11-25 | 3 | 20.0 | 24.0 | 1.10 | 0.90 to 1.20 |", text)
        self.assertIn("| simulation | ms | 2 | `g` | 40.0 | 44.0 | 1.10 | 1.05 |", text)

    def test_runs_in_pairs_become_rows_with_their_commit_and_machine(self):
        figures = {"policy call, fifo, ns": 200.0, "round trip, built-in, core spins, p99, us": 0.5, "policy call, native, ns": 7}
        later = {**figures, "policy call, fifo, ns": 220.0}
        # The second pair began with the later commit.
        runs = [(1, "before", figures), (1, "after", later), (2, "after", figures), (2, "before", figures)]
        content = {"machine": {"model": "X", "cpus": 16, "pinned_cpus": 4}, "date": "2026-11-27", "before": "c", "after": "h"}
        content |= {"runs": [{"pair": pair, "side": side, "figures": values} for pair, side, values in runs]}
        launch = {"figure": "ungated launch", "unit": "ns", "digits": 1, "before": [10], "after": [11]}
        costs = {"in_pairs": {"date": "2026-11-25", "before": "c", "after": "d", "note": "By hand.", "rows": [launch]}}
        once = cost_rows.added(costs, content)
        self.assertEqual(cost_rows.added(once, content), once)
        text = "\n".join(render_core.since_before_all(once["in_pairs"], {"cpus": 2}, render.table))
        self.assertIn("| ungated launch | ns | `d` | 2 CPUs as above, 2026-11-25 | 1 |", text)
        self.assertIn("| policy call, `fifo` | ns | `h` | 4 of 16 CPUs, X, 2026-11-27 | 2 | 200 | 210 | 1.05 | 1.00 to 1.10 |", text)
        self.assertIn("| round trip, core spins, built-in rule, p99 | us | `h` | 4 of 16 CPUs, X, 2026-11-27 | 2 | 0.50 | 0.50 | 1.00 |", text)
        self.assertIn("round trips by the benchmark `latency`", text)
        self.assertNotIn("native", text)
        half = {**content, "runs": content["runs"][:3]}
        less = {**content, "runs": [*content["runs"][:3], {"pair": 2, "side": "before", "figures": {"policy call, fifo, ns": 1.0}}]}
        for wrong in (half, less, {**content, "before": "e"}):
            with self.assertRaises(ValueError):
                cost_rows.added(costs, wrong)

    def test_calls_of_a_policy_are_shown_with_their_extremes(self):
        runs = [{"criterion_ns": [n - 1, n, n + 2], "single_p50_ns": n - 20} for n in (180.0, 200.0, 181.0)]
        rows = [{"commit": "c", "run": i, "policies": {"fifo": run}} for i, run in enumerate(runs, 1)]
        self.put("decide.json", {"machine": {**MACHINE, "cpus": 16}, "promise_p50_ns": 200, "rows": rows})
        self.assertIn("| `c` | fifo | 3 | 181 (180 to 200) | 161 (160 to 180) |", self.text())

    def test_starts_say_what_can_be_told(self):
        times = {"plain": [4.0] * 8, "plain again": [4.0] * 8, "high": [4.04] * 8, "best-effort": [4.4] * 8}
        self.put("start.json", {"sharing": "timeslice", "promise_ratio_max": 1.03, "times_s": {"wall": times, "cpu": times}})
        text = self.text()
        self.assertIn("| high | cpu | 4.0 | +0.040 | 1.010 | 1.010 to 1.010 | kept |", text)
        self.assertIn("| best-effort | wall | 4.0 | +0.400 | 1.100 | 1.100 to 1.100 | not kept |", text)
        self.assertIn("| plain again | wall | 4.0 | +0.000 | 1.000 | 1.000 to 1.000 |  |", text)
        self.assertIn("8 rounds", text)

    def test_starts_with_forms_on_disk_are_shown(self):
        row = {"start": "kept, found", "cache_mib": 256, "kernels": 30, "ready_s": 1.2, "all_transformed_s": 1.7}
        row |= {"cpu_s": {"tally-rewrite": 0.5, "tally-flag": 3}, "files": 27, "files_bytes": 131 << 20}
        self.put("kept.json", {"hp": "bert-graph", "be": "gpt2-train", "seconds": 6, "rows": [row]})
        self.assertIn("| kept, found | 256 | 27 (131 MiB) | 30 | 1.7 | 0.5 | 1.2 |", self.text())

    def test_the_shims_tests_are_counted_and_failed_ones_named(self):
        self.assertEqual(step_shim.names("a::b: test\nc: benchmark\nd: test\n"), ["a::b", "d"])
        self.assertIsNotNone(step_shim.left_out("graphs::a_part_that_fails_ends_the_launch"))
        self.assertIsNone(step_shim.left_out("graphs::long_kernels"))
        states = {"a": "passed", "b": "hung", "c": "left out"}
        self.put("shim.json", {"rows": [{"binary": "forms", "test": name, "state": state} for name, state in states.items()]})
        self.assertIn("counted: 1 passed, 1 failed[^1], 1 left out", self.text())
        self.assertIn("[^1]: The shim's tests: forms b hung.", self.text())

    def test_speeds_are_shown_alone_and_beside_a_training(self):
        both = {"bert-graph": 1.145, "small-kernels-graph": 0.3125}
        beside = {
            "name": "refreshed",
            "ready_ms": both,
            "trained_ms": {**both, "bert-graph": 1.1},
            "requests_ms": {"p50": 1.125, "p99": 2.0},
            "p99_over_alone": 1.99,
            "be_share": 0.35,
            "transformed": {"sm_limited": 12},
            "refreshed": {"count": 9},
        }
        content = {"hp": "bert-graph", "be": "gpt2-train", "load": 0.5, "vendor_rewrite": False}
        alone = {"where": "mps", "state": "as it starts", **both}
        self.put("speeds.json", {**content, "alone": [alone], "beside": [beside]})
        self.assertIn("| mps | as it starts | 1.145 | 0.312 |", self.text())
        self.assertIn("| refreshed | 1.145 | 1.100 | 1.125 | 2.000 | 1.99x | 0.35 | 12 | 9 |", self.text())

    def test_calls_that_wait_are_told_from_those_that_do_not(self):
        case = {"loading": "LAZY", "action": "free", "beside": None}
        rows = [{**case, "state": "a_waits", "waits": False, "ms": 0.25}, {**case, "state": "a_runs", "waits": True, "ms": 1500.5}]
        rows.append({**case, "state": "a_runs_and_waits", "waits": True, "hung": True})
        rows.append({**case, "action": "launch_known", "beside": "free", "state": "a_runs", "error": "no device"})
        for state, issued_ms in (("a_waits", 0.3), ("a_runs", 1500.2)):
            rows.append({**case, "action": "launch_first_time", "state": state, "waits": True, "ms": 1500.4, "issued_ms": issued_ms})
        self.put("waits.json", {"rows": rows})
        self.assertIn("| free | no | **waits** | **for good** |", self.text())
        self.assertIn("| launch known, another thread: free |  | error |  |", self.text())
        self.assertIn("| launch first time | **waits** on the GPU | **waits** |  |", self.text())
        for name in (*wait_job.STATES, *wait_job.ACTIONS):
            self.assertTrue(callable(getattr(wait_job.Job, name)), name)

    def test_importing_replaces_rows_of_the_same_key(self):
        self.put("pairs.json", [pair_row(p50_ms=9), pair_row(mode="mps", p50_ms=8)])
        out = self.docs / "out"
        out.mkdir()
        self.put("pairs.json", [pair_row(p50_ms=1)], out)
        self.put("latency.json", {"rows": [], "memops": None}, out)
        self.put("latency.json", {"memops": {"per_kernel": []}})
        self.assertEqual(render_import.take_over([out], self.docs / "results", render.FILES), ["pairs.json", "latency.json"])
        rows = json.loads((self.docs / "results" / "pairs.json").read_text())
        self.assertEqual([(r["mode"], r["p50_ms"]) for r in rows], [("mps", 8), ("tally-mps", 1)])
        latency = json.loads((self.docs / "results" / "latency.json").read_text())
        self.assertEqual(latency["memops"], {"per_kernel": []})

    def test_kernels_measured_anew_replace_theirs_and_the_bound_is_shown(self):
        def kernel(name, **form):
            base = {"form": "sass sub-grid", "load": "CUDA_SUCCESS", "whole_percent": 0.4, "slices_8_percent": 30.9}
            return {"kernel": name, "blocks": 9, "block_us": 1, "forms": [{**base, **form}]}

        self.put("forms.json", {"rewritten": {}, "kernels": [kernel("a"), kernel("b")], "facts": {"raise": {}}})
        out = self.docs / "out"
        out.mkdir()
        bounds = {"slices_in_bound": 3, "slice_us": 25.0, "slices_in_bound_percent": 11.84}
        bounds |= {"held_turnaround_p50_us": 14.25, "held_turnaround_p99_us": 33.5, "held_once": True}
        used = {"slices_in_use": 2, "in_use_turnaround_p50_us": 15.0, "in_use_turnaround_p99_us": 35.0}
        new = [kernel("b", **bounds), kernel("c", **{**bounds, "slice_us": 52.5}), kernel("d", **bounds, **used)]
        content = {"machine": {**MACHINE, "commit": "newer"}, "rewritten": {"x": {"refused": {}}}, "kernels": new}
        (out / "forms.json").write_text(json.dumps(content))
        self.assertEqual(render_import.take_over([out], self.docs / "results", render.FILES), ["forms.json"])
        kept = json.loads((self.docs / "results" / "forms.json").read_text())
        self.assertEqual([(r["kernel"], r["made"]["commit"]) for r in kept["kernels"]], [("a", "c"), ("b", "newer"), ("c", "newer"), ("d", "newer")])
        self.assertEqual((kept["facts"], kept["rewritten"]), ({"raise": {}}, {"x": {"refused": {}}}))
        text = self.text()
        self.assertIn("| b | sass sub-grid | `newer` | 9 | 1.0 | +0.4 % | +30.9 % | 3: +11.8 % | 14 | 34 | yes |", text)
        self.assertIn("| c | sass sub-grid | `newer` | 9 | 1.0 | +0.4 % | +30.9 % | none | 14 | 34 | yes |", text)
        self.assertIn("| d | sass sub-grid | `newer` | 9 | 1.0 | +0.4 % | +30.9 % | 3: +11.8 % | 15 | 35 | yes |", text, "as the shim does it")

    def test_the_mean_cost_is_that_of_long_kernels(self):
        def kernel(name, us, percent):
            form = {"form": "sass prelude", "load": "CUDA_SUCCESS", "slices_8_percent": 9, "flag_off_percent_mask_3": percent}
            return {"kernel": name, "blocks": 9, "block_us": 1, "original_us": us, "forms": [form]}

        kernels = [kernel("a", 101, 1), kernel("b", 900, 4), kernel("c", 100, 70)]
        self.put("forms.json", {"rewritten": {}, "kernels": kernels})
        self.assertIn("more than 100 us: +2.5 % (sass prelude, 2 kernels).", self.text())

    def test_litmus_reports_of_other_setups_or_code_are_kept(self):
        out = self.docs / "out"
        out.mkdir()

        def take(setup, commit, ended, seed=1):
            row = {"campaign": "in turns", "part": "made", "setup": setup, "ended": ended, "mechanisms": {}}
            content = {"machine": {**MACHINE, "commit": commit}, "seed": seed, "rows": [row]}
            (out / "litmus.json").write_text(json.dumps(content))
            self.assertEqual(render_import.take_over([out], self.docs / "results", render.FILES), ["litmus.json"])

        for report in (("fifo", "a", 1), ("random", "a", 2), ("fifo", "b", 3), ("fifo", "a", 4), ("fifo", "a", 5, 2001)):
            take(*report)
        kept = json.loads((self.docs / "results" / "litmus.json").read_text())["reports"]
        self.assertEqual([(r["machine"]["commit"], r["rows"][0]["ended"]) for r in kept], [("a", 2), ("b", 3), ("a", 4), ("a", 5)])
        self.assertIn("| in turns | made | random | 2 | 0 |", self.text())

    def test_scenes_of_one_sharing_mode_keep_the_others_and_their_commit(self):
        row = {"scene": "shared", "passed": True, "required": True}
        self.put("correct.json", {"rows": [{**row, "sharing": r} for r in ("timeslice", "mps")]})
        out = self.docs / "out"
        out.mkdir()
        content = {"machine": {**MACHINE, "commit": "newer"}, "rows": [{**row, "sharing": "timeslice"}]}
        (out / "correct.json").write_text(json.dumps(content))
        self.assertEqual(render_import.take_over([out], self.docs / "results", render.FILES), ["correct.json"])
        rows = json.loads((self.docs / "results" / "correct.json").read_text())["rows"]
        self.assertEqual(
            [(r["sharing"], r["commit"]) for r in rows], [("mps", MACHINE["commit"]), ("timeslice", "newer")]
        )
        self.assertIn("| timeslice | GPU, `newer`, 2026-11-21 | yes |", self.text())

    def test_merging_keeps_other_rows(self):
        self.assertEqual(
            merge_rows([{"a": 1, "v": 1}, {"a": 2}], [{"a": 1, "v": 2}], ["a"]), [{"a": 2}, {"a": 1, "v": 2}]
        )

    def test_the_key_is_the_steps(self):
        import step_pairs

        self.assertEqual(render_import.PAIR_KEY, step_pairs.KEY)


class SeveralRuns(unittest.TestCase):
    def row(self, share, attainment=99.5, policy="slo-herald", **changed):
        given = {"hp": "a", "be": "b", "mode": "tally-mps", "slo_over_p99": 2.0, "load": 0.5, "device": "X", "runs": 1, "commit": "c", "date": "d"}
        return {**given, "policy": policy, "be_share": share, "attainment_percent": attainment, "attainment_queued_percent": 90.0, **changed}

    def test_rows_of_several_runs_become_medians_with_their_extremes(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for number, share in enumerate((0.5, 0.3, 0.4)):
                (root / str(number)).mkdir()
                (root / str(number) / "frontier.json").write_text(json.dumps([self.row(share)]))
            outs = [root / str(number) for number in range(3)]
            self.assertEqual(render_import.take_over(outs, root / "docs", render.FILES), ["frontier.json"])
            (row,) = json.loads((root / "docs" / "frontier.json").read_text())
            self.assertEqual((row["be_share"], row["runs"], row["of_runs"]["be_share"]), (0.4, 3, [0.3, 0.5]))
            (outs[0] / "forms.json").write_text("{}")
            (outs[1] / "forms.json").write_text("{}")
            with self.assertRaisesRegex(ValueError, "forms.json is in 2 of the folders"):
                render_import.take_over(outs, root / "docs", render.FILES)

    def test_medians_are_taken_of_parts_and_not_of_what_one_run_lacks(self):
        rows = [self.row(0.1, step_ms={"p50": 1.0}, own=1.0), self.row(0.2, step_ms={"p50": 3.0}, own=None), self.row(0.3, step_ms={"p50": 2.0}, own=2.0)]
        (row,) = render_import.medians([[one] for one in rows], render_frontier.KEY)
        self.assertEqual((row["step_ms"], row["own"]), ({"p50": 2.0}, None))
        self.assertEqual(len(render_import.medians([[self.row(0.1)], [self.row(0.1, be="other")]], render_frontier.KEY)), 2)

    def test_the_share_is_compared_with_other_ways_that_keep_the_objective(self):
        rows = [self.row(0.5), self.row(0.9, attainment=98.0), self.row(0.4, policy="tally-priority"), self.row(0.8, policy="none", attainment=50.0)]
        text = "\n".join(render_frontier.lines(rows, render.table, render.made_of))
        self.assertIn("| `a` | `b` | 2x | 0.50, tally-mps (90 %) | 0.40, tally-mps (90 %) | 1.25x |", text)
        text = "\n".join(render_frontier.lines([self.row(0.9, attainment=98.0)], render.table, render.made_of))
        self.assertIn("| none keeps it | not measured | - |", text)

    def test_policies_are_compared_where_fifo_was_measured(self):
        times = {"p99_ms": 3.0, "solo_p99_ms": 1.5}
        rows = [self.row(0.5, **times), self.row(0.9, attainment=10.0, policy="fifo", **times), self.row(0.4, slo_over_p99=3.0, **times)]
        text = "\n".join(render_frontier.policies(rows, render.table))
        self.assertIn("| `a` | `b` | 2x | 2.0x, 10.0 %, 0.90 | - | 2.0x, 99.5 %, 0.50 |", text)
        self.assertNotIn("| 3x |", text)
        self.assertEqual(render_frontier.policies(rows[:1], render.table), [])


if __name__ == "__main__":
    unittest.main()
