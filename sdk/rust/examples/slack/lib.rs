//! Best-effort launches run while no unit of a service is open, or while the open ones can lose the time that the
//! launch is predicted to take and `margin_us` more; else they wait, unless the GPU has had no high-priority work for
//! 2 ms. With `width_percent` below 100 a best-effort client runs on at most that share of the SMs. The counter
//! `units_late` counts units that took longer than their objective. The same in four languages: `sdk/*/examples/slack`.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::host::{self, Counter};
use tally_sdk::{
    Answer, Client, ClientId, Decision, HOLD_UNTIL_CHANGE, Launch, Level, Membership, NO_UNIT_OPEN,
    Policy, PriorityClass, UNKNOWN, Units,
};

/// High priority has been idle for so long: its program is busy with something else, and nobody waits for it.
const IDLE_NS: u64 = 2_000_000;

struct Slack {
    /// What a launch counts as whose predicted time is UNKNOWN.
    unknown_ns: u64,
    margin_ns: u64,
    width_percent: u64,
    /// Best-effort clients that have not been given a width yet.
    new_clients: Vec<ClientId>,
    /// The log says already that there is no width for them.
    is_refused: bool,
    units_late: Counter,
}

impl Slack {
    /// Give new clients their width: the largest of at most `width_percent` of the SMs.
    fn set_widths(&mut self, sm_count: u32) {
        let limit = u64::from(sm_count) * self.width_percent;
        match host::widths().into_iter().rfind(|sms| u64::from(*sms) * 100 <= limit) {
            Some(sms) => self.new_clients.iter().for_each(|client| host::set_width(*client, sms)),
            None if !self.is_refused => {
                self.is_refused = true;
                host::log(Level::Warn, "width_percent: launches cannot be limited to so few SMs");
            }
            None => {}
        }
        self.new_clients.clear();
    }
}

impl Policy for Slack {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let unknown_ns = config.microseconds("unknown_us", 2_000, 0..=1_000_000)?;
        let margin_ns = config.microseconds("margin_us", 200, 0..=1_000_000)?;
        let width_percent = config.integer("width_percent", 100, 1..=100)?;
        config.finish()?;
        let units_late = Counter::new("units_late");
        let new_clients = Vec::new();
        Ok(Slack {
            unknown_ns,
            margin_ns,
            width_percent,
            new_clients,
            is_refused: false,
            units_late,
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        // Not in `joined`: only a launch says how many SMs there are.
        if !self.new_clients.is_empty() && launch.sm_count > 0 {
            self.set_widths(launch.sm_count);
        }
        if launch.high_clients == 0 {
            return Decision::Run(0).into();
        }
        let slack_ns = host::slack_ns(launch.now_ns);
        let known_ns = Some(launch.predicted_ns).filter(|ns| *ns != UNKNOWN);
        let needed_ns = known_ns.unwrap_or(self.unknown_ns).saturating_add(self.margin_ns);
        let has_slack = slack_ns == NO_UNIT_OPEN || (slack_ns >= 0 && slack_ns as u64 >= needed_ns);
        if has_slack || launch.high_idle_ns >= IDLE_NS {
            Decision::Run(0).into()
        } else if launch.high_active() {
            Decision::Hold(HOLD_UNTIL_CHANGE).into()
        } else {
            Decision::Hold(IDLE_NS - launch.high_idle_ns).into()
        }
    }
}

impl Membership for Slack {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        if client.class == PriorityClass::BestEffort && self.width_percent < 100 {
            self.new_clients.push(client.id);
        }
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.new_clients.retain(|new| *new != client);
    }
}

impl Units for Slack {
    fn began(&mut self, _now_ns: u64, _client: ClientId, _since_ns: u64, _deadline_ns: u64) {}

    fn ended(&mut self, _now_ns: u64, client: ClientId, units: u32, took_ns: u64) {
        let objective = host::service(client).and_then(|service| service.objective);
        if objective.is_some_and(|objective| took_ns > objective.slo_ns) {
            self.units_late.add(units.into());
        }
    }
}

tally_sdk::export!(Slack: membership, units);
