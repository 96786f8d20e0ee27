"""{{name}}: best-effort launches wait while high-priority work is there, and for a while
after it.

Python takes some 10 us to decide, so it decides rarely: while high priority is quiet a
client gets a lease for many launches, which is ended when high-priority work appears.
"""

from tally_sdk import Config, policy
from wit_world import exports
from wit_world.imports import host
from wit_world.imports.types import (
    Decision_Hold,
    Decision_Run,
    Event_ClientLeft,
    Event_HighBusy,
    LaunchFlags,
    PriorityClass,
    Subscription,
)

HOLD_NS_MAX = 1_000_000_000  # offered again when something changes
HIGH_BUSY = LaunchFlags.HIGH_BUSY.value
RUN = Decision_Run(0)
HOLD = Decision_Hold(HOLD_NS_MAX)


@policy
class Scheduler(exports.Scheduler):
    def init(self, config):
        """Called once, with the text of the configuration file; empty if there is none."""
        config = Config(config)
        self.quiet_ns = config.integer("quiet_us", 100, 0, 1_000_000) * 1_000
        self.run = Decision_Run(config.integer("lease", 1_000, 0, 1_000_000))
        config.finish()
        self.leased = {}  # clients that may have some of a lease left, in order
        host.subscribe(Subscription.HIGH_ACTIVITY)

    def decide(self, launch):
        """Called for a launch of a best-effort client that has no lease."""
        if launch.class_ == PriorityClass.HIGH:
            return RUN
        if launch.flags.value & HIGH_BUSY:
            return HOLD
        if launch.high_quiet_ns < self.quiet_ns:
            return Decision_Hold(self.quiet_ns - launch.high_quiet_ns)
        self.leased[launch.client] = True
        return self.run

    def on_event(self, now_ns, event):
        if isinstance(event, Event_HighBusy):
            for client in self.leased:
                host.revoke_lease(client)
            self.leased.clear()
        elif isinstance(event, Event_ClientLeft):
            self.leased.pop(event.value, None)
