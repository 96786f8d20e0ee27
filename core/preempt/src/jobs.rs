//! What the [`worker`](crate::worker) is to do, and what keeps the things that a job uses.
//!
//! Two locks: [`CONTEXT_IN_USE`] keeps a job's context, [`FUNCTION_IN_USE`] the program's function.
//! Who destroys either waits for them, and the job is given up.

use crate::cuda::driver;
use crate::host::{host, log};
use crate::kernels;
use crate::launch::KernelArguments;
use crate::lock::{Held, Lock, Locked};
use crate::transformed::{Transformed, blocks};
use rustix::thread::futex;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;
use tally_rewriter::TransformRefusal;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Make a kernel's transformed form.
    Form,
    /// Make its form with offset block indices, too.
    Offset,
    /// Make only what preemption needs.
    Gate,
    /// Unload the forms of an image that the program has unloaded.
    Unload(u128),
    /// Destroy parts of graphs that are not launched any more.
    Sweep,
}

#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) task: Task,
    /// Index of its kernel.
    pub(crate) index: usize,
    /// Name of its kernel.
    pub(crate) name: String,
    /// Digest of its image.
    pub(crate) image: u128,
    /// The handle that the program launches.
    pub(crate) function: usize,
    pub(crate) context: usize,
    pub(crate) device: i32,
    /// Blocks of the launch that wants it, and threads of a block.
    pub(crate) blocks: u32,
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    /// How long the kernel is expected to take, us; 0: unknown. Of several jobs the one of the longest
    /// comes first: that is the one that others wait for, and each job takes a while.
    pub(crate) us: u32,
}

impl Job {
    /// A job that concerns a context and no kernel.
    pub(crate) fn of_context(task: Task, context: usize) -> Self {
        Job {
            task,
            index: usize::MAX,
            name: String::new(),
            image: 0,
            function: 0,
            context,
            device: -1,
            blocks: 0,
            block: [1; 3],
            shared_bytes: 0,
            us: u32::MAX,
        }
    }

    /// A job for the kernel of a launch.
    pub(crate) fn of_launch(
        task: Task,
        index: usize,
        launch: &KernelArguments,
        (context, device): (usize, i32),
        us: u32,
    ) -> Option<Self> {
        let name = driver().name_of(launch.function as usize)?.to_str().ok()?.to_owned();
        Some(Job {
            task,
            index,
            name,
            image: host().image_of(index),
            function: launch.function as usize,
            context,
            device,
            blocks: blocks(launch.grid).unwrap_or(0),
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            us,
        })
    }
}

/// Why there is no form (yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The context was never idle: later.
    Busy,
    /// The program has unloaded the kernel, or the worker must not go on.
    Unloaded,
    /// The kernel has none, for this reason.
    For(TransformRefusal),
}

impl From<TransformRefusal> for Failed {
    fn from(why: TransformRefusal) -> Self {
        Failed::For(why)
    }
}

/// Jobs that wait, at most: a policy may ask for any kernel.
const JOBS_MAX: usize = 8_192;
static JOBS: Locked<VecDeque<Job>> = Locked::new(VecDeque::new());
/// The job that the worker has taken, and whether it was given up since. Changed while [`JOBS`] is held.
static IN_HAND: Locked<Option<(Job, bool)>> = Locked::new(None);
static WORD: AtomicU32 = AtomicU32::new(0);
/// Held while the worker uses a context.
static CONTEXT_IN_USE: Lock = Lock::new();
/// Held while it uses a function of the program's.
static FUNCTION_IN_USE: Lock = Lock::new();
/// The worker did not come back from the driver in [`LOST_AFTER`]: nobody waits for it any
/// more, and it stops as soon as it does.
static LOST: AtomicBool = AtomicBool::new(false);
/// Longer than the driver takes to compile anything. Only a program that exits while the
/// driver's compiler is in use for the first time gets there: see
/// [`Host::exit_before_others`](crate::host::Host::exit_before_others).
const LOST_AFTER: Duration = Duration::from_secs(10);

/// Where a job goes among the others: behind those of kernels that are as long.
fn place(jobs: &VecDeque<Job>, us: u32) -> usize {
    jobs.iter().position(|other| other.us < us).unwrap_or(jobs.len())
}

/// Add a job. False: too many wait.
pub(crate) fn add(job: Job) -> bool {
    let is_taken = JOBS.with(|jobs| {
        let has_room = jobs.len() < JOBS_MAX;
        if has_room {
            jobs.insert(place(jobs, job.us), job);
        }
        has_room
    });
    WORD.fetch_add(1, SeqCst);
    let _ = futex::wake(&WORD, futex::Flags::PRIVATE, 1);
    is_taken
}

/// Whether a job like this one waits.
pub(crate) fn is_waiting(job: &Job) -> bool {
    let is_like = |other: &Job| (other.task, other.context) == (job.task, job.context);
    JOBS.with(|jobs| jobs.iter().any(is_like))
}

pub(crate) fn take() -> Option<Job> {
    JOBS.with(|jobs| {
        let job = jobs.pop_front();
        IN_HAND.with(|in_hand| *in_hand = job.clone().map(|job| (job, false)));
        job
    })
}

/// Put the job that was taken back among the others, unless it was given up.
pub(crate) fn put_back(job: Job) {
    JOBS.with(|jobs| {
        if !is_given_up() {
            jobs.insert(place(jobs, job.us), job);
        }
    });
}

/// A counter to be read before the jobs: [`sleep`] returns at once if it has changed.
pub(crate) fn word() -> u32 {
    WORD.load(SeqCst)
}

/// Keep contexts for a job.
pub(crate) fn use_context() -> Held<'static> {
    CONTEXT_IN_USE.lock()
}

/// Sleep until there may be another job, or for so long.
pub(crate) fn sleep(seen: u32, time: Option<Duration>) {
    let time = time.map(|time| futex::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    let _ = futex::wait(&WORD, futex::Flags::PRIVATE, seen, time.as_ref());
}

/// Use the function of a job, unless it was unloaded.
pub(crate) fn with_function<T>(job: &Job, work: impl FnOnce() -> T) -> Option<T> {
    let _held = FUNCTION_IN_USE.lock();
    // A module that was unloaded took its function's entry with it, if the shim saw the call.
    let is_there = !host().may_be_bypassed()
        && host().kernel_of(job.function).is_some_and(|i| i as usize == job.index);
    is_there.then(work)
}

/// Functions are about to be unloaded: the worker does not use them any more.
pub(crate) fn forget_functions(are_gone: impl Fn(usize) -> bool) {
    drop_jobs(|job| job.function != 0 && are_gone(job.function));
    drop(FUNCTION_IN_USE.lock());
}

/// The job that the worker has taken was given up.
pub(crate) fn is_given_up() -> bool {
    IN_HAND.with(|in_hand| in_hand.as_ref().is_some_and(|(_, given_up)| *given_up))
}

/// Give up jobs; their kernels may be asked for again.
fn drop_jobs(drops: impl Fn(&Job) -> bool) {
    let dropped: Vec<Job> = JOBS.with(|jobs| {
        let dropped = jobs.iter().filter(|job| drops(job)).cloned().collect();
        jobs.retain(|job| !drops(job));
        dropped
    });
    dropped.iter().for_each(give_up);
}

/// A context is gone: what was to be done in it is given up, also what the worker has just taken.
pub(crate) fn forget_context(context: usize) {
    drop_jobs(|job| job.context == context);
    let taken = JOBS.with(|_| {
        IN_HAND.with(|in_hand| {
            let (job, given_up) = in_hand.as_mut().filter(|(job, _)| job.context == context)?;
            (!std::mem::replace(given_up, true)).then(|| job.clone())
        })
    });
    taken.iter().for_each(give_up);
}

pub(crate) fn give_up(job: &Job) {
    match job.task {
        Task::Form => kernels::preparable(job.index),
        Task::Offset => {
            kernels::transformed(job.index)
                .into_iter()
                .for_each(|transformed: &Transformed| transformed.by_offset.forgo());
        }
        Task::Gate | Task::Unload(_) | Task::Sweep => {}
    }
}

/// Wait for the worker to leave the context that it uses, if it can be waited for.
pub(crate) fn leave_context() -> Option<Held<'static>> {
    if is_lost() {
        return None;
    }
    let held = CONTEXT_IN_USE.lock_within(LOST_AFTER);
    if held.is_none() {
        log!("the driver does not return from making a form: not waited for any more");
        LOST.store(true, SeqCst);
    }
    held
}

/// Whether the worker may not go on with what it was doing.
pub(crate) fn is_lost() -> bool {
    LOST.load(SeqCst)
}

/// Only in a forked child.
pub(crate) fn reset() {
    JOBS.reset(VecDeque::new());
    IN_HAND.reset(None);
    LOST.store(false, SeqCst);
    CONTEXT_IN_USE.reset();
    FUNCTION_IN_USE.reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_kernel_has_its_form_made_first() {
        let mut jobs = VecDeque::new();
        for (index, us) in
            [(0, 40), (1, 900), (2, 0), (3, 900), (4, 10_900), (5, u32::MAX), (6, 40)]
        {
            let job = Job { index, us, ..Job::of_context(Task::Form, 0) };
            jobs.insert(place(&jobs, us), job);
        }
        let order: Vec<_> = jobs.iter().map(|job| job.index).collect();
        assert_eq!(order, [5, 4, 1, 3, 0, 6, 2]);
    }
}
