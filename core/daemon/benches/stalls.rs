//! What an honest client's decisions cost while others do what made the core slow once, against the same run in which
//! these only launch. Compare the ratios: `cargo xtask bench -p tally-core stalls`.
//!
//! The attackers are threads of this process that wake up once a millisecond, all together, so that on a small machine
//! it is the core that is measured and not who has a CPU.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{BUILT_IN, Client, Core};
use rustix::thread::futex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;
use tally_ipc::layout::{RING_SLOTS, STREAM_SLOTS, submission_flags};
use tally_ipc::ring::{self, Request};
use tally_ipc::wait::now_ns;

const LAUNCHES: usize = 4_000;
const WARM_UP: usize = 200;
/// Between two launches of the honest client.
const PAUSE: Duration = Duration::from_micros(200);
const STEP: Duration = Duration::from_millis(1);
/// Threads that sleep on an attacker's words, of all attackers.
const SLEEPERS: usize = 400;

/// What an attacker does every millisecond, besides launching.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Attack {
    Nothing,
    /// Never lets a launch end, and says that as many as its ring holds have yielded.
    InFlight,
    /// Lets thousands of launches end at once.
    Completions,
    /// Has many threads sleep on the words that the core wakes.
    Sleepers,
    /// Rings the doorbell without a launch.
    Doorbell,
    /// Writes noise over its ring.
    Noise,
}

struct Attacker {
    client: Client,
    ticket: u64,
}

impl Attacker {
    /// Launches that are said to have started already, as far as there is room.
    fn launch(&mut self, count: usize) {
        for _ in 0..count {
            if !ring::has_room(&self.client.core, self.ticket) {
                break;
            }
            let request = Request {
                kernel: 0,
                flags: submission_flags::LEASED,
                grid: [1; 3],
                block: [32, 1, 1],
                shared_bytes: 0,
                stream: self.ticket as u32 % STREAM_SLOTS as u32,
                completion: self.ticket as u32 + 1,
            };
            ring::publish(&self.client.region, self.ticket, &request);
            self.ticket += 1;
            self.client.region.activity.next_ticket.store(self.ticket, SeqCst);
        }
        if ring::must_ring(&self.client.core) {
            self.client.ring();
        }
    }

    fn end_all(&self) {
        for slot in &self.client.region.completions {
            slot.done.store(self.ticket as u32, SeqCst);
        }
    }

    fn step(&mut self, attack: Attack, launches: usize, random: &mut fastrand::Rng) {
        self.launch(launches);
        match attack {
            Attack::Nothing | Attack::Sleepers => self.end_all(),
            Attack::InFlight => {
                let all = &self.client.region.turnarounds;
                let last = &all.latest[all.latest.len() - 1];
                last.ticket.store(random.u64(..), Relaxed);
                all.count.fetch_add(all.latest.len() as u64, SeqCst);
            }
            Attack::Completions => {
                if self.ticket % (64 * RING_SLOTS as u64) < launches as u64 {
                    self.end_all();
                }
            }
            Attack::Doorbell => {
                self.end_all();
                (0..8).for_each(|_| self.client.ring());
            }
            Attack::Noise => {
                self.end_all();
                for _ in 0..16 {
                    let at = random.usize(..self.client.region.submissions.len());
                    let words = &self.client.region.submissions[at];
                    words.sequence.store(random.u64(..), Relaxed);
                }
            }
        }
    }
}

/// Microseconds of decisions, p50 and p99.
fn honest(core: &Core) -> [f64; 2] {
    let mut client = Client::best_effort(core, "honest");
    let mut samples = Vec::new();
    for i in 0..WARM_UP + LAUNCHES {
        let start = now_ns();
        let (ticket, completion) = client.submit();
        client.wait(ticket);
        let took = now_ns() - start;
        client.complete(completion);
        if i >= WARM_UP {
            samples.push(took);
        }
        std::thread::sleep(PAUSE);
    }
    samples.sort_unstable();
    let quantile = |q: f64| samples[((samples.len() - 1) as f64 * q) as usize] as f64 / 1_000.0;
    [quantile(0.5), quantile(0.99)]
}

fn measure(attack: Attack, connections: usize) -> [f64; 2] {
    let config =
        format!("{BUILT_IN}[admission]\nuser_clients_max = 256\nuser_joins_per_s = 10000\n");
    let core = Core::start(&config, &[]);
    let mut attackers: Vec<Attacker> = (0..connections)
        .map(|i| Attacker {
            client: Client::best_effort(&core, &format!("attacker-{i}")),
            ticket: 0,
        })
        .collect();
    let over = AtomicBool::new(false);
    let words: Vec<_> = attackers.iter().map(|a| &raw const *a.client.core as usize).collect();
    std::thread::scope(|scope| {
        if attack == Attack::Sleepers {
            for at in 0..SLEEPERS {
                let (word, over) = (words[at % words.len()], &over);
                scope.spawn(move || {
                    // SAFETY: the attacker's mapping of its core region, which lives until all threads have ended.
                    let core = unsafe { &*(word as *const tally_ipc::CoreRegion) };
                    while !over.load(SeqCst) {
                        let most = futex::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                        let seen = core.wake.load(SeqCst);
                        let _ = futex::wait(&core.wake, futex::Flags::empty(), seen, Some(&most));
                    }
                });
            }
        }
        let over = &over;
        let attackers = &mut attackers;
        scope.spawn(move || {
            let mut random = fastrand::Rng::with_seed(7);
            let launches = (64 / attackers.len()).max(1);
            while !over.load(SeqCst) {
                for attacker in attackers.iter_mut() {
                    attacker.client.region.activity.waiters.store(1, SeqCst);
                    attacker.step(attack, launches, &mut random);
                }
                std::thread::sleep(STEP);
            }
        });
        let quantiles = honest(&core);
        over.store(true, SeqCst);
        quantiles
    })
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!("connections  attack        p50 us   p99 us   p50 ratio  p99 ratio");
    for connections in [1, 100] {
        for attack in [
            Attack::InFlight,
            Attack::Completions,
            Attack::Sleepers,
            Attack::Doorbell,
            Attack::Noise,
        ] {
            // Before and after, for what else the machine does.
            let before = measure(Attack::Nothing, connections);
            let [p50, p99] = measure(attack, connections);
            let after = measure(Attack::Nothing, connections);
            let ratio = |at: usize, value: f64| 2.0 * value / (before[at] + after[at]);
            println!(
                "{connections:>11}  {:<12} {p50:>7.1}  {p99:>7.1}  {:>10.2}  {:>9.2}",
                format!("{attack:?}"),
                ratio(0, p50),
                ratio(1, p99)
            );
        }
    }
}
