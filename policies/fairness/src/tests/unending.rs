//! Programs whose launches run beside one another, long ones and such that do not end.

use super::*;

const STEP: u64 = 250 * US;

/// It always has a launch ready, once the last one has ended, whatever the others do.
#[derive(Clone, Copy)]
struct Runs {
    weight: u32,
    kernel_ns: u64,
    predicted_ns: u64,
}

/// Nobody knows how long it takes.
fn stuck(weight: u32) -> Runs {
    Runs { weight, kernel_ns: 1_000 * SECOND, predicted_ns: 0 }
}

/// GPU time that each had.
fn had(mut rounds: Rounds, programs: &[Runs], seconds: u64) -> Vec<u64> {
    let ids = || programs.iter().zip(0_u32..);
    for (program, id) in ids() {
        rounds.joined(&Client { weight: program.weight, ..client(id, BestEffort) });
    }
    let mut ends_ns = vec![None; programs.len()];
    let mut charged_ns = vec![0; programs.len()];
    let mut asks_ns = vec![0; programs.len()];
    for now_ns in (0..seconds * SECOND).step_by(STEP as usize) {
        for at in 0..programs.len() {
            if ends_ns[at].is_some_and(|ns| ns <= now_ns) {
                charged_ns[at] += programs[at].kernel_ns;
                ends_ns[at] = None;
                // Whoever waits for that is offered again.
                asks_ns.fill(now_ns);
            }
        }
        for (at, (program, id)) in ids().enumerate() {
            if ends_ns[at].is_some() || now_ns < asks_ns[at] {
                continue;
            }
            let state = |(at, (program, id)): (usize, (&Runs, u32))| ClientState {
                waiting_since_ns: if ends_ns[at].is_none() { now_ns } else { NEVER },
                in_flight: ends_ns[at].is_some().into(),
                in_flight_ns: ends_ns[at].map_or(0, |_| program.predicted_ns),
                charged_ns: charged_ns[at],
                ..client_state(id, BestEffort)
            };
            set_clients(ids().enumerate().map(state).collect());
            let asked = Launch {
                client: id,
                now_ns,
                predicted_ns: if program.predicted_ns > 0 { program.predicted_ns } else { UNKNOWN },
                high_idle_ns: NEVER,
                ..launch()
            };
            match rounds.hold(&asked) {
                None => ends_ns[at] = Some(now_ns + program.kernel_ns),
                Some(Decision::Hold(ns) | Decision::HoldUntilCompletion(ns)) => {
                    asks_ns[at] = now_ns + ns;
                }
                Some(other) => panic!("{other:?}"),
            }
        }
    }
    charged_ns
}

fn both_ways() -> [Rounds; 2] {
    [Rounds::side_by_side(TURN), Rounds::one_at_a_time(TURN)]
}

#[test]
fn launches_that_do_not_end_take_no_more_than_their_share() {
    for rounds in both_ways() {
        for (count, weight) in [(1, 1), (4, 1), (16, 1), (1, 10), (1, 1_000)] {
            // Where contexts take turns they use their own.
            let share = match rounds.one_at_a_time {
                true => 0.8 / (1 + count as u32 * weight) as f64,
                false => 0.8,
            };
            let mut programs = vec![Runs { weight: 1, kernel_ns: MS, predicted_ns: MS }];
            programs.resize(1 + count, stuck(weight));
            let had = had(rounds.clone(), &programs, 10);
            let got = had[0] as f64 / (10 * SECOND) as f64;
            assert!(got > share, "{count} of weight {weight}: {got}");
        }
    }
}

#[test]
fn time_goes_by_weight_if_launches_are_longer_than_turns() {
    for kernel_ns in [30 * MS, 50 * MS, 100 * MS] {
        for weight in [3, 10] {
            let programs = [ahead(weight, kernel_ns), ahead(1, kernel_ns)];
            let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
            bench.run_until(60 * SECOND);
            ratio_is(&bench, weight.into(), 0.25);
        }
    }
}

#[test]
fn those_that_idle_leave_their_places_to_those_that_work() {
    for rounds in both_ways() {
        let idle = Program { works_ns: (u64::MAX, u64::MAX), ..ahead(1, MS) };
        let mut programs = vec![idle; MEMBERS_MAX];
        programs.extend([ahead(3, MS), ahead(1, MS)]);
        let mut bench = Bench::new(rounds, &programs);
        // It is first to be seen that the others idle.
        bench.run_until(2 * SECOND);
        let before = bench.charged_ns();
        bench.run_until(6 * SECOND);
        let got: Vec<u64> = bench.charged_ns().iter().zip(before).map(|(a, b)| a - b).collect();
        let ratio = got[MEMBERS_MAX] as f64 / got[MEMBERS_MAX + 1] as f64;
        assert!((2.8..3.2).contains(&ratio), "{ratio}");
    }
}

#[test]
fn where_one_launches_at_a_time_more_clients_than_places_have_them_in_turn() {
    let programs = vec![ahead(1, MS); MEMBERS_MAX + 6];
    let mut bench = Bench::new(Rounds::one_at_a_time(TURN), &programs);
    bench.run_until(60 * SECOND);
    let had = bench.charged_ns();
    let mean = had.iter().sum::<u64>() / had.len() as u64;
    assert!(had.iter().all(|ns| (mean / 3..mean * 3 / 2).contains(ns)), "{mean}: {had:?}");
    assert!(bench.busy() > 0.95, "{}", bench.busy());
}

#[test]
fn who_pauses_between_launches_keeps_its_share_beside_long_ones() {
    for kernel_ns in [10 * MS, 50 * MS, 250 * MS] {
        let programs = [one_by_one(1, kernel_ns, 300 * US), ahead(1, 200 * US)];
        for programs in [programs, [programs[1], programs[0]]] {
            let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
            bench.run_until(30 * SECOND);
            ratio_is(&bench, 1.0, 0.2);
            assert!(bench.busy() > 0.9, "{}", bench.busy());
        }
    }
}

#[test]
fn rounds_are_short_again_once_who_had_long_launches_idles() {
    let long = Program { works_ns: (0, 2 * SECOND), ..ahead(1, 200 * MS) };
    let programs = [long, ahead(1, MS), ahead(1, MS)];
    let mut bench = Bench::new(Rounds::side_by_side(TURN), &programs);
    bench.run_until(SECOND);
    assert_eq!(bench.rounds.long_turn_ns, LONGEST * 200 * MS);
    bench.run_until(10 * SECOND);
    assert_eq!(bench.rounds.long_turn_ns, TURN);
}
