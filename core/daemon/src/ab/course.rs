//! One experiment from its first block until A is active again.

use super::experiments::{Running, report, written};
use crate::control::Plane;
use crate::dispatch::control::{AskError, Control};
use crate::policy_slot::{Candidate, PutError};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tally_ab::design::Knowledge;
use tally_ab::verdict::conclude;
use tally_ab::{Action, Arm, Reason, Report, Sample, Verdict};
use tally_ipc::wait::now_ns;
use tally_wasm_host::Saved;
use tokio::task::JoinHandle;

/// What is known so far is written at most this often.
const KEEP_EVERY: Duration = Duration::from_secs(2);

/// How often, and how far apart, a core that is too busy is asked what a policy failed on.
const EXPLAIN_TRIES: u32 = 50;
const EXPLAIN_PAUSE: Duration = Duration::from_millis(20);

pub(super) struct Course {
    plane: Rc<Plane>,
    running: Rc<Running>,
    candidates: [Candidate; 2],
    /// What each arm is offered at the start of its blocks.
    knowledge: Knowledge<Saved>,
    /// The arm whose instance is active.
    active: Option<Arm>,
    /// To record into next; each exchange gives one back.
    #[expect(clippy::vec_box, reason = "handed over as boxes, and 1 MiB each")]
    spare: Vec<Box<Sample>>,
    /// Blocks of the report that was last kept, in case the core dies; when, and by whom.
    kept: (usize, Option<Instant>, Option<JoinHandle<()>>),
}

impl Course {
    /// Both arms are offered what is `known`; see [`tally_ab::design::State`].
    pub(super) fn new(
        plane: Rc<Plane>,
        running: Rc<Running>,
        candidates: [Candidate; 2],
        known: Option<Saved>,
    ) -> Self {
        let knowledge = Knowledge::new(running.experiment.borrow().plan().state, known);
        let (active, spare, kept) = (None, Vec::new(), (0, None, None));
        Course { plane, running, candidates, knowledge, active, spare, kept }
    }

    /// Runs the experiment to its end, and returns its report.
    pub(super) async fn run(mut self) -> Report {
        self.begin().await;
        loop {
            if let Some(reason) = self.running.asked.get() {
                self.end(reason, "");
            }
            self.keep();
            let action = self.running.experiment.borrow().next_action();
            match action {
                Action::Switch(arm) => self.switch(arm).await,
                Action::Take { at_ns, cut } => {
                    let wait = Duration::from_nanos(at_ns.saturating_sub(now_ns()));
                    tokio::select! {
                        () = tokio::time::sleep(wait) => self.take(cut).await,
                        () = self.running.stop.notified() => {}
                    }
                }
                Action::End => break,
            }
        }
        self.explain().await;
        if !self.keep_b().await {
            self.back_to_a().await;
        }
        // Nothing is measured any more, whatever it was.
        let _ = self.plane.control.ask(measure(None, true)).await;
        // The last word is the report's.
        self.running.writing.set(self.kept.2.take());
        report(&self.running).await
    }

    /// Measuring begins; what policies lost before is not the arms' fault.
    async fn begin(&mut self) {
        for _ in 0..2 {
            match self.exchange(true).await {
                Ok(sample) => self.running.experiment.borrow_mut().faults_before(sample.faults),
                Err(error) => self.end(Reason::CoreStopping, &error.to_string()),
            }
        }
    }

    /// Write down what is known so far, should the core die: at first, and after a block.
    /// Nothing waits for that.
    fn keep(&mut self) {
        let (blocks, at, writing) = &self.kept;
        let known = self.running.experiment.borrow().blocks().len();
        let due = at.is_none_or(|at| known > *blocks && at.elapsed() >= KEEP_EVERY);
        if !due || writing.as_ref().is_some_and(|writing| !writing.is_finished()) {
            return;
        }
        let (experiment, arms) = (self.running.experiment.borrow().clone(), self.running.arms());
        let keep = self.plane.experiments.keep.clone();
        let writing = tokio::task::spawn_blocking(move || {
            written(&keep, &Report::new(&experiment, &arms, now_ns(), false));
        });
        self.kept = (known, Some(Instant::now()), Some(writing));
    }

    /// Say what the policy failed on, while it is active.
    async fn explain(&self) {
        if !self.has_failed() {
            return;
        }
        let mut asked = self.plane.status(Some(0)).await;
        for _ in 1..EXPLAIN_TRIES {
            if !matches!(asked, Err(AskError::Busy)) {
                break;
            }
            tokio::time::sleep(EXPLAIN_PAUSE).await;
            asked = self.plane.status(Some(0)).await;
        }
        if let Ok(status) = asked
            && let Some(fault) = status.policy.last_fault
        {
            // The rest is a backtrace.
            let first: String = fault.lines().next().unwrap_or("").chars().take(300).collect();
            self.running.experiment.borrow_mut().explain(&first);
        }
    }

    fn has_failed(&self) -> bool {
        let experiment = self.running.experiment.borrow();
        experiment.ended().is_some_and(|e| e.reason == Reason::PolicyFailed)
    }

    fn end(&self, reason: Reason, message: &str) {
        self.running.experiment.borrow_mut().stop(now_ns(), reason, message);
    }

    /// What the arm active knows is kept: for its next block, or for after the test.
    async fn save(&mut self) -> Result<(), PutError> {
        let Some(arm) = self.active else { return Ok(()) };
        if let Some(saved) = self.plane.policy.save(&self.plane.control).await? {
            self.running.arms[arm.index()].borrow_mut().keeps_state = true;
            self.knowledge.saved(arm, saved);
        }
        Ok(())
    }

    /// How many turns policies had lost when this arm replaced what was active.
    async fn put(&mut self, arm: Arm, saved: Option<Saved>) -> Result<u64, PutError> {
        let candidate = self.candidates[arm.index()].clone();
        let put = self.plane.policy.put_candidate(&self.plane.control, &candidate, saved);
        let faults = put.await?;
        self.active = Some(arm);
        Ok(faults)
    }

    async fn switch(&mut self, arm: Arm) {
        let before = self.active;
        let put = match self.save().await {
            Ok(()) => {
                self.put(arm, self.knowledge.offered(arm)).await.map_err(|e| (Some(arm), "", e))
            }
            Err(error) => Err((before, "what it knows cannot be saved: ", error)),
        };
        match put {
            Ok(faults) => self.running.experiment.borrow_mut().replaced(now_ns(), faults),
            Err((arm, what, PutError::Policy(why))) => {
                let who = arm.map_or_else(String::new, |arm| format!("arm {arm}: "));
                let message = format!("{who}{what}{why}");
                return self.running.experiment.borrow_mut().failed(now_ns(), arm, message);
            }
            Err((.., PutError::Core(error))) => {
                return self.end(Reason::CoreStopping, &error.to_string());
            }
        }
        match self.exchange(true).await {
            Ok(sample) => {
                self.running.experiment.borrow_mut().switched(now_ns(), &sample);
                self.spare.push(sample);
            }
            Err(error) => self.end(Reason::CoreStopping, &error.to_string()),
        }
    }

    async fn take(&mut self, cut: bool) {
        match self.exchange(cut).await {
            Ok(sample) => {
                self.running.experiment.borrow_mut().took(now_ns(), cut, &sample);
                self.spare.push(sample);
            }
            // A pause in which it is too busy is one tick lost.
            Err(AskError::Busy) => {}
            Err(AskError::Gone) => self.end(Reason::CoreStopping, "the dispatch thread is gone"),
        }
    }

    /// What was recorded since the last exchange.
    async fn exchange(&mut self, cut: bool) -> Result<Box<Sample>, AskError> {
        let mut next = self.spare.pop().unwrap_or_default();
        next.clear();
        let old = self.plane.control.ask(measure(Some(next), cut)).await?;
        // The first exchange finds nothing.
        Ok(old.unwrap_or_default())
    }

    /// With `promote`, B becomes or stays active if the verdict is for it. Whether it is.
    async fn keep_b(&mut self) -> bool {
        let promote = {
            let experiment = self.running.experiment.borrow();
            let asked = experiment.plan().promote && experiment.ended().is_some();
            asked
                && conclude(&experiment, experiment.overall().as_ref()).verdict == Verdict::PromoteB
        };
        if !promote {
            return false;
        }
        let known = self.knowledge.latest(Arm::B);
        if self.active != Some(Arm::B)
            && let Err(why) = self.put(Arm::B, known).await
        {
            tracing::error!("arm B cannot be promoted: {why}");
            return false;
        }
        self.running.promoted.set(true);
        true
    }

    /// However it ended. An instance of A that serves stays, unless it failed.
    async fn back_to_a(&mut self) {
        if self.active == Some(Arm::A) && !self.has_failed() {
            return;
        }
        if let Err(why) = self.put(Arm::A, self.knowledge.latest(Arm::A)).await {
            // What it learned may be what it fails on.
            if let Err(again) = self.put(Arm::A, None).await {
                return tracing::error!("arm A cannot be put active again: {why}; {again}");
            }
        }
        self.running.a_back_ns.set(Some(now_ns()));
    }
}

pub(super) fn measure(
    next: Option<Box<Sample>>,
    cut: bool,
) -> impl FnOnce(tokio::sync::oneshot::Sender<Option<Box<Sample>>>) -> Control {
    move |done| Control::Measure { next, cut, done }
}
