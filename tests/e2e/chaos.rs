//! Somebody is killed without notice, at a random moment: the others finish with
//! right results, the core serves on or comes back, and nothing hangs.
//!
//! Twenty-four episodes in four tests, so that two run at a time. Each prints its
//! seed; `TALLY_CHAOS_SEED=n TALLY_CHAOS_EPISODES=1` runs just that one.

use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

const EPISODES: u64 = 6;
const REQUESTS: u64 = 60;
const STEPS: u64 = 40;
/// Latest moment of a kill after both programs are under way.
const KILL_MS_MAX: u64 = 800;
/// Longest time without a core.
const GONE_MS_MAX: u64 = 250;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    HighPriority,
    BestEffort,
    Core,
}

/// A small generator; good enough to choose moments.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn episode(artefacts: &Artefacts, seed: u64, checksum: &serde_json::Value) -> Result<Victim> {
    let mut random = Random(seed);
    random.below(1);
    let victim = [Victim::HighPriority, Victim::BestEffort, Victim::Core][random.below(3) as usize];
    let policy = artefacts.policy(["tally-priority", "fifo"][random.below(2) as usize])?;
    let scene = Scene::new(artefacts, Device::Software { sms: 1 })?;
    let mut core = scene.core(&policy, &[])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    // Without a look whether the core is there: it may be gone by then.
    let start = |name: &str, class, program: Command| {
        let program = scene.governed_with(class, name, &["--no-check"], &program)?;
        scene.start(name, program)
    };
    let mut server = start("serve", Class::High, jobs::inference(&scene, REQUESTS)?)?;
    let mut trainer = start("train", Class::BestEffort, jobs::training(&scene, STEPS)?)?;
    // Every other time in the middle of their work, else perhaps while they start.
    if seed.is_multiple_of(2) {
        wait_until("waiting for both to launch", ANSWER_MAX, || {
            let status = scene.status()?;
            let launches = |name: &str| status.client(name).map_or(0, |client| client.launches());
            Ok((launches("serve") > 0 && launches("train") > 0).then_some(()))
        })?;
    }
    std::thread::sleep(Duration::from_millis(random.below(KILL_MS_MAX)));
    match victim {
        Victim::HighPriority => server.kill()?,
        Victim::BestEffort => trainer.kill()?,
        Victim::Core => {
            core.kill()?;
            std::thread::sleep(Duration::from_millis(random.below(GONE_MS_MAX)));
            core = scene.core(&policy, &[])?;
            wait_until("waiting for the probe to attach again", ANSWER_MAX, || {
                Ok(scene.status()?.client("probe").ok().map(|_| ()))
            })?;
        }
    }
    probe.ask("launch 10 20")?;
    probe.check()?;
    probe.quit()?;
    if !server.was_killed() {
        jobs::all_answered(&mut server, REQUESTS)?;
    }
    if !trainer.was_killed() {
        jobs::trained_to(&mut trainer, checksum)?;
    }
    wait_until("waiting for all clients to be gone", ANSWER_MAX, || {
        Ok(scene.status()?.clients()?.is_empty().then_some(()))
    })?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok(victim)
}

fn episodes(from: u64) -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let from = number("TALLY_CHAOS_SEED").unwrap_or(from);
    let count = number("TALLY_CHAOS_EPISODES").unwrap_or(EPISODES);
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::Software { sms: 1 })?;
    let checksum = jobs::training_checksum(&scene, STEPS)?;
    let mut victims = Vec::new();
    for seed in from..from + count {
        let victim = episode(&artefacts, seed, &checksum).with_context(|| {
            format!("seed {seed}: TALLY_CHAOS_SEED={seed} TALLY_CHAOS_EPISODES=1 runs it alone")
        })?;
        println!("seed {seed}: {victim:?} was killed");
        victims.push(victim);
    }
    if count == EPISODES {
        for victim in [Victim::HighPriority, Victim::BestEffort, Victim::Core] {
            ensure!(victims.contains(&victim), "{victim:?} was never chosen");
        }
    }
    Ok(())
}

#[test]
fn killed_at_random_1() -> Result<()> {
    episodes(1_000)
}

#[test]
fn killed_at_random_2() -> Result<()> {
    episodes(2_000)
}

#[test]
fn killed_at_random_3() -> Result<()> {
    episodes(3_000)
}

#[test]
fn killed_at_random_4() -> Result<()> {
    episodes(4_000)
}
