use crate::capture;
use crate::config::{self, LaunchFault, PRIORITY_RANGE};
use crate::error::{CuError, CuResult};
use crate::ffi::{In, exports_per_thread};
use crate::launch::{Launch, Shape, count_launch, is_hint};
use crate::module::resolve_function;
use crate::op::Op;
use crate::stream::{NullStream, resolve};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: usize,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`: a number and 64 bytes of value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    number: u32,
    padding: [u8; 4],
    value: [u32; 16],
}

const _: () = assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72);

/// Attributes in a launch, at most.
const ATTRIBUTES_MAX: u32 = 64;
const COOPERATIVE: u32 = 2;
const CLUSTER: u32 = 4;
const PRIORITY: u32 = 8;
const COMPLETION_EVENT: u32 = 12;
const PROGRAMMATIC_EVENT: u32 = 7;

/// What the attributes of a launch ask for.
#[derive(Default)]
struct Wanted {
    cooperative: bool,
    priority: Option<i32>,
    hints: BTreeMap<u32, [u32; 16]>,
}

fn wanted(config: &Config) -> CuResult<Wanted> {
    if config.count > ATTRIBUTES_MAX {
        return Err(CuError::INVALID_VALUE);
    }
    let attributes = In::new(config.attributes);
    let mut wanted = Wanted::default();
    for i in 0..config.count as usize {
        let attribute = attributes.at(i)?;
        match attribute.number {
            COOPERATIVE => wanted.cooperative = attribute.value[0] != 0,
            // A cluster of one block is what every block is anyway.
            CLUSTER if attribute.value[..3].iter().any(|&d| d > 1) => {
                return Err(CuError::INVALID_CLUSTER_SIZE);
            }
            PRIORITY => {
                let priority = attribute.value[0] as i32;
                wanted.priority = Some(priority.clamp(PRIORITY_RANGE.1, PRIORITY_RANGE.0));
            }
            COMPLETION_EVENT | PROGRAMMATIC_EVENT => return Err(CuError::NOT_SUPPORTED),
            hint if is_hint(hint) => drop(wanted.hints.insert(hint, attribute.value)),
            // The others have no meaning here, or only for streams.
            0..=18 => {}
            _ => return Err(CuError::INVALID_VALUE),
        }
    }
    Ok(wanted)
}

fn launch(
    function: usize,
    shape: Shape,
    stream: (usize, NullStream),
    params: &In<*mut c_void>,
    extra: &In<*mut c_void>,
    wanted: &Wanted,
) -> CuResult {
    let stream = resolve(stream.0, stream.1)?;
    let function = resolve_function(function)?;
    if function.module.context != stream.context.id {
        return Err(CuError::INVALID_HANDLE);
    }
    let mut launch = Launch::prepare(function, shape, params, extra)?;
    count_launch();
    match config::launch_fault(&launch.function.kernel()?.name, launch.params.len()) {
        None => {}
        Some(LaunchFault::Refused) => return Err(CuError::LAUNCH_FAILED),
        Some(LaunchFault::Fatal) => {
            stream.context.fail(CuError::LAUNCH_FAILED);
            return Err(CuError::LAUNCH_FAILED);
        }
    }
    if !config::are_faultless(&launch.function.kernel()?.name, &wanted.hints) {
        return Err(CuError::INVALID_VALUE);
    }
    launch.priority = wanted.priority;
    launch.hints.clone_from(&wanted.hints);
    launch.green.clone_from(&stream.green);
    if wanted.cooperative {
        launch.make_cooperative()?;
    }
    stream.submit(Op::Kernel(Arc::new(launch)))?;
    if config::launches_block() && !capture::is_capturing(&stream) {
        stream.wait_all();
        return stream.context.check();
    }
    Ok(())
}

exports_per_thread! {
    fn cuLaunchKernel / cuLaunchKernel_ptsz |null| (
        function: usize,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        stream: usize,
        params: In<*mut c_void>,
        extra: In<*mut c_void>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, shared_bytes };
        launch(function, shape, (stream, null), &params, &extra, &Wanted::default())
    }

    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz |null| (
        function: usize,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        stream: usize,
        params: In<*mut c_void>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, shared_bytes };
        let wanted = Wanted { cooperative: true, ..Wanted::default() };
        launch(function, shape, (stream, null), &params, &In::new(std::ptr::null()), &wanted)
    }

    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz |null| (
        config: In<Config>,
        function: usize,
        params: In<*mut c_void>,
        extra: In<*mut c_void>,
    ) {
        let config = config.get()?;
        let Config { grid, block, shared_bytes, stream, .. } = config;
        let shape = Shape { grid, block, shared_bytes };
        launch(function, shape, (stream, null), &params, &extra, &wanted(&config)?)
    }
}
