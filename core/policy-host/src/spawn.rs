//! One instance of a policy: starting it, calling it within a budget, and telling
//! what went wrong.

use crate::Limits;
use crate::bindings::{Policy, PolicyPre};
use crate::host_calls::{HostState, MemoryRefused};
use std::fmt::Write;
use tally_engine::policy::{Context, Fault, FaultKind};
use wasmtime::{Store, Trap, WasmBacktrace};

/// What a call may use.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Units of fuel.
    pub fuel: u64,
    /// Ticks of the epoch.
    pub ticks: u64,
    /// The time that these ticks stand for.
    pub ms: u64,
}

/// An instance that can be called.
pub struct Live {
    store: Store<HostState>,
    policy: Policy,
}

/// Why an instance could not be started, with the state it was given.
pub struct Refused {
    pub why: Refusal,
    pub state: Box<HostState>,
}

pub enum Refusal {
    /// An export has the wrong type.
    Export(wasmtime::Error),
    /// `init` said no.
    Init(String),
    /// It failed on the way.
    Fault(Fault),
}

impl Live {
    /// Start an instance and call its `init`; also returns the fuel that took.
    pub fn start(
        pre: &PolicyPre<HostState>,
        mut state: HostState,
        config: &str,
        budget: Budget,
        limits: &Limits,
    ) -> Result<(Self, u64), Refused> {
        state.memory.reset();
        let mut store = Store::new(pre.engine(), state);
        store.limiter(|state| &mut state.memory);
        store.set_hostcall_fuel(limits.host_call_bytes_max);
        match Self::begin(pre, &mut store, config, budget, limits) {
            Ok(policy) => {
                let spent = budget.fuel.saturating_sub(store.get_fuel().unwrap_or(0));
                Ok((Live { store, policy }, spent))
            }
            Err(why) => Err(Refused { why, state: Box::new(store.into_data()) }),
        }
    }

    fn begin(
        pre: &PolicyPre<HostState>,
        store: &mut Store<HostState>,
        config: &str,
        budget: Budget,
        limits: &Limits,
    ) -> Result<Policy, Refusal> {
        // Before anything of the component runs: starting it may already loop.
        arm(store, budget);
        let failed = |error, store: &Store<HostState>| {
            Refusal::Fault(fault(&error, budget, limits, &store.data().last_words))
        };
        let instance = pre.instance_pre().instantiate(&mut *store);
        let instance = instance.map_err(|error| failed(error, store))?;
        let policy = Policy::new(&mut *store, &instance).map_err(Refusal::Export)?;
        match policy.tally_policy_scheduler().call_init(&mut *store, config) {
            Ok(Ok(())) => Ok(policy),
            Ok(Err(message)) => Err(Refusal::Init(message)),
            Err(error) => Err(failed(error, store)),
        }
    }

    /// Call it with the context for as long as the call lasts.
    #[inline]
    pub fn call<R>(
        &mut self,
        budget: Budget,
        now_ns: u64,
        context: &mut Context,
        call: impl FnOnce(&Policy, &mut Store<HostState>) -> wasmtime::Result<R>,
    ) -> wasmtime::Result<R> {
        arm(&mut self.store, budget);
        let state = self.store.data_mut();
        state.log.now_ns = now_ns;
        state.last_words.clear();
        state.swap(context);
        let answer = call(&self.policy, &mut self.store);
        self.store.data_mut().swap(context);
        answer
    }

    /// The state of its store.
    pub fn state(&self) -> &HostState {
        self.store.data()
    }

    /// The state of its store.
    pub fn state_mut(&mut self) -> &mut HostState {
        self.store.data_mut()
    }

    /// What its last call left of its fuel.
    pub fn fuel_left(&self) -> Option<u64> {
        self.store.get_fuel().ok()
    }

    /// End it and keep its state for the next.
    pub fn end(self) -> Box<HostState> {
        Box::new(self.store.into_data())
    }
}

#[inline]
fn arm(store: &mut Store<HostState>, budget: Budget) {
    // Fails only without `Config::consume_fuel`, which is set.
    let _ = store.set_fuel(budget.fuel);
    store.set_epoch_deadline(budget.ticks);
}

/// wasmtime has no type for this one.
const HOST_CALL_EXHAUSTED: &str = "fuel allocated for hostcalls has been exhausted";

/// What a failed call was.
pub fn fault(error: &wasmtime::Error, budget: Budget, limits: &Limits, last_words: &str) -> Fault {
    let refused = error.chain().find_map(|cause| cause.downcast_ref::<MemoryRefused>());
    let trap = error.chain().find_map(|cause| cause.downcast_ref::<Trap>());
    let (kind, mut message) = match (refused, trap) {
        (Some(refused), _) => (FaultKind::Memory, refused.to_string()),
        (None, Some(Trap::OutOfFuel)) => (
            FaultKind::Overrun,
            format!("used more than {} units of fuel in one call", budget.fuel),
        ),
        (None, Some(Trap::Interrupt)) => {
            (FaultKind::Overrun, format!("ran for more than {} ms in one call", budget.ms))
        }
        (None, Some(trap)) => (FaultKind::Trap, trap.to_string()),
        (None, None) => {
            let cause = error.root_cause().to_string();
            if cause.contains(HOST_CALL_EXHAUSTED) {
                let most = limits.host_call_bytes_max;
                (FaultKind::Overrun, format!("passed more than {most} bytes to the core at once"))
            } else {
                (FaultKind::Trap, cause)
            }
        }
    };
    if !last_words.is_empty() {
        let _ = write!(message, "; its last words: {last_words}");
    }
    if let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() {
        let _ = write!(message, "\n{backtrace}");
    }
    Fault { kind, message }
}
