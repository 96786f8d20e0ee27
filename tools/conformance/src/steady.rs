//! Long runs of ordinary work: does a waiting launch get its turn, and does memory stay
//! as it is?

use crate::Options;
use crate::harness::Harness;
use crate::stream::Shape;
use crate::subject::Subject;
use tally_contract::limits::{CHECK_OFFERS_MAX, HOLD_NS_MAX, HOLD_NS_MIN, STALL_NS};
use tally_engine::policy::{Fault, forms_offered, launch_state};
use tally_wasm_host::LoadError;

/// Launches in a row that each must get their turn.
const LAUNCHES: u32 = 40;

/// Why a long run did not come to its end.
pub enum Stopped {
    /// No instance could be started.
    Load(LoadError),
    /// A call of the policy failed.
    Fault(Fault),
    /// A launch never got its turn.
    Starved(String),
}

impl From<Fault> for Stopped {
    fn from(fault: Fault) -> Self {
        Stopped::Fault(fault)
    }
}

impl From<LoadError> for Stopped {
    fn from(error: LoadError) -> Self {
        Stopped::Load(error)
    }
}

/// How long launches waited at worst.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waits {
    /// Times that one launch was offered.
    pub offers_max: u32,
    /// Time that one launch waited.
    pub waited_ns_max: u64,
}

/// The side that must not be in the way.
#[derive(Clone, Copy, Debug)]
enum High {
    Nobody,
    /// Connected, and never did anything.
    Idle,
    /// It worked a moment ago and is idle since.
    Stopped,
}

/// A best-effort launch of an ordinary kernel.
fn ordinary(kernel: u32) -> Shape {
    Shape {
        pick: 0,
        kernel,
        state: if kernel % 4 == 3 { launch_state::GRAPH } else { 0 },
        offered: match kernel % 4 {
            1 => forms_offered::SLICED | forms_offered::PREEMPTIBLE,
            2 => forms_offered::PREPARABLE,
            _ => 0,
        },
        grid_blocks: 1 + u64::from(kernel) * 37,
        block_threads: 256,
        shared_bytes: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        predicted_ns: 0,
        stream: 0,
        sm_count: 132,
    }
}

/// With the high-priority side idle and nothing in flight, every launch must be granted
/// within a bounded number of offers.
pub fn starvation(subject: &dyn Subject) -> Result<Waits, Stopped> {
    let mut waits = Waits::default();
    for high in [High::Nobody, High::Idle, High::Stopped] {
        for clients in [1u8, 3] {
            idle_side(subject, high, clients, &mut waits)?;
        }
    }
    Ok(waits)
}

fn idle_side(
    subject: &dyn Subject,
    high: High,
    clients: u8,
    waits: &mut Waits,
) -> Result<(), Stopped> {
    let mut harness = Harness::new(subject.start(None)?);
    if !matches!(high, High::Nobody) {
        harness.join(true, 0, 4)?;
    }
    let mut ids = Vec::new();
    for _ in 0..clients {
        ids.push(harness.join(false, 1, 8)?);
    }
    if matches!(high, High::Stopped) {
        harness.high(true)?;
        harness.advance(3_000_000)?;
        harness.high(false)?;
    }
    for n in 0..LAUNCHES {
        let client = ids[n as usize % ids.len()];
        let from_ns = harness.now_ns;
        for offers in 1.. {
            let waited_ns = harness.now_ns - from_ns;
            let shape = Shape { waited_ns, ..ordinary(n) };
            waits.offers_max = waits.offers_max.max(offers);
            waits.waited_ns_max = waits.waited_ns_max.max(waited_ns);
            let decision = harness.launch(client, &shape)?;
            let Some(for_ns) = decision.and_then(|d| d.hold_ns()) else { break };
            if offers >= CHECK_OFFERS_MAX || waited_ns >= STALL_NS {
                let side = match high {
                    High::Nobody => "no high-priority client",
                    High::Idle => "a high-priority client that never did anything",
                    High::Stopped => "a high-priority client that did nothing since",
                };
                return Err(Stopped::Starved(format!(
                    "launch {n} of a best-effort client was held for {:.3} s ({offers} offers) \
                     beside {side}",
                    waited_ns as f64 / 1e9
                )));
            }
            // Offered again after its hold, or when a timer fires.
            let hold_ns = for_ns.clamp(HOLD_NS_MIN, HOLD_NS_MAX);
            let timer_ns = harness.next_timer_ns().map_or(u64::MAX, |due| due - harness.now_ns);
            harness.advance(hold_ns.min(timer_ns.max(1)))?;
        }
        harness.end_one(0, 50_000)?;
    }
    Ok(())
}

/// Linear memory after each of five equal phases: the same clients and kernels over and
/// over, and others that come and go.
pub fn memory(subject: &dyn Subject, options: &Options) -> Result<[usize; 5], Stopped> {
    let mut harness = Harness::new(subject.start(None)?);
    harness.join(true, 2, 8)?;
    for _ in 0..3 {
        harness.join(false, 2, 8)?;
    }
    let mut after = [0; 5];
    let mut visitor = None;
    for bytes in &mut after {
        for n in 0..options.steady_calls {
            match n % 8 {
                0 => harness.high(true)?,
                3 => harness.high(false)?,
                5 => {
                    if let Some(id) = visitor.take() {
                        harness.leave(id)?;
                    }
                    visitor = Some(harness.join(false, 1, 8)?);
                }
                7 => harness.end_one(0, 20_000 + u64::from(n % 16) * 10_000)?,
                _ => {
                    let shape = Shape { stream: n % 4, ..ordinary(n / 8 % 32) };
                    harness.launch(1 + n % 3, &shape)?;
                }
            }
            harness.advance(60_000)?;
            harness.seen.decide_fuel.clear();
            harness.seen.event_fuel.clear();
        }
        *bytes = harness.policy().memory_bytes();
    }
    Ok(after)
}
