//! Services that have no units.

use super::*;

/// A second service with an objective of so much, of which nothing is known.
fn join(b: &mut Bench, slo_ns: Option<u64>) {
    set_services(vec![(WEB, testing::service(Some(b.slo_ns))), (9, testing::service(slo_ns))]);
    b.policy.joined(b.now_ns, &client(9, PriorityClass::High));
    calls();
}

fn runs_whole(b: &mut Bench) -> bool {
    let kernel = Launch { offered: FormsOffered::PREPARABLE, ..b.asked(MS) };
    matches!(b.policy.decide(&kernel).decision, Decision::Run(launches) if launches > 0)
}

#[test]
fn a_service_that_never_had_a_unit_takes_nothing_for_long() {
    for slo_ns in [Some(5 * MS), None] {
        let mut b = Bench::new(20 * MS);
        b.units(8, MS);
        assert!(runs_whole(&mut b));
        join(&mut b, slo_ns);
        b.units(2, MS);
        assert!(!runs_whole(&mut b), "its first unit may begin at any time");
        b.units(210, MS);
        assert!(runs_whole(&mut b), "a second later");
        b.policy.began(b.now_ns, 9, b.now_ns, slo_ns.map_or(NEVER, |ns| b.now_ns + ns));
        assert!(!runs_whole(&mut b), "it has one");
    }
}

#[test]
fn a_service_that_is_not_used_for_a_while_takes_nothing_if_it_has_an_objective() {
    for (slo_ns, is_free) in [(Some(5 * MS), true), (None, false)] {
        let mut b = Bench::new(20 * MS);
        b.units(8, MS);
        join(&mut b, slo_ns);
        b.policy.began(b.now_ns, 9, b.now_ns, slo_ns.map_or(NEVER, |ns| b.now_ns + ns));
        b.policy.ended(b.now_ns + MS, 9, 1, MS);
        b.units(250, MS);
        assert_eq!(runs_whole(&mut b), is_free, "{slo_ns:?}");
    }
}

#[test]
fn where_all_services_are_idle_each_may_have_a_unit() {
    let mut b = Bench::new(3 * MS);
    b.now_ns += 3_600_000 * MS;
    let kernel = Launch { offered: FormsOffered::PREPARABLE, ..b.asked(MS) };
    assert_eq!(b.policy.decide(&kernel).decision, Decision::Preemptible);
}

#[test]
fn another_percentile_is_known_within_a_second() {
    let mut b = Bench::new(3 * MS);
    b.units(200, MS);
    b.units(2, 4 * MS);
    assert!(!b.policy.services[0].is_strict());
    set_services(vec![(WEB, testing::service(Some(3 * MS)))]);
    let objective = tally_sdk::Objective { slo_ns: 3 * MS, percentile: 99.9 };
    let service = tally_sdk::Service { objective: Some(objective), ..testing::service(None) };
    set_services(vec![(WEB, service)]);
    b.now_ns += 1_000 * MS;
    b.units(2, MS);
    assert!(b.policy.services[0].is_strict(), "one of a thousand may be late");
}
