//! `cargo xtask bench containment`: what a policy that fails costs, how soon a guard is heeded,
//! and what a shadow takes. Figures of this machine; no test asserts them.

use crate::{build, target_dir};
use anyhow::{Context, Result};
use serde_json::Value;
use tally_harness::{Artefacts, containment};

/// Times that each is measured.
const ROUNDS: u32 = 5;

/// Measure; a table, and all of it in a file.
pub fn run() -> Result<()> {
    build::everything()?;
    let found = containment::run(&Artefacts::at(build::release_dir()), ROUNDS)?;
    let file = target_dir().join("containment.json");
    std::fs::write(&file, format!("{found:#}\n")).with_context(|| file.display().to_string())?;
    println!("{}, {ROUNDS} rounds\n", machine());
    print!("{}", tables(&found));
    println!("\nall figures: {}", file.display());
    Ok(())
}

fn machine() -> String {
    let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = about.lines().find_map(|line| line.strip_prefix("model name"));
    let name = name.and_then(|rest| rest.split_once(':')).map_or("?", |(_, name)| name.trim());
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{name}, {cpus} CPUs, software device")
}

/// Median and maximum over the rounds, as `median (max)`.
fn cell(rounds: &Value, key: &str, digits: usize) -> String {
    let mut all: Vec<f64> =
        rounds.as_array().into_iter().flatten().filter_map(|row| row[key].as_f64()).collect();
    all.sort_by(f64::total_cmp);
    match (all.get(all.len() / 2), all.last()) {
        (Some(median), Some(max)) => format!("{median:.digits$} ({max:.digits$})"),
        _ => "–".into(),
    }
}

/// The results as the tables of `docs/operate.md`.
fn tables(found: &Value) -> String {
    let mut out = String::from(
        "| fault | first counted, ms | disabled, and why, ms | good policy back, ms | a failed call, us | launch before, us | longest before, us | \
         longest launch meanwhile, us |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in found["faults"].as_array().into_iter().flatten() {
        let cells: Vec<String> = [
            ("counted_ms", 1),
            ("named_ms", 1),
            ("back_ms", 1),
            ("fault_cost_us", 0),
            ("launch_before_p50_us", 0),
            ("launch_before_max_us", 0),
            ("launch_during_max_us", 0),
        ]
        .iter()
        .map(|(key, digits)| cell(&row["rounds"], key, *digits))
        .collect();
        let name = row["fault"].as_str().unwrap_or("?");
        out += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    let guard = &found["guard"];
    out += &format!(
        "\nguard: B was active for {} ms, A was back {} ms after that\n",
        cell(guard, "b_active_ms", 0),
        cell(guard, "a_back_after_ms", 2)
    );
    let shadow = &found["shadow"];
    let number = |key: &str| shadow[key].as_f64().unwrap_or(0.0);
    out += &format!(
        "shadow: {:.2} % of a CPU (at most {:.0} %) for {:.0} decisions a second, {:.0} left out\n",
        number("cpu_percent"),
        number("cpu_percent_max"),
        number("decisions_per_s"),
        number("skipped")
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_medians_and_maxima() {
        let found = serde_json::json!({
            "faults": [{"fault": "trap", "rounds": [
                {"counted_ms": 1.0, "launch_before_p50_us": 30.0}, {"counted_ms": 9.0},
                {"counted_ms": 2.0}]}],
            "guard": [{"b_active_ms": 150.0, "a_back_after_ms": 0.5}],
            "shadow": {"cpu_percent": 2.5, "cpu_percent_max": 5.0, "decisions_per_s": 900.0},
        });
        let text = tables(&found);
        assert!(text.contains("| trap | 2.0 (9.0) | – | – | – | 30 (30) | – | – |"), "{text}");
        assert!(text.contains("for 150 (150) ms, A was back 0.50 (0.50) ms"), "{text}");
        assert!(text.contains("2.50 % of a CPU (at most 5 %) for 900 decisions"), "{text}");
    }
}
