"""Tests of the decode service's batching, pages and trace, and of what its step says. Standard library only."""

import json
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import decode_batch
import render
import render_decode
import render_import
import step_decode
import step_pairs
from common import Failures
from decode_batch import BATCH_MAX, CHUNK, PAGE, SCRATCH_PAGE, TOKENS_MAX, Batcher, Request

MACHINE = {"device": "GPU", "driver": "1", "torch": "2", "commit": "c", "date": "2026-11-26"}


class Trace(unittest.TestCase):
    def test_every_request_of_the_excerpts_fits_into_a_sequence(self):
        for trace, count in (("conv", 1445), ("code", 781)):
            rows = decode_batch.read(trace)
            self.assertEqual(len(rows), count)
            self.assertEqual(rows, sorted(rows, key=lambda row: row[0]))
            self.assertTrue(all(context >= 1 and generated >= 1 and context + generated <= TOKENS_MAX for _, context, generated in rows))
            self.assertLess(rows[-1][0], 300)
        self.assertEqual(decode_batch.read("conv")[1], (4.315, 396, 109))

    def test_lengths_are_cut(self):
        self.assertEqual(decode_batch.cut(9999, 9999), (1024, 1024))
        self.assertEqual(decode_batch.cut(9999, 48), (2000, 48))
        self.assertEqual(decode_batch.cut(0, 0), (1, 1))

    def test_arrivals_have_the_rate_and_the_traces_own_gaps(self):
        rows = [(0.0, 1, 1), (1.0, 2, 2), (4.0, 3, 3)]
        requests = decode_batch.at_rate(rows, 1.0, 2)
        self.assertEqual([(r.arrives, r.context) for r in requests], [(0.0, 1), (0.5, 2)])
        for rate in (0.5, 3, 20):
            requests = decode_batch.at_rate(decode_batch.read("conv"), rate, 10)
            self.assertEqual(len(requests), rate * 10)
            self.assertTrue(all(0 <= r.arrives < 10 for r in requests))
        with self.assertRaises(ValueError):
            decode_batch.at_rate(rows, 0, 1)

    def test_a_trace_begins_again_at_its_end(self):
        requests = decode_batch.at_rate([(0.0, 1, 1), (2.0, 5, 5)], 5, 1)
        self.assertEqual([r.context for r in requests], [1, 5, 1, 5, 1])
        self.assertEqual([r.number for r in requests], list(range(5)))
        self.assertEqual(sorted({r.arrives for r in requests}), [r.arrives for r in requests])


class Batching(unittest.TestCase):
    def run_all(self, batcher, steps, check=lambda _batcher, _work: None):
        """The work of so many turns; each token of an answer is its place in it."""
        done = []
        for now in range(steps):
            batcher.arrive(now)
            work = batcher.next()
            check(batcher, work)
            if work is None:
                continue
            done.append(work)
            if work[0] == "prefill":
                batcher.prefilled(*work[1:], 0)
            else:
                batcher.decoded(work[1], [len(one.answer) for one in work[1]])
        return done

    def test_chunks_of_a_prefill_alternate_with_decode_steps(self):
        batcher = Batcher([Request(0, 0, 10, 9), Request(1, 1, 2 * CHUNK + 7, 3)])
        done = self.run_all(batcher, 7)
        shown = [(work[1].request.number, work[2]) if work[0] == "prefill" else len(work[1]) for work in done]
        self.assertEqual(shown, [(0, 10), 1, (1, CHUNK), 1, (1, CHUNK), 1, (1, 7)])

    def test_an_answer_has_the_tokens_that_were_asked_for_and_its_prefill_gives_the_first(self):
        batcher = Batcher([Request(0, 0, 5, 4), Request(1, 0, 5, 1)])
        done = self.run_all(batcher, 20)
        answers = {one.request.number: one.answer for work in done for one in ([work[1]] if work[0] == "prefill" else work[1])}
        self.assertEqual(answers, {0: [0, 1, 2, 3], 1: [0]})
        self.assertEqual(batcher.finished, 2)
        self.assertIsNone(batcher.next())

    def test_a_backlog_fills_the_batch_and_never_lets_it_pause(self):
        batcher = Batcher(decode_batch.backlog(decode_batch.read("conv")))
        sizes = [len(work[1]) for work in self.run_all(batcher, 4000) if work[0] == "decode"]
        self.assertEqual(max(sizes), BATCH_MAX)
        self.assertGreater(sum(sizes) / len(sizes), BATCH_MAX - 1)
        self.assertLessEqual(len(batcher.waiting), BATCH_MAX)
        self.assertGreater(batcher.finished, 50)

    def test_pages_are_never_shared_and_all_freed_at_the_end(self):
        rows = [(0.0, context, generated) for _, context, generated in decode_batch.read("code")]
        requests = [Request(n, n * 2, context, min(generated, 40)) for n, (_, context, generated) in enumerate(rows[:120])]
        batcher = Batcher(requests)
        free, seen = len(batcher.pages.free), []

        def check(batcher, work):
            held = batcher.running + ([batcher.prefilling] if batcher.prefilling else [])
            pages = [page for one in held for page in one.pages]
            self.assertEqual(len(pages), len(set(pages)))
            self.assertFalse(set(pages) & {SCRATCH_PAGE, *batcher.pages.free})
            self.assertEqual(len(pages) + len(batcher.pages.free), free)
            for one in work[1] if work and work[0] == "decode" else []:
                # The step writes one more token.
                self.assertEqual(len(one.pages), -(-(one.cached + 1) // PAGE))
            seen.append(len(pages))

        self.run_all(batcher, 4000, check)
        self.assertEqual((batcher.finished, seen[-1], len(batcher.pages.free)), (120, 0, free))
        self.assertGreater(max(seen), 200)

    def test_a_full_batch_of_the_longest_sequences_has_pages(self):
        requests = [Request(n, 0, TOKENS_MAX - 200, 200) for n in range(BATCH_MAX)]
        batcher = Batcher(requests)
        self.run_all(batcher, BATCH_MAX * 8 + 210)
        self.assertEqual(batcher.finished, BATCH_MAX)

    def test_more_pages_than_there_are_is_refused(self):
        batcher = Batcher([Request(0, 0, 5 * PAGE, 1)], pages=5)
        batcher.arrive(0)
        with self.assertRaisesRegex(RuntimeError, "5 pages wanted, 4 free"):
            batcher.next()

    def test_the_fixed_schedule_goes_by_steps_and_is_short(self):
        requests = decode_batch.fixed(decode_batch.read("conv"), 60)
        self.assertEqual([r.arrives for r in requests][:3], [0, 3, 6])
        self.assertTrue(all(r.context <= 600 and r.generated <= 24 for r in requests))
        self.assertEqual(len(requests), 21)

    def test_chunks_of_a_prompt_make_the_prompt(self):
        whole = decode_batch.prompt(3, 0, 40, 100)
        self.assertEqual(whole, decode_batch.prompt(3, 0, 17, 100) + decode_batch.prompt(3, 17, 23, 100))
        self.assertNotEqual(whole, decode_batch.prompt(4, 0, 40, 100))
        self.assertTrue(all(0 <= token < 100 for token in whole))


def served(step_ms, tokens_per_s=100.0):
    given = {"steps_ms": step_ms, "gaps_ms": [*step_ms, 90.0], "prefills_ms": [], "tokens": 4 * len(step_ms), "tokens_per_s": tokens_per_s}
    return {**given, "busy_percent": 99.0, "requests": 2, "waiting": 0, "launches": 14, "layers": 32, "attention": "pages"}


class Programs:
    """A service and a best-effort program that answer at once, and their core."""

    def __init__(self, step_ms):
        self.step_ms, self.sent, self.graphs, self.name = step_ms, [], 0, "decode-x"
        self.process = types.SimpleNamespace(send=self.sent.append)
        self.ctls, self.sharing, self.status_of_policy = [], "mps", {"counters": [1], "other": 2}

    def ask(self, do, **arguments):
        self.sent.append((do, arguments))
        self.graphs += 14
        return served(self.step_ms, 50.0)

    def send(self, do, **arguments):
        self.sent.append((do, arguments))

    def receive(self, timeout_s):
        return {"steps_per_s": 3.0}

    def ctl(self, *arguments):
        self.ctls.append(arguments)

    def status(self):
        tokens = {"count": self.graphs, "recent": 1, "p50_ms": 1.0, "p99_ms": 2.0}
        tpot = {"tpot_ms": 15.0, "tokens_within": self.graphs // 2, "attainment_percent": 50.0}
        entry = {"name": self.name, "launches": 0, "graph_kernels": 0, "captured": 0, "launches_by_entry_point": {"graph": self.graphs}}
        return {"clients": [{**entry, "service": {"marks": {"tokens": tokens}, "tpot": tpot}}], "policy": self.status_of_policy}


class Step(unittest.TestCase):
    def suite(self, **changed):
        args = {"times": 1.5, "trace": "conv", "seconds": 8, "warm": 2, "learn_seconds": 5, "marks": False, "beside": "a,b", "apart": False, "exact": 0}
        return types.SimpleNamespace(args=types.SimpleNamespace(**{**args, **changed}), machine=MACHINE)

    def alone(self):
        alone = step_decode.Alone()
        alone.served = {load: served([9.0] * 2 + [10.0] * 18) for load in ("full", "half")}
        alone.be_steps_per_s = {"gpt2-train": 6.0}
        return alone

    def measure(self, mode, load="full"):
        programs = Programs([10.0, 15.0, 16.0, 20.0])
        row = step_decode.measure(self.suite(), self.alone(), mode, "gpt2-train", load, programs, programs, 4.0, programs, True)
        return row, programs

    def test_a_step_is_late_if_it_takes_longer_than_the_target(self):
        row, _ = self.measure("priority-mps")
        self.assertEqual((row["target_ms"], row["violations_percent"], row["violations_gap_percent"]), (15.0, 50.0, 60.0))
        self.assertEqual((row["tokens_over_solo"], row["be_share"], row["be_share_of_own"], row["batch_mean"]), (0.5, 0.5, 0.75, 4.0))
        self.assertEqual(row["step_ms"], {"p50": 15.0, "p95": 20.0, "p99": 20.0})

    def test_the_core_is_told_the_target_and_asked_what_it_counted(self):
        row, programs = self.measure("priority-mps")
        self.assertEqual(programs.ctls[-1], ("client", "set", "decode-x", "--tpot", "15000us"))
        counted = {"tokens_ended": 14, "tokens_within": 7, "graph_launches": 14, "steps_of_the_service": 14}
        self.assertEqual((row["core"]["counted"], row["core"]["kept_percent"]), (counted, 50.0))
        self.assertEqual(row["core"]["policy"]["counters"], [1])

    def test_slo_herald_learns_before_and_is_told_of_units_if_asked(self):
        row, programs = self.measure("herald-mps-slo")
        self.assertEqual(programs.ctls[-1][-2:], ("--slo", "15000us"))
        self.assertEqual([sent[1]["seconds"] for sent in programs.sent if "decode" in sent], [5, 8])
        self.assertEqual(row["core"]["counted"]["steps_of_the_service"], 14)

    def test_a_number_is_a_share_of_the_tokens_a_second_of_the_backlog(self):
        alone, mean = self.alone(), decode_batch.generated_mean(decode_batch.read("conv"))
        self.assertIsNone(alone.rate_per_s("full", "conv"))
        self.assertAlmostEqual(alone.rate_per_s("0.5", "conv"), 50.0 / mean)
        self.assertAlmostEqual(alone.rate_per_s("0.1", "conv"), 10.0 / mean)

    def test_at_half_load_the_service_alone_is_busy_half_of_the_time(self):
        alone, failures, shares = self.alone(), Failures(), []

        def busy_by_share(_args, alone, *_):
            shares.append(alone.shares["half"])
            return {"busy_percent": min(400 * shares[-1], 100)}

        with mock.patch.object(step_decode, "serve", busy_by_share):
            told = step_decode.serve_half(self.suite().args, alone, None, failures)
        self.assertEqual((len(shares), round(told["busy_percent"]), failures.messages), (2, 50, []))
        with mock.patch.object(step_decode, "serve", lambda *_: {"busy_percent": 90}), mock.patch("builtins.print"):
            step_decode.serve_half(self.suite().args, alone, None, failures)
        self.assertEqual(len(failures.messages), 1)

    def test_in_timeslice_one_best_effort_program_is_alive(self):
        self.assertEqual(step_decode.groups(self.suite().args, "priority-mps"), [["a", "b"]])
        self.assertEqual(step_decode.groups(self.suite().args, "priority-timeslice"), [["a"], ["b"]])
        self.assertEqual(step_decode.groups(self.suite(apart=True).args, "mps"), [["a"], ["b"]])

    def test_every_mode_is_known(self):
        self.assertEqual(set(step_decode.MODES) - set(step_pairs.MODES), set())
        with mock.patch.object(step_decode, "measure_alone") as alone:
            suite = self.suite(modes="plain,nonsense", loads="full")
            self.assertIn("unknown: nonsense", step_decode.main(suite)[0])
            alone.assert_not_called()

    def test_the_page_shows_the_rows_and_takes_over_newer_ones(self):
        row, _ = self.measure("priority-mps")
        with tempfile.TemporaryDirectory() as folder:
            docs, out = pathlib.Path(folder) / "results", pathlib.Path(folder) / "out"
            for path, rows in ((docs, [row, {**row, "load": "half"}]), (out, [{**row, "violations_percent": 1.25, "core": None, "same_tokens": None}])):
                path.mkdir()
                (path / "decode.json").write_text(json.dumps(rows))
            text = render.render(docs)
            expected = "| tally-mps | tally-priority | `gpt2-train` | full | 15.00 | 50.00 | 60.00 | 15.00 / 20.00 / 20.00 | 0.50 | 4.0 | 0.50 (0.75 of its own) | 50.00 | yes |"
            self.assertIn(expected, text)
            self.assertEqual(render_import.take_over([out], docs, render.FILES), ["decode.json"])
            rows = json.loads((docs / "decode.json").read_text())
            self.assertEqual([(r["load"], r["violations_percent"]) for r in rows], [("half", 50.0), ("full", 1.25)])
            self.assertIn("| full | 15.00 | 1.25 | 60.00 |", render.render(docs))

    def test_a_row_without_any_step_is_shown(self):
        row, _ = self.measure("plain")
        row |= {"step_ms": None, "violations_percent": 0.0}
        self.assertIn("no step", "\n".join(render_decode.lines([row], render.table, render.made_of)))


if __name__ == "__main__":
    unittest.main()
