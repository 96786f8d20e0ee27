use super::*;
use proptest::prelude::*;
use tally_sdk::LaunchState;
use tally_sdk::PriorityClass::BestEffort;
use tally_sdk::testing::{Call, calls, client_state, launch, set_clients};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const ID: ClientId = 3;

/// A client whose launches nobody lets in but its floor. It waits for each.
struct Bench {
    floors: Floors,
    state: ClientState,
    now_ns: u64,
}

impl Bench {
    fn new(permille: u32) -> Self {
        let state = ClientState {
            min_share_permille: permille,
            backlogged_since_ns: 0,
            ..client_state(ID, BestEffort)
        };
        Bench { floors: Floors::default(), state, now_ns: 0 }
    }

    fn due(&mut self) -> Option<Due> {
        set_clients(vec![self.state]);
        let state = match self.state.min_share_permille {
            0 => LaunchState::empty(),
            _ => LaunchState::MIN_SHARE,
        };
        let asked = tally_sdk::Launch { now_ns: self.now_ns, client: ID, state, ..launch() };
        self.floors.due(&asked)
    }

    /// Launches of so long, one after the other, each after a pause. What it was charged and had work for.
    fn run_until(&mut self, end_ns: u64, kernel_ns: u64, pause_ns: u64) {
        while self.now_ns < end_ns {
            match self.due() {
                Some(Due::In(ns)) => self.now_ns += ns,
                _ => {
                    self.now_ns += kernel_ns;
                    self.state.charged_ns += kernel_ns;
                    self.pause(pause_ns);
                }
            }
        }
    }

    fn pause(&mut self, ns: u64) {
        if ns > 0 {
            self.state.backlogged_ns = backlogged_ns(&self.state, self.now_ns);
            self.now_ns += ns;
            self.state.backlogged_since_ns = self.now_ns;
        }
    }

    /// Share of the time with work for which it was charged.
    fn had(&self) -> f64 {
        self.state.charged_ns as f64 / backlogged_ns(&self.state, self.now_ns) as f64
    }
}

#[test]
fn a_client_has_its_share_of_the_time_with_work_and_hardly_more() {
    for (permille, kernel_ns, pause_ns) in [
        (10, 100 * MS, 0),
        (10, SECOND, 0),
        (50, 300 * MS, 0),
        (200, 500 * US, 0),
        (10, 100 * US, 0),
        (900, 3 * MS, 0),
        (200, 80 * MS, 0),
        (300, MS, 7 * MS),
    ] {
        let mut bench = Bench::new(permille);
        // Many launches, whatever they take.
        let end_ns = (20 * SECOND).max(40 * kernel_ns * 1_000 / u64::from(permille));
        bench.run_until(end_ns, kernel_ns, pause_ns);
        let (had, share) = (bench.had(), f64::from(permille) / 1e3);
        assert!(
            (0.97 * share..1.05 * share).contains(&had),
            "{permille} {kernel_ns} {pause_ns}: {had}"
        );
    }
}

#[test]
fn who_is_due_gets_a_burst_and_others_are_told_when_they_will_be() {
    let mut bench = Bench::new(200);
    // A fifth of 10 ms is 2 ms.
    assert_eq!(bench.due(), Some(Due::In(10 * MS + 1)));
    bench.now_ns = 4 * MS;
    assert_eq!(bench.due(), Some(Due::In(6 * MS + 1)));
    assert!(!bench.floors.take_changed() && !bench.floors.is_due(ID));
    bench.now_ns = 10 * MS;
    assert_eq!(bench.due(), Some(Due::Now));
    assert!(bench.floors.take_changed() && bench.floors.is_due(ID));
    assert!(!bench.floors.take_changed(), "told once");
    // What is on the GPU counts already; it may end before more is owed.
    bench.state.in_flight_ns = 2 * MS;
    assert_eq!(bench.due(), Some(Due::In(LOOK_NS)));
    bench.now_ns = 12 * MS;
    bench.state.in_flight_ns = 3 * MS;
    assert_eq!(bench.due(), Some(Due::In(3 * MS)));
    (bench.state.in_flight_ns, bench.state.charged_ns) = (0, 2 * MS);
    assert_eq!(bench.due(), Some(Due::Now), "until it is owed nothing");
    bench.state.charged_ns = 3 * MS;
    // 2.6 ms would be owed after 13 ms.
    assert_eq!(bench.due(), Some(Due::In(13 * MS + 1)));
    assert!(bench.floors.take_changed());
}

#[test]
fn what_it_had_long_ago_counts_neither_for_nor_against_it() {
    let mut bench = Bench::new(200);
    // Ten seconds alone on the GPU, then ten without a launch of it let in.
    bench.due();
    (bench.now_ns, bench.state.charged_ns) = (10 * SECOND, 10 * SECOND);
    bench.due();
    let from = bench.state.charged_ns;
    bench.run_until(13 * SECOND, MS, 0);
    let had_ns = bench.state.charged_ns - from;
    // All but the first of three seconds.
    assert!((380 * MS..=420 * MS).contains(&had_ns), "{had_ns}");
    bench.now_ns += 10 * SECOND;
    let from = bench.state.charged_ns;
    bench.run_until(bench.now_ns + SECOND, MS, 0);
    let had_ns = bench.state.charged_ns - from;
    assert!(
        (200 * MS..=212 * MS).contains(&had_ns),
        "a little late, and the present share: {had_ns}"
    );
}

#[test]
fn time_without_work_earns_nothing_and_without_a_floor_nobody_is_due() {
    let mut bench = Bench::new(500);
    bench.due();
    (bench.state.backlogged_since_ns, bench.now_ns) = (NEVER, SECOND);
    assert!(matches!(bench.due(), Some(Due::In(_))));
    bench.state.backlogged_since_ns = bench.now_ns;
    bench.now_ns += 5 * MS;
    assert_eq!(bench.due(), Some(Due::Now));
    bench.floors.take_changed();
    bench.state.min_share_permille = 0;
    assert_eq!(bench.due(), None);
    assert!(bench.floors.take_changed() && !bench.floors.has(ID));
    assert_eq!(Bench::new(0).due(), None);
}

#[test]
fn the_timer_finds_who_is_due_while_its_launch_is_under_way() {
    let mut bench = Bench::new(200);
    bench.due().unwrap();
    bench.floors.wake(bench.now_ns, ID, 9);
    bench.floors.wake(bench.now_ns, ID, 9);
    assert_eq!(calls(), [Call::SetTimer { delay_ns: 10 * MS + 1, token: 9 }], "one is enough");
    bench.now_ns = 10 * MS + 1;
    bench.state.in_flight = 1;
    set_clients(vec![bench.state]);
    bench.floors.fired(bench.now_ns, 9);
    assert!(bench.floors.take_changed() && bench.floors.is_due(ID));
    // It may run for as long as it is owed, and yields again, although it is not charged yet.
    assert_eq!(calls(), [Call::SetTimer { delay_ns: 2 * MS, token: 9 }]);
    bench.now_ns += 2 * MS + 1;
    set_clients(vec![bench.state]);
    bench.floors.fired(bench.now_ns, 9);
    assert!(bench.floors.is_due(ID), "meanwhile it has earned more");
    bench.now_ns += MS;
    set_clients(vec![bench.state]);
    bench.floors.fired(bench.now_ns, 9);
    assert!(bench.floors.take_changed() && !bench.floors.is_due(ID));
    // It may have used up far more; it has yielded now, and is due again once it has earned as much.
    bench.now_ns += 50 * MS;
    assert_eq!(bench.due(), Some(Due::Now));
    bench.now_ns += SECOND;
    assert!(matches!(bench.due(), Some(Due::In(_))), "it ran all that time");
    for _ in 0..100 {
        bench.now_ns += 50 * MS;
        bench.due();
    }
    assert!(bench.floors.is_due(ID), "a fifth of five seconds");
    calls();
    // It ended without being charged much: looked at again only while there is work.
    let mut idle = Bench::new(200);
    idle.due();
    idle.state.backlogged_since_ns = NEVER;
    set_clients(vec![idle.state]);
    idle.floors.fired(MS, 9);
    assert_eq!(calls(), []);
}

#[test]
fn at_most_so_many_floors_are_kept() {
    let mut floors = Floors::default();
    let state = |id| ClientState { min_share_permille: 10, ..client_state(id, BestEffort) };
    let ids = 0..FLOORS_MAX as ClientId;
    set_clients(ids.clone().map(state).collect());
    for id in ids {
        assert!(floors.look(&state(id), 0).is_some());
    }
    assert_eq!(floors.look(&state(99), 0), None);
    // Nobody told that it left.
    set_clients((6..100).map(state).collect());
    assert!(floors.look(&state(99), 0).is_some() && !floors.has(5) && floors.has(6));
}

/// Nobody lets its launches in but its floor, after a state that claims whatever harms it most.
#[test]
fn a_floor_holds_whatever_was_saved_of_it() {
    let (min, max) = (i64::MIN.cast_unsigned(), u64::MAX);
    let hour = 3_600 * SECOND;
    for (is_due, in_flight) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for (owed, used) in [(min, 0), (max, max), (0, i64::MAX.cast_unsigned()), (0, 0)] {
            for (charged_ns, backlogged_ns, looked_ns) in
                [(0, 0, 0), (max, max, max), (0, max, 0), (hour, hour, hour)]
            {
                let mut bench = Bench::new(200);
                bench.now_ns = 2 * hour;
                bench.state.charged_ns = hour;
                bench.state.in_flight = in_flight as u32;
                let line = format!(
                    "floor {ID} 1000 {owed} {used} {charged_ns} {backlogged_ns} {looked_ns} {is_due} {in_flight} 1 1\n"
                );
                bench.floors = Floors::read(&format!("floors {max}\n{line}"));
                bench.due();
                bench.state.in_flight = 0;
                let (from_ns, end_ns) = (bench.state.charged_ns, bench.now_ns + 20 * SECOND);
                bench.run_until(end_ns, MS, 0);
                let had_ns = bench.state.charged_ns - from_ns;
                assert!((3_700 * MS..=4_300 * MS).contains(&had_ns), "{line}: {had_ns}");
            }
        }
    }
}

proptest! {
    #[test]
    fn what_is_saved_goes_on_as_before(
        permille in 10_u32..=900,
        kernel_ns in 10_000_u64..50_000_000,
        at_ms in 0_u64..3_000,
    ) {
        let mut bench = Bench::new(permille);
        bench.run_until(at_ms * MS, kernel_ns, 0);
        bench.due();
        bench.floors.wake(bench.now_ns, ID, 1);
        bench.floors.take_changed();
        let lines = format!("round 1 2\n{}member 3\n", bench.floors.saved());
        prop_assert_eq!(Floors::read(&lines).saved(), bench.floors.saved());
    }

    #[test]
    fn no_line_makes_it_panic(text in "(floors? ([0-9]{1,20} ?){0,10}\n){0,5}") {
        let mut floors = Floors::read(&text);
        let state = ClientState {
            min_share_permille: u32::MAX,
            charged_ns: u64::MAX,
            in_flight_ns: u64::MAX,
            backlogged_ns: u64::MAX,
            backlogged_since_ns: 0,
            ..client_state(0, BestEffort)
        };
        prop_assert!(floors.look(&state, u64::MAX).is_some());
    }
}
