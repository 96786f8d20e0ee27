"""Best-effort launches wait while high-priority work is there, and after it for as long
as the longest pause between two pieces of it was so far, at most `most_us`: it learns how
long to be patient, and a reload does not make it forget. The same in four languages:
`sdk/*/examples/patient`, and each takes what another saved.
"""

from tally_sdk import HOLD_UNTIL_CHANGE, Config, Reader, Writer, hold, policy, run
from wit_world import exports
from wit_world.exports.scheduler import LaunchState
from wit_world.exports.state import Saved
from wit_world.imports import metrics

HIGH_PRIORITY = LaunchState.HIGH_PRIORITY.value
HIGH_ACTIVE = LaunchState.HIGH_ACTIVE.value
RUN = run()
HOLD = hold(HOLD_UNTIL_CHANGE)


@policy("Activity", "State")
class Scheduler(exports.Scheduler, exports.Activity, exports.State):
    def init(self, config):
        config = Config(config)
        self.most_ns = config.integer("most_us", 1_000, 0, 100_000) * 1_000
        config.finish()
        self.pause_ns = 0  # the longest pause seen
        self.idle_since_ns = None  # since when there is one
        self.shown = metrics.gauge("pause_ns")  # the same for `tallyctl status`

    def learn(self, pause_ns):
        self.pause_ns = max(self.pause_ns, min(pause_ns, self.most_ns))
        metrics.gauge_set(self.shown, self.pause_ns)

    def decide(self, launch):
        state = launch.state.value
        if state & HIGH_PRIORITY:
            return RUN
        if state & HIGH_ACTIVE:
            return HOLD
        if launch.high_idle_ns < self.pause_ns:
            return hold(self.pause_ns - launch.high_idle_ns)
        return RUN

    def high_ended(self, now_ns):
        self.idle_since_ns = now_ns

    def high_started(self, now_ns):
        if self.idle_since_ns is not None:
            self.learn(now_ns - self.idle_since_ns)
        self.idle_since_ns = None

    def snapshot(self):
        out = Writer()
        out.number(self.pause_ns)
        return Saved("patient", 1, out.data())

    def restore(self, from_):
        self.learn(Reader(from_, "patient", 1).number())
