//! Best-effort launches wait while high-priority work is there, and after it for as long
//! as the longest pause between two pieces of it was so far, at most `most_us`: it learns
//! how long to be patient, and a reload does not make it forget. The same in four
//! languages: `sdk/*/examples/patient`, and each takes what another saved.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::codec::{Reader, Writer};
use tally_sdk::config::Config;
use tally_sdk::host::Gauge;
use tally_sdk::{Activity, Answer, Decision, HOLD_UNTIL_CHANGE, Launch, Policy, Saved, Stateful};

struct Patient {
    most_ns: u64,
    /// The longest pause seen.
    pause_ns: u64,
    /// When the pause under way began, ns; `None` if there is none.
    idle_since_ns: Option<u64>,
    /// Shows `pause_ns` in `tallyctl status`.
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
        let shown = Gauge::new("pause_ns");
        Ok(Patient { most_ns: most_us * 1_000, pause_ns: 0, idle_since_ns: None, shown })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            Decision::Run(0)
        } else if launch.high_active() {
            Decision::Hold(HOLD_UNTIL_CHANGE)
        } else if launch.high_idle_ns < self.pause_ns {
            Decision::Hold(self.pause_ns - launch.high_idle_ns)
        } else {
            Decision::Run(0)
        }
        .into()
    }
}

impl Activity for Patient {
    fn high_ended(&mut self, now_ns: u64) {
        self.idle_since_ns = Some(now_ns);
    }

    fn high_started(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.idle_since_ns.take() {
            self.learn(now_ns.saturating_sub(since_ns));
        }
    }
}

impl Stateful for Patient {
    fn snapshot(&self) -> Saved {
        let mut out = Writer::new("patient", 1);
        out.put(&self.pause_ns);
        out.finish()
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let pause_ns = Reader::new(from, "patient", 1)?.get()?;
        self.learn(pause_ns);
        Ok(())
    }
}

tally_sdk::export!(Patient: activity, state);
