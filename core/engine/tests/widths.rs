//! A best-effort client's width: what it limits, and what it leaves.

mod common;

use common::{HIGH, LOW, Script, info, key, submission, took};
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::{Action, Engine, EngineConfig, Submission};

fn engine(decisions: &[Decision], commands: &[Command]) -> (Engine, Arc<Mutex<common::Seen>>) {
    let seen = Arc::default();
    let script = Script {
        seen: Arc::clone(&seen),
        answers: decisions.iter().copied().map(Ok).collect(),
        on_decide: commands.iter().copied().collect(),
        ..Default::default()
    };
    let reserve_sms = std::array::from_fn(|i| if i == 0 { 16 } else { 0 });
    let config = EngineConfig { sm_count: 132, reserve_sms, ..EngineConfig::default() };
    let mut e = Engine::new(config, Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(HIGH, Class::High), 0, &mut out);
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    (e, seen)
}

fn set(client: ClientId, sms: u32) -> Command {
    Command::SetWidth { client, sms }
}

/// A kernel of which enough is known to limit it.
fn known_kernel(e: &mut Engine) -> Option<u32> {
    let kernel = e.intern(&key("k"));
    (0..3).for_each(|_| e.world_mut().profiles.record(kernel.unwrap(), 100_000));
    kernel
}

fn limitable(ticket: u64, kernel: Option<u32>) -> Submission {
    Submission { offered: forms_offered::SM_LIMITED, ..submission(ticket, kernel) }
}

/// What a launch at `now_ns` leads to.
fn submit(e: &mut Engine, now_ns: u64, submission: Submission) -> Vec<Action> {
    let mut out = Vec::new();
    e.submitted(now_ns, LOW, submission, &mut out);
    out
}

fn limited(ticket: u64, sms: u32) -> Action {
    Action::Decide {
        client: LOW,
        ticket,
        decision: Decision::SmLimited(sms),
        predicted_ns: 100_000,
    }
}

#[test]
fn what_is_decided_to_run_runs_on_the_width() {
    let run = Decision::Run(0);
    let (mut e, _) = engine(&[run, run, Decision::SmLimited(8), run], &[set(LOW, 120)]);
    let kernel = known_kernel(&mut e);
    let width = Action::SetWidth { client: LOW, sms: 112 };
    assert_eq!(submit(&mut e, 1, limitable(0, kernel)), [width, limited(0, 112)], "this one, too");
    // It cannot be limited.
    let whole = Action::Grant { client: LOW, until: 2 };
    let mut out = Vec::new();
    e.progress(2, LOW, 0, 1, None, &mut out);
    assert_eq!(submit(&mut e, 3, submission(1, kernel)), [whole]);
    e.progress(4, LOW, 0, 2, None, &mut out);
    assert_eq!(submit(&mut e, 5, limitable(2, kernel)), [limited(2, 8)], "decided so");
    let stats = e.client_stats(LOW).unwrap();
    assert_eq!((stats.sm_limited, stats.run, stats.degraded, stats.width_changes), (2, 1, 0, 1));
    assert_eq!(e.client_state(LOW).unwrap().width_sms, 112, "the partition's");
}

#[test]
fn a_lease_beside_a_width_is_granted_behind_the_decision() {
    let (mut e, _) = engine(&[Decision::Run(2)], &[set(LOW, 112)]);
    let kernel = known_kernel(&mut e);
    let out = submit(&mut e, 1, limitable(0, kernel));
    let width = Action::SetWidth { client: LOW, sms: 112 };
    assert_eq!(out, [width, limited(0, 112), Action::Grant { client: LOW, until: 3 }]);
    // Leased ones are as their program says: limited, or not yet.
    for (ticket, limited_sms) in [(1, 112), (2, 0)] {
        let leased = Submission { started: true, limited_sms, ..limitable(ticket, kernel) };
        assert_eq!(submit(&mut e, 2, leased), []);
    }
    let stats = e.client_stats(LOW).unwrap();
    assert_eq!((stats.sm_limited, stats.leased), (1, 2), "each is counted once");
}

#[test]
fn leased_launches_are_told_and_measured_as_limited() {
    let (mut e, seen) = engine(&[Decision::Run(4)], &[set(LOW, 112)]);
    let kernel = known_kernel(&mut e);
    submit(&mut e, 1, limitable(0, kernel));
    let leased = Submission { started: true, limited_sms: 112, ..limitable(1, kernel) };
    submit(&mut e, 2, leased);
    let mut out = Vec::new();
    e.progress(500_000, LOW, 0, 1, None, &mut out);
    e.progress(900_000, LOW, 0, 2, took(2, 300_000), &mut out);
    let events = &seen.lock().unwrap().events;
    let done: Vec<_> = events
        .iter()
        .filter_map(|event| if let Event::Completed(done) = event { Some(done) } else { None })
        .map(|done| (done.form, done.argument, done.measured_ns))
        .collect();
    assert_eq!(done, [(Form::SmLimited, 112, None), (Form::SmLimited, 112, Some(300_000))]);
    let profile = e.world().profiles.get(kernel.unwrap()).unwrap();
    assert_eq!(profile.count, 3, "that says nothing of its time whole");
}

#[test]
fn what_was_granted_before_the_width_stays_whole() {
    let (mut e, _) = engine(&[Decision::Hold(1_000_000), Decision::Run(1)], &[]);
    let kernel = known_kernel(&mut e);
    // Both wait; the second is granted by the first one's lease, and its program may have seen that.
    assert_eq!(submit(&mut e, 1, limitable(0, kernel)), []);
    assert_eq!(submit(&mut e, 1, limitable(1, kernel)), []);
    let mut out = Vec::new();
    e.tick(1_000_001, &mut out);
    assert_eq!(out, [Action::Grant { client: LOW, until: 2 }]);
    assert_eq!(e.client_stats(LOW).unwrap().sm_limited, 0);
}

#[test]
fn high_priority_clients_and_those_gone_have_no_width() {
    let (mut e, _) = engine(&[], &[set(HIGH, 64), set(77, 64), set(LOW, 64), set(LOW, 64)]);
    let out = submit(&mut e, 1, submission(0, None));
    let widths = out.iter().filter(|a| matches!(a, Action::SetWidth { .. })).count();
    assert_eq!(widths, 1, "{out:?}");
    assert_eq!(e.client_stats(LOW).unwrap().width_changes, 1, "the same again is no change");
}

#[test]
fn another_policy_finds_no_widths() {
    let (mut e, _) = engine(&[], &[set(LOW, 64)]);
    submit(&mut e, 1, submission(0, None));
    let mut out = Vec::new();
    e.set_policy(2, Box::new(Script::default()), &mut out);
    assert!(out.contains(&Action::SetWidth { client: LOW, sms: 0 }), "{out:?}");
    assert_eq!(e.client_state(LOW).unwrap().width_sms, 0);
}

#[test]
fn the_widths_that_there_are_are_known_from_the_first_decision() {
    let (mut e, _) = engine(&[], &[]);
    assert_eq!(e.world().widths(), []);
    submit(&mut e, 1, submission(0, None));
    assert_eq!(e.world().widths(), [112]);
}

#[test]
fn a_kernel_is_measured_whole_before_a_width_limits_it() {
    let (mut e, _) = engine(&[], &[set(LOW, 120)]);
    let kernel = e.intern(&key("k"));
    let mut out = Vec::new();
    let mut forms = Vec::new();
    for n in 0..5 {
        let now_ns = 1 + u64::from(n) * 1_000_000;
        let done = submit(&mut e, now_ns, limitable(n.into(), kernel));
        forms.push(done.iter().any(|action| matches!(action, Action::Decide { .. })));
        e.progress(now_ns + 500_000, LOW, 0, n + 1, took(n + 1, 400_000), &mut out);
    }
    assert_eq!(forms, [false, false, false, true, true]);
}

#[test]
fn what_a_client_says_of_a_lease_is_believed_where_it_can_be_true() {
    let (mut e, seen) = engine(&[], &[]);
    let kernel = known_kernel(&mut e);
    let mut out = Vec::new();
    let says = |limited_sms| Submission { started: true, limited_sms, ..limitable(0, kernel) };
    // Not offered; a high-priority client's; and a number that no partition has.
    let not_offered = Submission { offered: 0, ..says(112) };
    for (ticket, client, said) in [(0, LOW, not_offered), (0, HIGH, says(112)), (1, LOW, says(7))] {
        let completion = ticket as u32 + 1;
        e.submitted(1, client, Submission { ticket, completion, ..said }, &mut out);
    }
    e.progress(500_000, LOW, 0, 2, None, &mut out);
    e.progress(500_000, HIGH, 0, 1, None, &mut out);
    let events = &seen.lock().unwrap().events;
    let done = events.iter().filter_map(|event| match event {
        Event::Completed(done) => Some((done.client, done.form, done.argument)),
        _ => None,
    });
    let expected = [(LOW, Form::Whole, 0), (LOW, Form::SmLimited, 112), (HIGH, Form::Whole, 0)];
    assert_eq!(done.collect::<Vec<_>>(), expected);
}

#[test]
fn a_limited_launch_that_nobody_timed_is_charged_for_what_it_takes_there() {
    let (mut e, seen) = engine(&[], &[]);
    let kernel = known_kernel(&mut e);
    let mut out = Vec::new();
    let leased = Submission { started: true, limited_sms: 112, ..limitable(0, kernel) };
    e.submitted(1, LOW, leased, &mut out);
    e.progress(900_000, LOW, 0, 1, None, &mut out);
    let events = &seen.lock().unwrap().events;
    let done = events.iter().find_map(|event| match event {
        Event::Completed(done) => Some(done.charged_ns),
        _ => None,
    });
    assert_eq!(done, Some(100_000 * 132 / 112), "and not for the time until that was seen");
}

#[test]
fn beside_others_a_kernel_needs_one_measured_launch() {
    let (mut e, _) = engine(&[], &[set(LOW, 120)]);
    let kernel = e.intern(&key("k"));
    e.world_mut().profiles.record_contended(kernel.unwrap(), 100_000);
    let out = submit(&mut e, 1, limitable(0, kernel));
    assert!(out.contains(&limited(0, 112)), "{out:?}");
}
