//! `cargo xtask demo ab`: an A/B test of `fifo` (A) against `tally-priority` (B) while an
//! inference server and a training run on the software device. The programs know nothing
//! of it. Leaves `report.json`, `report.txt` and `plot.svg` in `target/demo-ab/`.

use crate::target_dir;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;
use tally_demo::process::wait_until;
use tally_demo::{Artefacts, Class, Device, Scene};

/// How long the programs run, s: somewhat longer than the test.
const PROGRAMS_S: u32 = 75;
const TEST: [&str; 10] = [
    "--metric=hp_p99",
    "--block=250ms",
    "--washout=25ms",
    "--max-time=65s",
    "--guard=hp_p99<2s",
    "--seed=1",
    "--alpha=0.05",
    "--min-blocks=20",
    "--min-blocks-better=160",
    "--wait",
];
/// Longest wait for a program beyond its time.
const OVERTIME_MAX: Duration = Duration::from_secs(60);

/// Run it; with `check`, fail unless B is found to be better.
pub fn run(artefacts: &Artefacts, check: bool) -> Result<()> {
    let scene = Scene::new(artefacts, Device::software())?;
    let fifo = artefacts.policy("fifo")?;
    let priority = artefacts.policy("tally-priority")?;
    let mut core = scene.core(&fifo, &[])?;
    // A request of a few ms every 16 ms or so, beside kernels of some 5 ms.
    let mut server = scene.program("tally-demo-inference")?;
    server.args(["--rows=16", "--size=32", "--layers=3", "--rate=60"]);
    let mut trainer = scene.program("tally-demo-training")?;
    trainer.arg("--preset=software");
    for (program, side) in [(&mut server, "hp"), (&mut trainer, "be")] {
        program.arg(format!("--seconds={PROGRAMS_S}"));
        program.arg("--ready-file").arg(scene.dir().join(format!("{side}.ready")));
        program.arg("--go-file").arg(scene.dir().join("go"));
    }
    let mut server =
        scene.start("inference", scene.governed(Class::High, "inference", &server)?)?;
    let mut trainer =
        scene.start("training", scene.governed(Class::BestEffort, "training", &trainer)?)?;
    wait_until("waiting for the programs to be ready", Duration::from_secs(120), || {
        let ready = ["hp.ready", "be.ready"].iter().all(|f| scene.dir().join(f).exists());
        Ok(ready.then_some(()))
    })?;
    std::fs::write(scene.dir().join("go"), "go\n")?;

    // On the software device a transformed kernel costs half its speed; see `cargo xtask demo`.
    let config = scene.dir().join("b.toml");
    std::fs::write(&config, "forms = false\n")?;
    let mut start = scene.program("tallyctl")?;
    start.args(["ab", "start"]).arg(&fifo).arg(&priority).args(TEST).arg("--config-b").arg(&config);
    eprintln!("A/B test of fifo (A) against tally-priority (B), at most 65 s");
    let mut start = scene.start("ab", start)?;
    let ended = start.wait(Duration::from_secs(65) + OVERTIME_MAX)?;
    // The code tells the verdict, which `--check` judges by the report.
    let is_verdict = matches!(ended.code(), Some(0 | 3..=6));
    ensure!(is_verdict, "tallyctl ab start: {ended}\n{}", start.quote());

    let folder = target_dir().join("demo-ab");
    std::fs::create_dir_all(&folder)?;
    let svg = folder.join("plot.svg").to_string_lossy().into_owned();
    let answer = scene.ctl(&["ab", "report", "--json", "--svg", &svg])?;
    ensure!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    let report: Value = serde_json::from_slice(&answer.stdout)?;
    let text = start.stdout()?;
    std::fs::write(folder.join("report.json"), &answer.stdout)?;
    std::fs::write(folder.join("report.txt"), &text)?;
    print!("{text}");
    println!("\nreport.json, report.txt and plot.svg are in {}", folder.display());
    crate::build::flush();

    let limit = Duration::from_secs(PROGRAMS_S.into()) + OVERTIME_MAX;
    let served = server.finish(limit)?;
    trainer.finish(limit)?;
    let status = scene.status()?;
    scene.stop(&mut core, Duration::from_secs(30))?;
    ensure!(served["errors"] == 0, "answers were wrong: {served}");
    ensure!(status.policy_name() == "fifo", "A is not active again: {:#}", status.0["policy"]);
    if check {
        let ratio = report["effect"]["ratio"].as_f64().context("the report tells no effect")?;
        ensure!(
            report["verdict"] == "promote_b" && ratio < 1.0,
            "B was not found to be better: {} with ratio {ratio:.3}",
            report["verdict"]
        );
    }
    Ok(())
}
