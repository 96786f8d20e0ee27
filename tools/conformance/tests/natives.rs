//! The suite on policies that no component could be: what it looks for is found.

use std::sync::atomic::{AtomicU64, Ordering};
use tally_conformance::{Instance, Options, Outcome, Report, Subject, check};
use tally_engine::policy::{Answer, Context, Decision, Fault, Launch, Policy};
use tally_wasm_host::{LoadError, Saved};

type Rule = fn(&Launch) -> Decision;

struct Native(Rule);

impl Policy for Native {
    fn decide(&mut self, launch: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok((self.0)(launch).into())
    }
}

impl Instance for Native {
    fn memory_bytes(&self) -> usize {
        0
    }

    fn call_fuel(&self) -> Option<u64> {
        None
    }
}

impl Subject for Native {
    fn start(&self, _: Option<&Saved>) -> Result<Box<dyn Instance>, LoadError> {
        Ok(Box::new(Native(self.0)))
    }

    fn call_fuel_max(&self) -> u64 {
        1
    }
}

fn of(rule: Rule) -> Report {
    check(&Native(rule), &Options { streams: 16, steady_calls: 500, ..Options::default() })
}

#[test]
fn what_leaks_from_one_instance_to_the_next_fails_determinism() {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let report = of(|_| Decision::Run(CALLS.fetch_add(1, Ordering::Relaxed) as u32 % 7));
    assert_eq!(report.names(Outcome::Fail), ["determinism"], "{report:#?}");
}

#[test]
fn holding_until_high_priority_has_been_seen_fails_no_starvation() {
    let report = of(|launch| match launch.high_idle_ns {
        u64::MAX => Decision::Hold(1_000),
        _ => Decision::Run(0),
    });
    assert_eq!(report.names(Outcome::Fail), ["no-starvation"], "{report:#?}");
    let check = report.checks.iter().find(|c| c.name == "no-starvation").unwrap();
    assert!(check.detail.contains("held"), "{check:?}");
}

#[test]
fn an_idle_gap_is_no_starvation() {
    let report = of(|launch| match launch.class {
        tally_engine::policy::Class::BestEffort if launch.high_idle_ns < 50_000_000 => {
            Decision::Hold(50_000_000 - launch.high_idle_ns)
        }
        _ => Decision::Run(0),
    });
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.names(Outcome::Warn), [""; 0], "{report:#?}");
}
