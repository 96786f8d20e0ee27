//! One instance of a policy: starting it, calling it within a budget, and telling
//! what went wrong.

use crate::bindings::{Provided, activity, completions, membership, timer, units};
use crate::compiled::Checked;
use crate::cpu::TookTooLong;
use crate::imports::{HostState, MemoryRefused, PassedTooMuch};
use crate::shown;
use crate::state::{Functions, Saved};
use std::fmt::Write;
use tally_contract::limits::{REFUSAL_BYTES_MAX, SAVED_BYTES_MAX, SAVED_FORMAT_BYTES_MAX};
use tally_engine::policy::{Context, Fault, FaultKind};
use tally_ipc::text::printable_lines;
use wasmtime::{Store, Trap, UpdateDeadline, WasmBacktrace};

/// Longer texts about a fault are shortened.
const FAULT_BYTES_MAX: usize = 4096;

/// What a call may use.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub fuel: u64,
    /// CPU time of the thread, ms.
    pub cpu_ms: u64,
    /// Data that may pass from the policy to the core at once.
    pub data_bytes: usize,
}

/// An instance that can be called.
pub struct Live {
    store: Store<HostState>,
    policy: Exports,
    state: Option<Functions>,
}

/// What an instance exports of the contract, as far as it is called with a context.
pub struct Exports {
    pub scheduler: Provided,
    pub activity: Option<activity::Guest>,
    pub completions: Option<completions::Guest>,
    pub membership: Option<membership::Guest>,
    pub timer: Option<timer::Guest>,
    pub units: Option<units::Guest>,
}

/// Why an instance could not be started, with the state it was given.
pub struct Refused {
    pub why: Refusal,
    pub state: Box<HostState>,
}

pub enum Refusal {
    /// An export has the wrong type.
    Export(wasmtime::Error),
    /// `init` returned this error.
    Init(String),
    /// A call failed while the instance was started.
    Fault(Fault),
}

impl Live {
    /// Start an instance and call its `init`; also returns the fuel that took.
    pub fn start(
        checked: &Checked,
        mut state: HostState,
        config: &str,
        budget: Budget,
    ) -> Result<(Self, u64), Refused> {
        state.memory.reset();
        let mut store = Store::new(checked.exports.pre.engine(), state);
        store.limiter(|state| &mut state.memory);
        store.set_hostcall_fuel(budget.data_bytes);
        store.epoch_deadline_callback(|store| {
            store.data().cpu.look()?;
            Ok(UpdateDeadline::Continue(1))
        });
        let begun = Self::begin(checked, &mut store, config, budget);
        store.data().end();
        match begun {
            Ok((policy, state)) => {
                let spent = budget.fuel.saturating_sub(store.get_fuel().unwrap_or(0));
                Ok((Live { store, policy, state }, spent))
            }
            Err(why) => Err(Refused { why, state: Box::new(store.into_data()) }),
        }
    }

    fn begin(
        checked: &Checked,
        store: &mut Store<HostState>,
        config: &str,
        budget: Budget,
    ) -> Result<(Exports, Option<Functions>), Refusal> {
        // Before anything of the component runs: starting it may already loop.
        arm(store, budget);
        let failed = |error, store: &Store<HostState>| {
            Refusal::Fault(fault(&error, budget, &store.data().last_words))
        };
        let instance = checked.exports.pre.instance_pre().instantiate(&mut *store);
        let instance = instance.map_err(|error| failed(error, store))?;
        let policy = checked.exports.of(&instance, store).map_err(Refusal::Export)?;
        let state = checked.state.map(|exports| Functions::of(exports, &instance, store));
        let state = state.transpose().map_err(Refusal::Export)?;
        match policy.scheduler.tally_policy_scheduler().call_init(&mut *store, config) {
            Ok(Ok(())) => Ok((policy, state)),
            Ok(Err(message)) => Err(Refusal::Init(printable_lines(&message, REFUSAL_BYTES_MAX))),
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
        call: impl FnOnce(&Exports, &mut Store<HostState>) -> wasmtime::Result<R>,
    ) -> wasmtime::Result<R> {
        arm(&mut self.store, budget);
        let state = self.store.data_mut();
        state.log.now_ns = now_ns;
        state.last_words.clear();
        state.swap(context);
        let answer = call(&self.policy, &mut self.store);
        self.store.data_mut().swap(context);
        let state = self.store.data();
        state.end();
        // The last function of the core that it called may have taken long.
        if state.cpu.is_long() && answer.is_ok() {
            state.cpu.look()?;
        }
        answer
    }

    /// Have it write down what it knows; `None` if it cannot. What it asks the core
    /// for meanwhile is nothing that a policy on its way out may want.
    pub fn snapshot(&mut self, budget: Budget) -> Option<Result<Saved, Fault>> {
        let snapshot = &self.state.as_ref()?.snapshot;
        let budget = Budget { data_bytes: SAVED_BYTES_MAX + SAVED_FORMAT_BYTES_MAX, ..budget };
        arm(&mut self.store, budget);
        let usual_bytes = self.store.hostcall_fuel();
        self.store.set_hostcall_fuel(budget.data_bytes);
        self.store.data_mut().last_words.clear();
        let answer = snapshot.call(&mut self.store, ());
        self.store.data().end();
        self.store.set_hostcall_fuel(usual_bytes);
        self.store.data_mut().forget_commands();
        let too_long = |what, bytes, bytes_max| Fault {
            kind: FaultKind::Overrun,
            message: format!("`snapshot` gave {what} of {bytes} bytes, and may give {bytes_max}"),
        };
        Some(match answer {
            Ok((saved,)) if saved.data.len() > SAVED_BYTES_MAX => {
                Err(too_long("data", saved.data.len(), SAVED_BYTES_MAX))
            }
            Ok((saved,)) if saved.format.len() > SAVED_FORMAT_BYTES_MAX => {
                Err(too_long("a format", saved.format.len(), SAVED_FORMAT_BYTES_MAX))
            }
            Ok((saved,)) => Ok(saved),
            Err(error) => Err(fault(&error, budget, &self.store.data().last_words)),
        })
    }

    /// Offer it what another one knew; `None` if it does not take such. The inner
    /// error is its own word on why it does not; after a fault it must not be called.
    pub fn restore(
        &mut self,
        saved: &Saved,
        budget: Budget,
    ) -> Option<Result<Result<(), String>, Fault>> {
        let restore = &self.state.as_ref()?.restore;
        arm(&mut self.store, budget);
        self.store.data_mut().last_words.clear();
        let answer = restore.call(&mut self.store, (saved.clone(),));
        self.store.data().end();
        Some(match answer {
            Ok((answer,)) => Ok(answer.map_err(|why| printable_lines(&why, REFUSAL_BYTES_MAX))),
            Err(error) => Err(fault(&error, budget, &self.store.data().last_words)),
        })
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
    store.set_epoch_deadline(1);
    store.data_mut().begin(budget.cpu_ms);
}

/// wasmtime has no type for this one.
const HOST_CALL_EXHAUSTED: &str = "fuel allocated for hostcalls has been exhausted";

/// What a failed call was.
pub fn fault(error: &wasmtime::Error, budget: Budget, last_words: &str) -> Fault {
    let refused = error.chain().find_map(|cause| cause.downcast_ref::<MemoryRefused>());
    let trap = error.chain().find_map(|cause| cause.downcast_ref::<Trap>());
    let long = error.chain().find_map(|cause| cause.downcast_ref::<TookTooLong>());
    let passed = error.chain().find_map(|cause| cause.downcast_ref::<PassedTooMuch>());
    let (kind, mut message) = match (refused, trap) {
        _ if long.is_some() => {
            (FaultKind::Overrun, long.map(ToString::to_string).unwrap_or_default())
        }
        _ if passed.is_some() => {
            (FaultKind::Overrun, passed.map(ToString::to_string).unwrap_or_default())
        }
        (Some(refused), _) => (FaultKind::Memory, refused.to_string()),
        (None, Some(Trap::OutOfFuel)) => (
            FaultKind::Overrun,
            format!("used more than {} units of fuel in one call", budget.fuel),
        ),
        (None, Some(trap)) => (FaultKind::Trap, trap.to_string()),
        (None, None) => {
            let cause = error.root_cause().to_string();
            if cause.contains(HOST_CALL_EXHAUSTED) {
                let most = budget.data_bytes;
                (FaultKind::Overrun, format!("passed more than {most} bytes to the core at once"))
            } else {
                (FaultKind::Trap, shown::why(&cause))
            }
        }
    };
    if !last_words.is_empty() {
        let _ = write!(message, "; its last words: {last_words}");
    }
    let frames = error.downcast_ref::<WasmBacktrace>().map_or(&[][..], WasmBacktrace::frames);
    for (n, frame) in frames.iter().enumerate() {
        let name = shown::function(frame.func_name().unwrap_or("<unknown>"));
        let _ = write!(message, "\n{n:5}: {:#x} - {name}", frame.module_offset().unwrap_or(0));
    }
    message.truncate(message.floor_char_boundary(FAULT_BYTES_MAX));
    Fault { kind, message }
}
