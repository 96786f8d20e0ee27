//! Whether best effort makes a service busy.

use super::*;

/// A burst of requests, which take longer as the service's host does, beside an idle best-effort program.
#[test]
fn a_service_is_not_served_strictly_for_what_nothing_was_let_in() {
    let mut b = Bench::new(30 * MS);
    b.units(200, MS);
    let bears_ns = b.allowance_ns();
    // Busy 86 % of the time, and all of it.
    for gap_ns in [200 * US, 0] {
        for _ in 0..5_000 {
            b.begin();
            b.end(1_200 * US);
            b.now_ns -= 4 * 1_200 * US - gap_ns;
            assert!(!b.policy.services[0].is_strict());
        }
        assert!(b.allowance_ns() >= bears_ns);
    }
}

/// Its program sends the next request once it has the answer: it queues nothing.
#[test]
fn a_service_may_be_as_busy_as_it_likes_if_the_configuration_says_so() {
    for (config, may) in [("busy_percent_max = 100", true), ("", false)] {
        let mut b = Bench::new(30 * MS);
        b.policy = Herald::init(config).unwrap();
        b.policy.joined(1, &client(WEB, PriorityClass::High));
        b.policy.joined(1, &client(BATCH, PriorityClass::BestEffort));
        b.units(200, MS);
        for _ in 0..5_000 {
            b.begin();
            b.now_ns += 1;
            let took_ns = if b.decide(US) == RUNS { 2 * MS } else { MS };
            b.end(took_ns);
            b.now_ns -= 4 * took_ns;
            assert!(!may || !b.policy.services[0].is_strict());
        }
        assert_eq!(b.policy.services[0].is_strict(), !may, "{config}");
    }
}

/// Few long units may be busy for a while by chance.
#[test]
fn a_service_of_long_units_is_not_served_strictly_for_a_burst() {
    let mut b = Bench::new(3_000 * MS);
    b.units(64, 100 * MS);
    let mut units = |count: u32, gap_ns: u64| {
        for _ in 0..count {
            b.begin();
            let is_alone = b.policy.services[0].left_ns() == Some(0);
            b.now_ns += 1;
            b.decide(US);
            let took_ns = if is_alone { 100 * MS } else { 120 * MS };
            b.end(took_ns);
            b.now_ns -= 4 * took_ns - gap_ns;
        }
        b.policy.services[0].is_strict()
    };
    for _ in 0..4 {
        assert!((0..32).all(|_| !units(1, 0)));
        assert!(!units(60, 100 * MS));
    }
    assert!((0..200).any(|_| units(1, 0)), "it lasts");
    // It is as busy alone, and is tried again ever more seldom.
    let strict = (0..6_000).filter(|_| units(1, 0)).count();
    assert!(strict > 5_000, "{strict} of 6 000");
}

/// What is let in between units goes on beside the next one, and makes it longer.
#[test]
fn what_is_under_way_when_a_unit_begins_is_beside_it() {
    let mut b = Bench::new(30 * MS);
    b.units(200, MS);
    let mut is_ever_strict = false;
    for _ in 0..2_000 {
        let is_let_in = b.decide(500 * US) == RUNS;
        b.now_ns += 10 * US;
        b.begin();
        let took_ns = if is_let_in { 1_500 * US } else { MS };
        b.end(took_ns);
        b.now_ns -= 4 * took_ns - 10 * US;
        is_ever_strict |= b.policy.services[0].is_strict();
    }
    assert!(is_ever_strict);
}
