//! Services that hold nothing back, so that launches are not asked about.

use super::*;
use crate::share::REVIEW_UNITS;

const LEASE: Decision = Decision::Run(1_000_000);

impl Bench {
    /// So many units that take so long, in which best effort has half of the time and is not held.
    fn units_beside(&mut self, count: u32, took_ns: u64) {
        for _ in 0..count {
            self.begin();
            self.decide(took_ns / 2);
            self.end(took_ns);
        }
    }

    fn is_leased(&self) -> bool {
        self.policy.is_free()
    }
}

fn free() -> Bench {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    assert!(!b.is_leased(), "best effort did not ask for anything");
    b.units_beside(REVIEW_UNITS + 2, MS);
    assert!(!b.is_leased(), "one review is not enough");
    b.units_beside(REVIEW_UNITS + 2, MS);
    assert!(b.is_leased());
    b
}

#[test]
fn launches_are_not_asked_about_while_nothing_is_held() {
    let mut b = free();
    b.begin();
    assert_eq!(b.decide(MS), LEASE);
    let given = calls();
    let revoked = given.iter().any(|call| matches!(call, Call::RevokeLease(BATCH)));
    assert!(!revoked, "{given:?}");
    b.end(MS);
}

#[test]
fn late_units_take_the_lease_back_and_it_takes_longer_to_get_it_again() {
    let mut b = free();
    calls();
    b.units_beside(REVIEW_UNITS, 21 * MS);
    assert!(!b.is_leased());
    let given = calls();
    assert!(given.iter().any(|call| matches!(call, Call::RevokeLease(BATCH))), "{given:?}");
    // Strictly at first, until enough units have kept it.
    b.units(300, MS);
    b.units_beside(3 * (REVIEW_UNITS + 2), MS);
    assert!(!b.is_leased(), "four reviews it takes now");
    b.units_beside(2 * (REVIEW_UNITS + 2), MS);
    assert!(b.is_leased());
}

#[test]
fn units_are_measured_alone_again_after_a_while() {
    let mut b = free();
    let alone = |b: &Bench| b.policy.services[0].since_alone;
    b.units_beside(REVIEW_UNITS * 20, MS);
    assert!(b.is_leased() && alone(&b) >= REVIEW_UNITS * 20, "{}", alone(&b));
    b.units_beside(REVIEW_UNITS * 20, MS);
    assert!(alone(&b) < REVIEW_UNITS * 20, "{}", alone(&b));
}

#[test]
fn another_objective_takes_the_lease_back() {
    let mut b = free();
    b.slo_ns = 10 * MS;
    set_services(vec![(WEB, testing::service(Some(b.slo_ns)))]);
    calls();
    b.begin();
    assert!(!b.is_leased());
    assert!(calls().iter().any(|call| matches!(call, Call::RevokeLease(BATCH))));
}

#[test]
fn one_service_that_holds_something_is_enough_to_be_asked() {
    let mut b = free();
    b.policy.joined(b.now_ns, &client(3, PriorityClass::High));
    assert!(!b.is_leased());
    b.begin();
    assert_eq!(b.decide(MS), RUNS);
}

#[test]
fn beside_other_best_effort_each_launch_is_asked_about() {
    let mut b = free();
    b.policy.joined(b.now_ns, &client(4, PriorityClass::BestEffort));
    b.begin();
    assert_eq!(b.decide(MS), RUNS);
}
