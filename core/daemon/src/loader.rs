//! Policies as the daemon sees them: what compiles a file, and what the engine owns of it.

use crate::dispatch::handover::FaultCost;
use tally_decision_log::About;
use tally_decision_log::record::SavedState;
use tally_decision_log::recorder::Described;
use tally_engine::BuiltInRule;
use tally_engine::policy::{
    Answer, Command, Context, Decision, Event, Fault, FaultKind, Launch, Policy, Subscriptions,
    WINDOW_OPEN,
};
use tally_ipc::wait::now_ns;
use tally_wasm_host::{
    Cancel, Compiled, Compiler, ComponentFile, Limits, PolicyHost, PolicyStatus, Saved, Trust,
    WasmPolicy,
};

/// The keys and digests of those whose policies are loaded.
///
/// # Errors
/// Which setting is wrong, and how.
pub fn trust(config: &crate::config::Policy) -> Result<Trust, String> {
    Trust::open(&config.trust).map_err(|error| error.to_string())
}

/// Compiles components under the operator's limits, capabilities and keys. Used off the dispatch thread.
pub struct Loader {
    host: PolicyHost,
    /// What it makes of any file.
    always: Option<Compiled>,
}

impl Loader {
    /// Start the WebAssembly engine, and read the keys of those whose policies are loaded.
    ///
    /// # Errors
    /// If the settings make no sense or the engine does not start.
    pub fn new(config: &crate::config::Policy) -> Result<Self, String> {
        let trust = trust(config)?;
        let host = PolicyHost::new(config.limits.clone()).map_err(|error| error.to_string())?;
        Ok(Loader { host: host.granting(config.capabilities).trusting(trust), always: None })
    }

    /// One that takes every file for this component, for tests of what is around it.
    ///
    /// # Errors
    /// If it is none, or the engine does not start.
    pub fn always(component: &[u8]) -> Result<Self, String> {
        let host = PolicyHost::compiling_by(Compiler::in_process(), Limits::default())
            .map_err(|error| error.to_string())?;
        let compiled =
            host.compile_bytes("always", component).map_err(|error| error.to_string())?;
        // The first instance opens what all of them share, and whoever counts descriptors has to see it before.
        drop(compiled.start("", None).map_err(|error| error.to_string())?);
        Ok(Loader { host, always: Some(compiled) })
    }

    /// Compile and check a component. Another thread can end it by `cancel`.
    ///
    /// # Errors
    /// Everything an operator needs to know, as text.
    pub fn compile(&self, file: &ComponentFile, cancel: &Cancel) -> Result<Compiled, String> {
        if let Some(compiled) = &self.always {
            return Ok(compiled.clone());
        }
        self.host.compile(file, cancel).map_err(|error| error.to_string())
    }
}

enum Rule {
    Wasm(Box<WasmPolicy>),
    /// A rule that is part of the core.
    Native(Box<dyn Policy + Send>),
}

/// What a core that drains makes active.
struct GrantAll;

impl Policy for GrantAll {
    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::MEMBERSHIP
    }

    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Decision::Run(u32::MAX).into())
    }

    fn on_event(&mut self, _: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        if let Event::Joined(client) = event {
            let client = client.id;
            // A launch behind a full window would wait for a GPU that the core
            // no longer watches.
            context.commands.push(Command::SetWindow { client, window_ns: WINDOW_OPEN });
            context.commands.push(Command::SetUngated { client, ungated: true });
        }
        Ok(())
    }
}

/// The policy that the engine owns, with what its faults cost those who waited. Stays on the dispatch thread while it
/// is active.
pub struct Loaded {
    rule: Rule,
    cost: FaultCost,
    /// The call before failed: this one starts a new instance.
    has_failed: bool,
}

impl From<WasmPolicy> for Loaded {
    fn from(policy: WasmPolicy) -> Self {
        Loaded::of(Rule::Wasm(Box::new(policy)))
    }
}

impl Loaded {
    fn of(rule: Rule) -> Self {
        Loaded { rule, cost: FaultCost::default(), has_failed: false }
    }

    /// The built-in rule: what serves when no policy could be loaded.
    pub fn built_in(idle_ns: u64) -> Self {
        Loaded::native(Box::new(BuiltInRule { idle_ns }))
    }

    /// Grants everything: what a core that drains makes active, so that no launch stays held behind it.
    pub fn grant_all() -> Self {
        Loaded::native(Box::new(GrantAll))
    }

    /// A rule in this program.
    pub fn native(rule: Box<dyn Policy + Send>) -> Self {
        Loaded::of(Rule::Native(rule))
    }

    fn wasm(&self) -> Option<&WasmPolicy> {
        if let Rule::Wasm(policy) = &self.rule { Some(policy) } else { None }
    }

    fn wasm_mut(&mut self) -> Option<&mut WasmPolicy> {
        if let Rule::Wasm(policy) = &mut self.rule { Some(policy) } else { None }
    }

    /// Its figures; `None` for a rule of the core's own, which has none.
    pub fn figures(&self) -> Option<PolicyStatus> {
        self.wasm().map(WasmPolicy::status)
    }

    /// What it knows, for the next one; `None` if it keeps nothing. On the dispatch
    /// thread, and bounded like any call.
    pub fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        self.wasm_mut()?.snapshot()
    }

    /// What the policy knows, for a recording: a failure does not count as a fault.
    pub fn observe(&mut self) -> Option<Saved> {
        self.wasm_mut()?.observe()
    }

    /// It failed too often and is asked no more.
    pub fn is_disabled(&self) -> bool {
        self.wasm().is_some_and(WasmPolicy::is_disabled)
    }

    /// What its faults cost those who waited.
    pub fn fault_cost(&self) -> FaultCost {
        self.cost
    }

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

impl Policy for Loaded {
    #[inline]
    fn subscriptions(&self) -> Subscriptions {
        match &self.rule {
            Rule::Wasm(policy) => policy.subscriptions(),
            Rule::Native(rule) => rule.subscriptions(),
        }
    }

    fn begin_pass(&mut self) {
        if let Rule::Wasm(policy) = &mut self.rule {
            policy.begin_pass();
        }
    }

    #[inline]
    fn is_over_time(&self) -> bool {
        matches!(&self.rule, Rule::Wasm(policy) if policy.is_over_time())
    }

    fn start(&mut self, context: &mut Context) {
        match &mut self.rule {
            Rule::Wasm(policy) => policy.start(context),
            Rule::Native(rule) => rule.start(context),
        }
    }

    fn is_disabled(&self) -> bool {
        Loaded::is_disabled(self)
    }

    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        if let Rule::Wasm(policy) = &mut self.rule {
            policy.count_fault(now_ns, fault);
        }
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        let outcome = match &mut self.rule {
            Rule::Wasm(policy) => policy.decide(launch, context),
            Rule::Native(rule) => rule.decide(launch, context),
        };
        self.note(launch.now_ns, &outcome);
        outcome
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let outcome = match &mut self.rule {
            Rule::Wasm(policy) => policy.on_event(now_ns, event, context),
            Rule::Native(rule) => rule.on_event(now_ns, event, context),
        };
        self.note(now_ns, &outcome);
        outcome
    }
}

impl Described for Loaded {
    fn about(&self) -> About {
        let Some(policy) = self.wasm() else {
            return About { name: "built-in".into(), ..About::default() };
        };
        let status = policy.status();
        About {
            generation: 0,
            path: status.path.map(|path| path.display().to_string()).unwrap_or_default(),
            name: status.name,
            digest: status.digest,
            config: policy.config().to_owned(),
            reasons: policy.reasons().into_iter().collect(),
            saved: policy.started_with().cloned().map(saved_state),
        }
    }
}

/// Converts a state to the form in the decision log.
pub fn saved_state(s: Saved) -> SavedState {
    SavedState { format: s.format, version: s.version, data: s.data }
}
