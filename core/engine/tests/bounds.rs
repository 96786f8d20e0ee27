//! What one input makes the engine do is bounded, however much a client has made to wait or says has ended.

mod common;

use common::{Script, granted, info, key, submission};
use tally_contract::limits::HOLD_NS_MIN;
use tally_engine::client::YIELDING_IN_FLIGHT_MAX;
use tally_engine::policy::*;
use tally_engine::{Action, Engine, EngineConfig, Submission};

fn engine(script: Script, clients: u32) -> Engine {
    let config = EngineConfig { window_ns: u64::MAX, ..EngineConfig::default() };
    let mut e = Engine::new(config, Box::new(script));
    for id in 1..=clients {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut Vec::new());
    }
    e
}

#[test]
fn launches_that_end_at_once_are_dealt_with_in_parts_and_none_is_lost() {
    let script = Script::default();
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, 1), Vec::new());
    let kernel = e.intern(&key("k"));
    for ticket in 0..3_000 {
        let launch = Submission { started: true, ..submission(ticket, kernel) };
        e.submitted(1_000, 1, launch, &mut out);
    }
    let mut calls = 0;
    loop {
        let before = seen.lock().unwrap().events.len();
        let progress = e.progress_some(4_000_000, 1, 0, 3_000, None, 100, &mut out);
        calls += 1;
        assert_eq!(progress.ended, 100);
        assert_eq!(seen.lock().unwrap().events.len() - before, 100, "and no more are told");
        if progress.is_all {
            break;
        }
    }
    assert_eq!((calls, e.client_stats(1).unwrap().completed), (30, 3_000));
    assert_eq!(e.client_state(1).unwrap().in_flight, 0);
    // They share the time, as if they had been dealt with at once.
    let gpu_ns = e.client_stats(1).unwrap().charged_ns;
    assert!((3_900_000..=3_999_000).contains(&gpu_ns), "{gpu_ns}");
}

#[test]
fn a_policy_over_its_time_is_called_again_in_the_next_pass_and_nothing_is_lost() {
    const CALLS_MAX: usize = 5;
    const LAUNCHES: u64 = 200;
    let script = Script { calls_max: CALLS_MAX, ..Script::default() };
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, 2), Vec::new());
    let kernel = e.intern(&key("k"));
    let calls = || {
        let seen = seen.lock().unwrap();
        seen.launches.len() + seen.events.len()
    };
    let joined = calls();
    let mut passes = 0;
    let mut pass = |e: &mut Engine| {
        e.begin_pass();
        passes += 1;
        assert!(passes < 10 * LAUNCHES, "none is left behind");
    };
    // Decisions: as many as it has time for, the rest when the engine asks for another pass.
    pass(&mut e);
    for ticket in 0..LAUNCHES {
        e.submitted(1_000, 1, submission(ticket, kernel), &mut out);
    }
    while granted(&out, 1) != Some(LAUNCHES) {
        assert_eq!(e.next_deadline_ns(), Some(0));
        let before = calls();
        pass(&mut e);
        e.tick(1_000, &mut out);
        assert!((1..=CALLS_MAX).contains(&(calls() - before)));
    }
    // Ends of launches, which are told in parts.
    let (mut ended, mut is_all) = (0, false);
    while !is_all {
        let before = calls();
        pass(&mut e);
        let told = e.progress_some(4_000_000, 1, 0, LAUNCHES as u32, None, 256, &mut out);
        assert!((1..2 * CALLS_MAX).contains(&(calls() - before)), "{}", calls() - before);
        assert!(e.is_over_time() || told.is_all);
        (ended, is_all) = (ended + told.ended, told.is_all);
    }
    assert_eq!((ended as u64, calls() - joined), (LAUNCHES, 2 * LAUNCHES as usize));
}

#[test]
fn what_waits_is_granted_in_turns() {
    const CLIENTS: u32 = 12;
    const WAITING: u64 = 200;
    let hold = Ok(Decision::Hold(1_000_000));
    let script = Script {
        answers: std::iter::repeat_n(hold, CLIENTS as usize).collect(),
        ..Script::default()
    };
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, CLIENTS), Vec::new());
    for id in 1..=CLIENTS {
        for ticket in 0..WAITING {
            e.submitted(1_000, id, submission(ticket, None), &mut out);
        }
    }
    let decided = || seen.lock().unwrap().launches.len();
    assert_eq!(decided(), CLIENTS as usize, "the first of each, which was held");
    let mut now_ns = 2_000_000;
    let mut ticks = 0;
    loop {
        let before = decided();
        e.tick(now_ns, &mut out);
        ticks += 1;
        now_ns += 1;
        assert!(decided() - before <= 512, "{}", decided() - before);
        if e.next_deadline_ns() != Some(0) {
            break;
        }
        assert!(ticks < 20, "it does not end");
    }
    assert!(ticks >= 4, "{ticks}");
    for id in 1..=CLIENTS {
        assert_eq!(granted(&out, id), Some(WAITING), "client {id}");
    }
    // Those of the first clients did not all come before the others' first.
    let first_512 = &seen.lock().unwrap().launches[CLIENTS as usize..][..512];
    let of_client = |id| first_512.iter().filter(|launch| launch.client == id).count();
    assert!((1..=CLIENTS).all(|id| of_client(id) <= 64));
}

/// Which clients a policy is asked about in so many passes of five calls each. It holds all for long; in the first
/// pass something changes that could make it grant one, or in each.
fn asked_in_passes(clients: u32, passes: u64, changes_in_each: bool) -> Vec<ClientId> {
    let answers = std::iter::repeat_n(Ok(Decision::Hold(1_000_000_000)), 1_000).collect();
    let script = Script { answers, calls_max: 5, ..Script::default() };
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, clients), Vec::new());
    for id in 1..=clients {
        e.begin_pass();
        e.submitted(1_000, id, submission(0, None), &mut out);
    }
    assert_eq!(seen.lock().unwrap().launches.len(), clients as usize);
    for pass in 1..=passes {
        e.begin_pass();
        if changes_in_each || pass == 1 {
            e.set_min_share(10_000 + pass, clients, pass as u32, &mut out);
        }
        e.tick(10_000 + pass, &mut out);
    }
    let seen = seen.lock().unwrap();
    seen.launches[clients as usize..].iter().map(|launch| launch.client).collect()
}

/// As long as a pass may take, or shorter: the first ones can be asked about again before the last have been.
#[test]
fn short_holds_keep_nobody_from_its_turn() {
    const CLIENTS: u32 = 12;
    let answers = std::iter::repeat_n(Ok(Decision::Hold(HOLD_NS_MIN)), 10_000).collect();
    let script = Script { answers, calls_max: 5, ..Script::default() };
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, CLIENTS), Vec::new());
    for id in 1..=CLIENTS {
        e.begin_pass();
        e.submitted(1_000, id, submission(0, None), &mut out);
    }
    for pass in 1..=120 {
        e.begin_pass();
        e.tick(1_000 + pass * 2 * HOLD_NS_MIN, &mut out);
    }
    let launches = &seen.lock().unwrap().launches;
    let times = |id| launches.iter().filter(|launch| launch.client == id).count();
    let times: Vec<usize> = (1..=CLIENTS).map(times).collect();
    assert!(times.iter().all(|times| (30..=70).contains(times)), "{times:?}");
}

#[test]
fn a_round_cut_short_by_a_slow_policy_goes_on_where_it_was() {
    let all: Vec<ClientId> = (1..=12).collect();
    // And then none is asked about again: each has its hold.
    assert_eq!(asked_in_passes(12, 20, false), all);
    // Each has its turn although each pass begins a round.
    let asked = asked_in_passes(12, 60, true);
    assert_eq!(asked[..12], all);
    let times = |id| asked.iter().filter(|asked| **asked == id).count();
    let times: Vec<usize> = all.iter().copied().map(times).collect();
    assert!(times.iter().all(|times| (15..=35).contains(times)), "{times:?}");
}

#[test]
fn so_many_launches_that_can_be_stopped_are_in_flight_and_no_more() {
    let all = YIELDING_IN_FLIGHT_MAX as u64 + 50;
    let script = Script {
        answers: (0..all).map(|_| Ok(Decision::Preemptible)).collect(),
        on_event: [Command::SetAutoYield { client: 1, enabled: true, idle_ns: 1_000 }].into(),
        ..Script::default()
    };
    let (mut e, mut out) = (engine(script, 1), Vec::new());
    let kernel = e.intern(&key("k"));
    for ticket in 0..all {
        let offered = forms_offered::PREEMPTIBLE;
        e.submitted(1_000, 1, Submission { offered, ..submission(ticket, kernel) }, &mut out);
    }
    let forms = out.iter().filter(|action| matches!(action, Action::Decide { .. })).count();
    assert_eq!(forms, YIELDING_IN_FLIGHT_MAX);
    assert_eq!(e.client_stats(1).unwrap().degraded, 50);
    assert_eq!(e.client_state(1).unwrap().in_flight, all, "and none was lost");
    e.client_joined(2_000, info(2, Class::High), 0, &mut out);
    e.high_activity(3_000, 2, true, 3_000, &mut out);
    // What they say of the others is not looked for among them.
    e.launch_yielded(9_000, 1, all - 1, 1_000);
    assert_eq!(e.client_stats(1).unwrap().launches_yielded, 0);
    e.launch_yielded(9_000, 1, 0, 1_000);
    assert_eq!(e.client_stats(1).unwrap().launches_yielded, 1);
    // There is room again for as many as have ended.
    e.progress(9_000, 1, 0, 10, None, &mut out);
    e.launch_yielded(9_000, 1, 0, 1_000);
    assert_eq!(e.client_stats(1).unwrap().launches_yielded, 1, "it is not in flight any more");
}

#[test]
fn the_inputs_of_one_pass_together_offer_no_more_than_one_may() {
    const CLIENTS: u32 = 12;
    const WAITING: u64 = 150;
    let hold = Ok(Decision::Hold(1_000_000));
    let script = Script {
        answers: std::iter::repeat_n(hold, CLIENTS as usize).collect(),
        ..Script::default()
    };
    let seen = script.seen.clone();
    let (mut e, mut out) = (engine(script, CLIENTS), Vec::new());
    for id in 1..=CLIENTS {
        for ticket in 0..WAITING {
            e.submitted(1_000, id, submission(ticket, None), &mut out);
        }
    }
    let decided = || seen.lock().unwrap().launches.len();
    let of_client = |from: usize, id| {
        seen.lock().unwrap().launches[from..].iter().filter(|l| l.client == id).count()
    };
    let (mut now_ns, mut passes) = (2_000_000, 0);
    while e.has_waiting() {
        let before = decided();
        e.begin_pass();
        e.tick(now_ns, &mut out);
        // Each asks for more, twice.
        for ticket in (0..2).map(|n| WAITING + 2 * passes + n).filter(|_| passes < 3) {
            for id in 1..=CLIENTS {
                e.submitted(now_ns, id, submission(ticket, None), &mut out);
            }
        }
        assert!(decided() - before <= 512, "{}", decided() - before);
        assert!((1..=CLIENTS).all(|id| of_client(before, id) <= 64));
        assert!(e.next_deadline_ns() == Some(0) || !e.has_waiting(), "the rest is not forgotten");
        (now_ns, passes) = (now_ns + 1, passes + 1);
        assert!(passes < 20, "it does not end");
    }
    for id in 1..=CLIENTS {
        assert_eq!(granted(&out, id), Some(WAITING + 6), "client {id}");
    }
}

#[test]
fn after_a_stall_all_that_waited_are_answered_by_the_rule_in_some_passes() {
    const WAITING: u64 = 150;
    let hold = || Ok(Decision::Hold(u64::MAX));
    let script = Script {
        answers: std::iter::repeat_with(hold).take(10_000).collect(),
        ..Script::default()
    };
    let (mut e, mut out) = (engine(script, 1), Vec::new());
    e.begin_pass();
    for ticket in 0..WAITING {
        e.submitted(1_000, 1, submission(ticket, None), &mut out);
    }
    let stall_ns = 1_000 + EngineConfig::default().policy_stall_ns;
    let rule = |e: &Engine| e.client_stats(1).unwrap().built_in_rule;
    let mut by_rule = Vec::new();
    for pass in 0..4 {
        let before = rule(&e);
        e.begin_pass();
        e.tick(stall_ns + pass, &mut out);
        by_rule.push(rule(&e) - before);
    }
    // In the first one offer is the policy's, which holds.
    assert_eq!(by_rule.iter().sum::<u64>(), WAITING, "{by_rule:?}");
    assert!(by_rule.iter().all(|n| *n <= 64), "{by_rule:?}");
    assert_eq!(granted(&out, 1), Some(WAITING));
    // What comes later is the policy's again.
    e.begin_pass();
    e.submitted(stall_ns + 9, 1, submission(WAITING, None), &mut out);
    assert_eq!(rule(&e), WAITING);
}
