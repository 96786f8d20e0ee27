//! What is checked: something of which fresh instances can be had.

use std::collections::BTreeMap;
use std::path::Path;
use tally_engine::policy::{Fault, Policy};
use tally_wasm_host::{
    Capabilities, Capability, Compiled, Compiler, HostError, Limits, LoadError, PolicyHost,
};
use tally_wasm_host::{Restored, Saved, WasmPolicy};

/// A policy with figures about itself.
pub trait Instance: Policy + Send {
    /// Linear memory that it has now, bytes.
    fn memory_bytes(&self) -> usize;
    /// Fuel that its last call used; none after a fault.
    fn call_fuel(&self) -> Option<u64>;
    /// What it knows, if it keeps that.
    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        None
    }
    /// What became of what it was given to start from.
    fn restored(&self) -> Restored {
        Restored::NoInterface
    }
    /// Values of the counters that it made, by name.
    fn counters(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
}

impl Instance for WasmPolicy {
    fn memory_bytes(&self) -> usize {
        WasmPolicy::memory_bytes(self)
    }

    fn call_fuel(&self) -> Option<u64> {
        WasmPolicy::call_fuel(self)
    }

    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        WasmPolicy::snapshot(self)
    }

    fn restored(&self) -> Restored {
        WasmPolicy::restored(self).clone()
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        self.status().counters
    }
}

/// Makes instances that know nothing of each other.
pub trait Subject {
    /// A fresh one, initialised, and offered what another one saved.
    ///
    /// # Errors
    /// Why it does not load.
    fn start(&self, saved: Option<&Saved>) -> Result<Box<dyn Instance>, LoadError>;
    /// Fuel that one call may use.
    fn call_fuel_max(&self) -> u64;
    /// Whether it may have a say over high-priority launches, and so is asked about them.
    fn has_say_over_high(&self) -> bool {
        true
    }
    /// Whether it has the interface `state`.
    fn keeps_state(&self) -> bool {
        false
    }
}

/// A component under a host of its own.
pub struct Wasm {
    compiled: Compiled,
    config: String,
    call_fuel_max: u64,
    has_say_over_high: bool,
    /// Keeps the clock of its calls going.
    _host: PolicyHost,
}

impl Wasm {
    /// The limits under which policies are checked: the given ones but for two. CPU
    /// time, for how fast this machine is must not change the outcome; and the number of
    /// faults after which a policy is disabled, for one fault must not hide the next.
    pub fn limits(limits: &Limits) -> Limits {
        Limits {
            call_cpu_ms_max: 60_000,
            init_cpu_ms_max: 600_000,
            faults_max: u32::MAX,
            ..limits.clone()
        }
    }

    /// Compile the component in a file, for a policy that has been granted these.
    ///
    /// # Errors
    /// Limits under which no policy can run. That the file is no policy is an outcome of
    /// its first check: the inner error.
    pub fn open(
        compiler: Compiler,
        path: &Path,
        config: &str,
        limits: &Limits,
        granted: Capabilities,
    ) -> Result<Result<Self, LoadError>, HostError> {
        Self::with(compiler, config, limits, granted, |host| host.compile_file(path))
    }

    /// Compile the component in `bytes`; `name` stands for it in messages.
    ///
    /// # Errors
    /// As for [`Wasm::open`].
    pub fn of_bytes(
        compiler: Compiler,
        name: &str,
        bytes: &[u8],
        config: &str,
        limits: &Limits,
        granted: Capabilities,
    ) -> Result<Result<Self, LoadError>, HostError> {
        Self::with(compiler, config, limits, granted, |host| host.compile_bytes(name, bytes))
    }

    fn with(
        compiler: Compiler,
        config: &str,
        limits: &Limits,
        granted: Capabilities,
        compile: impl FnOnce(&PolicyHost) -> Result<Compiled, LoadError>,
    ) -> Result<Result<Self, LoadError>, HostError> {
        let host = PolicyHost::compiling_by(compiler, Self::limits(limits))?.granting(granted);
        let high = Capability::HighPriority;
        Ok(compile(&host).map(|compiled| Wasm {
            has_say_over_high: granted.has(high) && compiled.needs().has(high),
            compiled,
            config: config.into(),
            call_fuel_max: limits.decide_fuel,
            _host: host,
        }))
    }
}

impl Subject for Wasm {
    fn start(&self, saved: Option<&Saved>) -> Result<Box<dyn Instance>, LoadError> {
        Ok(Box::new(self.compiled.start(&self.config, saved)?))
    }

    fn call_fuel_max(&self) -> u64 {
        self.call_fuel_max
    }

    fn has_say_over_high(&self) -> bool {
        self.has_say_over_high
    }

    fn keeps_state(&self) -> bool {
        self.compiled.keeps_state()
    }
}
