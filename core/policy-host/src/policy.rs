//! A loaded policy as the engine calls it, and what becomes of it when it fails.
//!
//! ```text
//!           init              trap, overrun, memory
//!   load ----------> live -----------------------------> down
//!                     ^                                   |
//!                     |  next call: new instance, init,   |
//!                     +---- clients told of again --------+
//!                     |                                   |
//!                     +--- faults_max faults: off <-------+
//! ```
//! An instance that trapped is never called again: its memory may be in any
//! state. Nonsense costs the turn but not the instance.

use crate::bindings::{self, PolicyPre, types};
use crate::host_calls::HostState;
use crate::inspect;
use crate::runtime::Ticker;
use crate::spawn::{Budget, Live, Refusal, fault};
use crate::status::kind_name;
use crate::{FaultCounts, LastFault, Limits, LoadError, PolicyStatus};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tally_engine::policy::{
    Class, Command, Context, Decision, Event, Fault, FaultKind, Launch, Policy,
};

/// The longest a launch is held before it is offered again.
const HOLD_NS_MAX: u64 = 1_000_000_000;
/// Fuel that a new instance may use beyond twice what the first one did.
const RESPAWN_FUEL_SPARE: u64 = 100_000;

/// Where a policy comes from.
pub struct Source {
    pub name: String,
    pub path: Option<PathBuf>,
    /// When loading began.
    pub started: Instant,
}

/// A loaded policy. Dropping it takes some 10 us: not on the dispatch thread.
pub struct WasmPolicy {
    live: Option<Live>,
    /// The state of the store while there is no instance.
    down: Option<Box<HostState>>,
    /// What `init` asked for has reached a context.
    started: bool,
    call_budget: Budget,
    respawn_budget: Budget,
    limits: Limits,
    pre: PolicyPre<HostState>,
    config: String,
    name: Arc<str>,
    path: Option<PathBuf>,
    digest: String,
    load_ms: f64,
    decides: u64,
    events: u64,
    faults: FaultCounts,
    last_fault: Option<LastFault>,
    respawns: u64,
    /// Keeps epochs advancing.
    _ticker: Arc<Ticker>,
}

impl WasmPolicy {
    pub(crate) fn start(
        pre: PolicyPre<HostState>,
        source: Source,
        file: &str,
        bytes: &[u8],
        config: &str,
        limits: &Limits,
        ticker: Arc<Ticker>,
    ) -> Result<Self, LoadError> {
        let budget = |fuel, ms| Budget { fuel, ticks: ticker.ticks(ms), ms };
        let name: Arc<str> = source.name.into();
        let state = HostState::new(name.clone(), limits);
        let init_budget = budget(limits.init_fuel, limits.init_time_ms_max);
        let (live, spent) = Live::start(&pre, state, config, init_budget, limits).map_err(
            |refused| match refused.why {
                Refusal::Export(error) => inspect::wrong_export(file, &error),
                Refusal::Init(message) => LoadError::InitRefused { file: file.into(), message },
                Refusal::Fault(fault) => LoadError::InitFailed { file: file.into(), fault },
            },
        )?;
        // A new instance is started on the dispatch thread. It runs the same `init`
        // with the same configuration, so it needs what the first one did.
        let respawn_fuel = (2 * spent + RESPAWN_FUEL_SPARE).min(limits.init_fuel);
        Ok(WasmPolicy {
            live: Some(live),
            down: None,
            started: false,
            call_budget: budget(limits.decide_fuel, limits.call_time_ms_max),
            respawn_budget: budget(respawn_fuel, limits.call_time_ms_max),
            limits: limits.clone(),
            pre,
            config: config.into(),
            name,
            path: source.path,
            digest: Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect(),
            load_ms: source.started.elapsed().as_secs_f64() * 1e3,
            decides: 0,
            events: 0,
            faults: FaultCounts::default(),
            last_fault: None,
            respawns: 0,
            _ticker: ticker,
        })
    }

    /// The name of its file, without the ending.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// SHA-256 of its file, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The text that it was configured with.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// Its figures.
    pub fn status(&self) -> PolicyStatus {
        let state = self.live.as_ref().map(Live::state).or(self.down.as_deref());
        PolicyStatus {
            name: self.name.to_string(),
            path: self.path.clone(),
            digest: self.digest.clone(),
            load_ms: self.load_ms,
            decides: self.decides,
            events: self.events,
            faults: self.faults,
            last_fault: self.last_fault.clone(),
            respawns: self.respawns,
            disabled: self.disabled(),
            counters: state.map(|state| state.metrics.counters()).unwrap_or_default(),
            gauges: state.map(|state| state.metrics.gauges()).unwrap_or_default(),
            log_dropped: state.map_or(0, |state| state.log.dropped),
        }
    }

    fn disabled(&self) -> bool {
        self.faults.total() >= u64::from(self.limits.faults_max)
    }

    /// Call the instance, making one first if the last one failed.
    #[inline]
    fn call<R>(
        &mut self,
        now_ns: u64,
        context: &mut Context,
        joining: Option<u32>,
        call: impl FnOnce(&bindings::Policy, &mut wasmtime::Store<HostState>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        if self.live.is_none() || !self.started {
            self.prepare(now_ns, context, joining)?;
        }
        let Some(live) = &mut self.live else { return Err(switched_off()) };
        match live.call(self.call_budget, now_ns, context, call) {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.trapped(&error, now_ns)),
        }
    }

    #[cold]
    fn prepare(
        &mut self,
        now_ns: u64,
        context: &mut Context,
        joining: Option<u32>,
    ) -> Result<(), Fault> {
        Policy::start(self, context);
        if self.live.is_some() {
            return Ok(());
        }
        if self.disabled() {
            return Err(switched_off());
        }
        self.respawn(now_ns, context)?;
        // `joining` is about to be told of anyway.
        let clients = context.world.clients.values().filter(|client| Some(client.id) != joining);
        let clients: Vec<_> = clients.map(bindings::client_info).collect();
        for client in clients {
            let event = types::Event::ClientJoined(client);
            let Some(live) = &mut self.live else { break };
            let told = live.call(self.call_budget, now_ns, context, |policy, store| {
                policy.tally_policy_scheduler().call_on_event(store, now_ns, &event)
            });
            told.map_err(|error| self.trapped(&error, now_ns))?;
        }
        Ok(())
    }

    /// Make a new instance, for which the core is as it is for a policy just
    /// loaded.
    fn respawn(&mut self, now_ns: u64, context: &mut Context) -> Result<(), Fault> {
        let Some(mut state) = self.down.take() else { return Err(switched_off()) };
        context.commands.push(Command::Subscribe(0));
        for client in context.world.clients.values() {
            let granted = client.class == Class::High;
            context.commands.push(Command::SetStandingGrant { client: client.id, granted });
        }
        state.log.now_ns = now_ns;
        state.swap(context);
        let started =
            Live::start(&self.pre, *state, &self.config, self.respawn_budget, &self.limits);
        match started {
            Ok((mut live, _)) => {
                live.state_mut().swap(context);
                self.live = Some(live);
                self.respawns += 1;
                Ok(())
            }
            Err(mut refused) => {
                refused.state.swap(context);
                self.down = Some(refused.state);
                let fault = match refused.why {
                    Refusal::Fault(fault) => fault,
                    Refusal::Init(message) => Fault {
                        kind: FaultKind::Nonsense,
                        message: format!("`init` refuses what it accepted before: {message}"),
                    },
                    Refusal::Export(error) => {
                        Fault { kind: FaultKind::Trap, message: format!("{error:#}") }
                    }
                };
                Err(self.note(fault, now_ns))
            }
        }
    }

    #[cold]
    fn trapped(&mut self, error: &wasmtime::Error, now_ns: u64) -> Fault {
        let last_words = self.live.as_ref().map_or("", |live| &live.state().last_words);
        let fault = fault(error, self.call_budget, &self.limits, last_words);
        self.down = self.live.take().map(Live::end);
        self.note(fault, now_ns)
    }

    #[cold]
    fn nonsense(&mut self, message: &str, now_ns: u64) -> Fault {
        let fault = Fault { kind: FaultKind::Nonsense, message: message.into() };
        let fault = self.note(fault, now_ns);
        if self.disabled() {
            self.down = self.live.take().map(Live::end);
        }
        fault
    }

    /// Count a fault and say so.
    fn note(&mut self, fault: Fault, now_ns: u64) -> Fault {
        self.faults.count(fault.kind);
        let kind = kind_name(fault.kind);
        self.last_fault = Some(LastFault { kind, message: fault.message.clone(), at_ns: now_ns });
        tracing::warn!(target: "policy", policy = &*self.name, kind, "{}", fault.message);
        if self.disabled() {
            tracing::error!(
                target: "policy", policy = &*self.name,
                "switched off after {} faults; the built-in rule serves until another is loaded",
                self.faults.total()
            );
        }
        fault
    }

    /// A well-formed answer may still make no sense.
    #[inline]
    fn sane(&mut self, decision: types::Decision, launch: &Launch) -> Result<Decision, Fault> {
        match decision {
            types::Decision::Run(lease) => Ok(Decision::Run(lease)),
            types::Decision::Hold(ns) => Ok(Decision::Hold(ns.min(HOLD_NS_MAX))),
            types::Decision::Preemptible => Ok(Decision::Preemptible),
            types::Decision::Slice(0) => {
                Err(self.nonsense("answered slice(0): a slice has at least 1 block", launch.now_ns))
            }
            types::Decision::Slice(blocks) => Ok(Decision::Slice(blocks)),
            types::Decision::Partition(0) => Err(self
                .nonsense("answered partition(0): a partition has at least 1 SM", launch.now_ns)),
            types::Decision::Partition(sms) => Ok(Decision::Partition(sms)),
        }
    }
}

impl Policy for WasmPolicy {
    fn start(&mut self, context: &mut Context) {
        if !self.started {
            self.started = true;
            if let Some(live) = &mut self.live {
                live.state_mut().hand_over(context);
            }
        }
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        let asked = bindings::launch(launch);
        let answer = self.call(launch.now_ns, context, None, |policy, store| {
            policy.tally_policy_scheduler().call_decide(store, asked)
        })?;
        let decision = self.sane(answer, launch)?;
        self.decides += 1;
        Ok(decision)
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let joining = match event {
            Event::ClientJoined(client) => Some(client.id),
            _ => None,
        };
        let told = bindings::event(event);
        self.call(now_ns, context, joining, |policy, store| {
            policy.tally_policy_scheduler().call_on_event(store, now_ns, &told)
        })?;
        self.events += 1;
        Ok(())
    }
}

/// No call was made. Without a message, so that a policy that is off costs
/// nothing; [`PolicyStatus::last_fault`] says why it is.
#[cold]
fn switched_off() -> Fault {
    Fault { kind: FaultKind::Disabled, message: String::new() }
}
