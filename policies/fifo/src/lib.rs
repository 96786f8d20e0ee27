//! The smallest policy: everything runs, in order of arrival.
//!
//! It schedules nothing and is here to be copied: every part of a policy is in
//! this file. The words it uses are explained in `wit/policy.wit`.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::host::{self, Counter};
use tally_sdk::{Answer, Client, ClientId, Decision, Launch, Level, Membership, Policy};

/// What the policy keeps from one call to the next. There is no other memory,
/// no clock, no file: the core passes in all there is to know.
struct Fifo {
    decided: Counter,
}

impl Policy for Fifo {
    /// Called once, with the text of the file that `--policy-config` names.
    fn init(config: &str) -> Result<Self, String> {
        // Refuse what is not understood; a typing error must not pass in silence.
        if !config.trim().is_empty() {
            return Err(format!("fifo takes no configuration, but got {config:?}"));
        }
        // `tallyctl status` shows this under the policy.
        Ok(Fifo { decided: Counter::new("decided") })
    }

    /// Called for every launch of a best-effort client that is not leased; high-priority clients are ungated and not
    /// asked about.
    fn decide(&mut self, _launch: &Launch) -> Answer {
        self.decided.add(1);
        // Run it whole, and ask again for the next one. `Run(100)` would let the
        // next hundred launches of this client go without asking: a lease.
        Decision::Run(0).into()
        // The other decisions: `Hold(ns)`, `Sliced(blocks)`, `Preemptible`,
        // `SmLimited(sms)`. `because(1)` in place of `into()` would add a reason.
    }
}

/// What it is told of: clients that come and go.
impl Membership for Fifo {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        // Its name would need the capability `identity`.
        let (id, class) = (client.id, client.class);
        host::log(Level::Info, &format!("client {id} joined as {class:?}"));
    }

    fn left(&mut self, _now_ns: u64, _client: ClientId) {}
}

// Makes `Fifo` the policy of this component, and has it told of clients.
tally_sdk::export!(Fifo: membership);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::testing::{Call, calls, client, launch};
    use tally_sdk::{FormsOffered, LaunchState, PriorityClass};

    #[test]
    fn everything_runs() {
        let mut fifo = Fifo::init("").unwrap();
        for state in [LaunchState::empty(), LaunchState::HIGH_ACTIVE, LaunchState::all()] {
            let launch = Launch { state, offered: FormsOffered::all(), ..launch() };
            assert_eq!(fifo.decide(&launch), Decision::Run(0));
        }
        assert_eq!(calls().len(), 3);
    }

    #[test]
    fn a_configuration_is_refused() {
        assert!(Fifo::init("window_us = 3").is_err_and(|why| why.contains("window_us")));
    }

    #[test]
    fn joining_is_logged() {
        let mut fifo = Fifo::init("").unwrap();
        fifo.joined(0, &client(1, PriorityClass::High));
        assert!(matches!(&calls()[..], [Call::Log { level: Level::Info, .. }]));
    }
}
