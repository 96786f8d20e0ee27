//! The host: one wasmtime engine, its settings, and how a file becomes a policy.

use crate::bindings::{Policy, PolicyPre};
use crate::compiled::{Checked, Compiled};
use crate::compiling;
use crate::host_calls::HostState;
use crate::policy::WasmPolicy;
use crate::{Capabilities, HostError, Limits, LoadError, Trust, entry, inspect};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use tally_trust::{SIGNATURE_BYTES_MAX, Verified, signature_file};
use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Policies alive at once: the one in charge, the one being loaded, and some that
/// wait for a reader to let go of them.
const POLICIES_MAX: u32 = 16;
/// Core instances in one component. An interpreter built as a component is made
/// of dozens.
const CORE_INSTANCES_MAX: u32 = 64;
/// Linear memories in one component: an interpreter's, and those of the stubs that stand
/// in for WASI.
const MEMORIES_MAX: u32 = 4;
/// Native stack of a policy.
const STACK_BYTES: usize = 256 << 10;
/// Frames of a backtrace.
const FRAMES_MAX: NonZeroUsize = NonZeroUsize::new(16).unwrap();
/// Compiled components that are remembered, so that loading the same bytes again
/// compiles nothing.
const REMEMBERED_MAX: usize = 8;
/// Memory of an ended instance that the next one reuses without a system call.
const RESIDENT_BYTES: usize = 1 << 20;

/// Loads policies. One for the whole core; it may be shared by threads.
///
/// A load reads the file, compiles it and checks that it is a component of the
/// contract's world ([`Compiled`]), starts an instance, calls its `init` and offers it
/// what an earlier policy saved ([`Compiled::start`]); any of it may refuse
/// ([`LoadError`]) and nothing of it touches the policy in charge.
pub struct PolicyHost {
    engine: Engine,
    linker: Linker<HostState>,
    limits: Limits,
    granted: Capabilities,
    trust: Trust,
    ticker: Arc<Ticker>,
    /// The latest first.
    remembered: Mutex<VecDeque<Arc<Checked>>>,
}

impl PolicyHost {
    /// A host under these limits.
    ///
    /// # Errors
    /// Limits under which no policy can run, or more address space than there is.
    pub fn new(limits: Limits) -> Result<Self, HostError> {
        limits.check()?;
        let wrong = |error: wasmtime::Error| HostError::Engine(format!("{error:#}"));
        let engine = Engine::new(&settings(&limits)).map_err(wrong)?;
        let mut linker = Linker::new(&engine);
        Policy::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state).map_err(wrong)?;
        // Four ticks a call at most: a call is stopped at most a quarter late.
        let tick_ms = (limits.call_time_ms_max / 4).clamp(1, 50);
        let ticker = Ticker::start(&engine, Duration::from_millis(tick_ms))
            .map_err(|error| HostError::Engine(error.to_string()))?;
        let (granted, trust) = (Capabilities::NONE, Trust::default());
        let (ticker, remembered) = (Arc::new(ticker), Mutex::default());
        Ok(PolicyHost { engine, linker, limits, granted, trust, ticker, remembered })
    }

    /// The same host, with these granted to every policy that it loads. Without: none.
    pub fn granting(mut self, granted: Capabilities) -> Self {
        self.granted = granted;
        self.remembered().clear();
        self
    }

    /// The same host, loading only what this trusts. Without: anything.
    pub fn trusting(mut self, trust: Trust) -> Self {
        self.trust = trust;
        self
    }

    /// Load a policy from a file and call its `init` with `config`: compiled, started
    /// and without a state of an earlier one. Takes tens of milliseconds: not for the
    /// dispatch thread.
    ///
    /// # Errors
    /// [`LoadError`] says what is wrong with the file and what to do.
    pub fn load_file(&self, path: &Path, config: &str) -> Result<WasmPolicy, LoadError> {
        self.compile_file(path)?.start(config, None)
    }

    /// Load a policy from memory; `name` stands for the file in messages.
    ///
    /// # Errors
    /// As for [`Self::load_file`].
    pub fn load_bytes(
        &self,
        name: &str,
        bytes: &[u8],
        config: &str,
    ) -> Result<WasmPolicy, LoadError> {
        self.compile_bytes(name, bytes)?.start(config, None)
    }

    /// Read, compile and check a policy, without starting it. The same bytes as one
    /// of the last few are not compiled again.
    ///
    /// # Errors
    /// [`LoadError`] says what is wrong with the file and what to do.
    pub fn compile_file(&self, path: &Path) -> Result<Compiled, LoadError> {
        let started = Instant::now();
        let file = path.display().to_string();
        let bytes = read(path, self.limits.component_bytes_max)?;
        let signature = if self.trust.wants_signatures() { signature_of(path)? } else { None };
        let stem = path.file_stem().unwrap_or(path.as_os_str());
        let name = stem.to_string_lossy().into_owned();
        let source = Source { name: &name, file: &file, path: Some(path), started };
        self.compile(source, &bytes, signature.as_deref())
    }

    /// The same for a file that somebody else has read, and its signature if there is one.
    ///
    /// # Errors
    /// As for [`Self::compile_file`].
    pub fn compile_read(
        &self,
        path: &Path,
        bytes: &[u8],
        signature: Option<&[u8]>,
    ) -> Result<Compiled, LoadError> {
        let file = path.display().to_string();
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let source = Source { name: &name, file: &file, path: Some(path), started: Instant::now() };
        self.compile(source, bytes, signature)
    }

    /// Compile and check a policy from memory; `name` stands for the file in messages.
    /// It has no signature.
    ///
    /// # Errors
    /// As for [`Self::compile_file`].
    pub fn compile_bytes(&self, name: &str, bytes: &[u8]) -> Result<Compiled, LoadError> {
        let source = Source { name, file: name, path: None, started: Instant::now() };
        self.compile(source, bytes, None)
    }

    /// The one place where bytes become a component. Whether they may is settled before
    /// anything looks into them.
    fn compile(
        &self,
        source: Source<'_>,
        bytes: &[u8],
        signature: Option<&[u8]>,
    ) -> Result<Compiled, LoadError> {
        let Source { name, file, path, started } = source;
        let bytes_max = self.limits.component_bytes_max;
        if bytes.len() > bytes_max {
            return Err(LoadError::TooLarge { file: file.into(), bytes_max });
        }
        let Verified { digest, signed_by } = self.trust.check(file, bytes, signature)?;
        let digest = digest.hex();
        let checked = match self.recall(&digest) {
            Some(known) => known,
            None => self.check(file, bytes, digest)?,
        };
        let compiled = Compiled {
            checked,
            name: name.into(),
            path: path.map(Path::to_path_buf),
            file: file.into(),
            signed_by: signed_by.map(|key| key.to_string().into()),
            compile_ms: started.elapsed().as_secs_f64() * 1e3,
        };
        let lacking = compiled.needs().without(compiled.granted());
        if !lacking.is_empty() {
            tracing::warn!(
                target: "policy", policy = name,
                "imports functions that take capabilities which it has not been granted: {}. \
                 Calling one is a fault", lacking.names().join(", ")
            );
        }
        Ok(compiled)
    }

    fn check(&self, file: &str, bytes: &[u8], digest: String) -> Result<Arc<Checked>, LoadError> {
        inspect::preamble(file, bytes)?;
        inspect::nesting(file, bytes)?;
        // What is said of a component that does not compile is about the file as it is; so that one is compiled twice.
        let compile = |bytes: &[u8]| Component::new(&self.engine, bytes);
        let component = compiling::apart(|| {
            let shortened = entry::shortened(bytes).map(|bytes| compile(&bytes));
            match shortened {
                Some(Ok(component)) => Ok(component),
                Some(Err(error)) => {
                    tracing::debug!(target: "policy", "{file}: compiled as it is: {error:#}");
                    compile(bytes)
                }
                None => compile(bytes),
            }
        });
        let component = component.map_err(|error| inspect::not_compiled(file, &error))?;
        let imports = inspect::imports(file, &component, &self.engine)?;
        let pre = self.linker.instantiate_pre(&component);
        let pre = pre.map_err(|error| inspect::wrong_import(file, &error))?;
        inspect::exports(file, &component, &self.engine)?;
        let state = inspect::state(file, &component, &self.engine)?;
        let pre = PolicyPre::new(pre).map_err(|error| inspect::wrong_export(file, &error))?;
        let (limits, granted, ticker) = (self.limits.clone(), self.granted, self.ticker.clone());
        let checked = Arc::new(Checked { pre, state, digest, imports, limits, granted, ticker });
        let mut remembered = self.remembered();
        remembered.push_front(checked.clone());
        remembered.truncate(REMEMBERED_MAX);
        Ok(checked)
    }

    /// A component of this digest, if it was compiled lately.
    fn recall(&self, digest: &str) -> Option<Arc<Checked>> {
        let mut remembered = self.remembered();
        let at = remembered.iter().position(|checked| checked.digest == digest)?;
        let known = remembered.remove(at)?;
        remembered.push_front(known.clone());
        Some(known)
    }

    fn remembered(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<Checked>>> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where bytes come from, and since when they are being loaded.
struct Source<'a> {
    name: &'a str,
    /// What messages call it.
    file: &'a str,
    path: Option<&'a Path>,
    started: Instant,
}

/// A file, of which one byte more than allowed tells: it may be anything, and endless.
fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, LoadError> {
    let unreadable = |source| LoadError::Read { file: path.display().to_string(), source };
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(unreadable)?;
    opened.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// What is in the file beside a policy that is its signature, if there is one.
fn signature_of(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    match read(&signature_file(path), SIGNATURE_BYTES_MAX) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(LoadError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What was measured to serve (a call 0.2 us, a new instance 11); see
/// `benches/decide.rs`.
fn settings(limits: &Limits) -> Config {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(POLICIES_MAX)
        .total_core_instances(POLICIES_MAX * CORE_INSTANCES_MAX)
        .max_core_instances_per_component(CORE_INSTANCES_MAX)
        .total_memories(POLICIES_MAX * MEMORIES_MAX)
        .max_memories_per_component(MEMORIES_MAX)
        .total_tables(POLICIES_MAX * 8)
        .max_tables_per_component(8)
        .max_memory_size(limits.memory_bytes.next_multiple_of(64 << 10))
        .linear_memory_keep_resident(RESIDENT_BYTES);
    let mut config = Config::new();
    config
        // What async calls would need costs every call, async or not.
        .concurrency_support(false)
        // Fuel bounds a call tightly and alike on each run; epochs bound time.
        .consume_fuel(true)
        .epoch_interruption(true)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool))
        .memory_init_cow(true)
        .max_wasm_stack(STACK_BYTES)
        .wasm_backtrace_max_frames(Some(FRAMES_MAX))
        // The same inputs give the same decisions, on any processor.
        .cranelift_nan_canonicalization(true)
        .wasm_relaxed_simd(false)
        // Not needed, so not there to go wrong.
        .wasm_simd(false)
        .wasm_memory64(false);
    config
}

/// Advances the engine's epoch, by which a call that runs too long is stopped. Without calls it sleeps.
pub struct Ticker {
    tick: Duration,
    ticking: Arc<Ticking>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Ticks without a call after which the thread sleeps.
const IDLE_TICKS: u32 = 20;
/// It looks about so often then: a call whose beginning it misses may run on for so long.
const IDLE_LOOK: Duration = Duration::from_millis(500);

/// Of one policy: tells the ticker of its calls.
#[derive(Debug)]
pub struct Beat {
    is_called: AtomicBool,
    is_running: AtomicBool,
    ticking: Arc<Ticking>,
}

/// The ticker's thread.
#[derive(Debug, Default)]
struct Ticking {
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
    beats: Mutex<Vec<Weak<Beat>>>,
}

impl Ticking {
    /// Whether there was a call since it was asked last, or is one.
    fn is_wanted(&self) -> bool {
        let mut beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_wanted = false;
        beats.retain(|beat| {
            let Some(beat) = beat.upgrade() else { return false };
            is_wanted |= beat.is_called.swap(false, SeqCst) | beat.is_running.load(SeqCst);
            true
        });
        is_wanted
    }

    #[cold]
    fn wake(&self) {
        if self.is_asleep.swap(false, SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

impl Beat {
    /// A call begins.
    #[inline]
    pub fn begin(&self) {
        self.is_called.store(true, Relaxed);
        self.is_running.store(true, Relaxed);
        if self.ticking.is_asleep.load(Relaxed) {
            self.ticking.wake();
        }
    }

    /// It has ended.
    #[inline]
    pub fn end(&self) {
        self.is_running.store(false, Relaxed);
    }
}

impl Ticker {
    fn start(engine: &Engine, tick: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let (engine, ticking) = (engine.clone(), Arc::new(Ticking::default()));
        let own = ticking.clone();
        let run = move || {
            let _ = own.thread.set(std::thread::current());
            let mut idle = 0;
            while let Err(TryRecvError::Empty) = stopped.try_recv() {
                std::thread::sleep(tick);
                engine.increment_epoch();
                idle = if own.is_wanted() { 0 } else { idle + 1 };
                if idle >= IDLE_TICKS {
                    own.is_asleep.store(true, SeqCst);
                    if !own.is_wanted() {
                        std::thread::park_timeout(IDLE_LOOK);
                    }
                    own.is_asleep.store(false, SeqCst);
                    idle = IDLE_TICKS - 1;
                }
            }
        };
        let thread = std::thread::Builder::new().name("policy-epoch".into()).spawn(run)?;
        Ok(Ticker { tick, ticking, stop: Some(stop), thread: Some(thread) })
    }

    /// For a policy.
    pub fn beat(&self) -> Arc<Beat> {
        let beat = Arc::new(Beat {
            is_called: AtomicBool::new(false),
            is_running: AtomicBool::new(false),
            ticking: self.ticking.clone(),
        });
        let mut beats = self.ticking.beats.lock().unwrap_or_else(PoisonError::into_inner);
        beats.push(Arc::downgrade(&beat));
        beat
    }

    /// Ticks after which at least so much time has passed.
    pub fn ticks(&self, ms: u64) -> u64 {
        // The first tick may come at once.
        ms.div_ceil(self.tick.as_millis() as u64) + 1
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times that the thread of this name has slept.
    fn sleeps() -> u64 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let texts = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")));
        let of = |text: &str, key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim().to_owned())
        };
        let all =
            texts.flatten().filter(|text| of(text, "Name:").as_deref() == Some("policy-epoch"));
        all.map(|text| of(&text, "voluntary_ctxt_switches:").unwrap().parse::<u64>().unwrap()).sum()
    }

    #[test]
    fn without_calls_the_ticker_sleeps_and_a_call_wakes_it() {
        let engine = Engine::default();
        let ticker = Ticker::start(&engine, Duration::from_millis(1)).unwrap();
        let beat = ticker.beat();
        let asleep = || ticker.ticking.is_asleep.load(SeqCst);
        let until = |wanted: bool| {
            let start = Instant::now();
            while asleep() != wanted {
                assert!(start.elapsed() < Duration::from_secs(20), "asleep: {}", !wanted);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        until(true);
        let before = sleeps();
        std::thread::sleep(Duration::from_secs(2));
        assert!(sleeps() - before <= 20, "{} times in 2 s", sleeps() - before);
        // A long call keeps it awake until its end.
        until(true);
        beat.begin();
        until(false);
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(2));
            assert!(!asleep());
        }
        beat.end();
        until(true);
        drop(beat);
        until(true);
    }
}
