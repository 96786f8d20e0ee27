//! The engine against policies that answer anything, and clients that come, launch and go at random.

mod common;

use common::{IDLE_GAP, info, key, submission};
use proptest::prelude::*;
use tally_engine::policy::*;
use tally_engine::{Action, BuiltInRule, Engine, EngineConfig, Submission};

#[derive(Clone, Debug)]
enum Op {
    Submit(u8),
    Done(u8),
    Busy(bool),
    Stands(bool),
    Wait(u32),
    Rejoin(u8),
    Reload,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..3u8).prop_map(Op::Submit),
        4 => (0..3u8).prop_map(Op::Done),
        2 => any::<bool>().prop_map(Op::Busy),
        1 => any::<bool>().prop_map(Op::Stands),
        3 => (1..400_000u32).prop_map(Op::Wait),
        1 => (0..3u8).prop_map(Op::Rejoin),
        1 => Just(Op::Reload),
    ]
}

/// Answers anything at all, reproducibly.
struct Erratic {
    seed: u64,
    subscriptions: u8,
    /// Calls in a pass, and those after which it is over its time.
    calls: u64,
    calls_max: u64,
}

impl Erratic {
    fn new(seed: u64, calls_max: u64) -> Self {
        Erratic { seed, subscriptions: u8::MAX, calls: 0, calls_max }
    }

    fn next(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.seed >> 33
    }
}

impl Policy for Erratic {
    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::of_bits(self.subscriptions)
    }

    fn begin_pass(&mut self) {
        self.calls = 0;
    }

    fn is_over_time(&self) -> bool {
        self.calls >= self.calls_max
    }

    fn decide(&mut self, _: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        self.calls += 1;
        let n = self.next();
        if n.is_multiple_of(7) {
            context.commands.push(Command::SetWindow { client: (n % 5) as u32, window_ns: n });
        }
        let decision = match n % 7 {
            0 => Decision::Hold(self.next() * 1_000),
            6 => Decision::HoldUntilCompletion(self.next() * 1_000),
            1 => Decision::Sliced(self.next() as u32 % 3),
            2 => Decision::Run(self.next() as u32 % 4),
            3 => return Err(Fault { kind: FaultKind::Trap, message: String::new() }),
            4 => Decision::Preemptible,
            _ => Decision::Run(0),
        };
        Ok(Answer { decision, reason: n as u8 })
    }

    fn on_event(&mut self, _: u64, _: &Event, context: &mut Context) -> Result<(), Fault> {
        self.calls += 1;
        let client = (self.next() % 5) as u32;
        match self.next() % 5 {
            0 => context.commands.push(Command::RevokeLease(client)),
            1 => context
                .commands
                .push(Command::SetTimer { delay_ns: self.next(), token: self.next() }),
            3 => {
                let sms = self.next() as u32 % 3;
                context.commands.push(Command::SetWidth { client, sms });
            }
            2 => self.subscriptions = self.next() as u8,
            _ => {}
        }
        Ok(())
    }
}

/// A client as the shim behaves: answered tickets start, in order, once.
#[derive(Default)]
struct Model {
    next_ticket: u64,
    granted: u64,
    decided: Vec<u64>,
    started: u64,
    done: u64,
    width_sms: u32,
}

impl Model {
    fn take(&mut self) {
        while self.started < self.next_ticket
            && (self.started < self.granted || self.decided.contains(&self.started))
        {
            self.started += 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..Default::default() })]

    /// Whatever a policy answers: every launch is granted at most once and in
    /// order, nothing is lost, and once work ends and time passes, everything runs.
    #[test]
    fn no_launch_is_lost_or_doubled(
        ops in prop::collection::vec(op(), 1..200),
        seed: u64,
        // In passes, as the core does; a slow policy is over its time after so many calls.
        calls_max in prop::option::of(1..6_u64),
    ) {
        let policy = |seed| Box::new(Erratic::new(seed, calls_max.unwrap_or(0)));
        let mut e = Engine::new(EngineConfig::default(), policy(seed));
        let mut out = Vec::new();
        let mut now = 1u64;
        e.client_joined(now, info(0, Class::High), 0, &mut out);
        let mut ids = [1u32, 2, 3];
        let mut next_id = 4;
        let mut models: [Model; 3] = Default::default();
        for id in ids { e.client_joined(now, info(id, Class::BestEffort), 0, &mut out); }
        let kernels: Vec<_> = (0..3).map(|i| e.intern(&key(&format!("k{i}")))).collect();
        let apply = |out: &mut Vec<Action>, ids: &[u32; 3], models: &mut [Model; 3]| {
            for a in out.drain(..) {
                match a {
                    Action::Grant { client, until } => {
                        if let Some(i) = ids.iter().position(|&x| x == client) {
                            assert!(until >= models[i].started, "a grant fell below a started launch");
                            models[i].granted = until;
                        }
                    }
                    Action::Decide { client, ticket, .. } => {
                        if let Some(i) = ids.iter().position(|&x| x == client) {
                            assert!(ticket >= models[i].started, "decided twice");
                            models[i].decided.push(ticket);
                        }
                    }
                    Action::SetWidth { client, sms } => {
                        if let Some(i) = ids.iter().position(|&x| x == client) {
                            models[i].width_sms = sms;
                        }
                    }
                    Action::Yield { .. } => {}
                }
            }
            for m in models.iter_mut() { m.take(); }
        };
        let finish = |e: &mut Engine, m: &mut Model, id: u32, now: u64, out: &mut Vec<Action>| {
            if m.done < m.started {
                m.done += 1;
                e.progress(now, id, 0, m.done as u32, None, out);
            }
        };
        for o in ops {
            now += 100;
            if calls_max.is_some() { e.begin_pass(); }
            match o {
                Op::Submit(i) => {
                    let i = i as usize;
                    let ticket = models[i].next_ticket;
                    models[i].next_ticket += 1;
                    let started = ticket < models[i].granted && ticket == models[i].started;
                    let offered = if seed.is_multiple_of(2) { forms_offered::ALL & !forms_offered::PREPARABLE } else { 0 };
                    let limited_sms = if started { models[i].width_sms } else { 0 };
                    let s = Submission { started, offered, limited_sms, ..submission(ticket, kernels[i]) };
                    e.submitted(now, ids[i], s, &mut out);
                    if started { models[i].started += 1; }
                }
                Op::Done(i) => { let i = i as usize; finish(&mut e, &mut models[i], ids[i], now, &mut out); }
                Op::Busy(b) => e.high_activity(now, 0, b, now, &mut out),
                Op::Stands(b) => e.high_stands(now, 0, b),
                Op::Wait(ns) => { now += u64::from(ns); e.tick(now, &mut out); }
                Op::Rejoin(i) => {
                    let i = i as usize;
                    e.client_left(now, ids[i], &mut out);
                    apply(&mut out, &ids, &mut models);
                    ids[i] = next_id;
                    next_id += 1;
                    models[i] = Model::default();
                    e.client_joined(now, info(ids[i], Class::BestEffort), 0, &mut out);
                }
                Op::Reload => {
                    let old = e.set_policy(now, policy(seed ^ now), &mut out);
                    drop(old);
                }
            }
            apply(&mut out, &ids, &mut models);
            let has_waiting = models.iter().any(|m| m.started < m.next_ticket);
            prop_assert!(!has_waiting || e.next_deadline_ns().is_some(), "nobody would look");
        }
        // High priority ends, the built-in rule takes over, launches finish.
        if calls_max.is_some() { e.begin_pass(); }
        e.high_stands(now, 0, false);
        e.high_activity(now, 0, false, now, &mut out);
        e.set_policy(now, Box::new(BuiltInRule { idle_ns: IDLE_GAP }), &mut out);
        for _ in 0..2_000 {
            now += 1_000_000;
            if calls_max.is_some() { e.begin_pass(); }
            e.tick(now, &mut out);
            apply(&mut out, &ids, &mut models);
            for i in 0..3 { finish(&mut e, &mut models[i], ids[i], now, &mut out); }
            apply(&mut out, &ids, &mut models);
        }
        for (m, id) in models.iter().zip(ids) {
            prop_assert_eq!(m.started, m.next_ticket, "a launch was lost");
            prop_assert_eq!(m.done, m.next_ticket);
            let state = e.client_state(id).unwrap();
            prop_assert_eq!((state.waiting, state.in_flight, state.in_flight_ns), (0, 0, 0));
            prop_assert_eq!(e.client_stats(id).unwrap().completed, m.next_ticket);
        }
    }
}
