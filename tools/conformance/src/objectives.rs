//! Do services keep their objectives beside a training, and what is left for that? In the simulator, which says of any
//! policy what `tallyctl sim` does.

use crate::Options;
use crate::report::{Check, Outcome};
use crate::steady::Stopped;
use crate::subject::Subject;
use tally_engine::policy::{Objective, Policy};
use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate_several,
};

/// Recorded requests of each service, the share of the time that they take alone, and the objective: so many times
/// their 99th percentile alone.
const SERVICES: [(&str, f64, f64); 2] =
    [("bert_large_infer_b1_s128", 0.3, 4.0), ("resnet50_infer_b1", 0.3, 5.0)];
const TRAINING: &str = "gpt2_12l_train_b8_s1024";
const SECONDS: f64 = 6.0;
/// Share of the requests that must keep it.
const WITHIN: f64 = 0.99;

/// A service's trace, its arrivals and its objective, ns.
struct Loaded {
    trace: Trace,
    arrivals: Arrivals,
    slo_ns: u64,
}

impl Loaded {
    fn service(&self) -> Service<'_> {
        let slo = Objective { slo_ns: self.slo_ns, percentile: WITHIN * 100.0 };
        Service { slo: Some(slo), ..Service::new(&self.trace, &self.arrivals) }
    }
}

fn open(name: &str) -> Trace {
    Trace::open(name).expect("a built-in trace")
}

fn setup(sharing: SharingMode) -> Setup {
    Setup { sharing, seconds: SECONDS, ..Setup::default() }
}

fn loaded((name, load, times): (&str, f64, f64), sharing: SharingMode) -> Loaded {
    let (trace, arrivals) = (open(name), Arrivals::Poisson { load });
    let setup = Setup { seconds: 0.1, ..setup(sharing) };
    let alone = simulate_several(&setup, &[Service::new(&trace, &arrivals)], &[], None);
    let slo_ns = (alone.high_priority.solo_p99_ms * times * 1e6) as u64;
    Loaded { trace, arrivals, slo_ns }
}

/// Where contexts take turns, services wait for each other whatever the policy does: the first one alone.
fn run(subject: &dyn Subject, sharing: SharingMode) -> Result<Report, Stopped> {
    let policy: Box<dyn Policy + Send> = Box::new(subject.start(None)?);
    let count = if sharing == SharingMode::Mps { SERVICES.len() } else { 1 };
    let all: Vec<Loaded> = SERVICES[..count].iter().map(|one| loaded(*one, sharing)).collect();
    let services: Vec<Service> = all.iter().map(Loaded::service).collect();
    let training = open(TRAINING);
    let tenant = Tenant { trace: &training, weight: 1, min_share_permille: 0 };
    Ok(simulate_several(&setup(sharing), &services, &[tenant], Some(policy)))
}

/// The least share of a service's requests that kept the objective, and the training's speed over that alone.
fn figures(report: &Report) -> (f64, f64) {
    let within = report.each_service().iter().filter_map(|service| service.within);
    let share = report.best_effort.as_ref().map_or(0.0, |training| training.share);
    (within.fold(1.0, f64::min), share)
}

/// Decisions before the policy failed, if it did.
fn failed(report: &Report) -> Option<u64> {
    let decisions = report.decisions.filter(|decisions| decisions.built_in_rule > 0)?;
    Some(decisions.asked - decisions.built_in_rule.min(decisions.asked))
}

/// Required only if the options say so: a policy need not know of objectives.
pub fn objectives(subject: &dyn Subject, options: &Options) -> Check {
    let name = "objectives";
    let modes = [SharingMode::Mps, SharingMode::Timeslice];
    let [side_by_side, in_turns] = match modes.map(|sharing| run(subject, sharing)) {
        [Ok(first), Ok(second)] => {
            if let Some(decisions) = [&first, &second].into_iter().find_map(failed) {
                let why = format!("in the simulator the policy failed after {decisions} decisions");
                return crate::checks::not_run(name, Stopped::Starved(why));
            }
            [figures(&first), figures(&second)]
        }
        [Err(stopped), _] | [_, Err(stopped)] => return crate::checks::not_run(name, stopped),
    };
    let detail = format!(
        "two services keep their objectives in {:.1} % of the requests beside a training, which has {:.2} of its speed; \
         where contexts take turns, one service in {:.1} %, and the training {:.2} (simulated)",
        side_by_side.0 * 100.0,
        side_by_side.1,
        in_turns.0 * 100.0,
        in_turns.1,
    );
    let is_kept = [side_by_side, in_turns].iter().all(|(within, _)| *within >= WITHIN);
    let (outcome, advice) = match (is_kept, options.objectives) {
        (true, _) => (Outcome::Pass, ""),
        (false, false) => (Outcome::Info, ""),
        (false, true) => (
            Outcome::Fail,
            "hold best-effort launches that are predicted to take longer than `services.slack-ns`; \
             `sdk/*/examples/slack` does it",
        ),
    };
    Check { name, outcome, detail, advice }
}
