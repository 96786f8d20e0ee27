//! What a policy is asked and told: subscriptions, clients' usage, reasons, and holds that
//! another client's completion ends.

mod common;

use common::{HIGH, LOW, Script, granted, info, key, submission, took};
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::{Engine, EngineConfig};

const OTHER: ClientId = 3;

fn engine(script: Script) -> (Engine, Vec<tally_engine::Action>) {
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    for (id, class) in [(HIGH, Class::High), (LOW, Class::BestEffort), (OTHER, Class::BestEffort)] {
        e.client_joined(0, info(id, class), 0, &mut out);
    }
    out.clear();
    (e, out)
}

#[test]
fn only_what_was_subscribed_to_is_told() {
    for deaf_to in [
        Subscriptions::ACTIVITY,
        Subscriptions::COMPLETIONS,
        Subscriptions::MEMBERSHIP,
        Subscriptions::TIMER,
        Subscriptions::UNITS,
    ] {
        let seen = Arc::default();
        let timer = Command::SetTimer { delay_ns: 10, token: 4 };
        let script = Script {
            seen: Arc::clone(&seen),
            deaf_to,
            on_event: [timer].into(),
            ..Default::default()
        };
        let (mut e, mut out) = engine(script);
        let kernel = e.intern(&key("k"));
        e.high_activity(1, HIGH, true, 1, &mut out);
        e.high_activity(2, HIGH, false, 2, &mut out);
        e.unit_began(2, HIGH, 2, &mut out);
        e.units_ended(2, HIGH, &[], None, &mut out);
        e.submitted(3, LOW, submission(0, kernel), &mut out);
        e.progress(500_000, LOW, 0, 1, took(1, 400), &mut out);
        e.tick(600_000, &mut out);
        e.client_left(700_000, OTHER, &mut out);
        let seen = seen.lock().unwrap();
        let told = |kind| seen.events.iter().filter(|e| e.kind() == kind).count();
        for (kind, count) in [
            (Subscriptions::ACTIVITY, 2),
            (Subscriptions::COMPLETIONS, 1),
            (Subscriptions::MEMBERSHIP, 4),
            (Subscriptions::TIMER, 1),
            (Subscriptions::UNITS, 2),
        ] {
            assert_eq!(
                told(kind),
                if kind == deaf_to { 0 } else { count },
                "{kind:?} without {deaf_to:?}"
            );
        }
        assert_eq!(e.policy_stats().events, seen.events.len() as u64);
    }
}

#[test]
fn a_completion_says_what_was_measured_and_what_is_charged() {
    let seen = Arc::default();
    let (mut e, mut out) = engine(Script { seen: Arc::clone(&seen), ..Default::default() });
    let kernel = e.intern(&key("k"));
    for (ticket, kernel, measured) in
        [(0, kernel, took(1, 400)), (1, kernel, None), (2, None, took(3, 500))]
    {
        e.submitted(ticket * 1_000_000, LOW, submission(ticket, kernel), &mut out);
        let end_ns = ticket * 1_000_000 + 900;
        e.progress(end_ns, LOW, 0, ticket as u32 + 1, measured, &mut out);
    }
    let seen = seen.lock().unwrap();
    let times: Vec<_> = seen
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Completed(done) => {
                Some((done.kernel, done.predicted_ns, done.measured_ns, done.charged_ns))
            }
            _ => None,
        })
        .collect();
    // The second was not measured: charged as predicted, not for the time until it was seen. The third is of a kernel
    // without a profile: predicted like its client's launches.
    let kernel = kernel.unwrap();
    assert_eq!(
        times,
        [(kernel, 0, Some(400), 400), (kernel, 400, None, 400), (NO_KERNEL, 400, Some(500), 500)]
    );
}

#[test]
fn a_stream_does_no_more_work_than_time_passes() {
    let (mut e, mut out) = engine(Script::default());
    let kernel = e.intern(&key("k"));
    // Its program says 4 s of the first one, and has then ended ten thousand in as many microseconds.
    let mut now_ns = 5_000_000_000;
    e.submitted(0, LOW, submission(0, kernel), &mut out);
    e.progress(now_ns, LOW, 0, 1, took(1, 4_000_000_000), &mut out);
    let before_ns = e.work_done().ns;
    for ticket in 1..10_000 {
        e.submitted(now_ns, LOW, submission(ticket, kernel), &mut out);
        now_ns += 1_000;
        e.progress(now_ns, LOW, 0, ticket as u32 + 1, None, &mut out);
    }
    let done_ns = e.work_done().ns - before_ns;
    assert!(done_ns <= 1_000_000_000 + 10_000_000, "{done_ns}");
}

/// Sets a timer before there is a time.
struct SetsTimer(Arc<Mutex<Vec<u64>>>);

impl Policy for SetsTimer {
    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::TIMER
    }

    fn start(&mut self, context: &mut Context) {
        context.commands.push(Command::SetTimer { delay_ns: 100, token: 1 });
    }

    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Decision::Run(0).into())
    }

    fn on_event(&mut self, now_ns: u64, _: &Event, _: &mut Context) -> Result<(), Fault> {
        self.0.lock().unwrap().push(now_ns);
        Ok(())
    }
}

#[test]
fn a_timer_that_init_sets_runs_from_the_first_call() {
    let fired = Arc::default();
    let mut e = Engine::new(EngineConfig::default(), Box::new(SetsTimer(Arc::clone(&fired))));
    for now_ns in [5_000, 5_099, 5_100] {
        assert_eq!(*fired.lock().unwrap(), []);
        e.tick(now_ns, &mut Vec::new());
    }
    assert_eq!(*fired.lock().unwrap(), [5_100]);
}

/// Holds one client's launches until another's end, and notes what it sees of them.
struct Waits {
    seen: Arc<Mutex<Vec<(ClientId, Usage)>>>,
    wants_usage: bool,
}

impl Policy for Waits {
    fn subscriptions(&self) -> Subscriptions {
        if self.wants_usage { Subscriptions::USAGE } else { Subscriptions::NONE }
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        let other = if launch.client == LOW { OTHER } else { LOW };
        let usage = context.world.clients[&other].usage;
        self.seen.lock().unwrap().push((launch.client, usage));
        Ok(if launch.client == LOW && launch.state & launch_state::OFFERED_AGAIN == 0 {
            Answer { decision: Decision::HoldUntilCompletion(HOLD_UNTIL_CHANGE), reason: 7 }
        } else {
            Decision::Run(0).into()
        })
    }
}

#[test]
fn a_hold_until_completion_ends_with_another_clients_launch_and_not_with_its_own() {
    let seen = Arc::default();
    let policy = Waits { seen: Arc::clone(&seen), wants_usage: true };
    let config = EngineConfig { window_ns: u64::MAX, ..EngineConfig::default() };
    let mut e = Engine::new(config, Box::new(policy));
    let mut out = Vec::new();
    for id in [LOW, OTHER] {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut out);
    }
    e.submitted(1_000, OTHER, submission(0, None), &mut out);
    e.submitted(2_000, LOW, submission(0, None), &mut out);
    assert_eq!((granted(&out, OTHER), granted(&out, LOW)), (Some(1), Some(0)), "held");
    assert_eq!(e.client_state(LOW).unwrap().reason, 7);
    e.progress(9_000, OTHER, 0, 1, took(1, 5_000), &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    assert_eq!(e.client_state(LOW).unwrap().reason, 0);
    // Held again, with a launch of its own in flight: that one's end changes nothing.
    e.submitted(10_000, LOW, submission(1, None), &mut out);
    e.progress(12_000, LOW, 0, 1, None, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    // The time of the hold is over.
    e.tick(10_000 + EngineConfig::default().hold_ns_max, &mut out);
    assert_eq!(granted(&out, LOW), Some(2));
    let seen = seen.lock().unwrap();
    let idle = Usage::default();
    // Time with a launch waiting or on the GPU.
    let busy = Usage { in_flight: 1, backlogged_since_ns: 1_000, ..idle };
    let done = Usage { measured_ns: 5_000, charged_ns: 5_000, backlogged_ns: 8_000, ..idle };
    assert_eq!(seen[..3], [(OTHER, idle), (LOW, busy), (LOW, done)]);
}

#[test]
fn a_client_that_waits_is_seen_to_wait_since_its_oldest_launch() {
    let seen = Arc::default();
    let policy = Waits { seen: Arc::clone(&seen), wants_usage: true };
    let mut e = Engine::new(EngineConfig::default(), Box::new(policy));
    let mut out = Vec::new();
    for id in [LOW, OTHER] {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut out);
    }
    for ticket in 0..3 {
        e.submitted(2_000 + ticket, LOW, submission(ticket, None), &mut out);
    }
    e.submitted(5_000, OTHER, submission(0, None), &mut out);
    let (who, usage) = *seen.lock().unwrap().last().unwrap();
    assert_eq!((who, usage.waiting_since_ns, usage.in_flight), (OTHER, 2_000, 0));
}

#[test]
fn usage_is_not_kept_up_for_who_does_not_read_it() {
    let seen = Arc::default();
    let policy = Waits { seen: Arc::clone(&seen), wants_usage: false };
    let mut e = Engine::with_policy(EngineConfig::default(), policy);
    let mut out = Vec::new();
    for id in [LOW, OTHER] {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut out);
    }
    e.submitted(1, OTHER, submission(0, None), &mut out);
    e.submitted(2, LOW, submission(0, None), &mut out);
    assert!(seen.lock().unwrap().iter().all(|(_, usage)| *usage == Usage::default()));
    assert!(!e.policy().wants_usage, "the engine gives its policy by its own type");
}

#[test]
fn a_policy_that_takes_over_sees_the_usage_from_before_it() {
    let config = EngineConfig { window_ns: u64::MAX, ..EngineConfig::default() };
    let mut e = Engine::with_policy(config, Waits { seen: Arc::default(), wants_usage: false });
    let mut out = Vec::new();
    for id in [LOW, OTHER] {
        e.client_joined(0, info(id, Class::BestEffort), 0, &mut out);
    }
    e.submitted(1_000, OTHER, submission(0, None), &mut out);
    let seen = Arc::default();
    e.set_policy(2_000, Waits { seen: Arc::clone(&seen), wants_usage: true }, &mut out);
    e.submitted(3_000, LOW, submission(0, None), &mut out);
    let busy = Usage { in_flight: 1, backlogged_since_ns: 1_000, ..Usage::default() };
    assert_eq!(*seen.lock().unwrap(), [(LOW, busy)]);
}

/// Holds each launch, and sets the same window whenever it is asked.
struct SetsWindow(Arc<Mutex<u32>>);

impl Policy for SetsWindow {
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        *self.0.lock().unwrap() += 1;
        context.commands.push(Command::SetWindow { client: launch.client, window_ns: 7_000 });
        Ok(Answer { decision: Decision::Hold(1_000_000), reason: 0 })
    }
}

#[test]
fn a_window_that_stays_as_it_is_offers_nothing_again() {
    let asked = Arc::new(Mutex::new(0));
    let policy = Box::new(SetsWindow(Arc::clone(&asked)));
    let mut e = Engine::new(EngineConfig::default(), policy);
    let mut out = Vec::new();
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    e.submitted(1, LOW, submission(0, None), &mut out);
    (2..100).for_each(|now_ns| e.tick(now_ns, &mut out));
    assert_eq!(*asked.lock().unwrap(), 2, "once more with the window that it set");
}
