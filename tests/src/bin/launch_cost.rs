//! Times kernel launches as a program sees them: bursts, with a wait after each
//! that is not timed. Prints one JSON object. Run with and without the shim by
//! `benches/launch.rs`.

use anyhow::Result;
use clap::Parser;
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::time::Instant;

const KERNELS: &str = include_str!("../../kernels/probe.ptx");
/// Threads of a block; each has a counter.
const THREADS: u32 = 64;

/// Time kernel launches on this machine's CUDA device.
#[derive(Parser)]
struct Options {
    /// Bursts that are timed.
    #[arg(long, default_value_t = 400)]
    bursts: usize,
    /// Launches of a burst.
    #[arg(long, default_value_t = 100)]
    launches: usize,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let context = CudaContext::new(0)?;
    let stream = context.default_stream();
    let count = context.load_module(Ptx::from_src(KERNELS))?.load_function("count")?;
    let mut counters = stream.alloc_zeros::<u32>(THREADS as usize)?;
    let spins = 0i32;
    let shape =
        LaunchConfig { grid_dim: (1, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let mut ns = Vec::with_capacity(options.bursts);
    for burst in 0..options.bursts + options.bursts / 10 {
        let start = Instant::now();
        for _ in 0..options.launches {
            let mut launch = stream.launch_builder(&count);
            launch.arg(&mut counters).arg(&spins);
            // SAFETY: parameters as `count` declares them, and a counter for every
            // thread of the grid.
            unsafe { launch.launch(shape) }?;
        }
        let took = start.elapsed().as_nanos() as f64 / options.launches as f64;
        stream.synchronize()?;
        // The first bursts warm up.
        if burst >= options.bursts / 10 {
            ns.push(took);
        }
    }
    ns.sort_by(f64::total_cmp);
    let at = |q: f64| ns[((ns.len() - 1) as f64 * q) as usize];
    println!("{}", serde_json::json!({ "p10_ns": at(0.1), "p50_ns": at(0.5), "p90_ns": at(0.9) }));
    Ok(())
}
