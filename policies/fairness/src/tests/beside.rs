//! Beside high-priority work, launches that the policy keeps back, and leases.

use super::*;

#[test]
fn time_goes_by_weight_beside_high_priority_work_that_never_pauses() {
    for (first, second) in [(200 * US, 200 * US), (20 * US, 2 * MS), (2 * MS, 20 * US)] {
        let programs = [ahead(3, first), ahead(1, second)];
        let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
        bench.beside_high = true;
        bench.run_until(2 * SECOND);
        ratio_is(&bench, 3.0, 0.06);
        assert!(bench.busy() > 0.98, "{}", bench.busy());
    }
    // Who waits for each launch holds nobody back for long.
    let mut bench =
        Bench::new(Rounds::side_by_side(TURN), &[one_by_one(3, 200 * US, 5 * MS), ahead(1, MS)]);
    bench.beside_high = true;
    bench.run_until(2 * SECOND);
    assert!(bench.busy() > 0.9, "{}", bench.busy());
}

#[test]
fn nobody_waits_for_one_that_the_policy_keeps_back() {
    for kept_ns in [30 * US, 4 * MS] {
        let programs = [ahead(1, 100 * US), ahead(3, kept_ns)];
        let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
        (bench.beside_high, bench.kept_back) = (true, Some(1));
        bench.run_until(SECOND);
        assert!(bench.busy() > 0.98, "{}", bench.busy());
        // It is let in from now on.
        bench.kept_back = None;
        bench.rounds.look_again();
        let before = bench.charged_ns();
        bench.run_until(3 * SECOND);
        let got: Vec<u64> = bench.charged_ns().iter().zip(before).map(|(a, b)| a - b).collect();
        let ratio = got[1] as f64 / got[0] as f64;
        assert!((2.5..4.5).contains(&ratio), "{got:?}");
    }
}

#[test]
fn leases_leave_shares_by_weight_and_spare_programs_that_their_cpu_limits_the_questions() {
    for kernel_ns in [20 * US, 200 * US] {
        let mut bench =
            Bench::new(Rounds::side_by_side(TURN), &[ahead(3, kernel_ns), ahead(1, kernel_ns)]);
        bench.leases = true;
        bench.run_until(2 * SECOND);
        ratio_is(&bench, 3.0, 0.08);
    }
    // Those that are alike.
    for (first, second) in [(20 * US, 20 * US), (200 * US, 20 * US), (2 * MS, 20 * US)] {
        let mut bench =
            Bench::new(Rounds::side_by_side(TURN), &[ahead(1, first), ahead(1, second)]);
        bench.leases = true;
        bench.run_until(2 * SECOND);
        ratio_is(&bench, 1.0, 0.1);
    }
    let programs = [one_by_one(1, 10 * US, 30 * US), one_by_one(3, 10 * US, 30 * US)];
    let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
    bench.leases = true;
    bench.run_until(SECOND);
    let launches = (bench.charged_ns().iter().sum::<u64>() / (10 * US)) as u32;
    assert!(launches > 40_000 && bench.asked * 8 < launches, "{} of {launches}", bench.asked);
    // Long kernels are asked about.
    let programs = [one_by_one(1, MS, MS), one_by_one(1, MS, MS)];
    let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
    bench.leases = true;
    bench.run_until(SECOND);
    assert!(bench.states.iter().all(|state| state.leased == 0));
}

#[test]
fn those_that_are_alike_have_leases_also_while_they_wait_for_each_other() {
    for weight in [1, 3] {
        let mut rounds = Rounds::side_by_side(TURN);
        rounds.joined(&client(0, BestEffort));
        rounds.joined(&Client { weight, ..client(1, BestEffort) });
        let state = |id| ClientState { in_flight: 1, ..client_state(id, BestEffort) };
        let asked = |client, now_ns| Launch {
            client,
            now_ns,
            predicted_ns: 20 * US,
            high_idle_ns: NEVER,
            ..launch()
        };
        // The first one has used far more, the second one waits.
        set_clients(vec![state(0), ClientState { waiting_since_ns: 0, ..state(1) }]);
        let _ = rounds.hold(&asked(0, MS));
        set_clients(vec![
            ClientState { charged_ns: 100 * MS, ..state(0) },
            ClientState { waiting_since_ns: 0, ..state(1) },
        ]);
        assert!(rounds.hold(&asked(0, 30 * MS)).is_some(), "of weight {weight}");
        assert_eq!(rounds.hold(&asked(1, 31 * MS)), None);
        assert_eq!(rounds.lease(&asked(1, 31 * MS)) > 0, weight == 1);
        assert!(rounds.lease(&asked(1, 100 * MS)) > 0);
    }
}
