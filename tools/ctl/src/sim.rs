//! `tallyctl sim`: judge a policy without a GPU and without a core.

mod plot;

use crate::error::CtlError;
use crate::policy::LimitsArg;
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tally_contract::objective::{Objective, SLO_PERCENTILE_DEFAULT};
use tally_engine::BuiltInRule;
use tally_engine::policy::Policy;
use tally_simulator::{
    Arrivals, Model, Report, Setup, SharingMode, Trace, Transformable, simulate,
};

/// Silence that the built-in rule waits for, as in the core.
const IDLE_GAP_NS: u64 = 100_000;
/// Longest window, and longest warm-up.
const SECONDS_MAX: f64 = 3_600.0;

#[derive(Debug, Args)]
pub struct SimArgs {
    /// Trace of the inference: a built-in one or a file (.csv, .csv.gz). One iteration is one request.
    #[arg(long, value_name = "TRACE")]
    pub hp: String,
    /// The training: a built-in trace or a file (.csv, .csv.gz).
    #[arg(long, value_name = "TRACE")]
    pub be: String,
    /// Load of the inference: requests arrive at random, at a rate that would keep it busy for this share of the time
    /// if it were alone.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub load: f64,
    /// Objective of the inference: longest time that the service of a request may take, from 10us to 600s with its unit
    #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms)]
    pub slo: Option<f64>,
    /// Share of requests, in percent, that must keep `--slo`. Default: 99.
    #[arg(long, value_name = "PERCENT", value_parser = crate::client::percentile, requires = "slo")]
    pub percentile: Option<f64>,
    /// File of arrival times in place of random ones: one a line, in seconds, rising.
    #[arg(long, value_name = "FILE")]
    pub arrivals: Option<PathBuf>,
    /// The policy: a component, `built-in`, `native:tally-priority` (the same rule as
    /// the component's, compiled natively), or `none` for no scheduling at all.
    #[arg(long, value_name = "FILE", default_value = "built-in")]
    pub policy: String,
    /// Configuration file that is passed to the policy
    #[arg(long, value_name = "FILE")]
    pub policy_config: Option<PathBuf>,
    /// A capability that the policy has been granted; may be given several times.
    #[arg(long = "grant", value_name = "NAME")]
    pub grants: Vec<String>,
    /// The limits of the policy: the core's defaults, or those for components with an interpreter.
    #[arg(long, value_enum, default_value = "default")]
    pub limits: LimitsArg,
    /// How the two share the GPU.
    #[arg(long, value_enum, default_value = "timeslice")]
    pub sharing: SharingArg,
    /// Which of the training's kernels can be transformed.
    #[arg(long, value_enum, default_value = "open")]
    pub transformable: TransformableArg,
    /// The inference launches kernel by kernel, as recorded, and not as one CUDA graph.
    #[arg(long)]
    pub eager: bool,
    /// How long the GPU stays with the high-priority program after its last kernel (timeslice only). Default: that of
    /// the core's `[sharing.timeslice] linger_us`.
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub linger_us: Option<u64>,
    /// Change a figure of the modelled machine (docs/results-simulator.md lists them); may be given several times.
    #[arg(long = "figure", value_name = "NAME=N")]
    pub figures: Vec<String>,
    /// Length of the simulated window in which requests arrive.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub seconds: f64,
    /// How long the training runs before the window, so that its kernels get profiles. Default: five iterations.
    #[arg(long, value_name = "S")]
    pub warm_up_seconds: Option<f64>,
    /// Seed of the random arrivals.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print JSON (schema 1), the same bytes each time. How long the simulation took goes to standard error.
    #[arg(long)]
    pub json: bool,
    /// Also draw the result as SVG: latencies beside those of the inference alone, and the training's share.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Draw on a dark background.
    #[arg(long, requires = "svg")]
    pub dark: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SharingArg {
    /// Let one process run at a time, in time slices
    Timeslice,
    /// Run blocks of both programs side by side
    Mps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransformableArg {
    /// Transform none of the kernels
    None,
    /// Transform all kernels but those of closed libraries
    Open,
    /// Transform all kernels, closed libraries included
    All,
}

/// What the name of a policy of this repository, compiled natively, begins with.
const NATIVE: &str = "native:";

/// What it takes to make instances of the policy.
struct Policies {
    name: String,
    config: String,
    #[cfg(feature = "wasm")]
    host: Option<tally_wasm_host::PolicyHost>,
}

impl Policies {
    fn open(
        name: &str,
        config: Option<&Path>,
        limits: LimitsArg,
        grants: &[String],
    ) -> Result<Self, CtlError> {
        #[cfg(not(feature = "wasm"))]
        let _ = limits;
        let native = ["built-in", "none"].contains(&name);
        #[cfg(not(feature = "wasm"))]
        let _ = grants;
        let config = match config {
            Some(path) if native => {
                let why = format!("--policy-config {}: {name} has none", path.display());
                return Err(CtlError::Usage(why));
            }
            Some(path) => std::fs::read_to_string(path).map_err(|e| {
                CtlError::Failed(format!("--policy-config {}: {e}", path.display()))
            })?,
            None => String::new(),
        };
        Ok(Policies {
            name: name.into(),
            config,
            #[cfg(feature = "wasm")]
            host: if native || name.starts_with(NATIVE) {
                None
            } else {
                Some(wasm_host(limits, grants)?)
            },
        })
    }

    /// A policy as if just loaded; `None`: no scheduling.
    fn load(&self) -> Result<Option<Box<dyn Policy + Send>>, CtlError> {
        match self.name.as_str() {
            "none" => Ok(None),
            "built-in" => Ok(Some(Box::new(BuiltInRule { idle_ns: IDLE_GAP_NS }))),
            name => match name.strip_prefix(NATIVE) {
                Some(native) => tally_native_policy::by_name(native, &self.config)
                    .map(Some)
                    .map_err(|why| CtlError::Usage(format!("--policy {name}: {why}"))),
                None => self.load_wasm(name).map(Some),
            },
        }
    }

    #[cfg(feature = "wasm")]
    fn load_wasm(&self, file: &str) -> Result<Box<dyn Policy + Send>, CtlError> {
        let Some(host) = &self.host else { return Err(CtlError::Usage("no host".into())) };
        let loaded = host.load_file(Path::new(file), &self.config);
        let policy = loaded.map_err(|e| CtlError::Failed(format!("--policy: {e}")))?;
        Ok(Box::new(policy))
    }

    #[cfg(not(feature = "wasm"))]
    fn load_wasm(&self, file: &str) -> Result<Box<dyn Policy + Send>, CtlError> {
        Err(CtlError::Usage(format!(
            "--policy {file}: this tallyctl was built without WebAssembly (feature `wasm`); expected built-in, native:tally-priority or none"
        )))
    }
}

/// Bounds as in the core, but for CPU time: how fast this machine is must not change
/// what comes out. Fuel ends what loops.
#[cfg(feature = "wasm")]
fn wasm_host(
    limits: LimitsArg,
    grants: &[String],
) -> Result<tally_wasm_host::PolicyHost, CtlError> {
    let mut limits = limits.limits();
    limits.call_cpu_ms_max = limits.init_cpu_ms_max;
    let granted = grants.iter().map(|name| name.parse::<tally_wasm_host::Capability>());
    let granted = granted
        .collect::<Result<_, _>>()
        .map_err(|why| CtlError::Usage(format!("--grant: {why}")))?;
    tally_wasm_host::PolicyHost::new(limits)
        .map(|host| host.granting(granted))
        .map_err(|e| CtlError::Failed(e.to_string()))
}

fn positive(name: &str, value: f64, most: f64) -> Result<f64, CtlError> {
    if value > 0.0 && value <= most {
        return Ok(value);
    }
    Err(CtlError::Usage(format!("--{name} {value}: expected more than 0 and at most {most}")))
}

fn warm_up(seconds: f64) -> Result<f64, CtlError> {
    if (0.0..=SECONDS_MAX).contains(&seconds) {
        return Ok(seconds);
    }
    Err(CtlError::Usage(format!("--warm-up-seconds {seconds}: expected 0 to {SECONDS_MAX}")))
}

fn trace(option: &str, name: &str) -> Result<Trace, CtlError> {
    Trace::open(name).map_err(|e| CtlError::Failed(format!("--{option}: {e}")))
}

pub fn run(args: &SimArgs) -> Result<(), CtlError> {
    let seconds = positive("seconds", args.seconds, SECONDS_MAX)?;
    let load = positive("load", args.load, 100.0)?;
    let config = args.policy_config.as_deref();
    let policies = Policies::open(&args.policy, config, args.limits, &args.grants)?;
    let sharing = match args.sharing {
        SharingArg::Timeslice => SharingMode::Timeslice,
        SharingArg::Mps => SharingMode::Mps,
    };
    let transformable = match args.transformable {
        TransformableArg::None => Transformable::None,
        TransformableArg::Open => Transformable::Open,
        TransformableArg::All => Transformable::All,
    };
    let overrun_seconds = seconds;
    let warm_up_seconds = args.warm_up_seconds.map(warm_up).transpose()?;
    let seed = args.seed;
    let mut model = Model::default();
    model.linger_ns = args.linger_us.map_or(model.linger_ns, |us| us * 1_000);
    for figure in &args.figures {
        let wrong = |why| CtlError::Usage(format!("--figure {figure}: {why}"));
        let (name, value) = figure.split_once('=').unwrap_or((figure, ""));
        let value = value.parse().map_err(|_| wrong("expected NAME=WHOLE-NUMBER".into()))?;
        model.set(name, value).map_err(wrong)?;
    }
    let graph = !args.eager;
    let percentile = args.percentile.unwrap_or(SLO_PERCENTILE_DEFAULT);
    let slo = args.slo.map(|ms| Objective::new(ms * 1e6, percentile)).transpose();
    let slo = slo.map_err(|why| CtlError::Usage(format!("--slo: {why}")))?;
    let setup = Setup {
        sharing,
        transformable,
        slo,
        seconds,
        overrun_seconds,
        warm_up_seconds,
        seed,
        graph,
        model,
    };
    let mut out = std::io::stdout().lock();
    let (high, low) = (trace("hp", &args.hp)?, trace("be", &args.be)?);
    let arrivals = match &args.arrivals {
        Some(path) => Arrivals::open(path).map_err(|e| CtlError::Failed(format!("--{e}")))?,
        None => Arrivals::Poisson { load },
    };
    let policy = policies.load()?;
    let started = Instant::now();
    let report = simulate(&setup, &high, Some(&low), &arrivals, policy);
    let took_s = started.elapsed().as_secs_f64();
    if let Some(file) = &args.svg {
        let mode = match args.sharing {
            SharingArg::Timeslice => "time-sliced",
            SharingArg::Mps => "under MPS",
        };
        crate::picture::write(file, &plot::figure(&args.policy, mode, &report), args.dark)?;
    }
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
        let rate = report.launches as f64 / took_s;
        eprintln!("tallyctl: {} launches in {took_s:.2} s, {rate:.0} a second", report.launches);
        return Ok(());
    }
    show(&mut out, &args.policy, &report, took_s)
}

fn show(out: &mut impl Write, policy: &str, r: &Report, took_s: f64) -> Result<(), CtlError> {
    let h = &r.high_priority;
    writeln!(out, "policy         {policy}, {:?}, {} s, seed {}", r.sharing, r.seconds, r.seed)?;
    writeln!(out, "high priority  {}: {} of {} requests served", h.trace, h.served, h.arrived)?;
    writeln!(
        out,
        "  service ms   solo {:.3}  p50 {:.3} ({:.2}x)  p99 {:.3} ({:.2}x)",
        h.solo_ms,
        h.service_p50_ms,
        h.service_p50_over_solo,
        h.service_p99_ms,
        h.service_p99_over_solo
    )?;
    writeln!(
        out,
        "  queued ms    solo p99 {:.3}  p50 {:.3}  p99 {:.3} ({:.2}x)",
        h.solo_queued_p99_ms, h.queued_p50_ms, h.queued_p99_ms, h.queued_p99_over_solo
    )?;
    if let (Some(slo_ms), Some(within)) = (h.slo_ms, h.within) {
        writeln!(
            out,
            "  objective    {slo_ms:.3} ms: kept by {:.2} % of requests",
            within * 100.0
        )?;
    }
    if let Some(b) = &r.best_effort {
        writeln!(out, "best effort    {}: share {:.3}, {} launches", b.trace, b.share, b.done)?;
    }
    if let Some(d) = &r.decisions {
        writeln!(
            out,
            "decisions      {} asked: {} whole, {} sliced, {} preemptible, {} SM-limited, {} holds; {} leased, {} degraded, {} by the built-in rule",
            d.asked,
            d.whole,
            d.sliced,
            d.preemptible,
            d.sm_limited,
            d.held,
            d.leased,
            d.degraded,
            d.built_in_rule
        )?;
        writeln!(
            out,
            "yields         asked for {} times, {} launches did",
            d.yields, d.launches_yielded
        )?;
    }
    writeln!(
        out,
        "simulated      {} launches, {} kernels, {} changes of context in {took_s:.2} s: {:.0} launches a second",
        r.launches,
        r.kernels,
        r.context_changes,
        r.launches as f64 / took_s
    )?;
    writeln!(out, "A model, not a measurement: docs/results-simulator.md says how far off it is.")?;
    Ok(())
}
