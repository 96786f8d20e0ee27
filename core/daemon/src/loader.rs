//! Policies as the daemon sees them: something that compiles a file, what it makes of
//! it, and what is started from that. The only module that knows they are WebAssembly.

use crate::dispatch::handover::FaultCost;
use std::sync::{Arc, Mutex, PoisonError};
use tally_engine::BuiltIn;
use tally_engine::policy::{Context, Decision, Event, Fault, FaultKind, Launch, Policy};
use tally_ipc::wait::now_ns;
use tally_wasm_host::{
    Cancel, Compiled, ComponentFile, PolicyHost, PolicyStatus, Saved, Trust, WasmPolicy,
};

/// A policy that can also tell people about itself.
pub trait Hosted: Policy + Send {
    /// Its figures; `None` for the built-in rule, which has none.
    fn figures(&self) -> Option<PolicyStatus>;

    /// The text that it was configured with.
    fn config(&self) -> &str {
        ""
    }

    /// What it started with, of what an earlier one knew.
    fn started_with(&self) -> Option<&Saved> {
        None
    }

    /// What it knows, for the next one; `None` if it keeps nothing. On the dispatch
    /// thread, and bounded like any call.
    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        None
    }

    /// The same for a recording: a failure is no strike.
    fn observe(&mut self) -> Option<Saved> {
        None
    }

    /// It failed too often and is asked no more.
    fn is_disabled(&self) -> bool {
        false
    }
}

impl Hosted for WasmPolicy {
    fn figures(&self) -> Option<PolicyStatus> {
        Some(self.status())
    }

    fn config(&self) -> &str {
        WasmPolicy::config(self)
    }

    fn started_with(&self) -> Option<&Saved> {
        WasmPolicy::started_with(self)
    }

    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        WasmPolicy::snapshot(self)
    }

    fn observe(&mut self) -> Option<Saved> {
        WasmPolicy::observe(self)
    }

    fn is_disabled(&self) -> bool {
        self.is_switched_off()
    }
}

impl Hosted for BuiltIn {
    fn figures(&self) -> Option<PolicyStatus> {
        None
    }
}

/// A policy with a second handle to it, because the engine owns the first and
/// knows nothing of figures. Both handles stay on the dispatch thread while the
/// policy is active, so the lock is never contended.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Inner>>);

struct Inner {
    policy: Box<dyn Hosted>,
    cost: FaultCost,
    /// The call before failed: this one starts a new instance.
    has_failed: bool,
}

impl Shared {
    /// Share a policy.
    pub fn new(policy: Box<dyn Hosted>) -> Self {
        let inner = Inner { policy, cost: FaultCost::default(), has_failed: false };
        Shared(Arc::new(Mutex::new(inner)))
    }

    pub fn figures(&self) -> Option<PolicyStatus> {
        self.lock().policy.figures()
    }

    pub fn config(&self) -> String {
        self.lock().policy.config().to_owned()
    }

    pub fn started_with(&self) -> Option<Saved> {
        self.lock().policy.started_with().cloned()
    }

    pub fn snapshot(&self) -> Option<Result<Saved, Fault>> {
        self.lock().policy.snapshot()
    }

    pub fn observe(&self) -> Option<Saved> {
        self.lock().policy.observe()
    }

    pub fn is_disabled(&self) -> bool {
        self.lock().policy.is_disabled()
    }

    /// What its faults cost those who waited.
    pub fn fault_cost(&self) -> FaultCost {
        self.lock().cost
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Account for a call about something that was seen at `seen_ns`. The clock is read
    /// only if this call failed or the one before did.
    #[inline]
    fn note<T>(&mut self, seen_ns: u64, outcome: &Result<T, Fault>) {
        let failed = matches!(outcome, Err(fault) if fault.kind != FaultKind::Disabled);
        if failed || self.has_failed {
            self.cost.add(now_ns().saturating_sub(seen_ns));
            self.has_failed = failed;
        }
    }
}

impl Policy for Shared {
    fn start(&mut self, context: &mut Context) {
        self.lock().policy.start(context);
    }

    fn strike(&mut self, now_ns: u64, fault: &Fault) {
        self.lock().policy.strike(now_ns, fault);
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        let mut inner = self.lock();
        let outcome = inner.policy.decide(launch, context);
        inner.note(launch.now_ns, &outcome);
        outcome
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let mut inner = self.lock();
        let outcome = inner.policy.on_event(now_ns, event, context);
        inner.note(now_ns, &outcome);
        outcome
    }
}

/// A policy that was compiled and can be started. Kept for rollback: what it was made
/// of may be gone.
pub trait Program: Send + Sync {
    fn name(&self) -> &str;
    /// SHA-256 of its file.
    fn digest(&self) -> &str;
    /// Id of the trusted key that signed its file, if one did and keys are configured.
    fn signed_by(&self) -> Option<&str> {
        None
    }
    /// Start it with a configuration, and offer it what another policy knew.
    ///
    /// # Errors
    /// Everything an operator needs to know, as text.
    fn start(&self, config: &str, saved: Option<&Saved>) -> Result<Box<dyn Hosted>, String>;
}

impl Program for Compiled {
    fn name(&self) -> &str {
        Compiled::name(self)
    }

    fn digest(&self) -> &str {
        Compiled::digest(self)
    }

    fn signed_by(&self) -> Option<&str> {
        Compiled::signed_by(self)
    }

    fn start(&self, config: &str, saved: Option<&Saved>) -> Result<Box<dyn Hosted>, String> {
        let policy = Compiled::start(self, config, saved).map_err(|error| error.to_string())?;
        Ok(Box::new(policy))
    }
}

/// Something that makes policies of components. Called off both threads.
pub trait Loader: Send + Sync + 'static {
    /// Compile and check one. Another thread can end it by `cancel`.
    ///
    /// # Errors
    /// Everything an operator needs to know, as text.
    fn compile(&self, file: &ComponentFile, cancel: &Cancel) -> Result<Arc<dyn Program>, String>;
}

/// The real one.
pub struct WasmLoader(PolicyHost);

impl WasmLoader {
    /// Start the WebAssembly engine, and read the keys of those whose policies are loaded.
    ///
    /// # Errors
    /// If the settings make no sense or the engine does not start.
    pub fn new(config: &crate::config::Policy) -> Result<Self, String> {
        let trust = Trust::open(&config.trust).map_err(|error| error.to_string())?;
        let host = PolicyHost::new(config.limits.clone()).map_err(|error| error.to_string())?;
        Ok(WasmLoader(host.granting(config.capabilities).trusting(trust)))
    }
}

impl Loader for WasmLoader {
    fn compile(&self, file: &ComponentFile, cancel: &Cancel) -> Result<Arc<dyn Program>, String> {
        let compiled = self.0.compile(file, cancel).map_err(|error| error.to_string())?;
        Ok(Arc::new(compiled))
    }
}
