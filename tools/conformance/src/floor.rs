//! Does a client with a floor get its share while a high-priority client is busy without end?

use crate::Options;
use crate::fairness::World;
use crate::report::{Check, Outcome};
use crate::steady::Stopped;
use crate::subject::Subject;
use tally_engine::policy::SharingMode;

/// The floor of the first client, permille.
const FLOOR: u32 = 200;
/// Share of the floor that it may miss, percent: a burst at the end of the time.
const MISSED_PERCENT_MAX: f64 = 10.0;
const SETTLING_NS: u64 = 500_000_000;
const LOOKED_AT_NS: u64 = 3_000_000_000;

/// GPU time of the client over the time, in which it always has work, percent.
fn had(subject: &dyn Subject, sharing: SharingMode) -> Result<f64, Stopped> {
    let mut world = World::new(subject.start(None)?, sharing);
    world.be_busy(FLOOR);
    world.run_for(SETTLING_NS);
    let before_ns = world.used_ns(0);
    world.run_for(LOOKED_AT_NS);
    Ok((world.used_ns(0) - before_ns) as f64 / LOOKED_AT_NS as f64 * 100.0)
}

/// Required only if the options say so: a policy need not know of floors.
pub fn floor(subject: &dyn Subject, options: &Options) -> Check {
    let name = "floor";
    let modes = [SharingMode::Concurrent, SharingMode::TimeSliced];
    let [side_by_side, in_turns] = match modes.map(|sharing| had(subject, sharing)) {
        [Ok(first), Ok(second)] => [first, second],
        [Err(stopped), _] | [_, Err(stopped)] => return crate::checks::not_run(name, stopped),
    };
    let least = f64::from(FLOOR) / 10.0 * (1.0 - MISSED_PERCENT_MAX / 100.0);
    let detail = format!(
        "beside high-priority work without end a best-effort client with a floor of {} % of GPU time gets \
         {side_by_side:.1} %, {in_turns:.1} % where contexts take turns",
        FLOOR / 10
    );
    let (outcome, advice) = match (side_by_side >= least && in_turns >= least, options.fair) {
        (true, _) => (Outcome::Pass, ""),
        (false, false) => (Outcome::Info, ""),
        (false, true) => (
            Outcome::Fail,
            "let in launches with the flag `min-share` of whom `clients.get` says that it was charged for less than its \
             floor; `policies/fairness` does it",
        ),
    };
    Check { name, outcome, detail, advice }
}
