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
    for words in ["B is better on hp_p99", "% lower", "95 % interval", "not told apart"] {
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
