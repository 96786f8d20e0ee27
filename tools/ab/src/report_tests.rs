use super::*;
use crate::experiment::{Action, Reason};
use crate::sample::Sample;

/// An experiment in virtual time: requests of 10 ms under A, times `ratio` under B.
fn experiment(ratio: f64, blocks: usize, plan: Plan) -> Experiment {
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
                for _ in 0..5 {
                    sample.request((10e6 * factor * (1.0 + 0.1 * random.f64())) as u64);
                }
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
    let plan = Plan { to_end: true, ..Plan::of(Metric::HpP99) };
    Report::new(&experiment(ratio, blocks, plan), &arms(), 1, true)
}

#[test]
fn a_report_says_which_is_better_and_by_how_much() {
    let report = report(0.8, 60);
    assert_eq!(report.verdict, Verdict::BBetter);
    assert!((report.effect.ratio - 0.8).abs() < 0.02, "{:?}", report.effect);
    let (low, high) = (report.effect.low.unwrap(), report.effect.high.unwrap());
    assert!(low < report.effect.ratio && report.effect.ratio < high && high < 1.0);
    assert!(report.e_value > 20.0 && !report.sample_ratio.mismatch);
    assert_eq!((report.pairs, report.history.len(), report.a.blocks), (30, 30, 30));
    let text = report.text();
    for words in ["B is better on hp_p99", "% lower", "95 % interval", "no difference is shown"] {
        assert!(text.contains(words), "{words:?} is not in:\n{text}");
    }
}

#[test]
fn direction_follows_the_metric() {
    assert_eq!(report(1.3, 60).verdict, Verdict::BWorse);
    assert_eq!(report(1.0, 40).verdict, Verdict::Undecided);
    let plan = Plan { to_end: true, slo_ns: Some(10_500_000), ..Plan::of(Metric::SloAttainment) };
    let report = Report::new(&experiment(0.9, 60, plan), &arms(), 1, false);
    assert_eq!(report.verdict, Verdict::BBetter, "more requests are within the objective");
    assert!(report.history.is_empty());
}

#[test]
fn json_is_read_back_the_same() {
    let mut experiment = experiment(0.8, 24, Plan::of(Metric::HpP99));
    experiment.stop(5, Reason::Stopped, "enough");
    let report = Report::new(&experiment, &arms(), 1, true);
    assert!(report.text().starts_with("A/B test, decided"), "{}", report.text());
    let json = serde_json::to_string(&report).unwrap();
    let back: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_value(&back).unwrap(), serde_json::to_value(&report).unwrap());
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
    assert!(report.think_twice()[0].contains("far apart"), "{:?}", report.think_twice());
    report.sample_ratio.a_per_s = 0.0;
    assert!(report.text().contains("one arm served none"), "{}", report.text());
    report.sample_ratio.mismatch = true;
    assert!(report.text().contains("NOT the same"), "{}", report.text());
    let ratio = &mut report.sample_ratio;
    (ratio.a_per_s, ratio.b_per_s, ratio.mismatch) = (36.0, 36.6, false);
    assert!(report.text().contains("no difference is shown"), "{}", report.text());
    assert!(report.think_twice().is_empty(), "{:?}", report.think_twice());
}

#[test]
fn each_end_of_a_test_has_an_outcome() {
    let mut better = report(0.8, 60);
    assert_eq!(better.outcome(), Outcome::BBetter);
    assert_eq!(report(1.25, 60).outcome(), Outcome::BWorse);
    assert_eq!(report(0.8, 2).outcome(), Outcome::Undecided);
    better.sample_ratio.mismatch = true;
    assert_eq!(better.outcome(), Outcome::Invalid, "of another load");
    let ended = |reason| Ended { reason, arm: None, message: String::new(), after_ns: 1 };
    for (reason, outcome) in [
        (Reason::Guard, Outcome::Guard),
        (Reason::PolicyFailed, Outcome::Invalid),
        (Reason::NoTraffic, Outcome::Invalid),
        (Reason::Interrupted, Outcome::Invalid),
    ] {
        let report = Report { ended: Some(ended(reason)), ..report(0.8, 60) };
        assert_eq!(report.outcome(), outcome, "{reason:?}");
    }
}
