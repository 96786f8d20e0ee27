use super::*;
use crate::design::{Arm, Plan};
use crate::experiment::{Experiment, Reason};
use crate::report::{ArmSource, Block, OverallReport};

/// A report of `pairs` pairs in which B's figure is `ratio` times A's, with some noise.
fn report(seed: u64, pairs: usize, ratio: f64) -> Report {
    let plan = Plan { seed, blocks_min_better: 240, ..Plan::of(Metric::HpP99) };
    let mut experiment = Experiment::new(plan, 0).unwrap();
    experiment.stop(1, Reason::Stopped, "");
    let arm =
        |name: &str| ArmSource { name: name.into(), digest: name.into(), ..Default::default() };
    let mut report = Report::new(&experiment, &[arm("a"), arm("b")], 1, false);
    let effect = Effect { ratio, low: Some(ratio * 0.97), high: Some(ratio / 0.97) };
    let (quantile, a, b, b_higher) = (Some(0.99), 1.0, ratio, 0.5);
    report.overall = Some(OverallReport { quantile, a, b, effect, b_higher });
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..pairs {
        let first = if random.bool() { Arm::A } else { Arm::B };
        let mut difference = 0.0;
        for arm in [first, first.other()] {
            let figure = 10e6 * (1.0 + 0.2 * random.f64());
            difference += if arm == Arm::B { (figure * ratio).ln() } else { -figure.ln() };
            report.blocks.push(Block {
                arm,
                began_s: 0.0,
                measured_s: 1.0,
                value: Some(if arm == Arm::B { figure * ratio } else { figure }),
                requests: 100,
                open: 0,
                queue_known: 0,
                requests_judged: 0,
                requests_within: 0,
                tokens: 0,
                tokens_open: 0,
                tokens_judged: 0,
                tokens_within: 0,
                token_p99_ns: None,
                be_fairness: None,
                hp_p50_ns: None,
                hp_p99_ns: None,
                be_launches: 1,
                be_work_ns: 1,
                be_waited_ns: 0,
                preemptions: 0,
            });
        }
        report.differences.push(difference);
    }
    report
}

fn rejects(report: &Report) -> bool {
    let mut betting = Betting::new();
    report.differences.iter().for_each(|d| betting.push(*d));
    betting.rejects(0.05)
}

#[test]
fn together_they_show_what_none_shows_alone() {
    let reports: Vec<Report> = (1..=12).map(|seed| report(seed, 10, 0.97)).collect();
    assert!(reports.iter().filter(|report| rejects(report)).count() < 3, "each alone decides");
    let all = combine(&reports).unwrap();
    assert_eq!((all.verdict, all.pairs, all.reports), (Verdict::PromoteB, 120, 12), "{all:?}");
    let (low, high) = (all.effect.low.unwrap(), all.effect.high.unwrap());
    assert!(low < 0.97 && 0.97 < high && high < 1.0, "{all:?}");
    assert!(all.text().contains("promote B"), "{}", all.text());
    // One block fewer than a rare slow state needs to be seen in.
    let few = combine(&reports[..11]).unwrap();
    assert_eq!(few.verdict, Verdict::Undecided, "{few:?}");
}

#[test]
fn what_is_worse_over_all_requests_or_was_withdrawn_is_not_promoted() {
    let mut reports: Vec<Report> = (1..=8).map(|seed| report(seed, 20, 0.8)).collect();
    for report in &mut reports {
        let overall = report.overall.as_mut().unwrap();
        overall.effect = Effect { ratio: 2.0, low: Some(1.5), high: Some(2.5) };
    }
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::KeepA);
    reports[3].overall = None;
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::Undecided);
    reports[5].verdict = Verdict::Withdrawn;
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::Withdrawn);
}

/// One core on which B failed is not outvoted by those on which it did not.
#[test]
fn a_b_that_failed_in_one_report_is_not_promoted_by_the_others() {
    let good: Vec<Report> = (1..=8).map(|seed| report(seed, 20, 0.8)).collect();
    assert_eq!(combine(&good).unwrap().verdict, Verdict::PromoteB);
    for (verdict, reason) in [
        (Verdict::KeepA, Reason::NotServed),
        (Verdict::KeepA, Reason::PolicyFailed),
        (Verdict::Invalid, Reason::NoTraffic),
        // Worse in its own blocks, or over all requests.
        (Verdict::KeepA, Reason::MaxTime),
    ] {
        let mut reports = good.clone();
        reports[6].verdict = verdict;
        reports[6].ended.as_mut().unwrap().reason = reason;
        reports[6].why = "because".into();
        let all = combine(&reports).unwrap();
        assert_eq!((all.verdict, all.why.as_str()), (verdict, "report 7: because"), "{reason:?}");
    }
    let mut reports = good;
    let load = &mut reports[1].sample_ratio;
    (load.a_per_s, load.b_per_s, load.mismatch) = (50.0, 20.0, true);
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::Invalid);
}

#[test]
fn the_margin_is_that_of_the_reports() {
    let of = |ratio: f64, margin: f64| {
        let mut reports: Vec<Report> = (1..=12).map(|seed| report(seed, 20, ratio)).collect();
        reports.iter_mut().for_each(|report| report.plan.margin = margin);
        reports
    };
    assert_eq!(combine(&of(1.02, 0.0)).unwrap().verdict, Verdict::Undecided);
    let all = combine(&of(1.02, 0.1)).unwrap();
    assert_eq!(all.verdict, Verdict::PromoteB, "{all:?}");
    assert!(all.effect.ratio > 1.0, "the effect is that without the margin: {all:?}");
    let mut reports = of(1.02, 0.1);
    reports[2].plan.margin = 0.0;
    assert_eq!(combine(&reports), Err(CombineError::Differs(3, "margin")));
}

#[test]
fn an_estimate_from_tests_that_ended_early_is_said_to_be_inflated() {
    let mut reports: Vec<Report> = (1..=8).map(|seed| report(seed, 20, 0.8)).collect();
    assert!(combine(&reports).unwrap().caveats.is_empty());
    reports[4].decided_early = true;
    let text = combine(&reports).unwrap().text();
    assert!(text.contains("note: the effect was measured until it was clear"), "{text}");
}

/// Best-effort work decides, and requests are served.
#[test]
fn what_more_work_costs_requests_is_looked_at_over_all_reports() {
    let mut reports: Vec<Report> = (1..=8).map(|seed| report(seed, 20, 1.3)).collect();
    for report in &mut reports {
        report.plan.metric = Metric::BeThroughput;
    }
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::Undecided, "no figure of requests");
    let with_tail = |reports: &mut [Report], ratio: f64| {
        for report in reports {
            let effect = Effect { ratio, low: Some(ratio * 0.9), high: Some(ratio / 0.9) };
            report.tail = report.overall.map(|overall| OverallReport { effect, ..overall });
        }
    };
    with_tail(&mut reports, 1.0);
    let all = combine(&reports).unwrap();
    assert_eq!(all.verdict, Verdict::PromoteB, "{all:?}");
    with_tail(&mut reports, 1.19);
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::Undecided);
    with_tail(&mut reports, 1.5);
    assert_eq!(combine(&reports).unwrap().verdict, Verdict::KeepA);
    for report in &mut reports {
        report.plan.guards = vec!["hp_p99<50ms".parse().unwrap()];
    }
    assert_eq!(
        combine(&reports).unwrap().verdict,
        Verdict::PromoteB,
        "a guard says what it may cost"
    );
}

#[test]
fn without_an_effect_nothing_is_shown() {
    let reports: Vec<Report> = (1..=4).map(|seed| report(seed, 20, 1.0)).collect();
    let all = combine(&reports).unwrap();
    assert_eq!(all.verdict, Verdict::Undecided);
    assert!(all.effect.low.unwrap() < 1.0 && all.effect.high.unwrap() > 1.0, "{all:?}");
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let one = report(1, 5, 1.0);
    assert_eq!(combine(std::slice::from_ref(&one)), Err(CombineError::Number(1)));
    assert_eq!(combine(&[one.clone(), one.clone()]), Err(CombineError::Seed(1, 2)));
    let mut other = report(2, 5, 1.0);
    other.b.source.digest = "c".into();
    assert_eq!(combine(&[one.clone(), other]), Err(CombineError::Differs(2, "policy B")));
    let mut other = report(2, 5, 1.0);
    other.ended = None;
    assert_eq!(combine(&[one.clone(), other]), Err(CombineError::Running(2)));
    // Figures that no core writes say nothing, and break nothing.
    let mut wild = report(2, 5, 1.0);
    wild.differences[..2].copy_from_slice(&[f64::NAN, f64::INFINITY]);
    assert_eq!(combine(&[one, wild]).unwrap().pairs, 8);
}
