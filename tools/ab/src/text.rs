//! The report for people.

use crate::combine::Combined;
use crate::design::Arm;
use crate::experiment::Reason;
use crate::metric::Metric;
use crate::report::{ArmSummary, Effect, Finding, Rate, Report};
use crate::sample::Unit;
use crate::units::time;
use crate::verdict::{PAIRS_MIN, Verdict, quantile_name, ratio_in_words};
use std::fmt::Write;

/// The interval of an effect. From few pairs it would say more than is known.
fn bounds(effect: &Effect, level: f64, pairs: usize) -> String {
    if pairs < PAIRS_MIN {
        return format!("no interval from fewer than {PAIRS_MIN} pairs");
    }
    if (effect.low, effect.high) == (None, None) {
        return format!("no {} % interval yet", percent(level));
    }
    let show = |bound: Option<f64>, open: &str| {
        bound.map_or_else(|| open.to_owned(), |ratio| format!("{:+.1} %", (ratio - 1.0) * 100.0))
    };
    percent(level)
        + &format!(
            " % interval {} to {}",
            show(effect.low, "no bound"),
            show(effect.high, "no bound")
        )
}

/// A rate of both arms and their difference.
fn rate_in_words(rate: &Rate, level: f64) -> String {
    let show = |value: f64| match rate.name.as_str() {
        "be_waited" => format!("{}/s", time(value)),
        "be_fairness" => format!("{value:.3}"),
        _ => format!("{value:.1}/s"),
    };
    let signed = |value: f64| format!("{}{}", if value < 0.0 { "" } else { "+" }, show(value));
    let bound = |bound: Option<f64>| bound.map_or_else(|| "no bound".to_owned(), signed);
    format!(
        "A {}, B {}: {}; {} % interval {} to {} (of all these at once)",
        show(rate.a),
        show(rate.b),
        signed(rate.difference),
        percent(level),
        bound(rate.low),
        bound(rate.high)
    )
}

fn percent(level: f64) -> String {
    format!("{level:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Decided => "decided",
        Reason::MaxTime => "out of time",
        Reason::Futile => "stopped as futile",
        Reason::Guard => "a guard was breached: A is active again",
        Reason::PolicyFailed => "a policy failed",
        Reason::NotServed => "an arm does not serve",
        Reason::NoTraffic => "no traffic",
        Reason::Stopped => "stopped",
        Reason::CoreStopping => "the core was stopped",
        Reason::Interrupted => "interrupted",
        Reason::Internal => "ended by a defect of the core",
    }
}

fn found(finding: Finding, metric: Metric) -> String {
    let better = if metric.lower_is_better() { "lower" } else { "higher" };
    let found = match finding {
        Finding::BBetter => format!("B is better on {metric}, block by block"),
        Finding::BWorse => format!("B is worse on {metric}, block by block"),
        Finding::Undecided => format!("no difference on {metric} is shown"),
    };
    format!("{found} ({better} is better)")
}

impl Combined {
    /// The report as a few lines of text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{}: {}\n\n{} (A) against {} (B) on {}: {} reports, {} pairs of blocks\n  effect       {}; {}\n  \
             evidence     {:.1}; {:.0} rejects \"no difference\" at level {}\n",
            self.verdict.as_str(),
            self.why,
            self.a,
            self.b,
            self.metric,
            self.reports,
            self.pairs,
            ratio_in_words(self.effect.ratio),
            bounds(&self.effect, (1.0 - self.alpha) * 100.0, self.pairs),
            self.e_value,
            1.0 / self.alpha,
            self.alpha
        );
        for caveat in &self.caveats {
            let _ = write!(out, "\nnote: {caveat}\n");
        }
        out
    }
}

impl Report {
    /// The report as text, some twenty lines.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let plan = &self.plan;
        if self.ended.is_some() || self.verdict != Verdict::Undecided {
            writeln!(out, "{}: {}\n", self.verdict.as_str(), self.why)?;
        } else {
            writeln!(out, "so far {}: {}\n", self.verdict.as_str(), self.why)?;
        }
        let level = (1.0 - plan.alpha) * 100.0;
        match &self.ended {
            None => writeln!(out, "A/B test, running for {}", time(self.elapsed_s * 1e9))?,
            Some(ended) => {
                write!(
                    out,
                    "A/B test, {} after {}",
                    reason(ended.reason),
                    time(ended.after_ns as f64)
                )?;
                match ended.message.as_str() {
                    "" => writeln!(out)?,
                    message => writeln!(out, ": {message}")?,
                }
                if self.promoted {
                    writeln!(out, "B was promoted: it is active")?;
                }
                if let Some(ns) = self.a_back_after_ns {
                    writeln!(out, "A was active again {} later", time(ns as f64))?;
                }
            }
        }
        writeln!(out)?;
        for (arm, summary) in [(Arm::A, &self.a), (Arm::B, &self.b)] {
            self.arm(out, arm, summary)?;
        }
        writeln!(out)?;
        let unit = plan.metric.unit().unwrap_or(Unit::Request);
        for (overall, unit) in self
            .overall
            .iter()
            .map(|o| (o, unit))
            .chain(self.tail.iter().map(|o| (o, Unit::Request)))
        {
            let name = match overall.quantile {
                Some(share) => format!("{} of all {}", quantile_name(share), unit.plural()),
                None => format!("{} over all blocks", plan.metric),
            };
            let words = ratio_in_words(overall.effect.ratio);
            let bounds = bounds(&overall.effect, level, self.pairs);
            writeln!(out, "{name}: B {words}; {bounds} (approximate)")?;
        }
        writeln!(out, "{}", found(self.finding, plan.metric))?;
        let effect = &self.effect;
        let words = ratio_in_words(effect.ratio);
        if self.pairs > 0 {
            writeln!(out, "  effect       {words}; {}", bounds(effect, level, self.pairs))?;
        }
        if self.pairs >= PAIRS_MIN {
            let mean = &self.mean_effect;
            let (words, bounds) = (ratio_in_words(mean.ratio), bounds(mean, level, self.pairs));
            writeln!(out, "  mean effect  {words}; {bounds} (for many pairs)")?;
        }
        writeln!(
            out,
            "  evidence     {:.1}; {:.0} rejects \"no difference\" at level {}; {} pairs of blocks",
            self.e_value,
            1.0 / plan.alpha,
            plan.alpha,
            self.pairs
        )?;
        for (unit, ratio) in self.ratios() {
            writeln!(
                out,
                "  load         {:.1} and {:.1} {}/s under A and B: {}",
                ratio.a_per_s,
                ratio.b_per_s,
                unit.plural(),
                match (ratio.mismatch, ratio.far_apart()) {
                    (true, _) => "NOT the same".into(),
                    (false, Some(factor)) if factor.is_finite() => {
                        format!("{factor:.1} times as many under one; chance is not ruled out")
                    }
                    (false, Some(_)) => "one arm served none; chance is not ruled out".into(),
                    (false, None) => "no difference is shown".to_owned(),
                }
            )?;
        }
        for beside in self.beside.iter().filter(|beside| beside.pairs >= PAIRS_MIN) {
            let words = ratio_in_words(beside.effect.ratio);
            let bounds = bounds(&beside.effect, level, beside.pairs);
            writeln!(out, "  {:<12} {words}; {bounds} (of all these at once)", beside.name)?;
        }
        for rate in self.rates.iter().filter(|rate| rate.pairs >= PAIRS_MIN) {
            writeln!(out, "  {:<12} {}", rate.name, rate_in_words(rate, level))?;
        }
        for guard in &plan.guards {
            writeln!(out, "  guard        {guard}")?;
        }
        writeln!(
            out,
            "  blocks       {} to {}, of which {:.0} % are washout, order from seed {}",
            time(plan.block_ns_min as f64),
            time(plan.block_ns as f64),
            100.0 * plan.washout_ns as f64 / plan.block_ns as f64,
            plan.seed
        )?;
        if !self.caveats.is_empty() {
            writeln!(out)?;
        }
        for caveat in &self.caveats {
            writeln!(out, "note: {caveat}")?;
        }
        Ok(())
    }

    fn arm(&self, out: &mut String, arm: Arm, summary: &ArmSummary) -> std::fmt::Result {
        let digest: String = summary.source.digest.chars().take(12).collect();
        let show = |v: Option<f64>| v.map_or_else(|| "-".into(), |v| self.plan.metric.show(v));
        let overall = self.overall.as_ref().map(|o| if arm == Arm::A { o.a } else { o.b });
        let of_block = match self.block_quantile {
            Some(share) => format!("block ({})", quantile_name(share)),
            None => "block".into(),
        };
        let tokens: u64 = self.blocks.iter().filter(|b| b.arm == arm).map(|b| b.tokens).sum();
        let counts = match (summary.requests, tokens) {
            (requests, 0) => format!("{requests} requests"),
            (requests, tokens) => format!("{requests} requests, {tokens} tokens"),
        };
        writeln!(
            out,
            "{arm}  {} ({digest}): {} {} overall; {of_block} median {}, worst {}, {} of {} slow; {}, best effort {:.1} GPU ms/s",
            summary.source.name,
            self.plan.metric,
            show(overall),
            show(summary.value_median),
            show(summary.value_worst),
            summary.blocks_slow,
            summary.blocks,
            counts,
            summary.be_gpu_ms_per_s
        )
    }
}
