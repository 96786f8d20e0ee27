//! Green contexts: a part of the device's SMs, and the streams whose kernels
//! run there. All else is the primary context's: memory, modules, events, and
//! the error that sticks.

use crate::context::Context;
use crate::driver::Driver;
use crate::error::{CuError, CuResult};
use crate::event::{Event, Last, Record};
use crate::op::Op;
use crate::registry::handle_of;
use crate::sm::SmSet;
use crate::stream::{NON_BLOCKING, Stream, StreamKind};
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

/// From a device of so many SMs on, partitions have the granularity of a real
/// `sm_90`; on a smaller one any number of SMs can be one.
const COARSE_SMS_MIN: u32 = 16;
/// That granularity, and the one of `IGNORE_SM_COSCHEDULING`.
const COARSE: u32 = 8;
const FINE: u32 = 2;

/// Device memory that one takes. How much it is on hardware is not documented.
pub(crate) const BYTES: u64 = 1 << 20;

/// Partitions of a device of `sms` SMs are multiples of this many.
pub(crate) fn granularity(sms: u32, ignore_coscheduling: bool) -> u32 {
    match (sms >= COARSE_SMS_MIN, ignore_coscheduling) {
        (false, _) => 1,
        (true, true) => FINE,
        (true, false) => COARSE,
    }
}

pub(crate) struct Descriptor(pub(crate) SmSet);

pub(crate) struct Green {
    pub(crate) id: u64,
    pub(crate) sms: SmSet,
    pub(crate) context: Arc<Context>,
    alive: AtomicBool,
    /// What a null stream means while it is current.
    default: Mutex<Option<Arc<Stream>>>,
    streams: Mutex<Vec<Weak<Stream>>>,
    /// Events that streams still to be made wait for too.
    waits: Mutex<Vec<Arc<Record>>>,
}

/// Distance of the handle of a green context as a `CUcontext` from its own.
const CONTEXT_HANDLE_OFFSET: usize = 8;

impl Green {
    pub(crate) fn new(driver: &Driver, sms: SmSet) -> Arc<Self> {
        Arc::new(Self {
            id: driver.new_id(),
            sms,
            context: driver.primary.clone(),
            alive: AtomicBool::new(true),
            default: Mutex::default(),
            streams: Mutex::default(),
            waits: Mutex::default(),
        })
    }

    /// Its handle as a `CUcontext`: an address inside the object, so that it
    /// is no other object's handle.
    pub(crate) fn context_handle(self: &Arc<Self>) -> usize {
        const { assert!(size_of::<Green>() > CONTEXT_HANDLE_OFFSET) }
        handle_of(self) + CONTEXT_HANDLE_OFFSET
    }

    /// The green context behind a `CUcontext`.
    pub(crate) fn find(driver: &Driver, context_handle: usize) -> Option<Arc<Self>> {
        driver.greens.find(context_handle.checked_sub(CONTEXT_HANDLE_OFFSET)?)
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    /// A stream whose kernels run on its SMs.
    pub(crate) fn stream(
        self: &Arc<Self>,
        kind: StreamKind,
        flags: u32,
        priority: i32,
    ) -> CuResult<Arc<Stream>> {
        let stream = Stream::new(&self.context, kind, flags, priority, Some(self.clone()))?;
        let mut streams = lock(&self.streams);
        streams.retain(|s| s.strong_count() != 0);
        streams.push(Arc::downgrade(&stream));
        drop(streams);
        self.context.add_stream(stream.clone());
        let mut waits = lock(&self.waits);
        waits.retain(|record| !record.is_complete());
        for record in waits.iter() {
            stream.submit(Op::Wait(record.clone()))?;
        }
        drop(waits);
        Ok(stream)
    }

    /// The context's default stream, made at first use.
    pub(crate) fn default_stream(self: &Arc<Self>) -> CuResult<Arc<Stream>> {
        let mut default = lock(&self.default);
        if let Some(stream) = default.as_ref().filter(|stream| !stream.is_closed()) {
            return Ok(stream.clone());
        }
        let stream = self.stream(StreamKind::Created, NON_BLOCKING, 0)?;
        *default = Some(stream.clone());
        Ok(stream)
    }

    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        lock(&self.streams).iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for everything that was submitted to its streams before.
    pub(crate) fn synchronize(&self) -> CuResult {
        self.streams().iter().for_each(|stream| stream.wait_all());
        self.context.check()
    }

    /// Makes all its streams, and those still to be made, wait for `event`.
    pub(crate) fn wait_for(&self, event: &Event) -> CuResult {
        let record = event.record()?;
        wait_for(&self.streams(), record.as_ref())?;
        lock(&self.waits).extend(record);
        Ok(())
    }

    /// Ends it. Work of its streams still runs, and streams that the program
    /// made stay until it destroys them.
    pub(crate) fn close(&self) {
        self.alive.store(false, SeqCst);
        if let Some(stream) = lock(&self.default).take() {
            self.context.end_stream(&stream);
        }
    }
}

/// Makes `streams` wait for an event's last record.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if one of them is being captured.
pub(crate) fn wait_for(streams: &[Arc<Stream>], record: Option<&Arc<Record>>) -> CuResult {
    streams.iter().try_for_each(|stream| crate::capture::forbid_on(stream))?;
    let Some(record) = record else { return Ok(()) };
    let mut open = streams.iter().filter(|stream| !stream.is_closed());
    open.try_for_each(|stream| stream.submit(Op::Wait(record.clone())))
}

/// Records `event` where all of `streams`, which are of `context`, are now.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if one of them is being captured, or
/// `INVALID_HANDLE` for an event of another context.
pub(crate) fn record(context: &Arc<Context>, streams: &[Arc<Stream>], event: &Event) -> CuResult {
    if event.context != context.id {
        return Err(CuError::INVALID_HANDLE);
    }
    streams.iter().try_for_each(|stream| crate::capture::forbid_on(stream))?;
    // A stream for this alone waits for the others; it ends when it is done.
    let recorder = Stream::new(context, StreamKind::Created, NON_BLOCKING, 0, None)?;
    let record = Arc::new(Record::default());
    recorder.submit_after(&Op::Record(record.clone()), streams)?;
    recorder.close();
    context.add_stream(recorder);
    *lock(&event.last) = Last::Recorded(record);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_devices_split_finely() {
        assert_eq!((granularity(2, false), granularity(15, false)), (1, 1));
        assert_eq!((granularity(132, false), granularity(132, true)), (8, 2));
    }
}
