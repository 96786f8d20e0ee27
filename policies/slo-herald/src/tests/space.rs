//! Whether time or space is shared, and how much of it.

use super::*;
use crate::share::Way;

/// Where best effort has no width: there are two ways, not three.
fn bench() -> Bench {
    let mut b = Bench::new(3 * MS);
    b.policy.services[0].share.try_only(&[Way::Time, Way::Space]);
    b
}

/// Best-effort work of `permille` of the time is let in, some on spared SMs, and some is held, for so many reviews of
/// early units.
pub(super) fn reviews(b: &mut Bench, count: u32, permille: u64) {
    for _ in 0..count * 65 {
        b.begin();
        b.policy.services[0].is_short();
        let share = &mut b.policy.services[0].share;
        share.let_in(5 * MS * permille / 1_000, true);
        share.limited();
        b.end(MS);
    }
}

#[test]
fn the_way_that_lets_more_work_in_is_kept() {
    let mut b = bench();
    let limited = Launch { sm_count: 132, ..b.asked(MS) };
    b.decide_on(&limited);
    assert_eq!(b.policy.services[0].share.sms(), None, "time at first");
    calls();
    reviews(&mut b, 31, 300);
    let told = |name: &str| {
        let of = |call| match call {
            Call::GaugeSet { name: set, value } if set == name => Some(value),
            _ => None,
        };
        calls().into_iter().filter_map(of).next_back()
    };
    let permille = told("let_in_by_time_permille").unwrap();
    assert!((290..310).contains(&permille), "{permille}");
    let sms = b.policy.services[0].share.sms().expect("space is tried");
    assert!((48..132).contains(&sms) && sms.is_multiple_of(8), "{sms}");
    b.begin();
    let can = Launch { offered: FormsOffered::SM_LIMITED, grid_blocks: 1_000, ..b.asked(MS) };
    assert_eq!(b.decide_on(&can), Decision::SmLimited(sms));
    // A graph has kernel nodes, not blocks.
    let graph = Launch { state: can.state | LaunchState::GRAPH, grid_blocks: 3, ..can };
    assert_eq!(b.decide_on(&graph), Decision::SmLimited(sms));
    // A light one is not worth it, and one that fits would not be limited.
    let light = Launch { predicted_ns: 4 * US, ..can };
    let fits = Launch { grid_blocks: sms.into(), ..can };
    assert_eq!(b.decide_on(&light), RUNS);
    assert_eq!(b.decide_on(&fits), RUNS);
    b.end(MS);
    reviews(&mut b, 31, 200);
    assert_eq!(b.policy.services[0].share.sms(), None, "time was better");
    let mut tried_after = || {
        (0..).find(|_| {
            reviews(&mut b, 1, 300);
            b.policy.services[0].share.sms().is_some()
        })
    };
    let (first, second) = (tried_after().unwrap(), tried_after().unwrap());
    assert!((100..200).contains(&first), "again after a while: {first}");
    assert_eq!(second, 0, "and kept for now");
    reviews(&mut b, 31, 500);
    assert!(b.policy.services[0].share.sms().is_some(), "space was better");
}

#[test]
fn space_is_tried_only_where_time_holds_something_back() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let sms = |b: &Bench| b.policy.services[0].share.sms();
    for _ in 0..20_000 {
        b.begin();
        b.policy.services[0].share.let_in(MS, true);
        b.end(MS);
        assert_eq!(sms(&b), None, "all is let in");
    }
    assert_eq!(b.policy.services[0].share.rate(), share::RATE_START, "more is not wanted");
    reviews(&mut b, 31, 300);
    assert!(sms(&b).is_some());
    // No launch can be limited there.
    b.policy.services[0].share.forget();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    while sms(&b).is_none() {
        b.begin();
        b.policy.services[0].is_short();
        b.end(MS);
    }
    b.units(66, MS);
    assert_eq!(sms(&b), None);
}

#[test]
fn space_is_tried_soon_if_no_unit_bears_a_launch() {
    let mut b = bench();
    let long = Launch { sm_count: 132, ..b.asked(200 * MS) };
    b.units(8, MS);
    let reviews = (1..40).find(|_| {
        for _ in 0..64 {
            b.begin();
            let state = LaunchState::HIGH_ACTIVE;
            assert_eq!(b.decide_on(&Launch { now_ns: b.now_ns, state, ..long }), HELD);
            b.end(MS);
        }
        b.policy.services[0].share.sms().is_some()
    });
    assert!((4..16).contains(&reviews.unwrap()), "{reviews:?}");
}

#[test]
fn late_units_take_sms_back() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    reviews(&mut b, 31, 300);
    let sms = |b: &Bench| b.policy.services[0].share.sms();
    let before = sms(&b).unwrap();
    // Late units on a new number say nothing of it: it is tried again soon.
    b.units(3, 4 * MS);
    assert_eq!(sms(&b), None);
    let tried = (0..).find(|_| {
        reviews(&mut b, 1, 300);
        sms(&b).is_some()
    });
    assert!((20..60).contains(&tried.unwrap()), "{tried:?}");
    assert_eq!(sms(&b), Some(before));
    b.units(1, 4 * MS);
    b.units(65, MS);
    let rate = b.policy.services[0].share.rate();
    b.units(1, 4 * MS);
    b.units(65, MS);
    assert_eq!(sms(&b), Some(before));
    assert!(b.policy.services[0].share.rate() < rate, "two late within 128");
    b.units(3, 4 * MS);
    b.begin();
    let can = Launch { offered: FormsOffered::SM_LIMITED, grid_blocks: 1_000, ..b.asked(MS) };
    assert_eq!(b.decide_on(&can), HELD, "three late in 200: strict");
    b.end(MS);
    assert!(sms(&b).unwrap() <= before / 4 * 3, "then on fewer SMs");
    while b.policy.services[0].is_strict() {
        b.units(1, MS);
    }
    assert!(sms(&b).is_some());
    b.units(3, 4 * MS);
    assert_eq!(sms(&b), None, "late again");
    let tried = (0..).find(|_| {
        reviews(&mut b, 1, 300);
        sms(&b).is_some()
    });
    assert!((80..300).contains(&tried.unwrap()), "{tried:?}");
}

#[test]
fn a_launch_of_no_more_blocks_than_spared_sms_takes_no_time_of_a_unit() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    reviews(&mut b, 31, 300);
    let sms = b.policy.services[0].share.sms().unwrap();
    b.begin();
    let left_ns = b.policy.services[0].left_ns();
    let fits = Launch { grid_blocks: sms.into(), ..b.asked(10_000 * MS) };
    assert_eq!(b.decide_on(&fits), RUNS);
    assert_eq!(b.policy.services[0].left_ns(), left_ns);
    let exceeds = Launch { grid_blocks: u64::from(sms) + 1, ..fits };
    assert_eq!(b.decide_on(&exceeds), HELD, "nor can it be limited");
}

#[test]
fn a_kernel_whose_code_was_not_read_runs_whole_and_is_read_where_sms_are_spared() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    b.units(8, MS);
    let unread = |b: &Bench, ns| Launch { offered: FormsOffered::PREPARABLE, ..b.asked(ns) };
    assert_eq!(b.decide_on(&unread(&b, 100 * US)), RUNS, "time is shared");
    reviews(&mut b, 31, 300);
    let sms = b.policy.services[0].share.sms().unwrap();
    assert_eq!(b.decide_on(&unread(&b, 100 * US)), Decision::SmLimited(sms));
    assert_eq!(b.decide_on(&unread(&b, 4 * US)), RUNS, "light");
    b.begin();
    let left_ns = b.policy.services[0].left_ns().unwrap();
    assert_eq!(b.decide_on(&unread(&b, 100 * US)), Decision::SmLimited(sms));
    assert_eq!(b.policy.services[0].left_ns(), Some(left_ns - 100 * US), "charged as whole");
}

#[test]
fn more_sms_are_taken_only_where_units_would_stay_early() {
    // Alone 1 ms of 3: 2.7 ms beside 48 SMs would be 2.98 ms, which is more than 95 %, beside 56.
    for (beside_ns, grows) in [(2_700 * US, false), (2_000 * US, true)] {
        let mut b = bench();
        b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
        while b.policy.services[0].share.sms().is_none() {
            reviews(&mut b, 1, 300);
        }
        let sms = |b: &Bench| b.policy.services[0].share.sms();
        let before = sms(&b);
        let mut grew = false;
        for _ in 0..32 * 65 {
            b.begin();
            let is_alone = b.policy.services[0].sms().is_none();
            b.policy.services[0].share.let_in(10 * MS, true);
            b.policy.services[0].share.limited();
            b.end(if is_alone { MS } else { beside_ns });
            grew |= sms(&b) > before;
        }
        assert_eq!(grew, grows, "{beside_ns}");
    }
}

#[test]
fn what_was_learned_of_a_service_outlives_a_reload() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    reviews(&mut b, 31, 300);
    let before = (b.allowance_ns(), b.policy.services[0].share.sms());
    assert!(before.0.is_some() && before.1.is_some(), "{before:?}");
    let saved = b.policy.snapshot();
    let loaded = |slo_ns| {
        set_services(vec![(WEB, testing::service(Some(slo_ns)))]);
        let mut policy = Herald::init("").unwrap();
        policy.restore(&saved).unwrap();
        policy.joined(1, &client(WEB, PriorityClass::High));
        (policy.services[0].allowance_ns(), policy.services[0].share.sms())
    };
    assert_eq!(loaded(3 * MS), before);
    assert_eq!(loaded(4 * MS), (None, None), "another objective");
    // Nothing that others could have written breaks it, at this objective or another.
    let (big, most) = (u64::MAX, u32::MAX);
    let spot = format!("{} {big} {big}", most - 1);
    let own = format!("1 4000000 5 1 {most} {big} 1 {big} {big} {big} {spot} {spot}");
    let mut wild = Bench::new(4 * MS);
    wild.policy.restore(&wild.policy.forms.snapshot(&own)).unwrap();
    wild.policy.left(1, WEB);
    wild.policy.joined(1, &client(WEB, PriorityClass::High));
    assert!(wild.policy.services[0].share.sms().is_some(), "it is taken over");
    wild.decide_on(&Launch { sm_count: 132, ..wild.asked(MS) });
    reviews(&mut wild, 120, 300);
    assert!(wild.policy.services[0].share.sms().is_none_or(|sms| sms < 132));
    for own in [
        "",
        "1",
        "1 2 3",
        "x y",
        "1 3000000 1 1 9 9 9 9 9 9 9 9 9 9 9 9",
        "7 3000000 5 1 1 1 1 1 1 1 1 1 1 1 1 1",
    ] {
        let mut policy = Herald::init("").unwrap();
        policy.restore(&policy.forms.snapshot(own)).unwrap();
        policy.joined(1, &client(WEB, PriorityClass::High));
        assert_eq!(policy.services[0].allowance_ns(), None, "{own}");
    }
}

#[test]
fn widths_are_those_of_the_partitions() {
    let mut b = bench();
    set_widths(vec![16, 64, 112]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let sms = |b: &Bench| b.policy.services[0].share.sms();
    let mut tried = Vec::new();
    for _ in 0..200 {
        reviews(&mut b, 1, 300);
        if let Some(sms) = sms(&b)
            && tried.last() != Some(&sms)
        {
            tried.push(sms);
        }
    }
    assert_eq!(tried[..2], [64, 112], "from a third of the SMs on, and never so few as 16");
    assert!(tried.iter().all(|sms| [64, 112].contains(sms)), "{tried:?}");
}

#[test]
fn where_nothing_can_be_limited_there_is_no_space() {
    let mut b = bench();
    set_widths(Vec::new());
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    for _ in 0..200 {
        reviews(&mut b, 1, 300);
        assert_eq!(b.policy.services[0].share.sms(), None);
    }
}

/// Reviews of early units, on each number of SMs with so much best-effort work, in thousandths of the time; what was in
/// use in each.
fn reviews_by_sms(b: &mut Bench, count: u32, permille: fn(Option<u32>) -> u64) -> Vec<Option<u32>> {
    let mut used = Vec::new();
    for _ in 0..count {
        let sms = b.policy.services[0].share.sms();
        used.push(sms);
        for _ in 0..65 {
            b.begin();
            // Nothing waits for want of time but where that is the way.
            if b.policy.services[0].share.sms().is_none() {
                b.policy.services[0].is_short();
            }
            let share = &mut b.policy.services[0].share;
            share.let_in(5 * MS * permille(sms) / 1_000, true);
            share.limited();
            b.end(MS);
        }
    }
    used
}

fn share_of(used: &[Option<u32>], sms: Option<u32>) -> usize {
    100 * used.iter().filter(|one| **one == sms).count() / used.len()
}

#[test]
fn more_sms_that_let_in_less_cost_little_and_do_not_end_the_way() {
    let mut b = bench();
    set_widths(vec![48, 96]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let permille = |sms| match sms {
        None => 450,
        Some(48) => 500,
        Some(_) => 400,
    };
    reviews_by_sms(&mut b, 100, permille);
    let used = reviews_by_sms(&mut b, 600, permille);
    assert!(share_of(&used, Some(48)) > 85, "{}", share_of(&used, Some(48)));
    assert!(used.contains(&Some(96)) && used.contains(&None), "the others are tried");
}

#[test]
fn more_sms_are_tried_before_fewer_are_judged() {
    let mut b = bench();
    set_widths(vec![48, 96]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let used = reviews_by_sms(&mut b, 100, |sms| match sms {
        None => 450,
        Some(48) => 420,
        Some(_) => 600,
    });
    assert_eq!(used[70..], [Some(96); 30]);
}

#[test]
fn late_units_on_new_sms_take_no_time_of_the_other_way() {
    let mut b = bench();
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let rate = |b: &Bench| (b.policy.services[0].share.sms(), b.policy.services[0].share.rate());
    let mut before = rate(&b);
    while let (None, now) = rate(&b) {
        before = (None, now);
        reviews(&mut b, 1, 300);
    }
    b.units(12, MS);
    b.units(3, 4 * MS);
    while b.policy.services[0].is_strict() {
        b.units(1, MS);
    }
    b.units(16, MS);
    assert_eq!(rate(&b), before);
}

#[test]
fn what_a_snapshot_in_a_trial_tells_is_the_number_of_sms_before() {
    let mut b = bench();
    set_widths(vec![48, 96]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    while b.policy.services[0].share.sms() != Some(96) {
        reviews_by_sms(&mut b, 1, |sms| if sms.is_none() { 300 } else { 500 });
    }
    let restored = |saved: &Saved| {
        let mut policy = Herald::init("").unwrap();
        policy.restore(saved).unwrap();
        policy.joined(1, &client(WEB, PriorityClass::High));
        (policy.services[0].share.sms(), policy.snapshot())
    };
    let (sms, again) = restored(&b.policy.snapshot());
    assert_eq!(sms, Some(48));
    assert_eq!(restored(&again).0, Some(48), "though no launch told the GPU meanwhile");
}

#[test]
fn more_sms_come_back_after_late_units() {
    let mut b = bench();
    set_widths(vec![48, 96]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let permille = |sms| match sms {
        None => 450,
        Some(48) => 420,
        Some(_) => 600,
    };
    let used = reviews_by_sms(&mut b, 100, permille);
    assert_eq!(used.last(), Some(&Some(96)));
    for _ in 0..2 {
        b.units(3, 4 * MS);
        while b.policy.services[0].is_strict() {
            b.units(1, MS);
        }
        assert_ne!(b.policy.services[0].share.sms(), Some(96));
    }
    let used = reviews_by_sms(&mut b, 2_000, permille);
    assert!(share_of(&used, Some(96)) > 80, "{}", share_of(&used, Some(96)));
}

#[test]
fn another_programs_first_launches_do_not_end_a_way_that_was_measured() {
    let mut b = bench();
    set_widths(vec![48, 96]);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let permille = |sms: Option<u32>| 300 + 4 * u64::from(sms.unwrap_or(0));
    reviews_by_sms(&mut b, 100, permille);
    let before = b.policy.services[0].share.sms().unwrap();
    b.policy.joined(b.now_ns, &client(77, PriorityClass::BestEffort));
    // One late unit in each of two reviews: too many, but for kernels that were not there before.
    for _ in 0..2 {
        b.units(1, 4 * MS);
        b.units(65, MS);
    }
    assert_eq!(b.policy.services[0].share.sms(), Some(before));
    b.units(2, 4 * MS);
    assert!(b.policy.services[0].is_strict());
    assert_eq!(b.policy.services[0].share.sms(), Some(48), "fewer, not none");
}
