//! The thread that makes transformed forms.
//!
//! Rewriting takes the CPU only. What loads code waits for a moment in which nothing runs in the context
//! ([`Host::load`](crate::host::Host::load)); where that does not come soon, the job is put off.

use crate::contexts::is_closing;
use crate::cuda::driver;
use crate::host::{host, log};
use crate::jobs::{self, Failed, Job, Task};
use crate::transformed::{Transformed, copy_attributes};
use crate::{gate, kernels, making};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use tally_rewriter::TransformRefusal;

/// A job that found the context busy is tried again after so long, then twice as long, ms.
const RETRY_MS: [u64; 2] = [20, 2_000];
static WORKING: AtomicBool = AtomicBool::new(false);

/// Have a job done. False: too many wait.
pub(crate) fn hire(job: Job) -> bool {
    let is_taken = jobs::add(job);
    start();
    is_taken
}

/// Start the thread, unless it runs.
pub(crate) fn start() {
    if WORKING.load(SeqCst) || host().have_filters_changed() {
        return;
    }
    let spawn = || host().spawn("tally-rewrite", true, work);
    if !WORKING.swap(true, SeqCst) && !spawn() {
        WORKING.store(false, SeqCst);
    }
}

/// Have a job done, unless one like it waits.
pub(crate) fn hire_once(job: Job) {
    if !jobs::is_waiting(&job) {
        hire(job);
    }
}

fn work() {
    driver().relax_thread();
    let mut retry_ms = RETRY_MS[0];
    loop {
        let seen = jobs::word();
        let Some(job) = jobs::take() else {
            jobs::sleep(seen, None);
            continue;
        };
        if host().is_exiting() || jobs::is_lost() {
            return;
        }
        let start = Instant::now();
        let again = carry_out(&job);
        if jobs::is_lost() {
            return;
        }
        // The context may be destroyed now.
        making::leave();
        if !again {
            retry_ms = RETRY_MS[0];
            continue;
        }
        jobs::put_back(job);
        // Launches waited for a moment: not too often.
        let nap = Duration::from_millis(retry_ms).saturating_sub(start.elapsed());
        jobs::sleep(jobs::word(), Some(nap));
        retry_ms = (2 * retry_ms).min(RETRY_MS[1]);
    }
}

/// Do a job. Returns whether it is to be tried again later.
fn carry_out(job: &Job) -> bool {
    if matches!(job.task, Task::Form | Task::Offset | Task::Gate) && host().have_filters_changed() {
        // The driver, too, may open files when it loads code.
        match job.task {
            Task::Form => kernels::refuse(job.index, TransformRefusal::Sandboxed),
            _ => jobs::give_up(job),
        }
        return false;
    }
    // What takes the CPU only comes first, with no lock held.
    if matches!(job.task, Task::Form | Task::Offset) {
        making::rewrite_ahead(job);
    }
    let _context = jobs::use_context();
    if host().is_exiting() || jobs::is_lost() || jobs::is_given_up() {
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
            let Some(transformed) = kernels::transformed(job.index)
                .filter(|transformed| transformed.context == job.context)
            else {
                return false;
            };
            match making::offset(job, transformed) {
                Err(Failed::Busy) => return true,
                made => settle_offset(transformed, made.ok()),
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
            if why == TransformRefusal::BlocksMayWait && making::reads_sm(job) {
                kernels::refuse_sm_limit(job.index);
            }
            kernels::refuse(job.index, why);
        }
        Ok(transformed) => making::prepared(job.index, transformed),
    }
    false
}

/// The form with offset block indices was made, or there is none.
fn settle_offset(transformed: &Transformed, function: Option<usize>) {
    // From the prelude's function, which has what was set through any handle of the original's.
    let copy = || function.into_iter().for_each(|to| copy_attributes(transformed.function, to));
    copy();
    transformed.by_offset.settle(function);
    // What the program set meanwhile.
    copy();
    kernels::changed();
}

/// Only in a forked child.
pub(crate) fn reset() {
    WORKING.store(false, SeqCst);
}
