//! A/B tests: the task that carries out what [`tally_ab::Experiment`] says.
//!
//! There is one experiment at a time. It makes the arms active in turns. Each block gets a new instance, which
//! is offered what both arms began with or, with `carry`, what the same arm knew at the end of its last block.
//! It takes the samples of the dispatch thread. However it ends, A is active afterwards, or B if it is to be
//! promoted. While it runs, nobody else can load a policy.

mod course;
pub mod experiments;
mod keep;

use crate::control::Plane;
use crate::control::answer::{Code, error};
use crate::dispatch::control::Control;
use crate::files::Opened;
use crate::policy_slot::{SlotError, Source};
use course::Course;
use experiments::{ExperimentError, Running, report, status_of, written};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tally_ab::accident::limits_ns;
use tally_ab::report::ArmSource;
use tally_ab::{Arm, Experiment, Plan, Reason};
use tally_ipc::wait::now_ns;
use tokio::sync::Notify;

/// How long the end waits for a report to be written down: a disk that hangs must not keep a test
/// from ending.
const KEEP_WAIT_MAX: Duration = Duration::from_secs(3);

/// What is asked to be compared.
pub struct Arms {
    /// Policy A; `None`: the active policy.
    pub a: Option<(Source, Opened)>,
    /// The policy that is tried.
    pub b: (Source, Opened),
    /// A need not be the active policy: it replaces that, for the test and after it.
    pub replace_active: bool,
}

/// Begin an experiment between two policies.
///
/// # Errors
/// If the plan or a policy is refused, A is not the active policy and need be, or an
/// experiment runs already.
pub async fn start(plane: &Rc<Plane>, arms: Arms, plan: Plan) -> Result<Value, ExperimentError> {
    plan.check().map_err(|e| ExperimentError::Plan(e.to_string()))?;
    plane.policy.begin_experiment().await.map_err(|e| match e {
        SlotError::Experiment => ExperimentError::Conflict(e.to_string()),
        e => ExperimentError::Unavailable(e.to_string()),
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
) -> Result<Value, ExperimentError> {
    let slot = &plane.policy;
    let read = async |arm, (source, opened)| {
        let files = plane.read_policy(source, opened).await;
        files.map_err(|why| ExperimentError::Policy(arm, why))
    };
    let a = match a {
        None => slot.active_candidate().map_err(ExperimentError::Conflict)?,
        Some(a) => {
            let a = read(Arm::A, a).await?;
            let a = slot.candidate(a).await.map_err(|why| ExperimentError::Policy(Arm::A, why))?;
            if !replace_active {
                slot.see_that_active(&a).map_err(ExperimentError::Conflict)?;
            }
            a
        }
    };
    let b = read(Arm::B, b).await?;
    let b = slot.candidate(b).await.map_err(|why| ExperimentError::Policy(Arm::B, why))?;
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
        Experiment::new(plan, now_ns()).map_err(|e| ExperimentError::Plan(e.to_string()))?;
    match before {
        Ok(before) => experiment.requests_before(before),
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
    *plane.experiments.running.borrow_mut() = Some(running.clone());
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
        let (keep, kept) = (plane.experiments.keep.clone(), report.clone());
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
        *plane.experiments.last.borrow_mut() = Some(Rc::new(report));
        *plane.experiments.running.borrow_mut() = None;
        plane.policy.end_experiment(Some(&left));
        plane.experiments.ended.send_modify(|n| *n += 1);
    });
    Ok(json!(status))
}

/// The outcome as the answer to an admin request.
pub fn answer(outcome: Result<Value, ExperimentError>) -> Value {
    let refused = match outcome {
        Ok(ok) => return json!({"ok": ok}),
        Err(refused) => refused,
    };
    let code = match &refused {
        ExperimentError::Plan(_) => Code::BadRequest,
        ExperimentError::Policy(..) => Code::PolicyRefused,
        ExperimentError::Conflict(_) => Code::Conflict,
        ExperimentError::Unavailable(_) => Code::Unavailable,
    };
    error(code, refused)
}
