//! One policy after another takes over while programs launch all the time: nothing may
//! be lost, nothing run twice, and the core must not grow.

use crate::jobs::{ANSWER_MAX, Probe};
use crate::process::wait_until;
use crate::{Artefacts, Class, Device, Scene};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Reloads before the core's memory is taken for settled.
const WARM_UP: u64 = 100;
/// Launches between two looks at whether it is over.
const LAUNCHES: u32 = 16;
/// The numbers of blocks that launches have in turns: kernels of their own each.
const BLOCKS: [u32; 7] = [1, 2, 3, 5, 8, 13, 21];

/// Counts and times of one run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub reloads: u64,
    /// Launches of all programs during the run.
    pub launches: u64,
    /// Launches that never ran.
    pub lost: u64,
    /// Runs beyond one of a launch.
    pub doubled: u64,
    /// Longest pause between two decisions, as the core's dispatch thread measured it.
    pub max_pause_us: f64,
    /// 99th percentile of that over all reloads.
    pub p99_pause_us: f64,
    /// Median of the pauses of all reloads.
    pub p50_pause_us: f64,
    /// 99th percentile of its two steps: what the old policy knows is written down; the
    /// new one takes over.
    pub p99_steps_us: [f64; 2],
    /// What the core's resident memory grew by from reload 100 to the end.
    pub rss_growth_kib: i64,
    /// Policies that went on from what the one before knew.
    pub states_accepted: u64,
}

impl Outcome {
    pub fn json(&self) -> Value {
        json!({
            "reloads": self.reloads, "launches": self.launches, "lost": self.lost,
            "doubled": self.doubled, "max_pause_us": self.max_pause_us,
            "p99_pause_us": self.p99_pause_us, "p50_pause_us": self.p50_pause_us,
            "p99_save_us": self.p99_steps_us[0], "p99_take_over_us": self.p99_steps_us[1], "rss_growth_kib": self.rss_growth_kib,
            "states_accepted": self.states_accepted,
        })
    }
}

/// A core's admin socket: reloads by `tallyctl` would be ten times as slow.
pub(crate) struct Admin(BufReader<UnixStream>);

impl Admin {
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        Ok(Admin(BufReader::new(stream)))
    }

    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value> {
        crate::admin::send(self.0.get_ref(), request)?;
        let mut line = String::new();
        self.0.read_line(&mut line).with_context(|| format!("after {request}"))?;
        let mut answer: Value = serde_json::from_str(&line)?;
        match answer.get_mut("ok") {
            Some(ok) => Ok(ok.take()),
            None => bail!("{request} -> {answer}"),
        }
    }
}

/// Launches until it is told to stop.
fn launching(mut probe: Probe, stop: &AtomicBool) -> Result<Probe> {
    for round in 0.. {
        if stop.load(Relaxed) {
            break;
        }
        let blocks = BLOCKS[round % BLOCKS.len()];
        probe.ask(&format!("launch {LAUNCHES} 20 {blocks}"))?;
        if round % 4 == 0 {
            // The high-priority program must be silent now and then.
            probe.ask("sync")?;
        }
    }
    probe.ask("sync")?;
    Ok(probe)
}

fn rss_kib(pid: u32) -> Result<i64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next());
    kib.context("no VmRSS")?.parse().context("VmRSS")
}

/// What takes over in turns: the policy that keeps what it learned, one that keeps
/// nothing, and the first with other constants.
fn policies(artefacts: &Artefacts, dir: &Path) -> Result<Vec<(PathBuf, Option<PathBuf>)>> {
    let config = dir.join("other.toml");
    std::fs::write(&config, "idle_gap_us = 50\n")?;
    let priority = artefacts.policy("tally-priority")?;
    Ok(vec![(artefacts.policy("fifo")?, None), (priority.clone(), None), (priority, Some(config))])
}

/// Makes `reloads` reloads while programs run.
///
/// # Errors
/// If a policy does not take over, fails, or a program does not go on.
pub fn run(artefacts: &Artefacts, reloads: u64) -> Result<Outcome> {
    let scene = Scene::new(artefacts, Device::Software { sms: 1 })?;
    let config = scene.dir().join("core.toml");
    // The machine is busy: a policy that waits for the CPU is not to be disabled for it.
    std::fs::write(
        &config,
        "[policy]\nwatch = false\n[policy.limits]\ncall_cpu_ms_max = 2000\n\
         [policy.disabling]\nstall_ms = 60000\n",
    )?;
    let config = config.to_string_lossy().into_owned();
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &["--config", &config])?;
    let probes = [
        Probe::start(&scene, Class::BestEffort, "first")?,
        Probe::start(&scene, Class::BestEffort, "second")?,
        Probe::start(&scene, Class::High, "high")?,
    ];
    let policies = policies(artefacts, scene.dir())?;
    let (stop, mut settled, mut accepted) = (AtomicBool::new(false), None, 0);
    let mut probes = std::thread::scope(|scope| -> Result<Vec<Probe>> {
        let running = probes.map(|probe| scope.spawn(|| launching(probe, &stop)));
        let reloaded = (|| -> Result<()> {
            let mut admin = Admin::connect(&scene.admin_socket())?;
            for n in 0..reloads {
                let (file, config) = &policies[n as usize % policies.len()];
                let load = json!({"cmd": "policy_load", "path": file, "config": config});
                let answer = admin.ask(&load)?;
                ensure!(answer["generation"] == n + 2, "after {n} reloads: {answer}");
                accepted += u64::from(answer["restored"]["outcome"] == "accepted");
                if n + 1 == WARM_UP.min(reloads) {
                    settled = Some(rss_kib(core.pid())?);
                }
                if n % 1_000 == 999 {
                    eprintln!("{} of {reloads} reloads", n + 1);
                }
            }
            Ok(())
        })();
        stop.store(true, Relaxed);
        let ended = running.map(|thread| thread.join().expect("a thread of the test panicked"));
        reloaded?;
        ended.into_iter().collect()
    })?;
    let rss_growth_kib = rss_kib(core.pid())? - settled.context("no reload at all")?;
    let status = scene.status()?;
    ensure!(status.policy_faults() == 0, "a policy failed: {:#}", status.0["policy"]);
    let pause = &status.0["policy"]["swap_pause_us"];
    let us = |key: &str| pause[key].as_f64().with_context(|| format!("no {key} in {pause}"));
    let mut outcome = Outcome {
        reloads: pause["count"].as_u64().unwrap_or(0),
        launches: 0,
        lost: 0,
        doubled: 0,
        max_pause_us: us("max")?,
        p99_pause_us: us("p99")?,
        p50_pause_us: us("p50")?,
        p99_steps_us: [us("save_p99")?, us("take_over_p99")?],
        rss_growth_kib,
        states_accepted: accepted,
    };
    ensure!(outcome.reloads == reloads, "{} of {reloads} reloads counted", outcome.reloads);
    for (probe, name) in probes.iter_mut().zip(["first", "second", "high"]) {
        let read = probe.ask("read")?;
        let count = |key: &str| read[key].as_u64().with_context(|| format!("no {key} in {read}"));
        outcome.launches += count("launched")?;
        outcome.lost += count("lost")?;
        outcome.doubled += count("doubled")?;
        ensure!(count("lost")? + count("doubled")? > 0 || count("wrong")? == 0, "{name}: {read}");
        // Its shim counted the same.
        let launched = count("launched")?;
        wait_until("waiting for the count of launches", ANSWER_MAX, || {
            Ok((scene.status()?.client(name)?.launches() == launched).then_some(()))
        })?;
    }
    for probe in probes {
        probe.quit()?;
    }
    scene.stop(&mut core, ANSWER_MAX)?;
    Ok(outcome)
}
