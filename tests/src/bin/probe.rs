//! A CUDA program that does what it is told, one command a line on its standard
//! input, one JSON object a command on its standard output:
//!
//! | command | does |
//! | --- | --- |
//! | `launch N [SPINS [BLOCKS]]` | launches the counting kernel N times, without waiting |
//! | `time N [SPINS [BLOCKS]]` | launches it N times and waits for each: how long each took, us |
//! | `sync` | waits for the device |
//! | `read` | reads the counters back: how many are not what they must be, and how many launches that makes lost or run twice |
//! | `quit` | ends; so does the end of the input |
//!
//! Each number of blocks makes another kernel of it as far as scheduling goes.

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::io::{BufRead, Write};
use std::time::Instant;

const KERNELS: &str = include_str!("../../kernels/probe.ptx");
/// Blocks of a launch: if nothing is said, and at most.
const BLOCKS: u32 = 4;
const BLOCKS_MAX: u32 = 64;
/// Threads of a block; each thread has a counter.
const THREADS: u32 = 64;

fn main() -> Result<()> {
    let context = CudaContext::new(0)?;
    let stream = context.default_stream();
    let count = context.load_module(Ptx::from_src(KERNELS))?.load_function("count")?;
    let mut counters = stream.alloc_zeros::<u32>((BLOCKS_MAX * THREADS) as usize)?;
    let mut expected = vec![0; (BLOCKS_MAX * THREADS) as usize];
    let mut launched = 0u64;
    let answer = |value: serde_json::Value| -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{value}")?;
        Ok(out.flush()?)
    };
    answer(serde_json::json!({ "ready": true }))?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [what @ ("launch" | "time"), times, ref rest @ ..] => {
                let times: u64 = times.parse().context("N is not a number")?;
                let spins: i32 = rest.first().map_or(Ok(0), |word| word.parse())?;
                let blocks: u32 = rest.get(1).map_or(Ok(BLOCKS), |word| word.parse())?;
                ensure!((1..=BLOCKS_MAX).contains(&blocks), "BLOCKS is 1 to {BLOCKS_MAX}");
                let shape = LaunchConfig {
                    grid_dim: (blocks, 1, 1),
                    block_dim: (THREADS, 1, 1),
                    shared_mem_bytes: 0,
                };
                let mut us = Vec::new();
                for _ in 0..times {
                    let began = Instant::now();
                    let mut launch = stream.launch_builder(&count);
                    launch.arg(&mut counters).arg(&spins);
                    // SAFETY: parameters as `count` declares them, and a counter
                    // for every thread of the grid.
                    unsafe { launch.launch(shape) }?;
                    if what == "time" {
                        stream.synchronize()?;
                        us.push(began.elapsed().as_secs_f64() * 1e6);
                    }
                    launched += 1;
                    expected.iter_mut().take((blocks * THREADS) as usize).for_each(|n| *n += 1);
                }
                answer(serde_json::json!({ "launched": launched, "us": us }))?;
            }
            ["sync"] => {
                stream.synchronize()?;
                answer(serde_json::json!({ "synced": launched }))?;
            }
            ["read"] => {
                let counters = stream.clone_dtoh(&counters)?;
                stream.synchronize()?;
                let wrong = counters.iter().zip(&expected).filter(|(a, b)| a != b).count();
                let (lost, doubled) = lost_and_doubled(&counters, &expected);
                answer(serde_json::json!({
                    "wrong": wrong, "first": counters[0], "launched": launched,
                    "lost": lost, "doubled": doubled,
                }))?;
            }
            ["quit"] => break,
            _ => bail!("unknown command: {line}"),
        }
    }
    Ok(())
}

/// Launches that did not run, and runs beyond one of a launch. Told apart by their number
/// of blocks, so that one lost does not make up for another run twice.
fn lost_and_doubled(counters: &[u32], expected: &[u32]) -> (u64, u64) {
    // The counter of a block's first thread counts all launches of more blocks than that.
    let missing = |block: usize| match counters.get(block * THREADS as usize) {
        Some(&ran) => i64::from(expected[block * THREADS as usize]) - i64::from(ran),
        None => 0,
    };
    (0..BLOCKS_MAX as usize).fold((0, 0), |(lost, doubled), block| {
        let of_this_size = missing(block) - missing(block + 1);
        (lost + of_this_size.max(0) as u64, doubled + (-of_this_size).max(0) as u64)
    })
}
