//! What a launch costs more under the shim, on the software device: a program
//! alone, as a high-priority client and plain, in turn. (What the shim's own code
//! costs is `core/shim`'s benchmark; on a GPU it is `bench/gpu/run.sh overhead`.)
//!
//! Needs everything built: `cargo xtask bench` sees to it only for what it runs,
//! so run `cargo xtask demo` or `test` once before.

use anyhow::{Context, Result};
use std::time::Duration;
use tally_harness::{Artefacts, Class, Device, Scene};

/// Runs of each kind.
const ROUNDS: usize = 7;
/// How long one run may take.
const RUN_MAX: Duration = Duration::from_secs(60);

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    let p50 = |class: Option<Class>| -> Result<f64> {
        let program = scene.program("tally-launch-cost")?;
        let command = match class {
            None => program,
            Some(class) => scene.governed(class, "launch-cost", &program)?,
        };
        let told = scene.start("launch-cost", command)?.finish(RUN_MAX)?;
        told["p50_ns"].as_f64().context("the program printed no p50_ns")
    };
    let (mut plain, mut added, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (without, with) = (p50(None)?, p50(Some(Class::High))?);
        plain.push(without);
        added.push(with - without);
        ratio.push(with / without);
    }
    let (least, most) = added.iter().fold((f64::MAX, f64::MIN), |(a, b), &n| (a.min(n), b.max(n)));
    println!(
        "a launch on the software device, ns: {:.0} plain, {:+.0} under the shim as high priority \
         ({least:+.0} to {most:+.0} in {ROUNDS} rounds, ratio {:.3})",
        median(plain),
        median(added),
        median(ratio),
    );
    Ok(())
}
