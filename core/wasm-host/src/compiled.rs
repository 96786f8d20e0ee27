//! A policy that was compiled and checked, and can be started any number of times.

use crate::bindings::PolicyPre;
use crate::capabilities::{self, Capabilities};
use crate::host_calls::HostState;
use crate::runtime::Ticker;
use crate::spawn::Budget;
use crate::state::{Exports, Saved};
use crate::{Limits, LoadError, WasmPolicy};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// CPU time of a `snapshot`, and of an instance in place of a failed one.
const SELDOM_CPU_MS: u64 = 20;

/// A component that is a policy: compiled once, shared by all that start it.
pub struct Checked {
    pub pre: PolicyPre<HostState>,
    pub state: Option<Exports>,
    pub digest: String,
    pub imports: BTreeSet<String>,
    pub limits: Limits,
    pub granted: Capabilities,
    /// Keeps epochs advancing.
    pub ticker: Arc<Ticker>,
}

impl Checked {
    /// What a call may use.
    pub fn budget(&self, fuel: u64, cpu_ms: u64) -> Budget {
        Budget { fuel, cpu_ms, data_bytes: self.limits.host_call_bytes_max }
    }

    /// What a seldom call of more than a decision may use.
    pub fn seldom_budget(&self, fuel: u64) -> Budget {
        self.budget(fuel, self.limits.call_cpu_ms_max.max(SELDOM_CPU_MS))
    }
}

/// A policy compiled and checked against the contract, not yet started. Cheap to
/// clone; keeps nothing of its file but the compiled code, so that the file may be
/// changed or deleted.
#[derive(Clone)]
pub struct Compiled {
    pub(crate) checked: Arc<Checked>,
    pub(crate) name: Arc<str>,
    pub(crate) path: Option<PathBuf>,
    /// What messages call it.
    pub(crate) file: Arc<str>,
    pub(crate) signed_by: Option<Arc<str>>,
    /// What reading, compiling and checking took.
    pub(crate) compile_ms: f64,
}

impl Compiled {
    /// The name of its file, without the ending.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file; none if it came from memory.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// SHA-256 of its file, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.checked.digest
    }

    /// Id of the trusted key that signed its file. `None` if it is not signed, or no keys
    /// are configured to tell.
    pub fn signed_by(&self) -> Option<&str> {
        self.signed_by.as_deref()
    }

    /// The capabilities that functions which it imports take, whether granted or not.
    pub fn needs(&self) -> Capabilities {
        capabilities::needs(self.checked.imports.iter().map(String::as_str))
    }

    /// The capabilities that it has.
    pub fn granted(&self) -> Capabilities {
        self.checked.granted
    }

    /// The functions of the contract's `host` that it imports.
    pub fn imports(&self) -> BTreeSet<String> {
        self.checked.imports.clone()
    }

    /// Whether it exports `state`.
    pub fn keeps_state(&self) -> bool {
        self.checked.state.is_some()
    }

    /// How long reading, compiling and checking took, ms; next to nothing if the
    /// host knew it already.
    pub fn compile_ms(&self) -> f64 {
        self.compile_ms
    }

    /// A new instance, whose `init` gets this configuration and whose `restore` gets
    /// what another one saved. That may be of no use to it: [`WasmPolicy::restored`]
    /// says what became of it. Takes tens of microseconds and whatever `init` and
    /// `restore` do: not for the dispatch thread.
    ///
    /// # Errors
    /// If it cannot be started, or `init` refuses the configuration.
    pub fn start(&self, config: &str, saved: Option<&Saved>) -> Result<WasmPolicy, LoadError> {
        WasmPolicy::start(self.clone(), config, saved)
    }
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled")
            .field("name", &self.name)
            .field("digest", &self.digest())
            .finish()
    }
}
