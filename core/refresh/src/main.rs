//! `tally-refresh`: has each GPU change its context once, when told.
//!
//! Started by the core, outside of its MPS daemon, with `[sharing.mps] refresh_ms`. For each byte on standard
//! input it runs an empty kernel on every device, waits for it, and answers with a byte on standard output; it
//! ends with the input. Why: `docs/internals.md`, "A GPU's two speeds". A device that fails, or whose memory
//! gets short, is not used any more, because a context takes memory that clients need more. The program ends
//! when no device is left. `CUDA_VISIBLE_DEVICES` selects the devices, as for any program.

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, sys};
use cudarc::nvrtc::Ptx;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

const PTX: &str =
    ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n";

/// One part in this many of a device's memory must be free.
const FREE_PART: usize = 20;

/// A device, ready to run it.
struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    nothing: CudaFunction,
}

impl Device {
    fn open(number: usize) -> Result<Self> {
        let context = CudaContext::new(number)?;
        let nothing = context.load_module(Ptx::from_src(PTX))?.load_function("nothing")?;
        Ok(Device { stream: context.default_stream(), context, nothing })
    }

    fn run(&self) -> Result<()> {
        let (free, total) = self.context.mem_get_info()?;
        ensure!(
            free >= total / FREE_PART,
            "only {} of {} MiB of a GPU's memory are free: its context is left to programs",
            free >> 20,
            total >> 20
        );
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel has no parameters and touches no memory.
        unsafe { self.stream.launch_builder(&self.nothing).launch(one) }?;
        Ok(self.stream.synchronize()?)
    }
}

fn main() -> Result<()> {
    // SAFETY: only looks whether the library can be loaded.
    let is_there = unsafe { sys::is_culib_present() };
    ensure!(is_there, "libcuda.so.1 cannot be loaded: is NVIDIA's driver installed?");
    let count = CudaContext::device_count().context("CUDA does not start")?;
    ensure!(count > 0, "there is no CUDA device");
    // One that cannot be used is no reason to leave the others.
    let said = |number, error: anyhow::Error| eprintln!("device {number}: {error:#}");
    let open = |number| match Device::open(number as usize) {
        Ok(device) => Some((number, device)),
        Err(error) => {
            said(number, error);
            None
        }
    };
    let mut devices: Vec<_> = (0..count).filter_map(open).collect();
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut byte = [0];
    while input.read(&mut byte)? != 0 {
        devices.retain(|(number, device)| device.run().map_err(|e| said(*number, e)).is_ok());
        ensure!(!devices.is_empty(), "no device is left");
        output.write_all(&byte)?;
        output.flush()?;
    }
    Ok(())
}
