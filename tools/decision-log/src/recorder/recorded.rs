//! A policy with a recorder round it.

use super::{Recorder, frame};
use crate::record::{About, Begin, of_call};
use tally_engine::policy::{Answer, Context, Event, Fault, Launch, Policy, Subscriptions};

/// A policy that can say which one it is.
pub trait Described {
    /// Describes the policy, except for its generation.
    fn about(&self) -> About;
}

/// A policy with a recorder round it: what an engine owns.
///
/// A recording may want completions that the policy does not: then the engine is asked for them, and they go to the
/// recording only.
pub struct Recorded<P> {
    policy: P,
    generation: u64,
    recorder: Recorder,
}

impl<P: Policy + Described> Recorded<P> {
    /// Put a recorder round the policy that is this generation.
    pub fn new(policy: P, generation: u64, recorder: Recorder) -> Self {
        Recorded { policy, generation, recorder }
    }

    pub fn about(&self) -> About {
        About { generation: self.generation, ..self.policy.about() }
    }

    pub fn inner(&self) -> &P {
        &self.policy
    }

    /// The policy itself. Calls of it belong to the engine.
    pub fn inner_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    /// The policy, without the recorder.
    pub fn into_inner(self) -> P {
        self.policy
    }

    #[cold]
    #[inline(never)]
    fn recorded_start(&mut self, context: &mut Context) {
        let (about, subscribed) = (self.about(), self.policy.subscriptions());
        let inner = &mut *self.recorder.lock();
        inner.before(&mut context.world, None, subscribed);
        self.policy.start(context);
        (inner.about, inner.subscribed) = (about, self.policy.subscriptions());
        let commands = context.commands.list();
        inner.scratch.clear();
        let (about, subscribed, scratch) = (&inner.about, inner.subscribed, &mut inner.scratch);
        frame(scratch, |e| e.policy(about));
        let sm_count = context.world.sm_count;
        frame(scratch, |e| e.begin(Begin::PolicyStart, 0, subscribed, sm_count));
        frame(scratch, |e| e.start(commands));
        inner.log(3);
    }

    #[inline(never)]
    fn recorded_decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        let subscribed = self.policy.subscriptions();
        let inner = &mut *self.recorder.lock();
        inner.before(&mut context.world, None, subscribed);
        let result = self.policy.decide(launch, context);
        let commands = context.commands.list();
        inner.scratch.clear();
        frame(&mut inner.scratch, |e| e.decide(launch, of_call(&result), commands));
        inner.log(1);
        result
    }

    #[inline(never)]
    fn recorded_event(
        &mut self,
        now_ns: u64,
        event: &Event,
        context: &mut Context,
    ) -> Result<(), Fault> {
        let subscribed = self.policy.subscriptions();
        let inner = &mut *self.recorder.lock();
        let joining = match event {
            Event::Joined(info) => Some(info.id),
            _ => None,
        };
        inner.before(&mut context.world, joining, subscribed);
        let result = self.policy.on_event(now_ns, event, context);
        let commands = context.commands.list();
        inner.scratch.clear();
        frame(&mut inner.scratch, |e| e.event(now_ns, event, of_call(&result), commands));
        inner.log(1);
        result
    }
}

impl<P: Policy + Described> Policy for Recorded<P> {
    #[inline]
    fn subscriptions(&self) -> Subscriptions {
        let own = self.policy.subscriptions();
        if self.recorder.wants_completions() { own.and(Subscriptions::COMPLETIONS) } else { own }
    }

    fn begin_pass(&mut self) {
        self.policy.begin_pass();
    }

    #[inline]
    fn is_over_time(&self) -> bool {
        self.policy.is_over_time()
    }

    fn is_disabled(&self) -> bool {
        self.policy.is_disabled()
    }

    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        if self.recorder.is_on() {
            let inner = &mut *self.recorder.lock();
            inner.scratch.clear();
            frame(&mut inner.scratch, |e| e.counted_fault(now_ns, fault.kind, &fault.message));
            inner.log(1);
        }
        self.policy.count_fault(now_ns, fault);
    }

    fn start(&mut self, context: &mut Context) {
        match self.recorder.is_on() {
            true => self.recorded_start(context),
            false => self.policy.start(context),
        }
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        match self.recorder.is_on() {
            true => self.recorded_decide(launch, context),
            false => self.policy.decide(launch, context),
        }
    }

    #[inline]
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        if let Event::Completed(done) = event
            && !self.policy.subscriptions().has(Subscriptions::COMPLETIONS)
        {
            self.recorder.completion(now_ns, done);
            return Ok(());
        }
        match self.recorder.is_on() {
            true => self.recorded_event(now_ns, event, context),
            false => self.policy.on_event(now_ns, event, context),
        }
    }
}
