//! The policy in charge, with an eye on what it subscribes to: whether the
//! dispatch thread must be woken for high-priority activity while it sleeps
//! depends on that, and the engine does not tell.

use crate::loader::Shared;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tally_engine::policy::{
    Command, Context, Decision, Event, Fault, Launch, Policy, subscription,
};

/// What the policy in charge subscribed to; shared with [`Seat`].
#[derive(Clone, Debug, Default)]
pub struct Subscribed(Arc<AtomicU32>);

impl Subscribed {
    /// Whether it wants to hear of high-priority activity.
    pub fn high_activity(&self) -> bool {
        self.0.load(Relaxed) & subscription::HIGH_ACTIVITY != 0
    }
}

/// Passes every call on.
pub struct Seat {
    policy: Shared,
    subscribed: Subscribed,
    buffer: Vec<Command>,
}

impl Seat {
    /// Put a policy on the seat.
    pub fn new(policy: Shared) -> (Self, Subscribed) {
        let subscribed = Subscribed::default();
        (Seat { policy, subscribed: subscribed.clone(), buffer: Vec::new() }, subscribed)
    }

    fn look(&mut self, context: &mut Context) {
        if context.commands.is_empty() {
            return;
        }
        self.buffer.extend(context.commands.drain());
        for command in self.buffer.drain(..) {
            if let Command::Subscribe(to) = command {
                self.subscribed.0.store(to, Relaxed);
            }
            context.commands.push(command);
        }
    }
}

impl Policy for Seat {
    fn start(&mut self, context: &mut Context) {
        self.policy.start(context);
        self.look(context);
    }

    fn strike(&mut self, now_ns: u64, fault: &Fault) {
        self.policy.strike(now_ns, fault);
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        let decision = self.policy.decide(launch, context);
        self.look(context);
        decision
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let outcome = self.policy.on_event(now_ns, event, context);
        self.look(context);
        outcome
    }
}

/// Lets everything go: what a core that drains puts in charge, so that no
/// launch stays held behind it.
#[derive(Clone, Copy, Debug)]
pub struct LetGo;

impl Policy for LetGo {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Decision, Fault> {
        Ok(Decision::Run(u32::MAX))
    }

    fn on_event(&mut self, _: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        if let Event::ClientJoined(client) = event {
            let client = client.id;
            // A launch behind a full window would wait for a GPU that the core
            // no longer watches.
            context.commands.push(Command::SetWindow { client, window_ns: u64::MAX });
            context.commands.push(Command::SetStandingGrant { client, granted: true });
        }
        Ok(())
    }
}
