//! What this crate needs of the library in the program, the shim: what that knows of the program's code and streams,
//! its threads, and its connection to the core. Driver calls go through [`cuda`](crate::cuda).
//!
//! The shim [installs](install) itself when it is loaded. Without a host nothing is transformed.
//!
//! Must never allocate or lock on the way to the host: launches that were decided take it.

#[cfg(test)]
pub(crate) mod fake;

use crate::lock::Locked;
use std::fmt::Arguments;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tally_contract::limits::LOAD_WAIT_MS_MAX;
use tally_ipc::{ClientRegion, CoreRegion};
use tally_rewriter::TransformRefusal;

/// How long the program's launches wait at most for [`load`] while the context becomes idle.
pub const LOAD_PATIENCE: Duration = Duration::from_millis(LOAD_WAIT_MS_MAX);

/// The core that the program is attached to.
#[derive(Clone, Copy)]
pub struct Core {
    pub region: &'static CoreRegion,
    /// How long a waiting thread spins.
    pub spin: Duration,
}

/// The library that this crate is part of. None of its functions panics; those without a word on waiting do not wait.
pub trait Host: Sync {
    /// This process's region, if the program is governed.
    fn client(&self) -> Option<&'static ClientRegion>;
    /// The core active, if any.
    fn core(&self) -> Option<Core>;
    /// Whether launches are held while there is no core.
    fn holds_without_core(&self) -> bool;
    /// Waits until a core comes (or goes), at most so long.
    fn wait_for_core(&self, most: Duration);
    /// Whether the program has begun to exit: no more driver calls.
    fn is_exiting(&self) -> bool;
    /// Writes a line to the log. Never on the launch path.
    fn log(&self, line: Arguments<'_>);
    /// Starts a thread that blocks all signals; with `compiles`, one in which the driver may compile code. Whether
    /// that worked.
    fn spawn(&self, name: &str, compiles: bool, run: fn()) -> bool;
    /// Whether the program has installed a seccomp filter, which may end it for opening a file. Waits for an answer.
    fn have_filters_changed(&self) -> bool;
    /// Runs something that opens files, by a thread with descriptors of its own, and waits for it. False: it did not
    /// run to its end.
    fn run_apart(&self, work: Box<dyn FnOnce() + Send>) -> bool;
    /// Has the program's exit come first to the shim, and then to what the driver has loaded by now.
    fn exit_before_others(&self);

    /// File name of the library that holds an image, or whose code loaded it, if that is known.
    ///
    /// # Errors
    /// [`TransformRefusal::ImageGone`] if the image's bytes are not at hand.
    fn library(&self, image: u128) -> Result<Option<String>, TransformRefusal>;
    /// The same, whether or not the bytes are at hand.
    fn library_name(&self, image: u128) -> Option<String>;
    /// The very bytes that were loaded.
    ///
    /// # Errors
    /// [`TransformRefusal::ImageGone`] if they are not at hand any more.
    fn image_bytes(&self, image: u128) -> Result<Arc<Vec<u8>>, TransformRefusal>;
    /// Digest of a kernel's image; 0 if it is unknown.
    fn image_of(&self, kernel: usize) -> u128;
    /// The kernel of a function, if that was noted.
    fn kernel_of(&self, function: usize) -> Option<u32>;
    /// Whether the program may load or unload code, or launch it, in calls that the shim does not see.
    fn may_be_bypassed(&self) -> bool;

    /// Runs `issue` while no other thread puts anything into a stream, or does not: where others stay in the driver.
    /// By a thread in a launch. Waits for others for some ms at most.
    fn alone(&self, issue: &mut dyn FnMut());
    /// The same if nothing runs in a context either.
    fn alone_and_idle(&self, context: usize, work: &mut dyn FnMut());
    /// The same by a thread that is not in a launch yet. Waits for nobody.
    fn alone_and_idle_outside(&self, context: usize, work: &mut dyn FnMut());
    /// Whether a launch may be made now to help a stuck one. It may not while the driver holds launches back
    /// until that one has ended. If it may, [`Host::help_ends`] follows.
    fn help_begins(&self) -> bool;
    /// The launch that [`Host::help_begins`] allowed has been made.
    fn help_ends(&self);
    /// Runs `load`, which loads code, while nothing runs in a context, or does not: where that is not so within
    /// `patience`. The context lives.
    fn load(&self, context: usize, patience: Duration, load: &mut dyn FnMut());
    /// Streams of the program with slots; those that share one count as one.
    fn streams_used(&self) -> u32;
    /// Whether so many streams beside the program's own find hardware queues of their own.
    fn has_queues_for(&self, context: usize, more: u32) -> bool;
    /// Whether a stream (an explicit handle) is to wait at once for its launch on some of the SMs (see
    /// [`joins`](crate::joins)).
    fn joins_at_once(&self, slot: usize, stream: usize) -> bool;
    /// Whether there may be memory that only one stream may use.
    fn is_memory_attached(&self) -> bool;
    /// What tells a stream (an explicit handle) from all others of the process.
    fn stream_identity(&self, stream: usize) -> usize;
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// From now on the host is this one. Only the first counts.
pub fn install(host: &'static dyn Host) {
    let _ = HOST.set(host);
}

pub(crate) fn host() -> &'static dyn Host {
    HOST.get().copied().unwrap_or(&Absent)
}

/// [`Host::alone`]. `None`: nothing was done, or by `issue` itself.
pub(crate) fn alone<T>(issue: impl FnOnce() -> Option<T>) -> Option<T> {
    let (mut issue, mut result) = (Some(issue), None);
    host().alone(&mut || result = issue.take().and_then(|issue| issue()));
    result
}

/// [`Host::alone_and_idle`]. `None`: nothing was done.
pub(crate) fn alone_and_idle<T>(context: usize, work: impl FnOnce() -> T) -> Option<T> {
    let (mut work, mut result) = (Some(work), None);
    let mut work = || result = work.take().map(|work| work());
    host().alone_and_idle(context, &mut work);
    result
}

/// [`Host::alone_and_idle_outside`]. `None`: nothing was done.
pub(crate) fn alone_and_idle_outside<T>(context: usize, work: impl FnOnce() -> T) -> Option<T> {
    let (mut work, mut result) = (Some(work), None);
    let mut work = || result = work.take().map(|work| work());
    host().alone_and_idle_outside(context, &mut work);
    result
}

/// [`Host::load`]. `None`: nothing was done.
pub(crate) fn load<T>(context: usize, patience: Duration, load: impl FnOnce() -> T) -> Option<T> {
    let (mut load, mut result) = (Some(load), None);
    host().load(context, patience, &mut || result = load.take().map(|load| load()));
    result
}

/// [`Host::run_apart`]. `None`: it did not run to its end.
pub(crate) fn run_apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let result = Arc::new(Locked::new(None));
    let theirs = result.clone();
    let work = move || {
        let done = work();
        theirs.with(|result| *result = Some(done));
    };
    host().run_apart(Box::new(work)).then(|| result.with(Option::take))?
}

/// Writes a line to the log.
macro_rules! log {
    ($($t:tt)*) => { $crate::host::host().log(format_args!($($t)*)) };
}
pub(crate) use log;

/// Before there is a host: nothing is known, and nothing is done.
struct Absent;

impl Host for Absent {
    fn client(&self) -> Option<&'static ClientRegion> {
        None
    }
    fn core(&self) -> Option<Core> {
        None
    }
    fn holds_without_core(&self) -> bool {
        false
    }
    fn wait_for_core(&self, most: Duration) {
        tally_ipc::wait::nap(most);
    }
    fn is_exiting(&self) -> bool {
        false
    }
    fn log(&self, _: Arguments<'_>) {}
    fn spawn(&self, _: &str, _: bool, _: fn()) -> bool {
        false
    }
    fn have_filters_changed(&self) -> bool {
        false
    }
    fn run_apart(&self, _: Box<dyn FnOnce() + Send>) -> bool {
        false
    }
    fn exit_before_others(&self) {}
    fn library(&self, _: u128) -> Result<Option<String>, TransformRefusal> {
        Err(TransformRefusal::ImageGone)
    }
    fn library_name(&self, _: u128) -> Option<String> {
        None
    }
    fn image_bytes(&self, _: u128) -> Result<Arc<Vec<u8>>, TransformRefusal> {
        Err(TransformRefusal::ImageGone)
    }
    fn image_of(&self, _: usize) -> u128 {
        0
    }
    fn kernel_of(&self, _: usize) -> Option<u32> {
        None
    }
    fn may_be_bypassed(&self) -> bool {
        true
    }
    fn alone(&self, _: &mut dyn FnMut()) {}
    fn alone_and_idle(&self, _: usize, _: &mut dyn FnMut()) {}
    fn alone_and_idle_outside(&self, _: usize, _: &mut dyn FnMut()) {}
    fn help_begins(&self) -> bool {
        true
    }
    fn help_ends(&self) {}
    fn load(&self, _: usize, _: Duration, _: &mut dyn FnMut()) {}
    fn streams_used(&self) -> u32 {
        0
    }
    fn has_queues_for(&self, _: usize, _: u32) -> bool {
        false
    }
    fn joins_at_once(&self, _: usize, _: usize) -> bool {
        true
    }
    fn is_memory_attached(&self) -> bool {
        true
    }
    fn stream_identity(&self, stream: usize) -> usize {
        stream
    }
}
