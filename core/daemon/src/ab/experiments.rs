//! The experiment that runs, its status and its report. Knows nothing of how it is carried out ([`super::course`]).

use super::keep::Keep;
use crate::config::Config;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use tally_ab::report::ArmSource;
use tally_ab::verdict::conclude;
use tally_ab::{Arm, Experiment, Reason, Report};
use tally_admin::ab::AbStatus;
use tally_ipc::wait::now_ns;
use tokio::sync::{Notify, watch};

/// An experiment ends within this time of being told to, or is given up.
const END_MAX: Duration = Duration::from_secs(10);
pub(crate) struct Running {
    pub(crate) experiment: RefCell<Experiment>,
    pub(crate) arms: [RefCell<ArmSource>; 2],
    /// Why it is to be stopped.
    pub(crate) asked: Cell<Option<Reason>>,
    pub(crate) stop: Notify,
    /// When A was put active after the end.
    pub(crate) a_back_ns: Cell<Option<u64>>,
    /// B stays active after the end.
    pub(crate) promoted: Cell<bool>,
    /// What is written down in mid-test and not finished when it ends.
    pub(crate) writing: Cell<Option<tokio::task::JoinHandle<()>>>,
}

impl Running {
    pub(super) fn arms(&self) -> [ArmSource; 2] {
        [self.arms[0].borrow().clone(), self.arms[1].borrow().clone()]
    }

    fn a_back_after_ns(&self) -> Option<u64> {
        let experiment = self.experiment.borrow();
        let ended_ns = experiment.started_ns() + experiment.ended()?.after_ns;
        Some(self.a_back_ns.get()?.saturating_sub(ended_ns))
    }

    fn ask_to_end(&self, reason: Reason) {
        self.asked.set(self.asked.get().or(Some(reason)));
        self.stop.notify_one();
    }
}

/// The experiment that runs, and the report of the last one, be it of an earlier core.
pub struct Experiments {
    pub(super) running: RefCell<Option<Rc<Running>>>,
    pub(super) last: RefCell<Option<Rc<Report>>>,
    /// Number of experiments that have ended.
    pub(super) ended: watch::Sender<u64>,
    /// Where reports are kept for the next run of the core.
    pub(super) keep: Keep,
}

/// Why a request was refused.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    #[error("{0}")]
    Plan(String),
    /// A policy cannot take part.
    #[error("arm {0}: {1}")]
    Policy(Arm, String),
    /// An experiment runs already, there is none, or A is not the active policy.
    #[error("{0}")]
    Conflict(String),
    #[error("{0}")]
    Unavailable(String),
}

/// What status shows of an experiment under way. Cheap: the verdict without what needs all
/// requests.
pub(super) fn status_of(running: &Running) -> AbStatus {
    let e = running.experiment.borrow();
    let plan = e.plan();
    let ended = e.ended();
    let elapsed_ns = now_ns().saturating_sub(e.started_ns());
    let conclusion = conclude(&e, None);
    AbStatus {
        running: true,
        metric: plan.metric,
        a: running.arms[0].borrow().name.clone(),
        b: running.arms[1].borrow().name.clone(),
        arm: ended.is_none().then(|| e.arm()),
        in_washout: e.in_washout(),
        blocks: e.blocks().len(),
        pairs: e.differences().len(),
        elapsed_s: ended.map_or(elapsed_ns, |e| e.after_ns) as f64 / 1e9,
        time_s_max: plan.time_ns_max as f64 / 1e9,
        ratio: e.ratio(),
        e_value: e.decision().ln_e_max().exp().min(1e12),
        e_value_needed: 1.0 / plan.alpha,
        ended: ended.map(|e| e.reason),
        message: ended.map_or_else(String::new, |e| e.message.clone()),
        verdict: conclusion.verdict,
        why: conclusion.why,
        guards: e.accidents().to_vec(),
    }
}

fn status_of_report(report: &Report) -> AbStatus {
    AbStatus {
        running: false,
        metric: report.plan.metric,
        a: report.a.source.name.clone(),
        b: report.b.source.name.clone(),
        arm: None,
        in_washout: false,
        blocks: report.blocks.len(),
        pairs: report.pairs,
        elapsed_s: report.elapsed_s,
        time_s_max: report.plan.time_ns_max as f64 / 1e9,
        ratio: report.effect.ratio,
        e_value: report.e_value,
        e_value_needed: 1.0 / report.plan.alpha,
        ended: report.ended.as_ref().map(|e| e.reason),
        message: report.ended.as_ref().map_or_else(String::new, |e| e.message.clone()),
        verdict: report.verdict,
        why: report.why.clone(),
        guards: report.guards.clone(),
    }
}

/// Write a report for the next run of the core; that it could not be is said in the log.
pub(super) fn written(keep: &Keep, report: &Report) {
    if let Err(why) = keep.write(report) {
        tracing::warn!("the A/B test's report is not kept: {why}");
    }
}

impl Experiments {
    /// With the last report of an earlier core at this socket.
    pub fn open(config: &Config, socket: &Path) -> Self {
        let (keep, last) = Keep::open(config, socket);
        let last = RefCell::new(last.map(Rc::new));
        Experiments { running: None.into(), last, ended: watch::Sender::new(0), keep }
    }

    /// What status shows; `None` if there was never an experiment.
    pub fn status(&self) -> Option<AbStatus> {
        let running = self.running.borrow();
        let running = running.as_ref().map(|r| status_of(r));
        running.or_else(|| self.last.borrow().as_ref().map(|r| status_of_report(r)))
    }

    /// The report, of what is known so far.
    ///
    /// # Errors
    /// If there was never an experiment.
    pub async fn report(&self) -> Result<Value, ExperimentError> {
        let running = self.running.borrow().clone();
        if let Some(running) = running {
            return Ok(json!(report(&running).await));
        }
        match &*self.last.borrow() {
            Some(report) => Ok(json!(**report)),
            None => Err(ExperimentError::Conflict(
                "there was no A/B test, or its report was not kept: begin one with `tallyctl ab start`"
                    .into(),
            )),
        }
    }

    /// End the experiment. Its report, once A is active again.
    ///
    /// # Errors
    /// If none runs.
    pub async fn stop(&self) -> Result<Value, ExperimentError> {
        if !self.end(Reason::Stopped).await? {
            return Err(ExperimentError::Conflict("no A/B test is running".into()));
        }
        self.report().await
    }

    /// Ends a running experiment because the core stops.
    pub async fn close(&self) {
        if let Err(why) = self.end(Reason::CoreStopping).await {
            tracing::warn!("{why}");
        }
    }

    /// Whether there was one to end.
    async fn end(&self, reason: Reason) -> Result<bool, ExperimentError> {
        let mut ended = self.ended.subscribe();
        match &*self.running.borrow() {
            Some(running) => running.ask_to_end(reason),
            None => return Ok(false),
        }
        match tokio::time::timeout(END_MAX, ended.changed()).await {
            Ok(_) => Ok(true),
            Err(_) => Err(ExperimentError::Unavailable("the A/B test does not end".into())),
        }
    }
}

/// The report so far. Off this thread: it takes up to a second.
pub(super) async fn report(running: &Running) -> Report {
    let (experiment, arms) = (running.experiment.borrow().clone(), running.arms());
    let make = move || Report::new(&experiment, &arms, now_ns(), true);
    let mut report = match tokio::task::spawn_blocking(make).await {
        Ok(report) => report,
        Err(error) => {
            tracing::error!("the A/B test's report has no history: {error}");
            Report::new(&running.experiment.borrow(), &running.arms(), now_ns(), false)
        }
    };
    report.a_back_after_ns = running.a_back_after_ns();
    report.promoted = running.promoted.get();
    report
}
