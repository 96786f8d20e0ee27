//! Nobody works: how often the core and a client wake up.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tally_harness::jobs::{JOB_MAX, Probe};
use tally_harness::{Artefacts, Class, Device, Scene};

/// Of the core and a client together, in all threads.
const WAKES_PER_S_MAX: f64 = 12.0;
const MEASURED: Duration = Duration::from_secs(10);
/// What has just been done ends, and time slices are set again for a few seconds.
const SETTLES: Duration = Duration::from_secs(5);

/// How often each thread went to sleep by itself, with its name.
fn sleeps(pid: u32) -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        let status = std::fs::read_to_string(task.path().join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|rest| rest.trim().to_owned()).context(name.to_owned())
        };
        let name = format!("{} {}", task.file_name().to_string_lossy(), field("Name:")?);
        all.insert(name, field("voluntary_ctxt_switches:")?.parse()?);
    }
    Ok(all)
}

#[test]
fn idle_core_and_client_sleep() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    // The core watches the policy's folder, and in the usual one other tests come and go.
    let policy = scene.dir().join("tally-priority.wasm");
    std::fs::copy(scene.artefacts().policy("tally-priority")?, &policy)?;
    let mut core = scene.core(&policy, &[])?;
    let mut probes = [
        Probe::start(&scene, Class::High, "web")?,
        Probe::start(&scene, Class::BestEffort, "batch")?,
    ];
    for probe in &mut probes {
        probe.ask("launch 20 20")?;
        probe.check()?;
    }
    std::thread::sleep(SETTLES);
    let pids = [core.pid(), probes[0].0.pid(), probes[1].0.pid()];
    let look = || pids.iter().map(|pid| sleeps(*pid)).collect::<Result<Vec<_>>>();
    let (began, before) = (Instant::now(), look()?);
    std::thread::sleep(MEASURED);
    let (after, seconds) = (look()?, began.elapsed().as_secs_f64());
    let mut rates = Vec::new();
    for (before, after) in before.iter().zip(&after) {
        let woken = |name: &str, n: &u64| n - before.get(name).copied().unwrap_or(0);
        let each = after.iter().map(|(name, n)| (name, woken(name, n)));
        let busy: Vec<_> = each.clone().filter(|(_, n)| *n > 0).collect();
        println!("{busy:?} in {seconds:.1} s");
        rates.push(each.map(|(_, n)| n).sum::<u64>() as f64 / seconds);
    }
    for client in &rates[1..] {
        ensure!(rates[0] + client <= WAKES_PER_S_MAX, "core and clients, a second: {rates:?}");
    }
    for mut probe in probes {
        probe.check()?;
        probe.quit()?;
    }
    scene.stop(&mut core, JOB_MAX)
}
