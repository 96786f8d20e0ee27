//! Scenarios and pairs of images: processes that check their own values.

use super::Plan;
use super::report::{Finding, Row};
use super::setups::Setup;
use anyhow::Result;
use std::process::Command;
use std::time::{Duration, Instant};
use tally_harness::{Class, Process, Scene};

/// Pairs of one process: a client's table of kernels has 4 096 entries, and those behind have no forms.
const PAIRS_OF_PROCESS: u64 = 1_000;
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
    setup.is_test_policy && setup.class == Class::BestEffort && setup.name != "sm-limited"
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
    let mut begun = 0;
    while begun < share && Instant::now() < plan.until {
        let count = (share - begun).min(PAIRS_OF_PROCESS);
        let left = plan.until.saturating_duration_since(Instant::now());
        let mut command = scene.program("tally-litmus")?;
        command.arg("pairs").arg(format!("--pairs={count}"));
        command.arg(format!("--seed={}", plan.seed + share * mine as u64 + begun));
        command.arg(format!("--minutes={}", left.as_secs_f64() / 60.0));
        // Kernels that may wait are none of these; loaded eagerly, as most programs here.
        command.env("CUDA_MODULE_LOADING", "EAGER");
        let mut process = scene.start("pairs", govern(command)?)?;
        let outcome = judge(&mut process, left + START);
        row.count_mechanisms(scene, &[process.pid()]);
        begun += count;
        match outcome {
            Ok(said) => {
                row.pairs += said.done;
                row.pairs_wrong += said.wrong;
                row.pairs_transformed += said.transformed;
                if said.wrong > 0 {
                    row.findings.push(Finding::of_pairs(said.first));
                }
            }
            Err(why) => {
                row.findings.push(Finding::of_pairs(format!("{why:#}")));
                break;
            }
        }
    }
    row.expect_transformed_pairs();
    Ok(())
}

/// What a process says of its pairs.
struct Said {
    done: u64,
    wrong: u64,
    transformed: u64,
    first: String,
}

fn judge(process: &mut Process, limit: Duration) -> Result<Said> {
    process.wait(limit)?;
    let out = process.stdout()?;
    let last = out.lines().last().unwrap_or_default();
    let said: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
    let number = |name: &str| said[name].as_u64();
    match (number("pairs"), number("wrong"), number("transformed")) {
        (Some(done), Some(wrong), Some(transformed)) => {
            Ok(Said { done, wrong, transformed, first: said["first"].to_string() })
        }
        _ => anyhow::bail!("it did not say how it went\n{}", process.quote()),
    }
}
