//! What is profiled of kernels while several clients have work on the GPU, in virtual time.

mod common;

use common::{info, key, submission, took};
use tally_engine::policy::*;
use tally_engine::{BuiltInRule, Engine, EngineConfig, WaitsFor};

const MS: u64 = 1_000_000;
const FIRST: ClientId = 1;
const SECOND: ClientId = 2;

/// Two best-effort clients without a window.
fn engine() -> Engine {
    let config = EngineConfig { window_ns: u64::MAX, ..EngineConfig::default() };
    let mut e = Engine::new(config, Box::new(BuiltInRule { idle_ns: 0 }));
    for client in [FIRST, SECOND] {
        e.client_joined(0, info(client, Class::BestEffort), 0, &mut Vec::new());
    }
    e
}

/// Launches of one client, one after the other.
struct Job {
    client: ClientId,
    kernel: u32,
    next: u64,
}

impl Job {
    fn new(e: &mut Engine, client: ClientId, name: &str) -> Self {
        Job { client, kernel: e.intern(&key(name)).unwrap(), next: 0 }
    }

    fn launch(&mut self, e: &mut Engine, now_ns: u64) {
        let launch = submission(self.next, Some(self.kernel));
        e.submitted(now_ns, self.client, launch, &mut Vec::new());
        self.next += 1;
    }

    /// The latest launch ended; its client says how long it took.
    fn ended(&self, e: &mut Engine, now_ns: u64, ns: u64) {
        let word = self.next as u32;
        e.progress(now_ns, self.client, 0, word, took(word, ns), &mut Vec::new());
    }

    fn alone(&mut self, e: &mut Engine, now_ns: &mut u64, ns: u64, launches: u32) {
        for _ in 0..launches {
            self.launch(e, *now_ns);
            *now_ns += ns;
            self.ended(e, *now_ns, ns);
        }
    }
}

/// Both have a launch in flight at all times; each takes `ns`, and the ends alternate.
fn side_by_side(e: &mut Engine, jobs: [&mut Job; 2], now_ns: &mut u64, ns: u64, launches: u32) {
    let [a, b] = jobs;
    a.launch(e, *now_ns);
    for _ in 0..launches {
        *now_ns += ns / 2;
        b.launch(e, *now_ns);
        *now_ns += ns / 2;
        a.ended(e, *now_ns, ns);
        a.launch(e, *now_ns);
        *now_ns += ns / 2;
        b.ended(e, *now_ns, ns);
    }
    *now_ns += ns;
    a.ended(e, *now_ns, ns);
}

#[test]
fn times_taken_beside_another_client_are_not_the_kernels_own() {
    let mut e = engine();
    let [mut a, mut b] = [(FIRST, "a"), (SECOND, "b")].map(|(c, name)| Job::new(&mut e, c, name));
    let mut now_ns = 0;
    a.alone(&mut e, &mut now_ns, 3 * MS, 10);
    side_by_side(&mut e, [&mut a, &mut b], &mut now_ns, 23 * MS, 50);
    let profiles = &e.world().profiles;
    let known = profiles.get(a.kernel).unwrap();
    assert_eq!((known.predicted_ns, known.mean_ns, known.p99_ns()), (3 * MS, 3 * MS, 3 * MS));
    // Of the other one nothing better is known: it takes no longer.
    let bound = profiles.get(b.kernel).unwrap();
    assert!(bound.contended && bound.predicted_ns == 23 * MS, "{bound:?}");
    let counted = e.client_stats(FIRST).unwrap();
    assert_eq!(counted.measured, 61);
    assert_eq!(counted.measured_ns, (30 + 51 * 23) * MS, "what was seen on the device");
    b.alone(&mut e, &mut now_ns, 4 * MS, 1);
    let known = e.world().profiles.get(b.kernel).unwrap();
    assert_eq!((known.contended, known.predicted_ns, known.mean_ns), (false, 4 * MS, 4 * MS));
}

#[test]
fn a_launch_that_begins_when_the_other_has_ended_is_alone() {
    let mut e = engine();
    let [mut a, mut b] = [(FIRST, "a"), (SECOND, "b")].map(|(c, name)| Job::new(&mut e, c, name));
    a.launch(&mut e, 0);
    a.ended(&mut e, 5 * MS, 5 * MS);
    b.launch(&mut e, 5 * MS);
    b.ended(&mut e, 7 * MS, 2 * MS);
    for (job, ns) in [(&a, 5 * MS), (&b, 2 * MS)] {
        let known = e.world().profiles.get(job.kernel).unwrap();
        assert_eq!((known.contended, known.predicted_ns), (false, ns));
    }
    // One that left in the middle was there.
    a.launch(&mut e, 10 * MS);
    b.launch(&mut e, 10 * MS);
    e.client_left(12 * MS, FIRST, &mut Vec::new());
    b.ended(&mut e, 20 * MS, 10 * MS);
    assert_eq!(e.world().profiles.predicted_ns(b.kernel), 2 * MS);
    b.alone(&mut e, &mut (30 * MS), 6 * MS, 9);
    assert_eq!(e.world().profiles.predicted_ns(b.kernel), 6 * MS, "what is left is alone");
}

#[test]
fn measured_and_charged_times_are_told_apart() {
    struct Listener(std::sync::Arc<std::sync::Mutex<Vec<Completion>>>);
    impl Policy for Listener {
        fn subscriptions(&self) -> Subscriptions {
            Subscriptions::COMPLETIONS
        }
        fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
            Ok(Decision::Run(0).into())
        }
        fn on_event(&mut self, _: u64, event: &Event, _: &mut Context) -> Result<(), Fault> {
            if let Event::Completed(done) = event {
                self.0.lock().unwrap().push(*done);
            }
            Ok(())
        }
    }
    let seen = std::sync::Arc::default();
    let policy = Listener(std::sync::Arc::clone(&seen));
    let mut e = Engine::new(EngineConfig::default(), Box::new(policy));
    e.client_joined(0, info(FIRST, Class::BestEffort), 0, &mut Vec::new());
    let mut job = Job::new(&mut e, FIRST, "a");
    job.launch(&mut e, 0);
    job.ended(&mut e, 2 * MS, MS);
    // Seen done late, and nobody timed it: charged what was expected.
    job.launch(&mut e, 2 * MS);
    e.progress(9 * MS, FIRST, 0, 2, None, &mut Vec::new());
    let seen = seen.lock().unwrap();
    let times: Vec<_> = seen.iter().map(|done| (done.measured_ns, done.charged_ns)).collect();
    assert_eq!(times, [(Some(MS), MS), (None, MS)]);
    let counted = e.client_stats(FIRST).unwrap();
    assert_eq!((counted.measured, counted.measured_ns, counted.charged_ns), (1, MS, 2 * MS));
}

#[test]
fn a_client_says_what_it_waits_for() {
    let config = EngineConfig { window_ns: MS, ..EngineConfig::default() };
    let mut e = Engine::new(config, Box::new(BuiltInRule { idle_ns: MS }));
    let mut out = Vec::new();
    e.client_joined(0, info(FIRST, Class::High), 0, &mut out);
    e.client_joined(0, info(SECOND, Class::BestEffort), 0, &mut out);
    let why = |e: &Engine| e.client_state(SECOND).unwrap().waits_for;
    let mut job = Job::new(&mut e, SECOND, "a");
    assert_eq!(why(&e), None);
    e.high_activity(1, FIRST, true, 1, &mut out);
    job.launch(&mut e, 2);
    assert!(
        matches!(why(&e), Some(WaitsFor::HighPriority { until_ns }) if until_ns > 2),
        "{:?}",
        why(&e)
    );
    e.high_activity(10, FIRST, false, 10, &mut out);
    assert_eq!(why(&e), Some(WaitsFor::Policy { until_ns: 10 + MS }));
    e.tick(10 + MS, &mut out);
    assert_eq!(why(&e), None);
    // Of unknown length one at a time.
    job.launch(&mut e, 11 + MS);
    assert_eq!(why(&e), Some(WaitsFor::Window));
}
