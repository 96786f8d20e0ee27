//! The thread that makes transformed forms.
//!
//! Rewriting takes the CPU only. What loads code waits for a moment in which nothing runs in the context
//! ([`quiesce`](crate::quiesce)); where that does not come soon, the job is put off.
//!
//! Two locks keep what a job uses: [`CONTEXT_IN_USE`] its context, [`FUNCTION_IN_USE`] the program's function.
//! Who destroys either waits for them, and the job is given up.

use super::guarded::Guarded;
use super::kernels::{self, Cut};
use super::making::{self, Failed};
use super::{gate, is_closing};
use crate::cu::driver;
use crate::launch::KernelArguments;
use crate::lock::{Held, Lock};
use crate::{helper, link, log, threads};
use rustix::thread::futex;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};
use tally_rewriter::Refusal;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
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
pub(super) struct Job {
    pub(super) task: Task,
    /// Index of its kernel.
    pub(super) index: usize,
    /// Name of its kernel.
    pub(super) name: String,
    /// Digest of its image.
    pub(super) image: u128,
    /// The handle that the program launches.
    pub(super) function: usize,
    pub(super) context: usize,
    pub(super) device: i32,
    /// Blocks of the launch that wants it, and threads of a block.
    pub(super) blocks: u32,
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    /// How long the kernel is expected to take, us; 0: unknown. Of several jobs the one of the longest
    /// comes first: that is the one that others wait for, and each job takes a while.
    pub(super) us: u32,
}

impl Job {
    /// One that is of no kernel.
    pub(super) fn of_context(task: Task, context: usize) -> Self {
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

    /// For a launch of a kernel.
    pub(super) fn of_launch(
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
            image: crate::names::image(index),
            function: launch.function as usize,
            context,
            device,
            blocks: kernels::blocks(launch.grid).unwrap_or(0),
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            us,
        })
    }
}

/// Jobs that wait, at most: a policy may ask for any kernel.
const JOBS_MAX: usize = 8_192;
/// A job that found the context busy is tried again after so long, then twice as long, ms.
const RETRY_MS: [u64; 2] = [20, 2_000];

static JOBS: Guarded<VecDeque<Job>> = Guarded::new(VecDeque::new());
/// The job that the worker has taken, and whether it was given up since. Changed while [`JOBS`] is held.
static IN_HAND: Guarded<Option<(Job, bool)>> = Guarded::new(None);
static WORD: AtomicU32 = AtomicU32::new(0);
static WORKING: AtomicBool = AtomicBool::new(false);
/// Held while the worker uses a context.
static CONTEXT_IN_USE: Lock = Lock::new();
/// Held while it uses a function of the program's.
static FUNCTION_IN_USE: Lock = Lock::new();
/// The worker did not come back from the driver in [`LOST_AFTER`]: nobody waits for it any
/// more, and it stops as soon as it does.
static LOST: AtomicBool = AtomicBool::new(false);
/// Longer than the driver takes to compile anything. Only a program that exits while the
/// driver's compiler is in use for the first time gets there: see
/// [`crate::attach::exit_before_others`].
const LOST_AFTER: Duration = Duration::from_secs(10);

/// Where a job goes among the others: behind those of kernels that are as long.
pub(super) fn place(jobs: &VecDeque<Job>, us: u32) -> usize {
    jobs.iter().position(|other| other.us < us).unwrap_or(jobs.len())
}

/// Have a job done. False: too many wait.
pub(super) fn hire(job: Job) -> bool {
    let is_taken = JOBS.with(|jobs| {
        let has_room = jobs.len() < JOBS_MAX;
        if has_room {
            jobs.insert(place(jobs, job.us), job);
        }
        has_room
    });
    WORD.fetch_add(1, SeqCst);
    let _ = futex::wake(&WORD, futex::Flags::PRIVATE, 1);
    start();
    is_taken
}

/// Start the thread, unless it runs.
pub(super) fn start() {
    if WORKING.load(SeqCst) || link::have_filters_changed() {
        return;
    }
    let spawn = || gate::spawn_with("tally-rewrite", threads::STACK_BYTES_COMPILING, work);
    if !WORKING.swap(true, SeqCst) && !spawn() {
        WORKING.store(false, SeqCst);
    }
}

/// Have a job done, unless one like it waits.
pub(super) fn hire_once(job: Job) {
    let is_like = |other: &Job| (other.task, other.context) == (job.task, job.context);
    if !JOBS.with(|jobs| jobs.iter().any(is_like)) {
        hire(job);
    }
}

/// Sleep until there may be another job, or for so long.
fn sleep(seen: u32, time: Option<Duration>) {
    let time = time.map(|time| futex::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    let _ = futex::wait(&WORD, futex::Flags::PRIVATE, seen, time.as_ref());
}

fn work() {
    driver().relax_thread();
    let mut retry_ms = RETRY_MS[0];
    loop {
        let seen = WORD.load(SeqCst);
        let take = |jobs: &mut VecDeque<Job>| {
            let job = jobs.pop_front();
            IN_HAND.with(|in_hand| *in_hand = job.clone().map(|job| (job, false)));
            job
        };
        let Some(job) = JOBS.with(take) else {
            sleep(seen, None);
            continue;
        };
        if helper::is_exiting() || is_lost() {
            return;
        }
        let start = Instant::now();
        let again = carry_out(&job);
        if is_lost() {
            return;
        }
        if !again {
            retry_ms = RETRY_MS[0];
            continue;
        }
        JOBS.with(|jobs| {
            if !is_given_up() {
                jobs.insert(place(jobs, job.us), job);
            }
        });
        // Launches stood aside for a moment: not too often.
        let nap = Duration::from_millis(retry_ms).saturating_sub(start.elapsed());
        sleep(WORD.load(SeqCst), Some(nap));
        retry_ms = (2 * retry_ms).min(RETRY_MS[1]);
    }
}

/// Do a job. Returns whether it is to be tried again later.
fn carry_out(job: &Job) -> bool {
    if matches!(job.task, Task::Form | Task::Offset | Task::Gate) && link::have_filters_changed() {
        // The driver, too, may open files when it loads code.
        match job.task {
            Task::Form => kernels::refuse(job.index, Refusal::Sandboxed),
            _ => give_up(job),
        }
        return false;
    }
    // What takes the CPU only comes first, with no lock held.
    if matches!(job.task, Task::Form | Task::Offset) {
        making::rewrite_ahead(job);
    }
    let _context = CONTEXT_IN_USE.lock();
    if helper::is_exiting() || is_lost() || is_given_up() {
        return false;
    }
    // Whether it is destroyed shows: then what is to be done in it is given up.
    if is_closing(job.context) {
        return true;
    }
    match job.task {
        Task::Gate => making::gate(job.context) == Err(Failed::Busy),
        Task::Unload(image) => !making::unload(job.context, image),
        Task::Sweep => !making::sweep(job.context),
        Task::Offset => {
            let Some(cut) = kernels::cut(job.index).filter(|cut| cut.context == job.context) else {
                return false;
            };
            match making::offset(job, cut) {
                Err(Failed::Busy) => return true,
                made => cut.settle_offset(made.ok()),
            }
            false
        }
        Task::Form => form(job),
    }
}

fn form(job: &Job) -> bool {
    if !gate::may_serve(job.context) {
        // Another context was first. That says nothing about the kernel.
        kernels::preparable(job.index);
        return false;
    }
    match making::make(job) {
        Err(Failed::Busy) => return true,
        Err(Failed::Unloaded) => kernels::preparable(job.index),
        Err(Failed::For(why)) => {
            log!("kernel {} is run whole: {why}", job.index);
            kernels::refuse(job.index, why);
        }
        Ok(cut) => kernels::prepared(job.index, cut),
    }
    false
}

/// Use the function of a job, unless it was unloaded.
pub(super) fn with_function<T>(job: &Job, work: impl FnOnce() -> T) -> Option<T> {
    let _held = FUNCTION_IN_USE.lock();
    // A module that was unloaded took its function's entry with it, if the shim saw the call.
    let is_there = !super::bypass::is_found()
        && crate::names::known(job.function).is_some_and(|i| i as usize == job.index);
    is_there.then(work)
}

/// Functions are about to be unloaded: the worker does not use them any more.
pub(super) fn forget_functions(are_gone: impl Fn(usize) -> bool) {
    drop_jobs(|job| job.function != 0 && are_gone(job.function));
    drop(FUNCTION_IN_USE.lock());
}

/// The job that the worker has taken was given up.
fn is_given_up() -> bool {
    IN_HAND.with(|in_hand| in_hand.as_ref().is_some_and(|(_, given_up)| *given_up))
}

/// Give up jobs; their kernels may be asked for again.
pub(super) fn drop_jobs(drops: impl Fn(&Job) -> bool) {
    let dropped: Vec<Job> = JOBS.with(|jobs| {
        let dropped = jobs.iter().filter(|job| drops(job)).cloned().collect();
        jobs.retain(|job| !drops(job));
        dropped
    });
    dropped.iter().for_each(give_up);
}

/// A context is gone: what was to be done in it is given up, also what the worker has just taken.
pub(super) fn forget_context(context: usize) {
    drop_jobs(|job| job.context == context);
    let taken = JOBS.with(|_| {
        IN_HAND.with(|in_hand| {
            let (job, given_up) = in_hand.as_mut().filter(|(job, _)| job.context == context)?;
            (!std::mem::replace(given_up, true)).then(|| job.clone())
        })
    });
    taken.iter().for_each(give_up);
}

fn give_up(job: &Job) {
    match job.task {
        Task::Form => kernels::preparable(job.index),
        Task::Offset => {
            kernels::cut(job.index).into_iter().for_each(|cut: &Cut| cut.sub_grid.forgo());
        }
        Task::Gate | Task::Unload(_) | Task::Sweep => {}
    }
}

/// Wait for the worker to leave the context that it uses, if it can be waited for.
pub(super) fn leave_context() -> Option<Held<'static>> {
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
pub(super) fn is_lost() -> bool {
    LOST.load(SeqCst)
}

/// Only in a forked child.
pub(super) fn reset() {
    JOBS.reset(VecDeque::new());
    IN_HAND.reset(None);
    WORKING.store(false, SeqCst);
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
