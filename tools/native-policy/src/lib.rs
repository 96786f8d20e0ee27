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
//! let mut policy = tally_native_policy::by_name("tally-priority", "quiet_us = 50")?;
//! policy.start(&mut Context::default());
//! assert!(tally_native_policy::by_name("tally-priority", "quiet_us = -1").is_err());
//! assert!(tally_native_policy::by_name("mine", "").is_err());
//! # Ok::<(), String>(())
//! ```
//!
//! [`NativePolicy`] takes any policy written with the Rust SDK. For the length of a call
//! the functions that the SDK offers (`tally_sdk::host`) reach the engine's world and
//! commands instead of a component's imports; [`convert`] turns the one side's types into the
//! other's, as `core/wasm-host/src/bindings.rs` does for components. That both give the
//! same answers is tested (`tests/same.rs`).
#![forbid(unsafe_code)]

mod convert;
mod core;

use crate::core::NativeCore;
use std::collections::BTreeMap;
use tally_engine::policy::{Context, Decision, Event, Fault, FaultKind, Launch, Policy};
use tally_sdk::native;

/// Names that [`by_name`] knows.
pub const NAMES: [&str; 1] = ["tally-priority"];

/// A policy of this repository, with a configuration.
///
/// # Errors
/// A name that is not one of [`NAMES`], or what the policy says against its configuration.
pub fn by_name(name: &str, config: &str) -> Result<Box<dyn Policy + Send>, String> {
    match name {
        "tally-priority" => Ok(Box::new(NativePolicy::<tally_priority::Priority>::new(config)?)),
        _ => Err(format!("there is no native policy {name:?}: expected {}", NAMES.join(" or "))),
    }
}

/// A policy written with the Rust SDK, run natively.
pub struct NativePolicy<P> {
    policy: P,
    /// Away during a call; stays away if that panicked.
    core: Option<Box<NativeCore>>,
    started: bool,
}

impl<P: tally_sdk::Policy> NativePolicy<P> {
    /// Call its `init`.
    ///
    /// # Errors
    /// What it says against its configuration.
    pub fn new(config: &str) -> Result<Self, String> {
        let (core, policy) = native::with(Box::default(), || P::init(config));
        Ok(NativePolicy { policy: policy?, core: Some(core), started: false })
    }

    /// Its counters and gauges.
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

impl<P: tally_sdk::Policy> Policy for NativePolicy<P> {
    fn start(&mut self, context: &mut Context) {
        self.started = true;
        if let Some(core) = &mut self.core {
            core.hand_over(context);
        }
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        let asked = convert::launch(launch);
        let answer = self.call(context, |policy| policy.decide(&asked))?;
        Ok(match answer {
            tally_sdk::Decision::Run(lease) => Decision::Run(lease),
            tally_sdk::Decision::Hold(ns) => Decision::Hold(ns),
            tally_sdk::Decision::Slice(blocks) => Decision::Slice(blocks),
            tally_sdk::Decision::Preemptible => Decision::Preemptible,
            tally_sdk::Decision::Partition(sms) => Decision::Partition(sms),
        })
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let told = convert::event(event);
        self.call(context, |policy| policy.on_event(now_ns, &told))
    }
}
