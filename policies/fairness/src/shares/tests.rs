use super::*;
use crate::Yields;
use tally_sdk::PriorityClass::{BestEffort, High};
use tally_sdk::testing::{
    Call, calls, client, client_state, launch, set_clients, set_sharing_mode,
};
use tally_sdk::{ClientState, LaunchState, NEVER, UNKNOWN};

const MS: u64 = 1_000_000;
const TIMER: u64 = 9;
/// Has a floor; the other one has none.
const FLOORED: ClientId = 1;
const OTHER: ClientId = 2;
const REASONS: [u8; 2] = [3, 4];

/// Two best-effort clients that share.
fn two() -> Shares {
    let mut shares = Shares::with_timer(TIMER);
    shares.joined(0, &client(FLOORED, BestEffort), |_| 20 * MS);
    shares.joined(0, &client(OTHER, BestEffort), |_| unreachable!("rounds have begun"));
    shares
}

/// A launch of [`FLOORED`], which was charged for so much, at this time; whether it is due.
fn asked(shares: &mut Shares, now_ns: u64, charged_ns: u64) -> (Launch, Option<Due>) {
    let state = ClientState {
        min_share_permille: 500,
        backlogged_since_ns: 0,
        in_flight: 1,
        charged_ns,
        ..client_state(FLOORED, BestEffort)
    };
    set_clients(vec![state, client_state(OTHER, BestEffort)]);
    let launch = Launch { now_ns, client: FLOORED, state: LaunchState::MIN_SHARE, ..launch() };
    (launch, shares.floors.due(&launch))
}

/// What comes of a decision about a launch of [`FLOORED`] that is due, or is not.
fn answer(is_due: bool, high_clients: u32, decision: Decision) -> (Decision, u8, bool) {
    let mut shares = two();
    asked(&mut shares, 0, 0);
    let (launch, due) = asked(&mut shares, 5 * MS, if is_due { 0 } else { 5 * MS });
    let launch = Launch { high_clients, ..launch };
    calls();
    let given = decision.because(REASONS[0]);
    let (answer, for_floor) = shares.with_floor(&launch, given, due, high_clients > 0, REASONS[1]);
    (answer.decision, answer.reason, for_floor)
}

#[test]
fn what_is_due_is_counted_and_watched_while_it_may_yield() {
    let [own, floor] = REASONS;
    assert_eq!(answer(true, 1, Decision::Run(7)), (Decision::Run(0), floor, true));
    assert!(matches!(calls()[..], [Call::SetTimer { token: TIMER, .. }]));
    assert_eq!(answer(true, 0, Decision::Run(7)), (Decision::Run(7), floor, true));
    assert_eq!(calls(), []);
    assert_eq!(answer(false, 0, Decision::Run(7)), (Decision::Run(7), own, false));
}

#[test]
fn a_hold_lasts_until_its_client_is_due() {
    let (decision, reason, for_floor) = answer(false, 1, Decision::Hold(u64::MAX));
    assert!(matches!(decision, Decision::Hold(1..=100_000_000)), "{decision:?}");
    assert_eq!((reason, for_floor, calls()), (REASONS[0], false, Vec::new()));
}

#[test]
fn who_shares_has_a_short_window_and_no_lease() {
    let mut shares = two();
    let yields = Some(100);
    asked(&mut shares, 0, 0);
    asked(&mut shares, 5 * MS, 0);
    calls();
    assert_eq!(
        (shares.window_ns(WINDOW_OPEN), shares.window_ns(1), shares.lease(7)),
        (5 * MS, 1, 0)
    );
    let terms = Terms { window_ns: MS, leases: true, yields };
    shares.set_terms(terms);
    let window = |client, ms| Call::SetWindow { client, window_ns: ms * MS };
    let auto = Call::SetAutoYield { client: OTHER, enabled: true, idle_ns: 100 };
    let told = [window(FLOORED, 2), window(OTHER, 1), auto];
    assert_eq!(calls(), told, "who is due has room for what it is owed, and does not yield");
    shares.left(FLOORED);
    assert_eq!((shares.window_ns(WINDOW_OPEN), shares.lease(7)), (WINDOW_OPEN, 7));
    shares.set_terms(terms);
    shares.joined(0, &client(FLOORED, BestEffort), |_| 20 * MS);
    calls();
    shares.set_terms(terms);
    assert!(calls().contains(&Call::RevokeLease(OTHER)));
}

#[test]
fn what_was_saved_goes_on_with_the_first_client() {
    for mode in [SharingMode::Concurrent, SharingMode::TimeSliced] {
        set_sharing_mode(mode);
        let mut old = two();
        asked(&mut old, 0, 0);
        let (launch, due) = asked(&mut old, 5 * MS, 0);
        old.with_floor(&launch, Decision::Run(0).into(), due, true, REASONS[1]);
        let _ = old.rounds.hold(&launch);
        let mut new = Shares::with_timer(TIMER);
        new.restore(&old.saved());
        assert_eq!(new.saved(), "");
        calls();
        new.joined(6 * MS, &client(7, High), |_| 20 * MS);
        assert!(matches!(calls()[..], [Call::SetTimer { token: TIMER, .. }]));
        for id in [FLOORED, OTHER] {
            new.joined(6 * MS, &client(id, BestEffort), |_| unreachable!("rounds have begun"));
        }
        assert_eq!(new.saved(), old.saved());
        assert_eq!(new.time_sliced, mode == SharingMode::TimeSliced);
    }
}

/// The same clients, after what was saved of others.
fn restored(lines: &str, now_ns: u64) -> Shares {
    let mut shares = Shares::with_timer(TIMER);
    shares.restore(lines);
    shares.joined(now_ns, &client(FLOORED, BestEffort), |_| 20 * MS);
    shares.joined(now_ns, &client(OTHER, BestEffort), |_| unreachable!("rounds have begun"));
    shares
}

#[test]
fn who_has_work_the_long_launch_and_leases_outlive_a_reload() {
    let mut old = two();
    let working =
        |id| ClientState { in_flight: 1, in_flight_ns: 3 * MS, ..client_state(id, BestEffort) };
    set_clients(vec![working(FLOORED), working(OTHER)]);
    let launch = Launch { client: FLOORED, now_ns: MS, predicted_ns: 10_000, ..launch() };
    assert_eq!(old.rounds.hold(&launch), None);
    assert!(old.lease_behind(&launch, 100) > 0);
    let long = Launch { predicted_ns: 3 * MS, high_clients: 1, in_flight_ns: 0, ..launch };
    old.set_terms(Terms { window_ns: MS, leases: false, yields: None });
    assert_eq!(old.hold_long(&long, false), None);
    let mut new = restored(&old.saved(), 2 * MS);
    new.set_terms(Terms { window_ns: MS, leases: false, yields: None });
    assert_eq!((new.saved(), new.rounds.active()), (old.saved(), 2));
    assert!(!new.has_new_parts());
    assert!(new.hold_long(&Launch { now_ns: 2 * MS, client: OTHER, ..long }, false).is_some());
    calls();
    new.joined(2 * MS, &client(7, High), |_| unreachable!());
    assert_eq!(calls(), [FLOORED, OTHER].map(Call::RevokeLease));
}

#[test]
fn who_has_a_place_has_it_again_after_a_reload() {
    let clients = 66;
    for mode in [SharingMode::TimeSliced, SharingMode::Concurrent] {
        set_sharing_mode(mode);
        let joined = |mut shares: Shares, now_ns| {
            let mut join = |id| shares.joined(now_ns, &client(id, BestEffort), |_| 20 * MS);
            (1..=clients).for_each(&mut join);
            shares
        };
        let mut old = joined(Shares::with_timer(TIMER), 0);
        // All idle for a second but the last two, which have places from then on.
        let works = |id| id > clients - 2;
        for now_ns in (2_000 * MS..6_000 * MS).step_by(10_000_000) {
            let waiting_since_ns = |id| if works(id) { now_ns } else { NEVER };
            let state = |id| ClientState {
                waiting_since_ns: waiting_since_ns(id),
                charged_ns: if works(id) { now_ns / 2 } else { 0 },
                ..client_state(id, BestEffort)
            };
            set_clients((1..=clients).map(state).collect());
            for client in [clients - 1, clients] {
                let _ = old.rounds.hold(&Launch { client, now_ns, predicted_ns: MS, ..launch() });
            }
        }
        let mut new = Shares::with_timer(TIMER);
        new.restore(&old.saved());
        let new = joined(new, 6_000 * MS);
        assert!(old.saved().contains(&format!("member {clients} ")), "{mode:?}");
        assert_eq!(new.saved(), old.saved(), "{mode:?}");
    }
}

#[test]
fn who_is_kept_back_still_is_after_a_reload() {
    let mut old = two();
    let at = |now_ns, charged_ns| {
        let waits = |id| ClientState { waiting_since_ns: 1, ..client_state(id, BestEffort) };
        set_clients(vec![ClientState { charged_ns, ..waits(FLOORED) }, waits(OTHER)]);
        Launch { client: FLOORED, now_ns, predicted_ns: MS, ..launch() }
    };
    let _ = old.rounds.hold(&at(1_000 * MS, 0));
    let _ = old.rounds.hold(&at(1_030 * MS, 30 * MS));
    old.rounds.keep_back(OTHER);
    let mut new = restored(&old.saved(), 1_031 * MS);
    let asked = at(1_032 * MS, 31 * MS);
    assert_eq!((old.rounds.hold(&asked), new.rounds.hold(&asked)), (None, None));
}

#[test]
fn no_saved_state_holds_long_launches_for_long() {
    let max = u64::MAX;
    let second = 1_000 * MS;
    for numbers in
        [format!("{max} 0 {max} {max} {max} 0 {max}"), format!("{max} {max} 0 {max} 4 0 0")]
    {
        let mut shares = restored(&format!("long {FLOORED} {numbers}\n"), second);
        shares.set_terms(Terms { window_ns: MS, leases: false, yields: None });
        let long = Launch { predicted_ns: 3 * MS, ..launch() };
        assert!(!waits(&mut shares, 3 * second, 3 * MS, long), "for ever: {numbers}");
        let mine = Launch { client: FLOORED, in_flight_ns: 0, high_clients: 1, ..long };
        let at = 100 * second;
        assert_eq!(shares.hold_long(&Launch { now_ns: at, ..mine }, false), None);
        assert!(waits(&mut shares, at + MS, 3 * MS, long), "never again: {numbers}");
    }
}

#[test]
fn what_yields_stands_still_and_who_is_due_does_not_yield() {
    let mut shares = two();
    let mut yields = Yields::default();
    yields.until_ns = 20 * MS;
    assert!(yields.is_under_way(19 * MS) && !yields.is_under_way(20 * MS));
    let yielded = |client, yielded| Call::SetYield { client, yielded };
    yields.set(10 * MS, true, &shares);
    yields.set(11 * MS, true, &shares);
    assert_eq!(calls(), [yielded(FLOORED, true), yielded(OTHER, true)]);
    assert_eq!((yields.is_under_way(12 * MS), yields.left_ns(12 * MS)), (false, 10 * MS));
    asked(&mut shares, 0, 0);
    asked(&mut shares, 15 * MS, 0);
    yields.floors_changed(&shares);
    assert_eq!(calls(), [yielded(FLOORED, false), yielded(OTHER, true)]);
    yields.set(15 * MS, false, &shares);
    assert_eq!(calls(), [yielded(OTHER, false)]);
    assert_eq!(yields.left_ns(15 * MS), 10 * MS);
    yields.floors_changed(&shares);
    assert_eq!(calls(), []);
}

/// Two clients of which [`FLOORED`] has so much on the GPU, and whether a launch of [`OTHER`] waits for that.
fn waits(shares: &mut Shares, now_ns: u64, in_flight_ns: u64, launched: Launch) -> bool {
    let state = ClientState { in_flight: 1, in_flight_ns, ..client_state(FLOORED, BestEffort) };
    set_clients(vec![state, client_state(OTHER, BestEffort)]);
    let hold =
        shares.hold_long(&Launch { now_ns, client: OTHER, high_clients: 1, ..launched }, false);
    assert!(hold.is_none_or(|hold| matches!(hold, Decision::HoldUntilCompletion(1..))));
    hold.is_some()
}

#[test]
fn beside_high_priority_clients_one_long_launch_of_several_clients_is_under_way() {
    let long = Launch { predicted_ns: 3 * MS, now_ns: 0, in_flight_ns: 0, ..launch() };
    let mine = Launch { client: FLOORED, high_clients: 1, ..long };
    let begun = || {
        let mut shares = two();
        let terms = Terms { window_ns: MS, leases: false, yields: None };
        shares.set_terms(terms);
        assert_eq!(shares.hold_long(&mine, false), None);
        shares
    };
    let mut shares = begun();
    assert!(waits(&mut shares, MS, 3 * MS, long));
    assert!(!waits(&mut shares, MS, 3 * MS, Launch { predicted_ns: MS, ..long }), "it is short");
    assert!(!waits(&mut shares, MS, 3 * MS, Launch { predicted_ns: UNKNOWN, ..long }));
    let under_way = Launch { now_ns: MS, in_flight_ns: 3 * MS, ..mine };
    assert_eq!(shares.hold_long(&under_way, false), None, "its own are in order");
    // What it was held for has ended: it goes next, if it comes at once.
    let next = |ns| Launch { now_ns: 2 * MS + ns, ..mine };
    let hold = |ns| Some(Decision::HoldUntilCompletion(ns));
    assert_eq!(shares.hold_long(&next(0), false), hold(MS / 2));
    assert_eq!(shares.hold_long(&next(MS / 4), false), hold(MS / 4));
    assert_eq!(shares.hold_long(&next(MS / 2), false), None);
    assert_eq!(shares.hold_long(&next(MS), false), None, "and is not waited for again");
    assert!(waits(&mut shares, 4 * MS, 3 * MS, long));
    assert_eq!(shares.hold_long(&next(3 * MS), false), hold(MS / 2));
    // It has ended, and this one is under way.
    assert!(!waits(&mut shares, 5 * MS, MS, long));
    set_clients(vec![ClientState { in_flight_ns: 3 * MS, ..client_state(OTHER, BestEffort) }]);
    assert!(shares.hold_long(&mine, false).is_some());
    // One that does not end keeps nobody for ever.
    let mut shares = begun();
    assert!(waits(&mut shares, 23 * MS, 3 * MS, long));
    assert!(!waits(&mut shares, 25 * MS, 3 * MS, long));
    // Nobody is in a hurry, or hardware interrupts what is under way, or its client is alone.
    assert_eq!(begun().hold_long(&Launch { client: OTHER, high_clients: 0, ..long }, false), None);
    let mut shares = Shares { time_sliced: true, ..begun() };
    assert!(!waits(&mut shares, MS, 3 * MS, long));
    let mut shares = begun();
    shares.left(OTHER);
    assert!(!waits(&mut shares, MS, 3 * MS, long));
}

#[test]
fn kernels_that_wait_for_one_another_are_not_held_for_long() {
    // Between them others end as usual.
    for usual in [0, 10] {
        let mut shares = two();
        shares.set_terms(Terms { window_ns: MS, leases: false, yields: None });
        let asked = Launch { in_flight_ns: 0, high_clients: 1, ..launch() };
        let (mut predicted_ns, mut now_ns, mut held_ns) = (4 * MS, 0, 0);
        while now_ns < 100_000 * MS {
            for _ in 0..usual {
                let mine = Launch { now_ns, client: FLOORED, predicted_ns: 2 * MS, ..asked };
                assert_eq!(shares.hold_long(&mine, false), None);
                waits(&mut shares, now_ns + MS, 2 * MS, Launch { predicted_ns: 2 * MS, ..asked });
                now_ns += 2 * MS;
                waits(&mut shares, now_ns, 0, Launch { predicted_ns: 2 * MS, ..asked });
            }
            let both = Launch { predicted_ns, ..asked };
            let begin_ns = now_ns;
            assert_eq!(shares.hold_long(&Launch { now_ns, client: FLOORED, ..both }, false), None);
            while waits(&mut shares, now_ns, predicted_ns, both) {
                now_ns += MS / 2;
            }
            held_ns += now_ns - begin_ns;
            // Each takes as long as the other one was held, and a little.
            predicted_ns = (now_ns - begin_ns + 4 * MS).min(predicted_ns * 2);
            now_ns += 4 * MS;
        }
        assert!(held_ns < 10_000 * MS, "{usual}: {held_ns}");
    }
}

#[test]
fn a_launch_that_is_due_by_its_floor_waits_for_nobody_and_others_wait_for_its_long_one() {
    let mut shares = two();
    shares.joined(0, &client(7, High), |_| unreachable!());
    shares.set_terms(Terms { window_ns: MS, leases: false, yields: None });
    let working =
        |id| ClientState { in_flight: 1, in_flight_ns: 3 * MS, ..client_state(id, BestEffort) };
    set_clients(vec![working(FLOORED), working(OTHER)]);
    let long = Launch { predicted_ns: 3 * MS, in_flight_ns: 0, high_clients: 1, ..launch() };
    let due = Launch { client: FLOORED, now_ns: MS, ..long };
    assert_eq!(shares.hold(&due, true), None);
    assert!(shares.has_new_parts(), "both have work, which nobody else was asked about");
    let other = Launch { client: OTHER, ..due };
    assert_eq!(shares.hold_long(&other, false), None);
    assert_eq!(shares.hold_long(&due, true), None, "it waits for none");
    assert!(shares.hold_long(&other, false).is_some(), "and others for it");
    // What was held is judged by how long that was, whoever went first meanwhile.
    let later = |ms: u64| Launch { now_ns: (1 + ms) * MS, ..due };
    (1..20).for_each(|ms| assert_eq!(shares.hold_long(&later(ms), true), None));
    // Once it goes itself, nobody is held any more.
    let mut own = two();
    own.joined(0, &client(7, High), |_| unreachable!());
    own.set_terms(Terms { window_ns: MS, leases: false, yields: None });
    assert_eq!(own.hold_long(&other, false), None);
    assert!(own.hold_long(&due, false).is_some());
    assert_eq!(own.hold_long(&due, true), None);
    let saved = own.saved();
    let line = saved.lines().find(|line| line.starts_with("long ")).unwrap();
    assert!(line.contains(&format!(" {} 0 {} ", u64::MAX, u64::MAX)), "{line}");
    let held_from_ms = |shares: &Shares| {
        let saved = shares.saved();
        let line = saved.lines().find(|line| line.starts_with("long ")).unwrap();
        line.split(' ').nth(4).unwrap().parse::<u64>().unwrap() / MS
    };
    assert_eq!(held_from_ms(&shares), 1);
}

#[test]
fn clients_that_do_not_share_by_weight_share_a_window_too() {
    let mut shares = Shares::default();
    shares.joined(0, &client(FLOORED, BestEffort), |_| 0);
    shares.joined(0, &client(OTHER, BestEffort), |_| 0);
    assert_eq!(shares.window_ns(MS), MS);
    shares.joined(0, &client(7, High), |_| 0);
    assert_eq!(shares.window_ns(MS), MS / 2);
    shares.set_terms(Terms { window_ns: MS / 2, leases: false, yields: None });
    let long = Launch { now_ns: 0, predicted_ns: 3 * MS, high_clients: 1, ..launch() };
    assert_eq!(shares.hold_long(&Launch { client: FLOORED, ..long }, false), None);
    assert!(waits(&mut shares, MS, 3 * MS, long));
}
