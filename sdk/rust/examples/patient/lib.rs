//! Best-effort launches wait while high-priority work is there, and after it for as long
//! as the longest pause between two pieces of it was so far, at most `most_us`: it learns
//! how long to be patient, and a reload does not make it forget. The same in four
//! languages: `sdk/*/examples/patient`, and each takes what another saved.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::host::Gauge;
use tally_sdk::{Decision, Event, HOLD_NS_MAX, Launch, Policy, Saved, Stateful, Subscription, host};

struct Patient {
    most_ns: u64,
    /// The longest pause seen.
    pause_ns: u64,
    /// Since when there is one.
    idle_since_ns: Option<u64>,
    /// The same for `tallyctl status`.
    shown: Gauge,
}

impl Patient {
    fn learn(&mut self, pause_ns: u64) {
        self.pause_ns = self.pause_ns.max(pause_ns.min(self.most_ns));
        self.shown.set(self.pause_ns as i64);
    }
}

impl Policy for Patient {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let most_us = config.integer("most_us", 1_000, 0..=100_000)?;
        config.finish()?;
        host::subscribe(Subscription::HIGH_ACTIVITY);
        let shown = Gauge::new("pause_ns");
        Ok(Patient { most_ns: most_us * 1_000, pause_ns: 0, idle_since_ns: None, shown })
    }

    fn decide(&mut self, launch: &Launch) -> Decision {
        if launch.is_high() {
            Decision::Run(0)
        } else if launch.high_busy() {
            Decision::Hold(HOLD_NS_MAX)
        } else if launch.high_quiet_ns < self.pause_ns {
            Decision::Hold(self.pause_ns - launch.high_quiet_ns)
        } else {
            Decision::Run(0)
        }
    }

    fn on_event(&mut self, now_ns: u64, event: &Event) {
        match event {
            Event::HighIdle => self.idle_since_ns = Some(now_ns),
            Event::HighBusy => {
                if let Some(since_ns) = self.idle_since_ns.take() {
                    self.learn(now_ns.saturating_sub(since_ns));
                }
            }
            _ => {}
        }
    }
}

impl Stateful for Patient {
    fn snapshot(&self) -> Saved {
        Saved { format: "patient".into(), version: 1, data: self.pause_ns.to_le_bytes().into() }
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        from.expect("patient", 1)?;
        let pause_ns = from.data.as_slice().try_into().map_err(|_| "expected 8 bytes")?;
        self.learn(u64::from_le_bytes(pause_ns));
        Ok(())
    }
}

tally_sdk::export!(Patient, stateful);
