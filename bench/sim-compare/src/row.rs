//! A measured pair, and the same simulated.

use crate::arrivals::poisson;
use crate::table::{at, with};
use anyhow::{Result, anyhow};
use serde::Serialize;
use serde_json::Value;
use tally_engine::policy::{Objective, Policy};
use tally_simulator::trace::Alone;
use tally_simulator::{
    Arrivals, Model, Report, Service, Setup, SharingMode, Trace, Transformable, simulate,
};

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
/// Around the share of the threads of MPS, in a row's mode.
pub const PERCENT: [&str; 2] = [", training on ", " %"];
/// Seed of the arrivals in `bench/gpu/step_pairs.py`.
const SEED: u32 = 7;
/// An inference alone may take so much longer in a row's mode than it did at first, and under MPS, where
/// every graph does, so much more; else its host changed in between (`bench/gpu/step_pairs.py`).
const DRIFT_MAX: f64 = 1.25;
const MPS_ALONE: f64 = 0.25;

/// Runs of a row whose inference has an own part, how long it takes drawn anew in each: p99 differs by a tenth. Odd.
const DRAWS: u64 = 5;

/// How long a row's training ran alone in the row's mode, each of two times, where the row
/// does not say: as `bench/gpu/step_pairs.py` has it.
const ALONE_SECONDS: f64 = 3.0;

/// Both programs work so long before a row with an objective is measured, in which the policy learns it: as
/// `bench/gpu/step_frontier.py` has it. Simulated in one with what is measured.
const LEARN_SECONDS: f64 = 12.0;
/// Share of requests, percent, that must keep an objective.
const PERCENTILE: f64 = 99.0;

/// A row of measurements that can be simulated.
pub struct Measured<'a> {
    row: &'a Value,
    traces: [&'static str; 2],
    setup: Setup,
    /// A request of the inference is one CUDA graph.
    graph: bool,
    scheduled: bool,
    p99: f64,
    share: f64,
    own: Option<Own>,
    load: f64,
    /// The inference's objective over its p99 alone.
    objective: Option<f64>,
}

/// What the row's very training made alone in the row's mode: beside an inference that was
/// connected and idle.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Own {
    steps_per_s: f64,
    /// Share of `steps_per_s` that it makes beside requests.
    share: f64,
    /// It ran so long for this, after a warm-up of as long.
    seconds: f64,
}

/// A measured row and its simulation, side by side.
#[derive(Serialize)]
pub struct Compared {
    pub hp: String,
    pub be: String,
    pub mode: String,
    /// The inference's objective over its p99 alone.
    pub objective: Option<f64>,
    /// What it was measured with, unless that was the policy's defaults.
    pub policy_config: Option<String>,
    pub vendor_rewrite: bool,
    /// Over the inference alone ([`alone_ms`]).
    pub p99_over_alone: f64,
    pub measured_p99_over_alone: f64,
    pub p50_ms: f64,
    pub measured_p50_ms: f64,
    pub p99_ms: f64,
    pub measured_p99_ms: f64,
    /// The training's rate over what it makes alone without a core, by another process.
    pub share: f64,
    pub measured_share: f64,
    /// The training's rate over what the same process makes alone in the row's mode.
    pub share_of_own: Option<f64>,
    pub measured_share_of_own: Option<f64>,
    /// What it makes alone in the row's mode over what it makes alone without a core.
    pub alone_share: Option<f64>,
    pub measured_alone_share: Option<f64>,
    /// The draw whose p99 is the median of several.
    pub report: Report,
}

impl Compared {
    /// `[simulated, measured]`, and whether they are of the training's own rate.
    pub fn shares(&self) -> ([f64; 2], bool) {
        match (self.share_of_own, self.measured_share_of_own) {
            (Some(simulated), Some(measured)) => ([simulated, measured], true),
            _ => ([self.share, self.measured_share], false),
        }
    }
}

pub fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row.get(key).and_then(Value::as_str).unwrap_or("")
}

pub fn number(row: &Value, key: &str) -> Option<f64> {
    row.get(key).and_then(Value::as_f64).filter(|&n| n > 0.0)
}

/// What a row's inference takes alone, `p50` or `p99`: beside idle programs, where the row has that. Their contexts
/// make the GPU as fast as it is when they work, which one that has the GPU to itself is not.
fn alone_ms(row: &Value, p: &str) -> Option<f64> {
    number(row, &format!("beside_idle_{p}_ms")).or_else(|| number(row, &format!("solo_{p}_ms")))
}

pub fn known(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|p| p.0 == name).map(|p| p.1)
}

impl<'a> Measured<'a> {
    pub fn of(row: &'a Value, setup: &Setup) -> Option<Self> {
        let (mode, percent) = match text(row, "mode").split_once(PERCENT[0]) {
            Some((mode, rest)) => (mode, rest.strip_suffix(PERCENT[1])?.parse().ok()?),
            None => (text(row, "mode"), setup.model.best_effort_percent),
        };
        let objective = number(row, "slo_over_p99");
        let (sharing, scheduled) = match (mode, text(row, "policy"), objective) {
            ("time-slicing", _, None) => (SharingMode::Timeslice, false),
            ("mps", _, None) => (SharingMode::Mps, false),
            ("tally-timeslice", "tally-priority", None) => (SharingMode::Timeslice, true),
            ("tally-mps", "tally-priority", None) => (SharingMode::Mps, true),
            // Other policies learn nothing of objectives: their rows repeat one window.
            ("tally-mps", "slo-herald", Some(_)) => (SharingMode::Mps, true),
            _ => return None,
        };
        let model = Model { best_effort_percent: percent, ..setup.model };
        let (high, low) = (known(text(row, "hp"))?, known(text(row, "be"))?);
        let transformable =
            match (is_vendor(row), row.get("transformed").or(row.get("slo_over_p99"))) {
                (true, _) => Transformable::All,
                (false, Some(_)) => Transformable::Open,
                // Of a time when nothing was transformed.
                (false, None) => Transformable::None,
            };
        let graph = text(row, "hp").ends_with("graph");
        let learn_seconds = objective.map_or(0.0, |_| LEARN_SECONDS);
        let seconds = number(row, "seconds").unwrap_or(setup.seconds) + learn_seconds;
        let own = Own::of(row);
        // It has its transformed forms and the policy knows its kernels by the first request.
        let warm_up_seconds = own.map(|own| 2.0 * own.seconds).or(setup.warm_up_seconds);
        // A mode that could not keep up was given as long again.
        let overrun_seconds = seconds;
        let setup = Setup {
            sharing,
            transformable,
            seconds,
            overrun_seconds,
            warm_up_seconds,
            model,
            ..*setup
        };
        let p99 = number(row, "p99_over_beside_idle")
            .or(number(row, "p99_over_solo"))
            .or_else(|| Some(number(row, "p99_ms")? / number(row, "solo_p99_ms")?))?;
        let share = number(row, "be_share")?;
        let load = number(row, "load").unwrap_or(0.5);
        let traces = [high, low];
        Some(Measured { row, traces, setup, graph, scheduled, p99, share, own, load, objective })
    }

    /// Whether the inference alone was not as fast as at first any more: ratios to that say nothing then.
    pub fn has_drifted(&self) -> bool {
        let times = [number(self.row, "own_solo_p50_ms"), alone_ms(self.row, "p50")];
        let [Some(own_ms), Some(solo_ms)] = times else { return false };
        let more = if self.setup.sharing == SharingMode::Mps { MPS_ALONE } else { 0.0 };
        own_ms > solo_ms * (DRIFT_MAX + more)
    }

    pub fn name(&self) -> String {
        let vendor = if is_vendor(self.row) { ", vendor kernels transformed" } else { "" };
        let [hp, be, mode] = ["hp", "be", "mode"].map(|key| text(self.row, key));
        let config = Some(text(self.row, "policy_config")).filter(|config| !config.is_empty());
        let objective = self.objective.map_or(String::new(), at);
        format!("{hp} + {be}, {mode}{vendor}{objective}{}", config.map_or(String::new(), with))
    }

    pub fn compare(&self, config: Option<&str>) -> Result<Compared> {
        let row = self.row;
        let (mut high, mut low) = (trace(self.traces[0])?, trace(self.traces[1])?);
        if self.graph {
            high = high.as_graph();
        }
        self.as_alone(&mut high, &mut low);
        let solo_steps_per_s =
            number(row, "be_solo_steps_per_s").unwrap_or_else(|| plain_steps_per_s(&low));
        let own_steps_per_s = self.as_own(&high, &mut low, config)?;
        let slo = self.slo(&high);
        let (report, share) = self.simulated(&high, &low, slo, config)?;
        let h = &report.high_priority;
        // The report's is of the pace that the training was given.
        let steps_per_s = share * plain_steps_per_s(&low);
        Ok(Compared {
            hp: text(row, "hp").into(),
            be: text(row, "be").into(),
            mode: text(row, "mode").into(),
            objective: self.objective,
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
        slo: Option<Objective>,
        config: Option<&str>,
    ) -> Result<(Report, f64)> {
        // What a graph takes is not drawn; with an objective most of a run is learning, and one takes long.
        let draws = if self.graph || slo.is_some() { 1 } else { DRAWS };
        let arrivals = self.arrivals();
        let run = |draw| {
            let setup = Setup { seed: self.setup.seed.wrapping_add(draw), ..self.setup };
            let service = Service { slo, ..self.service(high, &arrivals) };
            Ok(simulate(&setup, &service, Some(low), self.policy(config)?))
        };
        let mut runs = (0..draws).map(run).collect::<Result<Vec<Report>>>()?;
        let mut median = |figure: fn(&Report) -> f64| {
            runs.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
            runs[runs.len() / 2].clone()
        };
        let share = |r: &Report| r.best_effort.as_ref().map_or(0.0, |training| training.share);
        let share = share(&median(share));
        Ok((median(|r| r.high_priority.service_p99_ms), share))
    }

    /// The row's objective, as many times the simulated p99 alone.
    fn slo(&self, high: &Trace) -> Option<Objective> {
        let multiple = self.objective?;
        let (setup, arrivals) = (Setup { seconds: 1.0, ..self.setup }, self.arrivals());
        let report = simulate(&setup, &self.service(high, &arrivals), None, None);
        let slo_ns = (multiple * report.high_priority.solo_p99_ms * 1e6) as u64;
        Some(Objective { slo_ns, percentile: PERCENTILE })
    }

    /// The inference without an objective.
    fn service<'s>(&self, high: &'s Trace, arrivals: &'s Arrivals) -> Service<'s> {
        Service { graph: self.graph, ..Service::new(high, arrivals) }
    }

    /// The requests that the row's run served, if it says how fast the inference was alone.
    fn arrivals(&self) -> Arrivals {
        let of_solo = || Some(self.load * 1e3 / number(self.row, "solo_p50_ms")?);
        let Some(rate_per_s) = number(self.row, "rate_per_s").or_else(of_solo) else {
            return Arrivals::Poisson { load: self.load };
        };
        Arrivals::At(poisson(rate_per_s, self.setup.seconds, SEED))
    }

    fn policy(&self, config: Option<&str>) -> Result<Option<Box<dyn Policy + Send>>> {
        if !self.scheduled {
            return Ok(None);
        }
        let (name, own) = (text(self.row, "policy"), text(self.row, "policy_config"));
        let policy = tally_native_policy::by_name(name, config.unwrap_or(own));
        policy.map(Some).map_err(|why| anyhow!("{}: {why}", self.name()))
    }

    /// Give the training the pace of the row's own process, if that was measured. Returns what
    /// it then makes alone in the row's mode, steps a second.
    fn as_own(&self, high: &Trace, low: &mut Trace, config: Option<&str>) -> Result<Option<f64>> {
        let Some(own) = self.own else { return Ok(None) };
        let mut steps_per_s = self.alone_steps_per_s(own, high, low, config)?;
        // The solo figure is of another process, and perhaps of another hour: a training that its
        // own part limits had another pace. One that the GPU limits did not, for the GPU is the same:
        // a rate that differs under a policy says that the model of transformed kernels is off, and kernels made
        // longer or shorter for that would be off, too. Shares of own have it above and below the line.
        let is_launch_bound = low.alone[0].is_some_and(|alone| alone.is_launch_bound());
        if steps_per_s > 0.0 && (is_launch_bound || !self.scheduled) {
            slow_down(low, steps_per_s / own.steps_per_s);
            steps_per_s = self.alone_steps_per_s(own, high, low, config)?;
        }
        Ok(Some(steps_per_s).filter(|&rate| rate > 0.0))
    }

    /// What the training makes in the row's mode beside an inference without requests.
    fn alone_steps_per_s(
        &self,
        own: Own,
        high: &Trace,
        low: &Trace,
        config: Option<&str>,
    ) -> Result<f64> {
        let seconds = own.seconds;
        // An inference that waits for requests takes nothing of the training's host.
        let model = Model { hosts_permille: 0, ..self.setup.model };
        let setup = Setup { seconds, warm_up_seconds: Some(seconds), model, ..self.setup };
        let none = Arrivals::At(Vec::new());
        let service = self.service(high, &none);
        let report = simulate(&setup, &service, Some(low), self.policy(config)?);
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
                ns("own_solo_p50_ms").filter(|_| self.setup.sharing == SharingMode::Mps)
            {
                high.alone[1] = Some(like(high.alone[1].or(Some(plain)), own_ns));
            }
        }
        if let Some(rate) = number(self.row, "be_solo_steps_per_s") {
            as_fast_as(low, (1e9 / rate) as u64);
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

fn trace(name: &str) -> Result<Trace> {
    Ok(Trace::open(name)?)
}

/// What a training makes alone without a core.
pub fn plain_steps_per_s(low: &Trace) -> f64 {
    1e9 / low.timed_in(SharingMode::Timeslice).period_ns.max(1) as f64
}

/// The training takes so long alone, and under MPS as much longer as it did.
pub fn as_fast_as(low: &mut Trace, solo_ns: u64) {
    let before_ns = low.alone[0].map_or(solo_ns, |alone| alone.ns);
    let mps = |mps: Alone| mps.ns as f64 * solo_ns as f64 / before_ns as f64;
    low.alone[1] = low.alone[1].map(|alone| alone.scaled_to(mps(alone) as u64));
    low.alone[0] = Some(low.alone[0].unwrap_or_default().scaled_to(solo_ns));
}

/// Makes the training `by` times as slow alone.
fn slow_down(low: &mut Trace, by: f64) {
    low.alone = low
        .alone
        .map(|alone| alone.map(|alone| alone.scaled_to((alone.ns as f64 * by).round() as u64)));
}

fn is_vendor(row: &Value) -> bool {
    row.get("vendor_rewrite") == Some(&Value::Bool(true))
}

#[cfg(test)]
#[path = "row_tests.rs"]
mod tests;
