"""Tests of the decode service itself, on the CPU. They need torch, so CI does not run them:

cd bench/gpu && python3 -m unittest torchtest_decode
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent


class Model(unittest.TestCase):
    def job(self, *arguments):
        env = {**os.environ, "SUITE_DEVICE": "cpu", "SUITE_SMALL": "1"}
        command = [sys.executable, str(HERE / "decode_job.py"), *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=env).stdout)

    def test_pages_give_what_a_service_without_a_cache_gives(self):
        told = self.job("--check")
        self.assertEqual(told["sequences"], 4)
        self.assertLess(told["off"], 0.01)

    def test_a_fixed_schedule_gives_the_same_tokens_each_time(self):
        first, again = self.job("--exact", "40"), self.job("--exact", "40")
        self.assertEqual(first["digest"], again["digest"])
        self.assertGreater(first["finished"], 5)

    def test_the_service_keeps_its_rate(self):
        told = self.job("--rate", "2", "--seconds", "3", "--warm", "1")
        self.assertGreater(told["requests"], 0)
        self.assertLess(told["batches"]["p50"], 16)
        self.assertGreaterEqual(told["launches"], told["tokens"] / 16)


if __name__ == "__main__":
    unittest.main()
