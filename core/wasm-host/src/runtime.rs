//! The host: one wasmtime engine, its settings, and how a file becomes a policy.

use crate::bindings::{Provided, ProvidedPre};
use crate::compiled::{Checked, Compiled, Exported};
use crate::imports::HostState;
use crate::policy::WasmPolicy;
use crate::{Capabilities, ComponentFile, HostError, Limits, LoadError, Trust, inspect};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use tally_compiler::{Cancel, Compiler};
use tally_contract::limits::{COMPONENT_CORE_INSTANCES_MAX, COMPONENT_MEMORIES_MAX};
use tally_trust::Verified;
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Policies alive at once: the active one, the one being loaded, and some that
/// wait for a reader to release them.
const POLICIES_MAX: u32 = 16;
/// Compiled components that are remembered, so that loading the same bytes again
/// compiles nothing.
const REMEMBERED_MAX: usize = 8;
/// Memory of an ended instance that the next one reuses without a system call.
const RESIDENT_BYTES: usize = 1 << 20;

/// Loads policies. One for the whole core; it may be shared by threads.
///
/// A load reads the file, compiles it in a child process and checks that it is a component of the
/// contract's world ([`Compiled`]), starts an instance, calls its `init` and offers it
/// what an earlier policy saved ([`Compiled::start`]); any of it may refuse
/// ([`LoadError`]) and nothing of it touches the active policy.
pub struct PolicyHost {
    engine: Engine,
    linker: Linker<HostState>,
    compiler: Compiler,
    limits: Limits,
    granted: Capabilities,
    trust: Trust,
    ticker: Arc<Ticker>,
    /// Ordered by last use, the latest first; at most [`REMEMBERED_MAX`].
    remembered: Mutex<VecDeque<Arc<Checked>>>,
}

impl PolicyHost {
    /// A host under these limits, which starts this program again to compile.
    ///
    /// # Errors
    /// If `main` does not begin with [`serve_if_child`](crate::serve_if_child). Limits under which no policy can
    /// run, or more address space than there is.
    pub fn new(limits: Limits) -> Result<Self, HostError> {
        Self::compiling_by(Compiler::this_program()?, limits)
    }

    /// A host under these limits that compiles by this compiler.
    ///
    /// # Errors
    /// Limits under which no policy can run, or more address space than there is.
    pub fn compiling_by(compiler: Compiler, limits: Limits) -> Result<Self, HostError> {
        limits.check()?;
        let wrong = |error: wasmtime::Error| HostError::Engine(format!("{error:#}"));
        let engine = Engine::new(&settings(&limits)).map_err(wrong)?;
        let mut linker = Linker::new(&engine);
        Provided::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state).map_err(wrong)?;
        let ticker = Ticker::start(&engine, Duration::from_millis(limits.tick_ms()))
            .map_err(|error| HostError::Engine(error.to_string()))?;
        let (granted, trust) = (Capabilities::NONE, Trust::default());
        let (ticker, remembered) = (Arc::new(ticker), Mutex::default());
        Ok(PolicyHost { engine, linker, compiler, limits, granted, trust, ticker, remembered })
    }

    /// The same host, which grants these capabilities to every policy that it loads. By default none are
    /// granted.
    pub fn granting(mut self, granted: Capabilities) -> Self {
        self.granted = granted;
        self.remembered().clear();
        self
    }

    /// The same host, which loads only policies that `trust` accepts. By default it loads any.
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
        let signed = self.trust.wants_signatures();
        let file = ComponentFile::read(path, self.limits.component_bytes_max, signed)?;
        self.compile(&file, &Cancel::never())
    }

    /// Compile and check a policy from memory; `name` stands for the file in messages.
    /// It has no signature.
    ///
    /// # Errors
    /// As for [`Self::compile_file`].
    pub fn compile_bytes(&self, name: &str, bytes: &[u8]) -> Result<Compiled, LoadError> {
        self.compile(&ComponentFile::from_memory(name, bytes.into()), &Cancel::never())
    }

    /// Whether policies need a signature beside them.
    pub fn wants_signatures(&self) -> bool {
        self.trust.wants_signatures()
    }

    /// The one place where bytes become a component. Whether they may is settled before
    /// anything looks into them. Another thread can end it by `cancel`.
    ///
    /// # Errors
    /// As for [`Self::compile_file`]; [`LoadError::Cancelled`].
    pub fn compile(&self, from: &ComponentFile, cancel: &Cancel) -> Result<Compiled, LoadError> {
        let started = Instant::now();
        let ComponentFile { name, file, path, bytes, signature } = from;
        let bytes_max = self.limits.component_bytes_max;
        if bytes.len() > bytes_max {
            return Err(LoadError::TooLarge { file: file.clone(), bytes_max });
        }
        let Verified { digest, signed_by } = self.trust.check(file, bytes, signature.as_deref())?;
        let digest = digest.hex();
        let checked = match self.cached(&digest) {
            Some(known) => known,
            None => self.check(file, bytes, digest, cancel)?,
        };
        Ok(Compiled {
            checked,
            name: name.as_str().into(),
            path: path.clone(),
            file: file.as_str().into(),
            signed_by: signed_by.map(|key| key.to_string().into()),
            compile_ms: started.elapsed().as_secs_f64() * 1e3,
        })
    }

    fn check(
        &self,
        file: &str,
        bytes: &[u8],
        digest: String,
        cancel: &Cancel,
    ) -> Result<Arc<Checked>, LoadError> {
        inspect::preamble(file, bytes)?;
        let limits = self.limits.compiling();
        let component = self.compiler.compile(&self.engine, bytes, limits, cancel);
        let component =
            component.map_err(|error| inspect::not_compiled(file, &self.limits, error))?;
        let imports = inspect::imports(file, &component, &self.engine, self.granted)?;
        let pre = self.linker.instantiate_pre(&component);
        let pre = pre.map_err(|error| inspect::wrong_import(file, &error))?;
        let found = inspect::exports(file, &component, &self.engine)?;
        let state = inspect::state(file, &component, &self.engine)?;
        let wrong = |error| inspect::wrong_export(file, &error);
        let exports = ProvidedPre::new(pre).and_then(|pre| Exported::find(pre, &found.known));
        let exports = exports.map_err(wrong)?;
        if !found.unknown.is_empty() {
            tracing::warn!(
                target: "policy", file,
                "exports interfaces that this core does not know, and runs without them: {}",
                found.unknown.join(", ")
            );
        }
        let (limits, granted, ticker) = (self.limits.clone(), self.granted, self.ticker.clone());
        let unknown_exports = found.unknown;
        let checked = Arc::new(Checked {
            exports,
            state,
            digest,
            imports,
            unknown_exports,
            limits,
            granted,
            ticker,
        });
        let mut remembered = self.remembered();
        remembered.push_front(checked.clone());
        remembered.truncate(REMEMBERED_MAX);
        Ok(checked)
    }

    /// A component of this digest, if it was compiled lately.
    fn cached(&self, digest: &str) -> Option<Arc<Checked>> {
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

/// What was measured to serve (a call 0.2 us, a new instance 11); see
/// `benches/decide.rs`.
fn settings(limits: &Limits) -> Config {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(POLICIES_MAX)
        .total_core_instances(POLICIES_MAX * COMPONENT_CORE_INSTANCES_MAX)
        .max_core_instances_per_component(COMPONENT_CORE_INSTANCES_MAX)
        .total_memories(POLICIES_MAX * COMPONENT_MEMORIES_MAX)
        .max_memories_per_component(COMPONENT_MEMORIES_MAX)
        .total_tables(POLICIES_MAX * 8)
        .max_tables_per_component(8)
        .max_memory_size(limits.memory_bytes.next_multiple_of(64 << 10))
        .linear_memory_keep_resident(RESIDENT_BYTES);
    let mut config = tally_compiler::settings();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}

/// Advances the engine's epoch: a call that sees it advance looks at its CPU time. Without calls it sleeps. It ticks
/// slowly while calls are short: on a busy machine each tick may take the CPU from who waits for a decision.
pub struct Ticker {
    ticking: Arc<Ticking>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Ticks without a call after which the thread sleeps.
const IDLE_TICKS: u32 = 20;
/// It looks about so often then: a call whose beginning it misses may run on for so long.
const IDLE_LOOK: Duration = Duration::from_millis(500);

/// A slow tick is so many of the others.
const SLOW: u32 = 4;
/// After a long call it does not tick slowly for so long.
const ALERT: Duration = Duration::from_secs(1);

/// When the ticker looks next.
struct Pace {
    tick: Duration,
    alert_until: Option<Instant>,
}

impl Pace {
    fn until_next(&mut self, now: Instant, found: Found) -> Duration {
        if found.is_long {
            self.alert_until = Some(now + ALERT);
        }
        let is_alert = self.alert_until.is_some_and(|until| now < until);
        if is_alert || found.is_running { self.tick } else { SLOW * self.tick }
    }
}

/// What a look at the policies found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// There was a call since the last look, or is one.
    is_called: bool,
    is_running: bool,
    /// One has been running since the last look.
    is_long: bool,
}

/// Tells the ticker of the calls of one policy.
#[derive(Debug)]
pub struct Beat {
    /// Calls begun. One thread calls a policy.
    calls: AtomicU64,
    is_running: AtomicBool,
    ticking: Arc<Ticking>,
}

/// What the ticker's thread shares with the policies that it ticks for.
#[derive(Debug, Default)]
struct Ticking {
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
    beats: Mutex<Vec<Seen>>,
}

/// A policy's beat, as the last look found it.
#[derive(Debug)]
struct Seen {
    beat: Weak<Beat>,
    calls: u64,
    was_running: bool,
}

impl Ticking {
    fn look(&self) -> Found {
        let mut beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Found::default();
        beats.retain_mut(|seen| {
            let Some(beat) = seen.beat.upgrade() else { return false };
            let (calls, is_running) = (beat.calls.load(SeqCst), beat.is_running.load(SeqCst));
            found.is_called |= is_running || calls != seen.calls;
            found.is_running |= is_running;
            found.is_long |= is_running && seen.was_running && calls == seen.calls;
            (seen.calls, seen.was_running) = (calls, is_running);
            true
        });
        found
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
    /// A call begins: wakes the ticker if it sleeps.
    #[inline]
    pub fn begin(&self) {
        self.calls.store(self.calls.load(Relaxed).wrapping_add(1), Relaxed);
        self.is_running.store(true, Relaxed);
        if self.ticking.is_asleep.load(Relaxed) {
            self.ticking.wake();
        }
    }

    /// The call is over; the ticker may sleep again.
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
            let mut pace = Pace { tick, alert_until: None };
            let (mut idle, mut found) = (0, Found::default());
            while let Err(TryRecvError::Empty) = stopped.try_recv() {
                if idle >= IDLE_TICKS {
                    own.is_asleep.store(true, SeqCst);
                    let is_wanted = own.look().is_called || {
                        std::thread::park_timeout(IDLE_LOOK);
                        own.look().is_called
                    };
                    own.is_asleep.store(false, SeqCst);
                    if !is_wanted {
                        continue;
                    }
                }
                std::thread::sleep(pace.until_next(Instant::now(), found));
                engine.increment_epoch();
                found = own.look();
                idle = if found.is_called { 0 } else { idle + 1 };
            }
        };
        let thread = std::thread::Builder::new().name("policy-epoch".into()).spawn(run)?;
        Ok(Ticker { ticking, stop: Some(stop), thread: Some(thread) })
    }

    /// Registers a policy, whose calls keep the ticker awake while the `Beat` lives.
    pub fn beat(&self) -> Arc<Beat> {
        let beat = Arc::new(Beat {
            calls: AtomicU64::new(0),
            is_running: AtomicBool::new(false),
            ticking: self.ticking.clone(),
        });
        let mut beats = self.ticking.beats.lock().unwrap_or_else(PoisonError::into_inner);
        beats.push(Seen { beat: Arc::downgrade(&beat), calls: 0, was_running: false });
        beat
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
    use std::sync::{Mutex, PoisonError};

    /// One of these tests counts what the tickers of this process do.
    static TICKERS: Mutex<()> = Mutex::new(());

    /// What is built against this contract goes on loading when a core provides more.
    #[test]
    fn a_component_of_today_loads_into_a_host_with_one_more_interface() {
        let _alone = TICKERS.lock().unwrap_or_else(PoisonError::into_inner);
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/policies/corpus/0.1.0");
        let mut host = PolicyHost::compiling_by(Compiler::in_process(), Limits::default()).unwrap();
        let mut later = host.linker.instance("tally:policy/placement@0.1.1").unwrap();
        later.func_wrap("place", |_, (_, _): (u32, u32)| Ok(())).unwrap();
        for name in ["fifo", "tally-priority"] {
            let file = Path::new(corpus).join(name).with_extension("wasm");
            let mut policy = host.load_file(&file, "").unwrap();
            let mut context = tally_engine::policy::Context::default();
            tally_engine::policy::Policy::start(&mut policy, &mut context);
            assert_eq!(policy.name(), name);
        }
    }

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
    fn ticks_are_slow_until_a_call_is_running_and_for_a_while_after_a_long_one_they_are_not() {
        let tick = Duration::from_millis(1);
        let mut pace = Pace { tick, alert_until: None };
        let start = Instant::now();
        let short = Found { is_called: true, ..Found::default() };
        let running = Found { is_running: true, ..short };
        let long = Found { is_long: true, ..running };
        assert_eq!(pace.until_next(start, short), SLOW * tick);
        assert_eq!(pace.until_next(start, running), tick);
        assert_eq!(pace.until_next(start, short), SLOW * tick);
        assert_eq!(pace.until_next(start, long), tick);
        assert_eq!(pace.until_next(start + ALERT - tick, short), tick);
        assert_eq!(pace.until_next(start + ALERT, short), SLOW * tick);
    }

    #[test]
    fn only_one_call_from_look_to_look_is_long() {
        let ticking = Arc::new(Ticking::default());
        let beat =
            Beat { calls: AtomicU64::new(0), is_running: false.into(), ticking: ticking.clone() };
        let beat = Arc::new(beat);
        let seen = Seen { beat: Arc::downgrade(&beat), calls: 0, was_running: false };
        ticking.beats.lock().unwrap().push(seen);
        let look = || {
            let Found { is_called, is_running, is_long } = ticking.look();
            (is_called, is_running, is_long)
        };
        assert_eq!(look(), (false, false, false));
        beat.begin();
        beat.end();
        assert_eq!(look(), (true, false, false));
        beat.begin();
        assert_eq!(look(), (true, true, false));
        beat.end();
        beat.begin();
        assert_eq!(look(), (true, true, false), "another call");
        assert_eq!(look(), (true, true, true));
        beat.end();
        assert_eq!(look(), (false, false, false));
        drop(beat);
        look();
        assert!(ticking.beats.lock().unwrap().is_empty());
    }

    #[test]
    fn without_calls_the_ticker_sleeps_and_a_call_wakes_it() {
        let _alone = TICKERS.lock().unwrap_or_else(PoisonError::into_inner);
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
