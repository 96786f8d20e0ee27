//! The slot while an A/B test decides who is active: nobody else may load a policy.
//!
//! The blocks of a test are not part of the history (there are hundreds of them, and what
//! is kept there is meant to be put back); the policy that it leaves active is.

use super::history::{Content, Kept};
use super::{
    Active, LoadedBecause, PolicySlot, Ready, SlotError, Source, aside, compile, now_unix_s, record,
};
use crate::dispatch::control::{AskError, Control, ControlSender};
use crate::files::PolicyFiles;
use crate::loader::Loaded;
use std::time::Instant;
use tally_wasm_host::{Cancel, Compiled, Saved};
use tokio::sync::MutexGuard;

/// A policy that takes part: compiled once, started for each of its blocks.
#[derive(Clone)]
pub struct Candidate {
    source: Source,
    program: Compiled,
    config_text: String,
}

/// Why a candidate was not put active, or the active policy's state not saved.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The policy's fault.
    #[error("{0}")]
    Policy(String),
    /// The dispatch thread does not answer: no policy's fault.
    #[error(transparent)]
    Core(#[from] AskError),
}

impl Candidate {
    pub fn name(&self) -> &str {
        self.program.name()
    }

    /// SHA-256 of its file.
    pub fn digest(&self) -> &str {
        self.program.digest()
    }

    /// Files that the policy was loaded from.
    pub fn source(&self) -> &Source {
        &self.source
    }
}

impl PolicySlot {
    pub(super) fn refuse_during_experiment(&self) -> Result<(), SlotError> {
        if self.experiment.get() {
            tracing::warn!("no policy is loaded: {}", SlotError::Experiment);
            return Err(SlotError::Experiment);
        }
        Ok(())
    }

    /// Nobody loads a policy until [`PolicySlot::end_experiment`].
    ///
    /// # Errors
    /// If an experiment is under way.
    pub async fn begin_experiment(&self) -> Result<(), SlotError> {
        // After a policy that is taking over; one that is still being compiled is refused then.
        let _turn = self.turn.lock().await;
        if self.experiment.replace(true) { Err(SlotError::Experiment) } else { Ok(()) }
    }

    /// A turn while no experiment is under way.
    pub(super) async fn turn_after_experiment(&self) -> MutexGuard<'_, ()> {
        loop {
            let turn = self.turn.lock().await;
            if !self.experiment.get() {
                return turn;
            }
            drop(turn);
            self.experiment_ended.notified().await;
        }
    }

    /// Policies may be loaded again. `left`: what the test left active, if it began.
    pub fn end_experiment(&self, left: Option<&Candidate>) {
        self.experiment.set(false);
        self.experiment_ended.notify_waiters();
        let Some(left) = left else { return };
        let active = self.active.borrow();
        if active.source.as_ref() != Some(&left.source) {
            return;
        }
        let (text, program) = (left.config_text.clone(), left.program.clone());
        self.history.borrow_mut().came(record(&active), text.clone(), Some(program));
        self.follow_own_if(&Content { digest: left.digest().into(), config_text: text });
    }

    /// Compile a policy and see that it starts.
    ///
    /// # Errors
    /// Why it cannot take part.
    pub async fn candidate(&self, files: PolicyFiles) -> Result<Candidate, String> {
        let loader = self.loader.clone();
        aside(move || {
            let Ready { source, program, config_text } = compile(&loader, files, &Cancel::never())?;
            let config_file = source.config_file.as_deref();
            let started = program.start(&config_text, None);
            started.map_err(|error| error.with_config_file(config_file))?;
            Ok(Candidate { source, program, config_text })
        })
        .await
    }

    /// The active policy: its component as it was compiled and its configuration as it was
    /// read, whatever became of the files.
    ///
    /// # Errors
    /// If the built-in rule serves because no policy was loaded.
    pub fn active_candidate(&self) -> Result<Candidate, String> {
        let kept = self.history.borrow().same();
        let Some(Kept { source, program, config_text, .. }) = kept else {
            return Err("no policy is active (the built-in rule serves), so there is nothing to test B against: \
                        load one with `tallyctl policy load`, or name A and give --replace-active"
                .into());
        };
        Ok(Candidate { source, program, config_text })
    }

    /// Refuse a candidate for arm A that would replace the active policy.
    ///
    /// # Errors
    /// What is active, and what to do.
    pub fn see_that_active(&self, a: &Candidate) -> Result<(), String> {
        let what_to_do = "leave A out to test B against the active policy, or give --replace-active to have A replace \
                          it, for the test and after it";
        let short = |digest: &str| digest.get(..12).unwrap_or("none").to_owned();
        let record = self.active();
        let active = self.history.borrow().same();
        let Some(active) = active else {
            return Err(format!(
                "A ({}) is not active: the built-in rule serves; {what_to_do}",
                a.name()
            ));
        };
        if active.program.digest() != a.digest() {
            return Err(format!(
                "A ({}, sha256 {}) is not the active policy, which is {} (sha256 {}): {what_to_do}",
                a.name(),
                short(a.digest()),
                record.name,
                short(&record.digest),
            ));
        }
        if active.config_text != a.config_text {
            return Err(format!(
                "A has the component of the active policy ({}), but another configuration: {what_to_do}, or name the \
                 active policy's configuration with --config-a",
                record.name,
            ));
        }
        Ok(())
    }

    /// What the active policy knows; `None` if it keeps nothing.
    ///
    /// # Errors
    /// If it failed to say, or the dispatch thread does not answer.
    pub async fn save(&self, control: &ControlSender) -> Result<Option<Saved>, PutError> {
        let saved = control.ask(|done| Control::SavePolicy { done }).await;
        saved?.transpose().map_err(|fault| PutError::Policy(fault.to_string()))
    }

    /// Put a new instance of a candidate active, offered what it knew. Returns how many turns policies had lost when it
    /// replaced the one before.
    ///
    /// # Errors
    /// If it does not start, or the dispatch thread does not take it.
    pub async fn put_candidate(
        &self,
        control: &ControlSender,
        candidate: &Candidate,
        saved: Option<Saved>,
    ) -> Result<u64, PutError> {
        let begun = Instant::now();
        let (program, text) = (candidate.program.clone(), candidate.config_text.clone());
        let start = move || program.start(&text, saved.as_ref()).map_err(|error| error.to_string());
        let policy = aside(start).await.map_err(PutError::Policy)?;
        let restored = policy.restored().clone();
        let generation = self.active.borrow().generation + 1;
        let policy = Loaded::from(policy);
        let set = control.ask(|done| Control::SetPolicy { policy, generation, done });
        let retired = set.await?;
        let faults = retired.faults;
        // Unmapping an instance's memory takes a while. Of the policy before the test, the
        // history keeps the figures; of a block's, nobody.
        let figures = tokio::task::spawn_blocking(move || retired.figures()).await;
        self.history.borrow_mut().retired(generation - 1, figures.ok().flatten(), None);
        *self.active.borrow_mut() = Active {
            source: Some(candidate.source.clone()),
            name: candidate.name().into(),
            digest: candidate.digest().into(),
            generation,
            loaded_at_unix_s: now_unix_s(),
            load_ms: begun.elapsed().as_secs_f64() * 1e3,
            loaded_because: LoadedBecause::Experiment,
            same_as_generation: generation,
            signed_by: candidate.program.signed_by().map(Into::into),
            restored: crate::status::restored(restored),
        };
        *self.last_failure.borrow_mut() = None;
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Policy, Restore};
    use crate::dispatch::harness::{self, Harness};
    use crate::loader::Loader;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_policy_that_is_disabled_as_a_test_ends_is_noted_once_it_has_ended() {
        let fifo = include_bytes!("../../../../tests/policies/corpus/0.1.0/fifo.wasm");
        let mut config = Policy { required: false, ..Policy::default() };
        config.file = Some("/dev/null/policy.wasm".into());
        config.disabling.restore = Restore::BuiltIn;
        let (slot, policy) =
            PolicySlot::open(Arc::new(Loader::always(fifo).unwrap()), &config, 0).unwrap();
        let control = Harness::new(harness::settings(), policy).unwrap().control;
        slot.begin_experiment().await.unwrap();
        let recover = slot.recover(&control, 1, None);
        tokio::pin!(recover);
        assert!(timeout(Duration::from_millis(20), &mut recover).await.is_err());
        assert!(slot.last_disabled().is_none());
        slot.end_experiment(None);
        recover.await;
        assert_eq!(slot.last_disabled().unwrap().generation, 1);
    }
}
