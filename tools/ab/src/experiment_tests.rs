use super::*;
use crate::metric::Metric;
use proptest::prelude::*;

/// Runs an experiment in virtual time: `load` fills each sample.
struct Bench {
    experiment: Experiment,
    now_ns: u64,
    switches: Vec<Arm>,
}

impl Bench {
    fn new(plan: Plan) -> Self {
        let experiment = Experiment::new(plan, 1_000).unwrap();
        Bench { experiment, now_ns: 1_000, switches: Vec::new() }
    }

    fn run(&mut self, load: impl FnMut(Arm, &mut Sample)) -> Ended {
        self.run_until(|_| false, load).unwrap()
    }

    /// Until it ends, or this says so.
    fn run_until(
        &mut self,
        mut is_enough: impl FnMut(&Experiment) -> bool,
        mut load: impl FnMut(Arm, &mut Sample),
    ) -> Option<Ended> {
        let mut from_ns = self.now_ns;
        for _ in 0..1_000_000 {
            let mut sample = Sample::new();
            match self.experiment.next_action() {
                Action::Switch(arm) => {
                    self.switches.push(arm);
                    self.now_ns += 10_000;
                    from_ns = self.now_ns;
                    self.experiment.switched(self.now_ns, &sample);
                }
                Action::Take { at_ns, cut } => {
                    assert!(at_ns >= self.now_ns && at_ns <= self.now_ns + 2 * TICK_NS);
                    self.now_ns = at_ns;
                    (sample.from_ns, sample.to_ns) = (from_ns, at_ns);
                    from_ns = at_ns;
                    load(self.experiment.arm(), &mut sample);
                    self.experiment.took(at_ns, cut, &sample);
                }
                Action::End => return self.experiment.ended().cloned(),
            }
            if is_enough(&self.experiment) {
                return None;
            }
        }
        panic!("it does not end")
    }
}

fn plan(metric: Metric) -> Plan {
    Plan {
        block_ns: 400_000_000,
        block_ns_min: 400_000_000,
        time_ns_max: 60_000_000_000,
        guard_window_ns: 300_000_000,
        blocks_min_better: 20,
        ..Plan::of(metric)
    }
}

fn requests(sample: &mut Sample, count: u64, ns: u64) {
    (0..count).for_each(|n| sample.request(ns + n * 1_000));
}

#[test]
fn a_clear_effect_is_found_and_its_size_told() {
    let mut bench = Bench::new(plan(Metric::HpP99));
    let mut turn = 0;
    let ended = bench.run(|arm, sample| {
        turn += 1;
        let noise = 1_000 * (turn * 7_919 % 1_013);
        requests(sample, 5, if arm == Arm::A { 20_000_000 } else { 10_000_000 } + noise);
    });
    assert_eq!(ended.reason, Reason::Decided);
    let experiment = &bench.experiment;
    assert!(experiment.blocks().len() >= experiment.plan().blocks_min as usize);
    assert!((experiment.ratio() - 0.5).abs() < 0.05, "{}", experiment.ratio());
    assert!(!experiment.sample_ratio(Unit::Request).rejects(SAMPLE_RATIO_ALPHA));
}

#[test]
fn without_an_effect_it_runs_to_its_end_and_no_longer() {
    let mut bench = Bench::new(plan(Metric::HpP99));
    let ended = bench.run(|_, sample| requests(sample, 5, 10_000_000));
    assert_eq!(ended.reason, Reason::MaxTime);
    assert!(ended.after_ns <= bench.experiment.plan().time_ns_max);
    assert!(bench.experiment.blocks().len() >= 140);
    assert_eq!(bench.experiment.ratio(), 1.0);
}

/// Requests of either arm differ by factors, so 10 % would take hours.
#[test]
fn it_ends_early_if_there_is_no_hope_to_tell_a_small_difference() {
    let end = |to_end: bool, noise: f64| {
        let mut random = fastrand::Rng::with_seed(5);
        let mut bench = Bench::new(Plan { to_end, ..plan(Metric::HpP99) });
        let ended = bench.run(|_, sample| {
            requests(sample, 5, (10e6 * (noise * (random.f64() - 0.5)).exp()) as u64);
        });
        (ended, bench.experiment)
    };
    let (ended, experiment) = end(false, 6.0);
    assert_eq!((ended.reason, experiment.blocks().len()), (Reason::Futile, 80), "{ended:?}");
    assert!(ended.message.contains("10 % would take too long"), "{ended:?}");
    let conclusion = crate::verdict::conclude(&experiment, experiment.overall().as_ref());
    assert_eq!(conclusion.verdict, crate::Verdict::Undecided, "{conclusion:?}");
    assert!(conclusion.needs_s.unwrap() > 3.0 * 28.0, "{conclusion:?}");
    assert_eq!(end(true, 6.0).0.reason, Reason::MaxTime, "asked to go on");
    assert_eq!(end(false, 0.05).0.reason, Reason::MaxTime, "10 % would be seen in time");
}

/// B has its share of all the time that passes, which doubles; what A serves between pairs counts nowhere.
#[test]
fn b_serves_as_small_a_share_of_the_time_as_its_exposure() {
    let (exposure, time_ns_max) = (0.05, 600_000_000_000);
    let plan = Plan { exposure, time_ns_max, to_end: true, ..plan(Metric::HpP99) };
    let mut bench = Bench::new(plan);
    let mut served_ns = [0, 0];
    let mut shares = Vec::new();
    for pairs in [20, 40, 60, 80] {
        let before = served_ns;
        let is_enough = |experiment: &Experiment| {
            // Until A has had its rest.
            experiment.blocks().len() == 2 * pairs
                && experiment.phase == Phase::Between
                && experiment.rest_ns == 0
        };
        let ended = bench.run_until(is_enough, |arm, sample| {
            served_ns[arm.index()] += sample.span_ns();
            requests(sample, 5, 10_000_000);
        });
        assert_eq!(ended, None);
        let [a, b] = [0, 1].map(|arm| (served_ns[arm] - before[arm]) as f64);
        shares.push(b / (a + b));
    }
    for (share, expected) in shares.iter().zip([0.05, 0.1, 0.2, 0.4]) {
        assert!((share / expected - 1.0).abs() < 0.05, "{shares:?}");
    }
    let counted = bench.experiment.blocks().iter().map(|block| block.requests);
    assert!(counted.clone().all(|requests| requests == 30), "{:?}", counted.collect::<Vec<_>>());
    assert!(bench.experiment.blocks().chunks(2).all(|pair| pair[0].arm != pair[1].arm));
}

#[test]
fn a_breached_guard_ends_it_within_a_tick_of_bs_time_and_as_do_not_count() {
    let mut plan = plan(Metric::BeThroughput);
    plan.guards = vec!["hp_p99<8ms".parse().unwrap()];
    let mut bench = Bench::new(plan);
    let ended = bench.run(|arm, sample| {
        requests(sample, 5, if arm == Arm::A { 90_000_000 } else { 1_000_000 });
        sample.work_ns = 1_000_000;
        sample.launches = 1;
    });
    assert_eq!(ended.reason, Reason::MaxTime, "only A is over the limit");
    let mut bench = Bench::new(bench.experiment.plan().clone());
    let mut under_b = 0;
    let ended = bench.run(|arm, sample| {
        under_b += u32::from(arm == Arm::B);
        requests(sample, 5, if arm == Arm::B { 90_000_000 } else { 1_000_000 });
    });
    assert_eq!((ended.reason, ended.arm, under_b), (Reason::Guard, Some(Arm::B), 1));
    assert!(ended.message.contains("hp_p99<8ms"), "{}", ended.message);
    assert_eq!(bench.experiment.next_action(), Action::End);
}

#[test]
fn a_lost_turn_ends_it_and_names_the_arm() {
    let mut bench = Bench::new(plan(Metric::HpP99));
    let ended = bench.run(|arm, sample| {
        requests(sample, 5, 1_000_000);
        sample.faults = u64::from(arm == Arm::B);
    });
    assert_eq!((ended.reason, ended.arm), (Reason::PolicyFailed, Some(Arm::B)));
    assert!(ended.message.contains("arm B"));
}

/// Faults are counted for both policies together: what was lost before the exchange is the old one's.
#[test]
fn a_turn_lost_around_a_switch_is_of_the_policy_that_lost_it() {
    let switched_twice = |lost: [u64; 2]| {
        let mut experiment = Experiment::new(plan(Metric::HpP99), 0).unwrap();
        let mut at = 0;
        let mut arms = Vec::new();
        while arms.len() < 2 {
            let mut sample = Sample::new();
            match experiment.next_action() {
                Action::Switch(arm) => {
                    arms.push(arm);
                    let lost = if arms.len() == 2 { lost } else { [0; 2] };
                    sample.faults = lost[1];
                    experiment.replaced(at, lost[0]);
                    experiment.switched(at, &sample);
                }
                Action::Take { at_ns, cut } => {
                    (sample.from_ns, sample.to_ns, at) = (at, at_ns, at_ns);
                    experiment.took(at_ns, cut, &sample);
                }
                Action::End => break,
            }
        }
        (experiment.ended().cloned(), arms)
    };
    assert_eq!(switched_twice([0, 0]).0, None);
    for (lost, at, words) in
        [([1, 1], 0, "before it was replaced"), ([0, 1], 1, "while it took over")]
    {
        let (ended, arms) = switched_twice(lost);
        let ended = ended.unwrap();
        assert_eq!((ended.reason, ended.arm), (Reason::PolicyFailed, Some(arms[at])), "{ended:?}");
        assert!(ended.message.contains(words), "{ended:?}");
    }
    // Before the first block the policy is neither arm's instance.
    let mut experiment = Experiment::new(plan(Metric::HpP99), 0).unwrap();
    experiment.faults_before(3);
    experiment.replaced(5, 4);
    let ended = experiment.ended().unwrap();
    assert_eq!((ended.reason, ended.arm), (Reason::PolicyFailed, None));
    assert!(ended.message.contains("before the first block"), "{ended:?}");
}

#[test]
fn an_accident_of_a_guard_is_told_at_the_start_or_after_the_first_pair() {
    use crate::accident::{Before, limits_ns};
    let guards =
        ["hp_p99<8ms", "hp_p99<1.2*A", "be_throughput>1%"].map(|text| text.parse().unwrap());
    let plan = Plan { guards: guards.into(), ..plan(Metric::HpP99) };
    let limits = limits_ns(&plan);
    assert_eq!(limits, [6_666_666, 1_600_000, u64::MAX, u64::MAX, u64::MAX, u64::MAX]);
    let chances = |e: &Experiment| e.accidents().iter().map(|g| g.accident).collect::<Vec<_>>();
    let mut experiment = Experiment::new(plan.clone(), 0).unwrap();
    assert_eq!(chances(&experiment), [None, Some(0.05), None], "nothing is known");
    let before = |over: f64, near: f64| {
        let over_per_s = vec![over, near, 0.0, 0.0, 0.0, 0.0];
        Before { requests: 9_000, per_s: 30.0, over_per_s }
    };
    experiment.requests_before(before(0.0, 0.0));
    assert_eq!(chances(&experiment)[0], Some(0.0));
    // None that long was seen in 300 s, but the p99 is above a fifth of the limit.
    experiment.requests_before(before(0.0, 0.4));
    let unseen = chances(&experiment)[0].unwrap();
    assert!((unseen - (1.0 - (-0.3_f64).exp())).abs() < 1e-9, "{unseen}");
    experiment.requests_before(before(1.0, 1.0));
    assert!(chances(&experiment)[0] > Some(0.9), "{:?}", experiment.accidents());
    assert!(experiment.accidents()[0].warning().unwrap().contains("by accident in up to"));
    experiment.requests_before(Before { requests: 20, ..before(1.0, 1.0) });
    assert_eq!(chances(&experiment)[0], None, "too few");
    // B is far below the limit, and some of A's requests are above it.
    let mut bench = Bench::new(plan);
    let mut first = None;
    bench.run_until(
        |experiment| {
            let is_pair = experiment.blocks().len() == 2;
            first = first.or(is_pair.then(|| chances(experiment)[0]));
            is_pair
        },
        |arm, sample| {
            requests(sample, 5, if arm == Arm::A { 20_000_000 } else { 1_000_000 });
            (sample.work_ns, sample.launches) = (sample.span_ns() / 2, 1);
        },
    );
    assert!(first.flatten() > Some(0.9), "{first:?}");
}

/// Requests that are carried over a cut, that begin in the washout and that do not end, are marked as the others are.
#[test]
fn the_queue_is_known_of_every_marked_request() {
    use crate::report::Report;
    use crate::sample::UnderWay;
    let notes = |queue_known: bool| {
        let mut experiment =
            Experiment::new(Plan { to_end: true, ..plan(Metric::HpP99) }, 0).unwrap();
        let (mut now_ns, mut cut_ns) = (0, 0_u64);
        while experiment.blocks().len() < 40 {
            let mut sample = Sample::new();
            match experiment.next_action() {
                Action::Switch(_) => experiment.switched(now_ns, &sample),
                Action::Take { at_ns, cut } => {
                    (sample.from_ns, sample.to_ns, now_ns) = (now_ns, at_ns, at_ns);
                    let (units, limit_ns) = (sample.of_mut(Unit::Request), None);
                    let began_ns = at_ns.saturating_sub(5_000_000);
                    units.add_carried(&Carried {
                        began_ns,
                        ns: 5_000_000,
                        queue_known,
                        limit_ns,
                        is_age: false,
                    });
                    // Most of them in the washout before, and in the block before that.
                    for ago_ns in [10_000_000, 90_000_000] {
                        let began_ns = cut_ns.saturating_sub(ago_ns);
                        let ns = at_ns - began_ns;
                        units.carry(Carried { began_ns, ns, queue_known, limit_ns, is_age: false });
                    }
                    let open = [1_000_000, 300_000_000, 900_000_000];
                    for began_ns in open.map(|ago_ns| at_ns.saturating_sub(ago_ns)) {
                        units.under_way(UnderWay { began_ns, queue_known, limit_ns });
                    }
                    experiment.took(at_ns, cut, &sample);
                    cut_ns = if cut { at_ns } else { cut_ns };
                }
                Action::End => panic!("{:?}", experiment.ended()),
            }
        }
        let report = Report::new(&experiment, &Default::default(), now_ns, false);
        let counted = |of: fn(&Block) -> u64| report.blocks.iter().map(of).sum::<u64>();
        let own = counted(|block| block.open);
        assert!(own > 0 && counted(|block| block.requests) > 400 + own, "{:?}", report.blocks);
        report.caveats.join("\n")
    };
    assert!(notes(false).contains("inside the program"));
    assert!(!notes(true).contains("inside the program"), "{}", notes(true));
}

#[test]
fn without_traffic_it_gives_up() {
    for metric in [Metric::HpP99, Metric::BeThroughput] {
        let mut bench = Bench::new(plan(metric));
        let ended = bench.run(|_, _| {});
        assert_eq!(ended.reason, Reason::NoTraffic);
        assert_eq!(bench.experiment.pairs_empty(), 10);
        assert!(bench.experiment.differences().is_empty());
    }
}

#[test]
fn different_numbers_of_requests_are_noticed() {
    let mut bench = Bench::new(Plan { to_end: true, ..plan(Metric::HpP99) });
    bench.run(|arm, sample| requests(sample, if arm == Arm::A { 20 } else { 15 }, 10_000_000));
    assert!(bench.experiment.sample_ratio(Unit::Request).rejects(SAMPLE_RATIO_ALPHA));
}

/// Of as many requests B makes fewer tokens, each in half of the time.
#[test]
fn fewer_tokens_do_not_win_by_being_quick() {
    use crate::verdict::{Verdict, conclude};
    let run = |metric: Metric, guards: &[&str], [a, b]: [u64; 2]| {
        let guards = guards.iter().map(|guard| guard.parse().unwrap()).collect();
        let mut bench = Bench::new(Plan { guards, blocks_min_better: 60, ..plan(metric) });
        let mut turn = 0;
        let ended = bench.run(|arm, sample| {
            turn += 1;
            let noise = 1_000 * (turn * 7_919 % 1_013);
            let ms = if arm == Arm::A { 20 } else { 10 };
            requests(sample, 5, ms * 1_000_000 + noise);
            let (count, limit_ns) = (if arm == Arm::A { a } else { b }, Some(20_500_000));
            sample.of_mut(Unit::Token).add(ms * 1_000_000 + noise, count, limit_ns);
        });
        let conclusion = conclude(&bench.experiment, bench.experiment.overall().as_ref());
        let report = crate::Report::new(&bench.experiment, &Default::default(), 0, false);
        (ended, conclusion, report)
    };
    for metric in [Metric::TokenP99, Metric::TpotAttainment] {
        assert_eq!(run(metric, &[], [20, 20]).1.verdict, Verdict::PromoteB);
        assert_eq!(run(metric, &[], [20, 18]).1.verdict, Verdict::PromoteB, "as each takes longer");
        let (ended, conclusion, _) = run(metric, &[], [20, 2]);
        assert_eq!((ended.reason, ended.arm), (Reason::NotServed, Some(Arm::B)), "{ended:?}");
        assert!(conclusion.why.contains("tokens while A served"), "{conclusion:?}");
        let (_, conclusion, report) = run(metric, &[], [20, 15]);
        assert_eq!(conclusion.verdict, Verdict::Invalid, "{conclusion:?}");
        assert!(conclusion.why.contains("B served fewer tokens than A"), "{conclusion:?}");
        assert!(
            report.text().contains("tokens/s under A and B: NOT the same"),
            "{}",
            report.text()
        );
    }
    // A guard is of tokens.
    let (ended, ..) = run(Metric::HpP99, &["token_p99<50ms"], [20, 2]);
    assert_eq!((ended.reason, ended.arm), (Reason::NotServed, Some(Arm::B)), "{ended:?}");
    let (_, conclusion, _) = run(Metric::HpP99, &["tpot_attainment>1%"], [20, 15]);
    assert_eq!(conclusion.verdict, Verdict::Invalid, "{conclusion:?}");
    // Nothing is: how many there are is no matter.
    let (_, conclusion, report) = run(Metric::HpP99, &[], [20, 2]);
    assert_eq!(conclusion.verdict, Verdict::PromoteB, "{conclusion:?}");
    assert!(!report.text().contains("tokens/s"), "{}", report.text());
}

#[test]
fn the_washout_is_not_counted() {
    let mut bench = Bench::new(plan(Metric::HpP99));
    let ended = bench.run(|_, sample| requests(sample, 5, 10_000_000));
    assert_eq!(ended.reason, Reason::MaxTime);
    for block in bench.experiment.blocks() {
        assert!((block.measured_s - 0.3).abs() < 1e-6, "{block:?}");
    }
}

#[test]
fn a_failed_start_and_a_stop_end_it_once() {
    let mut experiment = Experiment::new(plan(Metric::HpP99), 0).unwrap();
    experiment.failed(7, None, "no such file".into());
    experiment.stop(9, Reason::Stopped, "later");
    let ended = experiment.ended().unwrap();
    assert_eq!((ended.reason, ended.arm, ended.after_ns), (Reason::PolicyFailed, None, 7));
    assert_eq!(experiment.next_action(), Action::End);
}

proptest! {
    /// Whatever is measured and however late the caller is: blocks come in pairs of one of
    /// each, every block begins with a switch, and it ends.
    #[test]
    fn any_course_of_events_ends_with_pairs_of_one_of_each(
        seed: u64, late in proptest::collection::vec(0..200_000_000u64, 1..20),
    ) {
        let plan = Plan { seed, time_ns_max: 8_000_000_000, ..plan(Metric::HpP99) };
        let mut bench = Bench::new(plan);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut at = 0;
        let mut now_ns = 0;
        let ended = loop {
            let mut sample = Sample::new();
            match bench.experiment.next_action() {
                Action::Switch(arm) => {
                    bench.switches.push(arm);
                    bench.experiment.switched(now_ns, &sample);
                }
                Action::Take { at_ns, cut } => {
                    at += 1;
                    sample.from_ns = now_ns;
                    now_ns = now_ns.max(at_ns) + late[at % late.len()];
                    sample.to_ns = now_ns;
                    requests(&mut sample, random.u64(0..8), random.u64(1..100_000_000));
                    bench.experiment.took(now_ns, cut, &sample);
                }
                Action::End => break bench.experiment.ended().unwrap().clone(),
            }
            prop_assert!(at < 10_000);
        };
        prop_assert!(matches!(
            ended.reason, Reason::MaxTime | Reason::Decided | Reason::NoTraffic
        ));
        let blocks = bench.experiment.blocks();
        prop_assert_eq!(blocks.len(), bench.switches.len());
        prop_assert!(blocks.chunks(2).all(|p| p.len() == 2 && p[0].arm != p[1].arm));
        let said = bench.experiment.differences().len() + bench.experiment.pairs_empty() as usize;
        prop_assert_eq!(said * 2, blocks.len());
    }
}

/// However much better it is, a B is not promoted if a guard had nothing to judge: it protected nobody.
#[test]
fn a_guard_without_anything_to_judge_keeps_b_from_being_promoted() {
    use crate::verdict::{Verdict, conclude};
    let verdict = |guard: &str, tokens: u64| {
        let guards = vec![guard.parse().unwrap()];
        let mut bench = Bench::new(Plan { guards, ..plan(Metric::HpP99) });
        let mut turn = 0;
        bench.run(|arm, sample| {
            turn += 1;
            let ns = if arm == Arm::A { 20_000_000 } else { 10_000_000 };
            requests(sample, 5, ns + 1_000 * (turn * 7_919 % 1_013));
            sample.of_mut(Unit::Token).add(1_000_000, tokens, Some(2_000_000));
        });
        let conclusion = conclude(&bench.experiment, bench.experiment.overall().as_ref());
        (conclusion.verdict, conclusion.why)
    };
    for guard in ["token_p99<50ms", "tpot_attainment>90%", "token_p99<1.2*A", "be_fairness>0.9"] {
        let (without, why) = verdict(guard, 0);
        assert_eq!(without, Verdict::Invalid, "{why}");
        assert!(why.contains(guard) && why.contains("has judged nothing"), "{why}");
        if guard != "be_fairness>0.9" {
            assert_eq!(verdict(guard, 5).0, Verdict::PromoteB);
        }
    }
}

#[test]
fn a_metric_without_anything_to_measure_ends_the_test_and_says_what_is_missing() {
    for (metric, word) in [
        (Metric::TokenP99, "no token of a high-priority client"),
        (Metric::TpotAttainment, "no token of a client with an objective"),
        (Metric::SloAttainment, "no request of a client with an objective"),
    ] {
        let mut bench = Bench::new(plan(metric));
        let ended = bench.run(|_, sample| requests(sample, 5, 10_000_000));
        assert_eq!(ended.reason, Reason::NoTraffic);
        assert!(ended.message.contains(word), "{}", ended.message);
    }
}

/// A token belongs to the block in which it began; what B leaves for A to end is B's.
#[test]
fn tokens_that_end_after_a_cut_belong_where_they_began() {
    let mut bench = Bench::new(Plan { to_end: true, ..plan(Metric::TokenP99) });
    let mut last = None;
    bench.run_until(
        |e| e.blocks().len() == 40,
        |arm, sample| {
            let tokens = sample.of_mut(Unit::Token);
            tokens.add(10_000_000, 5, None);
            // What began right before the switch ends after it.
            if let Some((before, at_ns)) = last.filter(|(before, _)| *before != arm) {
                let ns = if before == Arm::B { 200_000_000 } else { 20_000_000 };
                let unit = Carried {
                    began_ns: at_ns - 1,
                    ns,
                    queue_known: false,
                    limit_ns: None,
                    is_age: false,
                };
                tokens.carry(unit);
            }
            last = Some((arm, sample.to_ns));
        },
    );
    let longest = |arm| {
        let blocks = bench.experiment.blocks().iter().filter(|block| block.arm == arm);
        blocks.filter_map(|block| block.token_p99_ns).max().unwrap()
    };
    assert!(longest(Arm::A) < 25_000_000 && longest(Arm::B) > 190_000_000);
    assert!(bench.experiment.blocks().iter().all(|block| block.requests == 0 && block.tokens >= 5));
}
