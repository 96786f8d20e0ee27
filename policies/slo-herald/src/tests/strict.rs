//! How long a service is served strictly.

use super::*;

#[test]
fn a_service_that_was_late_is_served_strictly_until_fewer_are_late_than_may_be() {
    let mut b = Bench::new(3 * MS);
    b.units(60, MS);
    b.units(3, 4 * MS);
    let is_strict = |b: &Bench| b.policy.services[0].is_strict();
    assert!(is_strict(&b), "three of 200");
    b.units(190, MS);
    b.units(1, 4 * MS);
    b.units(8, MS);
    assert!(is_strict(&b), "two of 200");
    b.units(1, MS);
    assert!(!is_strict(&b), "one");
}
