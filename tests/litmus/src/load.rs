//! The other client: keeps the scheduler busy for as long as it lives.

use crate::program::{Module, Source};
use crate::run::{Machine, loaded};
use anyhow::Result;
use std::io::Write;
use std::time::Duration;

/// Blocks and loops of its kernels: short ones of a service, longer ones of a training.
const SERVICE: (u32, u32) = (8, 300);
const TRAINING: (u32, u32) = (96, 400);
/// Launches between two waits.
const BURST: u32 = 4;

/// Launches kernels in bursts, with pauses, for ever; the same ones in every run.
///
/// # Errors
/// If a call fails.
pub fn serve(machine: &Machine, is_service: bool) -> Result<()> {
    let cuda = machine.cuda;
    let module = Module { context: 0, source: Source::Heap, constant: 77 };
    let kernels = loaded(machine, module)?;
    let function = kernels.function("count");
    let (blocks, loops) = if is_service { SERVICE } else { TRAINING };
    let (mut word, mut stream) = (0, 0);
    // SAFETY: valid out pointers.
    unsafe {
        cuda.cuMemAlloc_v2(&mut word, 4)?;
        cuda.cuStreamCreateWithPriority(&mut stream, 1, machine.least_priority)?;
    }
    println!("{{\"load\": true}}");
    std::io::stdout().flush()?;
    let loops = u64::from(machine.loops(loops));
    let params =
        [std::ptr::from_ref(&word).cast_mut().cast(), std::ptr::from_ref(&loops).cast_mut().cast()];
    let mut rng = fastrand::Rng::with_seed(7);
    loop {
        for _ in 0..BURST {
            let none = std::ptr::null();
            // SAFETY: a function and a stream of ours, and its two arguments.
            unsafe {
                cuda.cuLaunchKernel(
                    false,
                    function,
                    blocks,
                    1,
                    1,
                    32,
                    1,
                    1,
                    0,
                    stream,
                    params.as_ptr(),
                    none,
                )?;
            }
        }
        // SAFETY: a stream of ours.
        unsafe { cuda.cuStreamSynchronize(false, stream) }?;
        let pause_us = match rng.u32(0..10) {
            0 => rng.u64(5_000..20_000),
            _ => rng.u64(200..4_000),
        };
        std::thread::sleep(Duration::from_micros(pause_us));
    }
}
