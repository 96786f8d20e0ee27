"""{{name}}: best-effort launches wait while high-priority work is there, and for an idle gap
after it.

Python takes some 10 us to decide, so it decides rarely: while high priority is idle a
client gets a lease for many launches, which is ended when high-priority work appears.
"""

from tally_sdk import HOLD_UNTIL_CHANGE, Config, hold, policy, run
from wit_world import exports
from wit_world.exports.scheduler import LaunchState
from wit_world.imports import control

HIGH_PRIORITY = LaunchState.HIGH_PRIORITY.value
HIGH_ACTIVE = LaunchState.HIGH_ACTIVE.value
RUN = run()
HOLD = hold(HOLD_UNTIL_CHANGE)


@policy("Activity", "Membership")
class Scheduler(exports.Scheduler, exports.Activity, exports.Membership):
    def init(self, config):
        """Called once, with the text of the configuration file; empty if there is none."""
        config = Config(config)
        self.idle_gap_ns = config.integer("idle_gap_us", 100, 0, 1_000_000) * 1_000
        self.lease = config.integer("lease", 1_000, 0, 1_000_000)
        config.finish()
        self.run = run(self.lease)
        self.leased = {}  # clients that may have some of a lease left, in order

    def decide(self, launch):
        """Called for a launch of a best-effort client that has no lease."""
        state = launch.state.value
        if state & HIGH_PRIORITY:
            return RUN
        if state & HIGH_ACTIVE:
            return HOLD
        if launch.high_idle_ns < self.idle_gap_ns:
            return hold(self.idle_gap_ns - launch.high_idle_ns)
        if self.lease > 0:
            self.leased[launch.client] = True
        return self.run

    def high_started(self, now_ns):
        for client in self.leased:
            control.revoke_lease(client)
        self.leased.clear()

    def high_ended(self, now_ns):
        pass

    def joined(self, now_ns, client):
        pass

    def left(self, now_ns, client):
        self.leased.pop(client, None)
