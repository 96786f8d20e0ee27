//! A policy that holds work while the GPU has nothing to do loses its turn; one that
//! has a reason to hold does not.

mod common;

use common::{HIGH, LOW, Script, granted, info, submission};
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::{Action, Engine, EngineConfig, Submission};

const MS: u64 = 1_000_000;
const STALL: u64 = 1_000 * MS;

/// Holds everything for `hold_ns` each time; notes its faults.
struct Holds {
    hold_ns: u64,
    runs: Arc<Mutex<bool>>,
    faults: Arc<Mutex<Vec<(u64, Fault)>>>,
}

impl Policy for Holds {
    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        self.faults.lock().unwrap().push((now_ns, fault.clone()));
    }

    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        let runs = *self.runs.lock().unwrap();
        Ok(if runs { Decision::Run(0) } else { Decision::Hold(self.hold_ns) }.into())
    }
}

struct Harness {
    engine: Engine,
    runs: Arc<Mutex<bool>>,
    faults: Arc<Mutex<Vec<(u64, Fault)>>>,
    out: Vec<Action>,
}

impl Harness {
    fn new(hold_ns: u64, policy_stall_ns: u64) -> Self {
        let (runs, faults) = (Arc::<Mutex<bool>>::default(), Arc::default());
        let holds = Holds { hold_ns, runs: runs.clone(), faults: Arc::clone(&faults) };
        let config = EngineConfig { policy_stall_ns, ..Default::default() };
        let mut engine = Engine::new(config, Box::new(holds));
        let mut out = Vec::new();
        engine.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
        engine.client_joined(0, info(HIGH, Class::High), 0, &mut out);
        Harness { engine, runs, faults, out }
    }

    fn submit(&mut self, now_ns: u64, ticket: u64) {
        self.engine.submitted(now_ns, LOW, submission(ticket, None), &mut self.out);
    }

    /// Let time pass as the dispatch thread does: from deadline to deadline.
    fn pass(&mut self, until_ns: u64) {
        while let Some(due) = self.engine.next_deadline_ns().filter(|&due| due <= until_ns) {
            self.engine.tick(due, &mut self.out);
        }
        self.engine.tick(until_ns, &mut self.out);
    }

    fn faults(&self) -> Vec<u64> {
        self.faults.lock().unwrap().iter().map(|(at, _)| *at).collect()
    }

    fn high(&mut self, now_ns: u64, busy: bool) {
        self.engine.high_activity(now_ns, HIGH, busy, now_ns, &mut self.out);
    }

    fn done(&mut self, now_ns: u64, ticket: u64) {
        self.engine.progress(now_ns, LOW, 0, ticket as u32 + 1, None, &mut self.out);
    }
}

#[test]
fn holding_while_there_is_nothing_to_do_is_a_fault_and_the_rule_answers() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.submit(5, 0);
    s.pass(4 + STALL);
    assert_eq!((s.faults(), granted(&s.out, LOW)), (vec![], Some(0)));
    s.pass(5 + STALL);
    assert_eq!((s.faults(), granted(&s.out, LOW)), (vec![5 + STALL], Some(1)));
    let stats = s.engine.policy_stats();
    assert_eq!((stats.faults[&FaultKind::Stall], stats.built_in_rule_decisions), (1, 1));
    let message = &stats.last_fault.as_ref().unwrap().message;
    assert!(message.contains("of 1 clients for 1000 ms"), "{message}");
    // Once it is done and the next one is held: again, from then on.
    s.done(2 * STALL, 0);
    s.submit(2 * STALL, 1);
    s.pass(3 * STALL);
    assert_eq!(s.faults(), [5 + STALL, 3 * STALL]);
}

#[test]
fn everybody_who_waits_is_answered_and_windows_hold() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.engine.client_joined(1, info(3, Class::BestEffort), 0, &mut s.out);
    s.engine.submitted(1, 3, submission(0, None), &mut s.out);
    (0..4).for_each(|ticket| s.submit(2, ticket));
    s.pass(1 + STALL);
    assert_eq!(granted(&s.out, 3), Some(1));
    // Of launches of unknown length one at a time is in flight, whoever decides.
    assert_eq!(granted(&s.out, LOW), Some(1));
    assert_eq!(s.faults().len(), 1);
}

#[test]
fn short_holds_are_the_policys_own_business() {
    let mut s = Harness::new(300 * MS, STALL);
    s.submit(0, 0);
    s.pass(899 * MS);
    *s.runs.lock().unwrap() = true;
    s.pass(900 * MS);
    assert_eq!(granted(&s.out, LOW), Some(1));
    assert_eq!(s.faults(), []);
}

#[test]
fn each_launch_granted_starts_the_time_anew() {
    let mut s = Harness::new(700 * MS, STALL);
    for ticket in 0..10 {
        let at = ticket * 800 * MS;
        *s.runs.lock().unwrap() = false;
        s.submit(at, ticket);
        *s.runs.lock().unwrap() = true;
        s.pass(at + 700 * MS);
        s.done(at + 710 * MS, ticket);
    }
    assert_eq!(granted(&s.out, LOW), Some(10));
    assert_eq!(s.faults(), []);
}

#[test]
fn high_priority_work_is_a_reason_to_hold() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.submit(0, 0);
    s.high(900 * MS, true);
    s.pass(10 * STALL);
    assert_eq!(s.faults(), []);
    // The time runs from its end.
    s.high(10 * STALL, false);
    s.pass(11 * STALL - 1);
    assert_eq!(s.faults(), []);
    s.pass(11 * STALL);
    assert_eq!(s.faults(), [11 * STALL]);
    assert!(
        s.engine.policy_stats().built_in_rule_decisions >= 1 && granted(&s.out, LOW) == Some(1)
    );
}

#[test]
fn what_is_in_flight_is_a_reason_to_hold() {
    let mut s = Harness::new(u64::MAX, STALL);
    *s.runs.lock().unwrap() = true;
    s.submit(0, 0);
    *s.runs.lock().unwrap() = false;
    s.submit(1, 1);
    s.pass(400 * MS);
    assert_eq!(s.faults(), []);
    s.done(400 * MS, 0);
    s.pass(1_400 * MS);
    assert_eq!(s.faults(), [1_400 * MS]);
}

#[test]
fn nobody_waits_and_nothing_stalls() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.pass(100 * STALL);
    assert_eq!(s.engine.next_deadline_ns(), None);
    s.submit(100 * STALL, 0);
    s.engine.client_left(100 * STALL + 1, LOW, &mut s.out);
    s.pass(200 * STALL);
    assert_eq!(s.faults(), []);
}

#[test]
fn another_policy_starts_with_a_clean_slate() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.submit(0, 0);
    s.pass(900 * MS);
    let faults = Arc::default();
    let next = Holds { hold_ns: u64::MAX, runs: Arc::default(), faults: Arc::clone(&faults) };
    s.engine.set_policy(900 * MS, Box::new(next), &mut s.out);
    s.pass(1_899 * MS);
    assert!(faults.lock().unwrap().is_empty() && s.faults().is_empty());
    s.pass(1_900 * MS);
    assert_eq!(faults.lock().unwrap().len(), 1);
}

#[test]
fn where_that_is_disabled_a_policy_may_hold_for_ever() {
    let mut s = Harness::new(u64::MAX, u64::MAX);
    s.submit(0, 0);
    s.pass(3_600_000 * MS);
    assert_eq!((s.faults(), granted(&s.out, LOW)), (vec![], Some(0)));
}

/// The policy starts one launch of LOW in a form that can yield, tells it to yield so, and holds what LOW submits then.
fn yielded(command: Command, is_held: bool) -> (Engine, Vec<Action>) {
    let script = Script {
        answers: [Decision::Preemptible, Decision::Hold(u64::MAX)].map(Ok).into(),
        on_decide: [command].into(),
        ..Default::default()
    };
    let config = EngineConfig { policy_stall_ns: STALL, ..Default::default() };
    let (mut e, mut out) = (Engine::new(config, Box::new(script)), Vec::new());
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.client_joined(0, info(HIGH, Class::High), 0, &mut out);
    let can_yield = Submission { offered: forms_offered::PREEMPTIBLE, ..submission(0, None) };
    e.submitted(0, LOW, can_yield, &mut out);
    if is_held {
        e.submitted(0, LOW, submission(1, None), &mut out);
    }
    (e, out)
}

fn stalls(e: &Engine) -> u64 {
    e.policy_stats().faults.get(&FaultKind::Stall).copied().unwrap_or(0)
}

#[test]
fn a_yield_without_an_end_is_a_fault_and_the_client_goes_on() {
    let ended = Action::Yield { client: LOW, yielded: false };
    for is_held in [false, true] {
        let (mut e, mut out) = yielded(Command::SetYield { client: LOW, yielded: true }, is_held);
        assert!(out.contains(&Action::Yield { client: LOW, yielded: true }), "{out:?}");
        e.tick(STALL - 1, &mut out);
        assert!(stalls(&e) == 0 && !out.contains(&ended), "{out:?}");
        assert_eq!(e.next_deadline_ns(), Some(STALL));
        e.tick(STALL, &mut out);
        assert!(stalls(&e) == 1 && out.contains(&ended), "{out:?}");
        e.tick(10 * STALL, &mut out);
        assert_eq!(stalls(&e), 1, "it is on the GPU");
    }
}

#[test]
fn a_yield_for_an_hour_after_high_priority_work_is_one_too() {
    let command = Command::SetAutoYield { client: LOW, enabled: true, idle_ns: 3_600_000 * MS };
    let (mut e, mut out) = yielded(command, false);
    e.high_activity(MS, HIGH, true, MS, &mut out);
    e.tick(10 * STALL, &mut out);
    assert_eq!(stalls(&e), 0);
    e.high_activity(10 * STALL, HIGH, false, 10 * STALL, &mut out);
    e.tick(11 * STALL, &mut out);
    assert!(stalls(&e) == 1 && out.ends_with(&[Action::Yield { client: LOW, yielded: false }]));
    // The policy still means it to yield: so it does when high-priority work comes again.
    out.clear();
    e.high_activity(12 * STALL, HIGH, true, 12 * STALL, &mut out);
    assert!(out.contains(&Action::Yield { client: LOW, yielded: true }), "{out:?}");
}

#[test]
fn high_priority_work_that_was_over_before_anybody_looked_is_a_reason_to_yield() {
    let command = Command::SetAutoYield { client: LOW, enabled: true, idle_ns: STALL };
    let (mut e, mut out) = yielded(command, false);
    e.high_activity(MS, HIGH, true, MS, &mut out);
    e.high_activity(2 * MS, HIGH, false, 2 * MS, &mut out);
    for at in 1..20 {
        let now = 2 * MS + at * STALL / 2;
        e.tick(now, &mut out);
        e.high_activity(now, HIGH, false, now, &mut out);
    }
    assert_eq!(stalls(&e), 0);
}

#[test]
fn who_yields_to_somebody_else_at_work_may_do_so_for_long() {
    let (mut e, mut out) = yielded(Command::SetYield { client: LOW, yielded: true }, true);
    e.client_joined(0, info(3, Class::BestEffort), 0, &mut out);
    e.submitted(1, 3, submission(0, None), &mut out);
    assert_eq!(granted(&out, 3), Some(1));
    e.tick(10 * STALL, &mut out);
    assert_eq!(stalls(&e), 0);
    e.progress(10 * STALL, 3, 0, 1, None, &mut out);
    e.tick(11 * STALL, &mut out);
    assert_eq!(stalls(&e), 1);
}

#[test]
fn what_cannot_yield_may_wait_for_what_has() {
    let script = Script {
        answers: [Decision::Preemptible, Decision::Run(0)].map(Ok).into(),
        on_decide: [Command::SetYield { client: LOW, yielded: true }].into(),
        ..Default::default()
    };
    let config = EngineConfig { policy_stall_ns: STALL, ..Default::default() };
    let (mut e, mut out) = (Engine::new(config, Box::new(script)), Vec::new());
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    let can_yield = Submission { offered: forms_offered::PREEMPTIBLE, ..submission(0, None) };
    e.submitted(0, LOW, can_yield, &mut out);
    let whole = Submission { stream: 1, completion: 1, ..submission(1, None) };
    e.submitted(7, LOW, whole, &mut out);
    // It goes on to launch.
    let whole = Submission { completion: 2, ..whole };
    e.submitted(STALL, LOW, Submission { ticket: 2, started: true, ..whole }, &mut out);
    assert_eq!(e.client_state(LOW).unwrap().in_flight, 3);
    // The one that cannot yield may also take long.
    let in_vain_ns = 10 * STALL + 7;
    assert_eq!(e.next_deadline_ns(), Some(in_vain_ns));
    e.tick(in_vain_ns, &mut out);
    assert_eq!((stalls(&e), e.next_deadline_ns()), (0, Some(in_vain_ns + STALL)));
    // Where another is on the GPU, that may be it.
    e.client_joined(in_vain_ns, info(3, Class::BestEffort), 0, &mut out);
    e.submitted(in_vain_ns, 3, submission(0, None), &mut out);
    let later_ns = in_vain_ns + STALL;
    e.tick(later_ns, &mut out);
    assert_eq!((stalls(&e), e.next_deadline_ns()), (0, Some(later_ns + STALL)));
    e.progress(later_ns, 3, 0, 1, None, &mut out);
    let ended = Action::Yield { client: LOW, yielded: false };
    assert!(!out.contains(&ended));
    e.tick(later_ns + STALL, &mut out);
    assert!(stalls(&e) == 1 && out.contains(&ended), "{out:?}");
    let message = &e.policy_stats().last_fault.as_ref().unwrap().message;
    assert!(message.ends_with("for 11000 ms while nothing ended"), "{message}");
}

#[test]
fn high_priority_work_that_gets_nowhere_is_waited_for_no_longer() {
    let mut s = Harness::new(u64::MAX, STALL);
    s.engine.submitted(0, HIGH, submission(0, None), &mut s.out);
    s.submit(1, 0);
    s.pass(10 * STALL);
    assert!(s.faults().is_empty(), "high-priority work is in flight");
    let is_active = |s: &Harness| s.engine.high_active();
    assert!(is_active(&s));
    let stands = |s: &mut Harness, now_ns, stands: bool| {
        s.engine.high_stands(now_ns, HIGH, stands);
        s.high(now_ns, false);
    };
    stands(&mut s, 10 * STALL, true);
    assert!(!is_active(&s));
    // A policy that goes on holding for it is at fault.
    s.pass(11 * STALL);
    assert_eq!((s.faults(), granted(&s.out, LOW)), (vec![11 * STALL], Some(1)));
    // It goes on.
    stands(&mut s, 11 * STALL, false);
    assert!(is_active(&s));
    s.engine.progress(12 * STALL, HIGH, 0, 1, None, &mut s.out);
    assert!(!is_active(&s));
}
