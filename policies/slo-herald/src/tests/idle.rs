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

/// A unit of the second service, of 1 ms.
fn unit(b: &mut Bench, slo_ns: Option<u64>) {
    b.policy.began(b.now_ns, 9, b.now_ns, slo_ns.map_or(NEVER, |ns| b.now_ns + ns));
    b.policy.ended(b.now_ns + MS, 9, 1, MS);
}

#[test]
fn a_service_that_is_not_used_for_a_while_takes_nothing_if_it_has_an_objective() {
    for (slo_ns, is_free) in [(Some(5 * MS), true), (None, false)] {
        let mut b = Bench::new(20 * MS);
        b.units(8, MS);
        join(&mut b, slo_ns);
        unit(&mut b, slo_ns);
        b.units(250, MS);
        assert!(!runs_whole(&mut b), "it is not known how far its units are apart");
        for _ in 0..3 {
            unit(&mut b, slo_ns);
            b.units(2, MS);
        }
        b.units(250, MS);
        assert!(!runs_whole(&mut b), "they were 1.25 s apart");
        b.units(800, MS);
        assert_eq!(runs_whole(&mut b), is_free, "{slo_ns:?}");
    }
}

#[test]
fn a_service_with_a_unit_every_few_seconds_is_always_expected() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    join(&mut b, Some(5 * MS));
    for _ in 0..100 {
        unit(&mut b, Some(5 * MS));
        b.units(400, MS);
        assert!(!runs_whole(&mut b));
    }
}

#[test]
fn where_all_services_are_idle_each_may_have_a_unit() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    b.now_ns += 3_600_000 * MS;
    assert!(runs_whole(&mut b), "as much as it bears");
    let kernel = Launch { offered: FormsOffered::PREPARABLE, ..b.asked(20 * MS) };
    assert_eq!(b.policy.decide(&kernel).decision, Decision::Preemptible);
}

/// What follows from the services that are used is worked out anew when another one is.
#[test]
fn a_service_that_comes_back_while_the_other_one_pauses_has_its_own_window() {
    let mut b = Bench::new(80 * MS);
    let slo_ns = Some(3 * MS);
    join(&mut b, slo_ns);
    for _ in 0..20 {
        unit(&mut b, slo_ns);
        b.now_ns += 2 * MS;
    }
    b.units(300, 12 * MS);
    let last_window = || {
        let set = |call| match call {
            Call::SetWindow { client: BATCH, window_ns } => Some(window_ns),
            _ => None,
        };
        calls().into_iter().filter_map(set).next_back()
    };
    assert_eq!(last_window(), Some(4 * MS), "the other one is idle");
    b.now_ns += 3_600_000 * MS;
    b.policy.began(b.now_ns, 9, b.now_ns, b.now_ns + 3 * MS);
    assert!(last_window().is_some_and(|ns| ns <= MS));
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
