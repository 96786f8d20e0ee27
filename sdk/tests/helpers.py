"""The helpers of the SDK for Python, on the host, with stand-ins for what a component imports."""

import sys
import types
import unittest
from pathlib import Path


class Err(Exception):
    pass


def module(name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    sys.modules[name] = made


ANSWERS = ["Answer"] + [
    f"Decision_{name}"
    for name in ("Hold", "HoldUntilCompletion", "Preemptible", "Run", "Sliced", "SmLimited")
]
added = []
module("componentize_py_types", Err=Err)
module("wit_world")
module("wit_world.exports")
module("wit_world.exports.scheduler", **{name: tuple for name in ANSWERS})
metrics = types.SimpleNamespace(counter=lambda name: 0, counter_add=lambda _, n: added.append(n))
module("wit_world.imports", log=None, metrics=metrics)
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parents[1] / "python/template"))

from tally_sdk import Counter, LruMap, Reader, TokenBucket, Writer  # noqa: E402

SAMPLE = bytes([0x03, 0xF0, 0xA2, 0x04, 0x03]) + "a\u00e9".encode()


def saved(data, form="f", version=2):
    return types.SimpleNamespace(format=form, version=version, data=data)


class Helpers(unittest.TestCase):
    def test_numbers_and_texts_are_written_as_in_every_language(self):
        out = Writer()
        out.number(3)
        out.number(70_000)
        out.text("a\u00e9")
        self.assertEqual(out.data(), SAMPLE)
        out.number(2**64 - 1)
        reader = Reader(saved(out.data()), "f", 2)
        self.assertEqual([reader.number(), reader.number()], [3, 70_000])
        self.assertEqual([reader.text(), reader.number()], ["a\u00e9", 2**64 - 1])
        self.assertTrue(reader.is_done())

    def test_what_no_writer_writes_is_refused(self):
        for data in (b"", b"\x80" * 9, b"\xff" * 9 + b"\x02", b"\xff" * 10):
            with self.assertRaises(Err):
                Reader(saved(data), "f", 2).number()
        for data in (b"\x09a", b"\x01\xff"):
            with self.assertRaises(Err):
                Reader(saved(data), "f", 2).text()
        for form, version in (("g", 2), ("f", 1), ("f", 3)):
            with self.assertRaises(Err):
                Reader(saved(b"\x00", form, version), "f", 2)

    def test_many_counts_are_one_call(self):
        counter = Counter("n")
        for _ in range(600):
            counter.add()
        counter.hand_over()
        self.assertEqual(added, [256, 256, 88])

    def test_the_one_not_used_for_longest_makes_room(self):
        values = LruMap(2)
        values[1], values[2] = "a", "b"
        self.assertEqual(values[1], "a")
        values[3] = "c"
        self.assertEqual(sorted(values), [1, 3])

    def test_exactly_the_share_is_spent(self):
        bucket, spent = TokenBucket(333, 8), 0
        for _ in range(1_000):
            bucket.earn()
            spent += bucket.spend()
        self.assertEqual(spent, 333)


unittest.main()
