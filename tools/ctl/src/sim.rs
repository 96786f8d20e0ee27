//! `tallyctl sim`: judge a policy without a GPU and without a core.

mod frontier;
mod plot;
mod policies;
mod programs;
mod text;

use crate::error::CtlError;
use crate::policy::LimitsArg;
use clap::{Args, ValueEnum};
use policies::Policies;
use programs::{BestEffort, HighPriority, Served, best_effort, high_priority};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;
use tally_contract::objective::{Objective, SLO_PERCENTILE_DEFAULT};
use tally_engine::policy::Policy;
use tally_simulator::{
    Arrivals, Model, Report, Service, Setup, SharingMode, Tenant, Trace, Transformable,
    simulate_several,
};

/// Longest window, and longest warm-up.
const SECONDS_MAX: f64 = 3_600.0;
/// Most values of `--hp`.
const SERVICES_MAX: usize = 16;

#[derive(Debug, Args)]
pub struct SimArgs {
    /// A high-priority service, such as an inference: a built-in trace or a file (.csv, .csv.gz). One iteration is one
    /// request. May be given up to 16 times, each with its own options in place of `--slo`, `--tpot`, `--load`,
    /// `--arrivals` and `--eager`, such as `,slo=20ms,load=0.4`. Without it the best-effort programs are alone.
    ///
    /// With `requests=FILE` it decodes with continuous batching: an iteration is a decode step of 16 sequences,
    /// and the file has lines of `arrival_ms,context,generated` under that header. `backlog`: they are all there from
    /// the start, again and again. `prefill=TRACE`: what a chunk of 512 tokens launches; default: that of a
    /// model of 8 billion parameters.
    #[arg(
        long,
        value_name = "TRACE[,slo=TIME][,tpot=TIME][,load=SHARE][,arrivals=FILE][,eager][,requests=FILE]\
[,backlog][,prefill=TRACE]"
    )]
    #[arg(value_parser = high_priority)]
    pub hp: Vec<HighPriority>,
    /// A best-effort program, such as a training: a built-in trace or a file (.csv, .csv.gz). May be given several
    /// times, each with a weight from 1 to 1000 (default 1) for its share of the GPU, and a floor, such as
    /// `min_share=20%`.
    #[arg(long, value_name = "TRACE[,weight=N][,min_share=PERCENT]", required = true, value_parser = best_effort)]
    pub be: Vec<BestEffort>,
    /// Load of each service: requests arrive at random, at a rate that would keep it busy for this share of the time
    /// if it were alone.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = programs::load)]
    pub load: f64,
    /// Objective of each service: longest time that a request may take once begun, from 10us to 600s with its unit
    #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms, requires = "hp")]
    pub slo: Option<f64>,
    /// Objective of tokens: each service makes one with each request, which is a CUDA graph
    #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms, requires = "hp")]
    #[arg(conflicts_with_all = ["slo", "frontier", "eager"])]
    pub tpot: Option<f64>,
    /// Share of requests, in percent, that must keep an objective for requests. Default: 99.
    #[arg(long, value_name = "PERCENT", value_parser = crate::client::percentile)]
    pub percentile: Option<f64>,
    /// Simulate each policy under several objectives, which are these multiples of the 99th percentile of each service
    /// alone: what is left for best effort, and which share of the requests keeps the objective (the least of several
    /// services)
    #[arg(long, value_name = "N,N...", value_delimiter = ',', value_parser = multiple)]
    #[arg(requires = "hp", conflicts_with = "slo")]
    pub frontier: Vec<f64>,
    /// File of arrival times in place of random ones, the same for each service: one a line, in seconds, rising.
    #[arg(long, value_name = "FILE")]
    pub arrivals: Option<PathBuf>,
    /// The policy: a component, `built-in`, `native:NAME` (the same rule as the component's, compiled natively:
    /// slo-herald, tally-priority, throughput or tpot-first), or `none` for no scheduling at all. With `--frontier` may
    /// be given several times.
    #[arg(long = "policy", value_name = "FILE", default_value = "built-in")]
    pub policies: Vec<String>,
    /// Configuration file that is passed to the policy
    #[arg(long, value_name = "FILE")]
    pub policy_config: Option<PathBuf>,
    /// A capability that the policy has been granted; may be given several times.
    #[arg(long = "grant", value_name = "NAME")]
    pub grants: Vec<String>,
    /// The limits of the policy: the core's defaults, or those for components with an interpreter.
    #[arg(long, value_enum, default_value = "default")]
    pub limits: LimitsArg,
    /// How the programs share the GPU.
    #[arg(long, value_enum, default_value = "timeslice")]
    pub sharing: SharingArg,
    /// Which best-effort kernels can be transformed.
    #[arg(long, value_enum, default_value = "open")]
    pub transformable: TransformableArg,
    /// Requests launch kernel by kernel, as recorded, and not as one CUDA graph.
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
    /// How long best effort runs before the window, so that its kernels get profiles. Default: five iterations of the
    /// program whose iterations are longest.
    #[arg(long, value_name = "S")]
    pub warm_up_seconds: Option<f64>,
    /// How long the services then serve beside best effort before anything is counted, so that a policy learns them.
    #[arg(long, value_name = "S")]
    pub learn_seconds: Option<f64>,
    /// Seed of the random arrivals.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print JSON (schema 1), the same bytes each time. How long the simulation took goes to standard error.
    #[arg(long)]
    pub json: bool,
    /// Also draw the result as SVG: latencies beside those of each service alone, and the training's share. With
    /// `--frontier`: the share over the objective, for each policy.
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
    /// Run blocks of the programs side by side
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

/// A value of `--frontier`.
fn multiple(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (1.0..=1_000.0).contains(value));
    value.ok_or_else(|| "expected multiples from 1 to 1000, such as 1.1,1.5,2".into())
}

fn positive(name: &str, value: f64, most: f64) -> Result<f64, CtlError> {
    if value > 0.0 && value <= most {
        return Ok(value);
    }
    Err(CtlError::Usage(format!("--{name} {value}: expected more than 0 and at most {most}")))
}

fn before(option: &str, seconds: f64) -> Result<f64, CtlError> {
    if (0.0..=SECONDS_MAX).contains(&seconds) {
        return Ok(seconds);
    }
    Err(CtlError::Usage(format!("--{option} {seconds}: expected 0 to {SECONDS_MAX}")))
}

fn trace(option: &str, name: &str) -> Result<Trace, CtlError> {
    Trace::open(name).map_err(|e| CtlError::Failed(format!("--{option}: {e}")))
}

/// What is the same for every policy and objective.
struct Scene {
    setup: Setup,
    services: Vec<Served>,
    low: Vec<(Trace, BestEffort)>,
}

impl Scene {
    fn open(args: &SimArgs) -> Result<Self, CtlError> {
        let setup = setup(args)?;
        positive("load", args.load, programs::LOAD_MAX)?;
        let services = args.hp.iter().map(|one| Served::open(one, args));
        let services = services.collect::<Result<_, CtlError>>()?;
        let low = args.be.iter().map(|one| Ok((trace("be", &one.trace)?, one.clone())));
        let low = low.collect::<Result<_, CtlError>>()?;
        Ok(Scene { setup, services, low })
    }

    /// What one in a hundred requests of each service takes if it has the GPU alone.
    fn alone_p99_ms(&self) -> Vec<f64> {
        let arrivals = Arrivals::At(Vec::new());
        let services = self.services.iter();
        let services: Vec<Service<'_>> =
            services.map(|one| Service { arrivals: &arrivals, ..one.service(None) }).collect();
        let report = simulate_several(&self.setup, &services, &[], None);
        report.each_service().iter().map(|service| service.solo_p99_ms).collect()
    }

    /// `slos`: objectives of all services in place of their own, or none.
    fn simulate(&self, slos: &[Objective], policy: Option<Box<dyn Policy + Send>>) -> Report {
        let services = self.services.iter().enumerate();
        let services: Vec<Service<'_>> =
            services.map(|(at, one)| one.service(slos.get(at).copied())).collect();
        let low = self.low.iter();
        let tenants: Vec<Tenant<'_>> = low
            .map(|(trace, one)| Tenant {
                trace,
                weight: one.weight,
                min_share_permille: one.min_share_permille,
            })
            .collect();
        simulate_several(&self.setup, &services, &tenants, policy)
    }
}

fn setup(args: &SimArgs) -> Result<Setup, CtlError> {
    let seconds = positive("seconds", args.seconds, SECONDS_MAX)?;
    let mut model = Model::default();
    model.linger_ns = args.linger_us.map_or(model.linger_ns, |us| us * 1_000);
    for figure in &args.figures {
        let wrong = |why| CtlError::Usage(format!("--figure {figure}: {why}"));
        let (name, value) = figure.split_once('=').unwrap_or((figure, ""));
        let value = value.parse().map_err(|_| wrong("expected NAME=WHOLE-NUMBER".into()))?;
        model.set(name, value).map_err(wrong)?;
    }
    Ok(Setup {
        sharing: match args.sharing {
            SharingArg::Timeslice => SharingMode::Timeslice,
            SharingArg::Mps => SharingMode::Mps,
        },
        transformable: match args.transformable {
            TransformableArg::None => Transformable::None,
            TransformableArg::Open => Transformable::Open,
            TransformableArg::All => Transformable::All,
        },
        seconds,
        overrun_seconds: seconds,
        warm_up_seconds: args.warm_up_seconds.map(|s| before("warm-up-seconds", s)).transpose()?,
        learn_seconds: args.learn_seconds.map_or(Ok(0.0), |s| before("learn-seconds", s))?,
        seed: args.seed,
        model,
    })
}

fn objective(args: &SimArgs, slo_ms: f64) -> Result<Objective, CtlError> {
    let percentile = args.percentile.unwrap_or(SLO_PERCENTILE_DEFAULT);
    Objective::new(slo_ms * 1e6, percentile).map_err(|why| CtlError::Usage(format!("--slo: {why}")))
}

/// How the programs share the GPU, in words.
fn mode(args: &SimArgs) -> &'static str {
    match args.sharing {
        SharingArg::Timeslice => "time-sliced",
        SharingArg::Mps => "under MPS",
    }
}

/// Refuse services that do not fit each other or the other options.
fn check_services(args: &SimArgs) -> Result<(), CtlError> {
    let given = args.hp.len();
    if given > SERVICES_MAX {
        return Err(CtlError::Usage(format!(
            "--hp is given {given} times: expected at most {SERVICES_MAX} services"
        )));
    }
    let has_slo = args.slo.is_some() || args.hp.iter().any(|one| one.slo_ms.is_some());
    if args.percentile.is_some() && !has_slo && args.frontier.is_empty() {
        return Err(CtlError::Usage("--percentile needs --slo or --frontier".into()));
    }
    let own = args.hp.iter().find(|one| one.slo_ms.is_some() || one.tpot_ms.is_some());
    let decodes = args.hp.iter().find(|one| one.requests.is_some());
    if let Some(decodes) = decodes.filter(|_| !args.frontier.is_empty()) {
        return Err(CtlError::Usage(format!(
            "--frontier is for services whose requests are served one by one, and --hp {} has requests of tokens: \
             leave it out",
            decodes.trace
        )));
    }
    if let Some(own) = own.filter(|_| !args.frontier.is_empty()) {
        return Err(CtlError::Usage(format!(
            "--frontier sets the objectives of all services, and --hp {} has its own: leave out its slo and tpot",
            own.trace
        )));
    }
    Ok(())
}

pub fn run(args: &SimArgs) -> Result<(), CtlError> {
    check_services(args)?;
    if args.policies.len() > 1 && (args.frontier.is_empty() || args.policy_config.is_some()) {
        let why = "several --policy need --frontier, and go without --policy-config";
        return Err(CtlError::Usage(why.into()));
    }
    let open = |name: &String| Policies::open(name, args);
    let policies = args.policies.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let scene = Scene::open(args)?;
    if !args.frontier.is_empty() {
        return frontier::run(args, &scene, &policies);
    }
    let Some(policies) = policies.first() else { return Ok(()) };
    let policy = policies.load()?;
    let started = Instant::now();
    let report = scene.simulate(&[], policy);
    let took_s = started.elapsed().as_secs_f64();
    if let Some(file) = &args.svg {
        let figure = plot::figure(&policies.name, mode(args), &report);
        crate::picture::write(file, &figure, args.dark)?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
        let rate = report.launches as f64 / took_s;
        eprintln!("tallyctl: {} launches in {took_s:.2} s, {rate:.0} a second", report.launches);
        return Ok(());
    }
    text::show(&mut out, &policies.name, &report, took_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_multiple_is_a_number_from_1_to_1000() {
        for wrong in ["0.9", "NaN", "1001", "", "x"] {
            assert!(multiple(wrong).is_err_and(|why| why.contains("1 to 1000")), "{wrong}");
        }
        assert_eq!(multiple("1.25"), Ok(1.25));
    }
}
