//! Floors beside services that can spare nothing.

use super::*;

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
