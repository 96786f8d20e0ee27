//! The demonstration's programs and the probe in the sizes that tests use: a second or so each.

use crate::process::{Process, wait_until};
use crate::scene::{Class, Scene};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Longest that a program may take in a test, on a busy machine.
pub const JOB_MAX: Duration = Duration::from_secs(90);
/// Longest that the probe may take to answer.
pub const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Kernels that a step of [`training`] launches.
pub const TRAINING_DEPTH: u64 = 8;

/// The inference server: so many requests, at 60 a second.
///
/// # Errors
/// If it was not built.
pub fn inference(scene: &Scene, requests: u64) -> Result<Command> {
    let mut command = scene.program("tally-demo-inference")?;
    command.args(["--rows=16", "--size=32", "--layers=3", "--rate=60"]);
    command.arg(format!("--requests={requests}"));
    Ok(command)
}

/// The training job: so many steps of [`TRAINING_DEPTH`] kernels.
///
/// # Errors
/// If it was not built.
pub fn training(scene: &Scene, steps: u64) -> Result<Command> {
    let mut command = scene.program("tally-demo-training")?;
    command.args(["--rows=64", "--size=96", "--checksum-every=10"]);
    command.arg(format!("--steps={steps}")).arg(format!("--depth={TRAINING_DEPTH}"));
    Ok(command)
}

/// What [`training`] must end with: its checksum when it has the device for itself.
///
/// # Errors
/// If it fails.
pub fn training_checksum(scene: &Scene, steps: u64) -> Result<Value> {
    let outcome = scene.start("training-alone", training(scene, steps)?)?.finish(JOB_MAX)?;
    Ok(outcome["checksum"].clone())
}

/// That an inference server answered everything, and right.
///
/// # Errors
/// If not, or it hangs.
pub fn all_answered(server: &mut Process, requests: u64) -> Result<()> {
    let outcome = server.finish(JOB_MAX)?;
    ensure!(outcome["errors"] == 0 && outcome["requests"] == requests, "inference: {outcome}");
    Ok(())
}

/// That a training job ended with a checksum.
///
/// # Errors
/// If not, or it hangs.
pub fn trained_to(trainer: &mut Process, checksum: &Value) -> Result<()> {
    let outcome = trainer.finish(JOB_MAX)?;
    ensure!(outcome["checksum"] == *checksum, "training: {outcome}, expected {checksum}");
    Ok(())
}

/// The program that does what it is told.
pub struct Probe(pub Process);

impl Probe {
    /// Starts it under `tallyctl run` and waits until it is on the device.
    ///
    /// # Errors
    /// If it does not get ready.
    pub fn start(scene: &Scene, class: Class, name: &str) -> Result<Self> {
        let program = scene.program("tally-test-probe")?;
        Self::from(scene.start(name, scene.governed(class, name, &program)?)?)
    }

    /// One that was started in another way.
    ///
    /// # Errors
    /// If it does not get ready.
    pub fn from(process: Process) -> Result<Self> {
        let mut probe = Self(process);
        let ready = probe.0.hear(ANSWER_MAX)?;
        ensure!(ready["ready"] == true, "the probe said {ready}");
        Ok(probe)
    }

    /// One command and its answer.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn ask(&mut self, command: &str) -> Result<Value> {
        self.0.tell(command)?;
        self.0.hear(ANSWER_MAX).with_context(|| format!("after {command:?}"))
    }

    /// That every launch so far ran exactly once.
    ///
    /// # Errors
    /// If not.
    pub fn check(&mut self) -> Result<()> {
        let read = self.ask("read")?;
        ensure!(read["wrong"] == 0, "counters are wrong: {read}");
        Ok(())
    }

    /// Tells it to end and waits for that.
    ///
    /// # Errors
    /// If it does not end well.
    pub fn quit(mut self) -> Result<()> {
        self.0.tell("quit")?;
        let status = self.0.wait(ANSWER_MAX)?;
        ensure!(status.success(), "the probe ended with {status}\n{}", self.0.quote());
        Ok(())
    }
}

/// A best-effort training and a high-priority inference under the scene's core, both of which
/// have launched something.
///
/// # Errors
/// If one does not start, or does not launch in time.
pub fn both_launching(scene: &Scene, steps: u64, requests: u64) -> Result<[Process; 2]> {
    let trainer = scene.governed(Class::BestEffort, "train", &training(scene, steps)?)?;
    let trainer = scene.start("training", trainer)?;
    let server = scene.governed(Class::High, "serve", &inference(scene, requests)?)?;
    let server = scene.start("inference", server)?;
    wait_until("waiting for both programs to launch", JOB_MAX, || {
        let clients = scene.status()?.clients()?;
        Ok((clients.iter().filter(|c| c.launches() > 0).count() == 2).then_some(()))
    })?;
    Ok([trainer, server])
}
