//! Units that take longer alone than they did.

use super::*;

#[test]
fn a_service_whose_units_grow_is_measured_anew() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    let alone = |b: &mut Bench, took_ns| {
        while b.policy.services[0].left_ns() != Some(0) {
            b.units(1, MS);
            b.begin();
        }
        b.end(took_ns);
    };
    let is_strict = |b: &Bench| b.policy.services[0].is_strict();
    (0..40).for_each(|_| alone(&mut b, MS));
    // A fifth more is as predicted, and one that took longer is an accident.
    for took_ns in [1_200 * US, 2 * MS, MS, MS, MS, 1_200 * US] {
        alone(&mut b, took_ns);
        assert!(!is_strict(&b), "{took_ns}");
    }
    alone(&mut b, 2 * MS);
    assert!(b.allowance_ns().is_some());
    calls();
    alone(&mut b, 3 * MS);
    assert!(is_strict(&b), "two of the latest four");
    let said = |text: &str| {
        calls()
            .iter()
            .any(|call| matches!(call, Call::Log { message, .. } if message.contains(text)))
    };
    assert!(said("a fifth longer alone"));
    b.units(6, 3 * MS);
    assert!(is_strict(&b), "seven are known");
    b.units(1, 3 * MS);
    assert!(!is_strict(&b) && said("no longer"));
    let rate = b.policy.services[0].share.rate();
    assert_eq!(b.allowance_ns(), Some(16 * MS * rate / 1_000), "0.95 of 20 ms, less 3 ms");
}
