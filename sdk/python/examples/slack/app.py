"""Best-effort launches run while no unit of a service is open, or while the open ones can lose the time that the launch
is predicted to take and `margin_us` more; else they wait, unless the GPU has had no high-priority work for 2 ms. With
`width_percent` below 100 a best-effort client runs on at most that share of the SMs. The counter `units_late` counts
units that took longer than their objective. The same in four languages: `sdk/*/examples/slack`.
"""

from tally_sdk import HOLD_UNTIL_CHANGE, NO_UNIT_OPEN, UNKNOWN, Config, hold, policy, run
from wit_world import exports
from wit_world.exports.scheduler import LaunchState
from wit_world.imports import log, metrics, services, widths
from wit_world.imports.types import PriorityClass

HIGH_PRIORITY = LaunchState.HIGH_PRIORITY.value
HIGH_ACTIVE = LaunchState.HIGH_ACTIVE.value
RUN = run()
HOLD = hold(HOLD_UNTIL_CHANGE)
IDLE_NS = 2_000_000  # high priority has been idle for so long: nobody waits for it


@policy("Membership", "Units")
class Scheduler(exports.Scheduler, exports.Membership, exports.Units):
    def init(self, config):
        config = Config(config)
        self.unknown_ns = config.integer("unknown_us", 2_000, 0, 1_000_000) * 1_000
        self.margin_ns = config.integer("margin_us", 200, 0, 1_000_000) * 1_000
        self.width_percent = config.integer("width_percent", 100, 1, 100)
        config.finish()
        self.new_clients = {}  # best-effort clients that have not been given a width yet, in order
        self.is_refused = False  # the log says already that there is no width for them
        self.units_late = metrics.counter("units_late")

    def set_widths(self, sm_count):
        """Give new clients their width: the largest of at most `width_percent` of the SMs."""
        sms = max((n for n in widths.all() if n * 100 <= sm_count * self.width_percent), default=0)
        if sms > 0:
            for client in self.new_clients:
                widths.set(client, sms)
        elif not self.is_refused:
            self.is_refused = True
            log.write(log.Level.WARN, "width_percent: launches cannot be limited to so few SMs")
        self.new_clients.clear()

    def decide(self, launch):
        if launch.state.value & HIGH_PRIORITY:
            return RUN
        # Not in `joined`: only a launch says how many SMs there are.
        if self.new_clients and launch.sm_count > 0:
            self.set_widths(launch.sm_count)
        if launch.high_clients == 0:
            return RUN
        slack_ns = services.slack_ns(launch.now_ns)
        predicted_ns = launch.predicted_ns
        needed_ns = (self.unknown_ns if predicted_ns == UNKNOWN else predicted_ns) + self.margin_ns
        if slack_ns == NO_UNIT_OPEN or slack_ns >= needed_ns or launch.high_idle_ns >= IDLE_NS:
            return RUN
        return HOLD if launch.state.value & HIGH_ACTIVE else hold(IDLE_NS - launch.high_idle_ns)

    def joined(self, now_ns, client):
        if client.class_ == PriorityClass.BEST_EFFORT and self.width_percent < 100:
            self.new_clients[client.id] = True

    def left(self, now_ns, client):
        self.new_clients.pop(client, None)

    def began(self, now_ns, client, since_ns, deadline_ns):
        pass

    def ended(self, now_ns, client, units, took_ns):
        service = services.get(client)
        if service and service.objective and took_ns > service.objective.slo_ns:
            metrics.counter_add(self.units_late, units)
