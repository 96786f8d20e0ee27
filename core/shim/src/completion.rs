//! How the core learns that a decided launch is done: the GPU itself writes the
//! launch's number into the shared region, behind it in its stream.
//!
//! The write waits for the launches before it and carries a memory barrier: about
//! 2 us of GPU time (measured; drivers refuse the flag that would leave the
//! barrier out). So it does not follow every launch, but stands for a few at once
//! ([`is_due`]), and for one alone where its time is to be learnt ([`is_sample`]).
//! All writes to a slot's word are enqueued under the slot's lock, in order of
//! their numbers, so the word only rises. Must never be done to a capturing stream.

use crate::capture;
use crate::cu::{NOT_SUPPORTED, Ptr, SUCCESS, WRITE_VALUE_DEFAULT, driver};
use crate::lock::Lock;
use crate::slots::Slot;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{CompletionWord, KERNEL_SLOTS, report_state, submission_flags};
use tally_ipc::wait::now_ns;

static SETUP: Lock = Lock::new();
static STATE: AtomicU32 = AtomicU32::new(report_state::PENDING);
/// Address of the completion words for the GPU.
static DEVICE_ADDRESS: AtomicU64 = AtomicU64::new(0);

/// Make the completion page writable for the GPU, once. Returns whether it is.
/// The calling thread has a context.
pub fn ensure(client: &'static ClientRegion) -> bool {
    match STATE.load(Acquire) {
        report_state::ACTIVE => return true,
        report_state::FALLBACK => return false,
        _ => {}
    }
    if driver().current_context() == 0 {
        // The launch is about to fail; that says nothing about the device.
        return false;
    }
    let _held = SETUP.lock();
    match STATE.load(Acquire) {
        report_state::ACTIVE => return true,
        report_state::FALLBACK => return false,
        _ => {}
    }
    let d = driver();
    let shared = match d.stream_write {
        Some(_) => d.relaxed(|| d.share_page(&client.completions)),
        None => Err(NOT_SUPPORTED),
    };
    match shared {
        Ok(address) => {
            DEVICE_ADDRESS.store(address, Relaxed);
            STATE.store(report_state::ACTIVE, Release);
            client.report.completion.store(report_state::ACTIVE, Relaxed);
            true
        }
        Err(error) => {
            fall_back(client, error);
            false
        }
    }
}

/// Wait for every launch instead, from now on.
pub fn fall_back(client: &ClientRegion, error: i32) {
    STATE.store(report_state::FALLBACK, Release);
    client.report.completion_error.store(error as u32, Relaxed);
    client.report.completion.store(report_state::FALLBACK, Relaxed);
    crate::log!("completion tracking unavailable (CUDA error {error}): launches run one at a time");
}

/// Whether the page is mapped now.
pub fn is_active() -> bool {
    STATE.load(Acquire) == report_state::ACTIVE
}

/// A context was destroyed, and maybe the registration with it: do it again.
pub fn renew() {
    let _ = STATE.compare_exchange(report_state::ACTIVE, report_state::PENDING, Release, Relaxed);
}

/// Enqueue the write that says that everything of `slot` up to `sequence` is
/// done, in `stream`: the slot's own, or one that waits for it. The caller holds
/// the slot's lock.
///
/// # Errors
/// The driver's.
pub fn write(index: usize, slot: &Slot, stream: usize, sequence: u32) -> Result<(), i32> {
    let address = DEVICE_ADDRESS.load(Relaxed) + (index * size_of::<CompletionWord>()) as u64;
    let Some(stream_write) = driver().stream_write else { return Err(NOT_SUPPORTED) };
    // SAFETY: the stream lives: its launch is under way, or the guard is held;
    // the address is the slot's own word.
    match unsafe { stream_write(stream as Ptr, address, sequence, WRITE_VALUE_DEFAULT) } {
        SUCCESS => {
            slot.marked.store(sequence, Release);
            Ok(())
        }
        error => Err(error),
    }
}

/// Launches of a slot that one write stands for, at most.
const LAUNCHES_MAX: u32 = 8;
/// A write follows the first launch that comes so long after an unmarked one.
const UNMARKED_NS_MAX: u64 = 100_000;
/// A kernel's first launches are measured one by one, later one in so many.
const FIRST_SAMPLES: u8 = 8;
const SAMPLE_EVERY: u8 = 32;

/// Launches of each kernel of the table since the core was met, wrapping.
static LAUNCHED: [AtomicU8; KERNEL_SLOTS] = [const { AtomicU8::new(0) }; KERNEL_SLOTS];
/// Threads whose launch waits for something in flight to end.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Count a launch, and say whether its time is to be learnt: then a write stands
/// before it and one behind it.
pub fn is_sample(kernel: u32, flags: u32) -> bool {
    if flags & submission_flags::GRAPH != 0 {
        return true;
    }
    let Some(launched) = LAUNCHED.get(kernel as usize) else { return false };
    let n = launched.fetch_add(1, Relaxed);
    n < FIRST_SAMPLES || n.is_multiple_of(SAMPLE_EVERY)
}

/// A core was met that knows no kernel's time yet: measure them anew.
pub fn forget_samples() {
    for launched in &LAUNCHED {
        launched.store(0, Relaxed);
    }
}

/// Launches of the slot up to `sequence` that no write stands for and that no
/// waiting call has shown to be done.
pub fn unmarked(client: &ClientRegion, index: usize, slot: &Slot, sequence: u32) -> u32 {
    let seen = client.completions.words[index & 63].host.load(Relaxed);
    sequence.wrapping_sub(slot.marked.load(Relaxed)).min(sequence.wrapping_sub(seen))
}

/// Whether launch `sequence`, just issued, is to be followed by a write. The
/// caller holds the slot's lock.
pub fn is_due(client: &ClientRegion, index: usize, slot: &Slot, sequence: u32) -> bool {
    let n = unmarked(client, index, slot, sequence);
    // While anything captures, nobody else could enqueue the write later.
    if n >= LAUNCHES_MAX || WAITING.load(SeqCst) != 0 || capture::is_active() {
        return true;
    }
    let now = now_ns();
    if n <= 1 {
        slot.unmarked_since_ns.store(now, Relaxed);
        return false;
    }
    now.saturating_sub(slot.unmarked_since_ns.load(Relaxed)) >= UNMARKED_NS_MAX
}

/// While it lives, launches of other slots are followed by writes at once: this
/// thread waits for the end of something in flight.
#[derive(Debug)]
pub struct Waiting(());

impl Waiting {
    /// From now on.
    pub fn begin() -> Self {
        WAITING.fetch_add(1, SeqCst);
        Waiting(())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, SeqCst);
    }
}

/// A call that waits has shown that everything up to `sequence` is done.
pub fn seen_done(client: &ClientRegion, index: usize, sequence: u32) {
    let word = &client.completions.words[index & 63].host;
    let mut now = word.load(Relaxed);
    while sequence.wrapping_sub(now) as i32 > 0 {
        match word.compare_exchange_weak(now, sequence, SeqCst, Relaxed) {
            Ok(_) => return,
            Err(other) => now = other,
        }
    }
}

/// Whether the last write enqueued for the slot, `sequence`, has been done. By
/// equality: a word that stood still for 2^31 launches would compare as done.
pub fn has_reached(client: &ClientRegion, index: usize, sequence: u32) -> bool {
    let word = &client.completions.words[index & 63];
    word.gpu.load(Acquire) == sequence || word.host.load(Acquire) == sequence
}

/// Only in a forked child.
pub fn reset() {
    SETUP.reset();
    STATE.store(report_state::PENDING, Release);
    WAITING.store(0, SeqCst);
}
