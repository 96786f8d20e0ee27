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
    let ends: [fn(&mut Bench); 2] = [
        // It lets in less.
        |b| reviews(b, 24, 100),
        |b| {
            b.units(3, 4 * MS);
            assert!(b.policy.services[0].is_strict());
        },
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
fn several_best_effort_clients_are_asked_about_on_a_width_each_time() {
    let (mut b, can, sms) = on_width();
    b.decide_on(&now(&b, can));
    assert_eq!(widths_set(), [sms]);
    b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort));
    assert_eq!(b.policy.services[0].share.width(), Some(sms));
    testing::set_clients(vec![
        ClientState {
            waiting_since_ns: NEVER,
            ..testing::client_state(BATCH, PriorityClass::BestEffort)
        },
        ClientState {
            waiting_since_ns: NEVER,
            ..testing::client_state(3, PriorityClass::BestEffort)
        },
    ]);
    for _ in 0..2_000 {
        for client in [BATCH, 3] {
            let launch = Launch { client, predicted_ns: 20 * US, ..now(&b, can) };
            assert_eq!(b.policy.decide(&launch).decision, Decision::SmLimited(sms));
        }
    }
    assert_eq!(widths_set(), [0], "no lease, so no width of its own");
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
        reviews(&mut b, 1, 300);
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

#[test]
fn a_service_without_units_for_long_holds_best_effort_on_no_width() {
    let (mut b, can, sms) = on_width();
    b.now_ns += 500 * MS;
    assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms), "hardly a pause");
    b.now_ns += 1_000 * MS;
    assert_ne!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
    assert_eq!(widths_set(), [sms, 0]);
    b.begin();
    assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms), "it is used again");
}

#[test]
fn an_idle_hour_changes_nothing_of_what_ways_are_worth() {
    let mut b = Bench::new(3 * MS);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let work = |b: &mut Bench| {
        let share = &b.policy.services[0].share;
        let permille = if share.width().is_some() { 400 } else { 300 };
        reviews(b, 1, permille);
    };
    (0..200).for_each(|_| work(&mut b));
    while b.policy.services[0].share.width().is_none() {
        work(&mut b);
    }
    let apart_ns = b.policy.services[0].share.apart_ns();
    assert!((4 * MS..6 * MS).contains(&apart_ns), "{apart_ns}");
    b.now_ns += 3_600_000 * MS;
    (0..10).for_each(|_| work(&mut b));
    assert!(b.policy.services[0].share.width().is_some());
    let after_ns = b.policy.services[0].share.apart_ns();
    assert!(after_ns < apart_ns * 2, "{after_ns}");
}

#[test]
fn a_width_on_which_units_are_late_again_and_again_is_given_up() {
    let (mut b, ..) = on_width();
    let mut strict = 0;
    while b.policy.services[0].share.width().is_some() || b.policy.services[0].is_strict() {
        reviews(&mut b, 4, 1);
        b.units(3, 4 * MS);
        strict += 1;
        while b.policy.services[0].is_strict() {
            b.units(1, MS);
        }
        assert!(strict < 8);
    }
    assert!(strict >= 2, "once may be an accident");
}

#[test]
fn a_width_that_lets_in_far_less_is_left_before_it_has_settled() {
    let (mut b, ..) = on_width();
    let reviewed = (1..40).find(|_| {
        reviews(&mut b, 1, 100);
        b.policy.services[0].share.width().is_none()
    });
    assert!(reviewed.is_some_and(|count| count < 25), "after three numbers of SMs: {reviewed:?}");
}

#[test]
fn beside_a_service_that_is_served_strictly_whole_launches_have_the_rate_of_time() {
    let (mut b, can, sms) = on_width();
    // Far more is borne on the width than in time.
    let learned = [2, 132, 1_000, 1, 300, 0, 400, 48, 500, 0, sms.into(), 20_000, 255];
    assert!(b.policy.services[0].share.remember(&learned));
    b.begin();
    let limited = (0..1_000).take_while(|_| b.decide_on(&now(&b, can)) != HELD).count();
    assert!(limited > 100, "{limited}");
    b.end(MS);
    set_services(vec![(WEB, testing::service(Some(3 * MS))), (9, testing::service(None))]);
    b.policy.joined(b.now_ns, &client(9, PriorityClass::High));
    b.begin();
    let whole = (0..1_000).take_while(|_| b.decide_on(&now(&b, can)) != HELD).count();
    // 1.85 ms can be spared.
    assert_eq!(whole, 2);
}

#[test]
fn a_service_that_spares_other_sms_does_not_move_the_width() {
    let (mut b, can, sms) = on_width();
    set_services(vec![(WEB, testing::service(Some(3 * MS))), (9, testing::service(Some(3 * MS)))]);
    b.decide_on(&now(&b, can));
    b.policy.joined(b.now_ns, &client(9, PriorityClass::High));
    let other = b.policy.services.iter_mut().find(|one| one.client == 9).unwrap();
    assert!(other.remember("9 3000000 1000000 1 132 1000 0 300 400 1 96 500 0 48 200 0"));
    assert_eq!(other.share.sms(), Some(96));
    b.decide_on(&now(&b, can));
    calls();
    for _ in 0..5 {
        let deadline_ns = b.now_ns + 3 * MS;
        b.policy.began(b.now_ns, 9, b.now_ns, deadline_ns);
        assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
        b.now_ns += MS;
        b.policy.ended(b.now_ns, 9, 1, MS);
        assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
    }
    assert_eq!(widths_set(), []);
}

#[test]
fn units_beside_what_has_sms_always_do_not_tell_what_they_take_alone() {
    let (mut b, can, _) = on_width();
    let alone_ns = |b: &Bench| b.policy.services[0].terms().2;
    let before = alone_ns(&b);
    for _ in 0..64 * 66 {
        // Under way when the unit begins.
        b.policy.services[0].share.let_in(2 * MS, true);
        b.decide_on(&now(&b, Launch { predicted_ns: 5 * MS, ..can }));
        b.begin();
        b.end(1_800 * US);
        if b.policy.services[0].share.width().is_none() {
            break;
        }
    }
    assert_eq!(alone_ns(&b), before);
}

#[test]
fn more_sms_are_tried_before_a_way_has_lost() {
    let (mut b, _, sms) = on_width();
    let mut used = Vec::new();
    for _ in 0..80 {
        let width = b.policy.services[0].share.width();
        used.extend(width);
        reviews(&mut b, 1, width.map_or(300, |sms| 4 * u64::from(sms)));
    }
    let few = used.iter().filter(|one| **one == sms).count();
    assert!(few < 10, "they let in less than time: {few}");
    assert!(used.iter().filter(|one| **one > sms + sms / 2).count() > 20, "{used:?}");
}

#[test]
fn a_pause_of_best_effort_says_nothing_of_the_way() {
    let (mut b, ..) = on_width();
    reviews(&mut b, 2, 400);
    let pause = |b: &mut Bench, reviews: u32| {
        for _ in 0..reviews * 65 {
            b.begin();
            b.end(MS);
        }
    };
    // Best effort was there for the first part of it.
    pause(&mut b, 1);
    let before = b.policy.services[0].share.saved();
    pause(&mut b, 50);
    assert_eq!(b.policy.services[0].share.saved(), before);
    assert!(b.policy.services[0].share.width().is_some());
}

#[test]
fn bursts_of_units_are_measured() {
    let mut b = Bench::new(3 * MS);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    let tried = (0..40).find(|_| {
        reviews(&mut b, 3, 300);
        // Idle, and best effort works.
        b.now_ns += 1_500 * MS;
        let idle = Launch { high_idle_ns: 1_500 * MS, ..b.asked(500 * MS) };
        b.decide_on(&idle);
        b.now_ns += 1_500 * MS;
        b.policy.services[0].share.width().is_some()
    });
    assert!(tried.is_some_and(|bursts| bursts < 20), "{tried:?}");
}

#[test]
fn the_clocks_start_is_not_when_a_service_began() {
    let mut b = Bench::new(3 * MS);
    b.now_ns += 864_000_000 * MS;
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    b.units(4, MS);
    b.now_ns += 5_000 * MS;
    reviews(&mut b, 20, 300);
    let apart_ns = b.policy.services[0].share.apart_ns();
    assert!((4 * MS..6 * MS).contains(&apart_ns), "{apart_ns}");
}

#[test]
fn no_width_is_tried_beside_a_service_that_is_served_strictly() {
    let mut b = Bench::new(3 * MS);
    set_services(vec![(WEB, testing::service(Some(3 * MS))), (9, testing::service(None))]);
    b.policy.joined(b.now_ns, &client(9, PriorityClass::High));
    b.policy.began(b.now_ns, 9, b.now_ns, NEVER);
    b.policy.ended(b.now_ns + MS, 9, 1, MS);
    b.decide_on(&Launch { sm_count: 132, ..b.asked(MS) });
    for _ in 0..200 {
        reviews(&mut b, 1, 300);
        let saved = b.policy.services[0].share.saved();
        assert!(!saved.starts_with("2 "), "{saved}");
    }
}

#[test]
fn a_service_that_had_no_unit_yet_is_idle_in_the_end() {
    let (mut b, can, sms) = on_width();
    let saved = b.policy.snapshot();
    let mut policy = Herald::init("").unwrap();
    policy.restore(&saved).unwrap();
    policy.joined(b.now_ns, &client(WEB, PriorityClass::High));
    policy.joined(b.now_ns, &client(BATCH, PriorityClass::BestEffort));
    b.policy = policy;
    assert_eq!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
    b.now_ns += 3_600_000 * MS;
    assert_ne!(b.decide_on(&now(&b, can)), Decision::SmLimited(sms));
}

#[test]
fn launches_follow_unasked_on_a_width_once_their_kernels_were_limited() {
    let (mut b, can, sms) = on_width();
    let short = Launch { predicted_ns: 20 * US, ..can };
    let asked = (0..5_000).find(|_| {
        let launch = now(&b, short);
        match b.policy.decide(&launch).decision {
            Decision::SmLimited(to) => assert_eq!(to, sms),
            Decision::Run(launches) => {
                assert!((8..=32).contains(&launches), "{launches}");
                return true;
            }
            other => panic!("{other:?}"),
        }
        false
    });
    assert!(asked.is_some_and(|asked| asked > 500), "{asked:?}");
    assert_eq!(widths_set(), [sms]);
    // They take their part of an open unit.
    b.begin();
    let left_ns = b.policy.services[0].left_ns().unwrap();
    let Decision::Run(launches @ 8..) = b.policy.decide(&now(&b, short)).decision else {
        panic!("no lease")
    };
    let spent_ns = left_ns - b.policy.services[0].left_ns().unwrap();
    let each_ns = spent_ns / u64::from(launches + 1);
    assert!(each_ns.abs_diff(20 * US * u64::from(sms) / 132) < 100, "{each_ns}");
    // Of longer ones, one of which runs whole, a unit bears no eight.
    let long = Launch { predicted_ns: MS, ..now(&b, can) };
    b.policy.decide(&long);
    assert_eq!(b.policy.decide(&now(&b, short)).decision, Decision::SmLimited(sms));
    calls();
    // A unit that bears nothing takes back what was given before it.
    b.end(MS);
    b.units(70, MS);
    while !matches!(b.policy.decide(&now(&b, short)).decision, Decision::Run(8..)) {}
    calls();
    b.policy.began(b.now_ns, WEB, b.now_ns - 2 * MS, b.now_ns + MS);
    assert!(calls().contains(&Call::RevokeLease(BATCH)));
}

/// A training on a width of so many SMs whose launches are short, and were limited for long.
fn settled() -> (Bench, Launch, u32) {
    let (mut b, can, sms) = on_width();
    let short = Launch { predicted_ns: 20 * US, ..can };
    for _ in 0..2_000 {
        b.policy.decide(&now(&b, short));
    }
    (b, short, sms)
}

/// Launches that a unit lets in, leased ones included.
fn let_in(b: &mut Bench, launch: Launch) -> u32 {
    let mut sum = 0;
    loop {
        match b.policy.decide(&launch).decision {
            Decision::Run(launches) => sum += 1 + launches,
            Decision::SmLimited(_) => sum += 1,
            _ => return sum,
        }
    }
}

#[test]
fn a_client_with_a_floor_is_charged_for_no_lease() {
    let (mut b, short, _) = settled();
    b.begin();
    let short = now(&b, short);
    let without = let_in(&mut b, short);
    let (mut b, short, _) = settled();
    testing::set_clients(vec![ClientState {
        min_share_permille: 100,
        backlogged_since_ns: b.now_ns,
        ..testing::client_state(BATCH, PriorityClass::BestEffort)
    }]);
    b.begin();
    let state = now(&b, short).state | LaunchState::MIN_SHARE;
    let floored = Launch { state, ..now(&b, short) };
    assert_eq!(let_in(&mut b, floored), without);
}

#[test]
fn a_lease_of_light_launches_takes_no_more_than_its_part() {
    let (mut b, short, _) = settled();
    let light = Launch { predicted_ns: 300 * US, grid_blocks: 12, ..short };
    for _ in 0..2_000 {
        b.policy.decide(&now(&b, light));
    }
    b.begin();
    let left_ns = b.policy.services[0].left_ns().unwrap();
    assert!(matches!(b.policy.decide(&now(&b, light)).decision, Decision::Run(8..)));
    let spent_ns = left_ns - b.policy.services[0].left_ns().unwrap();
    assert!(spent_ns <= left_ns * 11 / 20, "{spent_ns} of {left_ns}");
}

#[test]
fn what_launches_take_on_a_width_says_nothing_of_whole_ones() {
    let (mut b, short, _) = settled();
    for at in 0..400 {
        let predicted_ns = if at % 4 == 0 { 180 * US } else { 20 * US };
        b.policy.decide(&now(&b, Launch { predicted_ns, ..short }));
    }
    // Time is shared again: a unit bears no eight of 180 us.
    let numbers = [0, 132, 1_000, 0, 0, 0, 0, 48, 0, 0, 48, 0, 0];
    assert!(b.policy.services[0].share.remember(&numbers));
    for _ in 0..4 {
        assert_eq!(b.policy.decide(&now(&b, short)).decision, RUNS, "no lease");
    }
}

#[test]
fn what_a_lease_on_a_width_has_under_way_is_beside_the_next_unit() {
    let (mut b, short, sms) = settled();
    for _ in 0..3 {
        // Until a unit is to be measured alone.
        loop {
            b.begin();
            if b.policy.services[0].left_ns() == Some(0) {
                break;
            }
            b.end(MS);
        }
        b.policy.ended(b.now_ns, WEB, 0, 0);
        b.now_ns += 5 * MS;
        let Decision::Run(launches @ 8..) = b.policy.decide(&now(&b, short)).decision else {
            panic!("no lease")
        };
        let lasts_ns = u64::from(launches) * 20 * US * 132 / u64::from(sms);
        b.now_ns += lasts_ns - 100 * US;
        b.begin();
        b.end(1_500 * US);
        assert_eq!(b.policy.services[0].strict_because(), None);
        b.now_ns += 10 * MS;
    }
}
