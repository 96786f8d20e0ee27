//! `docs/results-simulator.md` says how near the simulator comes to measured pairs: so near it must be.

use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// Before the rows with objectives on the page, and before those of the decode service.
const OBJECTIVES: &str = "## Objectives";
const DECODE: &str = "## Decode service";
/// What the page's own commands say: for pairs, for rows with objectives, and for the decode service.
const ARGUMENTS: [[&str; 3]; 3] = [
    ["docs/results/pairs.json", "--since", "2026-11-22"],
    ["docs/results/frontier.json", "--since", "2026-11-22"],
    ["docs/results/decode.json", "--since", "2026-11-22"],
];
/// A policy or an engine that answers a little differently moves each figure a little.
const RATIO_OFF_MAX: f64 = 0.1;
const SHARE_OFF_MAX: f64 = 0.03;
/// One that learns may settle elsewhere.
const LEARNED_OFF_MAX: f64 = 0.2;
const LEARNED_SHARE_OFF_MAX: f64 = 0.1;

/// Some of these shares are small.
const DECODE_SHARE_OFF_MAX: f64 = 0.05;

/// Pair and mode, then p99 and share, simulated and measured.
type Row = (String, [f64; 4]);

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The page's parts: on pairs, on rows with objectives, and on the decode service.
fn parts() -> [String; 3] {
    let page = std::fs::read_to_string(repository().join("docs/results-simulator.md")).unwrap();
    let (pairs, objectives) = page.split_once(OBJECTIVES).unwrap();
    let (objectives, decode) = objectives.split_once(DECODE).unwrap();
    [pairs, objectives, decode].map(str::to_owned)
}

/// The table of a part.
fn table(part: &str) -> Vec<Row> {
    let rows = part.lines().filter(|line| line.starts_with("| ") && line.contains(" + "));
    let row = |line: &str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 8, "{line}");
        let number = |i: usize| {
            cells[i]
                .trim_end_matches(" of own")
                .parse::<f64>()
                .unwrap_or_else(|e| panic!("{line}: {e}"))
        };
        (format!("{}, {}", cells[0], cells[1]), [2, 3, 5, 6].map(number))
    };
    rows.map(row).collect()
}

/// What the simulator gives now.
fn simulated(arguments: [&str; 3]) -> Vec<Row> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tally-sim-compare"));
    let output = command.args(arguments).arg("--json").current_dir(repository()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    found
        .iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            let vendor = row["vendor_rewrite"].as_bool().unwrap();
            let transformed = if vendor { ", vendor kernels transformed" } else { "" };
            let objective = row["objective"].as_f64();
            let objective = objective.map_or(String::new(), |n| format!(", objective {n}x"));
            let config = row["policy_config"].as_str().unwrap_or("").trim().replace('\n', "; ");
            let config = if config.is_empty() { config } else { format!(", `{config}`") };
            let [hp, be, mode] = ["hp", "be", "mode"].map(text);
            let name = format!("{hp} + {be}, {mode}{transformed}{objective}{config}");
            let shares = match row["share_of_own"].is_number() {
                true => ["share_of_own", "measured_share_of_own"],
                false => ["share", "measured_share"],
            };
            let keys = ["p99_over_alone", "measured_p99_over_alone", shares[0], shares[1]];
            (name, keys.map(|key| row[key].as_f64().unwrap()))
        })
        .collect()
}

fn within(rows: &[Row]) -> [usize; 2] {
    let near = |a: f64, b: f64, most: f64| (a / b - 1.0).abs() <= most;
    let p99 = rows.iter().filter(|(_, [a, b, ..])| near(*a, *b, 0.15)).count();
    [p99, rows.iter().filter(|(_, [.., a, b])| near(*a, *b, 0.1)).count()]
}

/// That the part says what the simulator gives, by the command that it names; how many rows are near, and of how many.
fn says(part: usize, ratio_off_max: f64, share_off_max: f64) -> ([usize; 2], usize) {
    let (page, arguments) = (&parts()[part], ARGUMENTS[part]);
    let command = format!("`cargo run --release -p tally-sim-compare -- {}`", arguments.join(" "));
    assert!(page.contains(&command), "{command}");
    let (found, told) = (simulated(arguments), table(page));
    let names = |rows: &[Row]| rows.iter().map(|r| r.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&told), "{command}");
    for ((name, found), (_, told)) in found.iter().zip(&told) {
        let off = (found[0] / told[0] - 1.0).abs();
        assert!(off <= ratio_off_max, "{name}: p99 {found:?} {told:?}");
        assert!((found[2] - told[2]).abs() <= share_off_max, "{name}: share {found:?} {told:?}");
        // The measured ones are copied.
        assert!((found[1] - told[1]).abs() < 0.006 && (found[3] - told[3]).abs() < 0.006, "{name}");
    }
    // Of a row on the edge the page may say otherwise than a policy that answers a little differently.
    let near_rows = within(&found);
    let [p99, share] = near_rows;
    let says = |p99: usize, share: usize| {
        let rows = told.len();
        page.contains(&format!("within 15 % in {p99} of {rows} rows, share within 10 % in {share}"))
    };
    let near = |n: usize| n.saturating_sub(1)..=n + 1;
    assert!(
        near(p99).any(|p| near(share).any(|s| says(p, s))),
        "{p99} and {share} of {}",
        told.len()
    );
    (near_rows, found.len())
}

#[test]
fn the_page_says_what_the_simulator_gives() {
    let ([p99, share], rows) = says(0, RATIO_OFF_MAX, SHARE_OFF_MAX);
    // What the page says of this test.
    assert!(p99 * 10 >= rows * 8, "p99 is near in only {p99} of {rows} rows");
    assert!(share * 10 >= rows * 9, "share is near in only {share} of {rows} rows");
}

#[test]
fn the_page_says_what_it_gives_with_objectives() {
    let ([p99, share], rows) = says(1, LEARNED_OFF_MAX, LEARNED_SHARE_OFF_MAX);
    assert!(p99 * 10 >= rows * 6, "p99 is near in only {p99} of {rows} rows");
    assert!(share * 10 >= rows * 4, "share is near in only {share} of {rows} rows");
}

#[test]
fn the_page_says_what_it_gives_of_the_decode_service() {
    let ([p99, share], rows) = says(2, LEARNED_OFF_MAX, DECODE_SHARE_OFF_MAX);
    assert!(p99 * 10 >= rows * 6, "p99 is near in only {p99} of {rows} rows");
    assert!(share * 10 >= rows * 4, "share is near in only {share} of {rows} rows");
}

#[test]
fn what_is_no_list_of_pairs_is_refused_by_name() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tally-sim-compare"));
    let output = command.arg("README.md").current_dir(repository()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("README.md: expected an array of rows"), "{said}");
}
