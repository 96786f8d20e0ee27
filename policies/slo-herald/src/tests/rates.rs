//! What lateness and other objectives leave of what was learned.

use super::*;

fn rate(b: &Bench) -> u64 {
    b.policy.services[0].share.rate()
}

#[test]
fn another_objective_forgets_the_rate_only_if_it_is_tighter() {
    let mut b = Bench::new(3 * MS);
    b.units(100, 4 * MS);
    assert_eq!((b.allowance_ns(), rate(&b)), (None, 500));
    b.slo_ns = 30 * MS;
    b.begin();
    assert_eq!(b.allowance_ns(), Some((28_500 * US - 4 * MS) / 2));
    b.end(4 * MS);
    b.units(65, 4 * MS);
    let learned = rate(&b);
    assert!(learned > 500);
    b.slo_ns = 40 * MS;
    b.begin();
    assert_eq!(rate(&b), learned);
    b.end(4 * MS);
    b.slo_ns = 20 * MS;
    b.begin();
    assert_eq!(rate(&b), 1_000);
}

#[test]
fn a_service_that_was_late_is_served_strictly_until_fewer_are_late_than_may_be() {
    let mut b = Bench::new(3 * MS);
    b.units(60, MS);
    b.units(3, 4 * MS);
    let is_strict = |b: &Bench| b.policy.services[0].is_strict();
    assert!(is_strict(&b), "three of 200");
    b.units(190, MS);
    b.units(1, 4 * MS);
    b.units(7, MS);
    assert!(is_strict(&b), "two of 200");
    b.units(2, MS);
    assert!(!is_strict(&b), "one");
}
