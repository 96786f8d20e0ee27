//! A log made by the engine under real policies, replayed: every answer is the same.

mod common;

use common::{Driver, Input, Named, guest, host, inputs, options, recorded_into, through_a_file};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};
use tally_decision_log::record::SavedState;
use tally_decision_log::{Fed, Player, Record, Recorded, Recorder, Tap, TapOptions};
use tally_engine::policy::{
    Answer, Context, Decision, Event, Fault, FaultKind, Launch, Policy, Subscriptions,
};
use tally_wasm_host::{Compiled, PolicyHost, Saved, WasmPolicy};

/// Large enough for any stream of these tests.
const RING_BYTES: usize = 4 << 20;

static HOST: LazyLock<PolicyHost> = LazyLock::new(host);

/// Each guest is compiled once.
static COMPILED: Mutex<BTreeMap<PathBuf, Compiled>> = Mutex::new(BTreeMap::new());

fn compiled(folder: &str, name: &str) -> Compiled {
    let file = guest(folder, name);
    let mut all = COMPILED.lock().unwrap();
    all.entry(file).or_insert_with_key(|file| HOST.compile_file(file).unwrap()).clone()
}

fn load(folder: &str, name: &str) -> Box<dyn Policy + Send> {
    Box::new(compiled(folder, name).start("", None).unwrap())
}

/// Answers compared, and whether all were equal.
fn replay(records: &[Record], folder: &'static str, name: &'static str) -> Player<'static> {
    let mut player = Player::new(move |_| Ok(load(folder, name)));
    for record in records {
        player.feed(record, true).unwrap();
    }
    player
}

fn recorded(
    folder: &'static str,
    name: &'static str,
    stream: &[(u64, common::Input)],
) -> Vec<Record> {
    let (recorder, mut reader) = recorded_into(RING_BYTES);
    let mut driver = Driver::new(Named(load(folder, name), name), recorder);
    for (gap, input) in stream {
        driver.feed(*gap, input);
    }
    assert_eq!(reader.dropped(), 0);
    through_a_file(&mut reader)
}

/// A policy that can be asked beside what it decides, as the daemon's can.
struct Both(Arc<Mutex<WasmPolicy>>);

impl Policy for Both {
    fn subscriptions(&self) -> Subscriptions {
        self.0.lock().unwrap().subscriptions()
    }
    fn start(&mut self, context: &mut Context) {
        self.0.lock().unwrap().start(context);
    }
    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        self.0.lock().unwrap().count_fault(now_ns, fault);
    }
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        self.0.lock().unwrap().decide(launch, context)
    }
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.0.lock().unwrap().on_event(now_ns, event, context)
    }
}

fn calls(records: &[Record]) -> u64 {
    let call =
        |r: &&Record| matches!(r, Record::Decide { .. } | Record::Event { .. } | Record::Start(_));
    records.iter().filter(call).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn tally_priority_answers_the_same(stream in inputs()) {
        let records = recorded("policies", "tally-priority", &stream);
        let player = replay(&records, "policies", "tally-priority");
        let c = player.comparison();
        prop_assert!(c.is_equal(), "{:?}", c.first);
        prop_assert_eq!(c.decisions + c.events, calls(&records));
        prop_assert_eq!(player.parts().from_start, 1);
        prop_assert_eq!(player.parts().not_compared, 0);
    }

    #[test]
    fn fifo_answers_the_same(stream in inputs()) {
        let records = recorded("policies", "fifo", &stream);
        let player = replay(&records, "policies", "fifo");
        prop_assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
        prop_assert_eq!(player.comparison().decisions + player.comparison().events, calls(&records));
    }

    /// `chaos` fails by the kernel's number: faults and what follows are replayed, too.
    #[test]
    fn faults_are_the_same(stream in inputs()) {
        let records = recorded("test-policies", "chaos", &stream);
        let player = replay(&records, "test-policies", "chaos");
        prop_assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
        prop_assert_eq!(player.parts().not_compared, 0);
    }

    /// A recording that begins while a policy without memory runs is exact, because the
    /// world is; what `fifo` remembers is nothing.
    #[test]
    fn a_world_described_in_mid_run_is_the_same(stream in inputs(), at in 0usize..100) {
        // What becomes of services is told only if the policy reads it.
        let is_told = |(_, input): &(u64, Input)| !matches!(input, Input::Tokens(..));
        let stream: Vec<_> = stream.into_iter().filter(is_told).collect();
        let recorder = Recorder::default();
        let mut driver = Driver::new(Named(load("policies", "fifo"), "fifo"), recorder.clone());
        let at = at.min(stream.len());
        for (gap, input) in &stream[..at] {
            driver.feed(*gap, input);
        }
        let (tap, mut reader) = Tap::new(1, options(RING_BYTES, false));
        recorder.insert(tap, driver.engine.world(), Default::default(), Subscriptions::NONE);
        driver.pump();
        prop_assert!(reader.is_live());
        for (gap, input) in &stream[at..] {
            driver.feed(*gap, input);
        }
        let records = through_a_file(&mut reader);
        let mut player = replay(&records, "policies", "fifo");
        prop_assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
        prop_assert_eq!(player.parts().mid_run, 1);
        prop_assert_eq!(player.parts().exact_calls, 0, "nothing claims to be exact");
        // The rebuilt world tells what the engine's does.
        driver.pump();
        for record in through_a_file(&mut reader) {
            player.feed(&record, true).unwrap();
        }
        let (ours, theirs) = (player.world(), driver.engine.world());
        prop_assert_eq!(&ours.clients, &theirs.clients);
        prop_assert_eq!(ours.profiles.known(), theirs.profiles.known());
        for (id, profile) in theirs.profiles.iter() {
            let other = ours.profiles.get(id).unwrap();
            prop_assert_eq!((&profile.key, profile.view()), (&other.key, other.view()));
        }
    }

    /// `tally-priority` learns, and says what it knew when the recording began.
    #[test]
    fn a_policy_that_says_what_it_knows_is_replayed_from_mid_run(
        stream in inputs(),
        at in 0usize..100,
    ) {
        // Ids rise, as a core gives them: who is connected is told in their order.
        let mut last = None;
        let rises = |(_, input): &(u64, Input)| match input {
            Input::Join(id, _) => last.replace(last.unwrap_or(0).max(*id)) < Some(*id),
            _ => true,
        };
        let mut stream: Vec<_> = stream.into_iter().filter(rises).collect();
        // A saved debt is believed up to four turns of 20 ms: before the recording no client owes more.
        let at = at.min(stream.len());
        stream[..at].iter_mut().for_each(|(gap, _)| *gap /= 40);
        let recorder = Recorder::default();
        let policy = compiled("policies", "tally-priority").start("", None).unwrap();
        let policy = Arc::new(Mutex::new(policy));
        let boxed = Named(Box::new(Both(policy.clone())), "tally-priority");
        let mut driver = Driver::new(boxed, recorder.clone());
        for (gap, input) in &stream[..at] {
            driver.feed(*gap, input);
        }
        let options = TapOptions { state: true, ..options(RING_BYTES, false) };
        let (tap, mut reader) = Tap::new(1, options);
        recorder.insert(tap, driver.engine.world(), Default::default(), Subscriptions::NONE);
        let mut asked = 0;
        let mut state = || {
            asked += 1;
            let saved = policy.lock().unwrap().snapshot()?.unwrap();
            Some(SavedState { format: saved.format, version: saved.version, data: saved.data })
        };
        while recorder.pump(driver.engine.world_mut(), &mut state) {}
        prop_assert!(reader.is_live());
        for (gap, input) in &stream[at..] {
            driver.feed(*gap, input);
            recorder.pump(driver.engine.world_mut(), &mut state);
        }
        prop_assert_eq!(asked, 1);
        let records = through_a_file(&mut reader);
        let mut player = Player::new(|about| {
            let saved = about.saved.clone().ok_or("the log does not say what it knew")?;
            let SavedState { format, version, data } = saved;
            let saved = Saved { format, version, data };
            let policy = compiled("policies", "tally-priority").start("", Some(&saved)).unwrap();
            Ok(Box::new(policy) as Box<dyn Policy + Send>)
        });
        for record in &records {
            player.feed(record, true).unwrap();
        }
        prop_assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
        prop_assert_eq!(player.comparison().decisions + player.comparison().events, calls(&records));
        prop_assert_eq!((player.parts().from_saved, player.parts().mid_run), (1, 0));
    }

    /// With next to no room records are lost; each is counted, and whatever is compared
    /// after a gap is compared on the right world.
    #[test]
    fn a_gap_is_counted_and_the_world_after_it_is_right(
        stream in inputs(),
        drained_every in 5usize..60,
    ) {
        let (recorder, mut reader) = recorded_into(4 << 10);
        let policy = Named(load("policies", "fifo"), "fifo");
        let mut driver = Driver::new(policy, recorder);
        let mut records = Vec::new();
        let mut made = 1;
        for (i, (gap, input)) in stream.iter().enumerate() {
            driver.feed(*gap, input);
            if i.is_multiple_of(drained_every) {
                records.extend(through_a_file(&mut reader));
                driver.pump();
            }
        }
        // What is left, and the world once more if something was lost at the end.
        for _ in 0..100 {
            records.extend(through_a_file(&mut reader));
            driver.pump();
        }
        records.extend(through_a_file(&mut reader));
        prop_assert!(reader.is_live() && !reader.is_too_small());
        let player = replay(&records, "policies", "fifo");
        prop_assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
        prop_assert_eq!(player.parts().lost, reader.dropped());
        let stats = driver.engine.policy_stats();
        made += stats.decides + stats.events;
        let logged = calls(&records);
        prop_assert!(logged <= made);
        prop_assert!(made - logged <= reader.dropped(), "{made} made, {logged} logged");
        for (id, profile) in driver.engine.world().profiles.iter() {
            prop_assert_eq!(profile.view(), player.world().profiles.get(id).unwrap().view());
        }
    }
}

/// A stream in which the two policies must part: best effort beside busy high priority.
fn contended() -> Vec<(u64, common::Input)> {
    use common::Input::*;
    let mut stream = vec![(0, Join(0, true)), (0, Join(1, false))];
    for i in 0..40 {
        stream.push((50_000, Activity(0, i % 4 != 3)));
        stream.push((1_000, Submit(1, 7, 0, 0b1111)));
        stream.push((400_000, Tick));
        stream.push((2_000_000, End(1, 1)));
    }
    stream
}

#[test]
fn another_policy_parts_and_where_is_told() {
    let records = recorded("policies", "tally-priority", &contended());
    let player = replay(&records, "policies", "fifo");
    let c = player.comparison();
    assert!(!c.is_equal() && c.decisions > 20 && c.equal < c.decisions, "{c:?}");
    assert!(c.matrix[1][0] > 0, "held by one and run by the other: {:?}", c.matrix);
    assert_eq!(c.matrix.iter().flatten().sum::<u64>(), c.decisions);
    let first = c.first.iter().find(|p| p.call.starts_with("launch of")).unwrap();
    assert!(first.call.contains("k7") && first.recorded.contains("hold"), "{first:?}");
    assert!(first.other.contains("run"), "{first:?}");
    assert_eq!(c.top_clients(5)[0].0, 1);
    assert_eq!(c.top_kernels(5)[0].1.parted, c.decisions - c.equal);
    assert!(c.before_first_parting < c.decisions && c.parted_after_hold > 0);
}

#[test]
fn a_new_policy_begins_a_part_of_its_own() {
    let (recorder, mut reader) = recorded_into(RING_BYTES);
    let mut driver = Driver::new(Named(load("policies", "fifo"), "fifo"), recorder);
    let stream = contended();
    for (gap, input) in &stream[..60] {
        driver.feed(*gap, input);
    }
    driver.set_policy(Named(load("policies", "tally-priority"), "tally-priority"));
    for (gap, input) in &stream[60..] {
        driver.feed(*gap, input);
    }
    let records = through_a_file(&mut reader);
    let mut generations = Vec::new();
    let mut player = Player::new(|about| {
        generations.push((about.generation, about.name.clone()));
        Ok(load("policies", &about.name))
    });
    for record in &records {
        player.feed(record, true).unwrap();
    }
    assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
    assert_eq!(player.parts().from_start, 2);
    drop(player);
    assert_eq!(generations, [(1, "fifo".into()), (2, "tally-priority".to_owned())]);
}

#[test]
fn skipped_decisions_are_counted_and_events_are_given() {
    let records = recorded("policies", "tally-priority", &contended());
    let mut player = Player::new(|_| Ok(load("policies", "tally-priority")));
    for record in &records {
        let fed = player.feed(record, false).unwrap();
        let decision = matches!(record, Record::Decide { .. });
        assert_eq!(fed == Fed::Skipped, decision);
    }
    let decisions = records.iter().filter(|r| matches!(r, Record::Decide { .. })).count() as u64;
    assert_eq!(player.parts().skipped, decisions);
    assert_eq!(player.comparison().decisions, 0);
    assert!(player.comparison().events >= 3, "a start and two clients");
}

#[test]
fn a_policy_that_is_missing_is_an_error_and_one_that_traps_is_disabled() {
    let stream: Vec<_> = contended()
        .into_iter()
        .map(|(gap, input)| match input {
            // Kernel 1 is `unreachable` for `chaos`.
            common::Input::Submit(c, _, s, f) => (gap, common::Input::Submit(c, 1, s, f)),
            other => (gap, other),
        })
        .chain([(1, common::Input::Transform(0, 1))])
        .collect();
    // Kernel ids are by first launch: make number 0 something else.
    let stream: Vec<_> = [(0, common::Input::Transform(0, 1))].into_iter().chain(stream).collect();
    let records = recorded("policies", "fifo", &stream);
    let player = replay(&records, "test-policies", "chaos");
    let why = player.disabled().expect("three traps");
    assert!(why.contains("trap"), "{why}");
    assert_eq!(player.comparison().faults["trap"], 3);
    assert!(player.comparison().matrix[0][5] > 3, "{:?}", player.comparison().matrix);
    let mut missing = Player::new(|_| Err("no such file".into()));
    let error = records.iter().find_map(|r| missing.feed(r, true).err()).unwrap();
    assert!(error.to_string().contains("no such file"));
    assert!(guest("policies", "fifo").is_file());
}

/// The policies are `Send`: shadows live on threads of their own.
#[test]
fn a_player_can_move_to_another_thread() {
    fn is_send<T: Send>(_: &T) {}
    is_send(&Player::new(|_| Err::<Box<dyn Policy + Send>, _>(String::new())));
}

/// Counts how often the engine found fault with it.
struct Faulty(Arc<AtomicU32>);

impl Policy for Faulty {
    fn count_fault(&mut self, _: u64, _: &Fault) {
        self.0.fetch_add(1, Relaxed);
    }
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Decision::Run(0).into())
    }
}

#[test]
fn faults_reach_the_policy_and_its_replay_but_no_other() {
    let (recorder, mut reader) = recorded_into(RING_BYTES);
    let faults = Arc::new(AtomicU32::new(0));
    let named = Named(Box::new(Faulty(faults.clone())), "faulty");
    let mut recorder = Recorded::new(named, 1, recorder);
    recorder.start(&mut Context::default());
    let fault = Fault { kind: FaultKind::Stall, message: "held everything".into() };
    recorder.count_fault(5, &fault);
    assert_eq!(faults.load(Relaxed), 1);
    let records = through_a_file(&mut reader);
    assert!(matches!(records.last(), Some(Record::Fault { now_ns: 5, .. })));
    for (another, expected) in [(false, 1), (true, 0)] {
        let faults = Arc::new(AtomicU32::new(0));
        let seen = faults.clone();
        let mut player = Player::new(move |_| Ok(Box::new(Faulty(seen.clone()))));
        if another {
            player = player.of_another();
        }
        for record in &records {
            player.feed(record, true).unwrap();
        }
        assert_eq!(faults.load(Relaxed), expected);
    }
}
