"""The figures that the repository's README.md takes from docs/results."""

import json
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A line of the README's table, and the newest such row's mode and policy.
LINES = {
    "MPS": ("mps", "none"),
    "MPS, client priority": ("mps-client-priority", "none"),
    "MPS, Tally `fifo`": ("tally-mps", "fifo"),
    "MPS, Tally `tally-priority`": ("tally-mps", "tally-priority"),
    "time slices": ("time-slicing", "none"),
    "time slices, Tally `fifo`": ("tally-timeslice", "fifo"),
    "time slices, Tally `tally-priority`": ("tally-timeslice", "tally-priority"),
}


def results(name):
    return json.loads((ROOT / "docs" / "results" / name).read_text())


def newest(mode, policy):
    """The newest row of the README's pair with the policy's defaults."""
    pair = [row for row in results("pairs.json") if (row["hp"], row["be"]) == ("bert-graph", "gpt2-train")]
    rows = [row for row in pair if (row["mode"], row["policy"]) == (mode, policy) and not row.get("policy_config") and not row.get("vendor_rewrite")]
    return max(rows, key=lambda row: row["date"])


class Readme(unittest.TestCase):
    """Each figure is the result's, with as many digits as it has."""

    def setUp(self):
        self.text = (ROOT / "README.md").read_text()

    def assert_is(self, told, measured):
        digits = len(told.partition(".")[2])
        self.assertEqual(told, f"{measured:.{digits}f}")

    def test_the_table_has_the_newest_rows(self):
        section = self.text.partition("## Results")[2].partition("<picture>")[0]
        table = re.findall(r"^\| ([^|]+) \| ([\d.]+)x \| ([\d.]+) \|$", section, re.MULTILINE)
        self.assertEqual([line[0] for line in table], list(LINES))
        for name, p99, share in table:
            row = newest(*LINES[name])
            self.assert_is(p99, row["p99_over_solo"])
            self.assert_is(share, row["be_share"])

    def test_two_trainings_are_those_of_several(self):
        words = " ".join(self.text.split())
        told = re.search(r"p99 ([\d.]+) ms against ([\d.]+) ms, training speed ([\d.]+) against ([\d.]+)", words)
        self.assertIsNotNone(told)
        rows = {row["policy"]: row for row in results("several.json")["rows"]}
        both = [rows["tally-priority"], rows["fifo"]]
        measured = [row["together_ms"]["p99"] for row in both]
        measured += [sum(row["together_steps_per_s"]) / row["alone_steps_per_s"] for row in both]
        for text, figure in zip(told.groups(), measured, strict=True):
            self.assert_is(text, figure)


if __name__ == "__main__":
    unittest.main()
