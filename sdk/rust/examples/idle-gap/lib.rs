//! Best-effort launches wait while high-priority work is there and for `idle_gap_us` after it.
//! With `lease` = N, N further launches of a client then go without a question, until
//! high-priority work appears. The same in four languages: `sdk/*/examples/idle-gap`.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::{
    Activity, Answer, Client, ClientId, Decision, HOLD_UNTIL_CHANGE, Launch, Membership, Policy,
    host,
};

struct IdleGap {
    idle_gap_ns: u64,
    lease: u32,
    /// Clients that may have some of a lease left.
    leased: Vec<ClientId>,
}

impl Policy for IdleGap {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let idle_gap_us = config.integer("idle_gap_us", 100, 0..=1_000_000)?;
        let lease = config.integer("lease", 0, 0..=1_000_000)? as u32;
        config.finish()?;
        Ok(IdleGap { idle_gap_ns: idle_gap_us * 1_000, lease, leased: Vec::new() })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        if launch.high_active() {
            return Decision::Hold(HOLD_UNTIL_CHANGE).into();
        }
        if launch.high_idle_ns < self.idle_gap_ns {
            return Decision::Hold(self.idle_gap_ns - launch.high_idle_ns).into();
        }
        if self.lease > 0 && !self.leased.contains(&launch.client) {
            self.leased.push(launch.client);
        }
        Decision::Run(self.lease).into()
    }
}

impl Activity for IdleGap {
    fn high_started(&mut self, _now_ns: u64) {
        self.leased.drain(..).for_each(host::revoke_lease);
    }

    fn high_ended(&mut self, _now_ns: u64) {}
}

impl Membership for IdleGap {
    fn joined(&mut self, _now_ns: u64, _client: &Client) {}

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.leased.retain(|leased| *leased != client);
    }
}

tally_sdk::export!(IdleGap: activity, membership);
