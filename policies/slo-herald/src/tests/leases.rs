//! Launches that start unasked beside services.

use super::*;

impl Bench {
    /// Launches that may follow one of so much time.
    fn lease(&mut self, predicted_ns: u64) -> u32 {
        let launch = self.asked(predicted_ns);
        match self.policy.decide(&launch).decision {
            Decision::Run(launches) => launches,
            other => panic!("{other:?}"),
        }
    }
}

fn is_revoked() -> bool {
    calls().iter().any(|call| matches!(call, Call::RevokeLease(BATCH)))
}

#[test]
fn a_lease_is_what_units_bear_of_the_longest_launch() {
    // 18 ms are spared.
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    b.begin();
    assert_eq!(b.lease(10 * US), 32, "at most");
    // 33 of 10 us each are charged.
    assert_eq!(b.policy.services[0].left_ns(), Some(18 * MS - 330 * US));
    // Of 1 ms eight could follow, at half of what is left.
    assert_eq!(b.lease(MS), 8);
    // The longest is remembered.
    assert!(b.lease(10 * US) < 9);
    b.end(MS);
    let launches: u32 = (0..40).map(|_| b.lease(10 * US)).last().unwrap();
    assert!((20..=32).contains(&launches), "and forgotten: {launches}");
}

#[test]
fn a_unit_that_bears_little_gets_launches_one_by_one() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    assert_eq!(b.lease(200 * US), 0, "four are too few");
    assert_eq!(b.lease(MS), 0, "1.85 ms are spared, and a unit may begin at any time");
    b.begin();
    assert_eq!(b.lease(MS), 0);
    assert_eq!(b.decide(900 * US), HELD);
}

#[test]
fn a_lease_is_taken_back_for_a_unit_that_bears_nothing() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    b.begin();
    assert!(b.lease(10 * US) > 0);
    b.end(MS);
    calls();
    b.begin();
    assert!(!is_revoked(), "it bears as much");
    b.end(MS);
    // The next one is measured alone.
    b.units(62, MS);
    assert!(b.lease(10 * US) > 0);
    calls();
    b.begin();
    assert_eq!(b.policy.services[0].left_ns(), Some(0));
    assert!(is_revoked());
    b.end(MS);
    // Strictly, and with a new service.
    assert!(b.lease(10 * US) > 0);
    calls();
    b.units(3, 21 * MS);
    assert!(is_revoked());
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    assert!(b.lease(10 * US) > 0);
    calls();
    b.policy.joined(b.now_ns, &client(3, PriorityClass::High));
    assert!(is_revoked());
    assert_eq!(b.lease(10 * US), 0, "it is not known");
}

#[test]
fn a_lease_is_taken_back_for_a_unit_that_is_old_already() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    assert_eq!(b.lease(250 * US), 32);
    calls();
    // 8 ms could start unasked, and it spares less.
    let (now_ns, since_ns) = (b.now_ns, b.now_ns - 12 * MS);
    b.policy.began(now_ns, WEB, since_ns, since_ns + 20 * MS);
    assert_eq!(b.policy.services[0].left_ns(), Some(7 * MS));
    assert!(is_revoked());
}

#[test]
fn there_is_no_lease_for_several_clients_nor_beside_spared_sms() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort));
    assert_eq!(b.lease(10 * US), 0);
    b.policy.left(b.now_ns, 3);
    assert!(b.lease(10 * US) > 0);
    b.policy.services[0].share.remember(&[1, 132, 1_000, 48, 0, 0, 0, 0, 0]);
    assert_eq!(b.lease(10 * US), 0);
}
