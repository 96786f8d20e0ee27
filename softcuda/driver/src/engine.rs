//! Runs kernels: the stream's thread and helpers take SMs from the arbiter and
//! run block after block on them.
//!
//! A kernel that gets all the SMs it wants at once is joined by one helper for
//! each further SM. While it still wants some, one thread, and only one, waits
//! for the next grant and calls in another when it comes.

use crate::context::Context;
use crate::driver::{Driver, driver};
use crate::error::{CuError, CuResult};
use crate::launch::Launch;
use crate::op::Worker;
use crate::sm::{Ticket, Waited};
use crate::sync::{Progress, lock, spawn_quiet};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// One run of a kernel on the device.
struct Run {
    driver: &'static Driver,
    launch: Arc<Launch>,
    ticket: Ticket,
    want: u32,
    blocks: u64,
    /// First block that nobody took yet.
    next: AtomicU64,
    finished: Progress,
    /// Threads that were called in, and those of them that wait for an SM.
    engaged: AtomicU32,
    waiting: AtomicU32,
    error: AtomicU32,
    cancelled: AtomicBool,
}

impl Launch {
    /// Runs the kernel to its end on the calling thread and helpers.
    ///
    /// # Errors
    /// What a trap in one of its blocks means to the context.
    pub(crate) fn run(
        self: &Arc<Self>,
        worker: &mut Worker,
        _context: &Arc<Context>,
        stream_priority: i32,
    ) -> CuResult {
        let driver = driver()?;
        let blocks = self.blocks();
        let allowed = self.sms()?;
        let want = blocks.min(u64::from(allowed.count())) as u32;
        let priority = self.priority.unwrap_or(stream_priority);
        let (ticket, granted) =
            driver.arbiter.arrive_within(priority, want, self.cooperative, &allowed);
        let run = Arc::new(Run {
            driver,
            launch: self.clone(),
            ticket,
            want,
            blocks,
            next: AtomicU64::new(0),
            finished: Progress::default(),
            engaged: AtomicU32::new(1),
            waiting: AtomicU32::new(0),
            error: AtomicU32::new(0),
            cancelled: AtomicBool::new(false),
        });
        let helpers = match granted {
            0 => 0,
            all if all >= want => all - 1,
            some => some,
        };
        for _ in 0..helpers {
            run.call_helper();
        }
        run.work(worker);
        run.finished.wait_for(blocks);
        match run.error.load(SeqCst) {
            0 => Ok(()),
            code => Err(CuError(code)),
        }
    }
}

impl Run {
    fn call_helper(self: &Arc<Self>) {
        self.engaged.fetch_add(1, SeqCst);
        let run = self.clone();
        if !in_background(move |worker| run.work(worker)) {
            self.engaged.fetch_sub(1, SeqCst);
        }
    }

    /// Runs blocks for as long as there are any, whenever there is an SM.
    fn work(self: &Arc<Self>, worker: &mut Worker) {
        let arbiter = &self.driver.arbiter;
        loop {
            let seen = arbiter.word(&self.ticket);
            if let Some(sm) = arbiter.take(&self.ticket) {
                self.have_someone_wait();
                if !self.run_blocks(Some(sm), worker) {
                    return;
                }
                continue;
            }
            if self.is_exhausted() {
                return;
            }
            self.waiting.fetch_add(1, SeqCst);
            let waited = arbiter.wait(&self.ticket, seen);
            self.waiting.fetch_sub(1, SeqCst);
            if waited == Waited::Lost {
                // Not in the queue any more: finish without an SM of our own.
                if !self.is_exhausted() {
                    self.run_blocks(None, worker);
                }
                return;
            }
        }
    }

    /// Further SMs may be granted while this thread is busy: somebody else
    /// must be there to take them up. The blocks of a cooperative kernel wait
    /// for one another, so this comes before the first block.
    fn have_someone_wait(self: &Arc<Self>) {
        let crew_full = self.engaged.load(SeqCst) >= self.want;
        if !crew_full && self.waiting.load(SeqCst) == 0 && !self.is_exhausted() {
            self.call_helper();
        }
    }

    fn is_exhausted(&self) -> bool {
        self.next.load(SeqCst) >= self.blocks
    }

    /// Runs blocks on `sm` until none is left (`false`) or somebody goes
    /// first (`true`).
    fn run_blocks(&self, sm: Option<u32>, worker: &mut Worker) -> bool {
        let arbiter = &self.driver.arbiter;
        loop {
            let block = self.next.fetch_add(1, SeqCst);
            if block >= self.blocks {
                arbiter.leave(&self.ticket, sm);
                return false;
            }
            if block + 1 == self.blocks && self.waiting.load(SeqCst) != 0 {
                // Nobody needs to wait for an SM on our behalf any more.
                arbiter.leave(&self.ticket, None);
            }
            self.run_block(block, sm.unwrap_or(0), worker);
            // SMs are handed on before the kernel counts as finished.
            let exhausted = self.is_exhausted();
            if exhausted {
                arbiter.leave(&self.ticket, sm);
            }
            self.finished.add(1);
            if exhausted {
                return false;
            }
            if let Some(sm) = sm
                && arbiter.must_yield(&self.ticket, sm)
            {
                arbiter.yield_to_others(&self.ticket, sm);
                return true;
            }
        }
    }

    fn run_block(&self, block: u64, sm: u32, worker: &mut Worker) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let device = (sm, self.driver.arbiter.sms());
            let memory = &self.driver.memory;
            self.launch.run_block(block, device, memory, &mut worker.scratch, &self.cancelled)
        }));
        let error = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => {
                // The scratch space may be anything now.
                worker.scratch = crate::exec::Scratch::default();
                crate::config::log(format_args!("the interpreter panicked"));
                CuError::LAUNCH_FAILED
            }
        };
        if !self.cancelled.swap(true, SeqCst) {
            self.error.store(error.0, SeqCst);
        }
        // The blocks that nobody took count as finished.
        let taken = self.next.swap(self.blocks, SeqCst).min(self.blocks);
        self.finished.add(self.blocks - taken);
    }
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Default)]
struct Helpers {
    jobs: VecDeque<Job>,
    idle: usize,
}

static HELPERS: Mutex<Helpers> = Mutex::new(Helpers { jobs: VecDeque::new(), idle: 0 });
static JOB_CAME: Condvar = Condvar::new();

/// Runs `job` on a thread that does nothing else meanwhile. `false` if there
/// is no thread and none can be made.
pub(crate) fn in_background(job: impl FnOnce(&mut Worker) + Send + 'static) -> bool {
    let mut helpers = lock(&HELPERS);
    if helpers.idle <= helpers.jobs.len() && spawn_quiet("sim-sm", help).is_err() {
        return false;
    }
    helpers.jobs.push_back(Box::new(job));
    drop(helpers);
    JOB_CAME.notify_one();
    true
}

fn help() {
    let mut worker = Worker::default();
    loop {
        let mut helpers = lock(&HELPERS);
        let job = loop {
            if let Some(job) = helpers.jobs.pop_front() {
                break job;
            }
            helpers.idle += 1;
            helpers = JOB_CAME.wait(helpers).unwrap_or_else(PoisonError::into_inner);
            helpers.idle -= 1;
        };
        drop(helpers);
        job(&mut worker);
    }
}
