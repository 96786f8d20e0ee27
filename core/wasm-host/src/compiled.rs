//! A policy that was compiled and checked, and can be started any number of times.

use crate::bindings::{Provided, ProvidedPre, activity, completions, membership, timer, units};
use crate::imports::HostState;
use crate::inspect::READS_USAGE;
use crate::runtime::Ticker;
use crate::spawn::{Budget, Exports};
use crate::state::{self, Saved};
use crate::{Limits, LoadError, WasmPolicy};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tally_contract::capability::Capabilities;
use tally_contract::limits::SNAPSHOT_CPU_MS;
use tally_engine::policy::Subscriptions;
use wasmtime::Store;
use wasmtime::component::Instance;

/// A component that is a policy: compiled once, shared by all that start it.
pub struct Checked {
    pub exports: Exported,
    pub state: Option<state::Exports>,
    pub digest: String,
    pub imports: BTreeSet<String>,
    /// Interfaces of the contract's package that it exports and this core does not know.
    pub unknown_exports: Vec<String>,
    pub limits: Limits,
    pub granted: Capabilities,
    /// Advances the engine's epoch while this component's instances are called.
    pub ticker: Arc<Ticker>,
}

/// The exports of a component, looked up once.
pub struct Exported {
    pub pre: ProvidedPre<HostState>,
    pub activity: Option<activity::GuestIndices>,
    pub completions: Option<completions::GuestIndices>,
    pub membership: Option<membership::GuestIndices>,
    pub timer: Option<timer::GuestIndices>,
    pub units: Option<units::GuestIndices>,
}

impl Exported {
    /// Look them up; `exported` are the bare names of the interfaces that there are.
    ///
    /// # Errors
    /// If one is another than the contract's.
    pub fn find(
        pre: ProvidedPre<HostState>,
        exported: &BTreeSet<String>,
    ) -> wasmtime::Result<Self> {
        let instance_pre = pre.instance_pre();
        let has = |name: &str| exported.contains(name).then_some(());
        Ok(Exported {
            activity: has("activity")
                .map(|()| activity::GuestIndices::new(instance_pre))
                .transpose()?,
            completions: has("completions")
                .map(|()| completions::GuestIndices::new(instance_pre))
                .transpose()?,
            membership: has("membership")
                .map(|()| membership::GuestIndices::new(instance_pre))
                .transpose()?,
            timer: has("timer").map(|()| timer::GuestIndices::new(instance_pre)).transpose()?,
            units: has("units").map(|()| units::GuestIndices::new(instance_pre)).transpose()?,
            pre,
        })
    }

    /// Looks the exports of an instance up.
    ///
    /// # Errors
    /// If one is another than the contract's.
    pub fn of(
        &self,
        instance: &Instance,
        store: &mut Store<HostState>,
    ) -> wasmtime::Result<Exports> {
        Ok(Exports {
            scheduler: Provided::new(&mut *store, instance)?,
            activity: self
                .activity
                .as_ref()
                .map(|at| at.load(&mut *store, instance))
                .transpose()?,
            completions: self
                .completions
                .as_ref()
                .map(|at| at.load(&mut *store, instance))
                .transpose()?,
            membership: self
                .membership
                .as_ref()
                .map(|at| at.load(&mut *store, instance))
                .transpose()?,
            timer: self.timer.as_ref().map(|at| at.load(&mut *store, instance)).transpose()?,
            units: self.units.as_ref().map(|at| at.load(&mut *store, instance)).transpose()?,
        })
    }
}

impl Checked {
    /// What it is to be told, by what it exports; and what it reads of clients.
    pub fn subscriptions(&self) -> Subscriptions {
        let of = |is: bool, one: Subscriptions| if is { one } else { Subscriptions::NONE };
        let Exported { activity, completions, membership, timer, units, .. } = &self.exports;
        let reads_usage = ["clients", READS_USAGE].iter().any(|name| self.imports.contains(*name));
        of(activity.is_some(), Subscriptions::ACTIVITY)
            .and(of(completions.is_some(), Subscriptions::COMPLETIONS))
            .and(of(membership.is_some(), Subscriptions::MEMBERSHIP))
            .and(of(timer.is_some(), Subscriptions::TIMER))
            .and(of(units.is_some(), Subscriptions::UNITS))
            .and(of(reads_usage, Subscriptions::USAGE))
            .and(of(self.imports.contains("services"), Subscriptions::SERVICES))
    }

    /// What a call may use.
    pub fn budget(&self, fuel: u64, cpu_ms: u64) -> Budget {
        Budget { fuel, cpu_ms, data_bytes: self.limits.host_call_bytes_max }
    }

    /// What a seldom call of more than a decision may use.
    pub fn seldom_budget(&self, fuel: u64) -> Budget {
        self.budget(fuel, self.limits.call_cpu_ms_max.max(SNAPSHOT_CPU_MS))
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
    /// The file's name in messages.
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

    /// The capabilities that it imports.
    pub fn needs(&self) -> Capabilities {
        Capabilities::of_imports(self.checked.imports.iter().map(String::as_str))
    }

    /// The capabilities that it has.
    pub fn granted(&self) -> Capabilities {
        self.checked.granted
    }

    /// The interfaces of the contract that it imports functions of, by their bare names.
    pub fn imports(&self) -> BTreeSet<String> {
        self.checked.imports.iter().filter(|name| *name != READS_USAGE).cloned().collect()
    }

    pub fn subscriptions(&self) -> Subscriptions {
        self.checked.subscriptions()
    }

    /// Interfaces of a later contract that it exports: it runs without them.
    pub fn unknown_exports(&self) -> &[String] {
        &self.checked.unknown_exports
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
