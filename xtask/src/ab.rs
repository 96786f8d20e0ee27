//! `cargo xtask test ab`: are the statistics of A/B tests what they claim to be?

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::sync::Mutex;
use tally_ab::design::State;
use tally_ab::simulate::accidents::{Accidents, accidents};
use tally_ab::simulate::beside::{self, Besides};
use tally_ab::simulate::models::{self, Model, Row};
use tally_ab::simulate::pooled::{self, PooledRow};
use tally_ab::simulate::traps::{self, Trap};
use tally_ab::simulate::{Noise, Settings, validate as simulate};
use tally_ab::{Metric, Verdict};

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

/// Do all of it on two threads, in order.
fn both<I: Send, O: Send>(items: Vec<I>, work: impl Fn(I) -> O + Sync) -> Vec<O> {
    let left = Mutex::new(items.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
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
    let rows = both(all, |(model, metric, state)| {
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
    let guards = [Some("hp_p99<1.2*A"), Some("hp_p50<1.2*A"), None];
    let all = guards.into_iter().flat_map(|guard| Model::ALL.map(|model| (model, guard)));
    let rows = both(all.collect(), |(model, guard)| {
        let row = accidents(model, guard, GUARDED, SEED);
        eprintln!("{row:?}");
        row
    });
    let failures = rows.iter().filter_map(Accidents::failure).collect();
    (rows, failures)
}

/// Figures beside the one that decides, of all services.
fn besides() -> (Vec<Besides>, Vec<String>) {
    let rows = both(Model::ALL.to_vec(), |model| {
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
    let rows = both(models, |model| {
        let row = pooled::row(model, 8, POOLED, SEED);
        eprintln!("{row:?}");
        row
    });
    let failures = rows.iter().filter_map(PooledRow::failure).collect();
    (rows, failures)
}

/// Verdicts of each trap, by either metric; the first two also with a guard.
fn trapped() -> (Value, Vec<String>) {
    let with_guard = [Trap::ServesNothing, Trap::StallsLongerThanABlock];
    let metrics = [Metric::HpP99, Metric::BeThroughput];
    let mut all: Vec<_> =
        metrics.into_iter().flat_map(|m| Trap::ALL.map(|trap| (trap, m, None))).collect();
    all.extend(with_guard.map(|trap| (trap, Metric::HpP99, Some("hp_p99<50ms"))));
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for (trap, metric, guard) in all {
        let (seeds, tests) = (TRAP_SEEDS.collect(), TRAP_SEEDS.count());
        let verdicts =
            both(seeds, |seed| traps::test(trap, traps::plan(metric, guard, seed)).verdict);
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

/// How long differences take.
fn power() -> (Value, Vec<String>) {
    let cases: Vec<(usize, Metric, f64)> = [1, 8]
        .into_iter()
        .flat_map(|gpus| {
            let p99 = [1.0 / 1.1, 1.1, 1.2].map(|ratio| (gpus, Metric::HpP99, ratio));
            let work = [1.05, 1.1].map(|ratio| (gpus, Metric::BeThroughput, ratio));
            p99.into_iter().chain(work)
        })
        .collect();
    let rows = both(cases, |(gpus, metric, ratio)| {
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

/// Simulate, print as JSON, and fail if a promise is not kept.
pub fn validate(experiments: Option<u32>) -> Result<()> {
    let usual = Settings::default();
    let experiments = experiments.unwrap_or(usual.experiments);
    ensure!(experiments >= 20, "--experiments {experiments}: expected at least 20");
    let with_effect = (experiments * 3 / 10).max(20);
    let settings = Settings { experiments, experiments_with_effect: with_effect, ..usual };
    eprintln!("simulating {} experiments of each of {} kinds", experiments, Noise::ALL.len());
    let validity = simulate(&settings, &Noise::ALL, &RATIOS);
    let (traps, trap_failures) = trapped();
    let (power, power_failures) = power();
    let (services, service_failures) = services(experiments);
    let (guards, guard_failures) = guarded();
    let (besides, beside_failures) = besides();
    let (combined, combined_failures) = combined();
    let all = json!({"blocks": validity, "traps": traps, "power": power, "services": services,
        "guards": guards, "besides": besides, "combined": combined});
    println!("{}", serde_json::to_string_pretty(&all)?);
    crate::build::flush();
    let failures = [validity.failures(), trap_failures, power_failures, service_failures];
    let failures = [failures.concat(), guard_failures, beside_failures, combined_failures].concat();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}
