//! Programs that launch as they may, on a GPU that runs kernels in the order in which they came.

mod beside;
mod restored;
mod unending;

use super::*;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tally_sdk::PriorityClass::BestEffort;
use tally_sdk::testing::{client, client_state, launch, set_clients};
use tally_sdk::{LaunchState, NEVER};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const TURN: u64 = 20 * MS;

/// One that always has launches ready, or waits for each and launches again after a pause.
#[derive(Clone, Copy, Debug)]
struct Program {
    weight: u32,
    kernel_ns: u64,
    pause_ns: Option<u64>,
    /// It does nothing before, and nothing after.
    works_ns: (u64, u64),
}

fn ahead(weight: u32, kernel_ns: u64) -> Program {
    Program { weight, kernel_ns, pause_ns: None, works_ns: (0, u64::MAX) }
}

fn one_by_one(weight: u32, kernel_ns: u64, pause_ns: u64) -> Program {
    Program { pause_ns: Some(pause_ns), ..ahead(weight, kernel_ns) }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct State {
    waiting_since_ns: Option<u64>,
    in_flight: u32,
    charged_ns: u64,
    holds_until_completion: bool,
    /// Of the next question; earlier ones are outdated.
    question: u64,
    longest_wait_ns: u64,
    leased: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Done(usize),
    Ask(usize, u64),
}

#[derive(Clone)]
struct Bench {
    rounds: Rounds,
    programs: Vec<Program>,
    states: Vec<State>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    gpu_free_ns: u64,
    now_ns: u64,
    changes: u32,
    last: usize,
    /// High-priority work is active all the time, beside the programs.
    beside_high: bool,
    /// The policy keeps all launches of this one back, before anybody is asked here.
    kept_back: Option<usize>,
    /// Leases are given, and launches that were asked about.
    leases: bool,
    asked: u32,
}

impl Bench {
    fn new(mut rounds: Rounds, programs: &[Program]) -> Self {
        for (id, program) in programs.iter().enumerate() {
            let client = Client { weight: program.weight, ..client(id as u32, BestEffort) };
            rounds.joined(&client);
        }
        let mut bench = Bench {
            rounds,
            programs: programs.into(),
            states: vec![State::default(); programs.len()],
            events: BinaryHeap::new(),
            gpu_free_ns: 0,
            now_ns: 0,
            changes: 0,
            last: 0,
            beside_high: false,
            kept_back: None,
            leases: false,
            asked: 0,
        };
        for (at, program) in programs.iter().enumerate() {
            bench.ask(at, program.works_ns.0);
        }
        bench
    }

    fn ask(&mut self, at: usize, ns: u64) {
        self.states[at].question += 1;
        self.events.push(Reverse((ns, Event::Ask(at, self.states[at].question))));
    }

    fn run_until(&mut self, end_ns: u64) {
        while let Some(&Reverse((ns, event))) = self.events.peek()
            && ns < end_ns
        {
            self.events.pop();
            self.now_ns = ns;
            match event {
                Event::Done(at) => self.done(at),
                Event::Ask(at, question) if question == self.states[at].question => self.decide(at),
                Event::Ask(..) => {}
            }
        }
        self.now_ns = end_ns;
    }

    fn in_flight_ns(&self, at: usize) -> u64 {
        u64::from(self.states[at].in_flight) * self.programs[at].kernel_ns
    }

    fn decide(&mut self, at: usize) {
        let (program, now_ns) = (self.programs[at], self.now_ns);
        if now_ns >= program.works_ns.1 {
            self.states[at].waiting_since_ns = None;
            return;
        }
        let since_ns = *self.states[at].waiting_since_ns.get_or_insert(now_ns);
        let fits = self.in_flight_ns(at) + program.kernel_ns <= self.rounds.window_ns();
        if self.states[at].in_flight > 0 && !fits {
            return;
        }
        if self.kept_back == Some(at) {
            self.rounds.keep_back(at as u32);
            return self.ask(at, now_ns + MS);
        }
        let state = |(id, state): (usize, &State)| ClientState {
            waiting_since_ns: state.waiting_since_ns.unwrap_or(NEVER),
            in_flight: state.in_flight,
            in_flight_ns: self.in_flight_ns(id),
            charged_ns: state.charged_ns,
            ..client_state(id as u32, BestEffort)
        };
        set_clients(self.states.iter().enumerate().map(state).collect());
        let (client, predicted_ns) = (at as u32, program.kernel_ns);
        let mut asked = Launch { client, now_ns, predicted_ns, ..launch() };
        if self.beside_high {
            (asked.high_idle_ns, asked.state) = (0, LaunchState::HIGH_ACTIVE);
        }
        let decision = match self.states[at].leased.checked_sub(1) {
            Some(left) => {
                self.states[at].leased = left;
                None
            }
            None => {
                self.asked += 1;
                let hold = self.rounds.hold(&asked);
                if self.leases && hold.is_none() {
                    self.states[at].leased = self.rounds.lease(&asked);
                }
                hold
            }
        };
        let state = &mut self.states[at];
        state.longest_wait_ns = state.longest_wait_ns.max(now_ns - since_ns);
        state.holds_until_completion = matches!(decision, Some(Decision::HoldUntilCompletion(_)));
        match decision {
            Some(Decision::Hold(ns) | Decision::HoldUntilCompletion(ns)) => {
                self.ask(at, now_ns + ns)
            }
            _ => {
                (state.waiting_since_ns, state.in_flight) = (None, state.in_flight + 1);
                self.gpu_free_ns = self.gpu_free_ns.max(now_ns) + program.kernel_ns;
                self.events.push(Reverse((self.gpu_free_ns, Event::Done(at))));
                self.changes += u32::from(self.last != at);
                (self.last, self.states[at].question) = (at, self.states[at].question + 1);
                if program.pause_ns.is_none() {
                    self.ask(at, now_ns + 3 * US);
                }
            }
        }
    }

    fn done(&mut self, at: usize) {
        self.states[at].in_flight -= 1;
        self.states[at].charged_ns += self.programs[at].kernel_ns;
        let now_ns = self.now_ns;
        for other in 0..self.programs.len() {
            let waits_for_room = other == at && self.states[at].waiting_since_ns.is_some();
            if waits_for_room || (other != at && self.states[other].holds_until_completion) {
                self.ask(other, now_ns);
            }
        }
        if let Some(pause_ns) = self.programs[at].pause_ns {
            self.ask(at, now_ns + pause_ns);
        }
    }

    fn charged_ns(&self) -> Vec<u64> {
        self.states.iter().map(|state| state.charged_ns).collect()
    }

    /// Share of the time in which the GPU was busy.
    fn busy(&self) -> f64 {
        self.charged_ns().iter().sum::<u64>() as f64 / self.now_ns as f64
    }
}

fn after(rounds: Rounds, programs: &[Program], ns: u64) -> Bench {
    let mut bench = Bench::new(rounds, programs);
    bench.run_until(ns);
    bench
}

fn both() -> [Rounds; 2] {
    [Rounds::side_by_side(TURN), Rounds::one_at_a_time(TURN)]
}

#[track_caller]
fn ratio_is(bench: &Bench, expected: f64, within: f64) {
    let charged = bench.charged_ns();
    let ratio = charged[0] as f64 / charged[1] as f64;
    assert!((ratio / expected - 1.0).abs() < within, "{ratio} and not {expected}: {charged:?}");
}

#[test]
fn time_goes_by_weight_whatever_the_kernels_take() {
    for (first, second) in [(200 * US, 200 * US), (20 * US, 2 * MS), (2 * MS, 20 * US)] {
        for weight in [1, 3, 10] {
            for rounds in both() {
                let bench = after(rounds, &[ahead(weight, first), ahead(1, second)], 2 * SECOND);
                ratio_is(&bench, f64::from(weight), 0.06);
                assert!(bench.busy() > 0.98, "{}", bench.busy());
            }
        }
    }
}

#[test]
fn three_share_by_weight() {
    for rounds in both() {
        let programs = [ahead(4, 300 * US), ahead(2, 100 * US), ahead(2, 900 * US)];
        let charged = after(rounds, &programs, 2 * SECOND).charged_ns();
        for (ns, share) in charged.iter().zip([0.5, 0.25, 0.25]) {
            let found = *ns as f64 / charged.iter().sum::<u64>() as f64;
            assert!((found / share - 1.0).abs() < 0.08, "{charged:?}");
        }
    }
}

#[test]
fn one_launches_at_a_time_where_contexts_take_turns() {
    let rounds = Rounds::one_at_a_time(TURN);
    let bench = after(rounds, &[ahead(1, 200 * US), ahead(1, 200 * US)], SECOND);
    assert!((40..=55).contains(&bench.changes), "{} changes in a second", bench.changes);
    // Turns are longer by weight, and a change costs as much: there are no more of them.
    let rounds = Rounds::one_at_a_time(TURN);
    let bench = after(rounds, &[ahead(3, 200 * US), ahead(1, 200 * US)], SECOND);
    assert!((40..=55).contains(&bench.changes), "{} changes in a second", bench.changes);
}

#[test]
fn who_alone_has_work_is_never_held() {
    for mut rounds in both() {
        for (id, weight) in [(1, 1), (2, 1_000), (3, 5)] {
            rounds.joined(&Client { weight, ..client(id, BestEffort) });
        }
        let mut charged_ns = 0;
        for n in 1..10_000 {
            let mine =
                ClientState { charged_ns, waiting_since_ns: n, ..client_state(1, BestEffort) };
            let others = [2, 3].map(|id| client_state(id, BestEffort));
            set_clients([mine].into_iter().chain(others).collect());
            let asked = Launch { now_ns: n * MS, client: 1, predicted_ns: MS, ..launch() };
            assert_eq!(rounds.hold(&asked), None, "launch {n}");
            charged_ns += MS;
        }
    }
}

#[test]
fn one_alone_is_not_looked_at() {
    let mut rounds = Rounds::one_at_a_time(TURN);
    rounds.joined(&client(1, BestEffort));
    assert!(!rounds.is_shared());
    assert_eq!(rounds.hold(&launch()), None);
    assert_eq!(rounds.seen_ns, 0);
    rounds.joined(&client(2, BestEffort));
    assert!(rounds.is_shared());
    rounds.left(1);
    assert!(!rounds.is_shared());
    assert!(!Rounds::side_by_side(0).is_shared());
}

/// Of two clients that share, the first having used so much.
fn hold_first(
    rounds: &mut Rounds,
    used_ns: u64,
    now_ns: u64,
    predicted_ns: u64,
) -> Option<Decision> {
    let first = ClientState { charged_ns: used_ns, ..client_state(0, BestEffort) };
    let second = ClientState { waiting_since_ns: 1, ..client_state(1, BestEffort) };
    set_clients(vec![first, second]);
    rounds.hold(&Launch { client: 0, now_ns, predicted_ns, high_idle_ns: SECOND, ..launch() })
}

#[test]
fn who_has_credit_launches_without_another_look_for_a_moment() {
    let begun = || {
        let mut rounds = Rounds::one_at_a_time(TURN);
        (0..2).for_each(|id| rounds.joined(&client(id, BestEffort)));
        assert_eq!(hold_first(&mut rounds, 0, SECOND, 0), None);
        rounds.drain_ns = 0;
        rounds
    };
    let later_ns = |looks: u64| SECOND + looks * LOOK_NS;
    let mut rounds = begun();
    assert_eq!(hold_first(&mut rounds, SECOND, later_ns(1), 0), None);
    assert_eq!(rounds.seen_ns, SECOND);
    assert!(hold_first(&mut rounds, SECOND, later_ns(2), 0).is_some(), "its credit is used up");

    // What was started since counts as predicted.
    let mut rounds = begun();
    assert_eq!(hold_first(&mut rounds, 0, later_ns(1), TURN / 2), None);
    assert_eq!((rounds.seen_ns, rounds.ahead_ns), (SECOND, TURN / 2));
    assert_eq!(hold_first(&mut rounds, TURN / 2, later_ns(1), TURN), None);
    assert_eq!((rounds.seen_ns, rounds.ahead_ns), (later_ns(1), 0));

    // Who has not the turn is looked at.
    let mut rounds = begun();
    rounds.owner = Some(1);
    hold_first(&mut rounds, 0, later_ns(1), 0);
    assert_eq!(rounds.seen_ns, later_ns(1));
}

#[test]
fn among_many_a_launch_is_held_for_longer() {
    let held_ns = |clients: u32| {
        let mut rounds = Rounds::one_at_a_time(TURN);
        (0..clients).for_each(|id| rounds.joined(&client(id, BestEffort)));
        let waits = |id| ClientState { waiting_since_ns: 1, ..client_state(id, BestEffort) };
        set_clients((0..clients).map(waits).collect());
        assert_eq!(rounds.hold(&Launch { client: 0, now_ns: SECOND, ..launch() }), None);
        match rounds.hold(&Launch { client: 1, now_ns: SECOND, ..launch() }) {
            Some(Decision::Hold(ns)) => ns,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((held_ns(2), held_ns(16)), (MOMENT_NS, MOMENT_NS));
    assert_eq!(held_ns(64), 4 * MOMENT_NS);
}

#[test]
fn who_was_idle_or_joins_gets_its_share_from_then_on_and_no_more() {
    for rounds in both() {
        let late = Program { works_ns: (SECOND, u64::MAX), ..ahead(1, 200 * US) };
        let mut bench = after(rounds, &[late, ahead(1, 200 * US)], 1_300 * MS);
        let charged = bench.charged_ns();
        let (late_ns, since_ns) = (charged[0], 300 * MS);
        assert!(late_ns.abs_diff(since_ns / 2) <= 2 * TURN, "{late_ns} of {since_ns}");
        // One that leaves takes nothing with it, and one that joins owes nothing and is owed nothing.
        bench.rounds.left(0);
        bench.rounds.joined(&client(0, BestEffort));
        bench.run_until(1_600 * MS);
        let late_ns = bench.charged_ns()[0] - late_ns;
        assert!(late_ns.abs_diff(since_ns / 2) <= 2 * TURN, "{late_ns} of {since_ns}");
    }
}

#[test]
fn who_idles_leaves_all_time_to_the_other() {
    for rounds in both() {
        let early = Program { works_ns: (0, 500 * MS), ..ahead(5, 200 * US) };
        let mut bench = after(rounds, &[early, ahead(1, 200 * US)], 510 * MS);
        let before_ns = bench.charged_ns()[1];
        bench.run_until(1_510 * MS);
        let more_ns = bench.charged_ns()[1] - before_ns;
        assert!(more_ns > 990 * MS, "{more_ns} of a second");
    }
}

#[test]
fn a_program_that_waits_for_each_launch_gets_its_share_and_the_gpu_idles_little() {
    for rounds in both() {
        let programs = [one_by_one(3, MS, 10 * US), one_by_one(1, MS, 10 * US)];
        let bench = after(rounds, &programs, 2 * SECOND);
        ratio_is(&bench, 3.0, 0.1);
        assert!(bench.busy() > 0.97, "{}", bench.busy());
    }
}

#[test]
fn a_program_that_cannot_use_its_share_holds_nobody_back_for_long() {
    // Two thirds of its time it does something else.
    let programs = [one_by_one(9, 100 * US, 200 * US), ahead(1, 50 * US)];
    let bench = after(Rounds::side_by_side(TURN), &programs, 2 * SECOND);
    assert!(bench.busy() > 0.96, "{}", bench.busy());
    // Where contexts take turns, changing for each of its pauses would cost more.
    let bench = after(Rounds::one_at_a_time(TURN), &programs, 2 * SECOND);
    let (turn, other) = (2.0 * TURN as f64 * 0.9, 2.0 * TURN as f64 * 0.1);
    let least = other / (turn * WALL as f64 + other);
    assert!(bench.charged_ns()[1] as f64 > 0.9 * least * 2e9, "{:?}", bench.charged_ns());
}

#[test]
fn the_lightest_waits_no_longer_than_a_round() {
    for rounds in both() {
        let bench = after(rounds, &[ahead(1_000, 200 * US), ahead(1, 200 * US)], 10 * SECOND);
        let wait_ns = bench.states[1].longest_wait_ns;
        assert!(wait_ns < 1_100 * MS, "{wait_ns}");
        ratio_is(&bench, 1_000.0, 0.35);
    }
}

#[test]
fn a_launch_that_takes_many_turns_is_paid_for() {
    for rounds in both() {
        // Side by side the round ends while such a launch runs, and a part of the debt with it.
        let within = if rounds.one_at_a_time { 0.06 } else { 0.3 };
        let bench = after(rounds, &[ahead(1, 100 * MS), ahead(1, 200 * US)], 4 * SECOND);
        ratio_is(&bench, 1.0, within);
    }
}

#[test]
fn time_of_high_priority_work_is_no_part_of_a_turn() {
    let mut rounds = Rounds::one_at_a_time(TURN);
    rounds.joined(&client(1, BestEffort));
    rounds.joined(&client(2, BestEffort));
    let waits = |id| ClientState { waiting_since_ns: 0, ..client_state(id, BestEffort) };
    set_clients(vec![waits(1), waits(2)]);
    let by = |client, now_ns, high_idle_ns| Launch { client, now_ns, high_idle_ns, ..launch() };
    assert_eq!(rounds.hold(&by(1, MS, u64::MAX)), None);
    assert!(rounds.hold(&by(2, 2 * MS, u64::MAX)).is_some());
    // High priority was busy for a second.
    assert!(rounds.hold(&by(2, 1_002 * MS, US)).is_some());
    assert_eq!(rounds.hold(&by(1, 1_003 * MS, MS)), None);
}

/// Its kernel waits for a word that the other program will write.
#[test]
fn in_turns_the_neighbour_of_one_that_idles_gets_its_share_of_the_time() {
    for (weight, kernel_ns) in [(1, 10 * US), (1, 100 * US), (10, 10 * US), (10, 100 * US)] {
        let programs = [one_by_one(weight, kernel_ns, 450 * US), ahead(1, 200 * US)];
        let bench = after(Rounds::one_at_a_time(TURN), &programs, 20 * SECOND);
        let part = bench.charged_ns()[1] as f64 / (20 * SECOND) as f64;
        let fair = 1.0 / f64::from(weight + 1);
        assert!((0.8 * fair..1.1 * fair).contains(&part), "{weight} {kernel_ns}: {part}");
    }
}

#[test]
fn who_has_a_launch_that_does_not_end_holds_nobody_back_for_ever() {
    for mut rounds in both() {
        (0..2).for_each(|id| rounds.joined(&client(id, BestEffort)));
        let stuck = ClientState {
            in_flight: 1,
            waiting_since_ns: 1,
            in_flight_ns: US,
            ..client_state(0, BestEffort)
        };
        let mut asks_until_runs = |from_ns: u64, charged_ns| {
            let other = ClientState {
                waiting_since_ns: from_ns,
                charged_ns,
                ..client_state(1, BestEffort)
            };
            set_clients(vec![stuck, other]);
            let at = |now_ns| Launch { client: 1, now_ns, high_idle_ns: NEVER, ..launch() };
            let held = (0..1_000).take_while(|n| rounds.hold(&at(from_ns + n * MS)).is_some());
            from_ns + held.count() as u64 * MS
        };
        let mut now_ns = MS;
        for n in 0..20 {
            let ran_ns = asks_until_runs(now_ns, n * 10 * MS);
            assert!(ran_ns < now_ns + 15 * TURN, "{n}: {} ms", (ran_ns - now_ns) / MS);
            now_ns = ran_ns + 10 * MS;
        }
    }
}

#[test]
fn a_debt_of_hours_is_no_loop() {
    let mut rounds = Rounds::side_by_side(TURN);
    (0..MEMBERS_MAX as u32).for_each(|id| rounds.joined(&client(id, BestEffort)));
    let state =
        |id, charged_ns| ClientState { charged_ns, in_flight: 1, ..client_state(id, BestEffort) };
    for charged_ns in [0, u64::MAX / 4, u64::MAX] {
        let all = (0..MEMBERS_MAX as u32).map(|id| state(id, charged_ns / u64::from(id % 7 + 1)));
        set_clients(all.collect());
        for client in 0..MEMBERS_MAX as u32 {
            let _ = rounds.hold(&Launch { client, now_ns: charged_ns, ..launch() });
        }
    }
    let debts = rounds.members.iter().map(|member| member.credit_ns);
    assert!(debts.min().unwrap() < -(TURN as i64), "{:?}", rounds.members);
}

#[test]
fn memory_is_bounded_and_who_is_beyond_is_not_held() {
    let mut rounds = Rounds::side_by_side(TURN);
    (0..1_000).for_each(|id| rounds.joined(&client(id, BestEffort)));
    assert_eq!(rounds.members.len(), MEMBERS_MAX);
    assert_eq!(rounds.hold(&Launch { client: 999, now_ns: IDLE_NS - 1, ..launch() }), None);
    (0..900).for_each(|id| rounds.left(id));
    let ids: Vec<ClientId> = rounds.members.iter().map(|member| member.id).collect();
    assert_eq!(ids, (900..964).collect::<Vec<_>>(), "others move up");
    (900..1_000).for_each(|id| rounds.left(id));
    assert!(rounds.members.is_empty());
}

fn program() -> impl Strategy<Value = Program> {
    let pause = prop::option::of(0..2 * MS);
    let works = (0..SECOND / 2, 0..SECOND);
    (1..=1_000_u32, US..20 * MS, pause, works).prop_map(|(weight, kernel_ns, pause_ns, works)| {
        Program { weight, kernel_ns, pause_ns, works_ns: (works.0, works.0 + works.1) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whoever waits gets its turn, whatever the others do.
    #[test]
    fn nobody_waits_for_ever(
        programs in prop::collection::vec(program(), 1..6),
        is_side_by_side in any::<bool>(),
    ) {
        let rounds = if is_side_by_side { Rounds::side_by_side(TURN) } else { Rounds::one_at_a_time(TURN) };
        let mut all = vec![ahead(1, 100 * US)];
        all.extend(programs);
        let bench = after(rounds, &all, 2 * SECOND);
        // One round, each turn of which takes twice its GPU time and a launch too many.
        let quanta: u64 = bench.rounds.members.iter().map(|m| m.quantum_ns.unsigned_abs()).sum();
        let most_ns = WALL * quanta + all.len() as u64 * (20 * MS + TURN / 4 + 4 * MOMENT_NS);
        let wait_ns = bench.states[0].longest_wait_ns;
        prop_assert!(wait_ns <= most_ns, "{} and at most {}", wait_ns, most_ns);
        prop_assert!(bench.states[0].charged_ns > 0);
    }

    /// Whoever goes on from what was saved answers as the old one would have.
    #[test]
    fn a_reload_changes_nothing(
        programs in prop::collection::vec(program(), 1..6),
        is_side_by_side in any::<bool>(),
        at_ns in 1..SECOND,
    ) {
        let new = || match is_side_by_side {
            true => Rounds::side_by_side(TURN),
            false => Rounds::one_at_a_time(TURN),
        };
        let mut all = vec![ahead(1, 100 * US)];
        all.extend(programs);
        let mut old = after(new(), &all, at_ns);
        let mut bench = old.clone();
        bench.rounds = new().after(old.now_ns, SavedRounds::read(&old.rounds.saved()));
        bench.programs.iter().zip(0..).for_each(|(program, id)| {
            bench.rounds.joined(&Client { weight: program.weight, ..client(id, BestEffort) });
        });
        old.run_until(2 * SECOND);
        bench.run_until(2 * SECOND);
        prop_assert_eq!(bench.states, old.states);
    }

    /// The GPU does not idle while somebody waits, but for patience.
    #[test]
    fn side_by_side_the_gpu_is_kept_busy(programs in prop::collection::vec(program(), 1..5)) {
        let mut all = vec![ahead(1, 100 * US)];
        all.extend(programs);
        let bench = after(Rounds::side_by_side(TURN), &all, 2 * SECOND);
        prop_assert!(bench.busy() > 0.97, "{}", bench.busy());
    }
}
