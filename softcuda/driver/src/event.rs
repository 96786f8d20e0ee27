//! Events: each record is an object of its own, so that waiting for one is
//! not disturbed by a later one.

use crate::capture::Fork;
use crate::error::{CuError, CuResult};
use crate::sync::{Progress, lock, now_ns};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const DISABLE_TIMING: u32 = 2;
/// Flags that `cuEventCreate` takes: blocking, no timing, interprocess.
const FLAGS: u32 = 7;

#[derive(Default)]
pub(crate) struct Record {
    done: Progress,
    time_ns: AtomicU64,
    /// Takes an entry of a hardware queue: the GPU writes the time.
    pub(crate) is_timed: bool,
}

impl Record {
    pub(crate) fn new(is_timed: bool) -> Self {
        Self { is_timed, ..Self::default() }
    }

    /// To be called when the stream reaches the event.
    pub(crate) fn complete(&self) {
        self.time_ns.store(now_ns(), SeqCst);
        self.done.advance(1);
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.done.get() != 0
    }

    pub(crate) fn wait(&self) {
        self.done.wait_for(1);
    }
}

/// What an event stands for now.
#[derive(Clone, Default)]
pub(crate) enum Last {
    /// Not recorded yet: counts as complete.
    #[default]
    Never,
    /// A place in a stream.
    Recorded(Arc<Record>),
    /// A place in a graph under capture.
    Captured(Fork),
}

pub(crate) struct Event {
    pub(crate) context: u64,
    flags: u32,
    pub(crate) last: Mutex<Last>,
}

impl Event {
    pub(crate) fn new(context: u64, flags: u32) -> CuResult<Self> {
        if flags & !FLAGS != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(Self { context, flags, last: Mutex::default() })
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.flags & DISABLE_TIMING == 0
    }

    /// The last record outside a capture, if any.
    ///
    /// # Errors
    /// `CAPTURED_EVENT` if it was last recorded in a capture.
    pub(crate) fn record(&self) -> CuResult<Option<Arc<Record>>> {
        match &*lock(&self.last) {
            Last::Never => Ok(None),
            Last::Recorded(record) => Ok(Some(record.clone())),
            Last::Captured(_) => Err(CuError::CAPTURED_EVENT),
        }
    }

    /// Milliseconds from `start` to `self`.
    pub(crate) fn elapsed_ms(&self, start: &Self) -> CuResult<f32> {
        if !self.is_timed() || !start.is_timed() {
            return Err(CuError::INVALID_HANDLE);
        }
        let (Some(end), Some(start)) = (self.record()?, start.record()?) else {
            return Err(CuError::INVALID_HANDLE);
        };
        if !end.is_complete() || !start.is_complete() {
            return Err(CuError::NOT_READY);
        }
        let (from, to) = (start.time_ns.load(SeqCst), end.time_ns.load(SeqCst));
        Ok((to as f64 - from as f64) as f32 / 1e6)
    }
}
