//! Contexts: who owns what, the order between streams, and the error that
//! sticks.

use crate::config;
use crate::driver::{Driver, driver};
use crate::error::{CuError, CuResult};
use crate::green::Green;
use crate::hardware::HardwareQueues;
use crate::registry::{gone, handle_of};
use crate::stream::{Stream, StreamKind};
use crate::sync::lock;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Values of `CUlimit` that are kept, from 0.
const LIMITS: usize = 8;
/// `CU_CTX_MAP_HOST`: always so, and always reported.
const MAP_HOST: u32 = 8;
/// Flags that a context may have.
const FLAGS: u32 = 0xff;

pub(crate) struct Context {
    pub(crate) id: u64,
    pub(crate) primary: bool,
    pub(crate) flags: AtomicU32,
    alive: AtomicBool,
    /// References of `cuCtxCreate` and `cuCtxAttach`.
    usage: AtomicU32,
    error: AtomicU32,
    /// Set while the context is torn down: nothing may wait for ever.
    pub(crate) aborting: AtomicBool,
    /// Written while a call waits alone: see [`Self::synchronize_alone`].
    launching: RwLock<()>,
    /// Held while work gets its place among the blocking streams.
    pub(crate) order: Mutex<()>,
    pub(crate) streams: Mutex<Vec<Arc<Stream>>>,
    pub(crate) hardware: HardwareQueues,
    limits: [AtomicU64; LIMITS],
    pub(crate) cache_config: AtomicU32,
    pub(crate) shared_config: AtomicU32,
}

impl Context {
    pub(crate) fn new(id: u64, primary: bool, flags: u32) -> Arc<Self> {
        let limits: [AtomicU64; LIMITS] = Default::default();
        for (limit, value) in limits.iter().zip([1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0]) {
            limit.store(value, SeqCst);
        }
        Arc::new(Self {
            id,
            primary,
            flags: AtomicU32::new(flags | MAP_HOST),
            alive: AtomicBool::new(!primary),
            usage: AtomicU32::new(1),
            error: AtomicU32::new(0),
            aborting: AtomicBool::new(false),
            launching: RwLock::new(()),
            order: Mutex::new(()),
            streams: Mutex::default(),
            hardware: HardwareQueues::default(),
            limits,
            cache_config: AtomicU32::new(0),
            shared_config: AtomicU32::new(1),
        })
    }

    /// Checks flags that `cuCtxCreate` and `cuCtxSetFlags` take.
    pub(crate) fn check_flags(flags: u32) -> CuResult {
        let schedule = flags & 7;
        if flags & !FLAGS != 0 || !matches!(schedule, 0 | 1 | 2 | 4) {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(())
    }

    pub(crate) fn set_flags(&self, flags: u32) -> CuResult {
        Self::check_flags(flags)?;
        self.flags.store(flags | MAP_HOST, SeqCst);
        Ok(())
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    pub(crate) fn attach(&self) {
        self.usage.fetch_add(1, SeqCst);
    }

    /// `cuCtxDetach`: whether that was the last reference.
    pub(crate) fn detach(&self) -> bool {
        self.usage.fetch_sub(1, SeqCst) == 1
    }

    /// Ready for work, not destroyed and not in error.
    ///
    /// # Errors
    /// `CONTEXT_IS_DESTROYED`, or the error that stuck.
    pub(crate) fn check(&self) -> CuResult {
        if !self.is_alive() {
            return Err(CuError::CONTEXT_IS_DESTROYED);
        }
        match self.error.load(SeqCst) {
            0 => Ok(()),
            code => Err(CuError(code)),
        }
    }

    /// Makes `error` stick, if none does yet: every later call returns it and
    /// work still queued is dropped.
    pub(crate) fn fail(&self, error: CuError) {
        let _ = self.error.compare_exchange(0, error.0, SeqCst, SeqCst);
    }

    pub(crate) fn failed(&self) -> bool {
        self.error.load(SeqCst) != 0
    }

    /// The stream that a null handle means, unless the thread has its own.
    pub(crate) fn legacy_stream(self: &Arc<Self>) -> CuResult<Arc<Stream>> {
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.iter().find(|s| s.kind == StreamKind::Legacy) {
            return Ok(stream.clone());
        }
        let stream = Stream::new(self, StreamKind::Legacy, 0, 0, None)?;
        // First in the list: it is looked for on every call.
        streams.insert(0, stream.clone());
        Ok(stream)
    }

    /// Takes a stream in; forgets those that ended and have nothing left to do.
    pub(crate) fn add_stream(&self, stream: Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|s| !(s.is_closed() && s.is_idle()));
        streams.push(stream);
    }

    /// Ends a stream. What is queued still runs, and is waited for where all streams are.
    pub(crate) fn end_stream(&self, stream: &Arc<Stream>) {
        stream.close();
        lock(&self.streams).retain(|s| !(s.is_closed() && s.is_idle()));
    }

    /// Waits for everything that was submitted before.
    pub(crate) fn synchronize(&self) -> CuResult {
        let streams = lock(&self.streams).clone();
        for stream in streams {
            stream.wait_all();
        }
        self.check()
    }

    /// [`Self::synchronize`] of the context with that number; nothing if it was destroyed.
    ///
    /// # Errors
    /// Those of the context.
    pub(crate) fn synchronize_by_id(driver: &Driver, id: u64) -> CuResult {
        let found = driver.contexts.find_map(|c| (c.id == id && c.is_alive()).then(|| c.clone()));
        found.map_or(Ok(()), |context| context.synchronize())
    }

    /// The same as [`Self::synchronize`], and calls of other threads that take [`Self::launching`] wait until the
    /// answer is dropped: what the GPU's driver does in calls that give memory back or load code.
    pub(crate) fn synchronize_alone(&self) -> CuResult<RwLockWriteGuard<'_, ()>> {
        let alone = self.launching.write().unwrap_or_else(PoisonError::into_inner);
        self.synchronize()?;
        Ok(alone)
    }

    /// Held during calls that the driver keeps waiting while another thread gives memory back or loads code: launches,
    /// event records, the making and ending of events and streams, begins of captures, questions of occupancy. (Not:
    /// queries and synchronising calls.) No call may take it twice.
    pub(crate) fn launching(&self) -> RwLockReadGuard<'_, ()> {
        self.launching.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn limit(&self, which: u32) -> CuResult<u64> {
        let limit = self.limits.get(which as usize).ok_or(CuError::UNSUPPORTED_LIMIT)?;
        Ok(limit.load(SeqCst))
    }

    pub(crate) fn set_limit(&self, which: u32, value: u64) -> CuResult {
        let limit = self.limits.get(which as usize).ok_or(CuError::UNSUPPORTED_LIMIT)?;
        limit.store(value, SeqCst);
        Ok(())
    }

    /// Ends the context's work and releases what it owns.
    pub(crate) fn tear_down(&self, driver: &Driver) {
        self.alive.store(false, SeqCst);
        self.aborting.store(true, SeqCst);
        let streams = std::mem::take(&mut *lock(&self.streams));
        for stream in &streams {
            stream.wait_all();
            stream.close();
        }
        driver.streams.retain(|s| s.context.id != self.id);
        driver.functions.retain(|f| f.module.context != self.id);
        driver.modules.retain(|m| m.context != self.id);
        driver.events.retain(|e| e.context != self.id);
        driver.memory.release_context(&driver.arbiter, self.id);
        self.error.store(0, SeqCst);
        self.aborting.store(false, SeqCst);
    }

    /// Brings the primary context to life.
    pub(crate) fn revive(&self) {
        self.alive.store(true, SeqCst);
    }
}

/// What is current to a thread: a context, seen through a green one perhaps.
#[derive(Clone)]
pub(crate) struct Current {
    pub(crate) context: Arc<Context>,
    pub(crate) green: Option<Arc<Green>>,
}

impl Current {
    /// The `CUcontext` that it is known by.
    pub(crate) fn handle(&self) -> usize {
        self.green.as_ref().map_or_else(|| handle_of(&self.context), Green::context_handle)
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.context.is_alive() && self.green.as_ref().is_none_or(|green| green.is_alive())
    }

    /// What a `CUcontext` stands for.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if nothing.
    pub(crate) fn find(driver: &Driver, handle: usize) -> CuResult<Self> {
        if let Some(context) = driver.contexts.find(handle) {
            return Ok(Self { context, green: None });
        }
        let green = Green::find(driver, handle)
            .ok_or_else(|| gone::<Context>(handle, CuError::INVALID_CONTEXT))?;
        Ok(Self { context: green.context.clone(), green: Some(green) })
    }
}

thread_local! {
    static STACK: RefCell<Vec<Current>> = const { RefCell::new(Vec::new()) };
    static OWN_STREAMS: RefCell<OwnStreams> = RefCell::default();
}

/// The thread's default streams, by context and green context; their threads
/// end with it.
#[derive(Default)]
struct OwnStreams(HashMap<(u64, u64), Arc<Stream>>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        for stream in self.0.values() {
            stream.context.end_stream(stream);
        }
    }
}

/// Runs `body` on the thread's context stack; a thread that is ending has none.
pub(crate) fn with_stack<R>(body: impl FnOnce(&mut Vec<Current>) -> R) -> CuResult<R> {
    STACK.try_with(|stack| body(&mut stack.borrow_mut())).map_err(|_| CuError::DEINITIALIZED)
}

/// The thread's current context, dead or in error though it may be.
///
/// # Errors
/// `INVALID_CONTEXT` if there is none.
pub(crate) fn current_any() -> CuResult<Arc<Context>> {
    Ok(current_entry()?.context)
}

/// Like [`current_any`], with the green context that it is seen through.
pub(crate) fn current_entry() -> CuResult<Current> {
    driver()?;
    with_stack(|stack| stack.last().cloned())?.ok_or(CuError::INVALID_CONTEXT)
}

/// With `TALLY_SOFTCUDA_STRICT=1` fails without a current context, where a GPU's driver may.
pub(crate) fn needs_context_if_strict() -> CuResult<()> {
    if config::is_strict() { current_entry().map(|_| ()) } else { Ok(()) }
}

/// The green context that is current, if one is.
pub(crate) fn current_green() -> Option<Arc<Green>> {
    current_entry().ok().and_then(|current| current.green)
}

/// The thread's current context, ready for work.
///
/// # Errors
/// `INVALID_CONTEXT`, `CONTEXT_IS_DESTROYED`, or the error that stuck.
pub(crate) fn current() -> CuResult<Arc<Context>> {
    let Current { context, green } = current_entry()?;
    context.check()?;
    if green.is_some_and(|green| !green.is_alive()) {
        return Err(CuError::CONTEXT_IS_DESTROYED);
    }
    Ok(context)
}

/// The calling thread's own default stream in `context`.
pub(crate) fn per_thread_stream(current: &Current) -> CuResult<Arc<Stream>> {
    let Current { context, green } = current;
    let key = (context.id, green.as_ref().map_or(0, |green| green.id));
    OWN_STREAMS
        .try_with(|own| {
            let mut own = own.borrow_mut();
            if let Some(stream) = own.0.get(&key).filter(|s| !s.is_closed()) {
                return Ok(stream.clone());
            }
            let kind = StreamKind::PerThread;
            let stream = match green {
                Some(green) => green.stream(kind, 0, 0)?,
                None => {
                    let stream = Stream::new(context, kind, 0, 0, None)?;
                    context.add_stream(stream.clone());
                    stream
                }
            };
            own.0.insert(key, stream.clone());
            Ok(stream)
        })
        .map_err(|_| CuError::DEINITIALIZED)?
}
