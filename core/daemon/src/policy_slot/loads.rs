//! Which load counts: the latest that was asked for. What comes later stops the compilation of an
//! earlier one, so that nobody waits for it.

use super::{
    Active, LoadedBecause, Next, PolicySlot, Ready, SlotError, Source, Trigger, aside, compile,
};
use crate::config::DEFAULT_POLICY;
use crate::dispatch::control::ControlSender;
use crate::files::PolicyFiles;
use crate::loader::Loader;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::time::Instant;
use tally_wasm_host::Cancel;
use tokio::sync::{MutexGuard, Notify};

/// What stopped a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A later load took its place.
    Load,
    Rollback,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            By::Load => "a later load",
            By::Rollback => "a rollback",
        })
    }
}

#[derive(Default)]
pub struct Loads {
    /// Number of the latest load.
    number: Cell<u64>,
    /// What stopped the one before it.
    by: Cell<Option<By>>,
    running: RefCell<Option<Cancel>>,
    ended: Notify,
}

/// One load, until its policy is put active or refused.
pub struct Loading<'a> {
    loads: &'a Loads,
    number: u64,
    cancel: Cancel,
}

impl Loads {
    /// One begins. It stops the one that runs.
    pub fn begin(&self) -> std::io::Result<Loading<'_>> {
        let cancel = Cancel::new()?;
        self.stop(By::Load);
        *self.running.borrow_mut() = Some(cancel.clone());
        Ok(Loading { loads: self, number: self.number.get(), cancel })
    }

    /// Stop the one that runs.
    pub fn stop(&self, by: By) {
        self.number.set(self.number.get() + 1);
        self.by.set(Some(by));
        if let Some(running) = self.running.take() {
            running.cancel();
        }
    }

    /// Waits until no load runs.
    pub async fn idle(&self) {
        loop {
            let ended = self.ended.notified();
            if self.running.borrow().is_none() {
                return;
            }
            ended.await;
        }
    }
}

impl Loading<'_> {
    /// The handle that stops the load's compilation.
    pub fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    pub fn stopped(&self) -> Option<By> {
        if self.number == self.loads.number.get() { None } else { self.loads.by.get() }
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.cancel.cancel();
        if self.number == self.loads.number.get() {
            self.loads.running.take();
        }
        self.loads.ended.notify_waiters();
    }
}

impl PolicySlot {
    /// Load a policy whose files a peer opened and make it active. A later load, or a rollback, stops one that is still
    /// being compiled. Of the files nothing is kept but what was compiled.
    ///
    /// # Errors
    /// If it cannot be loaded; the active one stays.
    pub async fn load(
        &self,
        control: &ControlSender,
        files: PolicyFiles,
    ) -> Result<Active, SlotError> {
        let source = files.source.clone();
        let compiled = self.compile(source, move |loader, cancel| compile(loader, files, cancel));
        let (ready, begun, turn) = compiled.await?;
        let content = ready.content();
        let next = Next {
            loaded_because: LoadedBecause::Asked,
            same_as_generation: None,
            own: None,
            begun,
        };
        let active = self.put(control, ready, next).await?;
        self.follow_own_if(&content);
        drop(turn);
        self.follow_own_if_active().await;
        Ok(active)
    }

    /// Load the policy that the core was started with again. [`Trigger::Changed`] does nothing
    /// while another was asked for, and waits for loads that somebody asked for and for the end of an A/B test.
    ///
    /// # Errors
    /// If it cannot be loaded; the active one stays.
    pub async fn load_own(
        &self,
        control: &ControlSender,
        trigger: Trigger,
    ) -> Result<Active, SlotError> {
        loop {
            if trigger == Trigger::Changed {
                drop(self.turn_after_experiment().await);
                self.loads.idle().await;
                if !self.follows_own.get() {
                    self.follow_own_if_active().await;
                    return Ok(self.active());
                }
            }
            match self.load_own_once(control, trigger).await {
                // If that one is not loaded, this is still the policy that is wanted.
                Err(SlotError::Superseded { by: By::Load, .. }) if trigger == Trigger::Changed => {}
                // The test may leave the policy that the file had.
                Err(SlotError::Experiment) if trigger == Trigger::Changed => {}
                outcome => return outcome,
            }
        }
    }

    async fn load_own_once(
        &self,
        control: &ControlSender,
        trigger: Trigger,
    ) -> Result<Active, SlotError> {
        let source = self.configured.source().map_err(|message| {
            self.failed(Source { file: DEFAULT_POLICY.into(), config_file: None }, message)
        })?;
        let own = source.clone();
        let bytes_max = self.configured.limits.component_bytes_max;
        let compiled = self.compile(source.clone(), move |loader, cancel| {
            compile(loader, PolicyFiles::read_own(&own, bytes_max)?, cancel)
        });
        let (ready, begun, _turn) = compiled.await?;
        let content = ready.content();
        if trigger == Trigger::Changed {
            // Another was asked for, and became active, while this one was compiled.
            if !self.follows_own.get() {
                return Ok(self.active());
            }
            if self.own_seen.borrow().as_ref() == Some(&content) {
                return Ok(self.active());
            }
            if self.history.borrow().is_disabled(&content) {
                tracing::warn!(
                    file = %source.file.display(), digest = content.digest,
                    "not loaded: this policy was disabled; `tallyctl policy load` takes it all the same"
                );
                *self.own_seen.borrow_mut() = Some(content);
                return Ok(self.active());
            }
        }
        let loaded_because = match trigger {
            Trigger::Asked => LoadedBecause::Asked,
            Trigger::Changed => LoadedBecause::FileChanged,
        };
        let next = Next { loaded_because, same_as_generation: None, own: None, begun };
        let active = self.put(control, ready, next).await?;
        *self.own_seen.borrow_mut() = Some(content);
        self.follows_own.set(true);
        Ok(active)
    }

    /// Compile one off this thread, unless a later load or a rollback stops it. Gives it, when that began, and the turn
    /// to make it active.
    async fn compile(
        &self,
        source: Source,
        work: impl FnOnce(&Loader, &Cancel) -> Result<Ready, String> + Send + 'static,
    ) -> Result<(Ready, Instant, MutexGuard<'_, ()>), SlotError> {
        self.refuse_during_experiment()?;
        let loading = match self.loads.begin() {
            Ok(loading) => loading,
            Err(error) => return Err(self.failed(source, format!("no load can begin: {error}"))),
        };
        let begun = Instant::now();
        let (loader, cancel) = (self.loader.clone(), loading.cancel());
        let compiled = aside(move || work(&loader, &cancel)).await;
        let turn = self.turn.lock().await;
        if let Some(by) = loading.stopped() {
            let why = SlotError::Superseded { file: source.file, by };
            tracing::warn!("{why}");
            return Err(why);
        }
        self.refuse_during_experiment()?;
        match compiled {
            Ok(ready) => Ok((ready, begun, turn)),
            Err(message) => Err(self.failed(source, message)),
        }
    }

    /// Go back to an earlier policy, from memory: to that generation, or to the last one
    /// that differs and was not disabled. Stops a load that is still being compiled.
    ///
    /// # Errors
    /// If there is none, or it does not start any more.
    pub async fn rollback(
        &self,
        control: &ControlSender,
        to: Option<u64>,
    ) -> Result<Active, SlotError> {
        self.refuse_during_experiment()?;
        self.history.borrow().rollback(to)?;
        self.loads.stop(By::Rollback);
        let _turn = self.turn.lock().await;
        self.refuse_during_experiment()?;
        let kept = self.history.borrow().rollback(to)?;
        self.put_back(control, kept, LoadedBecause::Rollback).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_load_counts_and_stops_those_before() {
        let loads = Loads::default();
        let first = loads.begin().unwrap();
        assert_eq!((first.stopped(), first.cancel().is_cancelled()), (None, false));
        let second = loads.begin().unwrap();
        assert_eq!((first.stopped(), first.cancel().is_cancelled()), (Some(By::Load), true));
        drop(first);
        assert_eq!((second.stopped(), second.cancel().is_cancelled()), (None, false));
        assert!(loads.running.borrow().is_some());
        loads.stop(By::Rollback);
        assert_eq!((second.stopped(), second.cancel().is_cancelled()), (Some(By::Rollback), true));
        drop(second);
        let third = loads.begin().unwrap();
        let cancel = third.cancel();
        assert_eq!(third.stopped(), None);
        drop(third);
        assert!(cancel.is_cancelled(), "nobody wants its result any more");
        assert!(loads.running.borrow().is_none());
    }
}
