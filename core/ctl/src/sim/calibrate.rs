//! Simulated beside measured: the same pair, load and policy, as ratios.
//!
//! A program takes alone what the row's own run measured of it alone; everything that
//! comes of sharing is simulated.

use super::arrivals::poisson;
use super::{Policies, trace};
use crate::error::CtlError;
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use tally_engine::policy::Policy;
use tally_replay::trace::Alone;
use tally_replay::{Arrivals, Cut, Model, Report, Residency, Setup, Trace, simulate};

/// A measured program and its trace.
const PROGRAMS: [(&str, &str); 10] = [
    ("bert-graph", "bert_base_infer_b1_s128"),
    ("bert-large-graph", "bert_large_infer_b1_s128"),
    ("llama-7b-decode-graph", "llama7b_decode_b1"),
    ("resnet50-eager", "resnet50_infer_b1"),
    ("resnet50-graph", "resnet50_infer_b1_graph"),
    ("bert-b32-train", "bert_base_train_b32_s128"),
    ("gpt2-train", "gpt2_12l_train_b8_s1024"),
    ("gpt2-large-train", "gpt2_large_train_b4_s512"),
    ("resnet50-b128-train", "resnet50_train_b128"),
    ("resnet50-train", "resnet50_train_b64"),
];
/// Of the arrivals in `tests/gpu/step_pairs.py`.
const SEED: u32 = 7;
/// What was aimed at: p99 and share off by at most so much.
const AIMS_PERCENT: [f64; 2] = [15.0, 10.0];

/// An inference alone may take so much longer in a row's mode than it did at first, and under MPS, where
/// every graph does, so much more; else its host changed in between (`tests/gpu/step_pairs.py`).
const DRIFT_MAX: f64 = 1.25;
const MPS_ALONE: f64 = 0.25;

/// Runs of a row whose inference has an own part, how long it takes drawn anew in each: p99 differs by a tenth. Odd.
const DRAWS: usize = 5;

/// How long a row's training ran alone in the row's mode, each of two times, where the row
/// does not say: as `tests/gpu/step_pairs.py` has it.
const ALONE_SECONDS: f64 = 3.0;

/// A row of measurements that can be simulated.
struct Measured<'a> {
    row: &'a Value,
    traces: [&'static str; 2],
    setup: Setup,
    scheduled: bool,
    p99: f64,
    share: f64,
    own: Option<Own>,
    load: f64,
}

/// What the row's very training made alone in the row's mode: beside an inference that was
/// connected and idle.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Own {
    steps_per_s: f64,
    /// Of that, with requests.
    share: f64,
    /// It ran so long for this, after a warm-up of as long.
    seconds: f64,
}

/// Both side by side.
#[derive(Serialize)]
struct Compared {
    hp: String,
    be: String,
    mode: String,
    /// What it was measured with, unless that was the policy's defaults.
    policy_config: Option<String>,
    vendor_rewrite: bool,
    /// Over the inference alone ([`alone_ms`]).
    p99_over_alone: f64,
    measured_p99_over_alone: f64,
    p50_ms: f64,
    measured_p50_ms: f64,
    p99_ms: f64,
    measured_p99_ms: f64,
    /// The training's rate over what it makes alone without a core, by another process.
    share: f64,
    measured_share: f64,
    /// The training's rate over what the same process makes alone in the row's mode.
    share_of_own: Option<f64>,
    measured_share_of_own: Option<f64>,
    /// What it makes alone in the row's mode over what it makes alone without a core.
    alone_share: Option<f64>,
    measured_alone_share: Option<f64>,
    report: Report,
}

impl Compared {
    /// `[simulated, measured]`, and whether they are of the training's own rate.
    fn shares(&self) -> ([f64; 2], bool) {
        match (self.share_of_own, self.measured_share_of_own) {
            (Some(simulated), Some(measured)) => ([simulated, measured], true),
            _ => ([self.share, self.measured_share], false),
        }
    }
}

/// Print a table of all rows of the file that can be simulated.
pub fn run(
    out: &mut impl Write,
    file: &Path,
    setup: &Setup,
    policies: &Policies,
    since: &str,
    json: bool,
) -> Result<(), CtlError> {
    let wrong = |why: String| CtlError::Usage(format!("--calibrate {}: {why}", file.display()));
    let content = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    let rows: Vec<Value> = serde_json::from_str(&content).map_err(|e| {
        wrong(format!("{e}; expected an array of rows as in docs/results/pairs.json"))
    })?;
    // As dates they compare as texts do.
    let rows = rows.iter().filter(|row| text(row, "date") >= since);
    let rows: Vec<_> = rows.filter_map(|row| Measured::of(row, setup)).collect();
    let (rows, left_out): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| !row.has_drifted());
    let compared = rows.iter().map(|row| row.compare(policies)).collect::<Result<Vec<_>, _>>()?;
    if json {
        let text =
            serde_json::to_string_pretty(&compared).map_err(|e| CtlError::Answer(e.to_string()))?;
        return Ok(writeln!(out, "{text}")?);
    }
    show(out, &compared)?;
    if !left_out.is_empty() {
        writeln!(
            out,
            "\nLeft out, for the inference's host had become slower: {}.",
            left_out.iter().map(Measured::name).collect::<Vec<_>>().join("; ")
        )?;
    }
    Ok(())
}

/// Behind a share of what the training makes alone in the row's mode.
const OF_OWN: &str = " of own";

/// A configuration behind a row's mode.
fn with(config: &str) -> String {
    format!(", `{}`", config.lines().collect::<Vec<_>>().join("; "))
}

fn show(out: &mut impl Write, rows: &[Compared]) -> Result<(), CtlError> {
    writeln!(
        out,
        "| pair | mode | p99 over alone, simulated | measured | off by | share, simulated | measured | off by |"
    )?;
    writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
    let off = |a: f64, b: f64| (a / b - 1.0) * 100.0;
    let mut within = [0; 2];
    for r in rows {
        let ([share, measured_share], is_own) = r.shares();
        let offs = [off(r.p99_over_alone, r.measured_p99_over_alone), off(share, measured_share)];
        let own = if is_own { OF_OWN } else { "" };
        for (count, (off, aim)) in within.iter_mut().zip(offs.iter().zip(AIMS_PERCENT)) {
            *count += u32::from(off.abs() <= aim);
        }
        writeln!(
            out,
            "| {} + {} | {}{}{} | {:.2} | {:.2} | {:+.0} % | {share:.2}{own} | {measured_share:.2}{own} | {:+.0} % |",
            r.hp,
            r.be,
            r.mode,
            if r.vendor_rewrite { ", vendor kernels cut" } else { "" },
            r.policy_config.as_deref().map_or(String::new(), with),
            r.p99_over_alone,
            r.measured_p99_over_alone,
            offs[0],
            offs[1],
        )?;
    }
    writeln!(out)?;
    if rows.iter().any(|r| r.shares().1) {
        writeln!(
            out,
            "A share{OF_OWN} is of what the same training makes alone in that mode; other shares are of what it makes alone without a core.\n"
        )?;
    }
    writeln!(
        out,
        "p99 within {} % in {} of {} rows, share within {} % in {}.",
        AIMS_PERCENT[0],
        within[0],
        rows.len(),
        AIMS_PERCENT[1],
        within[1]
    )?;
    Ok(())
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row.get(key).and_then(Value::as_str).unwrap_or("")
}

fn number(row: &Value, key: &str) -> Option<f64> {
    row.get(key).and_then(Value::as_f64).filter(|&n| n > 0.0)
}

/// What a row's inference takes alone, `p50` or `p99`: beside idle programs, where the row has that. Their contexts
/// make the GPU as fast as it is when they work, which one that has the GPU to itself is not.
fn alone_ms(row: &Value, p: &str) -> Option<f64> {
    number(row, &format!("beside_idle_{p}_ms")).or_else(|| number(row, &format!("solo_{p}_ms")))
}

fn known(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|p| p.0 == name).map(|p| p.1)
}

impl<'a> Measured<'a> {
    fn of(row: &'a Value, setup: &Setup) -> Option<Self> {
        let (residency, scheduled) = match (text(row, "mode"), text(row, "policy")) {
            ("time-slicing", _) => (Residency::Timeslice, false),
            ("mps", _) => (Residency::Mps, false),
            ("tally-timeslice", "tally-priority") => (Residency::Timeslice, true),
            ("tally-mps", "tally-priority") => (Residency::Mps, true),
            _ => return None,
        };
        let (high, low) = (known(text(row, "hp"))?, known(text(row, "be"))?);
        let cut = match (is_vendor(row), row.get("cut")) {
            (true, _) => Cut::All,
            (false, Some(_)) => Cut::Open,
            // Of a time when nothing was cut.
            (false, None) => Cut::None,
        };
        let graph = text(row, "hp").ends_with("graph");
        let seconds = number(row, "seconds").unwrap_or(setup.seconds);
        let own = Own::of(row);
        // It has its cut forms and the policy knows its kernels by the first request.
        let warm_up_seconds = own.map(|own| 2.0 * own.seconds).or(setup.warm_up_seconds);
        // A mode that could not keep up was given as long again.
        let overrun_seconds = seconds;
        let setup =
            Setup { residency, cut, graph, seconds, overrun_seconds, warm_up_seconds, ..*setup };
        let p99 = number(row, "p99_over_beside_idle").or(number(row, "p99_over_solo"))?;
        let share = number(row, "be_share")?;
        let load = number(row, "load").unwrap_or(0.5);
        Some(Measured { row, traces: [high, low], setup, scheduled, p99, share, own, load })
    }

    /// Whether the inference alone was not as fast as at first any more: ratios to that say nothing then.
    fn has_drifted(&self) -> bool {
        let times = [number(self.row, "own_solo_p50_ms"), alone_ms(self.row, "p50")];
        let [Some(own_ms), Some(solo_ms)] = times else { return false };
        let more = if self.setup.residency == Residency::Mps { MPS_ALONE } else { 0.0 };
        own_ms > solo_ms * (DRIFT_MAX + more)
    }

    fn name(&self) -> String {
        let vendor = if is_vendor(self.row) { ", vendor kernels cut" } else { "" };
        let [hp, be, mode] = ["hp", "be", "mode"].map(|key| text(self.row, key));
        let config = Some(text(self.row, "policy_config")).filter(|config| !config.is_empty());
        format!("{hp} + {be}, {mode}{vendor}{}", config.map_or(String::new(), with))
    }

    fn compare(&self, policies: &Policies) -> Result<Compared, CtlError> {
        let row = self.row;
        let (mut high, mut low) = (trace("hp", self.traces[0])?, trace("be", self.traces[1])?);
        if self.setup.graph {
            high = high.as_graph();
        }
        self.as_alone(&mut high, &mut low);
        let solo_steps_per_s =
            number(row, "be_solo_steps_per_s").unwrap_or_else(|| plain_steps_per_s(&low));
        let own_steps_per_s = self.as_own(&high, &mut low, policies)?;
        let (report, share) = self.simulated(&high, &low, policies)?;
        let h = &report.high_priority;
        // The report's is of the pace that the training was given.
        let steps_per_s = share * plain_steps_per_s(&low);
        Ok(Compared {
            hp: text(row, "hp").into(),
            be: text(row, "be").into(),
            mode: text(row, "mode").into(),
            policy_config: Some(text(row, "policy_config").to_owned()).filter(|c| !c.is_empty()),
            vendor_rewrite: is_vendor(row),
            p99_over_alone: h.service_p99_over_solo,
            measured_p99_over_alone: self.p99,
            p50_ms: h.service_p50_ms,
            measured_p50_ms: number(row, "p50_ms").unwrap_or(0.0),
            p99_ms: h.service_p99_ms,
            measured_p99_ms: number(row, "p99_ms").unwrap_or(0.0),
            share: steps_per_s / solo_steps_per_s,
            measured_share: self.share,
            share_of_own: own_steps_per_s.map(|own| steps_per_s / own),
            measured_share_of_own: self.own.map(|own| own.share),
            alone_share: own_steps_per_s.map(|own| own / solo_steps_per_s),
            measured_alone_share: self.own.map(|own| own.steps_per_s / solo_steps_per_s),
            report,
        })
    }

    /// The run whose p99 is the median of some, and the median of their shares of the training.
    fn simulated(
        &self,
        high: &Trace,
        low: &Trace,
        policies: &Policies,
    ) -> Result<(Report, f64), CtlError> {
        // What a graph takes is not drawn.
        let draws = if self.setup.graph { 1 } else { DRAWS };
        let mut runs = Vec::new();
        for seed in (self.setup.seed..).take(draws) {
            let setup = Setup { seed, ..self.setup };
            let policy = self.policy(policies)?;
            let report = simulate(&setup, high, Some(low), &self.arrivals(), policy);
            let share = report.best_effort.as_ref().map_or(0.0, |training| training.share);
            runs.push((report, share));
        }
        runs.sort_by(|a, b| a.1.total_cmp(&b.1));
        let share = runs[draws / 2].1;
        let p99 = |run: &(Report, f64)| run.0.high_priority.service_p99_ms;
        runs.sort_by(|a, b| p99(a).total_cmp(&p99(b)));
        Ok((runs.swap_remove(draws / 2).0, share))
    }

    /// The requests that the row's run served, if it says how fast the inference was alone.
    fn arrivals(&self) -> Arrivals {
        let of_solo = || Some(self.load * 1e3 / number(self.row, "solo_p50_ms")?);
        let Some(rate_per_s) = number(self.row, "rate_per_s").or_else(of_solo) else {
            return Arrivals::Poisson { load: self.load };
        };
        Arrivals::At(poisson(rate_per_s, self.setup.seconds, SEED))
    }

    fn policy(&self, policies: &Policies) -> Result<Option<Box<dyn Policy + Send>>, CtlError> {
        if !self.scheduled {
            return Ok(None);
        }
        // Another policy has other settings.
        let is_rows = policies.is(text(self.row, "policy"));
        policies.load_configured(if is_rows { text(self.row, "policy_config") } else { "" })
    }

    /// Give the training the pace of the row's own process, if that was measured. Returns what
    /// it then makes alone in the row's mode, steps a second.
    fn as_own(
        &self,
        high: &Trace,
        low: &mut Trace,
        policies: &Policies,
    ) -> Result<Option<f64>, CtlError> {
        let Some(own) = self.own else { return Ok(None) };
        let mut steps_per_s = self.alone_steps_per_s(own, high, low, policies)?;
        // The solo figure is of another process, and perhaps of another hour: a training that its
        // own part limits had another pace. One that the GPU limits did not, for the GPU is the same:
        // a rate that differs under a policy says that the model of cutting is off, and kernels made
        // longer or shorter for that would be off, too. Shares of own have it above and below the line.
        let is_launch_bound = low.alone[0].is_some_and(|alone| alone.is_launch_bound());
        if steps_per_s > 0.0 && (is_launch_bound || !self.scheduled) {
            slow_down(low, steps_per_s / own.steps_per_s);
            steps_per_s = self.alone_steps_per_s(own, high, low, policies)?;
        }
        Ok(Some(steps_per_s).filter(|&rate| rate > 0.0))
    }

    /// What the training makes in the row's mode beside an inference without requests.
    fn alone_steps_per_s(
        &self,
        own: Own,
        high: &Trace,
        low: &Trace,
        policies: &Policies,
    ) -> Result<f64, CtlError> {
        let seconds = own.seconds;
        // An inference that waits for requests takes nothing of the training's host.
        let model = Model { hosts_permille: 0, ..self.setup.model };
        let setup = Setup { seconds, warm_up_seconds: Some(seconds), model, ..self.setup };
        let none = Arrivals::At(Vec::new());
        let report = simulate(&setup, high, Some(low), &none, self.policy(policies)?);
        let share = report.best_effort.map_or(0.0, |training| training.share);
        Ok(share * plain_steps_per_s(low))
    }

    /// Both as fast alone as they were in the row's run.
    fn as_alone(&self, high: &mut Trace, low: &mut Trace) {
        let ns = |key: &str| number(self.row, key).map(|ms| (ms * 1e6) as u64);
        let like = |was: Option<Alone>, ns: u64| was.unwrap_or_default().scaled_to(ns);
        let alone_ns = |p: &str| alone_ms(self.row, p).map(|ms| (ms * 1e6) as u64);
        if let Some(solo_ns) = alone_ns("p50") {
            let plain = like(high.alone[0], solo_ns);
            high.alone[0] = Some(Alone { p99_ns: alone_ns("p99").unwrap_or(0), ..plain });
            if let Some(own_ns) =
                ns("own_solo_p50_ms").filter(|_| self.setup.residency == Residency::Mps)
            {
                high.alone[1] = Some(like(high.alone[1].or(Some(plain)), own_ns));
            }
        }
        if let Some(rate) = number(self.row, "be_solo_steps_per_s") {
            let solo_ns = (1e9 / rate) as u64;
            let before_ns = low.alone[0].map_or(solo_ns, |alone| alone.ns);
            low.alone[1] = low.alone[1].map(|mps| {
                mps.scaled_to((mps.ns as f64 * solo_ns as f64 / before_ns as f64) as u64)
            });
            low.alone[0] = Some(like(low.alone[0], solo_ns));
        }
    }
}

impl Own {
    fn of(row: &Value) -> Option<Self> {
        let steps_per_s = number(row, "own_be_solo_steps_per_s")?;
        let share = number(row, "be_share_of_own")?;
        let seconds = number(row, "be_alone_seconds").unwrap_or(ALONE_SECONDS);
        Some(Own { steps_per_s, share, seconds })
    }
}

/// What a training makes alone without a core.
fn plain_steps_per_s(low: &Trace) -> f64 {
    1e9 / low.timed_in(Residency::Timeslice).period_ns.max(1) as f64
}

/// The same training, so many times as slow alone.
fn slow_down(low: &mut Trace, by: f64) {
    low.alone = low
        .alone
        .map(|alone| alone.map(|alone| alone.scaled_to((alone.ns as f64 * by).round() as u64)));
}

fn is_vendor(row: &Value) -> bool {
    row.get("vendor_rewrite") == Some(&Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LimitsArg;
    use serde_json::json;

    fn policies() -> Policies {
        Policies::open("native:tally-priority", None, LimitsArg::Default, &[]).unwrap()
    }

    /// With short windows, for what is asked of it does not depend on them.
    fn own_row(be: &str, mode: &str, steps_per_s: f64) -> Value {
        let policy = if mode == "mps" { "none" } else { "tally-priority" };
        json!({
            "hp": "bert-graph", "be": be, "mode": mode, "policy": policy, "cut": {},
            "p99_over_solo": 1.5, "be_share": 0.35, "be_solo_steps_per_s": 10.0, "seconds": 0.5,
            "own_be_solo_steps_per_s": steps_per_s, "be_share_of_own": 0.5, "be_alone_seconds": 0.5,
        })
    }

    /// What the training takes alone, plain and under MPS.
    fn plain_ns(low: &Trace) -> [u64; 2] {
        low.alone.map(|alone| alone.unwrap().ns)
    }

    #[test]
    fn a_row_with_figures_of_its_own_warms_up_as_long_as_it_did() {
        let setup = Setup { warm_up_seconds: Some(1.0), ..Setup::default() };
        let mut row = own_row("gpt2-train", "tally-mps", 7.0);
        let warm_up =
            |row: &Value| Measured::of(row, &setup).unwrap().setup.warm_up_seconds.unwrap();
        assert_eq!(warm_up(&row), 1.0, "twice half a second");
        row["be_alone_seconds"] = json!(2.5);
        assert_eq!(warm_up(&row), 5.0);
        row["be_alone_seconds"] = Value::Null;
        assert_eq!(warm_up(&row), 6.0, "as long as the step has it");
        row["own_be_solo_steps_per_s"] = Value::Null;
        let without = Measured::of(&row, &setup).unwrap();
        assert_eq!((without.own, without.setup.warm_up_seconds), (None, Some(1.0)));
    }

    #[test]
    fn only_a_training_that_its_own_part_limits_gets_another_pace_under_a_policy() {
        let policies = policies();
        let paces = |row: &Value| {
            let measured = Measured::of(row, &Setup::default()).unwrap();
            let mut high = trace("hp", measured.traces[0]).unwrap().as_graph();
            let mut low = trace("be", measured.traces[1]).unwrap();
            measured.as_alone(&mut high, &mut low);
            let before_ns = plain_ns(&low);
            let alone = measured.as_own(&high, &mut low, &policies).unwrap();
            (before_ns, plain_ns(&low), alone)
        };
        let (before_ns, after_ns, alone) = paces(&own_row("gpt2-train", "tally-mps", 5.0));
        assert_eq!((before_ns[0], after_ns), (100_000_000, before_ns), "the GPU limits it");
        let alone = alone.unwrap();
        assert!((6.0..9.0).contains(&alone), "cut while the inference idles: {alone}");

        let (before_ns, after_ns, alone) = paces(&own_row("gpt2-large-train", "tally-mps", 5.0));
        assert!(after_ns[0] > before_ns[0] && after_ns[1] > before_ns[1], "{after_ns:?}");
        let alone = alone.unwrap();
        assert!((alone / 5.0 - 1.0).abs() < 0.1, "{alone}");

        // Without a policy nothing is modelled that could be off.
        let (_, after_ns, alone) = paces(&own_row("gpt2-train", "mps", 8.0));
        let alone = alone.unwrap();
        assert!((alone / 8.0 - 1.0).abs() < 0.02, "{alone}");
        assert!((after_ns[1] as f64 / 125e6 - 1.0).abs() < 0.02, "{after_ns:?}");

        let mut row = own_row("gpt2-large-train", "tally-mps", 5.0);
        row["own_be_solo_steps_per_s"] = Value::Null;
        let (before_ns, after_ns, alone) = paces(&row);
        assert_eq!((before_ns, alone), (after_ns, None));
    }

    #[test]
    fn a_share_of_own_is_of_the_simulated_rate_alone_in_the_mode() {
        let row = own_row("gpt2-train", "tally-mps", 7.0);
        let of = |row: &Value| {
            Measured::of(row, &Setup::default()).unwrap().compare(&policies()).unwrap()
        };
        let own = of(&row);
        let (share_of_own, alone_share) = (own.share_of_own.unwrap(), own.alone_share.unwrap());
        assert!((own.share / alone_share / share_of_own - 1.0).abs() < 1e-9);
        assert!(alone_share < 0.9 && share_of_own > own.share, "{alone_share} {share_of_own}");
        assert_eq!((own.measured_share, own.measured_share_of_own), (0.35, Some(0.5)));
        assert_eq!(own.measured_alone_share, Some(0.7));

        let mut without = row.clone();
        without["own_be_solo_steps_per_s"] = Value::Null;
        let without = of(&without);
        assert_eq!((without.share_of_own, without.measured_share_of_own), (None, None));
        let reported = without.report.best_effort.as_ref().unwrap().share;
        assert!((without.share / reported - 1.0).abs() < 1e-6);

        let mut table = Vec::new();
        show(&mut table, &[own, without]).unwrap();
        let table = String::from_utf8(table).unwrap();
        let lines: Vec<_> = table.lines().collect();
        let simulated = format!("| {share_of_own:.2} of own | 0.50 of own |");
        assert!(lines[2].contains(&simulated), "{table}");
        assert!(lines[3].contains("| 0.35 |") && !lines[3].contains("of own"), "{table}");
        assert!(lines[5].starts_with("A share of own"), "{table}");
    }

    #[test]
    fn a_row_is_simulated_with_the_configuration_that_it_was_measured_with() {
        let mut row = own_row("gpt2-train", "tally-mps", 7.0);
        let of = |row: &Value, policies: &Policies| {
            Measured::of(row, &Setup::default())
                .unwrap()
                .compare(policies)
                .map_err(|e| e.to_string())
        };
        let plain = of(&row, &policies()).unwrap();
        row["policy_config"] = json!("cut = false\n");
        let whole = of(&row, &policies()).unwrap();
        assert!(whole.p99_over_alone > 2.0 * plain.p99_over_alone, "nothing gives way");
        assert_eq!(whole.policy_config.as_deref(), Some("cut = false\n"));
        let mut table = Vec::new();
        show(&mut table, &[whole]).unwrap();
        assert!(String::from_utf8(table).unwrap().contains("| tally-mps, `cut = false` |"));
        row["policy_config"] = json!("cat = false\n");
        assert!(of(&row, &policies()).is_err_and(|why| why.contains("cat")));
        // Another policy has no such settings.
        let other = Policies::open("built-in", None, LimitsArg::Default, &[]).unwrap();
        of(&row, &other).unwrap();
        assert!(!other.is("tally-priority") && policies().is("tally-priority"));
        let file = Policies::open("a/tally-priority.wasm", None, LimitsArg::Default, &[]);
        assert!(file.is_ok_and(|file| file.is("tally-priority")));
    }

    #[test]
    fn an_inference_is_as_fast_alone_as_beside_idle_programs_and_gets_the_requests_of_its_row() {
        let mut row = own_row("gpt2-train", "tally-mps", 7.0);
        let measured_of = |row: &Value| {
            let measured = Measured::of(row, &Setup::default()).unwrap();
            let mut high = trace("hp", measured.traces[0]).unwrap();
            measured.as_alone(&mut high, &mut trace("be", measured.traces[1]).unwrap());
            let Arrivals::At(at) = measured.arrivals() else { panic!("the row has a rate") };
            (measured.p99, high.alone[0].map(|alone| (alone.ns, alone.p99_ns)).unwrap(), at.len())
        };
        row["solo_p50_ms"] = json!(1.0);
        row["solo_p99_ms"] = json!(1.25);
        let (p99, alone, requests) = measured_of(&row);
        assert_eq!((p99, alone), (1.5, (1_000_000, 1_250_000)));
        row["rate_per_s"] = json!(1_000.0);
        row["beside_idle_p50_ms"] = json!(0.5);
        row["beside_idle_p99_ms"] = json!(0.75);
        row["p99_over_beside_idle"] = json!(2.5);
        let (p99, alone, twice) = measured_of(&row);
        assert_eq!((p99, alone), (2.5, (500_000, 750_000)));
        assert!((1.6..2.4).contains(&(twice as f64 / requests as f64)), "{requests}, {twice}");
    }

    #[test]
    fn a_row_whose_host_changed_is_left_out() {
        let setup = Setup::default();
        for (mode, own_ms, drifted) in [
            ("tally-timeslice", 1.2, false),
            ("tally-timeslice", 1.3, true),
            ("tally-mps", 1.3, false),
            ("tally-mps", 1.6, true),
        ] {
            let row = json!({
                "hp": "bert-graph", "be": "gpt2-train", "mode": mode, "policy": "tally-priority",
                "p99_over_solo": 1.1, "be_share": 0.4, "solo_p50_ms": 1.0, "own_solo_p50_ms": own_ms,
            });
            let measured = Measured::of(&row, &setup).unwrap();
            assert_eq!(measured.has_drifted(), drifted, "{}, {own_ms}", measured.name());
        }
    }
}
