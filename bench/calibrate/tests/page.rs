//! `docs/results-simulator.md` says how near the simulator comes to measured pairs: so near it must be.

use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// What the page's own command says.
const ARGUMENTS: [&str; 3] = ["docs/results/pairs.json", "--since", "2026-11-22"];
/// A policy or an engine that answers a little differently moves each figure a little.
const RATIO_OFF_MAX: f64 = 0.1;
const SHARE_OFF_MAX: f64 = 0.03;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The page's table: pair and mode, then p99 and share, simulated and measured.
fn table() -> Vec<(String, [f64; 4])> {
    let page = std::fs::read_to_string(repository().join("docs/results-simulator.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| ") && line.contains(" + "));
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

fn within(rows: &[(String, [f64; 4])]) -> (usize, usize) {
    let near = |a: f64, b: f64, most: f64| (a / b - 1.0).abs() <= most;
    let p99 = rows.iter().filter(|(_, [a, b, ..])| near(*a, *b, 0.15)).count();
    (p99, rows.iter().filter(|(_, [.., a, b])| near(*a, *b, 0.1)).count())
}

#[test]
fn the_page_says_what_the_simulator_gives() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tally-calibrate"));
    let output = command.args(ARGUMENTS).arg("--json").current_dir(repository()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found: Vec<(String, [f64; 4])> = found
        .iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            let vendor = row["vendor_rewrite"].as_bool().unwrap();
            let transformed = if vendor { ", vendor kernels transformed" } else { "" };
            let config = row["policy_config"].as_str().unwrap_or("").trim().replace('\n', "; ");
            let config = if config.is_empty() { config } else { format!(", `{config}`") };
            let name =
                format!("{} + {}, {}{transformed}{config}", text("hp"), text("be"), text("mode"));
            let shares = match row["share_of_own"].is_number() {
                true => ["share_of_own", "measured_share_of_own"],
                false => ["share", "measured_share"],
            };
            let keys = ["p99_over_alone", "measured_p99_over_alone", shares[0], shares[1]];
            (name, keys.map(|key| row[key].as_f64().unwrap()))
        })
        .collect();
    let told = table();
    let names = |rows: &[(String, [f64; 4])]| rows.iter().map(|r| r.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&told), "tally-calibrate {}", ARGUMENTS.join(" "));
    for ((name, found), (_, told)) in found.iter().zip(&told) {
        assert!(
            (found[0] / told[0] - 1.0).abs() <= RATIO_OFF_MAX,
            "{name}: p99 {found:?} {told:?}"
        );
        assert!((found[2] - told[2]).abs() <= SHARE_OFF_MAX, "{name}: share {found:?} {told:?}");
        // The measured ones are copied.
        assert!((found[1] - told[1]).abs() < 0.006 && (found[3] - told[3]).abs() < 0.006, "{name}");
    }
    let (p99, share) = within(&found);
    let page = std::fs::read_to_string(repository().join("docs/results-simulator.md")).unwrap();
    // Of a row on the edge the page may say otherwise than a policy that answers a little differently.
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
    // What the page says of this test.
    assert!(p99 * 10 >= found.len() * 9, "p99 is near in only {p99} of {} rows", found.len());
    assert!(share * 10 >= found.len() * 9, "share is near in only {share} of {} rows", found.len());
}

#[test]
fn the_page_names_the_command_that_made_it() {
    let page = std::fs::read_to_string(repository().join("docs/results-simulator.md")).unwrap();
    let command = format!("`cargo run --release -p tally-calibrate -- {}`", ARGUMENTS.join(" "));
    assert!(page.contains(&command), "{command}");
}

#[test]
fn what_is_no_list_of_pairs_is_refused_by_name() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tally-calibrate"));
    let output = command.arg("README.md").current_dir(repository()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("README.md: expected an array of rows"), "{said}");
}
