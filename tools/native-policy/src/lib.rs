//! Policies of this repository, compiled natively and put behind the engine's policy
//! trait: the same source as the `.wasm`, without WebAssembly.
//!
//! For tests, for the simulator and to say what WebAssembly costs. A native policy is not
//! contained: a panic is its caller's, nothing bounds its time or its memory, and it has
//! been granted everything. `tally-core` does not use this crate.
//!
//! ```
//! use tally_engine::policy::{Context, Policy};
//!
//! let mut policy = tally_native_policy::by_name("tally-priority", "idle_gap_us = 50")?;
//! policy.start(&mut Context::default());
//! assert!(tally_native_policy::by_name("tally-priority", "idle_gap_us = -1").is_err());
//! assert!(tally_native_policy::by_name("mine", "").is_err());
//! # Ok::<(), String>(())
//! ```
//!
//! [`NativePolicy`] takes any policy written with the Rust SDK. For the length of a call
//! the functions that the SDK offers (`tally_sdk::host`) reach the engine's world and
//! commands instead of a component's imports. That both give the
//! same answers is tested (`tests/same.rs`).
#![forbid(unsafe_code)]

mod convert;
mod core;

use crate::core::NativeCore;
use std::collections::BTreeMap;
use tally_engine::policy::{
    Answer, Context, Event, Fault, FaultKind, Launch, Policy, Subscriptions,
};
use tally_sdk::native;

/// Names that [`by_name`] knows.
pub const NAMES: [&str; 4] = ["slo-herald", "tally-priority", "throughput", "tpot-first"];

/// A policy of this repository, with a configuration.
///
/// # Errors
/// A name that is not one of [`NAMES`], or what the policy says against its configuration.
pub fn by_name(name: &str, config: &str) -> Result<Box<dyn Policy + Send>, String> {
    match name {
        "slo-herald" => Ok(Box::new(NativePolicy::<slo_herald::Herald>::new(config)?)),
        "tally-priority" => Ok(Box::new(NativePolicy::<tally_priority::Priority>::new(config)?)),
        "throughput" => Ok(Box::new(NativePolicy::<throughput::Throughput>::new(config)?)),
        "tpot-first" => Ok(Box::new(NativePolicy::<tpot_first::TpotFirst>::new(config)?)),
        _ => {
            Err(format!("there is no native policy {name:?}: expected one of {}", NAMES.join(", ")))
        }
    }
}

/// A policy written with the Rust SDK, run natively.
pub struct NativePolicy<P> {
    policy: P,
    /// Away during a call; stays away if that panicked.
    core: Option<Box<NativeCore>>,
    started: bool,
}

impl<P: native::Exported> NativePolicy<P> {
    /// Call its `init`.
    ///
    /// # Errors
    /// What it says against its configuration.
    pub fn new(config: &str) -> Result<Self, String> {
        let (core, policy) = native::with(Box::default(), || P::init(config));
        Ok(NativePolicy { policy: policy?, core: Some(core), started: false })
    }

    /// The policy's counters and gauges by name.
    pub fn metrics(&self) -> BTreeMap<String, i64> {
        self.core.as_ref().map(|core| core.metrics()).unwrap_or_default()
    }

    /// Call it with the context for as long as the call lasts: two pointers change places.
    #[inline]
    fn call<R>(
        &mut self,
        context: &mut Context,
        call: impl FnOnce(&mut P) -> R,
    ) -> Result<R, Fault> {
        if !self.started {
            self.start(context);
        }
        let Some(mut core) = self.core.take() else {
            let message = "it panicked, and a native policy is not started anew".into();
            return Err(Fault { kind: FaultKind::Disabled, message });
        };
        core.swap(context);
        let policy = &mut self.policy;
        let (mut core, answer) = native::with(core, || call(policy));
        core.swap(context);
        self.core = Some(core);
        Ok(answer)
    }
}

impl<P: native::Exported> Policy for NativePolicy<P> {
    fn subscriptions(&self) -> Subscriptions {
        let of = |is: bool, one: Subscriptions| if is { one } else { Subscriptions::NONE };
        // What it reads of clients is not known.
        Subscriptions::USAGE
            .and(Subscriptions::SERVICES)
            .and(of(P::UNITS, Subscriptions::UNITS))
            .and(of(P::ACTIVITY, Subscriptions::ACTIVITY))
            .and(of(P::COMPLETIONS, Subscriptions::COMPLETIONS))
            .and(of(P::MEMBERSHIP, Subscriptions::MEMBERSHIP))
            .and(of(P::TIMER, Subscriptions::TIMER))
    }

    fn start(&mut self, context: &mut Context) {
        self.started = true;
        if let Some(core) = &mut self.core {
            core.hand_over(context);
        }
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        let asked = convert::launch(launch);
        let answer = self.call(context, |policy| policy.decide(&asked))?;
        Ok(convert::answer(&answer))
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.call(context, |policy| match event {
            Event::HighStarted => policy.high_started(now_ns),
            Event::HighEnded => policy.high_ended(now_ns),
            Event::UnitBegan { client, since_ns, deadline_ns } => {
                policy.unit_began(now_ns, *client, *since_ns, *deadline_ns);
            }
            Event::UnitsEnded { client, units, took_ns } => {
                policy.units_ended(now_ns, *client, *units, *took_ns);
            }
            Event::Completed(done) => policy.completed(now_ns, &convert::completion(done)),
            Event::Joined(info) => policy.joined(now_ns, &convert::client(info)),
            Event::Left(client) => policy.left(now_ns, *client),
            Event::Timer(token) => policy.fired(now_ns, *token),
        })
    }
}
