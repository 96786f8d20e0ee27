//! Launches in forms other than whole, and preemption.

mod common;

use common::{HIGH, LOW, Script, granted, info, key, submission, took};
use tally_engine::policy::*;
use tally_engine::{Action, BuiltInRule, Engine, EngineConfig, Submission};

#[test]
fn forms_that_are_not_on_offer_run_whole_and_are_counted() {
    let script = Script {
        answers: [Decision::Sliced(8), Decision::Preemptible, Decision::Sliced(2)].map(Ok).into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    for t in 0..2 {
        e.submitted(1, LOW, submission(t, None), &mut out);
        e.progress(2, LOW, 0, t as u32 + 1, None, &mut out);
    }
    assert_eq!(granted(&out, LOW), Some(2));
    assert_eq!(e.client_stats(LOW).unwrap().degraded, 2);
    // On offer: passed on, and the grant stays below the ticket.
    out.clear();
    let can = Submission { offered: forms_offered::SLICED, ..submission(2, None) };
    e.submitted(2, LOW, can, &mut out);
    let decision = Decision::Sliced(2);
    assert_eq!(out, [Action::Decide { client: LOW, ticket: 2, decision, predicted_ns: 0 }]);
}

/// A best-effort client with a preemptible launch in flight that yields by itself.
fn preemptible_engine(idle_ns: u64) -> (Engine, Vec<Action>) {
    let script = Script {
        answers: [Ok(Decision::Preemptible), Ok(Decision::Preemptible)].into(),
        on_event: [Command::SetAutoYield { client: LOW, enabled: true, idle_ns }].into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.client_joined(0, info(HIGH, Class::High), 0, &mut out);
    // The command named a client that had just joined; a second event repeats nothing.
    out.clear();
    (e, out)
}

fn yields(out: &[Action]) -> Vec<bool> {
    out.iter()
        .filter_map(|a| match a {
            Action::Yield { client: LOW, yielded } => Some(*yielded),
            _ => None,
        })
        .collect()
}

#[test]
fn a_preemptible_launch_yields_to_high_priority_work_and_goes_on_after_the_idle_gap() {
    let (mut e, mut out) = preemptible_engine(1_000);
    let can = |t| Submission { offered: forms_offered::PREEMPTIBLE, ..submission(t, None) };
    // Nothing in flight that could yield: nobody to tell.
    e.high_activity(10, HIGH, true, 10, &mut out);
    e.high_activity(20, HIGH, false, 20, &mut out);
    assert_eq!(yields(&out), []);
    e.tick(2_000, &mut out);
    e.submitted(2_000, LOW, can(0), &mut out);
    assert_eq!(yields(&out), []);
    e.high_activity(3_000, HIGH, true, 3_000, &mut out);
    assert_eq!(yields(&out), [true]);
    e.high_activity(4_000, HIGH, false, 4_000, &mut out);
    assert_eq!(yields(&out), [true]);
    assert_eq!(e.next_deadline_ns(), Some(5_000));
    e.tick(4_999, &mut out);
    assert_eq!(yields(&out), [true]);
    e.tick(5_000, &mut out);
    assert_eq!(yields(&out), [true, false]);
    assert_eq!((e.client_stats(LOW).unwrap().yields, e.yields()), (1, 1));
    // Granted while high priority is active: it starts by yielding.
    e.progress(5_100, LOW, 0, 1, None, &mut out);
    out.clear();
    e.high_activity(6_000, HIGH, true, 6_000, &mut out);
    e.submitted(6_001, LOW, can(1), &mut out);
    assert_eq!(yields(&out), [true]);
}

#[test]
fn a_policy_that_is_replaced_leaves_nobody_yielded() {
    let (mut e, mut out) = preemptible_engine(1_000);
    let can = Submission { offered: forms_offered::PREEMPTIBLE, ..submission(0, None) };
    e.submitted(1, LOW, can, &mut out);
    e.high_activity(2, HIGH, true, 2, &mut out);
    assert_eq!(yields(&out), [true]);
    out.clear();
    e.set_policy(3, Box::new(BuiltInRule { idle_ns: 0 }), &mut out);
    assert_eq!(yields(&out), [false]);
    assert!(!e.client_state(LOW).unwrap().yielded);
}

#[test]
fn forms_are_measured_apart_and_turnarounds_kept() {
    use tally_engine::profile::Transformation;
    let script = Script {
        answers: [Ok(Decision::Sliced(2)), Ok(Decision::Run(0)), Ok(Decision::Preemptible)].into(),
        on_event: [Command::SetAutoYield { client: LOW, enabled: true, idle_ns: 1_000 }].into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    let kernel = e.intern(&key("k")).unwrap();
    let offered = forms_offered::SLICED | forms_offered::PREEMPTIBLE;
    for t in 0..2 {
        e.submitted(
            t * 1_000_000,
            LOW,
            Submission { offered, ..submission(t, Some(kernel)) },
            &mut out,
        );
        let (ns, number) = (100_000 * (2 - t), t as u32 + 1);
        e.progress(t * 1_000_000 + ns, LOW, 0, number, took(number, ns), &mut out);
    }
    let profile = |e: &Engine| e.world().profiles.get(kernel).unwrap().clone();
    assert_eq!((profile(&e).count, profile(&e).mean_ns), (1, 100_000));
    assert_eq!(profile(&e).forms[&(Form::Sliced, 2)].mean_ns, 200_000);
    e.submitted(5_000_000, LOW, Submission { offered, ..submission(2, Some(kernel)) }, &mut out);
    e.launch_yielded(5_100_000, LOW, 2, 30_000);
    assert_eq!(e.client_stats(LOW).unwrap().launches_yielded, 0, "nobody asked it to");
    e.client_joined(5_100_000, info(HIGH, Class::High), 0, &mut out);
    e.high_activity(5_200_000, HIGH, true, 5_200_000, &mut out);
    e.launch_yielded(5_230_000, LOW, 7, 1);
    e.launch_yielded(5_230_000, LOW, 2, u64::MAX);
    assert_eq!(profile(&e).turnaround_ns(Form::Preemptible, 0), Some(30_000));
    assert_eq!(e.client_stats(LOW).unwrap().launches_yielded, 1);
    // A verdict stays, and takes the offer away.
    e.set_transformation(kernel, Transformation::WholeOnly("its blocks wait"));
    e.set_transformation(kernel, Transformation::Ready { sliced: true, preemptible: true });
    assert_eq!(profile(&e).transformation, Transformation::WholeOnly("its blocks wait"));
}

#[test]
fn what_one_process_cannot_transform_is_offered_by_another() {
    use tally_engine::profile::Transformation;
    let script = Script::default();
    let seen = script.seen.clone();
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    let kernel = e.intern(&key("k")).unwrap();
    let offered = forms_offered::SLICED | forms_offered::PREEMPTIBLE;
    let mut launch = |e: &mut Engine, t: u64| {
        e.submitted(
            t * 1_000,
            LOW,
            Submission { offered, ..submission(t, Some(kernel)) },
            &mut out,
        );
        e.progress(t * 1_000 + 500, LOW, 0, t as u32 + 1, None, &mut out);
    };
    e.set_transformation(kernel, Transformation::WholeHere("its context is another one"));
    launch(&mut e, 0);
    e.set_transformation(kernel, Transformation::Ready { sliced: true, preemptible: true });
    assert!(matches!(
        e.world().profiles.get(kernel).unwrap().transformation,
        Transformation::Ready { .. }
    ));
    launch(&mut e, 1);
    e.set_transformation(kernel, Transformation::WholeOnly("its blocks waited"));
    e.set_transformation(kernel, Transformation::WholeHere("its context is another one"));
    assert!(matches!(
        e.world().profiles.get(kernel).unwrap().transformation,
        Transformation::WholeOnly(_)
    ));
    launch(&mut e, 2);
    let seen: Vec<_> = seen.lock().unwrap().launches.iter().map(|l| l.offered).collect();
    assert_eq!(seen, [offered, offered, 0]);
}

#[test]
fn asking_for_a_form_that_could_be_made_is_passed_on_and_runs_whole() {
    for wanted in [Decision::Preemptible, Decision::Sliced(2), Decision::SmLimited(8)] {
        let script = Script { answers: [Ok(wanted)].into(), ..Default::default() };
        let mut e = Engine::new(EngineConfig::default(), Box::new(script));
        let mut out = Vec::new();
        e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
        let could = Submission { offered: forms_offered::PREPARABLE, ..submission(0, None) };
        out.clear();
        e.submitted(1, LOW, could, &mut out);
        let [Action::Decide { ticket: 0, decision, .. }] = out[..] else { panic!("{out:?}") };
        assert_eq!(decision, wanted);
        let stats = e.client_stats(LOW).unwrap();
        assert_eq!((stats.degraded, stats.preemptible + stats.sliced + stats.sm_limited), (1, 0));
    }
}

#[test]
fn a_kernel_that_an_earlier_run_found_to_run_whole_only_is_offered_in_no_form() {
    use tally_engine::profile::Kept;
    let seen = std::sync::Arc::new(std::sync::Mutex::new(common::Seen::default()));
    let script = Script {
        answers: [Ok(Decision::Preemptible), Ok(Decision::Sliced(2))].into(),
        seen: seen.clone(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    let kernel = e.intern(&key("k")).unwrap();
    let kept = Kept {
        count: 9,
        mean_ns: 4_000,
        predicted_ns: 5_000,
        whole_only: Some("its blocks wait"),
        ..Kept::default()
    };
    e.restore_profile(kernel, kept);
    let offered = forms_offered::SLICED
        | forms_offered::PREEMPTIBLE
        | forms_offered::PREPARABLE
        | forms_offered::SM_LIMITED;
    for t in 0..2 {
        e.submitted(1, LOW, Submission { offered, ..submission(t, Some(kernel)) }, &mut out);
    }
    for launch in &seen.lock().unwrap().launches {
        assert_eq!(launch.offered, 0);
        assert_eq!(launch.predicted_ns, 5_000);
    }
    assert_eq!(granted(&out, LOW), Some(2));
    assert_eq!(e.client_stats(LOW).unwrap().degraded, 2);
}
