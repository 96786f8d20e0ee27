//! The contract's types, and how the engine calls a policy.
//!
//! The engine knows nothing of WebAssembly. A policy call gets the [`World`] (what
//! it may read) and a [`Commands`] buffer (what it wants done); the engine
//! carries the commands out after the call has returned, so a policy never runs
//! inside a half-changed state machine.

use crate::profile::Profiles;
use std::collections::BTreeMap;
pub use tally_contract::policy::*;
use tally_contract::widths;

/// What a policy may read during a call.
#[derive(Debug, Default)]
pub struct World {
    /// How clients share the GPU; does not change while a core runs.
    pub sharing: SharingMode,
    /// SMs that each partition leaves free; none where launches are not limited to some.
    pub reserve_sms: Vec<u32>,
    /// SMs of the GPU, as of the latest decision; 0 before.
    pub sm_count: u32,
    /// Kernels seen and their measured times.
    pub profiles: Profiles,
    pub clients: BTreeMap<ClientId, ClientView>,
}

impl World {
    /// Numbers of SMs that launches can be limited to, rising.
    pub fn widths(&self) -> Vec<u32> {
        widths::partitions(self.sm_count, &self.reserve_sms)
    }
}

/// Passed to every policy call. Boxed so that a host which must own it for the
/// length of a call (wasmtime's store) can swap two pointers instead of copying.
#[derive(Debug, Default)]
pub struct Context {
    pub world: Box<World>,
    /// What the policy asked for in this call; carried out after it.
    pub commands: Box<Commands>,
}

/// A scheduling policy, whatever it is written in.
pub trait Policy {
    /// What it wants to be told. Looked at before each event, and may change between two calls.
    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::NONE
    }

    /// A pass of the caller's begins ([`Engine::begin_pass`](crate::Engine::begin_pass)).
    fn begin_pass(&mut self) {}

    /// Calls in this pass took so long that all that can is to wait for the next one.
    fn is_over_time(&self) -> bool {
        false
    }

    /// Called once, when the engine makes the policy the active one: the place to hand
    /// over what it wanted done while it was being loaded.
    fn start(&mut self, context: &mut Context) {
        let _ = context;
    }

    /// The engine reports a fault that no single call shows: a stall. It counts like a failed call.
    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        let _ = (now_ns, fault);
    }

    /// It is never called again: too many of its calls failed.
    fn is_disabled(&self) -> bool {
        false
    }

    /// Decide one launch. On a fault the engine answers by its own rule.
    ///
    /// # Errors
    /// A [`Fault`] when the policy could not answer.
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault>;

    /// Take note of something that it subscribed to.
    ///
    /// # Errors
    /// A [`Fault`] when the policy could not take it.
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let _ = (now_ns, event, context);
        Ok(())
    }
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn subscriptions(&self) -> Subscriptions {
        (**self).subscriptions()
    }

    fn begin_pass(&mut self) {
        (**self).begin_pass();
    }

    fn is_over_time(&self) -> bool {
        (**self).is_over_time()
    }

    fn start(&mut self, context: &mut Context) {
        (**self).start(context);
    }

    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        (**self).count_fault(now_ns, fault);
    }

    fn is_disabled(&self) -> bool {
        (**self).is_disabled()
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        (**self).decide(launch, context)
    }

    #[inline]
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        (**self).on_event(now_ns, event, context)
    }
}
