//! A training job in small: gradient descent on a linear layer, as fast as the
//! device goes. Kernels are launched far ahead of the device; each step ends
//! with a synchronisation.
//!
//! Prints one JSON object. The checksum of the weights after n steps is the same
//! on every run, whoever else uses the device: `checksums` lists it as the
//! training went along, so that runs of different length can be compared.

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;
use std::time::Instant;
use tally_demo::job;

const KERNELS: &str = include_str!("../../kernels/training.ptx");
/// Side of a block; sizes are multiples of it.
const TILE: u32 = 16;
/// Length of a descent step.
const LEARNING_RATE: f32 = 0.05;
/// Checksums listed, at most; further ones go into the last only.
const CHECKSUMS_MAX: usize = 4096;

/// Sizes that suit a device.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// A device that is a CPU: kernels of some 5 ms of one core.
    Software,
    /// A data-centre GPU: kernels of a few ms.
    Cuda,
}

#[derive(Parser, Debug)]
#[command(about = "A small training job with long kernels; prints one JSON object.")]
struct Options {
    /// Sizes to start from.
    #[arg(long, value_enum, default_value = "software")]
    preset: Preset,
    /// Inputs and outputs of the layer (a multiple of 16).
    #[arg(long)]
    size: Option<u32>,
    /// Examples in a batch (a multiple of 16).
    #[arg(long)]
    rows: Option<u32>,
    /// Kernels launched ahead in a step (an even number).
    #[arg(long, default_value_t = 16)]
    depth: u32,
    /// How long to train.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Train for so many steps, however long it takes.
    #[arg(long)]
    steps: Option<u64>,
    /// Steps from one listed checksum to the next.
    #[arg(long, default_value_t = 8)]
    checksum_every: u64,
    /// Seed of the weights and the data.
    #[arg(long, default_value_t = 11)]
    seed: u64,
    #[command(flatten)]
    start: job::Start,
}

/// The layer, its data and its gradient on the device.
struct Trainer {
    stream: Arc<CudaStream>,
    forward_error: CudaFunction,
    gradient_step: CudaFunction,
    rows: u32,
    size: u32,
    data: CudaSlice<f32>,
    targets: CudaSlice<f32>,
    errors: CudaSlice<f32>,
    weights: CudaSlice<f32>,
}

impl Trainer {
    fn new(
        context: &Arc<CudaContext>,
        rows: u32,
        size: u32,
        seed: u64,
    ) -> Result<Self, DriverError> {
        let module = context.load_module(Ptx::from_src(KERNELS))?;
        let stream = context.new_stream()?;
        let mut random = job::Random::new(seed);
        let batch = (rows * size) as usize;
        Ok(Self {
            forward_error: module.load_function("forward_error")?,
            gradient_step: module.load_function("gradient_step")?,
            data: stream.clone_htod(&random.fill(batch, 1.0))?,
            targets: stream.clone_htod(&random.fill(batch, 1.0))?,
            errors: stream.alloc_zeros(batch)?,
            weights: stream.clone_htod(&random.fill((size * size) as usize, 0.1))?,
            stream,
            rows,
            size,
        })
    }

    /// Launches one descent: two kernels.
    fn descend(&mut self) -> Result<(), DriverError> {
        let (rows, size) = (self.rows as i32, self.size as i32);
        let rate = LEARNING_RATE / self.rows as f32;
        let grid = |height: u32| LaunchConfig {
            grid_dim: (self.size / TILE, height / TILE, 1),
            block_dim: (TILE, TILE, 1),
            shared_mem_bytes: 0,
        };
        let mut forward = self.stream.launch_builder(&self.forward_error);
        forward.arg(&self.data).arg(&self.weights).arg(&self.targets).arg(&mut self.errors);
        forward.arg(&size).arg(&size);
        // SAFETY: parameters as `forward_error` declares them; data, targets and
        // errors hold rows x size numbers, the weights size x size, and the grid
        // covers just the errors.
        unsafe { forward.launch(grid(self.rows)) }?;
        let mut backward = self.stream.launch_builder(&self.gradient_step);
        backward.arg(&self.data).arg(&self.errors).arg(&mut self.weights);
        backward.arg(&rows).arg(&size).arg(&size).arg(&rate);
        // SAFETY: parameters as `gradient_step` declares them, sizes as above, and
        // the grid covers just the weights.
        unsafe { backward.launch(grid(self.size)) }?;
        Ok(())
    }

    fn step(&mut self, depth: u32) -> Result<(), DriverError> {
        for _ in 0..depth / 2 {
            self.descend()?;
        }
        self.stream.synchronize()
    }

    fn checksum(&self) -> Result<(String, bool), DriverError> {
        let weights = self.stream.clone_dtoh(&self.weights)?;
        self.stream.synchronize()?;
        Ok((job::checksum(&weights), weights.iter().all(|w| w.is_finite())))
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (rows, size) = match options.preset {
        Preset::Software => (112, 112),
        Preset::Cuda => (2048, 2048),
    };
    let (rows, size) = (options.rows.unwrap_or(rows), options.size.unwrap_or(size));
    ensure!(rows >= TILE && rows.is_multiple_of(TILE), "--rows must be a multiple of {TILE}");
    ensure!(size >= TILE && size.is_multiple_of(TILE), "--size must be a multiple of {TILE}");
    let depth = options.depth;
    ensure!(depth >= 2 && depth.is_multiple_of(2), "--depth must be an even number above 0");

    let context = CudaContext::new(0)?;
    let mut trainer = Trainer::new(&context, rows, size, options.seed)?;
    trainer.step(depth)?; // warms up, and counts as step 1
    let mut steps = 1;
    let mut checksums = Vec::new();

    options.start.wait()?;
    let begin = Instant::now();
    loop {
        match options.steps {
            Some(wanted) if steps >= wanted => break,
            None if begin.elapsed().as_secs_f64() >= options.seconds => break,
            _ => {}
        }
        trainer.step(depth)?;
        steps += 1;
        if steps.is_multiple_of(options.checksum_every.max(1)) && checksums.len() < CHECKSUMS_MAX {
            checksums.push((steps, trainer.checksum()?.0));
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let (checksum, finite) = trainer.checksum()?;
    println!(
        "{}",
        serde_json::json!({
            "device": context.name()?,
            "steps": steps,
            "seconds": seconds,
            "steps_per_s": (steps - 1) as f64 / seconds,
            "launches": steps * u64::from(depth),
            "checksum": checksum,
            "checksums": checksums,
        })
    );
    ensure!(finite, "the training diverged");
    Ok(())
}
