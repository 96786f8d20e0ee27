//! The policy in charge and how another takes its place: loaded aside, put in
//! charge between two decisions, the old one dropped off the dispatch thread. A
//! policy that cannot be loaded changes nothing but what status shows.

use crate::dispatch::control::{AskError, Control, ControlSender};
use crate::error::CoreError;
use crate::loader::{Loader, Shared};
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tally_engine::BuiltIn;

/// The policy that is used when none is named.
pub const DEFAULT_POLICY: &str = "tally-priority.wasm";
/// Longest policy configuration read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Where a policy comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// The component.
    pub file: PathBuf,
    /// Its configuration, if any.
    pub config_file: Option<PathBuf>,
}

/// What is in charge.
#[derive(Clone, Debug, Serialize)]
pub struct InCharge {
    /// Where it came from; `None`: the built-in rule.
    pub source: Option<Source>,
    /// Its name.
    pub name: String,
    /// SHA-256 of its file; empty for the built-in rule.
    pub digest: String,
    /// Rises by one with each policy put in charge; the first is 1.
    pub generation: u64,
    /// When, seconds since the epoch.
    pub loaded_at_unix_s: u64,
    /// How long compiling, starting and `init` took, ms.
    pub load_ms: f64,
    #[serde(skip)]
    config_text: String,
}

/// The last attempt that failed.
#[derive(Clone, Debug, Serialize)]
pub struct LoadFailure {
    /// What was to be loaded.
    pub source: Source,
    /// Why it was not; complete.
    pub message: String,
    /// When, seconds since the epoch.
    pub at_unix_s: u64,
}

/// Why a policy was not put in charge.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// It could not be loaded.
    #[error("{0}")]
    Load(String),
    /// The dispatch thread did not take it.
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// What asked for a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Somebody did: loaded even if nothing changed.
    Asked,
    /// The file changed: not if its content did not.
    Changed,
}

/// See the module's documentation.
pub struct PolicySlot {
    loader: Arc<dyn Loader>,
    turn: tokio::sync::Mutex<()>,
    in_charge: RefCell<InCharge>,
    last_failure: RefCell<Option<LoadFailure>>,
    failures: Cell<u64>,
}

/// Where the default policy may be: next to the program, or installed.
fn default_places() -> Vec<PathBuf> {
    let Ok(program) = std::env::current_exe() else { return Vec::new() };
    let Some(folder) = program.parent() else { return Vec::new() };
    vec![
        folder.join("policies").join(DEFAULT_POLICY),
        folder.join("../lib/tally/policies").join(DEFAULT_POLICY),
    ]
}

/// The source that the configuration names, or the default one.
///
/// # Errors
/// If none is named and the default is not there; says how to get it.
pub fn configured_source(config: &crate::config::Policy) -> Result<Source, String> {
    let config_file = config.config_file.clone();
    if let Some(file) = &config.file {
        return Ok(Source { file: file.clone(), config_file });
    }
    let places = default_places();
    match places.iter().find(|p| p.exists()) {
        Some(file) => Ok(Source { file: file.clone(), config_file }),
        None => Err(format!(
            "no policy is named and none is at {}: build it with `cargo xtask policies`, or name \
             one with --policy FILE",
            places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" or ")
        )),
    }
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

pub(crate) fn read_config(file: Option<&Path>) -> Result<String, String> {
    let Some(file) = file else { return Ok(String::new()) };
    let whole = std::fs::metadata(file).and_then(|m| {
        if m.len() > CONFIG_BYTES_MAX {
            return Err(std::io::Error::other(format!("longer than {CONFIG_BYTES_MAX} bytes")));
        }
        std::fs::read_to_string(file)
    });
    whole.map_err(|e| format!("policy configuration {}: {e}", file.display()))
}

struct Ready {
    policy: Shared,
    in_charge: InCharge,
}

fn load(loader: &dyn Loader, source: &Source) -> Result<Ready, String> {
    let config_text = read_config(source.config_file.as_deref())?;
    let start = Instant::now();
    let loaded = loader.load(&source.file, &config_text)?;
    Ok(Ready {
        policy: Shared::new(loaded.policy),
        in_charge: InCharge {
            source: Some(source.clone()),
            name: loaded.name,
            digest: loaded.digest,
            generation: 1,
            loaded_at_unix_s: now_unix_s(),
            load_ms: start.elapsed().as_secs_f64() * 1_000.0,
            config_text,
        },
    })
}

impl PolicySlot {
    /// The first policy; what it returns besides goes to the dispatch thread.
    ///
    /// # Errors
    /// If there is none and one is required.
    pub fn open(
        loader: Arc<dyn Loader>,
        config: &crate::config::Policy,
        quiet_ns: u64,
    ) -> Result<(Self, Shared), CoreError> {
        let outcome = configured_source(config)
            .map_err(|why| (None, why))
            .and_then(|s| load(&*loader, &s).map_err(|why| (Some(s), why)));
        let (policy, in_charge, failure) = match outcome {
            Ok(ready) => (ready.policy, ready.in_charge, None),
            Err((_, why)) if config.required => return Err(CoreError::Policy(why)),
            Err((source, why)) => {
                tracing::error!("no policy: the built-in rule serves. {why}");
                let source =
                    source.unwrap_or(Source { file: DEFAULT_POLICY.into(), config_file: None });
                let failure = LoadFailure { source, message: why, at_unix_s: now_unix_s() };
                (Shared::new(Box::new(BuiltIn { quiet_ns })), built_in(), Some(failure))
            }
        };
        let slot = PolicySlot {
            loader,
            turn: tokio::sync::Mutex::new(()),
            in_charge: RefCell::new(in_charge),
            failures: Cell::new(failure.is_some().into()),
            last_failure: RefCell::new(failure),
        };
        Ok((slot, policy))
    }

    /// What is in charge.
    pub fn in_charge(&self) -> InCharge {
        self.in_charge.borrow().clone()
    }

    /// The last failure since a policy was put in charge.
    pub fn last_failure(&self) -> Option<LoadFailure> {
        self.last_failure.borrow().clone()
    }

    /// Loads that failed since the core started.
    pub fn failures(&self) -> u64 {
        self.failures.get()
    }

    /// What a reload loads: the source in charge, or the one that failed.
    pub fn source(&self) -> Option<Source> {
        let in_charge = self.in_charge.borrow().source.clone();
        in_charge.or_else(|| self.last_failure.borrow().as_ref().map(|f| f.source.clone()))
    }

    /// Load a policy and put it in charge. One at a time, in order of asking.
    ///
    /// # Errors
    /// If it cannot be loaded; the one in charge stays.
    pub async fn load(
        &self,
        control: &ControlSender,
        source: Source,
        trigger: Trigger,
    ) -> Result<InCharge, SlotError> {
        let _turn = self.turn.lock().await;
        let loader = self.loader.clone();
        let asked = source.clone();
        let outcome = tokio::task::spawn_blocking(move || load(&*loader, &asked))
            .await
            .unwrap_or_else(|e| Err(format!("loading a policy panicked: {e}")));
        let ready = match outcome {
            Ok(ready) => ready,
            Err(message) => {
                tracing::error!(file = %source.file.display(), "policy not loaded, the one in charge stays: {message}");
                self.failures.set(self.failures.get() + 1);
                *self.last_failure.borrow_mut() =
                    Some(LoadFailure { source, message: message.clone(), at_unix_s: now_unix_s() });
                return Err(SlotError::Load(message));
            }
        };
        let mut next = ready.in_charge;
        {
            let now = self.in_charge.borrow();
            let same = now.digest == next.digest && now.config_text == next.config_text;
            if trigger == Trigger::Changed && same && now.source == next.source {
                return Ok(now.clone());
            }
            next.generation = now.generation + 1;
        }
        let retired = control.ask(|done| Control::SetPolicy { policy: ready.policy, done }).await?;
        // Unmapping an instance's memory takes a while.
        tokio::task::spawn_blocking(move || drop(retired));
        tracing::info!(
            name = next.name,
            digest = next.digest,
            generation = next.generation,
            load_ms = next.load_ms,
            "policy in charge"
        );
        *self.in_charge.borrow_mut() = next.clone();
        *self.last_failure.borrow_mut() = None;
        Ok(next)
    }
}

fn built_in() -> InCharge {
    InCharge {
        source: None,
        name: "built-in".into(),
        digest: String::new(),
        generation: 1,
        loaded_at_unix_s: now_unix_s(),
        load_ms: 0.0,
        config_text: String::new(),
    }
}
