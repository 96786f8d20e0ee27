//! The constants that the text of the contract and the SDKs for other languages state are this crate's.

use std::path::Path;
use tally_contract::limits::{self as l, Limit, grouped};
use tally_contract::policy;

/// A limit as people are shown it.
fn shown(name: &str) -> String {
    let all = l::GROUPS.iter().flat_map(|group| group.limits);
    all.into_iter().find(|limit| limit.name == name).map(Limit::to_string).unwrap()
}

/// The contract's comments as one line.
fn contract() -> String {
    let lines = tally_contract::TEXT.lines().map(|line| line.trim().trim_start_matches('/').trim());
    lines.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_contract_states_the_limits() {
    let text = contract();
    let count = |n: u64| grouped(n);
    for phrase in [
        format!("One call may use {}", shown("DECIDE_FUEL")),
        format!("and {} of CPU time;", shown("CALL_CPU_MS")),
        format!("`init` may use {} million units", l::INIT_FUEL / 1_000_000),
        format!("it has {} million units of fuel", l::SNAPSHOT_FUEL / 1_000_000),
        format!("Linear memory is limited to {}", shown("MEMORY_BYTES")),
        format!("At most {}. Client and kernel ids", shown("SAVED_BYTES_MAX")),
        format!("all kernels beyond the {} that", count(l::KERNELS_MAX as u64)),
        format!("| RECENT-SAMPLES | {} |", l::RECENT_SAMPLES),
        format!("| RECENT-UNITS | {} |", l::RECENT_UNITS),
        format!("Median of the latest {} times", l::TURNAROUND_SAMPLES),
        format!("median of the kernel's latest {} launches", l::PREDICTION_SAMPLES),
        format!("a launch weighs at least 1/{}.", l::MEAN_WINDOW),
        format!("has run in, at most {}.", l::FORMS_MAX),
        format!("the label `weight` (1 to {})", count(l::WEIGHT_MAX.into())),
        format!("a number below {} that is given again", l::STREAM_SLOTS),
        format!("once its stream is gone. {} is shared", l::STREAM_SLOTS - 1),
        format!("(at most `engine.hold_ms_max`, {} by default)", shown("HOLD_NS_MAX")),
        format!("(more than {} blocks,", count(l::WHOLE_GRID_BLOCKS_MAX.into())),
        format!("(2 to {} slices)", l::LAUNCH_PARTS_MAX),
        format!("At most {} lines a second;", l::LOG_LINES_PER_S),
        format!("At most {} counters and gauges", l::METRICS_MAX),
        format!("1 to 255, in at most {} bytes", l::REASON_BYTES_MAX),
        format!("At most {} timers are pending", l::TIMERS_MAX),
        format!("of a call at most {} requests", l::COMMANDS_MAX),
    ] {
        assert!(text.contains(&phrase), "wit/policy.wit does not say {phrase:?}");
    }
    assert_eq!((l::STALL_NS, l::FAULTS_MAX), (1_000_000_000, 3), "in words in wit/policy.wit");
    assert!(text.contains("for a second while the GPU has nothing to do"));
    assert!(text.contains("After three faults the policy is disabled"));
}

#[test]
fn the_rust_sdk_has_the_same_constants() {
    assert_eq!(tally_sdk::NEVER, policy::NEVER);
    assert_eq!(tally_sdk::NO_KERNEL, policy::NO_KERNEL);
    assert_eq!(tally_sdk::HOLD_UNTIL_CHANGE, policy::HOLD_UNTIL_CHANGE);
    assert_eq!(tally_sdk::WINDOW_OPEN, policy::WINDOW_OPEN);
    assert_eq!(tally_sdk::RECENT_SAMPLES, l::RECENT_SAMPLES);
    assert_eq!(tally_sdk::RECENT_UNITS, l::RECENT_UNITS);
    assert_eq!(tally_sdk::NO_UNIT_OPEN, policy::NO_UNIT_OPEN);
    assert_eq!(tally_sdk::SAVED_BYTES_MAX, l::SAVED_BYTES_MAX);
}

#[test]
fn the_other_sdks_have_the_same_constants() {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk");
    let (recent, units) = (l::RECENT_SAMPLES, l::RECENT_UNITS);
    assert_eq!(policy::NO_UNIT_OPEN, i64::MAX, "likewise");
    let (u64_max, u32_max) = (policy::NEVER, policy::NO_KERNEL);
    assert_eq!((u64_max, u32_max), (u64::MAX, u32::MAX), "the SDKs write them as powers of two");
    assert_eq!((policy::HOLD_UNTIL_CHANGE, policy::WINDOW_OPEN), (u64::MAX, u64::MAX));
    // Numbers of JavaScript are exact up to there; the core shortens such a hold as it does the longest.
    const { assert!(l::HOLD_NS_MAX_LARGEST < (1 << 53) - 1) }
    let c = "#define TALLY_";
    let js = "export const ";
    for (file, lines) in [
        (
            "c/sdk/tally_sdk.h",
            vec![
                format!("{c}NEVER UINT64_MAX\n"),
                format!("{c}NO_KERNEL UINT32_MAX\n"),
                format!("{c}HOLD_UNTIL_CHANGE UINT64_MAX\n"),
                format!("{c}WINDOW_OPEN UINT64_MAX\n"),
                format!("{c}RECENT_SAMPLES {recent}\n"),
                format!("{c}RECENT_UNITS {units}\n"),
                format!("{c}NO_UNIT_OPEN INT64_MAX\n"),
            ],
        ),
        (
            "js/template/tally_sdk.js",
            vec![
                format!("{js}NEVER = 2 ** 64;\n"),
                format!("{js}NO_KERNEL = 0xffff_ffff;\n"),
                format!("{js}HOLD_UNTIL_CHANGE = 2 ** 53 - 1;\n"),
                format!("{js}RECENT_SAMPLES = {recent};\n"),
                format!("{js}RECENT_UNITS = {units};\n"),
                format!("{js}NO_UNIT_OPEN = 2 ** 63;\n"),
            ],
        ),
        (
            "python/template/tally_sdk.py",
            vec![
                "\nNEVER = 2**64 - 1 ".into(),
                "\nNO_KERNEL = 2**32 - 1 ".into(),
                "\nHOLD_UNTIL_CHANGE = 2**64 - 1 ".into(),
                "\nWINDOW_OPEN = 2**64 - 1 ".into(),
                format!("\nRECENT_SAMPLES = {recent} "),
                format!("\nRECENT_UNITS = {units} "),
                "\nNO_UNIT_OPEN = 2**63 - 1 ".into(),
            ],
        ),
    ] {
        let text = std::fs::read_to_string(sdk.join(file)).unwrap();
        for line in lines {
            assert!(text.contains(&line), "sdk/{file} does not say {line:?}");
        }
    }
}
