//! `cargo xtask demo --json`: its shape, its results, its counts. Not its times:
//! a test must not depend on how busy the machine is (`cargo xtask demo --check`
//! does).

use anyhow::{Result, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use tally_harness::{Artefacts, Process};

#[test]
fn the_demo_prints_one_object_with_right_results() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let dir = tempfile::tempdir()?;
    let mut demo = Command::new(artefacts.file("xtask")?);
    demo.args(["demo", "--no-build", "--json", "--seconds=3"]);
    let mut demo = Process::start("demo", dir.path(), &mut demo)?;
    let status = demo.wait(Duration::from_secs(200))?;
    ensure!(status.success(), "{status}\n{}", demo.quote());
    let out = demo.stdout()?;
    let report: Value = serde_json::from_str(&out)?;
    ensure!(report["device"].is_string() && report["results_right"] == true, "{report:#}");
    let runs = &report["runs"];
    ensure!(runs.as_object().is_some_and(|runs| runs.len() == 4), "{report:#}");
    for name in ["alone", "unscheduled", "fifo", "tally-priority"] {
        let run = &runs[name];
        for figure in ["hp_p50_ms", "hp_p99_ms", "be_throughput"] {
            ensure!(run[figure].as_f64().is_some_and(|v| v > 0.0), "{name}: {report:#}");
        }
        let decided = run["decisions"].as_u64();
        let scheduled = name == "fifo" || name == "tally-priority";
        ensure!(decided.is_some_and(|n| (n > 0) == scheduled), "{name}: {report:#}");
    }
    ensure!(report["verdict"].as_array().is_some_and(|claims| claims.len() == 3), "{report:#}");
    Ok(())
}
