//! A/B tests of policies that harm programs, across real processes on the software device. B holds launches for as
//! long as it is active, or A for much longer than anything takes, so that a busy machine changes no verdict.

use crate::jobs::{self, JOB_MAX};
use crate::process::{Process, wait_until};
use crate::{Artefacts, Class, Device, Scene};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Mutex;

/// More than a test sees.
const REQUESTS: u64 = 1_000_000;
/// `tallyctl ab start --wait` says that B was promoted, A is to be kept, or B was withdrawn.
pub const PROMOTE_B: i32 = 0;
pub const KEEP_A: i32 = 3;
pub const WITHDRAWN: i32 = 5;
/// Tests at a time. They wait most of the time.
const AT_A_TIME: usize = 4;

/// The active policy, and the program that it serves.
#[derive(Clone, Copy, Debug)]
pub enum Scenario<'a> {
    /// A server under `fifo`.
    Server,
    /// A training under this test policy, configured so.
    Training(&'a str, &'a str),
}

/// A program under a core that grants policies a say over high-priority launches.
pub struct Served {
    pub scene: Scene,
    core: Process,
    program: Process,
}

impl Served {
    /// Starts both; returns once the program launches.
    ///
    /// # Errors
    /// If something was not built, or does not start.
    pub fn start(artefacts: &Artefacts, scenario: &Scenario) -> Result<Self> {
        let scene = Scene::new(artefacts, Device::software())?;
        let config = scene.dir().join("core.toml");
        // On a busy machine a policy that waits for the CPU must not end a test.
        let text = "[policy]\ncapabilities = [\"high-priority\"]\n[policy.limits]\ncall_cpu_ms_max = 2000\n";
        std::fs::write(&config, text)?;
        let mut arguments = vec!["--config".to_owned(), config.to_string_lossy().into_owned()];
        let mut policy = artefacts.policy("fifo")?;
        if let Scenario::Training(name, how) = scenario {
            policy = artefacts.test_policy(name)?;
            let file = configured(&scene, name, how)?;
            arguments.extend(["--policy-config".into(), file.to_string_lossy().into_owned()]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let core = scene.core(&policy, &arguments)?;
        let (class, command) = match scenario {
            Scenario::Server => (Class::High, jobs::inference(&scene, REQUESTS)?),
            Scenario::Training(..) => (Class::BestEffort, jobs::training(&scene, REQUESTS)?),
        };
        let program = scene.start("program", scene.governed(class, "program", &command)?)?;
        wait_until("waiting for the program to launch", JOB_MAX, || {
            Ok(scene.status()?.clients()?.iter().any(|c| c.launches() > 0).then_some(()))
        })?;
        Ok(Served { scene, core, program })
    }

    /// A test of this policy against the active one: how `tallyctl` ended, and what it said.
    ///
    /// # Errors
    /// If it does not end.
    pub fn test(&self, b: &str, more: &[&str]) -> Result<(ExitStatus, String)> {
        let mut command = self.scene.program("tallyctl")?;
        command.args(["ab", "start", b, "--wait"]);
        if !more.iter().any(|option| option.starts_with("--seed")) {
            command.arg("--seed=7");
        }
        command.args(["--block=400ms", "--washout=40ms", "--max-time=60s"]).args(more);
        let mut call = self.scene.start("ab", command)?;
        let status = call.wait(JOB_MAX)?;
        Ok((status, format!("{}{}", call.stdout()?, call.stderr()?)))
    }

    /// # Errors
    /// If there is none.
    pub fn report(&self) -> Result<Value> {
        let output = self.scene.ctl(&["ab", "report", "--json"])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// # Errors
    /// If the core does not end.
    pub fn stop(mut self) -> Result<()> {
        self.program.kill()?;
        self.scene.stop(&mut self.core, JOB_MAX)
    }
}

/// A file with a configuration of a test policy.
///
/// # Errors
/// If it cannot be written.
pub fn configured(scene: &Scene, policy: &str, how: &str) -> Result<PathBuf> {
    let file = scene.dir().join(format!("{policy}.conf"));
    std::fs::write(&file, how)?;
    Ok(file)
}

/// What B does to the server, and whether a guard watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    pub name: &'static str,
    /// Configuration of the test policy `stalls`.
    how: &'static str,
    pub guard: Option<&'static str>,
}

impl Trap {
    /// No block of 400 ms has room for a whole fifth of a second before and 100 ms of stall: hence 60 ms.
    pub const ALL: [Trap; 4] = [
        Trap { name: "serves nothing", how: "nothing", guard: None },
        Trap { name: "serves nothing", how: "nothing", guard: Some("hp_p99<300ms") },
        Trap { name: "holds until its block ends", how: "block", guard: None },
        Trap { name: "holds until its block ends", how: "block", guard: Some("hp_p99<60ms") },
    ];

    /// One test of it against `fifo`, whose seed orders the arms: the exit code of `tallyctl`, and what it said. `fifo`
    /// must serve afterwards.
    ///
    /// # Errors
    /// If it does not, or something does not start or end.
    pub fn test(&self, artefacts: &Artefacts, seed: u64) -> Result<(Option<i32>, String)> {
        let served = Served::start(artefacts, &Scenario::Server)?;
        let config =
            format!("--config-b={}", configured(&served.scene, "stalls", self.how)?.display());
        let guard = self.guard.map(|guard| format!("--guard={guard}"));
        let seed = format!("--seed={seed}");
        let options = [&*config, "--metric=hp_p99", &*seed];
        let more: Vec<&str> = guard.iter().map(String::as_str).chain(options).collect();
        let stalls = artefacts.test_policy("stalls")?;
        let (status, said) = served.test(&stalls.to_string_lossy(), &more)?;
        let launches = || -> Result<u64> {
            let clients = served.scene.status()?.clients()?;
            Ok(clients.first().context("the program is gone")?.launches())
        };
        ensure!(served.scene.status()?.policy_name() == "fifo", "A serves after the test\n{said}");
        let before = launches()?;
        wait_until("waiting for A to serve", JOB_MAX, || Ok((launches()? > before).then_some(())))?;
        served.stop()?;
        Ok((status.code(), said))
    }
}

/// How the tests of one trap ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub trap: Trap,
    pub keep_a: u64,
    pub withdrawn: u64,
    /// What was said in each of the others.
    pub others: Vec<String>,
}

impl Ended {
    pub fn json(&self) -> Value {
        json!({
            "trap": self.trap.name, "guard": self.trap.guard, "keep_a": self.keep_a,
            "withdrawn": self.withdrawn, "others": self.others.len(),
        })
    }

    fn note(&mut self, ended: Result<(Option<i32>, String)>) {
        match ended {
            Ok((Some(KEEP_A), _)) => self.keep_a += 1,
            Ok((Some(WITHDRAWN), _)) => self.withdrawn += 1,
            Ok((code, said)) => {
                self.others.push(format!("{:?}: exit code {code:?}\n{said}", self.trap))
            }
            Err(error) => self.others.push(format!("{:?}: {error:#}", self.trap)),
        }
    }
}

/// Each trap so many times, some at a time. `told` gets how many tests have ended.
pub fn run(artefacts: &Artefacts, count: u64, told: impl Fn(u64) + Sync) -> Vec<Ended> {
    let begin = |trap| Ended { trap, keep_a: 0, withdrawn: 0, others: Vec::new() };
    let all =
        Mutex::new((0..count).flat_map(|seed| (0..Trap::ALL.len()).map(move |at| (seed, at))));
    let ended = Mutex::new(Trap::ALL.map(begin));
    let next = || all.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((seed, at)) = next() {
                    let one = Trap::ALL[at].test(artefacts, seed);
                    let mut ended = ended.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    ended[at].note(one);
                    let sum = |e: &Ended| e.keep_a + e.withdrawn + e.others.len() as u64;
                    told(ended.iter().map(sum).sum());
                }
            });
        }
    });
    ended.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keep_a_and_withdrawn_count_as_noticed() {
        let mut ended = Ended { trap: Trap::ALL[1], keep_a: 0, withdrawn: 0, others: Vec::new() };
        for code in [Some(KEEP_A), Some(WITHDRAWN), Some(WITHDRAWN), Some(PROMOTE_B), None] {
            ended.note(Ok((code, "said".into())));
        }
        ended.note(Err(anyhow::anyhow!("it hung")));
        assert_eq!((ended.keep_a, ended.withdrawn, ended.others.len()), (1, 2, 3));
        assert!(ended.others[0].contains("serves nothing") && ended.others[2].contains("it hung"));
        assert_eq!(ended.json()["others"], 3);
    }
}
