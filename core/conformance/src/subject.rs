//! What is checked: something of which fresh instances can be had.

use std::path::Path;
use tally_engine::policy::Policy;
use tally_policy_host::{HostError, Limits, LoadError, PolicyHost, WasmPolicy};

/// A policy with figures about itself.
pub trait Instance: Policy {
    /// Linear memory that it has now, bytes.
    fn memory_bytes(&self) -> usize;
    /// Fuel that its last call used; none after a fault.
    fn call_fuel(&self) -> Option<u64>;
}

impl Instance for WasmPolicy {
    fn memory_bytes(&self) -> usize {
        WasmPolicy::memory_bytes(self)
    }

    fn call_fuel(&self) -> Option<u64> {
        WasmPolicy::call_fuel(self)
    }
}

/// Makes instances that know nothing of each other.
pub trait Subject {
    /// A fresh one, initialised.
    ///
    /// # Errors
    /// Why it does not load.
    fn start(&self) -> Result<Box<dyn Instance>, LoadError>;
    /// Fuel that one call may use.
    fn call_fuel_max(&self) -> u64;
}

/// A component under a host of its own.
pub struct Wasm {
    host: PolicyHost,
    name: String,
    bytes: Vec<u8>,
    config: String,
    fuel: u64,
}

impl Wasm {
    /// The component in `bytes`; `name` stands for it in messages.
    ///
    /// The limits are those of the core but for two: wall-clock time, for how busy this
    /// machine is must not change the outcome, and the number of faults after which a
    /// policy is switched off, for one fault must not hide the next.
    ///
    /// # Errors
    /// Limits under which no policy can run.
    pub fn new(
        name: &str,
        bytes: Vec<u8>,
        config: &str,
        limits: Limits,
    ) -> Result<Self, HostError> {
        let fuel = limits.decide_fuel;
        let limits = Limits {
            call_time_ms_max: 60_000,
            init_time_ms_max: 600_000,
            faults_max: u32::MAX,
            ..limits
        };
        let host = PolicyHost::new(limits)?;
        Ok(Wasm { host, name: name.into(), bytes, config: config.into(), fuel })
    }

    /// The component in a file, which is read here.
    ///
    /// # Errors
    /// The file cannot be read; boxed, for [`Wasm::new`] has errors of its own.
    pub fn open(
        path: &Path,
        config: &str,
        limits: Limits,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self::new(&path.display().to_string(), bytes, config, limits)?)
    }
}

impl Subject for Wasm {
    fn start(&self) -> Result<Box<dyn Instance>, LoadError> {
        Ok(Box::new(self.host.load_bytes(&self.name, &self.bytes, &self.config)?))
    }

    fn call_fuel_max(&self) -> u64 {
        self.fuel
    }
}
