//! A scripted policy, and launches for it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::profile::KernelKey;
use tally_engine::{Action, BuiltInRule, Engine, EngineConfig, Measured, Submission};

/// Answers from a list, then `Run(0)`; remembers what it was told.
#[derive(Default)]
pub struct Script {
    pub answers: VecDeque<Result<Decision, Fault>>,
    pub reason: u8,
    /// What it is not told.
    pub deaf_to: Subscriptions,
    pub on_decide: VecDeque<Command>,
    pub on_event: VecDeque<Command>,
    /// Calls in a pass after which it is over its time; 0: never.
    pub calls_max: usize,
    pub calls: usize,
    pub seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
pub struct Seen {
    pub launches: Vec<Launch>,
    pub events: Vec<Event>,
}

impl Policy for Script {
    fn begin_pass(&mut self) {
        self.calls = 0;
    }

    fn is_over_time(&self) -> bool {
        self.calls_max > 0 && self.calls >= self.calls_max
    }

    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::ALL.without(self.deaf_to)
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        self.calls += 1;
        self.seen.lock().unwrap().launches.push(*launch);
        for c in self.on_decide.drain(..) {
            context.commands.push(c);
        }
        let decision = self.answers.pop_front().unwrap_or(Ok(Decision::Run(0)))?;
        Ok(Answer { decision, reason: self.reason })
    }

    fn on_event(&mut self, _: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.calls += 1;
        self.seen.lock().unwrap().events.push(event.clone());
        for c in self.on_event.drain(..) {
            context.commands.push(c);
        }
        Ok(())
    }
}

pub fn info(id: ClientId, class: Class) -> ClientInfo {
    ClientInfo { id, class, name: format!("c{id}"), labels: vec![] }
}

pub fn key(name: &str) -> KernelKey {
    KernelKey { name: name.into(), image: 0, grid: [4, 1, 1], block: [32, 1, 1] }
}

pub fn submission(ticket: u64, kernel: Option<u32>) -> Submission {
    Submission {
        ticket,
        kernel,
        state: 0,
        offered: 0,
        grid_blocks: 4,
        block_threads: 32,
        shared_bytes: 0,
        stream: 0,
        completion: ticket as u32 + 1,
        started: false,
        limited_sms: 0,
    }
}

/// What a client says of launch `completion`.
pub fn took(completion: u32, ns: u64) -> Option<Measured> {
    Some(Measured { completion, ns })
}

/// Tickets of `client` that `out` grants: the highest grant.
pub fn granted(out: &[Action], client: ClientId) -> Option<u64> {
    out.iter()
        .filter_map(|a| match a {
            Action::Grant { client: c, until } if *c == client => Some(*until),
            _ => None,
        })
        .next_back()
}

pub const HIGH: ClientId = 1;
pub const LOW: ClientId = 2;
pub const IDLE_GAP: u64 = 100_000;

pub fn built_in() -> Engine {
    let mut e = Engine::new(EngineConfig::default(), Box::new(BuiltInRule { idle_ns: IDLE_GAP }));
    let mut out = Vec::new();
    e.client_joined(0, info(HIGH, Class::High), 0, &mut out);
    assert_eq!(granted(&out, HIGH), Some(u64::MAX), "high priority is ungated");
    e.client_joined(0, info(LOW, Class::BestEffort), 0, &mut out);
    assert_eq!(granted(&out, LOW), Some(0), "best-effort starts with nothing granted");
    e
}
