//! A/B tests: the task that carries out what [`tally_ab::Experiment`] says.
//!
//! There is one experiment at a time. It makes the arms active in turns. Each block gets a new instance, which
//! is offered what both arms began with or, with `carry`, what the same arm knew at the end of its last block.
//! It takes the samples of the dispatch thread. However it ends, A is active afterwards, or B if it is to be
//! promoted. While it runs, nobody else can load a policy.

mod course;
mod keep;

use crate::config::Config;
use crate::control::Plane;
use crate::control::admin::{Code, error};
use crate::dispatch::control::Control;
use crate::files::Opened;
use crate::policy_slot::{SlotError, Source};
use course::Course;
use keep::Keep;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use tally_ab::accident::limits_ns;
use tally_ab::report::ArmSource;
use tally_ab::verdict::conclude;
use tally_ab::{Arm, Experiment, Plan, Reason, Report};
use tally_admin::ab::AbStatus;
use tally_ipc::wait::now_ns;
use tokio::sync::{Notify, watch};

/// An experiment ends within this time of being told to, or is given up.
const END_MAX: Duration = Duration::from_secs(10);
/// How long the end waits for a report to be written down: a disk that hangs must not keep a test
/// from ending.
const KEEP_WAIT_MAX: Duration = Duration::from_secs(3);

/// An experiment under way.
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
    fn arms(&self) -> [ArmSource; 2] {
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
pub struct Lab {
    running: RefCell<Option<Rc<Running>>>,
    last: RefCell<Option<Rc<Report>>>,
    /// Number of experiments that have ended.
    ended: watch::Sender<u64>,
    /// Where reports are kept for the next run of the core.
    keep: Keep,
}

/// Why a request was refused.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    #[error("{0}")]
    Plan(String),
    /// A policy cannot take part.
    #[error("arm {0}: {1}")]
    Policy(Arm, String),
    /// An experiment runs already, there is none, or A is not the active policy.
    #[error("{0}")]
    Conflict(String),
    /// Something did not answer.
    #[error("{0}")]
    Unavailable(String),
}

/// What is asked to be compared.
pub struct Arms {
    /// `None`: the active policy.
    pub a: Option<(Source, Opened)>,
    /// The policy that is tried.
    pub b: (Source, Opened),
    /// A need not be the active policy: it replaces that, for the test and after it.
    pub replace_active: bool,
}

/// What status shows of an experiment under way. Cheap: the verdict without what needs all
/// requests.
fn status_of(running: &Running) -> AbStatus {
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

/// Begin an experiment between two policies.
///
/// # Errors
/// If the plan or a policy is refused, A is not the active policy and need be, or an
/// experiment runs already.
pub async fn start(plane: &Rc<Plane>, arms: Arms, plan: Plan) -> Result<Value, LabError> {
    plan.check().map_err(|e| LabError::Plan(e.to_string()))?;
    plane.policy.begin_experiment().await.map_err(|e| match e {
        SlotError::Experiment => LabError::Conflict(e.to_string()),
        e => LabError::Unavailable(e.to_string()),
    })?;
    let begun = begin(plane, arms, plan).await;
    if begun.is_err() {
        plane.policy.end_experiment(None);
    }
    begun
}

async fn begin(
    plane: &Rc<Plane>,
    Arms { a, b, replace_active }: Arms,
    plan: Plan,
) -> Result<Value, LabError> {
    let slot = &plane.policy;
    let read = async |arm, (source, opened)| {
        let files = plane.read_policy(source, opened).await;
        files.map_err(|why| LabError::Policy(arm, why))
    };
    let a = match a {
        None => slot.active_candidate().map_err(LabError::Conflict)?,
        Some(a) => {
            let a = read(Arm::A, a).await?;
            let a = slot.candidate(a).await.map_err(|why| LabError::Policy(Arm::A, why))?;
            if !replace_active {
                slot.see_that_active(&a).map_err(LabError::Conflict)?;
            }
            a
        }
    };
    let b = read(Arm::B, b).await?;
    let b = slot.candidate(b).await.map_err(|why| LabError::Policy(Arm::B, why))?;
    // What the active policy has learned is offered to both, as a reload would.
    let known = slot.save(&plane.control).await.unwrap_or_else(|why| {
        tracing::warn!("the arms start without what the active policy knows: {why}");
        None
    });
    let source = |c: &crate::policy_slot::Candidate| {
        RefCell::new(ArmSource {
            name: c.name().into(),
            digest: c.digest().into(),
            file: c.source().file.display().to_string(),
            config: c.source().config_file.as_ref().map(|f| f.display().to_string()),
            keeps_state: false,
        })
    };
    let limits_ns = limits_ns(&plan);
    let before = plane.control.ask(|done| Control::Recent { limits_ns, done }).await;
    let mut experiment =
        Experiment::new(plan, now_ns()).map_err(|e| LabError::Plan(e.to_string()))?;
    match before {
        Ok(before) => experiment.requests_before(&before),
        Err(why) => {
            tracing::warn!("what guards say of requests before the test is not known: {why}")
        }
    }
    let running = Rc::new(Running {
        experiment: RefCell::new(experiment),
        arms: [source(&a), source(&b)],
        asked: Cell::new(None),
        stop: Notify::new(),
        a_back_ns: Cell::new(None),
        promoted: Cell::new(false),
        writing: Cell::new(None),
    });
    *plane.lab.running.borrow_mut() = Some(running.clone());
    let status = status_of(&running);
    tracing::info!(a = status.a, b = status.b, metric = status.metric.as_str(), "A/B test begins");
    let (mut left, tried) = (a.clone(), b.clone());
    let course = Course::new(plane.clone(), running.clone(), [a, b], known);
    let plane = plane.clone();
    tokio::task::spawn_local(async move {
        // A task of its own: should it panic, the core is not left in the hands of an arm.
        let report = match tokio::task::spawn_local(course.run()).await {
            Ok(report) => report,
            Err(error) => {
                tracing::error!("the A/B test failed, A is put active: {error}");
                if let Err(why) = plane.policy.put_candidate(&plane.control, &left, None).await {
                    tracing::error!("arm A cannot be put active: {why}");
                }
                let _ = plane.control.ask(course::measure(None, true)).await;
                let failed = Reason::Internal;
                running.experiment.borrow_mut().stop(now_ns(), failed, &error.to_string());
                report(&running).await
            }
        };
        if report.promoted {
            left = tried;
        }
        tracing::info!("A/B test ended:\n{}", report.text());
        let (keep, kept) = (plane.lab.keep.clone(), report.clone());
        let before = running.writing.take();
        let writing = tokio::task::spawn_local(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let _ = tokio::task::spawn_blocking(move || written(&keep, &kept)).await;
        });
        if tokio::time::timeout(KEEP_WAIT_MAX, writing).await.is_err() {
            // It goes on by itself.
            tracing::warn!("the disk does not answer: the A/B test's report is written down late");
        }
        *plane.lab.last.borrow_mut() = Some(Rc::new(report));
        *plane.lab.running.borrow_mut() = None;
        plane.policy.end_experiment(Some(&left));
        plane.lab.ended.send_modify(|n| *n += 1);
    });
    Ok(json!(status))
}

/// Write a report for the next run of the core; that it could not be is said in the log.
fn written(keep: &Keep, report: &Report) {
    if let Err(why) = keep.write(report) {
        tracing::warn!("the A/B test's report is not kept: {why}");
    }
}

impl Lab {
    /// With the last report of an earlier core at this socket.
    pub fn open(config: &Config, socket: &Path) -> Self {
        let (keep, last) = Keep::open(config, socket);
        let last = RefCell::new(last.map(Rc::new));
        Lab { running: None.into(), last, ended: watch::Sender::new(0), keep }
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
    pub async fn report(&self) -> Result<Value, LabError> {
        let running = self.running.borrow().clone();
        if let Some(running) = running {
            return Ok(json!(report(&running).await));
        }
        match &*self.last.borrow() {
            Some(report) => Ok(json!(**report)),
            None => Err(LabError::Conflict(
                "there was no A/B test, or its report was not kept: begin one with `tallyctl ab start`"
                    .into(),
            )),
        }
    }

    /// End the experiment. Its report, once A is active again.
    ///
    /// # Errors
    /// If none runs.
    pub async fn stop(&self) -> Result<Value, LabError> {
        if !self.end(Reason::Stopped).await? {
            return Err(LabError::Conflict("no A/B test is running".into()));
        }
        self.report().await
    }

    /// The core goes down.
    pub async fn close(&self) {
        if let Err(why) = self.end(Reason::CoreStopping).await {
            tracing::warn!("{why}");
        }
    }

    /// Whether there was one to end.
    async fn end(&self, reason: Reason) -> Result<bool, LabError> {
        let mut ended = self.ended.subscribe();
        match &*self.running.borrow() {
            Some(running) => running.ask_to_end(reason),
            None => return Ok(false),
        }
        match tokio::time::timeout(END_MAX, ended.changed()).await {
            Ok(_) => Ok(true),
            Err(_) => Err(LabError::Unavailable("the A/B test does not end".into())),
        }
    }
}

/// The report so far. Off this thread: it takes up to a second.
async fn report(running: &Running) -> Report {
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

/// The outcome as the answer to an admin request.
pub fn answer(outcome: Result<Value, LabError>) -> Value {
    let refused = match outcome {
        Ok(ok) => return json!({"ok": ok}),
        Err(refused) => refused,
    };
    let code = match &refused {
        LabError::Plan(_) => Code::BadRequest,
        LabError::Policy(..) => Code::PolicyRefused,
        LabError::Conflict(_) => Code::Conflict,
        LabError::Unavailable(_) => Code::Unavailable,
    };
    error(code, refused)
}
