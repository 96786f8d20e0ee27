"""Best-effort launches wait while high-priority work is there, and after it for as long
as the longest pause between two pieces of it was so far, at most `most_us`: it learns how
long to be patient, and a reload does not make it forget. The same in four languages:
`sdk/*/examples/patient`, and each takes what another saved.
"""

from componentize_py_types import Err
from tally_sdk import Config, expect, policy
from wit_world import exports
from wit_world.exports.state import Saved
from wit_world.imports import host
from wit_world.imports.types import (
    Decision_Hold,
    Decision_Run,
    Event_HighBusy,
    Event_HighIdle,
    LaunchFlags,
    PriorityClass,
    Subscription,
)

HOLD_NS_MAX = 1_000_000_000
HIGH_BUSY = LaunchFlags.HIGH_BUSY.value
RUN = Decision_Run(0)
HOLD = Decision_Hold(HOLD_NS_MAX)


@policy
class Scheduler(exports.Scheduler, exports.State):
    def init(self, config):
        config = Config(config)
        self.most_ns = config.integer("most_us", 1_000, 0, 100_000) * 1_000
        config.finish()
        self.pause_ns = 0  # the longest pause seen
        self.idle_since_ns = None  # since when there is one
        self.shown = host.gauge("pause_ns")  # the same for `tallyctl status`
        host.subscribe(Subscription.HIGH_ACTIVITY)

    def learn(self, pause_ns):
        self.pause_ns = max(self.pause_ns, min(pause_ns, self.most_ns))
        host.gauge_set(self.shown, self.pause_ns)

    def decide(self, launch):
        if launch.class_ == PriorityClass.HIGH:
            return RUN
        if launch.flags.value & HIGH_BUSY:
            return HOLD
        if launch.high_quiet_ns < self.pause_ns:
            return Decision_Hold(self.pause_ns - launch.high_quiet_ns)
        return RUN

    def on_event(self, now_ns, event):
        if isinstance(event, Event_HighIdle):
            self.idle_since_ns = now_ns
        elif isinstance(event, Event_HighBusy) and self.idle_since_ns is not None:
            self.learn(now_ns - self.idle_since_ns)
            self.idle_since_ns = None

    def snapshot(self):
        return Saved("patient", 1, self.pause_ns.to_bytes(8, "little"))

    def restore(self, from_):
        expect(from_, "patient", 1)
        if len(from_.data) != 8:
            raise Err("expected 8 bytes")
        self.learn(int.from_bytes(from_.data, "little"))


# The Makefile builds a policy that keeps what it learnt because of this line.
State = Scheduler
