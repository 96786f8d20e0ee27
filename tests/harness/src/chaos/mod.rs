//! Random faults at random parties, and a checker of the programs' results.
//!
//! A world has a core, a high-priority and two best-effort programs that tell what each round of launches left in
//! memory (`src/bin/chaos_program.rs`), and a hostile client (`src/bin/chaos_hostile.rs`). Faults come in batches
//! of a few that overlap. When a batch is over the core answers, every program is registered and gets on, and
//! every round that it completed left bit for bit what the same round leaves without Tally.
//!
//! | module | has |
//! | --- | --- |
//! | [`plan`] | which faults come when, from a seed |
//! | [`world`] | the parties, how faults are made and undone |
//! | [`check`] | what must be true of the results |
//! | [`threads`] | what is said of a party that hangs |

pub mod check;
pub mod plan;
pub mod threads;
pub mod world;

use crate::Artefacts;
use anyhow::{Context, Result, ensure};
use plan::Kind;
use serde_json::Value;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Options {
    pub faults: usize,
    /// Seed of the random faults.
    pub seed: u64,
    /// Worlds at the same time, each with a part of the faults.
    pub worlds: usize,
    /// Longest time in which a party must get on.
    pub patience: Duration,
}

/// What was done and seen.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Faults made, in the order of [`Kind::ALL`].
    pub faults: [u64; Kind::ALL.len()],
    /// Times that everything was checked.
    pub checks: u64,
    /// Rounds whose results were compared.
    pub rounds: u64,
    /// Launches in the compared rounds.
    pub launches: u64,
    /// Launches that the core's decisions granted, as it counted them at the checks.
    pub decided: u64,
    /// Changes of clients' widths, and launches that ran on some of the SMs, counted likewise.
    pub width_changes: u64,
    pub sm_limited: u64,
    /// Signals that handlers of programs took.
    pub signals: u64,
    /// Policies that took over between faults.
    pub reloads: u64,
    /// Tricks that had to be refused and were.
    pub refused: u64,
}

/// What a core has done so far.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    decided: u64,
    width_changes: u64,
    sm_limited: u64,
}

impl Counted {
    fn of(status: &Value) -> Self {
        let clients = ["clients", "departed"].map(|key| status[key].as_array());
        let clients = || clients.into_iter().flatten().flatten();
        let sum = |pointer| clients().filter_map(|client| client.pointer(pointer)?.as_u64()).sum();
        Counted {
            decided: status["policy"]["decides"].as_u64().unwrap_or(0),
            width_changes: sum("/decisions/width_changes"),
            sm_limited: sum("/transformed/sm_limited"),
        }
    }

    fn add_to(self, outcome: &mut Outcome) {
        outcome.decided += self.decided;
        outcome.width_changes += self.width_changes;
        outcome.sm_limited += self.sm_limited;
    }
}

impl std::ops::AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.faults.iter_mut().zip(other.faults).for_each(|(sum, n)| *sum += n);
        self.checks += other.checks;
        self.rounds += other.rounds;
        self.launches += other.launches;
        self.decided += other.decided;
        self.width_changes += other.width_changes;
        self.sm_limited += other.sm_limited;
        self.signals += other.signals;
        self.reloads += other.reloads;
        self.refused += other.refused;
    }
}

impl Outcome {
    pub fn total(&self) -> u64 {
        self.faults.iter().sum()
    }

    /// For people: a line for each kind of fault, and what was checked.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (kind, count) in Kind::ALL.iter().zip(self.faults) {
            let count = if count == 0 { "not run".into() } else { count.to_string() };
            let _ = writeln!(text, "{:14} {count}", kind.name());
        }
        let _ = writeln!(
            text,
            "{} faults, {} checks, {} policies loaded between them, {} breaches refused\n{} launches in {} rounds: \
             none lost, none doubled, all bits right; {} decided by cores; {} SM-limited; {} changes of widths; {} signals handled",
            self.total(),
            self.checks,
            self.reloads,
            self.refused,
            self.launches,
            self.rounds,
            self.decided,
            self.sm_limited,
            self.width_changes,
            self.signals
        );
        text
    }
}

/// What this machine lets a test do.
#[derive(Clone, Copy, Debug)]
pub struct Means {
    /// A small file system of a core's own can be mounted.
    pub mounts: bool,
    /// Programs can be started with other monotonic clocks.
    pub clocks: bool,
}

impl Means {
    pub fn of_this_machine() -> Self {
        let works = |arguments: &[&str]| {
            let mut unshare = Command::new("unshare");
            unshare
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            unshare.status().is_ok_and(|done| done.success())
        };
        // Kernels before 6.3 put only children into another time namespace.
        let moved = "test \"$(readlink /proc/self/ns/time)\" != \"$0\"";
        let here = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
        let clocks = ["--time", "--monotonic=100", "sh", "-c", moved, &here.to_string_lossy()];
        Means {
            mounts: works(&["--mount", "sh", "-c", "mount -t tmpfs -o size=64k tally /mnt"]),
            clocks: works(&clocks),
        }
    }

    fn allows(self, kind: Kind) -> bool {
        match kind {
            Kind::Space => self.mounts,
            Kind::Clock => self.clocks,
            _ => true,
        }
    }

    /// Faults that are not made, and why.
    pub fn left_out(self) -> Vec<&'static str> {
        let mut why = vec![
            "steps of CLOCK_REALTIME: the clock belongs to the whole machine; monotonic clocks are offset instead",
        ];
        if !self.mounts {
            why.push("ENOSPC: mounting a small file system needs root");
        }
        if !self.clocks {
            why.push("clock offsets: time namespaces need root and Linux 6.3");
        }
        why
    }
}

/// Makes the faults and checks everything after each batch.
///
/// # Errors
/// What was lost, doubled or wrong, or who hangs.
pub fn run(artefacts: &Artefacts, options: &Options) -> Result<Outcome> {
    ensure!(options.worlds > 0, "--worlds 0: expected at least 1");
    let means = Means::of_this_machine();
    let possible: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| means.allows(*kind)).collect();
    let mut outcome = Outcome::default();
    std::thread::scope(|scope| -> Result<()> {
        let running: Vec<_> = (0..options.worlds)
            .map(|n| {
                let faults = (options.faults + n) / options.worlds;
                let seed = options.seed.wrapping_add(n as u64);
                let batches = plan::plan(seed, faults, &possible);
                scope.spawn(move || {
                    world::run(artefacts, means, seed, &batches, options.patience)
                        .with_context(|| format!("world {n}, seed {seed}"))
                })
            })
            .collect();
        let mut failed = Ok(());
        for world in running {
            match world.join().expect("a thread of the test panicked") {
                Ok(part) => outcome += part,
                Err(error) if failed.is_ok() => failed = Err(error),
                Err(error) => eprintln!("also: {error:#}"),
            }
        }
        failed
    })?;
    Ok(outcome)
}
