//! What A/B tests say of policies that harm programs, and what follows: across processes, on the
//! software device. B holds launches for as long as it is active, or A for much longer than
//! anything takes, so that a busy machine changes no verdict.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitStatus;
use tally_harness::jobs::{self, JOB_MAX};
use tally_harness::process::Process;
use tally_harness::{Artefacts, Class, Device, Scene};

/// More than a test sees.
const REQUESTS: u64 = 1_000_000;
/// `tallyctl ab start --wait` says that B was promoted, A is to be kept, or B was withdrawn.
const PROMOTE_B: i32 = 0;
const KEEP_A: i32 = 3;
const WITHDRAWN: i32 = 5;

/// The active policy, and the program that it serves.
enum Scenario<'a> {
    /// A server under `fifo`.
    Server,
    /// A training under this test policy, configured so.
    Training(&'a str, &'a str),
}

/// A program under a core that grants policies a say over high-priority launches.
struct Served {
    scene: Scene,
    core: Process,
    program: Process,
}

impl Served {
    fn start(artefacts: &Artefacts, scenario: &Scenario) -> Result<Self> {
        let scene = Scene::new(artefacts, Device::software())?;
        let config = scene.dir().join("core.toml");
        std::fs::write(&config, "[policy]\ncapabilities = [\"high-priority\"]\n")?;
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
        tally_harness::process::wait_until("waiting for the program to launch", JOB_MAX, || {
            Ok(scene.status()?.clients()?.iter().any(|c| c.launches() > 0).then_some(()))
        })?;
        Ok(Served { scene, core, program })
    }

    /// A test of this policy against the active one, and how `tallyctl` ended.
    fn test(&self, b: &str, more: &[&str]) -> Result<(ExitStatus, String)> {
        let mut command = self.scene.program("tallyctl")?;
        command.args(["ab", "start", b, "--seed=7", "--wait"]);
        command.args(["--block=400ms", "--washout=40ms", "--max-time=60s"]).args(more);
        let mut call = self.scene.start("ab", command)?;
        let status = call.wait(JOB_MAX)?;
        Ok((status, format!("{}{}", call.stdout()?, call.stderr()?)))
    }

    fn report(&self) -> Result<Value> {
        let output = self.scene.ctl(&["ab", "report", "--json"])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn stop(mut self) -> Result<()> {
        self.program.kill()?;
        self.scene.stop(&mut self.core, JOB_MAX)
    }
}

/// A file with a configuration of a test policy.
fn configured(scene: &Scene, policy: &str, how: &str) -> Result<PathBuf> {
    let file = scene.dir().join(format!("{policy}.conf"));
    std::fs::write(&file, how)?;
    Ok(file)
}

/// Tests `stalls` against `fifo`: the code that `tallyctl` ended with must be this one, and `fifo`
/// serve after it.
fn trapped(how: &str, guard: Option<&str>, expected: i32) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let served = Served::start(&artefacts, &Scenario::Server)?;
    let config = format!("--config-b={}", configured(&served.scene, "stalls", how)?.display());
    let guard = guard.map(|guard| format!("--guard={guard}"));
    let more: Vec<&str> =
        guard.iter().map(String::as_str).chain([&*config, "--metric=hp_p99"]).collect();
    let stalls = artefacts.test_policy("stalls")?;
    let (status, said) = served.test(&stalls.to_string_lossy(), &more)?;
    ensure!(status.code() == Some(expected), "{how}, guard {guard:?}: {status}\n{said}");
    let launches = || -> Result<u64> {
        let clients = served.scene.status()?.clients()?;
        Ok(clients.first().context("the program is gone")?.launches())
    };
    ensure!(served.scene.status()?.policy_name() == "fifo", "A serves after the test");
    let before = launches()?;
    tally_harness::process::wait_until("waiting for A to serve", JOB_MAX, || {
        Ok((launches()? > before).then_some(()))
    })?;
    served.stop()
}

#[test]
fn a_policy_that_serves_nothing_is_not_kept() -> Result<()> {
    trapped("nothing", None, KEEP_A)
}

#[test]
fn a_policy_that_serves_nothing_is_withdrawn_by_a_guard() -> Result<()> {
    trapped("nothing", Some("hp_p99<300ms"), WITHDRAWN)
}

#[test]
fn a_policy_that_stalls_for_the_rest_of_its_block_is_not_kept() -> Result<()> {
    trapped("block", None, KEEP_A)
}

#[test]
fn a_policy_that_stalls_for_the_rest_of_its_block_is_withdrawn_by_a_guard() -> Result<()> {
    // No block of 400 ms has room for a whole fifth of a second before and 100 ms of stall.
    trapped("block", Some("hp_p99<60ms"), WITHDRAWN)
}

/// A holds each launch of a training for 20 ms. The hook sees the beginning, and the end with its verdict.
#[test]
fn a_better_policy_is_promoted_when_asked_for_and_hooks_are_told() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let served = Served::start(&artefacts, &Scenario::Training("stalls", "slow 20"))?;
    let fifo = artefacts.policy("fifo")?.to_string_lossy().into_owned();
    let dir = served.scene.dir().to_path_buf();

    // One that fails at the beginning prevents the test.
    let (status, said) = served.test(&fifo, &["--metric=be_throughput", "--hook=exit 3"])?;
    ensure!(!status.success() && said.contains("hook"), "{status}\n{said}");
    ensure!(served.report().is_err(), "a test was begun");
    ensure!(served.scene.status()?.policy_name() == "stalls", "A serves");

    let (said_file, report_file) = (dir.join("hook.txt"), dir.join("hook.json"));
    let hook = format!(
        "echo \"$TALLY_AB_EVENT:$TALLY_AB_VERDICT\" >>'{}'; cat >'{}'",
        said_file.display(),
        report_file.display()
    );
    let hook = format!("--hook={hook}");
    let more = ["--metric=be_throughput", "--promote", &*hook];
    let (status, said) = served.test(&fifo, &more)?;
    ensure!(status.code() == Some(PROMOTE_B), "{status}\n{said}");
    let report = served.report()?;
    ensure!(report["promoted"] == true && report["verdict"] == "promote_b", "{report:#}");
    ensure!(said.contains("B was promoted"), "{said}");
    ensure!(served.scene.status()?.policy_name() == "fifo", "B stays active");
    ensure!(std::fs::read_to_string(&said_file)? == "begin:\nend:promote B\n", "{said}");
    let of_hook: Value = serde_json::from_slice(&std::fs::read(&report_file)?)?;
    ensure!(of_hook["verdict"] == "promote_b" && of_hook["promoted"] == true, "{of_hook:#}");
    served.stop()
}

/// The same B without being asked for.
#[test]
fn a_better_policy_is_not_promoted_unless_asked_for() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let served = Served::start(&artefacts, &Scenario::Training("stalls", "slow 20"))?;
    let fifo = artefacts.policy("fifo")?.to_string_lossy().into_owned();
    let (status, said) = served.test(&fifo, &["--metric=be_throughput"])?;
    ensure!(status.code() == Some(PROMOTE_B), "{status}\n{said}");
    ensure!(served.report()?["promoted"] == false, "{said}");
    ensure!(served.scene.status()?.policy_name() == "stalls", "A serves after the test");
    served.stop()
}

/// A preempts launches at random and holds none; B holds each for 20 ms and preempts none.
#[test]
fn what_best_effort_waits_and_how_often_it_is_preempted_is_told_of_each_arm() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let preempts = Scenario::Training("random-forms", "form = 0\ntoggle_us = 3000\nseed = 7\n");
    let served = Served::start(&artefacts, &preempts)?;
    let stalls = artefacts.test_policy("stalls")?.to_string_lossy().into_owned();
    let config = configured(&served.scene, "stalls", "slow 20")?;
    let config = format!("--config-b={}", config.display());
    let (status, said) = served.test(&stalls, &["--metric=be_throughput", &config])?;
    ensure!(status.code() == Some(KEEP_A), "{status}\n{said}");
    let report = served.report()?;
    let blocks = report["blocks"].as_array().context("the report lists no blocks")?;
    let sum = |arm: &str, what: &str| -> u64 {
        blocks.iter().filter(|b| b["arm"] == arm).filter_map(|b| b[what].as_u64()).sum()
    };
    let waited_ns = ["A", "B"].map(|arm| sum(arm, "be_waited_ns"));
    ensure!(waited_ns[1] > 20_000_000 && waited_ns[1] > waited_ns[0], "{waited_ns:?} {blocks:#?}");
    let preemptions = ["A", "B"].map(|arm| sum(arm, "preemptions"));
    ensure!(preemptions[0] > 0 && preemptions[1] == 0, "{preemptions:?} {blocks:#?}");
    let rates = report["rates"].as_array().context("the report lists no rates")?;
    ensure!(rates.len() == 2, "{rates:#?}");
    for (rate, name) in rates.iter().zip(["be_waited", "preemptions"]) {
        let [a, b] = ["a", "b"].map(|arm| rate[arm].as_f64().unwrap_or_default());
        let (most, least) = if name == "be_waited" { (b, a) } else { (a, b) };
        ensure!(rate["name"] == name && most > least && most > 0.0, "{rate:#}");
        ensure!(said.contains(name), "{said}");
    }
    served.stop()
}
