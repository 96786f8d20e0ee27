//! Floors beside services that can spare nothing.

use super::*;

/// The training has a floor of a fifth, and was charged so much.
fn with_floor(charged_ns: u64) {
    testing::set_clients(vec![floored(charged_ns)]);
}

/// Likewise, and it has a launch under way.
fn had_and_works(charged_ns: u64) {
    testing::set_clients(vec![ClientState { in_flight: 1, ..floored(charged_ns) }]);
}

fn floored(charged_ns: u64) -> ClientState {
    ClientState {
        min_share_permille: 200,
        charged_ns,
        waiting_since_ns: 0,
        backlogged_since_ns: 0,
        ..testing::client_state(BATCH, PriorityClass::BestEffort)
    }
}

#[test]
fn a_client_below_its_floor_is_let_in_whatever_services_can_spare() {
    for mode in [SharingMode::Concurrent, SharingMode::TimeSliced] {
        testing::set_sharing_mode(mode);
        let mut b = Bench::new(3 * MS);
        b.begin();
        with_floor(0);
        let asked = |b: &Bench| {
            let launch = b.asked(5 * MS);
            Launch { state: launch.state | LaunchState::MIN_SHARE, ..launch }
        };
        b.now_ns = MS;
        assert_eq!(b.decide_on(&asked(&b)), Decision::Hold(10 * MS + 1), "{mode:?}");
        b.now_ns = 11 * MS;
        let let_in = b.policy.decide(&asked(&b));
        assert_eq!((let_in.decision, let_in.reason), (RUNS, Reason::Floor.into()), "{mode:?}");
        with_floor(5 * MS);
        assert!(matches!(b.decide_on(&asked(&b)), Decision::Hold(ns) if ns < HOLD_UNTIL_CHANGE));
        // Without its floor it is held as ever.
        assert_eq!(b.decide(5 * MS), HELD, "{mode:?}");
        b.policy.left(b.now_ns, WEB);
        let name = "launches_for_min_share".to_owned();
        assert!(calls().contains(&Call::CounterAdd { name, delta: 1 }));
    }
}

#[test]
fn what_is_due_by_its_floor_does_not_yield() {
    let mut b = Bench::new(NEVER);
    with_floor(0);
    let long = Launch {
        state: LaunchState::MIN_SHARE | LaunchState::GRAPH,
        offered: FormsOffered::SLICED,
        ..b.asked(50 * MS)
    };
    assert!(!matches!(b.decide_on(&long), Decision::Hold(_)));
    b.begin();
    let yields = |yielded| Call::SetYield { client: BATCH, yielded };
    assert!(calls().contains(&yields(true)));
    had_and_works(0);
    b.policy.fired(12 * MS, FLOORS);
    let told = calls();
    assert!(told.contains(&yields(false)), "{told:?}");
    let goes_on = Call::SetAutoYield { client: BATCH, enabled: false, idle_ns: 0 };
    assert!(told.contains(&goes_on), "{told:?}");
    // It had its share.
    had_and_works(50 * MS);
    b.policy.fired(20 * MS, FLOORS);
    let told = calls();
    assert!(told.contains(&yields(true)), "{told:?}");
}

fn due(b: &Bench, predicted_ns: u64) -> Launch {
    let launch = b.asked(predicted_ns);
    Launch {
        state: launch.state | LaunchState::MIN_SHARE,
        offered: FormsOffered::SM_LIMITED,
        grid_blocks: 1_000,
        sm_count: 132,
        ..launch
    }
}

#[test]
fn a_due_launch_leaves_sms_to_an_open_unit_that_cannot_bear_it() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    with_floor(0);
    b.decide_on(&due(&b, MS));
    b.now_ns += 11 * MS;
    assert_eq!(b.decide_on(&due(&b, 5 * MS)), RUNS, "no unit is open");
    b.begin();
    let let_in = b.policy.decide(&due(&b, 3 * MS));
    assert_eq!((let_in.decision, let_in.reason), (Decision::SmLimited(48), Reason::Floor.into()));
    let can_be_borne = b.policy.decide(&due(&b, 500 * US));
    assert_eq!(can_be_borne.decision, RUNS);
    assert_eq!(b.decide_on(&due(&b, 5 * US)), RUNS, "a light one");
    // What cannot be limited goes all the same.
    let whole = Launch { offered: FormsOffered::empty(), ..due(&b, 5 * MS) };
    assert_eq!(b.policy.decide(&whole).decision, RUNS);
}
