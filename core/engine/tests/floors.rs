//! Floors of best-effort clients, as policies are told of them.

mod common;

use common::{HIGH, LOW, Script, info, submission};
use std::sync::{Arc, Mutex};
use tally_engine::engine::Had;
use tally_engine::policy::*;
use tally_engine::{Engine, EngineConfig};

const MS: u64 = 1_000_000;

#[test]
fn launches_say_that_their_client_has_a_floor_and_wait_no_longer_than_its_change() {
    let seen = Arc::<Mutex<common::Seen>>::default();
    let held = || Ok(Decision::Hold(HOLD_UNTIL_CHANGE));
    let answers = [held(), held(), Ok(Decision::Run(0))].into();
    let script = Script { seen: Arc::clone(&seen), answers, ..Default::default() };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    for (id, class) in [(HIGH, Class::High), (LOW, Class::BestEffort)] {
        e.client_joined(0, info(id, class), 0, &mut out);
    }
    let kernel = e.intern(&common::key("k"));
    e.submitted(10, LOW, submission(0, kernel), &mut out);
    e.set_min_share(20, LOW, 125, &mut out);
    // As it is: nothing changes.
    e.set_min_share(30, LOW, 125, &mut out);
    e.set_min_share(30, HIGH, 125, &mut out);
    e.set_min_share(40, LOW, 0, &mut out);
    let launches = seen.lock().unwrap().launches.clone();
    let flags: Vec<_> =
        launches.iter().map(|l| (l.now_ns, l.state & launch_state::MIN_SHARE)).collect();
    assert_eq!(flags, [(10, 0), (20, launch_state::MIN_SHARE), (40, 0)]);
}

#[test]
fn time_with_work_is_counted_from_a_launch_until_nothing_waits_or_runs() {
    let script = Script::default();
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    let kernel = e.intern(&common::key("k"));
    let had = |e: &Engine, now_ns| e.had(now_ns, LOW).unwrap();
    assert_eq!(had(&e, 5 * MS), Had::default());
    for (at_ms, ticket) in [(10, 0), (11, 1)] {
        e.submitted(at_ms * MS, LOW, submission(ticket, kernel), &mut out);
    }
    assert_eq!(had(&e, 12 * MS).backlogged_ns, 2 * MS);
    e.progress(14 * MS, LOW, 0, 1, None, &mut out);
    assert_eq!(had(&e, 15 * MS).backlogged_ns, 5 * MS, "the second one runs");
    e.progress(16 * MS, LOW, 0, 2, None, &mut out);
    let all = had(&e, 99 * MS);
    assert_eq!(all.backlogged_ns, 6 * MS);
    assert!(all.charged_ns > 0 && all.charged_ns <= 6 * MS, "{all:?}");
    e.submitted(100 * MS, LOW, submission(2, kernel), &mut out);
    assert_eq!(had(&e, 101 * MS).backlogged_ns, 7 * MS);
}
