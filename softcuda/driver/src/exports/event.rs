use crate::capture;
use crate::context::{current, needs_context_if_strict};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::event::{Event, Last, Record};
use crate::ffi::{Out, exports, exports_per_thread};
use crate::op::Op;
use crate::stream::{NullStream, resolve};
use crate::sync::lock;
use std::sync::Arc;

const EXTERNAL: u32 = 1;

fn record(event: usize, stream: usize, flags: u32, null: NullStream) -> CuResult {
    needs_context_if_strict()?;
    let stream = resolve(stream, null)?;
    let event = driver()?.events.get(event)?;
    if flags > EXTERNAL {
        return Err(CuError::INVALID_VALUE);
    }
    if event.context != stream.context.id {
        return Err(CuError::INVALID_HANDLE);
    }
    if let Some(fork) = capture::fork_of(&stream) {
        if flags == EXTERNAL {
            return stream.submit(Op::RecordEvent(event));
        }
        *lock(&event.last) = Last::Captured(fork);
        return Ok(());
    }
    let record = Arc::new(Record::new(event.is_timed()));
    stream.submit(Op::Record(record.clone()))?;
    *lock(&event.last) = Last::Recorded(record);
    Ok(())
}

fn elapsed(milliseconds: &Out<f32>, start: usize, end: usize) -> CuResult {
    let events = &driver()?.events;
    let (start, end) = (events.get(start)?, events.get(end)?);
    milliseconds.set(end.elapsed_ms(&start)?)
}

exports! {
    fn cuEventCreate(event: Out<usize>, flags: u32) {
        let context = current()?;
        event.check()?;
        let _launching = context.launching();
        let made = Arc::new(Event::new(context.id, flags)?);
        event.set(driver()?.events.insert(&made))
    }

    fn cuEventDestroy_v2(event: usize) {
        driver()?.events.remove(event).map(drop)
    }

    fn cuEventQuery(event: usize) {
        let event = driver()?.events.get(event)?;
        let record = event.record()?;
        capture::forbid()?;
        if record.is_some_and(|r| !r.is_complete()) {
            return Err(CuError::NOT_READY);
        }
        check_current()
    }

    fn cuEventSynchronize(event: usize) {
        let event = driver()?.events.get(event)?;
        if let Some(record) = event.record()? {
            record.wait();
        }
        check_current()
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }
}

/// The error of the current context, if there is one.
fn check_current() -> CuResult {
    match current() {
        Err(CuError::INVALID_CONTEXT) | Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

exports_per_thread! {
    fn cuEventRecord / cuEventRecord_ptsz |null| (event: usize, stream: usize) {
        record(event, stream, 0, null)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz |null| (
        event: usize, stream: usize, flags: u32
    ) {
        record(event, stream, flags, null)
    }
}
