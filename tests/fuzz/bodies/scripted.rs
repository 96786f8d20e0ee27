//! The policy of the targets `dispatch` and `marks`: it does what a script says, and counts how often it is asked.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use tally_core::loader::Loaded;
use tally_engine::policy::{
    Answer, Command, Context, Decision, Event, Fault, FaultKind, Launch, Policy, Subscriptions,
};

/// What the policy does, and how often it was asked.
#[derive(Default)]
pub struct Script {
    pub mode: AtomicU64,
    pub calls: Mutex<Calls>,
}

#[derive(Default)]
pub struct Calls {
    pub decides: BTreeMap<u32, u64>,
    pub events: u64,
    /// Those about units of work.
    pub units: Vec<Event>,
}

struct Scripted {
    script: Arc<Script>,
    subscribes: Subscriptions,
    asked: u64,
}

impl Policy for Scripted {
    fn subscriptions(&self) -> Subscriptions {
        self.subscribes
    }

    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        *self.script.calls.lock().unwrap().decides.entry(launch.client).or_default() += 1;
        self.asked += 1;
        let mode = self.script.mode.load(Relaxed);
        let client = launch.client;
        let mixed = mode == 9;
        let way = if mixed { (self.asked ^ launch.grid_blocks) % 9 } else { mode };
        match way {
            1 => return Ok(Decision::Hold(1_000_000).into()),
            2 => {
                let decision = Decision::HoldUntilCompletion(u64::MAX);
                return Ok(Answer { decision, reason: 9 });
            }
            3 => return Ok(Decision::Sliced(8).into()),
            4 => return Ok(Decision::Preemptible.into()),
            5 => return Ok(Decision::SmLimited(4).into()),
            6 => return Ok(Decision::Run(16).into()),
            7 => {
                return Err(Fault { kind: FaultKind::Trap, message: "fuzzed".into() });
            }
            8 => {
                let window_ns = launch.predicted_ns.saturating_mul(self.asked % 4);
                let ungated = self.asked.is_multiple_of(16);
                let yielded = self.asked.is_multiple_of(2);
                for command in [
                    Command::SetWindow { client, window_ns },
                    Command::SetYield { client, yielded },
                    Command::SetAutoYield { client, enabled: !yielded, idle_ns: 1_000 },
                    Command::SetTimer { delay_ns: self.asked % 100, token: self.asked % 70 },
                    Command::RevokeLease(client),
                    Command::SetUngated { client, ungated },
                    Command::SetWidth { client, sms: (self.asked % 9) as u32 },
                ] {
                    context.commands.push(command);
                }
                return Ok(match ungated {
                    true => Decision::Run(0),
                    false => Decision::Hold(self.asked % 3 * 1_000),
                }
                .into());
            }
            _ => {}
        }
        Ok(Decision::Run(0).into())
    }

    fn on_event(&mut self, _: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let mut calls = self.script.calls.lock().unwrap();
        calls.events += 1;
        if event.kind() == Subscriptions::UNITS {
            calls.units.push(event.clone());
        }
        drop(calls);
        if let (Event::Joined(client), 8) = (event, self.script.mode.load(Relaxed)) {
            let client = client.id;
            context.commands.push(Command::SetAutoYield { client, enabled: true, idle_ns: 5 });
        }
        Ok(())
    }
}

/// Bits of `subscribes`: activity, completions, units of work.
pub fn policy(script: &Arc<Script>, subscribes: u32) -> Loaded {
    let all = [Subscriptions::ACTIVITY, Subscriptions::COMPLETIONS, Subscriptions::UNITS];
    let chosen = all.into_iter().enumerate().filter(|(bit, _)| subscribes >> bit & 1 != 0);
    let always = Subscriptions::MEMBERSHIP.and(Subscriptions::TIMER);
    let subscribes = chosen.fold(always, |all, (_, one)| all.and(one));
    Loaded::native(Box::new(Scripted { script: script.clone(), subscribes, asked: 0 }))
}
