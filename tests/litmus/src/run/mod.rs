//! Runs a program on whatever driver there is.

mod graph;
mod host;
mod launch;
mod machine;
mod memory;
mod module;
mod objects;
pub mod serve;
mod stacks;
mod thread;

pub use machine::{Machine, Settings};
pub use memory::HOST_WORDS;
use module::Loaded;

use crate::cu::{Done, Handle};
use crate::program::{Id, Program, Word};
use memory::{DeviceMemory, Slot};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

/// A module in the primary context, which is current.
///
/// # Errors
/// Of the driver.
pub(crate) fn loaded(machine: &Machine, module: crate::program::Module) -> anyhow::Result<Loaded> {
    Ok(Loaded::new(machine.cuda, module, &machine.folder, machine.shared_max)?)
}

/// Locks, whatever happened to who held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What words are at the end: those of each context of this process, and those of the host.
pub type Words = (Vec<Option<Vec<u32>>>, Vec<u32>);

/// A context of the program's.
struct Context {
    handle: Handle,
    /// Addresses of its first word and of its first word of scratch memory.
    words: u64,
    scratch: u64,
    memory: Arc<Mutex<Option<DeviceMemory>>>,
    kernels: Arc<Loaded>,
    /// Memory that the program frees.
    spare: Mutex<Vec<u64>>,
}

pub struct Run {
    machine: &'static Machine,
    program: &'static Program,
    contexts: Vec<RwLock<Option<Arc<Context>>>>,
    modules: Vec<RwLock<Option<Arc<Loaded>>>>,
    streams: Vec<Slot>,
    events: Vec<Slot>,
    execs: Vec<Slot>,
    graphs: Mutex<Vec<Handle>>,
    /// What contexts' words were when they were destroyed, or when all had ended.
    values: Mutex<Vec<Option<Vec<u32>>>>,
    /// What each thread is at; one past its last operation when it has ended.
    at: &'static [AtomicUsize],
    /// Threads that were started and not joined yet.
    threads: Vec<Mutex<Option<JoinHandle<()>>>>,
}

impl Run {
    fn new(
        machine: &'static Machine,
        program: &'static Program,
        at: &'static [AtomicUsize],
    ) -> Self {
        let none = |count: usize| (0..count).map(|_| RwLock::new(None)).collect();
        let slots = |count: usize| (0..count).map(|_| Slot::default()).collect();
        Self {
            machine,
            program,
            contexts: none(program.contexts.len()),
            modules: (0..program.modules.len()).map(|_| RwLock::new(None)).collect(),
            streams: slots(program.streams.len()),
            events: slots(program.events.len()),
            execs: slots(program.execs.len()),
            graphs: Mutex::default(),
            values: Mutex::new(vec![None; program.contexts.len()]),
            at,
            threads: program.threads.iter().map(|_| Mutex::new(None)).collect(),
        }
    }

    /// The words of each context of this process, and of the host, at the end.
    ///
    /// # Errors
    /// What went wrong, where.
    pub fn values(
        machine: &'static Machine,
        program: &'static Program,
        at: &'static [AtomicUsize],
    ) -> Result<Words, String> {
        let run = Arc::new(Self::new(machine, program, at));
        run.prepare()?;
        // With two processes neither begins before the other is ready, and the words stay until both
        // have read them.
        serve::meet(machine, program, 0);
        run.thread(run.first_thread());
        for thread in &run.threads {
            if let Some(left) = lock(thread).take() {
                left.join().map_err(|_| "a thread panicked")?;
            }
        }
        run.finish()?;
        serve::meet(machine, program, 1);
        let host = machine.host.read(program.host_words);
        serve::meet(machine, program, 2);
        let values = std::mem::take(&mut *lock(&run.values));
        Ok((values, host))
    }

    fn first_thread(&self) -> Id {
        let own = |t: &crate::program::Thread| t.process == self.machine.process;
        self.program.threads.iter().position(own).unwrap_or(0)
    }

    fn is_own(&self, context: Id) -> bool {
        self.program.process_of(context) == self.machine.process
    }

    fn check(&self, done: Done) -> Result<(), String> {
        done.map_err(|failed| failed.to_string())
    }

    fn context(&self, id: Id) -> Result<Arc<Context>, String> {
        let context = self.contexts[id].read().unwrap_or_else(PoisonError::into_inner).clone();
        context.ok_or_else(|| format!("context {id} is not there"))
    }

    fn context_handle(&self, id: Id) -> Result<Handle, String> {
        Ok(self.context(id)?.handle)
    }

    /// The device's address of a word.
    fn address(&self, word: Word) -> Result<u64, String> {
        let of = |context| Some(self.context(context).ok()?.words);
        memory::address(&self.machine.host, word, of).ok_or_else(|| format!("{word} is not there"))
    }

    fn scratch(&self, context: Id, at: u32) -> Result<u64, String> {
        Ok(self.context(context)?.scratch + 4 * u64::from(at))
    }

    /// A kernel of a module, or of the one that `context` has anyway.
    fn function(&self, name: &str, module: Id, context: Id) -> Result<Handle, String> {
        if module == 0 {
            return Ok(self.context(context)?.kernels.function(name));
        }
        let found = self.modules[module].read().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(found.ok_or_else(|| format!("module {module} is not there"))?.function(name))
    }

    fn now_at(&self, thread: Id, op: usize) {
        self.at[thread].store(op, SeqCst);
    }
}
