"""Tests of what `width` measures."""

import unittest

import kernel_gaps
import step_width


class KernelGaps(unittest.TestCase):
    def test_gaps_are_told_apart_by_stream(self):
        def kernel(ts, dur, stream):
            return {"cat": "kernel", "ts": ts, "dur": dur, "args": {"stream": stream}}

        copy = {"cat": "gpu_memcpy", "ts": 11, "dur": 1, "args": {"stream": 7}}
        # Not in order; one overlaps the one before it, and the next counts from the later end.
        events = [kernel(30, 5, 9), kernel(0, 10, 7), kernel(12, 10, 7), copy, kernel(20, 1, 9), {"name": "no kernel"}]
        self.assertEqual(kernel_gaps.gaps_us(events), ([0.0], [2.0, 8.0]))
        self.assertRaises(ValueError, kernel_gaps.gaps_us, [copy])
        self.assertEqual(kernel_gaps.described([]), {"count": 0})
        self.assertEqual(kernel_gaps.described([1.0, 3.0]), {"count": 2, "p50_us": 1.0, "p95_us": 3.0, "p99_us": 3.0})


class Width(unittest.TestCase):
    def test_what_loses_more_than_its_sms_falls_short(self):
        row = {"job": "x", "sms": 112, "leased": True, "put_off_joins": True, "over_all_sms": 0.81}
        self.assertEqual(step_width.shortfall([row]), ["x on 112 SMs: 0.81 of its speed, 0.818 wanted"])
        fine = [{**row, "over_all_sms": 0.82}, {**row, "leased": False}, {**row, "sms": None, "leased": False}, {**row, "sms": 64, "over_all_sms": 0.4}]
        self.assertEqual(step_width.shortfall(fine), [])


if __name__ == "__main__":
    unittest.main()
