//! Makes the calls of a log on another instance of a policy, and compares.
//!
//! For a replay the policy is the one of the log; for a diff or a shadow another. A new
//! instance is made wherever the log's begins, and is told of the clients connected
//! unless the log does that itself.

use crate::compare::{self, Comparison};
use crate::record::{About, Answer, Begin, Outcome, Record, timed};
use crate::world::{self, Contradiction};
use std::fmt::Write;
use tally_engine::policy::{
    ClientId, ClientInfo, Context, Event, Fault, FaultKind, Policy, Subscriptions,
};

/// Makes a policy for the one that the log says is active.
pub type Make<'a> = dyn FnMut(&About) -> Result<Box<dyn Policy + Send>, String> + Send + 'a;

/// Why the play is over.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// No instance can be had.
    #[error("{0}")]
    NoPolicy(String),
    /// The log is not one.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fed {
    /// The record is no call; what it says was noted.
    Noted,
    /// A call that was not made: nothing is known of the policy's state.
    NotCompared,
    /// A decision that was not asked for (see [`Player::feed`]).
    Skipped,
    /// A call, and whether the answers were equal.
    Called { equal: bool },
}

/// How the log's parts began, and what of it was not compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Parts {
    /// With a policy's start: all it knows is in the log.
    pub from_start: u64,
    /// While a policy ran.
    pub mid_run: u64,
    /// Likewise, with what it knew then in the log.
    pub from_saved: u64,
    /// Parts that began after a gap in the log.
    pub after_gap: u64,
    /// Records lost in gaps.
    pub lost: u64,
    /// Calls that were not made.
    pub not_compared: u64,
    /// Decisions that a shadow left out for want of CPU time.
    pub skipped: u64,
    /// Faults of wall-clock time, after which no replay is the same.
    pub timed_faults: u64,
    /// Replayed decisions and events in parts that began with a policy's start.
    pub exact_calls: u64,
    /// Calls answered otherwise although the log has all that its policy knew: in parts that begin
    /// with its start, or with what it knew.
    pub differ_known: u64,
    /// Calls answered otherwise in other parts, where what the log's policy remembered is not known.
    pub differ_unknown: u64,
}

pub struct Player<'a> {
    make: Box<Make<'a>>,
    policy: Option<Box<dyn Policy + Send>>,
    context: Context,
    about: About,
    /// A new instance is due at the next call.
    due: bool,
    /// Clients that went since, which the log's policy knew at the beginning.
    gone: Vec<ClientInfo>,
    exact: bool,
    /// The instance began with what the log's knew in mid-run.
    saved: bool,
    is_logs_own: bool,
    record: u64,
    comparison: Comparison,
    parts: Parts,
    /// What the log's policy is told.
    heard: Subscriptions,
    /// What this one would be told by a core.
    wanted: Subscriptions,
}

impl<'a> Player<'a> {
    /// A player that makes instances of policies with `make`.
    pub fn new(
        make: impl FnMut(&About) -> Result<Box<dyn Policy + Send>, String> + Send + 'a,
    ) -> Self {
        Player {
            make: Box::new(make),
            policy: None,
            context: Context::default(),
            about: About::default(),
            due: false,
            gone: Vec::new(),
            exact: false,
            saved: false,
            is_logs_own: true,
            record: 0,
            comparison: Comparison::default(),
            parts: Parts::default(),
            heard: Subscriptions::NONE,
            wanted: Subscriptions::NONE,
        }
    }

    /// For a policy that is not the log's: that the clock stopped the log's, or the
    /// engine found fault with it, says nothing about this one.
    pub fn of_another(mut self) -> Self {
        self.is_logs_own = false;
        self
    }

    /// The counts so far.
    pub fn comparison(&self) -> &Comparison {
        &self.comparison
    }

    /// What was and was not compared.
    pub fn parts(&self) -> Parts {
        self.parts
    }

    /// The policy that the log says is active.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// What a policy could read at this point of the log.
    pub fn world(&self) -> &tally_engine::policy::World {
        &self.context.world
    }

    /// Interfaces that this policy exports, or imports, and about which the log says nothing, because its policy
    /// does not.
    pub fn events_missing(&self) -> Vec<&'static str> {
        self.wanted.without(self.heard).names()
    }

    /// The next record. A decision is only asked for if `may_decide`.
    ///
    /// # Errors
    /// If the play cannot go on.
    pub fn feed(&mut self, record: &Record, may_decide: bool) -> Result<Fed, PlayError> {
        self.record += 1;
        if let (Record::Gone(id), true) = (record, self.due) {
            self.gone.extend(self.context.world.clients.get(id).map(|view| view.info.clone()));
        }
        world::apply(&mut self.context, record)?;
        match record {
            Record::Policy(about) => self.about = about.clone(),
            Record::Base(_) => self.policy = None,
            Record::Begin { how, lost, subscribed, .. } => {
                self.policy = None;
                self.heard = *subscribed;
                self.parts.lost += lost;
                self.exact = *how == Begin::PolicyStart;
                self.saved = *how == Begin::Saved;
                self.due = !self.exact;
                self.gone.clear();
                match how {
                    Begin::PolicyStart => self.parts.from_start += 1,
                    Begin::MidRun => self.parts.mid_run += 1,
                    Begin::AfterGap => self.parts.after_gap += 1,
                    Begin::Saved => self.parts.from_saved += 1,
                }
            }
            Record::Start(commands) => {
                self.instance()?;
                let recorded = Answer { outcome: Outcome::Ok(()), commands: commands.clone() };
                let other = self.answer(Ok(()));
                let name = self.about.name.clone();
                let call = || format!("start of {name}");
                let equal = self.comparison.told(self.record, 0, call, &recorded, &other);
                return Ok(self.called(equal));
            }
            Record::Decide { launch, answer } => {
                if !may_decide {
                    self.parts.skipped += 1;
                    return Ok(Fed::Skipped);
                }
                self.arrive(launch.now_ns, None)?;
                self.note_timed(&answer.outcome);
                let Some(policy) = &mut self.policy else { return Ok(self.not_compared()) };
                let result = policy.decide(launch, &mut self.context);
                let other = self.answer(result);
                self.parts.exact_calls += u64::from(self.exact);
                let known = self.context.world.profiles.get(launch.kernel);
                let name = known.map_or("?", |p| &p.key.name);
                let comparison = &mut self.comparison;
                let equal = comparison.decided(self.record, launch, name, answer, &other);
                let called = self.called(equal);
                self.note_fault(&answer.outcome);
                return Ok(called);
            }
            Record::Event { now_ns, event, answer } => {
                let joining = match event {
                    Event::Joined(info) => Some(info.id),
                    _ => None,
                };
                self.arrive(*now_ns, joining)?;
                self.note_timed(&answer.outcome);
                let Some(policy) = &mut self.policy else { return Ok(self.not_compared()) };
                // As a core does it.
                let result = if policy.subscriptions().has(event.kind()) {
                    policy.on_event(*now_ns, event, &mut self.context)
                } else {
                    Ok(())
                };
                let other = self.answer(result);
                self.parts.exact_calls += u64::from(self.exact);
                let call = || compare::event(event);
                let equal = self.comparison.told(self.record, *now_ns, call, answer, &other);
                let called = self.called(equal);
                self.note_fault(&answer.outcome);
                return Ok(called);
            }
            Record::Fault { now_ns, kind, message } => {
                // What the log's policy did wrong is not another's fault.
                if let Some(policy) = self.policy.as_mut().filter(|_| self.is_logs_own) {
                    let fault = Fault { kind: *kind, message: message.clone() };
                    policy.count_fault(*now_ns, &fault);
                }
            }
            Record::Kernel { .. }
            | Record::Profile { .. }
            | Record::Client(_)
            | Record::Usage { .. }
            | Record::Service { .. }
            | Record::Gone(_)
            | Record::Completion { .. }
            | Record::End { .. } => {}
        }
        Ok(Fed::Noted)
    }

    fn called(&mut self, equal: bool) -> Fed {
        let is_known = self.exact || self.saved;
        self.parts.differ_known += u64::from(!equal && is_known);
        self.parts.differ_unknown += u64::from(!equal && !is_known);
        Fed::Called { equal }
    }

    fn not_compared(&mut self) -> Fed {
        self.parts.not_compared += 1;
        Fed::NotCompared
    }

    /// The clock stopped the log's policy, and it was started anew: from here on its
    /// state is not this one's.
    fn note_timed<T>(&mut self, recorded: &Outcome<T>) {
        if matches!(recorded, Outcome::Fault { timed: true, .. }) {
            self.parts.timed_faults += 1;
            if self.is_logs_own {
                self.policy = None;
            }
        }
    }

    /// The log's policy was started anew with what it had at its start. If this one began
    /// later, with what that knew then, it has something else to go back to.
    fn note_fault<T>(&mut self, recorded: &Outcome<T>) {
        if self.saved && self.is_logs_own && matches!(recorded, Outcome::Fault { .. }) {
            self.policy = None;
        }
    }

    fn instance(&mut self) -> Result<(), PlayError> {
        self.due = false;
        self.context.commands.drain();
        let mut policy = (self.make)(&self.about).map_err(PlayError::NoPolicy)?;
        policy.start(&mut self.context);
        self.wanted = policy.subscriptions();
        self.policy = Some(policy);
        Ok(())
    }

    /// Before a call: the instance that takes it.
    fn arrive(&mut self, now_ns: u64, joining: Option<ClientId>) -> Result<(), PlayError> {
        if !self.due {
            return Ok(());
        }
        self.instance()?;
        let clients = self.context.world.clients.values().map(|view| &view.info);
        let others = clients.filter(|c| Some(c.id) != joining).cloned();
        let mut others: Vec<_> = self.gone.drain(..).chain(others).collect();
        others.sort_by_key(|c| c.id);
        for info in others {
            if let Some(policy) = &mut self.policy
                && policy.subscriptions().has(Subscriptions::MEMBERSHIP)
            {
                // What it wants done, and a fault, are its own affair here.
                let _ = policy.on_event(now_ns, &Event::Joined(info), &mut self.context);
            }
        }
        self.context.commands.drain();
        Ok(())
    }

    fn answer<T>(&mut self, result: Result<T, Fault>) -> Answer<T> {
        let outcome = match result {
            Ok(answer) => Outcome::Ok(answer),
            Err(fault) => {
                let timed = timed(&fault);
                Outcome::Fault { kind: fault.kind, timed, message: fault.message }
            }
        };
        Answer { outcome, commands: self.context.commands.drain().collect() }
    }

    /// The other policy was disabled after too many faults: its last one.
    pub fn disabled(&self) -> Option<String> {
        self.comparison.faults.get(compare::fault_name(FaultKind::Disabled))?;
        let mut why = String::from("disabled after too many faults");
        if let Some(last) = &self.comparison.last_fault {
            let _ = write!(why, "; the last: {last}");
        }
        Some(why)
    }
}
