//! Policies as the daemon sees them: something that loads a file, and what it
//! loads. The only module that knows they are WebAssembly.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tally_engine::BuiltIn;
use tally_engine::policy::{Context, Decision, Event, Fault, Launch, Policy};
use tally_policy_host::{Compiled, Limits, PolicyHost, PolicyStatus, Saved, WasmPolicy};

/// A policy that can also tell people about itself.
pub trait Hosted: Policy + Send {
    /// Its figures; `None` for the built-in rule, which has none.
    fn figures(&self) -> Option<PolicyStatus>;

    /// What it knows, for the next one; `None` if it keeps nothing. On the dispatch
    /// thread, and bounded like any call.
    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        None
    }
}

impl Hosted for WasmPolicy {
    fn figures(&self) -> Option<PolicyStatus> {
        Some(self.status())
    }

    fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        WasmPolicy::snapshot(self)
    }
}

impl Hosted for BuiltIn {
    fn figures(&self) -> Option<PolicyStatus> {
        None
    }
}

/// A policy with a second handle to it, because the engine owns the first and
/// knows nothing of figures. Both handles stay on the dispatch thread while the
/// policy is in charge, so the lock is never contended.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Box<dyn Hosted>>>);

impl Shared {
    /// Share a policy.
    pub fn new(policy: Box<dyn Hosted>) -> Self {
        Shared(Arc::new(Mutex::new(policy)))
    }

    /// See [`Hosted::figures`].
    pub fn figures(&self) -> Option<PolicyStatus> {
        self.lock().figures()
    }

    /// See [`Hosted::snapshot`].
    pub fn snapshot(&self) -> Option<Result<Saved, Fault>> {
        self.lock().snapshot()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Box<dyn Hosted>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Policy for Shared {
    fn start(&mut self, context: &mut Context) {
        self.lock().start(context);
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        self.lock().decide(launch, context)
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.lock().on_event(now_ns, event, context)
    }
}

/// A policy ready to be put in charge.
pub struct Loaded {
    /// The policy.
    pub policy: Box<dyn Hosted>,
    /// Its name.
    pub name: String,
    /// SHA-256 of its file.
    pub digest: String,
}

/// A policy that was compiled and can be started.
pub trait Program: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;
    /// SHA-256 of its file.
    fn digest(&self) -> &str;
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

    fn start(&self, config: &str, saved: Option<&Saved>) -> Result<Box<dyn Hosted>, String> {
        let policy = Compiled::start(self, config, saved).map_err(|error| error.to_string())?;
        Ok(Box::new(policy))
    }
}

/// Something that makes policies out of files. Called off both threads.
pub trait Loader: Send + Sync + 'static {
    /// Compile and check one.
    ///
    /// # Errors
    /// Everything an operator needs to know, as text.
    fn compile(&self, file: &Path) -> Result<Arc<dyn Program>, String>;

    /// Load one.
    ///
    /// # Errors
    /// Everything an operator needs to know, as text.
    fn load(&self, file: &Path, config: &str) -> Result<Loaded, String>;
}

/// The real one.
pub struct WasmLoader(PolicyHost);

impl WasmLoader {
    /// Start the WebAssembly engine.
    ///
    /// # Errors
    /// If the limits make no sense or the engine does not start.
    pub fn new(limits: Limits) -> Result<Self, String> {
        PolicyHost::new(limits).map(WasmLoader).map_err(|error| error.to_string())
    }
}

impl Loader for WasmLoader {
    fn compile(&self, file: &Path) -> Result<Arc<dyn Program>, String> {
        let compiled = self.0.compile_file(file).map_err(|error| error.to_string())?;
        Ok(Arc::new(compiled))
    }

    fn load(&self, file: &Path, config: &str) -> Result<Loaded, String> {
        let policy = self.0.load_file(file, config).map_err(|error| error.to_string())?;
        Ok(Loaded {
            name: policy.name().to_owned(),
            digest: policy.digest().to_owned(),
            policy: Box::new(policy),
        })
    }
}
