//! The active policy and how another takes its place. A policy that cannot be loaded
//! changes nothing but what status shows.
//!
//! ```text
//!   here, aside           dispatch thread, between two decisions
//!   compile, check
//!                         1. the old one writes down what it knows (`snapshot`)
//!   instance, `init`,
//!   `restore`             ... decisions go on, by the old one ...
//!                         2. the new one takes over, is told of every client
//!   drop the old one
//! ```
//! What the old one learns between the two steps is lost, and that is all: events reach
//! it as before. Both steps are bounded and measured (`swap_pause_us` in the status).
//!
//! [`history`] is what can be put back, by hand or when a policy is disabled
//! ([`PolicySlot::recover`]).

mod experiment;
pub mod history;
mod loads;

pub use experiment::{Candidate, PutError};

use crate::config::{DEFAULT_POLICY, Disabling, Restore};
use crate::dispatch::control::{AskError, Control, ControlSender};
use crate::error::CoreError;
use crate::files::{PolicyFiles, READ_MAX};
use crate::loader::{Loaded, Loader};
use history::{Content, History, Kept, NoWayBack};
pub use loads::By;
use loads::Loads;
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
pub use tally_admin::Source;
use tally_admin::{Active, Disabled, LastDisabled, LoadFailure, LoadedBecause, PolicyRecord};
use tally_trust::Digest;
use tally_wasm_host::{Cancel, Compiled, ComponentFile, LastFault, Restored, Saved, WasmPolicy};
use tokio::sync::Notify;

/// Why a policy was not put active.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// It could not be loaded.
    #[error("{0}")]
    Load(String),
    /// Somebody asked for something else before it was compiled.
    #[error(
        "{}: not loaded: {by} came before it was compiled and stopped it; load it again if it is still wanted",
        .file.display()
    )]
    Superseded { file: PathBuf, by: By },
    /// An A/B test decides which policy is active.
    #[error(
        "an A/B test is running and decides which policy is active: end it with `tallyctl ab stop`"
    )]
    Experiment,
    /// There is nothing to go back to.
    #[error(transparent)]
    NoWayBack(#[from] NoWayBack),
    /// The dispatch thread did not take it.
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// What asked for a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Somebody did: loaded even if nothing changed.
    Asked,
    /// The file changed: not if its content did not, nor if that was disabled.
    Changed,
}

pub struct PolicySlot {
    loader: Arc<Loader>,
    /// Held while a policy takes over; not while one is compiled.
    turn: tokio::sync::Mutex<()>,
    loads: Loads,
    disabling: Disabling,
    /// A policy that lasts for so long ends a row of disabled ones.
    lasting: Duration,
    row: Cell<(u32, Option<Instant>)>,
    active: RefCell<Active>,
    history: RefCell<History>,
    /// What the core was started with, whose files it opens itself.
    configured: crate::config::Policy,
    /// What those were when they were loaded last.
    own_seen: RefCell<Option<Content>>,
    /// They were what was asked for last, whatever was put back since: changes of them count.
    follows_own: Cell<bool>,
    last_failure: RefCell<Option<LoadFailure>>,
    failures: Cell<u64>,
    /// An A/B test is running.
    experiment: Cell<bool>,
    experiment_ended: Notify,
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Compiled, and not started yet.
struct Ready {
    source: Source,
    program: Compiled,
    config_text: String,
}

impl Ready {
    fn content(&self) -> Content {
        Content { digest: self.program.digest().into(), config_text: self.config_text.clone() }
    }
}

/// What files hold, without compiling it.
fn content(files: PolicyFiles) -> Content {
    let digest = Digest::of(&files.component).hex();
    Content { digest, config_text: files.config_text }
}

fn compile(loader: &Loader, files: PolicyFiles, cancel: &Cancel) -> Result<Ready, String> {
    let PolicyFiles { source, component, signature, config_text } = files;
    let component = ComponentFile::new(&source.file, component, signature);
    let program = loader.compile(&component, cancel)?;
    Ok(Ready { source, program, config_text })
}

/// Start it with the first of the states that it accepts. Without any, what it said to
/// the first one is what people are told.
fn start(
    program: &Compiled,
    source: &Source,
    config: &str,
    offers: &[Saved],
) -> Result<(WasmPolicy, Restored), String> {
    let mut first: Option<(WasmPolicy, Restored)> = None;
    let config_file = source.config_file.as_deref();
    let begin =
        |saved| program.start(config, saved).map_err(|error| error.with_config_file(config_file));
    for saved in offers {
        let policy = begin(Some(saved))?;
        let restored = policy.restored().clone();
        match restored {
            Restored::Accepted | Restored::NoInterface => return Ok((policy, restored)),
            _ if first.is_none() => first = Some((policy, restored)),
            _ => {}
        }
    }
    match first {
        Some(first) => Ok(first),
        None => Ok((begin(None)?, Restored::NotOffered)),
    }
}

async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(format!("loading a policy panicked: {e}")))
}

impl PolicySlot {
    /// The first policy; what it returns besides goes to the dispatch thread.
    ///
    /// # Errors
    /// If there is none and one is required.
    pub fn open(
        loader: Arc<Loader>,
        config: &crate::config::Policy,
        idle_ns: u64,
    ) -> Result<(Self, Loaded), CoreError> {
        let begun = Instant::now();
        let outcome = config.source().map_err(|why| (None, why)).and_then(|source| {
            let files = PolicyFiles::read_own(&source, config.limits.component_bytes_max);
            let ready = files.and_then(|files| compile(&loader, files, &Cancel::never()));
            let started = ready.and_then(|ready| {
                let (policy, _) = start(&ready.program, &ready.source, &ready.config_text, &[])?;
                Ok((policy, ready))
            });
            started.map_err(|why| (Some(source), why))
        });
        let (policy, ready, failure): (Loaded, _, _) = match outcome {
            Ok((policy, ready)) => (policy.into(), Some(ready), None),
            Err((_, why)) if config.required => return Err(CoreError::Policy(why)),
            Err((source, why)) => {
                tracing::error!("no policy: the built-in rule serves. {why}");
                let source =
                    source.unwrap_or(Source { file: DEFAULT_POLICY.into(), config_file: None });
                let failure = LoadFailure { source, message: why, at_unix_s: now_unix_s() };
                (Loaded::built_in(idle_ns), None, Some(failure))
            }
        };
        let load_ms = ready.as_ref().map_or(0.0, |_| begun.elapsed().as_secs_f64() * 1_000.0);
        let active = Active {
            source: ready.as_ref().map(|ready| ready.source.clone()),
            name: ready.as_ref().map_or("built-in", |ready| ready.program.name()).into(),
            digest: ready.as_ref().map_or("", |ready| ready.program.digest()).into(),
            signed_by: ready.as_ref().and_then(|ready| ready.program.signed_by()).map(Into::into),
            generation: 1,
            loaded_at_unix_s: now_unix_s(),
            load_ms,
            loaded_because: LoadedBecause::Start,
            same_as_generation: 1,
            restored: Default::default(),
        };
        let mut history = History::default();
        let own_seen = RefCell::new(ready.as_ref().map(Ready::content));
        let (config_text, program) = ready.map(|r| (r.config_text, r.program)).unzip();
        history.came(record(&active), config_text.unwrap_or_default(), program);
        let slot = PolicySlot {
            loader,
            turn: tokio::sync::Mutex::new(()),
            loads: Loads::default(),
            disabling: config.disabling.clone(),
            lasting: Duration::from_secs(config.limits.faults_forgotten_after_s),
            row: Cell::default(),
            active: RefCell::new(active),
            history: RefCell::new(history),
            configured: config.clone(),
            own_seen,
            follows_own: Cell::new(true),
            failures: Cell::new(failure.is_some().into()),
            last_failure: RefCell::new(failure),
            experiment: Cell::new(false),
            experiment_ended: Notify::new(),
        };
        Ok((slot, policy))
    }

    /// The active policy, or the built-in rule.
    pub fn active(&self) -> Active {
        self.active.borrow().clone()
    }

    /// The latest policies that were active, oldest first.
    pub fn history(&self) -> Vec<PolicyRecord> {
        self.history.borrow().records()
    }

    /// The last policy that was disabled, and how.
    pub fn last_disabled(&self) -> Option<LastDisabled> {
        self.history.borrow().last_disabled()
    }

    /// The last failure since a policy was put active.
    pub fn last_failure(&self) -> Option<LoadFailure> {
        self.last_failure.borrow().clone()
    }

    /// Loads that failed since the core started.
    pub fn failures(&self) -> u64 {
        self.failures.get()
    }

    /// The files that the core opens itself.
    pub fn own_source(&self) -> Option<Source> {
        self.configured.source().ok()
    }

    /// Changes of the core's own files count if what was asked for is what they were.
    fn follow_own_if(&self, asked_for: &Content) {
        self.follows_own.set(self.own_seen.borrow().as_ref() == Some(asked_for));
    }

    /// They count again if they have become what is active: it was asked for before their change was noticed.
    async fn follow_own_if_active(&self) {
        let Ok(source) = self.configured.source() else { return };
        if self.follows_own.get() {
            return;
        }
        let bytes_max = self.configured.limits.component_bytes_max;
        let read = aside(move || PolicyFiles::read_own(&source, bytes_max).map(content));
        let Ok(read) = tokio::time::timeout(READ_MAX, read).await else { return };
        if read.is_ok() && read.as_ref().ok() == self.history.borrow().active_content().as_ref() {
            *self.own_seen.borrow_mut() = read.ok();
            self.follows_own.set(true);
        }
    }

    /// The policy of this generation was disabled, and the built-in rule serves: put
    /// the last good one back, as the configuration says, after a while if this has
    /// happened before. Ends early if another policy comes meanwhile, and waits for the end of an A/B test, which may
    /// leave this one active.
    pub async fn recover(
        &self,
        control: &ControlSender,
        generation: u64,
        fault: Option<LastFault>,
    ) {
        let (kind, message) = fault.map_or(("unknown", String::new()), |f| (f.kind, f.message));
        let row = {
            let _turn = self.turn_after_experiment().await;
            let active = self.active();
            if active.generation != generation {
                return;
            }
            let how = Disabled { kind: kind.into(), message, at_unix_s: now_unix_s() };
            self.history.borrow_mut().disabled(generation, how);
            tracing::error!(
                name = active.name,
                digest = active.digest,
                generation,
                kind,
                "policy disabled: the built-in rule serves"
            );
            self.next_in_row()
        };
        if self.disabling.restore == Restore::BuiltIn {
            return;
        }
        let mut row = row;
        loop {
            let again = self.history.borrow().last_good().is_none();
            let delay = self.disabling.delay(row, again);
            if !delay.is_zero() {
                tracing::info!(
                    delay_ms = delay.as_millis() as u64,
                    again,
                    "a policy is put back later"
                );
            }
            tokio::time::sleep(delay).await;
            let _turn = self.turn_after_experiment().await;
            if self.active.borrow().generation != generation {
                return;
            }
            let (kept, loaded_because) = {
                let history = self.history.borrow();
                match history.last_good() {
                    Some(kept) => (Some(kept), LoadedBecause::Fallback),
                    None => (history.same(), LoadedBecause::Retry),
                }
            };
            let Some(kept) = kept else { return };
            let from = kept.generation;
            match self.put_back(control, kept, loaded_because).await {
                Err(SlotError::Load(message)) if loaded_because == LoadedBecause::Fallback => {
                    // It started once; now it counts as bad as the other.
                    let how = Disabled { kind: "start".into(), message, at_unix_s: now_unix_s() };
                    self.history.borrow_mut().disabled(from, how);
                }
                // It is tried again, ever later.
                Err(SlotError::Load(_) | SlotError::Ask(AskError::Busy)) => {
                    row = row.saturating_add(1);
                }
                _ => return,
            }
        }
    }

    /// How many policies were disabled in a row, this one included.
    fn next_in_row(&self) -> u32 {
        let (row, last) = self.row.get();
        let goes_on = last.is_some_and(|last| last.elapsed() < self.lasting);
        let row = if goes_on { row.saturating_add(1) } else { 1 };
        self.row.set((row, Some(Instant::now())));
        row
    }

    async fn put_back(
        &self,
        control: &ControlSender,
        kept: Kept,
        loaded_because: LoadedBecause,
    ) -> Result<Active, SlotError> {
        let Kept { same_as_generation, source, program, config_text, saved, .. } = kept;
        let next = Next {
            loaded_because,
            same_as_generation: Some(same_as_generation),
            own: saved,
            begun: Instant::now(),
        };
        self.put(control, Ready { source, program, config_text }, next).await
    }

    /// Start a policy and let it take over.
    async fn put(
        &self,
        control: &ControlSender,
        ready: Ready,
        next: Next,
    ) -> Result<Active, SlotError> {
        let old = self.active.borrow().generation;
        let saved = match control.ask(|done| Control::SavePolicy { done }).await? {
            Some(Ok(saved)) => Some(saved),
            None => None,
            Some(Err(fault)) => {
                tracing::warn!(generation = old, "what the policy knew is lost: {fault}");
                None
            }
        };
        let latest = self.history.borrow().latest_saved();
        let mut offers: Vec<Saved> = Vec::new();
        for offer in [saved.clone(), next.own, latest].into_iter().flatten() {
            if !offers.contains(&offer) {
                offers.push(offer);
            }
        }
        let (program, config) = (ready.program.clone(), ready.config_text.clone());
        let source = ready.source.clone();
        let started = aside(move || start(&program, &source, &config, &offers)).await;
        let (policy, restored) = match started {
            Ok(started) => started,
            Err(message) => return Err(self.failed(ready.source, message)),
        };
        let generation = old + 1;
        let active = Active {
            source: Some(ready.source),
            name: ready.program.name().into(),
            digest: ready.program.digest().into(),
            signed_by: ready.program.signed_by().map(Into::into),
            generation,
            loaded_at_unix_s: now_unix_s(),
            load_ms: next.begun.elapsed().as_secs_f64() * 1_000.0,
            loaded_because: next.loaded_because,
            same_as_generation: next.same_as_generation.unwrap_or(generation),
            restored: crate::status::restored(restored),
        };
        let policy = Loaded::from(policy);
        let retired = control.ask(|done| Control::SetPolicy { policy, generation, done }).await?;
        // Unmapping an instance's memory takes a while. Awaited, so that instances do
        // not pile up when one reload follows another.
        let figures = tokio::task::spawn_blocking(move || retired.figures()).await;
        tracing::info!(
            name = active.name,
            digest = active.digest,
            generation,
            loaded_because = %active.loaded_because,
            load_ms = active.load_ms,
            state = %active.restored,
            "active policy"
        );
        let mut history = self.history.borrow_mut();
        history.came(record(&active), ready.config_text, Some(ready.program));
        history.retired(old, figures.ok().flatten(), saved);
        *self.active.borrow_mut() = active.clone();
        *self.last_failure.borrow_mut() = None;
        Ok(active)
    }

    /// A policy whose files a peer opened could not be read.
    pub fn refused(&self, source: Source, message: String) -> SlotError {
        self.failed(source, message)
    }

    fn failed(&self, source: Source, message: String) -> SlotError {
        tracing::error!(file = %source.file.display(), "policy not loaded, the active one stays: {message}");
        self.failures.set(self.failures.get() + 1);
        *self.last_failure.borrow_mut() =
            Some(LoadFailure { source, message: message.clone(), at_unix_s: now_unix_s() });
        SlotError::Load(message)
    }
}

/// Why a policy is put active, and with what state.
struct Next {
    loaded_because: LoadedBecause,
    /// For a rollback: `same_as_generation` of the policy that is put back.
    same_as_generation: Option<u64>,
    /// What it knew when it was active last.
    own: Option<Saved>,
    begun: Instant,
}

/// A record of what has just come.
fn record(active: &Active) -> PolicyRecord {
    PolicyRecord {
        generation: active.generation,
        name: active.name.clone(),
        digest: active.digest.clone(),
        signed_by: active.signed_by.clone(),
        source: active.source.clone(),
        loaded_because: active.loaded_because,
        same_as_generation: active.same_as_generation,
        loaded_at_unix_s: active.loaded_at_unix_s,
        restored: active.restored.clone(),
        ..PolicyRecord::default()
    }
}
