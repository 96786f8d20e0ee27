//! The process's one device: made by `cuInit`, gone after a fork.

use crate::config;
use crate::context::Context;
use crate::error::{CuError, CuResult};
use crate::event::Event;
use crate::exports::link::Link;
use crate::graph::{Exec, Graph};
use crate::green::{Descriptor, Green};
use crate::memory::{MemoryMap, Pool};
use crate::module::{Function, KernelHandle, Library, Module};
use crate::registry::Registry;
use crate::sm::{Arbiter, AttachError, Wish};
use crate::stream::Stream;
use crate::sync::lock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

pub(crate) struct Driver {
    pub(crate) arbiter: Arbiter,
    pub(crate) memory: MemoryMap,
    /// Context of `cuDevicePrimaryCtxRetain`; the same handle for ever.
    pub(crate) primary: Arc<Context>,
    /// How often the primary context is retained.
    pub(crate) primary_refs: Mutex<u32>,
    pub(crate) contexts: Registry<Context>,
    pub(crate) streams: Registry<Stream>,
    pub(crate) events: Registry<Event>,
    pub(crate) modules: Registry<Module>,
    pub(crate) libraries: Registry<Library>,
    pub(crate) links: Registry<Link>,
    pub(crate) functions: Registry<Function>,
    pub(crate) kernels: Registry<KernelHandle>,
    pub(crate) graphs: Registry<Graph>,
    pub(crate) execs: Registry<Exec>,
    pub(crate) greens: Registry<Green>,
    pub(crate) descriptors: Registry<Descriptor>,
    pub(crate) pools: Registry<Pool>,
    pub(crate) default_pool: Arc<Pool>,
    /// Pool of `cuMemAllocAsync`, as `cuDeviceSetMemPool` chose it.
    pub(crate) current_pool: Mutex<Arc<Pool>>,
    next_id: AtomicU64,
}

const NEW: u32 = 0;
const READY: u32 = 1;
const FORKED: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(NEW);
static DRIVER: OnceLock<Driver> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

/// The driver, once `cuInit` was called in this very process.
///
/// # Errors
/// `NOT_INITIALIZED` otherwise, as in the child of a fork.
#[inline]
pub(crate) fn driver() -> CuResult<&'static Driver> {
    match DRIVER.get() {
        Some(driver) if STATE.load(SeqCst) == READY => Ok(driver),
        _ => Err(CuError::NOT_INITIALIZED),
    }
}

pub(crate) fn init(flags: u32) -> CuResult {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    match STATE.load(SeqCst) {
        READY => return Ok(()),
        FORKED => return Err(CuError::NOT_INITIALIZED),
        _ => {}
    }
    let _starting = lock(&STARTING);
    if STATE.load(SeqCst) == READY {
        return Ok(());
    }
    std::thread::sleep(config::init_time());
    let driver = start()?;
    if DRIVER.set(driver).is_ok() {
        // SAFETY: both handlers are plain functions that stay loaded (the
        // library is linked with -z nodelete) and are safe where they run.
        unsafe {
            libc::pthread_atfork(None, None, Some(in_forked_child));
            libc::atexit(at_exit);
        }
    }
    STATE.store(READY, SeqCst);
    Ok(())
}

fn start() -> CuResult<Driver> {
    let path = config::device_path();
    let wish = Wish { sms: config::sms(), memory_bytes: config::memory_bytes() };
    let arbiter = Arbiter::attach(&path, wish).map_err(|error| {
        config::log(format_args!("{error}"));
        match error {
            AttachError::Full { .. } => CuError::MPS_MAX_CLIENTS_REACHED,
            _ => CuError::SYSTEM_NOT_READY,
        }
    })?;
    let memory = MemoryMap::new(arbiter.memory_bytes()).map_err(|error| {
        config::log(format_args!("reserving address space: {error}"));
        CuError::OUT_OF_MEMORY
    })?;
    let contexts = Registry::default();
    let primary = Context::new(1, true, 0);
    contexts.insert(&primary);
    let pools = Registry::default();
    let default_pool = Arc::new(Pool::new());
    pools.insert(&default_pool);
    Ok(Driver {
        arbiter,
        memory,
        primary,
        primary_refs: Mutex::new(0),
        contexts,
        streams: Registry::default(),
        events: Registry::default(),
        modules: Registry::default(),
        libraries: Registry::default(),
        links: Registry::default(),
        functions: Registry::default(),
        kernels: Registry::default(),
        graphs: Registry::default(),
        execs: Registry::default(),
        greens: Registry::default(),
        descriptors: Registry::default(),
        pools,
        current_pool: Mutex::new(default_pool.clone()),
        default_pool,
        next_id: AtomicU64::new(2),
    })
}

impl Driver {
    /// Counts a user of the primary context, which lives while there is one.
    pub(crate) fn retain_primary(&self) {
        let mut refs = lock(&self.primary_refs);
        if *refs == 0 {
            self.primary.revive();
        }
        *refs += 1;
    }

    /// Takes back a [`retain_primary`](Self::retain_primary).
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if there was none.
    pub(crate) fn release_primary(&self) -> CuResult {
        let mut refs = lock(&self.primary_refs);
        *refs = refs.checked_sub(1).ok_or(CuError::INVALID_CONTEXT)?;
        if *refs == 0 {
            self.primary.tear_down(self);
        }
        Ok(())
    }

    /// A number that nothing else in the process has.
    pub(crate) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, SeqCst)
    }
}

/// The child has no worker threads and must leave the parent's SMs alone.
extern "C" fn in_forked_child() {
    STATE.store(FORKED, SeqCst);
}

/// Hands the SMs on at once; after `_exit` or a kill the others find out.
extern "C" fn at_exit() {
    if let Ok(driver) = driver() {
        driver.arbiter.detach();
    }
}
