//! `tpot-first` and `throughput` in the simulator: DetShare's two policies.

use tally_simulator::{Arrivals, Setup, SharingMode, Trace, simulate};

/// What a token takes alone, ms.
const TOKEN_MS: f64 = 4.86;

/// Late tokens and the training's share of its speed alone: a decoder that makes tokens without a pause beside a training.
fn beside(policy: &str, low: &str, factor: f64, sharing: SharingMode) -> (f64, f64) {
    let (high, low) = (Trace::open("llama7b_decode_b1").unwrap(), Trace::open(low).unwrap());
    let tpot_ns = Some((factor * TOKEN_MS * 1e6) as u64);
    let setup = Setup { sharing, tpot_ns, seconds: seconds(), overrun_seconds: 60.0, ..Setup::default() };
    let arrivals = Arrivals::At(vec![0; tokens()]);
    let policy_of = tally_native_policy::by_name(policy, "").unwrap();
    let report = simulate(&setup, &high, Some(&low), &arrivals, Some(policy_of));
    let late = 1.0 - report.high_priority.within.unwrap();
    let share = report.best_effort.as_ref().unwrap().share;
    let (p50, p99) = (report.high_priority.service_p50_ms, report.high_priority.service_p99_ms);
    println!(
        "{sharing:?} {policy}, objective {factor}x: {:.1} % of tokens late, p50 {p50:.2}, p99 {p99:.2} ms; training {share:.3} {:?}",
        late * 100.0, report.decisions
    );
    (late, share)
}

fn seconds() -> f64 { std::env::var("SECS").unwrap().parse().unwrap() }
fn tokens() -> usize { std::env::var("TOKENS").unwrap().parse().unwrap() }
#[test]
fn explore() {
    for low in ["gpt2_12l_train_b8_s1024", "resnet50_train_b128", "whisper_small_train_b16"] {
        println!("{low}");
        for factor in [1.1, 1.25, 1.5, 2.0] {
            for policy in std::env::var("P").unwrap().split(',').map(str::to_owned).collect::<Vec<_>>() {
                beside(&policy, low, factor, SharingMode::Mps);
            }
        }
    }
}
