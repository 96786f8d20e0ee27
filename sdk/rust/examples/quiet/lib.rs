//! Best-effort launches wait while high-priority work is there and for `quiet_us` after it.
//! With `lease` = N, N further launches of a client then go without a question, until
//! high-priority work appears. The same in four languages: `sdk/*/examples/quiet`.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::{ClientId, Decision, Event, HOLD_NS_MAX, Launch, Policy, Subscription, host};

struct Quiet {
    quiet_ns: u64,
    lease: u32,
    /// Clients that may have some of a lease left.
    leased: Vec<ClientId>,
}

impl Policy for Quiet {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let quiet_us = config.integer("quiet_us", 100, 0..=1_000_000)?;
        let lease = config.integer("lease", 0, 0..=1_000_000)? as u32;
        config.finish()?;
        if lease > 0 {
            host::subscribe(Subscription::HIGH_ACTIVITY);
        }
        Ok(Quiet { quiet_ns: quiet_us * 1_000, lease, leased: Vec::new() })
    }

    fn decide(&mut self, launch: &Launch) -> Decision {
        if launch.is_high() {
            return Decision::Run(0);
        }
        if launch.high_busy() {
            return Decision::Hold(HOLD_NS_MAX);
        }
        if launch.high_quiet_ns < self.quiet_ns {
            return Decision::Hold(self.quiet_ns - launch.high_quiet_ns);
        }
        if self.lease > 0 && !self.leased.contains(&launch.client) {
            self.leased.push(launch.client);
        }
        Decision::Run(self.lease)
    }

    fn on_event(&mut self, _now_ns: u64, event: &Event) {
        match event {
            Event::HighBusy => self.leased.drain(..).for_each(host::revoke_lease),
            Event::ClientLeft(client) => self.leased.retain(|leased| leased != client),
            _ => {}
        }
    }
}

tally_sdk::export!(Quiet);
