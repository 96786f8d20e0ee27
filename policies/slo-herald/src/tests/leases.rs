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
fn there_is_no_lease_for_several_clients() {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort));
    assert_eq!(b.lease(10 * US), 0);
    b.policy.left(b.now_ns, 3);
    assert!(b.lease(10 * US) > 0);
}

/// A service that spares 48 SMs, and a launch that can be limited to them.
fn spares_sms() -> (Bench, Launch) {
    let mut b = Bench::new(20 * MS);
    b.units(8, MS);
    assert!(b.policy.services[0].share.remember(&[1, 132, 1_000, 0, 0, 0, 0, 48, 0, 0, 48, 0, 0]));
    b.begin();
    let offered = FormsOffered::SM_LIMITED;
    (b, Launch { offered, sm_count: 132, grid_blocks: 1_000, ..launch() })
}

fn widths_set() -> Vec<(ClientId, u32)> {
    let width = |call: &Call| match call {
        Call::SetWidth { client, sms } => Some((*client, *sms)),
        _ => None,
    };
    calls().iter().filter_map(width).collect()
}

#[test]
fn a_client_whose_launches_all_run_on_spared_sms_has_them_as_its_width() {
    let (mut b, can) = spares_sms();
    let of = |b: &Bench, ns| {
        let Launch { now_ns, client, state, high_clients, .. } = b.asked(ns);
        Launch { now_ns, client, state, high_clients, predicted_ns: ns, ..can }
    };
    let first = of(&b, 50 * US);
    (0..63).for_each(|_| {
        assert_eq!(b.policy.decide(&first).decision, Decision::SmLimited(48));
        // A light one neither counts nor ends the row.
        assert_eq!(b.decide(4 * US), RUNS);
    });
    assert_eq!(widths_set(), []);
    let left_ns = b.policy.services[0].left_ns();
    assert_eq!(b.policy.decide(&first).decision, RUNS, "on its width, without a lease");
    assert_eq!(widths_set(), [(BATCH, 48)]);
    assert_eq!(b.policy.decide(&of(&b, 4 * US)).decision, RUNS, "a light one, too");
    assert_eq!(b.policy.decide(&of(&b, 0)).decision, Decision::SmLimited(48), "never measured");
    assert_eq!(b.policy.services[0].left_ns(), left_ns, "not charged");
    b.end(MS);
    // Between units all SMs are free.
    assert!(matches!(b.policy.decide(&of(&b, 50 * US)).decision, Decision::Run(_)));
    assert_eq!(widths_set(), [(BATCH, 0)]);
}

#[test]
fn a_width_ends_with_the_first_launch_that_runs_elsewhere() {
    let ends: [fn(&mut Bench, &Launch); 3] = [
        // It takes time of the unit.
        |b, _| assert_eq!(b.decide_on(&Launch { grid_blocks: 1_000, ..b.asked(MS) }), RUNS),
        |b, can| {
            b.policy.services[0].share.remember(&[1, 132, 1_000, 0, 0, 0, 0, 32, 0, 0, 48, 0, 0]);
            b.end(MS);
            b.begin();
            b.policy.decide(&Launch { now_ns: b.now_ns, ..*can });
        },
        |b, _| b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort)),
    ];
    for (at, end) in ends.into_iter().enumerate() {
        let (mut b, can) = spares_sms();
        let Launch { now_ns, client, state, high_clients, .. } = b.asked(0);
        let can = Launch { now_ns, client, state, high_clients, predicted_ns: 50 * US, ..can };
        for _ in 0..64 {
            b.decide_on(&can);
        }
        assert_eq!(widths_set(), [(BATCH, 48)]);
        end(&mut b, &can);
        assert_eq!(widths_set(), [(BATCH, 0)], "end {at}");
    }
}
