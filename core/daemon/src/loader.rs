//! Policies as the daemon sees them: something that loads a file, and what it
//! loads. The only module that knows they are WebAssembly.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tally_engine::BuiltIn;
use tally_engine::policy::{Context, Decision, Event, Fault, Launch, Policy};
use tally_policy_host::{Limits, PolicyHost, PolicyStatus, WasmPolicy};

/// A policy that can also tell people about itself.
pub trait Hosted: Policy + Send {
    /// Its figures; `None` for the built-in rule, which has none.
    fn figures(&self) -> Option<PolicyStatus>;

    /// The text that it was configured with.
    fn config(&self) -> &str {
        ""
    }
}

impl Hosted for WasmPolicy {
    fn figures(&self) -> Option<PolicyStatus> {
        Some(self.status())
    }

    fn config(&self) -> &str {
        WasmPolicy::config(self)
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

    /// See [`Hosted::config`].
    pub fn config(&self) -> String {
        self.lock().config().to_owned()
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

/// Something that makes policies out of files. Called off both threads.
pub trait Loader: Send + Sync + 'static {
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
    fn load(&self, file: &Path, config: &str) -> Result<Loaded, String> {
        let policy = self.0.load_file(file, config).map_err(|error| error.to_string())?;
        Ok(Loaded {
            name: policy.name().to_owned(),
            digest: policy.digest().to_owned(),
            policy: Box::new(policy),
        })
    }
}
