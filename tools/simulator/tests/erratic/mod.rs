//! What tests of anything need: a policy that does everything, and random traces.

use proptest::prelude::*;
use tally_engine::policy::*;
use tally_simulator::Trace;
use tally_simulator::trace::{Kernel, Pace};

/// Answers and asks for anything, by a fixed random sequence.
pub struct Erratic {
    seed: u64,
    /// It meddles with the first so many, and one more.
    clients: u32,
    subscriptions: u8,
}

impl Erratic {
    pub fn new(seed: u64, clients: u32) -> Self {
        Erratic { seed, clients, subscriptions: u8::MAX }
    }

    fn next(&mut self) -> u64 {
        self.seed =
            self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        self.seed >> 33
    }

    fn meddle(&mut self, context: &mut Context) {
        let client = (self.next() % u64::from(self.clients + 1)) as u32;
        let on = self.next().is_multiple_of(2);
        context.commands.push(match self.next() % 9 {
            0 => Command::SetUngated { client, ungated: on },
            1 => Command::SetYield { client, yielded: on },
            2 => Command::SetAutoYield { client, enabled: on, idle_ns: self.next() % 200_000 },
            3 => Command::SetWindow { client, window_ns: self.next() % 3_000_000 },
            4 => Command::RevokeLease(client),
            6 => Command::SetWidth { client, sms: (self.next() % 140) as u32 },
            5 => Command::SetTimer { delay_ns: 1_000 + self.next() % 1_000_000, token: 1 },
            _ => {
                self.subscriptions = self.next() as u8;
                return;
            }
        });
    }
}

impl Policy for Erratic {
    fn decide(&mut self, _: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        if self.next().is_multiple_of(16) {
            self.meddle(context);
        }
        let n = (self.next() % 200) as u32;
        let decision = match self.next() % 8 {
            0 => Decision::Hold(self.next() % 300_000),
            1 => Decision::Sliced(n),
            2 | 3 => Decision::Preemptible,
            4 => Decision::SmLimited(n),
            5 => return Err(Fault { kind: FaultKind::Trap, message: String::new() }),
            6 => Decision::HoldUntilCompletion(self.next() % 300_000),
            _ => Decision::Run(n % 4),
        };
        Ok(decision.into())
    }

    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::of_bits(self.subscriptions)
    }

    fn on_event(&mut self, _: u64, _: &Event, context: &mut Context) -> Result<(), Fault> {
        if self.next().is_multiple_of(4) {
            self.meddle(context);
        }
        // What this test asks for is that all is served in the end.
        for client in 0..self.clients {
            context.commands.push(Command::SetYield { client, yielded: false });
        }
        Ok(())
    }
}

/// Traces of up to eleven kernels.
pub fn kernels() -> impl Strategy<Value = Trace> {
    let kernel = (1u64..400_000, 0u64..30_000, 1u32..5_000, 1u32..1_024, 0u32..100_000, 0u8..3);
    prop::collection::vec(kernel, 1..12).prop_map(|all| {
        let mut start_ns = 0;
        let mut kernels = Vec::new();
        for (i, (dur_ns, pause_ns, blocks, threads, smem, pace)) in all.into_iter().enumerate() {
            start_ns += pause_ns;
            let (gap_ns, pace) = match pace {
                0 => (pause_ns, Pace::AfterLaunch(1_000)),
                1 => (0, Pace::AfterLaunch(pause_ns)),
                _ => (0, Pace::AfterEnd(pause_ns)),
            };
            let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
            let name = format!("k{i}");
            kernels.push(Kernel {
                name,
                grid,
                block,
                regs: 32,
                smem,
                start_ns,
                dur_ns,
                gap_ns,
                pace,
                launch: i as u32,
            });
            start_ns += dur_ns;
        }
        Trace { name: "random".into(), kernels, period_ns: start_ns, ..Trace::default() }
    })
}
