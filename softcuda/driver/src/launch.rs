//! Kernel launches: checked and copied when they are made, run later.

use crate::config::{self, BLOCK_DIM_MAX, BLOCK_THREADS_MAX, GRID_DIM_MAX, PARAM_BYTES_MAX};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::exec::Scratch;
use crate::ffi::In;
use crate::green::Green;
use crate::memory::MemoryMap;
use crate::module::Function;
use crate::sm::SmSet;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Compiling that waits for launches fails after so long.
const COMPILE_MAX: Duration = Duration::from_secs(20);

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// A kernel with its parameters, ready to run.
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) shape: Shape,
    pub(crate) params: Box<[u8]>,
    /// The launch's own priority, if it has one.
    pub(crate) priority: Option<i32>,
    pub(crate) cooperative: bool,
    /// The hints among its attributes, by number: nothing here heeds them.
    pub(crate) hints: BTreeMap<u32, [u32; 16]>,
    /// The green context whose SMs it is confined to: that of the stream it was launched or captured on, or the
    /// one that was current when its node was made.
    pub(crate) green: Option<Arc<Green>>,
    /// It is of the kernel that [`crate::config::fault`] names.
    faulty: bool,
    /// Whether the parameters came in one buffer, through `extra`.
    from_extra: bool,
    /// Made when a program asks.
    lists: OnceLock<ParamLists>,
}

/// Launches that this process has made.
static MADE: AtomicU64 = AtomicU64::new(0);

pub(crate) fn count_launch() {
    MADE.fetch_add(1, SeqCst);
}

/// Wait for so many launches as `TALLY_SOFTCUDA_COMPILE_LAUNCHES` says.
///
/// # Errors
/// `UNKNOWN` if they do not come.
pub(crate) fn wait_as_compiler(kernels: &[String]) -> CuResult {
    let (wanted, before) = (config::launches_to_compile(kernels), MADE.load(SeqCst));
    if before == 0 || wanted == 0 {
        return Ok(());
    }
    let begin = Instant::now();
    while MADE.load(SeqCst) - before < wanted {
        if begin.elapsed() > COMPILE_MAX {
            return Err(CuError::UNKNOWN);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The parameters as `cuGraphKernelNodeGetParams` gives them: addresses in a
/// launch's own buffer.
struct ParamLists {
    each: Box<[usize]>,
    /// `extra`, whose second pair points to `_bytes`.
    extra: [usize; 5],
    _bytes: Box<usize>,
}

/// `CU_LAUNCH_ATTRIBUTE_*` that change how fast a kernel is, not what it does.
pub(crate) fn is_hint(attribute: u32) -> bool {
    matches!(attribute, 1 | 5 | 9 | 10 | 13 | 14)
}

/// `CU_LAUNCH_PARAM_END`, `_BUFFER_POINTER` and `_BUFFER_SIZE`.
const EXTRA_END: usize = 0;
const EXTRA_POINTER: usize = 1;
const EXTRA_SIZE: usize = 2;
/// Entries of `extra` that are looked at before it counts as broken.
const EXTRA_MAX: usize = 16;

impl Launch {
    /// Checks a launch and copies its parameters, from `params` or `extra`.
    ///
    /// # Errors
    /// What the driver returns for a bad shape, bad parameters or a kernel
    /// that cannot run here.
    pub(crate) fn prepare(
        function: Arc<Function>,
        shape: Shape,
        params: &In<*mut c_void>,
        extra: &In<*mut c_void>,
    ) -> CuResult<Self> {
        check_shape(&function, shape)?;
        let kernel = function.kernel()?;
        if let Some(error) = &kernel.unsupported {
            crate::config::log(format_args!("kernel `{}`: {error}", kernel.name));
            return Err(CuError::NOT_SUPPORTED);
        }
        let params = copy_params(&function, params, extra)?;
        let (from_extra, lists) = (!extra.is_null(), OnceLock::new());
        let faulty = crate::config::fault()
            .is_some_and(|(name, bytes)| name == kernel.name && params.len() > bytes);
        let (priority, cooperative, green, hints) = (None, false, None, BTreeMap::new());
        Ok(Self {
            function,
            shape,
            params,
            priority,
            cooperative,
            hints,
            green,
            faulty,
            from_extra,
            lists,
        })
    }

    /// A copy of the launch, to be changed before anyone sees it.
    pub(crate) fn twin(&self) -> Self {
        Self {
            function: self.function.clone(),
            shape: self.shape,
            params: self.params.clone(),
            priority: self.priority,
            cooperative: self.cooperative,
            hints: self.hints.clone(),
            green: self.green.clone(),
            faulty: self.faulty,
            from_extra: self.from_extra,
            lists: OnceLock::new(),
        }
    }

    /// The parameters as they were given, as `kernelParams` or as `extra`; the
    /// other is null. Valid for as long as this launch is.
    pub(crate) fn param_lists(&self) -> (*const *mut c_void, *const *mut c_void) {
        let lists = self.lists.get_or_init(|| self.make_lists());
        let null = std::ptr::null();
        match (self.from_extra, lists.each.is_empty()) {
            (true, _) => (null, lists.extra.as_ptr().cast()),
            (false, true) => (null, null),
            (false, false) => (lists.each.as_ptr().cast(), null),
        }
    }

    fn make_lists(&self) -> ParamLists {
        let start = self.params.as_ptr() as usize;
        let params = self.function.kernel().map_or(&[][..], |k| &k.params);
        let each = params.iter().map(|p| start + p.offset as usize).collect();
        let bytes = Box::new(self.params.len());
        let size = std::ptr::from_ref(&*bytes) as usize;
        let extra = [EXTRA_POINTER, start, EXTRA_SIZE, size, EXTRA_END];
        ParamLists { each, extra, _bytes: bytes }
    }

    /// Makes it cooperative: all blocks run at one time.
    ///
    /// # Errors
    /// `COOPERATIVE_LAUNCH_TOO_LARGE` if there are fewer SMs for it than blocks.
    pub(crate) fn make_cooperative(&mut self) -> CuResult {
        if self.blocks() > u64::from(self.sms()?.count()) {
            return Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        self.cooperative = true;
        Ok(())
    }

    /// The SMs that it may run on.
    pub(crate) fn sms(&self) -> CuResult<SmSet> {
        match &self.green {
            Some(green) => Ok(green.sms),
            None => Ok(SmSet::first(driver()?.arbiter.sms())),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.shape.grid.iter().map(|&d| u64::from(d)).product()
    }

    /// Runs one block of it.
    ///
    /// # Errors
    /// What its trap means.
    pub(crate) fn run_block(
        &self,
        index: u64,
        device: (u32, u32),
        memory: &MemoryMap,
        scratch: &mut Scratch,
        cancelled: &AtomicBool,
    ) -> CuResult {
        let Shape { grid, block, shared_bytes } = self.shape;
        if self.faulty && index + 1 == self.blocks() {
            return Ok(());
        }
        let [width, height] = [u64::from(grid[0]), u64::from(grid[1])];
        let block_index =
            [index % width, index / width % height, index / width / height].map(|i| i as u32);
        self.function.module.code.run_block(
            self.function.kernel()?,
            &self.params,
            (grid, block, block_index),
            shared_bytes,
            device,
            memory,
            scratch,
            cancelled,
        )
    }
}

fn check_shape(function: &Function, shape: Shape) -> CuResult {
    let within =
        |dims: [u32; 3], max: [u32; 3]| dims.iter().zip(max).all(|(&d, max)| d != 0 && d <= max);
    if !within(shape.grid, GRID_DIM_MAX) || !within(shape.block, BLOCK_DIM_MAX) {
        return Err(CuError::INVALID_VALUE);
    }
    let threads: u32 = shape.block.iter().product();
    let kernel = function.kernel()?;
    // A cluster of one block is what every block is anyway.
    if function.attributes.required_cluster.iter().any(|d| d.load(SeqCst) > 1) {
        return Err(CuError::INVALID_CLUSTER_SIZE);
    }
    if threads > BLOCK_THREADS_MAX {
        return Err(CuError::INVALID_VALUE);
    }
    if threads > kernel.max_threads {
        return Err(CuError::LAUNCH_OUT_OF_RESOURCES);
    }
    if kernel.required_block.is_some_and(|required| required != shape.block)
        || shape.shared_bytes > function.dynamic_shared_max()?
    {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(())
}

fn copy_params(
    function: &Function,
    params: &In<*mut c_void>,
    extra: &In<*mut c_void>,
) -> CuResult<Box<[u8]>> {
    let kernel = function.kernel()?;
    if kernel.param_bytes > PARAM_BYTES_MAX {
        return Err(CuError::INVALID_VALUE);
    }
    let mut buffer = vec![0u8; kernel.param_bytes as usize];
    if !extra.is_null() {
        let given = extra_buffer(extra)?;
        let common = given.len().min(buffer.len());
        if given.len() < smallest_buffer(kernel) {
            return Err(CuError::INVALID_VALUE);
        }
        buffer[..common].copy_from_slice(&given[..common]);
    } else if !kernel.params.is_empty() {
        for (i, param) in kernel.params.iter().enumerate() {
            let value = In::new(params.at(i)?.cast_const().cast::<u8>());
            let (from, size) = (param.offset as usize, param.size as usize);
            let slot = buffer.get_mut(from..from + size).ok_or(CuError::INVALID_VALUE)?;
            slot.copy_from_slice(value.bytes(size)?);
        }
    }
    Ok(buffer.into_boxed_slice())
}

/// Bytes up to the end of the last parameter.
fn smallest_buffer(kernel: &tally_softcuda_vm::Kernel) -> usize {
    kernel.params.iter().map(|p| (p.offset + p.size) as usize).max().unwrap_or(0)
}

/// The parameter buffer that `extra` describes.
fn extra_buffer(extra: &In<*mut c_void>) -> CuResult<Vec<u8>> {
    let (mut pointer, mut size) = (std::ptr::null_mut::<c_void>(), 0);
    for i in 0..EXTRA_MAX {
        match extra.at(2 * i)? as usize {
            EXTRA_END if size == 0 => return Ok(Vec::new()),
            EXTRA_END => {
                let size = usize::min(size, PARAM_BYTES_MAX as usize);
                return Ok(In::new(pointer.cast_const().cast::<u8>()).bytes(size)?.to_vec());
            }
            EXTRA_POINTER => pointer = extra.at(2 * i + 1)?,
            EXTRA_SIZE => {
                size = In::new(extra.at(2 * i + 1)?.cast_const().cast::<usize>()).get()?;
            }
            _ => return Err(CuError::INVALID_VALUE),
        }
    }
    Err(CuError::INVALID_VALUE)
}
