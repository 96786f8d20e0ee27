//! A measured row of the decode service, and the same simulated.

use crate::row::{Compared, PERCENT, as_fast_as, known, number, plain_steps_per_s, text};
use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use tally_engine::policy::Policy;
use tally_simulator::decode::{Decode, Requests, prefill};
use tally_simulator::trace::Alone;
use tally_simulator::{
    Arrivals, Model, Report, Service, Setup, SharingMode, Tenant, Trace, Transformable,
    simulate_several,
};

/// The recording that a step's kernels are from: of the same shape, but for grouped attention and the batch.
const STEP: &str = "llama7b_decode_b1";
/// As `bench/gpu/step_decode.py` has them: policies that learn, how long, how long the service runs before each window,
/// and how long a best-effort program runs alone, twice.
const LEARNS: [&str; 3] = ["slo-herald", "tpot-first", "throughput"];
const LEARN_SECONDS: f64 = 8.0;
const WARM_SECONDS: f64 = 2.0;
const ALONE_SECONDS: f64 = 2.0;
/// Layers of `llama-prefill`.
const PREFILL_LAYERS: usize = 8;
/// Requests of a window, at most.
const COUNT_MAX: usize = 64;
/// Runs alone in which the step is brought to what it took, and how near is near enough.
const FITS_MAX: usize = 6;
const NEAR: f64 = 0.005;
const REQUESTS: [(&str, &str); 2] = [
    ("conv", include_str!("../../gpu/data/azure-llm-conv.csv")),
    ("code", include_str!("../../gpu/data/azure-llm-code.csv")),
];

/// A row that can be simulated.
pub struct DecodeRow<'a> {
    row: &'a Value,
    setup: Setup,
    scheduled: bool,
}

/// Whether a row is one of the decode service.
pub fn is_of(row: &Value) -> bool {
    row.get("step_ms").is_some()
}

impl<'a> DecodeRow<'a> {
    pub fn of(row: &'a Value, setup: &Setup) -> Option<Self> {
        let (mode, percent) = match text(row, "mode").split_once(PERCENT[0]) {
            Some((mode, rest)) => (mode, rest.strip_suffix(PERCENT[1])?.parse().ok()?),
            None => (text(row, "mode"), setup.model.best_effort_percent),
        };
        let (sharing, scheduled) = match mode {
            "time-slicing" => (SharingMode::Timeslice, false),
            "mps" => (SharingMode::Mps, false),
            "tally-timeslice" => (SharingMode::Timeslice, true),
            "tally-mps" => (SharingMode::Mps, true),
            _ => return None,
        };
        let learns = LEARNS.contains(&text(row, "policy"));
        let learn_seconds = WARM_SECONDS + if learns { WARM_SECONDS + LEARN_SECONDS } else { 0.0 };
        let setup = Setup {
            sharing,
            transformable: if scheduled { Transformable::Open } else { Transformable::None },
            seconds: number(row, "seconds")?,
            overrun_seconds: 0.0,
            warm_up_seconds: Some(2.0 * ALONE_SECONDS),
            learn_seconds,
            model: Model { best_effort_percent: percent, ..setup.model },
            ..*setup
        };
        number(row, "be_share")?;
        Some(DecodeRow { row, setup, scheduled })
    }

    fn mode(&self) -> String {
        let [mode, policy, load] = ["mode", "policy", "load"].map(|key| text(self.row, key));
        let policy = if self.scheduled { format!(", {policy}") } else { String::new() };
        format!("{mode}{policy}, load {load}")
    }

    pub fn compare(&self, config: Option<&str>) -> Result<Compared> {
        let row = self.row;
        let get = |object: &str, key: &str| row.get(object).and_then(|value| number(value, key));
        let figure = |object: &str, key: &str| {
            get(object, key).with_context(|| format!("{}: no {object}.{key}", self.mode()))
        };
        let be = text(row, "beside");
        let mut low = match be {
            "llama-prefill" => prefill(PREFILL_LAYERS),
            name => Trace::open(known(name).with_context(|| format!("{name}: no trace of it"))?)?,
        };
        let rate = number(row, "be_solo_steps_per_s").context("no be_solo_steps_per_s")?;
        as_fast_as(&mut low, (1e9 / rate) as u64);
        let mut decode = Decode { requests: self.all_requests()?.backlog(), prefill: None };
        let mut step = Trace::open(STEP)?;
        let solo_ms = figure("solo_step_ms", "p50")?;
        if text(row, "load") == "full" {
            step = self.step(&decode, solo_ms)?;
        } else {
            let tokens = ["tokens_per_s", "tokens_over_solo"].map(|key| number(row, key));
            let [Some(tokens_per_s), Some(over_solo)] = tokens else {
                return Err(anyhow!("{}: no tokens a second", self.mode()));
            };
            // What a step takes depends on the batch, and that on the rate.
            for _ in 0..2 {
                decode.requests = self.requests(&step, &decode, tokens_per_s / over_solo)?;
                step = self.step(&decode, solo_ms)?;
            }
        }
        let tpot_ns =
            number(row, "target_ms").filter(|_| self.scheduled).map(|ms| (ms * 1e6) as u64);
        let report = self.simulated(&step, &decode, tpot_ns, Some(&low), config)?;
        let h = &report.high_priority;
        let share = report.best_effort.as_ref().map_or(0.0, |low| low.share);
        Ok(Compared {
            hp: text(row, "service").into(),
            be: be.into(),
            mode: self.mode(),
            objective: None,
            policy_config: None,
            vendor_rewrite: false,
            p99_over_alone: h.service_p99_over_solo,
            measured_p99_over_alone: figure("step_ms", "p99")? / figure("solo_step_ms", "p99")?,
            p50_ms: h.service_p50_ms,
            measured_p50_ms: figure("step_ms", "p50")?,
            p99_ms: h.service_p99_ms,
            measured_p99_ms: figure("step_ms", "p99")?,
            share: share * plain_steps_per_s(&low) / rate,
            measured_share: number(row, "be_share").unwrap_or(0.0),
            share_of_own: None,
            measured_share_of_own: None,
            alone_share: None,
            measured_alone_share: None,
            report,
        })
    }

    fn all_requests(&self) -> Result<Requests> {
        let name = text(self.row, "trace");
        let known = REQUESTS.iter().find(|(trace, _)| *trace == name);
        let (_, csv) = known.with_context(|| format!("{name}: no requests of that name"))?;
        Ok(Requests::parse(name, csv)?)
    }

    /// The requests that the row's run served, as far as so many tokens a second alone say how many there were. Before
    /// each window they begin anew.
    fn requests(&self, step: &Trace, decode: &Decode, tokens_per_s: f64) -> Result<Requests> {
        let all = self.all_requests()?;
        let seconds = WARM_SECONDS + self.setup.seconds;
        let before_s = self.setup.learn_seconds - WARM_SECONDS;
        let of = |count: usize| {
            let rate_per_s = count as f64 / seconds;
            let window = all.at_rate(rate_per_s, seconds);
            match before_s > 0.0 {
                true => all.at_rate(rate_per_s, before_s).then(&window, (before_s * 1e9) as u64),
                false => window,
            }
        };
        let off = |count: usize| {
            let decode = Decode { requests: of(count), prefill: decode.prefill.clone() };
            let report = self.simulated(step, &decode, None, None, None)?;
            let alone = report.high_priority.decode.map_or(0.0, |decode| decode.tokens_per_s);
            Ok::<_, anyhow::Error>(alone - tokens_per_s)
        };
        let (mut few, mut many) = (1, COUNT_MAX);
        while many - few > 1 {
            let middle = few.midpoint(many);
            if off(middle)? < 0.0 { few = middle } else { many = middle }
        }
        Ok(of(if off(few)?.abs() <= off(many)?.abs() { few } else { many }))
    }

    /// A step of the largest batch that takes alone what those of the row's service took.
    fn step(&self, decode: &Decode, p50_ms: f64) -> Result<Trace> {
        let recorded = Trace::open(STEP)?;
        let recorded_ns = recorded.alone[0].map_or(1, |alone| alone.ns);
        let of = |ns: f64| {
            let scaled =
                |alone: Alone| alone.scaled_to((alone.ns as f64 * ns / recorded_ns as f64) as u64);
            Trace { alone: recorded.alone.map(|alone| alone.map(scaled)), ..recorded.clone() }
        };
        // Where the median is at the edge between two batch sizes no step may give it.
        let (mut ns, mut best) = (p50_ms * 1e6, None);
        for _ in 0..FITS_MAX {
            let step = of(ns);
            let report = self.simulated(&step, decode, None, None, None)?;
            let over = report.high_priority.solo_ms / p50_ms;
            let off = (over - 1.0).abs();
            if best.as_ref().is_none_or(|(least, _)| off < *least) {
                best = Some((off, step));
            }
            if off < NEAR {
                break;
            }
            ns /= over;
        }
        best.map(|(_, step)| step).context("no step was tried")
    }

    fn simulated(
        &self,
        step: &Trace,
        decode: &Decode,
        tpot_ns: Option<u64>,
        low: Option<&Trace>,
        config: Option<&str>,
    ) -> Result<Report> {
        let none = Arrivals::At(Vec::new());
        let service = Service { tpot_ns, decode: Some(decode), ..Service::new(step, &none) };
        let tenant = |trace| Tenant { trace, weight: 1, min_share_permille: 0 };
        let low: Vec<Tenant> = low.map(tenant).into_iter().collect();
        let policy =
            (self.scheduled && !low.is_empty()).then(|| self.policy(config)).transpose()?;
        Ok(simulate_several(&self.setup, &[service], &low, policy))
    }

    fn policy(&self, config: Option<&str>) -> Result<Box<dyn Policy + Send>> {
        let policy = tally_native_policy::by_name(text(self.row, "policy"), config.unwrap_or(""));
        policy.map_err(|why| anyhow!("{}: {why}", self.mode()))
    }
}
