use super::*;
use crate::experiment::{Action, Reason};
use crate::metric::Metric;
use crate::sample::Sample;
use crate::verdict::quantile_name;

/// An experiment in virtual time: requests of 10 ms under A, times `ratio` under B.
fn experiment(ratio: f64, blocks: usize, plan: Plan) -> Experiment {
    experiment_with(ratio, (5, 1.0), blocks, plan)
}

/// The same with so many requests in a block, and best-effort work under B times `work`.
fn experiment_with(
    ratio: f64,
    (requests, work): (usize, f64),
    blocks: usize,
    plan: Plan,
) -> Experiment {
    experiment_of((ratio, requests, work), blocks, plan, |_, _| {})
}

/// The same with what else each sample has.
fn experiment_of(
    (ratio, requests, work): (f64, usize, f64),
    blocks: usize,
    plan: Plan,
    more: impl Fn(Arm, &mut Sample),
) -> Experiment {
    let plan = Plan { block_ns_min: plan.block_ns, ..plan };
    let mut experiment = Experiment::new(plan, 0).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    let mut now_ns = 0;
    while experiment.blocks().len() < blocks {
        let mut sample = Sample::new();
        match experiment.next_action() {
            Action::Switch(_) => experiment.switched(now_ns, &sample),
            Action::Take { at_ns, cut } => {
                (sample.from_ns, sample.to_ns) = (now_ns, at_ns);
                now_ns = at_ns;
                let factor = if experiment.arm() == Arm::B { ratio } else { 1.0 };
                sample.work_ns =
                    if experiment.arm() == Arm::B { (1e8 * work) as u64 } else { 100_000_000 };
                sample.work_ns += random.u64(0..1_000_000);
                sample.launches = 100;
                for _ in 0..requests {
                    sample.request((10e6 * factor * (1.0 + 0.1 * random.f64())) as u64);
                }
                more(experiment.arm(), &mut sample);
                experiment.took(now_ns, cut, &sample);
            }
            Action::End => break,
        }
    }
    experiment
}

fn arms() -> [ArmSource; 2] {
    let arm = |name: &str| ArmSource {
        name: name.into(),
        digest: format!("{name}-digest"),
        ..ArmSource::default()
    };
    [arm("fifo"), arm("<b & \"q\">")]
}

fn report(ratio: f64, blocks: usize) -> Report {
    let plan = Plan { to_end: true, blocks_min_better: 60, ..Plan::of(Metric::HpP99) };
    Report::new(&experiment(ratio, blocks, plan), &arms(), 1, true)
}

#[test]
fn more_best_effort_work_at_the_cost_of_requests_is_not_better_unless_a_guard_allows_it() {
    let of = |ratio: f64, guards: &[&str], requests: usize, blocks_min_better: u32| {
        let guards = guards.iter().map(|guard| guard.parse().unwrap()).collect();
        let plan =
            Plan { guards, to_end: true, blocks_min_better, ..Plan::of(Metric::BeThroughput) };
        let experiment = experiment_with(ratio, (requests, 2.0), 60, plan);
        let report = Report::new(&experiment, &arms(), 1, true);
        (report.verdict, report.why)
    };
    let verdict = |ratio: f64, guards: &[&str]| of(ratio, guards, 50, 60);
    let (kept, why) = verdict(3.0, &[]);
    assert_eq!(kept, Verdict::KeepA, "{why}");
    assert!(why.contains("more best-effort work, but its hp_p") && why.contains("guard"), "{why}");
    // A guard on work says nothing of requests.
    assert_eq!(verdict(3.0, &["be_throughput>1%"]).0, Verdict::KeepA);
    assert_eq!(verdict(3.0, &["hp_p99<1s"]).0, Verdict::PromoteB);
    assert_eq!(verdict(1.0, &[]).0, Verdict::PromoteB);
    // A guard on the median says nothing of the tail; one relative to A says how much slower it may be.
    assert_eq!(verdict(3.0, &["hp_p50<1s"]).0, Verdict::KeepA);
    assert_eq!(verdict(1.4, &[]).0, Verdict::KeepA);
    assert_eq!(verdict(1.4, &["hp_p99<1.6*A"]).0, Verdict::PromoteB);
    // Slow blocks could be missed in 60, if there are requests, and no guard says what they may take.
    let (undecided, why) = of(1.0, &[], 50, 480);
    assert_eq!(undecided, Verdict::Undecided);
    assert!(why.contains("its requests are not slower is not shown yet and needs"), "{why}");
    assert_eq!(of(1.0, &["hp_p99<1s"], 50, 480).0, Verdict::PromoteB);
    assert_eq!(of(1.0, &[], 0, 480).0, Verdict::PromoteB);
}

#[test]
fn a_report_says_which_is_better_and_by_how_much() {
    let report = report(0.8, 60);
    assert_eq!((report.verdict, report.finding), (Verdict::PromoteB, Finding::BBetter));
    assert!((report.effect.ratio - 0.8).abs() < 0.02, "{:?}", report.effect);
    let (low, high) = (report.effect.low.unwrap(), report.effect.high.unwrap());
    assert!(low < report.effect.ratio && report.effect.ratio < high && high < 1.0);
    assert!(report.e_value > 20.0 && !report.sample_ratio.mismatch);
    assert_eq!((report.pairs, report.history.len(), report.a.blocks), (30, 30, 30));
    let text = report.text();
    for words in [
        "promote B: the p99 of all requests is 19.9 % lower",
        "B is better on hp_p99",
        "% lower",
        "95 % interval",
        "no difference is shown",
        "worst",
        "0 of 30 slow",
    ] {
        assert!(text.contains(words), "{words:?} is not in:\n{text}");
    }
}

#[test]
fn direction_follows_the_metric() {
    assert_eq!(report(1.3, 60).verdict, Verdict::KeepA);
    assert_eq!(report(1.0, 40).verdict, Verdict::Undecided);
    let (slo_ns, blocks_min_better) = (Some(10_500_000), 60);
    let plan = Plan { to_end: true, slo_ns, blocks_min_better, ..Plan::of(Metric::SloAttainment) };
    let report = Report::new(&experiment(0.9, 60, plan), &arms(), 1, false);
    assert_eq!(report.verdict, Verdict::PromoteB, "more requests are within the objective");
    assert!(report.history.is_empty());
}

#[test]
fn json_is_read_back_the_same() {
    let mut experiment = experiment(0.8, 24, Plan::of(Metric::HpP99));
    experiment.stop(5, Reason::Stopped, "enough");
    let report = Report::new(&experiment, &arms(), 1, true);
    assert!(report.text().contains("A/B test, stopped after"), "{}", report.text());
    let json = serde_json::to_string(&report).unwrap();
    let back: Report = serde_json::from_str(&json).unwrap();
    // Numbers may differ in their last digit.
    assert_eq!((back.text(), back.plan, back.ended), (report.text(), report.plan, report.ended));
    assert_eq!((back.blocks.len(), back.history.len()), (24, 12));
}

#[test]
fn an_experiment_that_has_just_begun_has_a_report() {
    let experiment = Experiment::new(Plan::of(Metric::BeThroughput), 0).unwrap();
    let report = Report::new(&experiment, &arms(), 0, true);
    assert_eq!((report.verdict, report.pairs), (Verdict::Undecided, 0));
    assert!(report.text().contains("running"));
}

#[test]
fn loads_that_are_far_apart_are_told_and_not_called_the_same() {
    let mut report = report(0.8, 60);
    let ratio = &mut report.sample_ratio;
    (ratio.a_per_s, ratio.b_per_s) = (12.6, 36.6);
    assert!(report.text().contains("2.9 times as many under one"), "{}", report.text());
    let notes = report.think_twice(Vec::new()).join("\n");
    assert!(notes.contains("far apart"), "{notes}");
    report.sample_ratio.a_per_s = 0.0;
    assert!(report.text().contains("one arm served none"), "{}", report.text());
    report.sample_ratio.mismatch = true;
    assert!(report.text().contains("NOT the same"), "{}", report.text());
    let ratio = &mut report.sample_ratio;
    (ratio.a_per_s, ratio.b_per_s, ratio.mismatch) = (36.0, 36.6, false);
    assert!(report.text().contains("no difference is shown"), "{}", report.text());
    let notes = report.think_twice(Vec::new());
    assert!(notes.len() == 1 && notes[0].contains("inside the program"), "{notes:?}");
}

/// B is 5 % slower.
#[test]
fn a_margin_prefers_a_b_that_is_hardly_worse() {
    let verdict = |margin: f64| {
        let plan = Plan { margin, to_end: true, blocks_min_better: 60, ..Plan::of(Metric::HpP99) };
        Report::new(&experiment(1.05, 60, plan), &arms(), 1, false)
    };
    assert_eq!(verdict(0.0).verdict, Verdict::KeepA);
    assert_eq!(verdict(0.02).verdict, Verdict::KeepA);
    let within = verdict(0.1);
    assert_eq!(within.verdict, Verdict::PromoteB, "{}", within.text());
    assert!(within.effect.low > Some(1.0), "it is worse all the same: {:?}", within.effect);
}

#[test]
fn an_estimate_of_a_test_that_ended_when_it_was_decided_is_said_to_be_inflated() {
    let of = |to_end: bool| {
        let plan = Plan { to_end, ..Plan::of(Metric::HpP99) };
        Report::new(&experiment(1.3, 200, plan), &arms(), 1, false)
    };
    let early = of(false);
    assert_eq!(early.ended.as_ref().map(|ended| ended.reason), Some(Reason::Decided));
    assert!(early.decided_early && early.blocks.len() < 100, "{}", early.blocks.len());
    assert!(early.text().contains("estimate is too large on average"), "{}", early.text());
    let whole = of(true);
    assert!(!whole.decided_early && whole.verdict == Verdict::KeepA);
    assert!(!whole.text().contains("too large on average"), "{}", whole.text());
}

/// An experiment of 60 blocks that was ended so.
fn ended(reason: Reason, arm: Option<Arm>) -> Report {
    let plan = Plan { to_end: true, blocks_min_better: 60, ..Plan::of(Metric::HpP99) };
    let mut experiment = experiment(0.8, 60, plan);
    experiment.stop(1, reason, "because");
    experiment.blame(arm);
    Report::new(&experiment, &arms(), 1, false)
}

#[test]
fn each_end_of_a_test_has_a_verdict() {
    for (reason, arm, verdict) in [
        (Reason::Decided, None, Verdict::PromoteB),
        (Reason::Guard, Some(Arm::B), Verdict::Withdrawn),
        (Reason::PolicyFailed, Some(Arm::B), Verdict::KeepA),
        (Reason::PolicyFailed, Some(Arm::A), Verdict::Invalid),
        (Reason::NotServed, Some(Arm::B), Verdict::KeepA),
        (Reason::NotServed, Some(Arm::A), Verdict::Invalid),
        (Reason::NoTraffic, None, Verdict::Invalid),
        (Reason::Interrupted, None, Verdict::Invalid),
    ] {
        let report = ended(reason, arm);
        assert_eq!(report.verdict, verdict, "{reason:?}");
        assert!(report.text().starts_with(verdict.as_str()), "{}", report.text());
    }
    let few = report(0.8, 2);
    assert_eq!((few.verdict, few.needs_s), (Verdict::Undecided, None));
    assert!(few.text().contains("no interval from fewer than 10 pairs"), "{}", few.text());
    assert_eq!((few.effect.low, few.mean_effect.high), (None, None));
    // 20 pairs: B is better in most, and 30 are asked for.
    let more = report(0.8, 40);
    assert_eq!(more.verdict, Verdict::Undecided);
    assert!(more.needs_s.unwrap() >= 20.0 && more.why.contains("more minutes"), "{more:?}");
}

/// Without a difference, what a difference of 10 % would take is forecast from the noise.
#[test]
fn an_undecided_test_says_how_much_longer_it_needs() {
    let plan = Plan { blocks_min_better: 20, to_end: true, ..Plan::of(Metric::HpP99) };
    let report = Report::new(&experiment(1.0, 40, plan), &arms(), 1, false);
    assert_eq!(report.verdict, Verdict::Undecided);
    assert_eq!(report.needs_s, Some(0.0), "{}", report.why);
    assert!(report.why.contains("would most likely have been"), "{}", report.why);
}

#[test]
fn the_percentile_that_the_rate_allows_is_named() {
    let report = report(1.0, 40);
    // Some 90 requests a block: the largest is the median's p99.2 or so.
    let share = report.block_quantile.unwrap();
    assert!((0.985..0.995).contains(&share), "{share}");
    assert_eq!(report.overall.unwrap().quantile, Some(0.99));
    let few = self::report(1.0, 4);
    let share = few.overall.unwrap().quantile.unwrap();
    assert!(share < 0.96, "{share}");
    assert!(few.text().contains(&format!("{} of all requests", quantile_name(share))));
}

#[test]
fn the_other_figures_have_intervals_too() {
    let report = report(0.8, 60);
    let p50 = &report.beside[0];
    assert_eq!((p50.name.as_str(), p50.pairs, report.beside.len()), ("hp_p50", 30, 3));
    assert!(p50.effect.low.unwrap() < 0.8 && p50.effect.high.unwrap() < 0.9, "{p50:?}");
    let requests = &report.beside[2];
    assert!((requests.effect.low.unwrap() - 1.0).abs() < 1e-6, "both serve the same: {requests:?}");
}

/// A never preempts; B does a hundred times a second, and lets best effort wait for 20 ms a second more.
#[test]
fn waits_and_preemptions_are_told_as_differences() {
    let of_arm = |arm: Arm, sample: &mut Sample| {
        let ms = sample.span_ns() / 1_000_000;
        let (waited_us, preemptions) =
            if arm == Arm::B { (30 * ms, ms / 10) } else { (10 * ms, 0) };
        (sample.be_waited_ns, sample.preemptions) = (waited_us * 1_000, preemptions);
    };
    let plan = Plan { to_end: true, slo_ns: Some(10_500_000), ..Plan::of(Metric::HpP99) };
    let few = experiment_of((1.0, 5, 1.0), 8, plan.clone(), of_arm);
    let few = Report::new(&few, &arms(), 1, false);
    assert!(few.rates.iter().all(|rate| (rate.low, rate.high, rate.pairs) == (None, None, 4)));
    let report = Report::new(&experiment_of((1.0, 5, 1.0), 60, plan, of_arm), &arms(), 1, false);
    let [waited, preemptions] = &report.rates[..] else { panic!("{:?}", report.rates) };
    assert_eq!((waited.name.as_str(), preemptions.name.as_str()), ("be_waited", "preemptions"));
    let near = |value: f64, wanted: f64| (value - wanted).abs() < 1e-3 * wanted;
    assert!(near(waited.a, 10e6) && near(waited.b, 30e6) && near(waited.difference, 20e6));
    assert!(waited.low.unwrap() > 0.0 && waited.high.unwrap() < 21e6, "{waited:?}");
    assert!(preemptions.a == 0.0 && near(preemptions.b, 100.0), "{preemptions:?}");
    assert!(preemptions.low.unwrap() > 0.0, "{preemptions:?}");
    let attainment = report.beside.iter().find(|b| b.name == "slo_attainment").unwrap();
    assert!(attainment.effect.low < Some(1.0) && attainment.effect.high > Some(1.0), "the same");
    let text = report.text();
    assert!(
        text.contains("be_waited    A 10 ms/s, B 30 ms/s: +20 ms/s; 95 % interval +"),
        "{text}"
    );
    assert!(text.contains("preemptions  A 0.0/s, B 100.0/s: +100.0/s; 95 % interval +"), "{text}");
    assert!(text.contains("slo_attainment"), "{text}");
}

/// Ten pairs agree: too few for the exact test at a seventh of the level, and enough for the approximate interval.
#[test]
fn a_difference_that_the_exact_test_does_not_show_is_not_told() {
    let plan = Plan { to_end: true, slo_ns: Some(10_500_000), ..Plan::of(Metric::HpP99) };
    let of_arm = |arm: Arm, sample: &mut Sample| sample.preemptions = u64::from(arm == Arm::B);
    let report = |pairs: usize| {
        let experiment = experiment_of((1.0, 5, 1.0), 2 * pairs, plan.clone(), of_arm);
        Report::new(&experiment, &arms(), 1, false)
    };
    let few = report(10);
    let exact = few.rates[1].difference > 0.0 && few.rates[1].low == Some(0.0);
    assert!(exact, "{:?}", few.rates);
    assert!(report(20).rates[1].low > Some(0.0));
}

#[test]
fn a_guard_that_will_be_breached_by_accident_is_told() {
    let guards = vec!["hp_p99<10.9ms".parse().unwrap(), "hp_p99<1s".parse().unwrap()];
    let plan = Plan { guards, to_end: true, ..Plan::of(Metric::HpP99) };
    // B is far from the limit, and A is not.
    let report = Report::new(&experiment(0.5, 60, plan), &arms(), 1, false);
    assert!(report.guards[0].accident.unwrap() > 0.9, "{:?}", report.guards);
    assert_eq!(report.guards[1].accident, Some(0.0));
    assert!(report.text().contains("by accident in up to 100 %"), "{}", report.text());
}
