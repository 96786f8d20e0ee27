//! The smallest policy: everything runs, in order of arrival.
//!
//! It schedules nothing and is here to be copied: every part of a policy is in
//! this file. The words it uses are explained in `wit/policy.wit`.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::host::{self, Counter};
use tally_sdk::{Decision, Event, Launch, Level, Policy};

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

    /// Called for every launch of a best-effort client; those of high-priority
    /// clients have a standing grant and are not asked about.
    fn decide(&mut self, _launch: &Launch) -> Decision {
        self.decided.add(1);
        // Run it whole, and ask again for the next one. `Run(100)` would let the
        // next hundred launches of this client go without asking: a lease.
        Decision::Run(0)
        // The other answers: `Hold(ns)`, `Slice(blocks)`, `Preemptible`,
        // `Partition(sms)`.
    }

    /// Called when something happens. Optional: without it nothing is missed here.
    fn on_event(&mut self, _now_ns: u64, event: &Event) {
        if let Event::ClientJoined(client) = event {
            // Its name is empty unless `client-identity` was granted.
            let (id, name, class) = (client.id, &client.name, client.class);
            host::log(Level::Info, &format!("client {id} {name} joined as {class:?}"));
        }
    }
}

// Makes `Fifo` the policy of this component.
tally_sdk::export!(Fifo);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::testing::{Call, calls, client, launch};
    use tally_sdk::{LaunchFlags, PriorityClass};

    #[test]
    fn everything_runs() {
        let mut fifo = Fifo::init("").unwrap();
        for flags in [LaunchFlags::empty(), LaunchFlags::HIGH_BUSY, LaunchFlags::all()] {
            assert_eq!(fifo.decide(&Launch { flags, ..launch() }), Decision::Run(0));
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
        fifo.on_event(0, &Event::ClientJoined(client(1, PriorityClass::High)));
        assert!(matches!(&calls()[..], [Call::Log { level: Level::Info, .. }]));
    }
}
