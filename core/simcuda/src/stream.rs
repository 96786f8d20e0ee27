//! Streams: queues of work, each run in order by a thread of its own that
//! starts with the first piece of work.

use crate::capture::Fork;
use crate::context::{Context, current_entry, per_thread_stream};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::green::Green;
use crate::op::{Op, Worker};
use crate::sync::{Progress, lock, spawn_quiet};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

/// What a null stream handle means to a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NullStream {
    /// The context's legacy stream.
    Legacy,
    /// The calling thread's stream (`_ptsz`, `_ptds`).
    PerThread,
}

/// What a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// The one that waits for all blocking streams, and they for it.
    Legacy,
    /// A thread's default.
    PerThread,
    /// `cuStreamCreate`.
    Created,
}

/// A `CUstream`.
pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: StreamKind,
    pub(crate) flags: u32,
    /// Lower is more urgent.
    pub(crate) priority: i32,
    /// Whose SMs its kernels run on, if not the whole device's.
    pub(crate) green: Option<Arc<Green>>,
    queue: Mutex<Queue>,
    work: Condvar,
    completed: Progress,
    /// Where the stream is in a graph under capture.
    pub(crate) capture: Mutex<Option<Fork>>,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    submitted: u64,
    closed: bool,
    started: bool,
    idle: bool,
}

/// A piece of work, and what of other streams must end first.
struct Task {
    op: Op,
    after: Vec<(Arc<Stream>, u64)>,
}

impl Stream {
    pub(crate) fn new(
        context: &Arc<Context>,
        kind: StreamKind,
        flags: u32,
        priority: i32,
        green: Option<Arc<Green>>,
    ) -> CuResult<Arc<Self>> {
        Ok(Arc::new(Self {
            id: driver()?.new_id(),
            context: context.clone(),
            kind,
            flags,
            priority,
            green,
            queue: Mutex::default(),
            work: Condvar::new(),
            completed: Progress::default(),
            capture: Mutex::new(None),
        }))
    }

    /// Whether the stream and the legacy stream wait for one another.
    pub(crate) fn is_blocking(&self) -> bool {
        self.kind != StreamKind::Legacy && self.flags & NON_BLOCKING == 0
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }

    /// Puts `op` at the end of the queue, or into the graph if the stream is
    /// being captured.
    ///
    /// # Errors
    /// The context's error, or what is wrong with the capture.
    pub(crate) fn submit(self: &Arc<Self>, op: Op) -> CuResult {
        self.context.check()?;
        if crate::capture::record(self, &op)? {
            return Ok(());
        }
        self.enqueue(op)
    }

    fn enqueue(self: &Arc<Self>, op: Op) -> CuResult {
        if self.kind != StreamKind::Legacy && !self.is_blocking() {
            return self.push(Task { op, after: Vec::new() });
        }
        let legacy = match self.kind {
            StreamKind::Legacy => None,
            _ => Some(self.context.legacy_stream()?),
        };
        let _order = lock(&self.context.order);
        let after = match legacy {
            Some(legacy) => legacy.pending().into_iter().collect(),
            None => lock(&self.context.streams)
                .iter()
                .filter(|s| s.is_blocking())
                .filter_map(Stream::pending)
                .collect(),
        };
        self.push(Task { op, after })
    }

    /// Puts `op` at the end of the queue, to be done when all that was submitted
    /// to `others` is.
    pub(crate) fn submit_after(self: &Arc<Self>, op: Op, others: &[Arc<Self>]) -> CuResult {
        self.context.check()?;
        self.push(Task { op, after: others.iter().filter_map(Self::pending).collect() })
    }

    /// The stream and the number of its last piece of work, if not done yet.
    fn pending(self: &Arc<Self>) -> Option<(Arc<Self>, u64)> {
        let submitted = lock(&self.queue).submitted;
        (self.completed.get() < submitted).then(|| (self.clone(), submitted))
    }

    fn push(self: &Arc<Self>, task: Task) -> CuResult {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(CuError::INVALID_HANDLE);
        }
        if !queue.started {
            let stream = self.clone();
            spawn_quiet("sim-stream", move || stream.run()).map_err(|_| CuError::OUT_OF_MEMORY)?;
            queue.started = true;
        }
        queue.tasks.push_back(task);
        queue.submitted += 1;
        let wake = queue.idle;
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        Ok(())
    }

    /// The stream's thread.
    fn run(self: Arc<Self>) {
        let mut worker = Worker::default();
        let mut number = 0;
        loop {
            let mut queue = lock(&self.queue);
            let task = loop {
                if let Some(task) = queue.tasks.pop_front() {
                    break task;
                }
                if queue.closed {
                    return;
                }
                queue.idle = true;
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle = false;
            };
            drop(queue);
            for (stream, until) in &task.after {
                stream.completed.wait_for(*until);
            }
            worker.run(&task.op, &self.context, self.priority);
            // What the work holds on to is released before anyone sees it done.
            drop(task);
            number += 1;
            self.completed.advance(number);
        }
    }

    /// Whether all work is done.
    pub(crate) fn is_idle(&self) -> bool {
        self.completed.get() >= lock(&self.queue).submitted
    }

    /// Waits for all work submitted so far.
    pub(crate) fn wait_all(&self) {
        let submitted = lock(&self.queue).submitted;
        self.completed.wait_for(submitted);
    }

    /// Whether work could start at once: nothing of this stream, or that it
    /// would have to wait for, is pending.
    pub(crate) fn could_start(self: &Arc<Self>) -> CuResult<bool> {
        if !self.is_idle() {
            return Ok(false);
        }
        Ok(match self.kind {
            StreamKind::Legacy => {
                lock(&self.context.streams).iter().all(|s| !s.is_blocking() || s.is_idle())
            }
            _ if self.is_blocking() => self.context.legacy_stream()?.is_idle(),
            _ => true,
        })
    }

    /// Takes no more work; the thread ends when what is queued is done.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.work.notify_one();
    }
}

/// The stream behind a handle.
///
/// # Errors
/// `INVALID_HANDLE`, no usable context, or the error that stuck.
pub(crate) fn resolve(handle: usize, null: NullStream) -> CuResult<Arc<Stream>> {
    let stream = resolve_any(handle, null)?;
    stream.context.check()?;
    Ok(stream)
}

/// Like [`resolve`], also for a context in error.
pub(crate) fn resolve_any(handle: usize, null: NullStream) -> CuResult<Arc<Stream>> {
    let own = match (handle, null) {
        (0, NullStream::Legacy) | (1, _) => false,
        (0, NullStream::PerThread) | (2, _) => true,
        _ => return driver()?.streams.get(handle),
    };
    let current = current_entry()?;
    if !current.is_alive() {
        return Err(CuError::CONTEXT_IS_DESTROYED);
    }
    match &current.green {
        _ if own => per_thread_stream(&current),
        Some(green) => green.default_stream(),
        None => current.context.legacy_stream(),
    }
}
