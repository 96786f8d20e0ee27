//! What A/B tests say of policies that harm programs, and what follows: across processes, on the
//! software device.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tally_harness::Artefacts;
use tally_harness::jobs::JOB_MAX;
use tally_harness::process::wait_until;
use tally_harness::traps::{KEEP_A, PROMOTE_B, Scenario, Served, Trap, WITHDRAWN, configured};

/// The code that `tallyctl` ends with must be one of these. `cargo xtask test traps` does this many times.
fn trapped(trap: &Trap, expected: &[i32]) -> Result<()> {
    let (code, said) = trap.test(&Artefacts::locate()?, 7)?;
    ensure!(code.is_some_and(|code| expected.contains(&code)), "{trap:?}: {code:?}\n{said}");
    Ok(())
}

#[test]
fn a_policy_that_serves_nothing_is_not_kept() -> Result<()> {
    trapped(&Trap::ALL[0], &[KEEP_A])
}

#[test]
fn a_policy_that_serves_nothing_is_withdrawn_by_a_guard() -> Result<()> {
    trapped(&Trap::ALL[1], &[WITHDRAWN])
}

#[test]
fn a_policy_that_stalls_for_the_rest_of_its_block_is_not_kept() -> Result<()> {
    trapped(&Trap::ALL[2], &[KEEP_A])
}

#[test]
fn a_policy_that_stalls_for_the_rest_of_its_block_does_not_pass_a_guard() -> Result<()> {
    // A guard takes two late requests for a breach: the requests served may tell first (1 of 100).
    trapped(&Trap::ALL[3], &[WITHDRAWN, KEEP_A])
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
    wait_until("waiting for the training to be preempted", JOB_MAX, || {
        let clients = served.scene.status()?.clients()?;
        let is_preempted =
            clients.iter().any(|c| c.0["transformed"]["launches_yielded"].as_u64() > Some(0));
        Ok(is_preempted.then_some(()))
    })?;
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
