//! What can be in a stream, and how each is done.

use crate::config::VALUE_POLL_US;
use crate::context::Context;
use crate::driver::driver;
use crate::error::CuError;
use crate::event::{Event, Last, Record};
use crate::graph::{Exec, Graph};
use crate::launch::Launch;
use crate::sync::lock;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

pub(crate) type HostFn = extern "C" fn(*mut c_void);
pub(crate) type StreamCallback = extern "C" fn(usize, u32, *mut c_void);

/// Rows of so many 32-bit words are filled word by word, each at once.
const FLAG_WORDS_MAX: usize = 4096;

/// A piece of work in a stream.
#[derive(Clone)]
pub(crate) enum Op {
    /// Nothing: a graph's empty node.
    Nop,
    Kernel(Arc<Launch>),
    /// A copy, of one to three dimensions.
    Copy(Copy),
    /// A fill, of one or two dimensions.
    Fill(Fill),
    Host {
        function: HostFn,
        data: UserData,
    },
    /// `cuStreamAddCallback`; told of errors too.
    Callback {
        function: StreamCallback,
        stream: usize,
        data: UserData,
    },
    Record(Arc<Record>),
    Wait(Arc<Record>),
    /// An event recorded by a graph.
    RecordEvent(Arc<Event>),
    /// An event waited for by a graph.
    WaitEvent(Arc<Event>),
    WriteValue {
        address: u64,
        value: u64,
        wide: bool,
    },
    /// `cuStreamWaitValue`, with its flags.
    WaitValue {
        address: u64,
        value: u64,
        wide: bool,
        flags: u32,
    },
    Free(u64),
    Graph(Arc<Exec>),
    /// A graph as a node of another, which can still be changed; becomes a
    /// [`Op::Graph`] when that one is instantiated.
    Child(Arc<Graph>),
}

impl Op {
    /// Whether it takes an entry of a hardware queue.
    pub(crate) fn takes_entry(&self) -> bool {
        match self {
            Op::Record(record) => record.is_timed,
            // The driver looks first whether there is something to wait for.
            Op::Wait(record) => !record.is_complete(),
            Op::Nop | Op::Free(_) => false,
            _ => true,
        }
    }

    /// Whether its entry is gone when it starts, not when it ends: what others do.
    pub(crate) fn leaves_at_start(&self) -> bool {
        matches!(
            self,
            Op::Kernel(_)
                | Op::Graph(_)
                | Op::Copy(_)
                | Op::Fill(_)
                | Op::Host { .. }
                | Op::Callback { .. }
        )
    }

    /// Whether submitting it waits for a call that loads code or gives memory back.
    pub(crate) fn waits_for_loads(&self) -> bool {
        matches!(self, Op::Kernel(_) | Op::Graph(_) | Op::Record(_))
    }
}

/// A pointer that means something only to the program.
#[derive(Clone, Copy)]
pub(crate) struct UserData(pub(crate) *mut c_void);

// SAFETY: never dereferenced here; the program asked for it to be handed to a
// function that runs on another thread.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

/// A copy of `depth` slices of `height` rows of `width` bytes. All addresses
/// were checked when it was submitted.
#[derive(Clone, Default)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) to_pitch: usize,
    pub(crate) to_slice: usize,
    pub(crate) from_pitch: usize,
    pub(crate) from_slice: usize,
    /// The source, if it was copied when the call was made.
    pub(crate) staged: Option<Arc<[u8]>>,
}

impl Copy {
    /// A copy of consecutive bytes.
    pub(crate) fn linear(to: u64, from: u64, bytes: usize) -> Self {
        Self { to, from, width: bytes, height: 1, depth: 1, ..Self::default() }
    }

    fn is_word(&self, from: u64) -> bool {
        (self.width, self.height, self.depth) == (4, 1, 1) && (from | self.to).is_multiple_of(4)
    }

    pub(crate) fn run(&self) {
        let from = self.staged.as_ref().map_or(self.from, |s| s.as_ptr() as u64);
        if self.is_word(from) {
            // SAFETY: as below, and both ends are aligned. A kernel may be
            // looking at the word: it sees all of it change at once.
            unsafe {
                let word = AtomicU32::from_ptr(from as *mut u32).load(Relaxed);
                AtomicU32::from_ptr(self.to as *mut u32).store(word, Relaxed);
            }
            return;
        }
        for z in 0..self.depth {
            for y in 0..self.height {
                let source = from + (z * self.from_slice + y * self.from_pitch) as u64;
                let target = self.to + (z * self.to_slice + y * self.to_pitch) as u64;
                // SAFETY: both ranges were allocations of the device, or
                // memory of the program that it vouches for, when the copy
                // was submitted; device memory stays mapped when freed.
                unsafe {
                    std::ptr::copy(source as *const u8, target as *mut u8, self.width);
                }
            }
        }
    }
}

/// Sets `height` rows of `width` elements of `element` bytes to `value`.
#[derive(Clone)]
pub(crate) struct Fill {
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) element: usize,
    pub(crate) value: u32,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Fill {
    pub(crate) fn run(&self) {
        for y in 0..self.height {
            let row = self.to + (y * self.pitch) as u64;
            // SAFETY: the range was checked when the fill was submitted, its
            // start is aligned to the element, and it stays mapped.
            unsafe {
                match self.element {
                    1 => std::ptr::write_bytes(row as *mut u8, self.value as u8, self.width),
                    2 => std::slice::from_raw_parts_mut(row as *mut u16, self.width)
                        .fill(self.value as u16),
                    // Flags that a kernel may be looking at.
                    _ if self.width <= FLAG_WORDS_MAX => (0..self.width as u64).for_each(|i| {
                        AtomicU32::from_ptr((row + 4 * i) as *mut u32).store(self.value, Relaxed);
                    }),
                    _ => {
                        std::slice::from_raw_parts_mut(row as *mut u32, self.width).fill(self.value)
                    }
                }
            }
        }
    }
}

/// A thread that does work; keeps what the interpreter reuses.
#[derive(Default)]
pub(crate) struct Worker {
    pub(crate) scratch: crate::exec::Scratch,
}

impl Worker {
    /// Does `op` for a stream of `context`. In a context in error only what
    /// others may wait for is done.
    pub(crate) fn run(&mut self, op: &Op, context: &Arc<Context>, priority: i32) {
        match op {
            Op::Record(record) => record.complete(),
            Op::RecordEvent(event) => {
                let record = Arc::new(Record::default());
                *lock(&event.last) = Last::Recorded(record.clone());
                record.complete();
            }
            Op::Wait(record) => record.wait(),
            Op::WaitEvent(event) => {
                if let Ok(Some(record)) = event.record() {
                    record.wait();
                }
            }
            Op::Free(address) => {
                if let Ok(driver) = driver() {
                    let _ = driver.memory.release(&driver.arbiter, *address);
                }
            }
            Op::Callback { function, stream, data } => {
                let status = context.check().err().map_or(0, |e| e.0);
                function(*stream, status, data.0);
            }
            _ if context.failed() => {}
            Op::Nop | Op::Child(_) => {}
            Op::Kernel(launch) => {
                if let Err(error) = launch.run(self, context, priority) {
                    context.fail(error);
                }
            }
            Op::Copy(copy) => copy.run(),
            Op::Fill(fill) => fill.run(),
            Op::Host { function, data } => function(data.0),
            Op::WriteValue { address, value, wide } => write_value(*address, *value, *wide),
            Op::WaitValue { address, value, wide, flags } => {
                wait_value(context, *address, *value, *wide, *flags);
            }
            Op::Graph(exec) => exec.run(self, context, priority),
        }
    }
}

fn write_value(address: u64, value: u64, wide: bool) {
    // SAFETY: the address was checked to be device or pinned memory, and
    // aligned, when the write was submitted.
    unsafe {
        if wide {
            AtomicU64::from_ptr(address as *mut u64).store(value, SeqCst);
        } else {
            AtomicU32::from_ptr(address as *mut u32).store(value as u32, SeqCst);
        }
    }
}

/// Polls, with sleeps: the value may come from a kernel, from another process
/// or from a plain store of the program, and none of these wakes a futex.
fn wait_value(context: &Context, address: u64, value: u64, wide: bool, flags: u32) {
    let (mut sleep_us, longest_us) = VALUE_POLL_US;
    loop {
        // SAFETY: as in `write_value`.
        let seen = unsafe {
            if wide {
                AtomicU64::from_ptr(address as *mut u64).load(SeqCst)
            } else {
                u64::from(AtomicU32::from_ptr(address as *mut u32).load(SeqCst))
            }
        };
        if value_reached(seen, value, wide, flags) {
            return;
        }
        if context.failed() || context.aborting.load(SeqCst) {
            return;
        }
        std::thread::sleep(Duration::from_micros(sleep_us));
        sleep_us = (sleep_us * 2).min(longest_us);
    }
}

/// The four comparisons of `CUstreamWaitValue_flags`.
fn value_reached(seen: u64, value: u64, wide: bool, flags: u32) -> bool {
    match (flags & 3, wide) {
        (0, true) => seen.wrapping_sub(value) as i64 >= 0,
        (0, false) => (seen as u32).wrapping_sub(value as u32) as i32 >= 0,
        (1, _) => seen == value,
        (2, _) => seen & value != 0,
        (_, true) => !(seen | value) != 0,
        (_, false) => !((seen | value) as u32) != 0,
    }
}

/// Checks what `cuStreamWaitValue` and `cuStreamWriteValue` are given.
///
/// # Errors
/// `INVALID_VALUE` for an address that the device may not touch or that is
/// not aligned.
pub(crate) fn check_value_address(address: u64, wide: bool) -> Result<(), CuError> {
    let bytes = if wide { 8 } else { 4 };
    if !address.is_multiple_of(bytes) {
        return Err(CuError::INVALID_VALUE);
    }
    driver()?.memory.check_device(address, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons() {
        assert!(value_reached(5, 5, false, 0) && value_reached(6, 5, false, 0));
        assert!(!value_reached(4, 5, false, 0));
        assert!(value_reached(1, u64::from(u32::MAX), false, 0), "cyclic");
        assert!(value_reached(5, 5, true, 1) && !value_reached(6, 5, true, 1));
        assert!(value_reached(6, 4, false, 2) && !value_reached(3, 4, false, 2));
        assert!(value_reached(1, 2, false, 3));
        assert!(!value_reached(0xffff_0000, 0xffff, false, 3));
    }
}
