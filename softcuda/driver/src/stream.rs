//! Streams: queues of work, each run in order by a thread of its own that
//! starts with the first piece of work.

use crate::capture::Fork;
use crate::context::{Context, current_entry, per_thread_stream};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::green::Green;
use crate::hardware::{Entry, HardwareQueue};
use crate::op::{Op, Worker};
use crate::registry::gone;
use crate::sync::{Progress, lock, spawn_quiet};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

pub(crate) const NON_BLOCKING: u32 = 1;

/// What a null stream handle means to a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NullStream {
    Legacy,
    /// The calling thread's stream (`_ptsz`, `_ptds`).
    PerThread,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// The one that waits for all blocking streams, and they for it.
    Legacy,
    /// The default stream of one thread.
    PerThread,
    Created,
}

pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) context: Arc<Context>,
    pub(crate) kind: StreamKind,
    pub(crate) flags: u32,
    /// Lower is more urgent.
    pub(crate) priority: i32,
    /// The green context whose SMs its kernels run on; `None`: the whole device.
    pub(crate) green: Option<Arc<Green>>,
    queue: Mutex<Queue>,
    work: Condvar,
    completed: Progress,
    /// Where the stream is in a graph under capture.
    pub(crate) capture: Mutex<Option<Fork>>,
}

struct Queue {
    tasks: VecDeque<Task>,
    /// Where its work is fetched from now, and whether some of that has not ended.
    hardware: Arc<HardwareQueue>,
    uses_hardware: bool,
    /// The number of the last piece of work that took an entry.
    last_entry: u64,
    submitted: u64,
    closed: bool,
    started: bool,
    idle: bool,
}

impl Queue {
    /// Says so if all work that took an entry has ended.
    fn leave_hardware(&mut self, completed: u64) {
        if self.uses_hardware && completed >= self.last_entry {
            self.uses_hardware = false;
            self.hardware.count_user(false);
        }
    }
}

/// A piece of work, what of other streams must end first, and its place in a hardware
/// queue, if it takes one.
struct Task {
    op: Op,
    after: Vec<(Arc<Stream>, u64)>,
    entry: Option<Entry>,
}

/// The number of a piece of work in its stream, which does not keep the stream.
pub(crate) struct Place(Weak<Stream>, u64);

impl Place {
    fn pending(&self) -> Option<(Arc<Stream>, u64)> {
        let stream = self.0.upgrade()?;
        (stream.completed.get() < self.1).then_some((stream, self.1))
    }
}

impl Stream {
    pub(crate) fn new(
        context: &Arc<Context>,
        kind: StreamKind,
        flags: u32,
        priority: i32,
        green: Option<Arc<Green>>,
    ) -> CuResult<Arc<Self>> {
        let queue = Queue {
            tasks: VecDeque::new(),
            hardware: context.hardware.assign(),
            uses_hardware: false,
            last_entry: 0,
            submitted: 0,
            closed: false,
            started: false,
            idle: false,
        };
        Ok(Arc::new(Self {
            id: driver()?.new_id(),
            context: context.clone(),
            kind,
            flags,
            priority,
            green,
            queue: Mutex::new(queue),
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

    /// Waits while the hardware queue is full, or another thread loads code; holds no lock
    /// for as long as it waits for room.
    fn enqueue(self: &Arc<Self>, op: Op) -> CuResult {
        loop {
            let launching = op.waits_for_loads().then(|| self.context.launching());
            let Err(full) = self.try_enqueue(&op)? else { return Ok(()) };
            drop(launching);
            full.wait_for_room();
        }
    }

    /// The queue that is full, if one is.
    fn try_enqueue(self: &Arc<Self>, op: &Op) -> CuResult<Result<(), Arc<HardwareQueue>>> {
        let is_blocking = self.is_blocking();
        let order = (self.kind == StreamKind::Legacy || is_blocking).then_some(&self.context);
        let legacy = if is_blocking { Some(self.context.legacy_stream()?) } else { None };
        let _order = order.map(|context| lock(&context.order));
        let mut after: Vec<_> = match (self.kind, &legacy) {
            (StreamKind::Legacy, _) => self.waited_for().iter().filter_map(Self::pending).collect(),
            (_, Some(legacy)) => legacy.pending().into_iter().collect(),
            _ => Vec::new(),
        };
        // The driver serialises launches of one exec, whatever their streams.
        let exec = match op {
            Op::Graph(exec) => Some(exec),
            _ => None,
        };
        let mut last = exec.map(|exec| lock(&exec.last));
        after.extend(last.as_ref().and_then(|last| last.as_ref()?.pending()));
        Ok(self.push(op, after)?.map(|number| {
            if let Some(last) = &mut last {
                **last = Some(Place(Arc::downgrade(self), number));
            }
        }))
    }

    /// Puts `op`, which takes no entry, at the end of the queue, to be done when all that
    /// was submitted to `others` is.
    pub(crate) fn submit_after(self: &Arc<Self>, op: &Op, others: &[Arc<Self>]) -> CuResult {
        self.context.check()?;
        self.push(op, others.iter().filter_map(Self::pending).collect()).map(drop)
    }

    /// The stream and the number of its last piece of work, if not done yet.
    fn pending(self: &Arc<Self>) -> Option<(Arc<Self>, u64)> {
        let submitted = lock(&self.queue).submitted;
        (self.completed.get() < submitted).then(|| (self.clone(), submitted))
    }

    /// The number of the new piece of work, or the hardware queue that has no room.
    fn push(
        self: &Arc<Self>,
        op: &Op,
        after: Vec<(Arc<Self>, u64)>,
    ) -> CuResult<Result<u64, Arc<HardwareQueue>>> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(CuError::INVALID_HANDLE);
        }
        if !queue.started {
            let stream = self.clone();
            spawn_quiet("sim-stream", move || stream.run()).map_err(|_| CuError::OUT_OF_MEMORY)?;
            queue.started = true;
        }
        let mut entry = None;
        if op.takes_entry() {
            queue.leave_hardware(self.completed.get());
            if !std::mem::replace(&mut queue.uses_hardware, true) {
                let taken = self.context.hardware.take(&queue.hardware);
                queue.hardware = taken;
                queue.last_entry = queue.submitted;
            }
            entry = queue.hardware.enter();
            if entry.is_none() {
                return Ok(Err(queue.hardware.clone()));
            }
            queue.last_entry = queue.submitted + 1;
        }
        queue.tasks.push_back(Task { op: op.clone(), after, entry });
        queue.submitted += 1;
        let number = queue.submitted;
        let wake = queue.idle;
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        Ok(Ok(number))
    }

    /// Body of the thread that runs the stream's operations in order.
    fn run(self: Arc<Self>) {
        let mut worker = Worker::default();
        let mut number = 0;
        loop {
            let mut queue = lock(&self.queue);
            queue.leave_hardware(number);
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
            let Task { op, after, mut entry } = task;
            for (stream, until) in &after {
                stream.completed.wait_for(*until);
            }
            if let Some(entry) = &entry {
                entry.wait_for_turn();
            }
            if op.leaves_at_start()
                && let Some(entry) = entry.take()
            {
                entry.leave();
            }
            worker.run(&op, &self.context, self.priority);
            if let Some(entry) = entry {
                entry.leave();
            }
            // What the work holds on to is released before anyone sees it done.
            drop((op, after));
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

    /// What a query says. The legacy stream is not ready while a blocking stream is busy.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_idle() && self.waited_for().iter().all(|s| s.is_idle())
    }

    /// Waits until [`Self::is_ready`] for what was submitted so far.
    pub(crate) fn synchronize(&self) {
        self.waited_for().iter().for_each(|s| s.wait_all());
        self.wait_all();
    }

    /// The other streams whose work comes before this one's: for the legacy stream all
    /// blocking ones.
    fn waited_for(&self) -> Vec<Arc<Self>> {
        if self.kind != StreamKind::Legacy {
            return Vec::new();
        }
        lock(&self.context.streams).iter().filter(|s| s.is_blocking()).cloned().collect()
    }

    /// Whether work could start at once: nothing of this stream, or that it
    /// would have to wait for, is pending.
    pub(crate) fn could_start(self: &Arc<Self>) -> CuResult<bool> {
        if !self.is_idle() {
            return Ok(false);
        }
        Ok(match self.kind {
            StreamKind::Legacy => self.is_ready(),
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
        _ => {
            let stream = driver()?.streams.get(handle)?;
            return match &stream.green {
                Some(green) if !green.is_alive() => {
                    Err(gone::<Stream>(handle, CuError::STREAM_DETACHED))
                }
                _ => Ok(stream),
            };
        }
    };
    let current = current_entry()?;
    if !current.is_alive() {
        return Err(gone::<Stream>(handle, CuError::CONTEXT_IS_DESTROYED));
    }
    match &current.green {
        _ if own => per_thread_stream(&current),
        Some(green) => green.default_stream(),
        None => current.context.legacy_stream(),
    }
}
