//! Scenarios and pairs of images: processes that check their own values.

use super::Plan;
use super::report::{Finding, Row};
use super::setups::Setup;
use anyhow::Result;
use std::process::Command;
use std::time::{Duration, Instant};
use tally_harness::{Class, Process, Scene};

/// What a process may take besides what it is for.
const START: Duration = Duration::from_secs(40);

type Govern<'a> = dyn Fn(Command) -> Result<Command> + 'a;

/// Runs each scenario in a process of its own.
///
/// # Errors
/// If one cannot be started.
pub fn scenarios(plan: &Plan, scene: &Scene, govern: &Govern<'_>, row: &mut Row) -> Result<()> {
    for name in crate::scenarios::ALL {
        let mut command = scene.program("tally-litmus")?;
        command.args(["scenario", name]);
        let mut process = scene.start("scenario", govern(command)?)?;
        let ended = process.wait(Duration::from_secs_f64(plan.limit_s) + START);
        let pid = process.pid();
        let (kind, what) = match ended {
            Ok(status) if status.success() => {
                row.ended += 1;
                row.count_mechanisms(scene, &[pid]);
                continue;
            }
            Ok(status) => {
                row.failed += 1;
                ("failure", format!("{status}: {}", process.stderr()?.trim()))
            }
            Err(_) => {
                row.hangs += 1;
                ("hang", "it had not ended".into())
            }
        };
        row.findings.push(Finding { program: name.into(), kind, what, text: String::new() });
    }
    Ok(())
}

/// Whether pairs of images run under a setup: where all launches that can be are transformed.
fn takes_pairs(setup: &Setup) -> bool {
    setup.is_test_policy && setup.class == Class::BestEffort && setup.name != "narrow"
}

/// This setup's share of the pairs.
///
/// # Errors
/// If the process cannot be started.
pub fn pairs(
    plan: &Plan,
    at: usize,
    scene: &Scene,
    govern: &Govern<'_>,
    row: &mut Row,
) -> Result<()> {
    let taking: Vec<usize> =
        (0..plan.setups.len()).filter(|&i| takes_pairs(&plan.setups[i])).collect();
    let Some(mine) = taking.iter().position(|&i| i == at).filter(|_| plan.pairs > 0) else {
        return Ok(());
    };
    let share = plan.pairs.div_ceil(taking.len() as u64);
    let left = plan.until.saturating_duration_since(Instant::now());
    let mut command = scene.program("tally-litmus")?;
    command.arg("pairs").arg(format!("--pairs={share}"));
    command.arg(format!("--seed={}", plan.seed + share * mine as u64));
    command.arg(format!("--minutes={}", left.as_secs_f64() / 60.0));
    // Kernels that may wait are none of these; loaded eagerly, as most programs here.
    command.env("CUDA_MODULE_LOADING", "EAGER");
    let mut process = scene.start("pairs", govern(command)?)?;
    let outcome = judge(&mut process, left + START);
    match outcome {
        Ok((done, wrong, first)) => {
            row.pairs += done;
            row.pairs_wrong += wrong;
            if wrong > 0 {
                row.findings.push(Finding::of_pairs(first));
            }
        }
        Err(why) => row.findings.push(Finding::of_pairs(format!("{why:#}"))),
    }
    row.count_mechanisms(scene, &[process.pid()]);
    Ok(())
}

fn judge(process: &mut Process, limit: Duration) -> Result<(u64, u64, String)> {
    process.wait(limit)?;
    let out = process.stdout()?;
    let last = out.lines().last().unwrap_or_default();
    let said: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
    match (said["pairs"].as_u64(), said["wrong"].as_u64()) {
        (Some(done), Some(wrong)) => Ok((done, wrong, said["first"].to_string())),
        _ => anyhow::bail!("it did not say how it went\n{}", process.quote()),
    }
}
