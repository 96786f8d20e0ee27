//! Launches that the shim makes: their parameters as one piece of memory, and the calls of the driver.

use crate::cuda::{
    CuResult, LaunchAttribute, LaunchConfig, NOT_SUPPORTED, PARAM_BUFFER_POINTER,
    PARAM_BUFFER_SIZE, Ptr, driver,
};
use crate::launch::KernelArguments;
use crate::transformed::Transformed;
use tally_rewriter::ControlBlock;
use tally_rewriter::control::CONTROL_BYTES;

/// How a launch is made once more.
#[derive(Debug)]
pub struct Again {
    /// A function of the transformed module.
    pub function: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    /// Launch attributes; those that can be repeated are plain values.
    pub attributes: Vec<LaunchAttribute>,
    /// The parameters, the control block last.
    pub parameters: Vec<u8>,
    /// Offset of the control block in `parameters`, bytes.
    pub control_offset: usize,
    /// The control block, with the epoch behind the parts'.
    pub control: ControlBlock,
}

/// Launch a kernel that came out of a graph as it is.
pub(crate) fn whole(arguments: &KernelArguments, stream: usize) -> CuResult {
    let Some(launch) = driver().launch_ex else { return NOT_SUPPORTED };
    let config = config(arguments, arguments.grid, stream as Ptr);
    // SAFETY: the program's function, and parameters as they were recorded.
    unsafe { launch(&config, arguments.function, arguments.params, arguments.extra) }
}

/// The original's parameters as they lie in memory.
pub fn original_parameters(
    arguments: &KernelArguments,
    transformed: &Transformed,
) -> Option<Vec<u8>> {
    let mut buffer = parameters(arguments, transformed)?;
    buffer.truncate(transformed.parameters.iter().map(|(at, size)| at + size).max().unwrap_or(0));
    Some(buffer)
}

/// Call `launch` with such parameters, in the way in which they are passed as one piece.
pub fn with_buffer<T>(bytes: &[u8], launch: impl FnOnce(*mut Ptr) -> T) -> T {
    let mut size = bytes.len();
    let mut extra = [
        PARAM_BUFFER_POINTER as Ptr,
        // The driver only reads it.
        bytes.as_ptr().cast_mut().cast(),
        PARAM_BUFFER_SIZE as Ptr,
        (&raw mut size).cast(),
        std::ptr::null_mut(),
    ];
    launch(extra.as_mut_ptr())
}

/// The original parameters, with room for the control block behind them.
pub(crate) fn parameters(
    arguments: &KernelArguments,
    transformed: &Transformed,
) -> Option<Vec<u8>> {
    // The driver refuses both.
    if !arguments.params.is_null() && !arguments.extra.is_null() {
        return None;
    }
    let mut buffer = vec![0_u8; transformed.control_offset + CONTROL_BYTES as usize];
    if !arguments.params.is_null() {
        for (i, &(offset, size)) in transformed.parameters.iter().enumerate() {
            // SAFETY: the program passes a pointer to each of the original's parameters,
            // whose sizes the driver told.
            unsafe {
                let parameter: *const u8 = (*arguments.params.add(i)).cast();
                if parameter.is_null() {
                    return None;
                }
                parameter.copy_to_nonoverlapping(buffer[offset..].as_mut_ptr(), size);
            }
        }
        return Some(buffer);
    }
    if arguments.extra.is_null() {
        return transformed.parameters.is_empty().then_some(buffer);
    }
    let (mut bytes, mut from) = (0, std::ptr::null::<u8>());
    // SAFETY: a list of names and values that ends with 0, as the driver reads it.
    unsafe {
        let mut at = arguments.extra;
        while !(*at).is_null() {
            let value = *at.add(1);
            match *at as usize {
                PARAM_BUFFER_POINTER => from = value.cast(),
                PARAM_BUFFER_SIZE => bytes = *value.cast::<usize>(),
                _ => return None,
            }
            at = at.add(2);
        }
    }
    // Of another size than the original's the driver refuses it.
    let needed = transformed.parameters.iter().map(|(at, size)| at + size).max().unwrap_or(0);
    if !(needed..=transformed.control_offset).contains(&bytes) || (from.is_null() && bytes > 0) {
        return None;
    }
    // SAFETY: a buffer of the program's of this size.
    unsafe { from.copy_to_nonoverlapping(buffer.as_mut_ptr(), bytes) };
    Some(buffer)
}

fn config(arguments: &KernelArguments, grid: [u32; 3], stream: Ptr) -> LaunchConfig {
    LaunchConfig {
        grid,
        block: arguments.block,
        shared_bytes: arguments.shared_bytes,
        stream,
        attributes: arguments.attributes,
        attribute_count: arguments.attribute_count,
    }
}

pub(crate) fn issue(
    function: usize,
    arguments: &KernelArguments,
    grid: [u32; 3],
    stream: Ptr,
    buffer: &[u8],
) -> CuResult {
    issue_config(function, &config(arguments, grid, stream), buffer)
}

fn issue_config(function: usize, config: &LaunchConfig, buffer: &[u8]) -> CuResult {
    let Some(launch) = driver().launch_ex else { return NOT_SUPPORTED };
    // SAFETY: a function of ours in the current context, or one of the program's; the driver copies the
    // parameters before it returns.
    with_buffer(buffer, |extra| unsafe {
        launch(config, function as Ptr, std::ptr::null_mut(), extra)
    })
}

/// Make a launch once more, in another stream.
pub fn launch_again(again: &Again, stream: Ptr) -> CuResult {
    let config = LaunchConfig {
        grid: again.grid,
        block: again.block,
        shared_bytes: again.shared_bytes,
        stream,
        attributes: again.attributes.as_ptr(),
        attribute_count: again.attributes.len() as u32,
    };
    issue_config(again.function, &config, &again.parameters)
}
