//! Long runs of ordinary work: does a waiting launch get its turn, and does memory stay
//! as it is?

use crate::Options;
use crate::stage::Stage;
use crate::stream::Shape;
use crate::subject::Subject;
use tally_engine::policy::{Decision, Fault, launch_flags};
use tally_wasm_host::LoadError;

/// Offers after which a launch that is still held counts as starved ...
const OFFERS_MAX: u32 = 200;
/// ... or time, if that comes first: what the core counts as a stall (`stall_ms`).
const WAIT_NS_MAX: u64 = 1_000_000_000;
/// Launches in a row that each must get their turn.
const LAUNCHES: u32 = 40;
/// Longest hold, as in the core.
const HOLD_NS_MAX: u64 = 1_000_000_000;

/// Why a long run did not come to its end.
pub enum Stopped {
    /// No instance could be started.
    Load(LoadError),
    /// A call failed.
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
    Silent,
    /// It worked a moment ago and is silent since.
    Stopped,
}

/// A best-effort launch of an ordinary kernel.
fn ordinary(kernel: u32) -> Shape {
    let can = launch_flags::CAN_SLICE | launch_flags::CAN_PREEMPT;
    Shape {
        pick: 0,
        kernel,
        flags: [0, can, launch_flags::CAN_PREPARE, launch_flags::GRAPH][kernel as usize % 4],
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

/// With the high-priority side silent and nothing in flight, every launch must be let go
/// within a bounded number of offers.
pub fn starvation(subject: &dyn Subject) -> Result<Waits, Stopped> {
    let mut waits = Waits::default();
    for high in [High::Nobody, High::Silent, High::Stopped] {
        for clients in [1u8, 3] {
            silent_side(subject, high, clients, &mut waits)?;
        }
    }
    Ok(waits)
}

fn silent_side(
    subject: &dyn Subject,
    high: High,
    clients: u8,
    waits: &mut Waits,
) -> Result<(), Stopped> {
    let mut stage = Stage::new(subject.start(None)?);
    if !matches!(high, High::Nobody) {
        stage.join(true, 0, 4)?;
    }
    let mut ids = Vec::new();
    for _ in 0..clients {
        ids.push(stage.join(false, 1, 8)?);
    }
    if matches!(high, High::Stopped) {
        stage.high(true)?;
        stage.advance(3_000_000)?;
        stage.high(false)?;
    }
    for n in 0..LAUNCHES {
        let client = ids[n as usize % ids.len()];
        let from_ns = stage.now_ns;
        for offers in 1.. {
            let waited_ns = stage.now_ns - from_ns;
            let shape = Shape { waited_ns, ..ordinary(n) };
            waits.offers_max = waits.offers_max.max(offers);
            waits.waited_ns_max = waits.waited_ns_max.max(waited_ns);
            let Some(Decision::Hold(for_ns)) = stage.launch(client, &shape)? else { break };
            if offers >= OFFERS_MAX || waited_ns >= WAIT_NS_MAX {
                let side = match high {
                    High::Nobody => "no high-priority client",
                    High::Silent => "a high-priority client that never did anything",
                    High::Stopped => "a high-priority client that did nothing since",
                };
                return Err(Stopped::Starved(format!(
                    "launch {n} of a best-effort client was held for {:.3} s ({offers} offers) \
                     beside {side}",
                    waited_ns as f64 / 1e9
                )));
            }
            // Offered again after its hold, or when a timer fires.
            let hold_ns = for_ns.clamp(1, HOLD_NS_MAX);
            let timer_ns = stage.next_timer_ns().map_or(u64::MAX, |due| due - stage.now_ns);
            stage.advance(hold_ns.min(timer_ns.max(1)))?;
        }
        stage.end_one(0, 50_000)?;
    }
    Ok(())
}

/// Linear memory after each of five equal phases: the same clients and kernels over and
/// over, and others that come and go.
pub fn memory(subject: &dyn Subject, options: &Options) -> Result<[usize; 5], Stopped> {
    let mut stage = Stage::new(subject.start(None)?);
    stage.join(true, 2, 8)?;
    for _ in 0..3 {
        stage.join(false, 2, 8)?;
    }
    let mut after = [0; 5];
    let mut visitor = None;
    for bytes in &mut after {
        for n in 0..options.steady_calls {
            match n % 8 {
                0 => stage.high(true)?,
                3 => stage.high(false)?,
                5 => {
                    if let Some(id) = visitor.take() {
                        stage.leave(id)?;
                    }
                    visitor = Some(stage.join(false, 1, 8)?);
                }
                7 => stage.end_one(0, 20_000 + u64::from(n % 16) * 10_000)?,
                _ => {
                    let shape = Shape { stream: n % 4, ..ordinary(n / 8 % 32) };
                    stage.launch(1 + n % 3, &shape)?;
                }
            }
            stage.advance(60_000)?;
            stage.seen.decide_fuel.clear();
            stage.seen.event_fuel.clear();
        }
        *bytes = stage.policy().memory_bytes();
    }
    Ok(after)
}
