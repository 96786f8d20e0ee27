//! The active policy, with an eye on what it subscribes to, and the tape of the
//! decision log round it.
//!
//! Whether the dispatch thread must be woken for high-priority activity while it sleeps
//! depends on the subscription, and the engine does not tell. A recording may want
//! completions that the policy does not: then the engine is told that the policy does,
//! and what comes of it stays here.

use crate::loader::Shared;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tally_decision_log::record::SavedState;
use tally_decision_log::tape::Described;
use tally_decision_log::{About, Recorder, Tape};
use tally_engine::policy::{
    Command, Context, Decision, Event, Fault, Launch, Policy, subscription,
};
use tally_wasm_host::Saved;

/// What the active policy subscribed to; shared with [`Adapter`].
#[derive(Clone, Debug, Default)]
pub struct Subscribed(Arc<AtomicU32>);

impl Subscribed {
    /// Whether it wants to hear of high-priority activity.
    pub fn high_activity(&self) -> bool {
        self.bits() & subscription::HIGH_ACTIVITY != 0
    }

    /// All of it, as bits.
    pub fn bits(&self) -> u32 {
        self.0.load(Relaxed)
    }
}

impl Described for Shared {
    fn about(&self) -> About {
        let figures = self.figures();
        let path = figures.as_ref().and_then(|f| f.path.as_deref());
        About {
            generation: 0,
            path: path.map(|p| p.display().to_string()).unwrap_or_default(),
            name: figures.as_ref().map_or("built-in".into(), |f| f.name.clone()),
            digest: figures.map(|f| f.digest).unwrap_or_default(),
            config: self.config(),
            saved: self.started_with().map(saved_state),
        }
    }
}

/// As a log has it.
pub fn saved_state(s: Saved) -> SavedState {
    SavedState { format: s.format, version: s.version, data: s.data }
}

/// Passes every call on.
pub struct Adapter {
    policy: Recorder<Shared>,
    tape: Tape,
    subscribed: Subscribed,
    /// Completions are asked of the engine for the tape's sake.
    forced: bool,
    buffer: Vec<Command>,
}

impl Adapter {
    /// Put a policy on the adapter.
    pub fn new(policy: Shared, generation: u64, tape: Tape) -> (Self, Subscribed) {
        let subscribed = Subscribed::default();
        let adapter = Adapter {
            policy: Recorder::new(policy, generation, tape.clone()),
            tape,
            subscribed: subscribed.clone(),
            forced: false,
            buffer: Vec::new(),
        };
        (adapter, subscribed)
    }

    #[inline]
    fn look(&mut self, context: &mut Context) {
        let force = self.tape.wants_completions();
        if context.commands.is_empty() && force == self.forced {
            return;
        }
        self.relay(force, context);
    }

    fn relay(&mut self, force: bool, context: &mut Context) {
        let added = if force { subscription::COMPLETIONS } else { 0 };
        self.buffer.extend(context.commands.drain());
        if force != self.forced {
            self.forced = force;
            let to = self.subscribed.bits() | added;
            context.commands.push(Command::Subscribe(to));
        }
        for command in self.buffer.drain(..) {
            context.commands.push(match command {
                Command::Subscribe(to) => {
                    self.subscribed.0.store(to, Relaxed);
                    Command::Subscribe(to | added)
                }
                other => other,
            });
        }
    }
}

impl Policy for Adapter {
    fn start(&mut self, context: &mut Context) {
        self.policy.start(context);
        self.look(context);
    }

    fn strike(&mut self, now_ns: u64, fault: &Fault) {
        self.policy.strike(now_ns, fault);
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault> {
        let decision = self.policy.decide(launch, context);
        self.look(context);
        decision
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        if let Event::KernelDone(done) = event
            && self.subscribed.bits() & subscription::COMPLETIONS == 0
        {
            self.tape.completion(now_ns, done);
            self.look(context);
            return Ok(());
        }
        let outcome = self.policy.on_event(now_ns, event, context);
        self.look(context);
        outcome
    }
}

/// Lets everything go: what a core that drains puts active, so that no
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
