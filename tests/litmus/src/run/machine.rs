//! What a process keeps between programs: the driver, the primary context, memory.

use super::memory::{DeviceMemory, HostMemory};
use super::module::Loaded;
use crate::cu::{Cuda, Handle};
use crate::program::{Device, Module, Source};
use anyhow::Result;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Words of the device that the primary context keeps ready.
const WORDS_KEPT: u32 = 1 << 17;
/// Device attributes `MULTIPROCESSOR_COUNT` and `MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
const SMS: i32 = 16;
const SHARED_OPTIN: i32 = 97;

/// How a process runs programs.
pub struct Settings {
    /// Which of two processes this is.
    pub process: u8,
    /// The file that the host's memory of two processes is in.
    pub shared: Option<PathBuf>,
    /// Percent of the loops that programs ask for.
    pub work_percent: u32,
    pub folder: PathBuf,
}

pub struct Machine {
    pub cuda: &'static Cuda,
    pub process: u8,
    pub device: Device,
    pub shared_max: u32,
    pub folder: PathBuf,
    /// The device's primary context.
    pub primary: Handle,
    pub primary_memory: Arc<Mutex<Option<DeviceMemory>>>,
    pub primary_kernels: Arc<Loaded>,
    pub host: HostMemory,
    pub least_priority: i32,
    pub greatest_priority: i32,
    work_percent: u32,
}

impl Machine {
    /// Opens the device.
    ///
    /// # Errors
    /// If there is none.
    pub fn new(settings: &Settings) -> Result<Self> {
        let cuda = Cuda::open()?;
        let mut primary = 0;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: valid out pointers.
        unsafe {
            cuda.cuDevicePrimaryCtxRetain(&mut primary, 0)?;
            cuda.cuCtxSetCurrent(primary)?;
            cuda.cuCtxGetStreamPriorityRange(&mut least, &mut greatest)?;
        }
        let shared_max = cuda.attribute(SHARED_OPTIN);
        let base = Module { context: 0, source: Source::Heap, constant: 0 };
        let kernels = Loaded::new(cuda, base, &settings.folder, shared_max)?;
        let (sms, mut per_sm) = (cuda.attribute(SMS), 0);
        let barrier = kernels.function("barrier");
        // SAFETY: a function of ours and a valid out pointer.
        unsafe { cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut per_sm, barrier, 32, 0) }?;
        Ok(Self {
            cuda,
            process: settings.process,
            device: Device { sms, wave: sms * u32::try_from(per_sm).unwrap_or(1) },
            shared_max,
            folder: settings.folder.clone(),
            primary,
            primary_memory: Arc::new(Mutex::new(Some(DeviceMemory::new(cuda, WORDS_KEPT, 0)?))),
            primary_kernels: Arc::new(kernels),
            host: HostMemory::new(cuda, settings.shared.as_deref())?,
            least_priority: least,
            greatest_priority: greatest,
            work_percent: settings.work_percent,
        })
    }

    /// So many loops as the device is to do where a program says so many.
    pub fn loops(&self, loops: u32) -> u32 {
        (u64::from(loops) * u64::from(self.work_percent) / 100) as u32
    }

    /// A priority by its steps above the least urgent.
    pub fn priority(&self, urgency: u8) -> i32 {
        (self.least_priority - i32::from(urgency)).max(self.greatest_priority)
    }
}
