//! `cargo xtask test ab`: are the statistics of A/B tests what they claim to be? And `cargo xtask test traps`: are
//! policies that harm programs noticed, across processes?

use crate::{ab_record, target_dir};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tally_ab::design::State;
use tally_ab::simulate::accidents::{Accidents, accidents};
use tally_ab::simulate::beside::{self, Besides};
use tally_ab::simulate::models::{self, Model, Row};
use tally_ab::simulate::pooled::{self, PooledRow};
use tally_ab::simulate::traps::{self, Trap};
use tally_ab::simulate::{Noise, Settings, Validity, validate as simulate};
use tally_ab::{Metric, Verdict};
use tally_harness::Artefacts;

/// Effects whose power is asked for: B's p99 over A's.
const RATIOS: [f64; 3] = [1.05, 1.1, 1.2];
/// Seeds of everything but the traps: the rules were calibrated on others.
const SEED: u64 = 2_000_001;
/// Seeds of the tests of each trap: the rules were tuned with 1 to 100.
const TRAP_SEEDS: std::ops::RangeInclusive<u64> = 1_001..=1_100;
/// Tests of each power, on one GPU and on eight.
const TIMES: usize = 100;
const TIMES_EIGHT: usize = 200;
/// Tests of each guard, and of each model on eight GPUs.
const GUARDED: u32 = 100;
const POOLED: u32 = 300;
/// Tests of each service for the figures beside the one that decides.
const BESIDES: u32 = 200;
/// What 10 % of p99, to either side, takes at 50 requests a second in 80 % of tests on one GPU, and
/// on eight.
const MINUTES_MAX: f64 = 12.0;
const MINUTES_MAX_EIGHT: f64 = 1.0;

/// Tests of each trap across processes.
const ACROSS_PROCESSES: u64 = 100;

/// Do all of it, on as many threads as there are CPUs; results in the order of the items.
fn each<I: Send, O: Send>(items: Vec<I>, work: impl Fn(I) -> O + Sync) -> Vec<O> {
    let left = Mutex::new(items.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = left.lock().expect("no thread panicked").next();
                    let Some((at, item)) = next else { return };
                    let result = work(item);
                    done.lock().expect("no thread panicked").push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no thread panicked");
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Whole services, with the state that policies learn frozen; and, for comparison, carried.
fn services(experiments: u32) -> (Vec<Row>, Vec<String>) {
    let mut all = Vec::new();
    for metric in Metric::ALL {
        all.extend(Model::ALL.map(|model| (model, metric, State::Frozen)));
    }
    let carried = [Model::ColdStart, Model::LuckStays, Model::KnowledgeWanders];
    all.extend(carried.map(|model| (model, Metric::HpP99, State::Carry)));
    let rows = each(all, |(model, metric, state)| {
        let row = models::row(model, metric, state, experiments, SEED);
        eprintln!("{row:?}");
        row
    });
    let frozen = rows.iter().filter(|row| row.state == State::Frozen);
    let failures = frozen.filter_map(Row::failure).collect();
    (rows, failures)
}

/// Guards that a B equal to A breaches.
fn guarded() -> (Vec<Accidents>, Vec<String>) {
    let guards = [
        Some("hp_p99<1.2*A"),
        Some("hp_p50<1.2*A"),
        Some("token_p99<1.2*A"),
        Some("be_fairness>0.9"),
        None,
    ];
    let all = guards.into_iter().flat_map(|guard| Model::ALL.map(|model| (model, guard)));
    let rows = each(all.collect(), |(model, guard)| {
        let row = accidents(model, guard, GUARDED, SEED);
        eprintln!("{row:?}");
        row
    });
    let failures = rows.iter().filter_map(Accidents::failure).collect();
    (rows, failures)
}

/// Figures beside the one that decides, of all services.
fn besides() -> (Vec<Besides>, Vec<String>) {
    let rows = each(Model::ALL.to_vec(), |model| {
        let row = beside::row(model, BESIDES, SEED);
        eprintln!("{row:?}");
        row
    });
    let failures = rows.iter().filter_map(Besides::failure).collect();
    (rows, failures)
}

/// Reports of eight GPUs, combined.
fn combined() -> (Vec<PooledRow>, Vec<String>) {
    let models = vec![Model::LoadStates, Model::BurstsInAQueue, Model::ParetoInAQueue];
    let rows = each(models, |model| {
        let row = pooled::row(model, 8, POOLED, SEED);
        eprintln!("{row:?}");
        row
    });
    let failures = rows.iter().filter_map(PooledRow::failure).collect();
    (rows, failures)
}

/// Verdicts of each trap, by either metric; the first two also with a guard, and starvation of one client with the
/// guard that says that it is one.
fn trapped() -> (Value, Vec<String>) {
    let with_guard = [Trap::ServesNothing, Trap::StallsLongerThanABlock];
    let metrics = [Metric::HpP99, Metric::BeThroughput];
    let mut all: Vec<_> =
        metrics.into_iter().flat_map(|m| Trap::ALL.map(|trap| (trap, m, None))).collect();
    all.extend(with_guard.map(|trap| (trap, Metric::HpP99, Some("hp_p99<50ms"))));
    all.push((Trap::StarvesOne, Metric::BeThroughput, Some("be_fairness>0.9")));
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for (trap, metric, guard) in all {
        let (seeds, tests) = (TRAP_SEEDS.collect(), TRAP_SEEDS.count());
        let verdicts =
            each(seeds, |seed| traps::test(trap, traps::plan(metric, guard, seed)).verdict);
        let count = |verdict| verdicts.iter().filter(|v| **v == verdict).count();
        let [keep, withdrawn] = [count(Verdict::KeepA), count(Verdict::Withdrawn)];
        let name = format!("{trap:?}");
        eprintln!(
            "{name} on {metric}, guard {guard:?}: keep A {keep}, withdrawn {withdrawn} of {tests}"
        );
        if keep + withdrawn != tests {
            failures.push(format!(
                "{name} on {metric}: {keep} kept A and {withdrawn} withdrew B of {tests}"
            ));
        }
        rows.push(json!({"trap": name, "metric": metric, "guard": guard, "keep_a": keep, "withdrawn": withdrawn}));
    }
    (rows.into(), failures)
}

/// How long tests take to find a difference.
fn power() -> (Value, Vec<String>) {
    let cases: Vec<(usize, Metric, f64)> = [1, 8]
        .into_iter()
        .flat_map(|gpus| {
            let p99 = [1.0 / 1.1, 1.1, 1.2].map(|ratio| (gpus, Metric::HpP99, ratio));
            let work = [1.05, 1.1].map(|ratio| (gpus, Metric::BeThroughput, ratio));
            p99.into_iter().chain(work)
        })
        .collect();
    let rows = each(cases, |(gpus, metric, ratio)| {
        let row = match gpus {
            1 => models::times(metric, ratio, TIMES, SEED),
            _ => pooled::times(gpus, metric, ratio, TIMES_EIGHT, SEED),
        };
        eprintln!("{row:?}");
        row
    });
    let mut failures = Vec::new();
    let tenth = |row: &&models::Times| [1.0 / 1.1, 1.1].contains(&row.ratio);
    for row in rows.iter().filter(|row| row.metric == Metric::HpP99).filter(tenth) {
        let most = if row.gpus == 1 { MINUTES_MAX } else { MINUTES_MAX_EIGHT };
        if row.of_80_percent_min.is_none_or(|minutes| minutes > most) {
            failures.push(format!("{row:?}: expected at most {most} minutes"));
        }
    }
    (json!(rows), failures)
}

/// Blocks alone, in six kinds of noise.
fn blocks(settings: &Settings) -> Validity {
    let parts = each(Noise::ALL.to_vec(), |noise| simulate(settings, &[noise], &RATIOS));
    let mut all = simulate(settings, &[], &RATIOS);
    for part in parts {
        all.false_positives.extend(part.false_positives);
        all.power.extend(part.power);
    }
    all
}

/// The file that gets the figures, if any: the committed record gets those of whole runs that found nothing wrong.
fn file_for(out: Option<&Path>, is_whole: bool, failures: &[String]) -> Option<PathBuf> {
    let committed = || (is_whole && failures.is_empty()).then(ab_record::path);
    out.map(Path::to_path_buf).or_else(committed)
}

/// Prints the figures, keeps them, and fails if something is wrong.
fn conclude(part: &str, figures: Value, to: Option<PathBuf>, failures: &[String]) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(&figures)?);
    if let Some(path) = to {
        ab_record::keep(&path, part, figures)?;
    }
    crate::build::flush();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Simulate, print as JSON, and fail if a promise is not kept.
pub fn validate(experiments: Option<u32>, out: Option<&Path>) -> Result<()> {
    let usual = Settings::default();
    let is_whole = experiments.is_none_or(|experiments| experiments >= usual.experiments);
    let experiments = experiments.unwrap_or(usual.experiments);
    ensure!(experiments >= 20, "--experiments {experiments}: expected at least 20");
    file_for(out, is_whole, &[]).map_or(Ok(()), |path| ab_record::check_folder(&path))?;
    let with_effect = (experiments * 3 / 10).max(20);
    let settings = Settings { experiments, experiments_with_effect: with_effect, ..usual };
    eprintln!("simulating {} experiments of each of {} kinds", experiments, Noise::ALL.len());
    let validity = blocks(&settings);
    let (traps, trap_failures) = trapped();
    let (power, power_failures) = power();
    let (services, service_failures) = services(experiments);
    let (guards, guard_failures) = guarded();
    let (besides, beside_failures) = besides();
    let (combined, combined_failures) = combined();
    let all = json!({"blocks": validity, "traps": traps, "power": power, "services": services,
        "guards": guards, "besides": besides, "combined": combined});
    let failures = [validity.failures(), trap_failures, power_failures, service_failures];
    let failures = [failures.concat(), guard_failures, beside_failures, combined_failures].concat();
    conclude("simulated", all, file_for(out, is_whole, &failures), &failures)
}

/// Each trap so many times across processes on the software device; fails unless all end as *keep A* or *withdrawn*.
pub fn trapped_across_processes(count: Option<u64>, out: Option<&Path>) -> Result<()> {
    let is_whole = count.is_none_or(|count| count >= ACROSS_PROCESSES);
    let count = count.unwrap_or(ACROSS_PROCESSES);
    file_for(out, is_whole, &[]).map_or(Ok(()), |path| ab_record::check_folder(&path))?;
    let artefacts = Artefacts::at(target_dir().join("release"));
    let ended = tally_harness::traps::run(&artefacts, count, |tests| {
        if tests.is_multiple_of(20) {
            eprintln!("{tests} tests have ended");
        }
    });
    let failures: Vec<String> = ended.iter().flat_map(|row| row.others.clone()).collect();
    let rows: Vec<Value> = ended.iter().map(tally_harness::traps::Ended::json).collect();
    let to = file_for(out, is_whole, &failures);
    conclude("processes", json!({"traps": rows}), to, &failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_done_in_order_on_any_number_of_threads() {
        let items: Vec<u64> = (0..100).collect();
        let squares: Vec<u64> = items.iter().map(|n| n * n).collect();
        assert_eq!(each(items, |n| n * n), squares);
    }

    #[test]
    fn the_committed_record_gets_whole_runs_without_failures() {
        let failures = ["it failed".to_owned()];
        assert_eq!(file_for(None, true, &[]), Some(ab_record::path()));
        assert_eq!([file_for(None, false, &[]), file_for(None, true, &failures)], [None, None]);
        let named = Some(Path::new("x.json"));
        assert_eq!(file_for(named, false, &failures), named.map(Path::to_path_buf));
    }

    #[test]
    fn kinds_of_noise_are_simulated_as_in_one_run() {
        let usual = Settings::default();
        let settings = Settings { experiments: 4, experiments_with_effect: 4, pairs: 10, ..usual };
        let (parts, whole) = (blocks(&settings), simulate(&settings, &Noise::ALL, &RATIOS));
        assert_eq!(json!(parts), json!(whole));
    }
}
