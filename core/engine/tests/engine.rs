//! The engine against scripted policies: what a client may rely on whatever the
//! policy does. Forms other than whole: `forms.rs`; random policies: `random.rs`.

mod common;

use common::{HIGH, IDLE_GAP, LOW, Script, Seen, built_in, granted, info, key, submission, took};
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::{BuiltInRule, ClientWork, Engine, EngineConfig, Submission, WorkDone};

#[test]
fn best_effort_waits_for_the_end_of_high_priority_work_and_a_little_longer() {
    let mut e = built_in();
    let mut out = Vec::new();
    e.high_activity(1_000, HIGH, true, 1_000, &mut out);
    e.submitted(2_000, LOW, submission(0, None), &mut out);
    assert_eq!(granted(&out, LOW), None);
    e.high_activity(50_000, HIGH, false, 40_000, &mut out);
    assert_eq!(granted(&out, LOW), None, "silence has only begun");
    assert_eq!(e.next_deadline_ns(), Some(40_000 + IDLE_GAP));
    e.tick(40_000 + IDLE_GAP - 1, &mut out);
    assert_eq!(granted(&out, LOW), None);
    e.tick(40_000 + IDLE_GAP, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    let stats = e.client_stats(LOW).unwrap();
    assert_eq!((stats.run, stats.launches_held), (1, 1));
    assert_eq!(stats.waited_ns, 40_000 + IDLE_GAP - 2_000);
}

#[test]
fn a_burst_of_high_priority_work_between_two_looks_restarts_the_silence() {
    let mut e = built_in();
    let mut out = Vec::new();
    e.high_activity(10_000, HIGH, true, 10_000, &mut out);
    e.high_activity(20_000, HIGH, false, 20_000, &mut out);
    e.submitted(30_000, LOW, submission(0, None), &mut out);
    // Seen only after it was over.
    e.high_activity(90_000, HIGH, false, 80_000, &mut out);
    e.tick(20_000 + IDLE_GAP, &mut out);
    assert_eq!(granted(&out, LOW), None);
    e.tick(80_000 + IDLE_GAP, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
}

#[test]
fn a_high_priority_client_that_dies_busy_does_not_hold_others_for_ever() {
    let mut e = built_in();
    let mut out = Vec::new();
    e.high_activity(1_000, HIGH, true, 1_000, &mut out);
    e.submitted(2_000, LOW, submission(0, None), &mut out);
    e.client_left(3_000, HIGH, &mut out);
    e.tick(3_000 + IDLE_GAP, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
}

#[test]
fn the_window_is_measured_in_gpu_time() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    // Learn 400 us.
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(400_000, LOW, 0, 1, took(1, 400_000), &mut out);
    assert_eq!(e.world().profiles.mean_ns(k.unwrap()), 400_000);
    // 1 ms of window: two fit, the third does not.
    out.clear();
    for t in 1..=3 {
        e.submitted(500_000, LOW, submission(t, k), &mut out);
    }
    assert_eq!(granted(&out, LOW), Some(3));
    assert_eq!(e.client_state(LOW).unwrap().in_flight_ns, 800_000);
    assert_eq!(e.client_stats(LOW).unwrap().window_full, 1);
    e.progress(900_000, LOW, 0, 2, None, &mut out);
    assert_eq!(granted(&out, LOW), Some(4));
}

/// A launch that takes twice as long beside others is the same work.
#[test]
fn work_done_counts_a_launch_by_what_it_takes_undisturbed_and_best_effort_only() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(400_000, LOW, 0, 1, took(1, 400_000), &mut out);
    e.submitted(500_000, LOW, submission(1, k), &mut out);
    e.progress(1_300_000, LOW, 0, 2, took(2, 800_000), &mut out);
    assert_eq!(e.work_done(), WorkDone { launches: 2, ns: 800_000 });
    let of_client = ClientWork { client: LOW, weight: 1, work_ns: 800_000, backlog_ns: 1_200_000 };
    assert_eq!(e.best_effort_work(1_400_000).collect::<Vec<_>>(), [of_client]);
    e.submitted(2_000_000, HIGH, submission(0, k), &mut out);
    e.progress(2_400_000, HIGH, 0, 1, None, &mut out);
    e.client_left(3_000_000, LOW, &mut out);
    assert_eq!(e.work_done(), WorkDone { launches: 2, ns: 800_000 });
    assert_eq!(e.best_effort_work(3_000_000).next(), None);
}

/// Two launches wait for 300 us and 200 us; the second's client then leaves. High-priority launches do not count.
#[test]
fn waits_of_best_effort_launches_are_summed_while_they_last() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    e.submitted(0, HIGH, submission(0, k), &mut out);
    assert_eq!(e.waited_ns(90_000), 0);
    e.submitted(100_000, LOW, submission(0, k), &mut out);
    assert_eq!(e.waited_ns(150_000), 50_000);
    e.submitted(200_000, LOW, submission(1, k), &mut out);
    assert_eq!(e.waited_ns(300_000), 300_000);
    assert_eq!(granted(&out, LOW), None, "both are held");
    e.client_left(400_000, LOW, &mut out);
    assert_eq!([400_000, 900_000].map(|now_ns| e.waited_ns(now_ns)), [500_000; 2]);
}

#[test]
fn an_answer_ends_a_wait() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    e.submitted(0, HIGH, submission(0, k), &mut out);
    e.submitted(100_000, LOW, submission(0, k), &mut out);
    e.progress(200_000, HIGH, 0, 1, None, &mut out);
    let due = e.next_deadline_ns().expect("the held launch is offered again");
    e.tick(due, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    assert_eq!([due, due + 5].map(|now_ns| e.waited_ns(now_ns)), [due - 100_000; 2]);
}

#[test]
fn of_launches_of_unknown_length_one_at_a_time_is_granted() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("new"));
    for t in 0..10 {
        e.submitted(1_000, LOW, submission(t, k), &mut out);
    }
    assert_eq!(granted(&out, LOW), Some(1));
    e.progress(101_000, LOW, 0, 1, took(1, 100_000), &mut out);
    assert_eq!(granted(&out, LOW), Some(10), "100 us each: nine fit a window of 1 ms");
}

#[test]
fn late_reports_are_neither_profiled_nor_charged_as_gpu_time() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(20_000, LOW, 0, 1, took(1, 20_000), &mut out);
    // Five launches, then a second of computing before their end is reported.
    for t in 1..6 {
        e.submitted(30_000, LOW, submission(t, k), &mut out);
    }
    e.progress(1_000_000_000, LOW, 0, 6, took(1, 5), &mut out);
    assert_eq!(e.world().profiles.predicted_ns(k.unwrap()), 20_000);
    assert_eq!(e.client_stats(LOW).unwrap().charged_ns, 6 * 20_000);
}

#[test]
fn a_client_whose_words_never_move_is_bounded() {
    let mut e = built_in();
    let mut out = Vec::new();
    let cap = tally_engine::client::IN_FLIGHT_MAX;
    for t in 0..cap + 100 {
        let s = Submission { started: true, ..submission(t, None) };
        e.submitted(t, LOW, s, &mut out);
        out.clear();
    }
    assert_eq!(e.client_state(LOW).unwrap().in_flight, cap);
}

#[test]
fn one_launch_longer_than_the_window_still_runs() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("huge"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(20_000_000, LOW, 0, 1, took(1, 20_000_000), &mut out);
    e.submitted(20_000_001, LOW, submission(1, k), &mut out);
    assert_eq!(granted(&out, LOW), Some(2));
}

#[test]
fn measurements_disturbed_by_high_priority_work_are_not_profiled() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(100_000, LOW, 0, 1, took(1, 100_000), &mut out);
    e.submitted(200_000, LOW, submission(1, k), &mut out);
    e.high_activity(210_000, HIGH, true, 210_000, &mut out);
    e.progress(900_000, LOW, 0, 2, took(2, 700_000), &mut out);
    assert_eq!(e.world().profiles.mean_ns(k.unwrap()), 100_000);
    assert_eq!(e.client_stats(LOW).unwrap().completed, 2);
}

#[test]
fn only_what_a_client_measured_is_profiled_and_no_more_than_can_be_true() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("gemm"));
    let mut run = |t: u64, measured| {
        let at = t * 1_000_000;
        e.submitted(at, LOW, submission(t, k), &mut out);
        e.progress(at + 100_000, LOW, 0, t as u32 + 1, measured, &mut out);
        e.world().profiles.get(k.unwrap()).map(|p| (p.count, p.mean_ns)).unwrap()
    };
    assert_eq!(run(0, None), (0, 0));
    assert_eq!(run(1, took(1, 50_000)), (0, 0), "of a launch before");
    assert_eq!(run(2, took(3, 50_000)), (1, 50_000));
    assert_eq!(run(3, took(4, u64::MAX)), (2, 75_000), "no longer than since it was granted");
}

#[test]
fn among_best_effort_clients_the_least_served_goes_first() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let script = Script { seen: seen.clone(), ..Default::default() };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    for id in [1, 2] {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut out);
    }
    // Client 1 has had 5 ms, client 2 has had 1 ms.
    for (id, done) in [(1, 5_000_000), (2, 6_000_000)] {
        e.submitted(
            done - 1_000_000 * (if id == 1 { 5 } else { 1 }),
            id,
            submission(0, None),
            &mut out,
        );
        e.progress(done, id, 0, 1, None, &mut out);
    }
    // Both are held, then released by one event.
    let script = Script {
        seen: seen.clone(),
        answers: [Decision::Hold(u64::MAX), Decision::Hold(u64::MAX)].map(Ok).into(),
        ..Default::default()
    };
    e.set_policy(7_000_000, Box::new(script), &mut out);
    for id in [1, 2] {
        e.submitted(7_000_001, id, submission(1, None), &mut out);
    }
    seen.lock().unwrap().launches.clear();
    e.client_joined(7_000_002, info(3, Class::BestEffort), 0, &mut out);
    let order: Vec<_> = seen.lock().unwrap().launches.iter().map(|l| l.client).collect();
    assert_eq!(order, [2, 1]);
}

#[test]
fn leases_run_without_asking_until_revoked() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let script = Script {
        answers: [Ok(Decision::Run(10))].into(),
        seen: seen.clone(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.submitted(1, LOW, submission(0, None), &mut out);
    assert_eq!(granted(&out, LOW), Some(11));
    for t in 1..5 {
        e.submitted(2, LOW, Submission { started: true, ..submission(t, None) }, &mut out);
    }
    assert_eq!(seen.lock().unwrap().launches.len(), 1, "leased launches are not decided");
    // Another policy takes over: the lease ends, at the first ticket not started.
    out.clear();
    e.set_policy(3, Box::new(BuiltInRule { idle_ns: 0 }), &mut out);
    assert_eq!(granted(&out, LOW), Some(5));
    assert_eq!(e.client_stats(LOW).unwrap().leased, 4);
    assert_eq!(e.client_state(LOW).unwrap().in_flight, 5);
}

#[test]
fn faults_are_answered_by_the_built_in_rule_and_counted_by_reason() {
    let fault = |kind| Err(Fault { kind, message: "x".into() });
    let script = Script {
        answers: [fault(FaultKind::Trap), fault(FaultKind::Overrun), Ok(Decision::Sliced(0))]
            .into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    for t in 0..3 {
        e.submitted(1, LOW, submission(t, None), &mut out);
        e.progress(2, LOW, 0, t as u32 + 1, None, &mut out);
    }
    assert_eq!(granted(&out, LOW), Some(3), "the client goes on");
    let stats = e.policy_stats();
    assert_eq!(stats.built_in_rule_decisions, 3);
    for kind in [FaultKind::Trap, FaultKind::Overrun, FaultKind::Nonsense] {
        assert_eq!(stats.faults.get(&kind), Some(&1), "{kind:?}");
    }
    assert_eq!(e.client_stats(LOW).unwrap().built_in_rule, 3);
}

#[test]
fn what_a_policy_granted_is_taken_back_when_it_is_disabled() {
    let off = || Err(Fault { kind: FaultKind::Disabled, message: String::new() });
    let script = Script {
        on_event: [Command::SetUngated { client: LOW, ungated: true }].into(),
        answers: [off(), off()].into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    assert_eq!(granted(&out, LOW), Some(u64::MAX));
    e.client_joined(0, info(3, Class::BestEffort), 0, &mut out);
    out.clear();
    e.submitted(1, 3, submission(0, None), &mut out);
    assert_eq!(granted(&out, LOW), Some(0), "its grant is taken back");
    assert_eq!(granted(&out, 3), Some(1), "and the built-in rule serves");
}

/// Grants a lease, and fails for good when it is told of something.
struct FailsForGood {
    is_disabled: bool,
}

impl Policy for FailsForGood {
    fn subscriptions(&self) -> Subscriptions {
        if self.is_disabled { Subscriptions::NONE } else { Subscriptions::MEMBERSHIP }
    }

    fn is_disabled(&self) -> bool {
        self.is_disabled
    }

    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Answer { decision: Decision::Run(1_000), reason: 7 })
    }

    fn on_event(&mut self, _: u64, event: &Event, _: &mut Context) -> Result<(), Fault> {
        let Event::Joined(ClientInfo { class: Class::High, .. }) = event else { return Ok(()) };
        self.is_disabled = true;
        Err(Fault { kind: FaultKind::Trap, message: String::new() })
    }
}

#[test]
fn the_fault_that_disables_a_policy_takes_back_its_leases_whatever_it_is() {
    let policy = FailsForGood { is_disabled: false };
    let mut e = Engine::new(EngineConfig::default(), Box::new(policy));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.submitted(1, LOW, submission(0, None), &mut out);
    assert_eq!(granted(&out, LOW), Some(1_001));
    assert_eq!(e.client_state(LOW).unwrap().reason, 7);
    out.clear();
    e.client_joined(2, info(HIGH, Class::High), 0, &mut out);
    assert_eq!(granted(&out, LOW), Some(1), "nobody has to submit anything for it");
    assert_eq!(e.client_state(LOW).unwrap().reason, 0, "of a table that is no longer asked");
}

#[test]
fn timers_fire_once_and_moving_one_replaces_it() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let script = Script {
        on_event: [
            Command::SetTimer { delay_ns: 100, token: 7 },
            Command::SetTimer { delay_ns: 300, token: 7 },
        ]
        .into(),
        seen: seen.clone(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(1_000, info(LOW, Class::BestEffort), 0, &mut out);
    for now in [1_100, 1_299, 1_300, 5_000] {
        e.tick(now, &mut out);
    }
    let fired = seen.lock().unwrap().events.iter().filter(|e| **e == Event::Timer(7)).count();
    assert_eq!(fired, 1);
}

#[test]
fn high_priority_without_its_grant_is_decided_and_counts_as_activity() {
    let script = Script {
        on_event: [Command::SetUngated { client: HIGH, ungated: false }].into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(HIGH, Class::High), 40, &mut out);
    assert_eq!(granted(&out, HIGH), Some(40), "falls back to the first undecided ticket");
    e.submitted(1, HIGH, submission(40, None), &mut out);
    assert_eq!(granted(&out, HIGH), Some(41));
    assert!(e.high_active());
    e.progress(9, HIGH, 0, 41, None, &mut out);
    assert!(!e.high_active());
}

#[test]
fn a_launch_whose_decision_also_grants_is_counted() {
    let script = Script {
        on_decide: [Command::SetUngated { client: LOW, ungated: true }].into(),
        ..Default::default()
    };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.submitted(1, LOW, submission(0, None), &mut out);
    assert_eq!(granted(&out, LOW), Some(u64::MAX));
    let stats = e.client_stats(LOW).unwrap();
    assert_eq!((stats.submitted, stats.run, stats.leased), (1, 1, 0));
}

#[test]
fn what_waits_under_a_grant_stays_granted_when_it_is_taken_back() {
    const LAUNCHES: u64 = 100;
    let holds = || Script {
        answers: (0..LAUNCHES).map(|_| Ok(Decision::Hold(u64::MAX))).collect(),
        ..Default::default()
    };
    let grants = [
        Script {
            on_event: [Command::SetUngated { client: LOW, ungated: true }].into(),
            ..Default::default()
        },
        Script { answers: [Ok(Decision::Run(LAUNCHES as u32 - 1))].into(), ..Default::default() },
    ];
    for (grant, until) in grants.into_iter().zip([u64::MAX, LAUNCHES]) {
        let config = EngineConfig { window_ns: u64::MAX, ..Default::default() };
        let mut e = Engine::new(config, Box::new(holds()));
        let mut out = Vec::new();
        e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
        for ticket in 0..LAUNCHES {
            e.submitted(1, LOW, submission(ticket, None), &mut out);
        }
        e.begin_pass();
        e.set_policy(2, Box::new(grant), &mut out);
        assert_eq!(granted(&out, LOW), Some(until));
        assert!(e.client_state(LOW).unwrap().waiting > 0, "too much for one pass");
        out.clear();
        e.begin_pass();
        let last = holds();
        let seen = last.seen.clone();
        e.set_policy(3, Box::new(last), &mut out);
        assert!(granted(&out, LOW).is_none_or(|until| until == LAUNCHES));
        let stats = e.client_stats(LOW).unwrap();
        assert_eq!((stats.run, e.client_state(LOW).unwrap().waiting), (LAUNCHES, 0));
        assert!(seen.lock().unwrap().launches.is_empty(), "they are running: nothing to decide");
        e.submitted(4, LOW, submission(LAUNCHES, None), &mut out);
        assert_eq!(seen.lock().unwrap().launches.len(), 1, "the next one is decided");
    }
}

#[test]
fn a_launch_is_not_done_because_those_that_it_overtook_are() {
    const LAUNCHES: u64 = 100;
    let script = Script {
        answers: [Ok(Decision::Hold(u64::MAX)), Ok(Decision::Run(LAUNCHES as u32))].into(),
        ..Default::default()
    };
    let config = EngineConfig { window_ns: u64::MAX, ..Default::default() };
    let mut e = Engine::new(config, Box::new(script));
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    for ticket in 0..LAUNCHES {
        e.submitted(1, LOW, submission(ticket, None), &mut out);
    }
    let numbers = |e: &Engine| {
        let state = e.client_state(LOW).unwrap();
        (e.client_stats(LOW).unwrap().completed, state.in_flight, state.waiting)
    };
    let mut now_ns = 2_000_000_000;
    e.begin_pass();
    e.tick(now_ns, &mut out);
    assert_eq!(granted(&out, LOW), Some(LAUNCHES + 1));
    let (_, first, waiting) = numbers(&e);
    assert!(waiting > 0, "too much for one pass");
    // One more starts under the same grant.
    let last = Submission { started: true, ..submission(LAUNCHES, None) };
    e.submitted(now_ns, LOW, last, &mut out);
    e.progress(now_ns, LOW, 0, first as u32, None, &mut out);
    while numbers(&e).2 > 0 {
        now_ns += 1;
        e.begin_pass();
        e.tick(now_ns, &mut out);
    }
    e.progress(now_ns, LOW, 0, LAUNCHES as u32, None, &mut out);
    let (completed, in_flight, _) = numbers(&e);
    assert!(completed <= LAUNCHES && in_flight >= 1, "{completed} done, the last one runs");
    e.progress(now_ns, LOW, 0, LAUNCHES as u32 + 1, None, &mut out);
    assert_eq!(numbers(&e), (LAUNCHES + 1, 0, 0));
}

#[test]
fn a_hold_lasts_no_longer_than_the_engine_allows() {
    for hold_ns_max in [1_000_000, 60_000_000_000] {
        let config =
            EngineConfig { hold_ns_max, policy_stall_ns: u64::MAX, ..EngineConfig::default() };
        let script = Script { answers: [Ok(Decision::Hold(u64::MAX))].into(), ..Script::default() };
        let mut e = Engine::new(config, Box::new(script));
        let mut out = Vec::new();
        e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
        e.submitted(5, LOW, submission(0, None), &mut out);
        assert_eq!(e.next_deadline_ns(), Some(5 + hold_ns_max));
    }
}
