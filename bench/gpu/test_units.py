"""Tests of the step `units`. Standard library only; needs no GPU."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import step_units


class Units(unittest.TestCase):
    def test_a_profiled_unit_is_compared_with_cupti(self):
        own = {"launches": 24, "gpu_busy_ms": 2.0}
        told = {"launches": 24, "gpu_busy_ms": 2.1, "sms_max": 132}
        self.assertEqual(step_units.profile_faults(told, own), [])
        wrong = step_units.profile_faults({"launches": 23, "gpu_busy_ms": 2.3, "sms_max": 16}, own)
        self.assertEqual([fault.split()[0] for fault in wrong], ["23", "2.300", "kernels"])
        self.assertEqual(step_units.profile_faults(None, own), ["no unit was profiled"])


if __name__ == "__main__":
    unittest.main()
