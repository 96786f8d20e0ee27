use super::*;
use crate::Yields;
use tally_sdk::PriorityClass::{BestEffort, High};
use tally_sdk::testing::{
    Call, calls, client, client_state, launch, set_clients, set_sharing_mode,
};
use tally_sdk::{ClientState, LaunchState};

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
    let window = |client| Call::SetWindow { client, window_ns: MS };
    let auto = Call::SetAutoYield { client: OTHER, enabled: true, idle_ns: 100 };
    assert_eq!(calls(), [window(FLOORED), window(OTHER), auto], "who is due does not yield");
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
