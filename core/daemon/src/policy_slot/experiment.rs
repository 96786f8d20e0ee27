//! The slot while an A/B test decides who is in charge: nobody else may load a policy.

use super::{InCharge, PolicySlot, SlotError, Source, now_unix_s, read_config};
use crate::dispatch::control::{Control, ControlSender};
use crate::loader::{Program, Shared};
use std::sync::Arc;
use std::time::Instant;
use tally_policy_host::Saved;

/// A policy that takes part: compiled once, started for each of its blocks.
#[derive(Clone)]
pub struct Candidate {
    source: Source,
    program: Arc<dyn Program>,
    config_text: String,
    /// How long compiling took, ms.
    compile_ms: f64,
}

impl Candidate {
    /// Its name.
    pub fn name(&self) -> &str {
        self.program.name()
    }

    /// SHA-256 of its file.
    pub fn digest(&self) -> &str {
        self.program.digest()
    }

    /// Where it comes from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// A new instance, offered what an earlier one knew. Off the dispatch thread.
    ///
    /// # Errors
    /// Why it did not start.
    pub fn start(&self, saved: Option<&Saved>) -> Result<Shared, String> {
        self.program.start(&self.config_text, saved).map(Shared::new)
    }
}

impl PolicySlot {
    /// Nobody loads a policy until [`PolicySlot::end_experiment`].
    ///
    /// # Errors
    /// If an experiment is under way.
    pub async fn begin_experiment(&self) -> Result<(), SlotError> {
        // After a load that is under way.
        let _turn = self.turn.lock().await;
        if self.experiment.replace(true) { Err(SlotError::Experiment) } else { Ok(()) }
    }

    /// Policies may be loaded again.
    pub fn end_experiment(&self) {
        self.experiment.set(false);
    }

    /// Compile a policy and see that it starts.
    ///
    /// # Errors
    /// Why it cannot take part.
    pub async fn candidate(&self, source: Source) -> Result<Candidate, String> {
        let loader = self.loader.clone();
        let make = move || {
            let began = Instant::now();
            let config_text = read_config(source.config_file.as_deref())?;
            let program = loader.compile(&source.file)?;
            let compile_ms = began.elapsed().as_secs_f64() * 1e3;
            let candidate = Candidate { source, program, config_text, compile_ms };
            candidate.start(None)?;
            Ok(candidate)
        };
        tokio::task::spawn_blocking(make)
            .await
            .unwrap_or_else(|e| Err(format!("loading a policy panicked: {e}")))
    }

    /// What the policy in charge knows; `None` if it keeps nothing.
    ///
    /// # Errors
    /// If it failed to say, or the dispatch thread does not answer.
    pub async fn save(&self, control: &ControlSender) -> Result<Option<Saved>, String> {
        let saved = control.ask(|done| Control::SavePolicy { done }).await;
        saved.map_err(|e| e.to_string())?.transpose().map_err(|fault| fault.to_string())
    }

    /// Put a new instance of a candidate in charge.
    ///
    /// # Errors
    /// If it does not start, or the dispatch thread does not take it.
    pub async fn put(
        &self,
        control: &ControlSender,
        candidate: &Candidate,
        saved: Option<Saved>,
    ) -> Result<(), String> {
        let starting = candidate.clone();
        let began = Instant::now();
        let policy = tokio::task::spawn_blocking(move || starting.start(saved.as_ref()))
            .await
            .unwrap_or_else(|e| Err(format!("starting a policy panicked: {e}")))?;
        let load_ms = candidate.compile_ms + began.elapsed().as_secs_f64() * 1e3;
        let generation = self.in_charge.borrow().generation + 1;
        let set = control.ask(|done| Control::SetPolicy { policy, done });
        let retired = set.await.map_err(|e| e.to_string())?;
        // Unmapping an instance's memory takes a while.
        tokio::task::spawn_blocking(move || drop(retired));
        *self.in_charge.borrow_mut() = InCharge {
            source: Some(candidate.source.clone()),
            name: candidate.name().into(),
            digest: candidate.digest().into(),
            generation,
            loaded_at_unix_s: now_unix_s(),
            load_ms,
            config_text: candidate.config_text.clone(),
        };
        *self.last_failure.borrow_mut() = None;
        Ok(())
    }
}
