"""What a policy in Python is written with: `policy` for its class, answers (`run`, `hold`, ...), the
contract's constants, `Config` for its configuration, TOML of whole numbers and booleans, `Writer` and `Reader`
for a state that it saves, and three helpers: `Counter`, `TokenBucket`, `LruMap`.

    config = Config(text)
    idle_gap_us = config.integer("idle_gap_us", 100, 0, 1_000_000)
    config.finish()  # what nobody asked for is refused

Every error of a configuration is an `Err` with a message, which `init` passes on to the
operator.
"""

import functools
import sys
import tomllib
from collections import OrderedDict

from componentize_py_types import Err
from wit_world.exports.scheduler import (
    Answer,
    Decision_Hold,
    Decision_HoldUntilCompletion,
    Decision_Preemptible,
    Decision_Run,
    Decision_Sliced,
    Decision_SmLimited,
)
from wit_world.imports import log, metrics

NEVER = 2**64 - 1  # a time that has not come: no high-priority activity yet, no launch waiting
UNKNOWN = 0  # a time or a number that is not known
NOT_MEASURED = 0  # `measured_ns` of a launch whose GPU time could not be told from that of others
NO_KERNEL = 2**32 - 1  # the kernel id of all kernels beyond those that the core tells apart
HOLD_UNTIL_CHANGE = 2**64 - 1  # hold for as long as the core allows
WINDOW_OPEN = 2**64 - 1  # a window that holds nothing back
NO_REASON = 0  # a decision without a reason
NO_UNIT_OPEN = 2**63 - 1  # the slack while no client with an objective has a unit open
RECENT_UNITS = 256  # units of work, or tokens, behind a service's `recent`, `p50_ns` and `p99_ns`
RECENT_SAMPLES = 32  # launches behind a `p50_ns` and a `p99_ns`


# Answers: what `decide` returns. A reason is a number that `reasons.define` gives a text.


def run(lease=0, reason=0):
    """Run it whole; so many further launches of this client go without a question."""
    return Answer(Decision_Run(lease), reason)


def hold(ns, reason=0):
    """Not now: offered again after so long, or when something changes."""
    return Answer(Decision_Hold(ns), reason)


def hold_until_completion(ns, reason=0):
    """The same, and when a launch of another best-effort client ends."""
    return Answer(Decision_HoldUntilCompletion(ns), reason)


def sliced(blocks, reason=0):
    """As launches of so many blocks (at least 1)."""
    return Answer(Decision_Sliced(blocks), reason)


def preemptible(reason=0):
    """So that it can be asked to yield at block boundaries."""
    return Answer(Decision_Preemptible(), reason)


def sm_limited(sms, reason=0):
    """On so many SMs (at least 1)."""
    return Answer(Decision_SmLimited(sms), reason)


METHODS = (
    "init",
    "decide",
    "high_started",
    "high_ended",
    "began",
    "ended",
    "completed",
    "joined",
    "left",
    "fired",
    "snapshot",
    "restore",
)


def policy(*interfaces):
    """Make one object of a class the policy, for `scheduler` and these interfaces:

        @policy("Activity", "Membership")
        class Scheduler(exports.Scheduler, exports.Activity, exports.Membership): ...

    Without it every call would get a new object. Also has the core's log say which exception
    ended a call: to the core it is a trap.
    """

    def tells(method):
        @functools.wraps(method)
        def call(self, *arguments):
            try:
                return method(self, *arguments)
            except Err:
                raise
            except BaseException as error:
                # Not by `traceback`: it reads source files, and there are none.
                where = error.__traceback__
                while where.tb_next is not None:
                    where = where.tb_next
                name = where.tb_frame.f_code.co_name
                log.write(log.Level.ERROR, f"{error!r} in {name}, line {where.tb_lineno}")
                raise

        return call

    def make(scheduler):
        for name in METHODS:
            if hasattr(scheduler, name):
                setattr(scheduler, name, tells(getattr(scheduler, name)))
        one = scheduler()
        scheduler.__new__ = staticmethod(lambda cls: one)
        module = sys.modules[scheduler.__module__]
        for name in interfaces:
            setattr(module, name, scheduler)
        return scheduler

    return make


class Counter:
    """A counter that calls the core once in 256."""

    def __init__(self, name):
        self._id = metrics.counter(name)
        self._held = 0

    def add(self, delta=1):
        self._held += delta
        if self._held >= 256:
            self.hand_over()

    def hand_over(self):
        if self._held > 0:
            metrics.counter_add(self._id, self._held)
        self._held = 0


class TokenBucket:
    """A bounded share, without randomness: every event earns `permille` thousandths of a unit."""

    def __init__(self, permille, burst):
        self._permille = permille
        self._burst = burst * 1_000
        self._credit = 0

    def earn(self):
        self._credit = min(self._credit + self._permille, self._burst)

    def spend(self):
        """Spend a unit, if there is one."""
        if self._credit < 1_000:
            return False
        self._credit -= 1_000
        return True


class LruMap(OrderedDict):
    """A map of bounded size that forgets what was not used for longest."""

    def __init__(self, capacity):
        super().__init__()
        self._capacity = capacity

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)


def expect(saved, form, version_max):
    """Refuse a state that is not of this format, or of a later version than this."""
    if saved.format != form:
        raise Err(f"saved by {saved.format!r}, expected {form!r}")
    if saved.version > version_max:
        raise Err(f"of version {saved.version}, expected at most {version_max}")


class Writer:
    """Writes the data of a state: whole numbers in LEB128, and texts, as the SDKs of all languages do:

        out = Writer()
        out.number(self.launches)
        return Saved("mine", 1, out.data())
    """

    def __init__(self):
        self._data = bytearray()

    def number(self, n):
        while n >= 0x80:
            self._data.append(n & 0x7F | 0x80)
            n >>= 7
        self._data.append(n)

    def text(self, text):
        """Its length in bytes, then UTF-8."""
        data = text.encode()
        self.number(len(data))
        self._data += data

    def data(self):
        return bytes(self._data)


class Reader:
    """Reads it back. What is wrong is an `Err`, which `restore` passes on to the operator."""

    def __init__(self, saved, form, version):
        expect(saved, form, version)
        if saved.version < version:
            raise Err(f"of version {saved.version}, which is no longer understood")
        self._data = saved.data
        self._at = 0

    def is_done(self):
        return self._at == len(self._data)

    def number(self):
        n = 0
        for shift in range(0, 64, 7):
            if self.is_done():
                raise Err(f"byte {self._at}: the end, within a number")
            byte = self._data[self._at]
            self._at += 1
            if shift == 63 and byte & 0x7F > 1:
                break
            n |= (byte & 0x7F) << shift
            if byte < 0x80:
                return n
        raise Err(f"byte {self._at}: a number of more than 64 bits")

    def text(self):
        end = self.number() + self._at
        if end > len(self._data):
            raise Err(f"byte {self._at}: the end, within a text")
        try:
            text = self._data[self._at : end].decode()
        except UnicodeDecodeError:
            raise Err(f"byte {self._at}: not a text") from None
        self._at = end
        return text


class Config:
    def __init__(self, text):
        try:
            self._left = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Err(f"the configuration is not TOML: {error}") from None
        self._known = []

    def _take(self, key, default, kind, expected):
        self._known.append(key)
        value = self._left.pop(key, default)
        # A boolean is an integer to Python, and not to an operator.
        if type(value) is not kind:
            raise Err(f"{key} is {value!r}: expected {expected}")
        return value

    def integer(self, key, default, least, most):
        """A whole number from `least` to `most`."""
        expected = f"a whole number from {least} to {most}"
        value = self._take(key, default, int, expected)
        if not least <= value <= most:
            raise Err(f"{key} is {value}: expected {expected}")
        return value

    def boolean(self, key, default):
        """`true` or `false`."""
        return self._take(key, default, bool, "true or false")

    def finish(self):
        """Refuse what was given and not asked for."""
        for key in self._left:
            raise Err(f"unknown key {key}; known keys: {', '.join(self._known)}")
