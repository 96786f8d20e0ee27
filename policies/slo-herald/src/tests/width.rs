//! Best effort on some SMs always.

use super::space::reviews;
use super::*;

/// A service whose best-effort client is tried on a width, and a launch that can be limited.
fn on_width() -> (Bench, Launch, u32) {
    let mut b = Bench::new(3 * MS);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let width = (0..40).find_map(|_| {
        reviews(&mut b, 1, 300);
        b.policy.services[0].share.width()
    });
    calls();
    let offered = FormsOffered::SM_LIMITED;
    let can = Launch { offered, sm_count: 132, grid_blocks: 1_000, ..b.asked(660 * US) };
    (b, can, width.expect("a width is tried after time"))
}

fn now(b: &Bench, launch: Launch) -> Launch {
    let Launch { now_ns, state, .. } = b.asked(0);
    Launch { now_ns, state, ..launch }
}

fn widths_set() -> Vec<u32> {
    let width = |call: &Call| match call {
        Call::SetWidth { client: BATCH, sms } => Some(*sms),
        _ => None,
    };
    calls().iter().filter_map(width).collect()
}

#[test]
fn on_a_width_best_effort_has_the_same_sms_in_units_and_between() {
    let (mut b, can, sms) = on_width();
    assert!((44..132).contains(&sms), "{sms}");
    assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
    assert_eq!(widths_set(), [sms]);
    b.begin();
    let left_ns = b.policy.services[0].left_ns().unwrap();
    assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
    let charged_ns = left_ns - b.policy.services[0].left_ns().unwrap();
    assert_eq!(charged_ns, 660 * US * u64::from(sms) / 132, "the part of the GPU that it takes");
    // What cannot be limited takes all SMs for its time, and the client keeps its width.
    let cannot = Launch { offered: FormsOffered::empty(), predicted_ns: 20 * US, ..now(&b, can) };
    let left_ns = b.policy.services[0].left_ns().unwrap();
    assert_eq!(b.policy.decide(&cannot).decision, RUNS, "without a lease");
    assert_eq!(b.policy.services[0].left_ns(), Some(left_ns - 20 * US));
    // Never measured, it would be measured whole first if it were left to the width.
    let unknown = Launch { predicted_ns: UNKNOWN, waited_ns: 2_000 * MS, ..now(&b, can) };
    assert_eq!(b.decide_on(&unknown), Decision::SmLimited(sms));
    let long = Launch { predicted_ns: 100 * MS, ..now(&b, can) };
    assert_eq!(b.decide_on(&long), HELD, "more than the unit bears");
    assert_eq!(widths_set(), []);
}

#[test]
fn the_width_ends_where_another_way_is_taken_or_a_service_is_served_strictly() {
    let ends: [fn(&mut Bench); 3] = [
        // It lets in less.
        |b| reviews(b, 40, 100),
        |b| {
            b.units(3, 4 * MS);
            assert!(b.policy.services[0].is_strict());
        },
        |b| b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort)),
    ];
    for (at, end) in ends.into_iter().enumerate() {
        let (mut b, can, sms) = on_width();
        b.decide_on(&now(&b, can));
        assert_eq!(widths_set(), [sms]);
        end(&mut b);
        assert_ne!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms), "end {at}");
        assert_eq!(widths_set(), [0], "end {at}");
    }
}

#[test]
fn several_best_effort_clients_are_tried_on_no_width() {
    let mut b = Bench::new(3 * MS);
    b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort));
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    for _ in 0..300 {
        reviews(&mut b, 1, 300);
        assert_eq!(b.policy.services[0].share.width(), None);
    }
    b.policy.left(b.now_ns, 3);
    let tried = (0..300).find(|_| {
        reviews(&mut b, 1, 300);
        b.policy.services[0].share.width().is_some()
    });
    assert!(tried.is_some());
}

#[test]
fn late_units_on_a_width_take_time_before_sms() {
    let (mut b, _, sms) = on_width();
    // Until late units on new SMs count.
    reviews(&mut b, 4, 300);
    let rate = |b: &Bench| b.policy.services[0].share.rate();
    let before = rate(&b);
    for _ in 0..2 {
        b.units(1, 4 * MS);
        b.units(65, MS);
    }
    assert_eq!(b.policy.services[0].share.width(), Some(sms));
    assert!(rate(&b) < before);
    let before = rate(&b);
    b.units(3, 4 * MS);
    while b.policy.services[0].is_strict() {
        b.units(1, MS);
    }
    assert_eq!(b.policy.services[0].share.width(), Some(sms));
    assert!(rate(&b) < before);
}

#[test]
fn the_way_that_let_most_in_is_kept_of_three_and_outlives_a_reload() {
    let mut b = Bench::new(3 * MS);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let of = |b: &Bench| {
        let share = &b.policy.services[0].share;
        (share.sms().is_some(), share.width())
    };
    let mut used = [0; 3];
    for review in 0..1_500 {
        let permille = match of(&b) {
            (false, None) => 300,
            (true, None) => 350,
            (_, Some(_)) => 400,
        };
        reviews(&mut b, 1, permille);
        if review >= 100 {
            let (in_space, width) = of(&b);
            used[if width.is_some() { 2 } else { usize::from(in_space) }] += 1;
        }
    }
    assert!(used[2] > 1_200 && used[0] > 0 && used[1] > 0, "both others are tried: {used:?}");
    while of(&b).1.is_none() {
        reviews(&mut b, 1, 300);
    }
    let saved = b.policy.snapshot();
    let mut policy = Herald::init("").unwrap();
    policy.restore(&saved).unwrap();
    policy.joined(1, &client(WEB, PriorityClass::High));
    assert!(policy.services[0].share.width().is_some());
}
