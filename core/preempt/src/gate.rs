//! What launches yield by: the gate, a word in host memory on which streams wait, the flag in device memory that
//! running blocks read, and the tables in which blocks are claimed. Who closes, opens, raises and lowers is
//! [`flag`](crate::flag).

use crate::cuda::{NOT_SUPPORTED, Ptr, STREAM_NON_BLOCKING, SUCCESS, WAIT_VALUE_EQUAL, driver};
use crate::host::host;
use crate::lock::Lock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;
use tally_contract::limits::CLAIMED_BLOCKS_MAX;
use tally_ipc::ClientRegion;
use tally_ipc::layout::{Gates, STREAM_SLOTS, SharedWord};
use tally_ipc::wait;
use tally_rewriter::control::FLAG_STRIDE_BYTES;

/// Claim words of a stream: blocks of the largest grid that can be claimed.
pub const TABLE_WORDS: u32 = CLAIMED_BLOCKS_MAX;
/// Words of the flag less one. One word is read by all SMs in turn; each further one
/// takes a write to raise: 1, 4, 16 and 128 words take 5, 7, 15 and 94 us (H100). More
/// than four make the reads of some kernels cheaper still.
pub const FLAG_MASK: u32 = 3;
/// Doubled and one more, they must be less than the flag's raised state.
const EPOCHS_MAX: u32 = 1 << 30;
/// Streams with a notice word.
pub const NOTICES: usize = STREAM_SLOTS - 2;
pub(crate) const FLAG_LINES: usize = FLAG_MASK as usize + 1;
/// The driver puts small allocations side by side. A program that writes somewhat behind its own is not to hit the
/// flag, nor a checker to take that for right: the flag is in the middle of as much as the driver gives out by itself.
const FLAG_ROOM_BYTES: usize = 2 << 20;
/// The context that transformed forms live in; 0: none yet.
pub(crate) static CONTEXT: AtomicUsize = AtomicUsize::new(0);
/// Held while the flag's thread uses the context.
pub(crate) static ALIVE: Lock = Lock::new();
/// The gates' page, for the GPU.
pub(crate) static PAGE: AtomicU64 = AtomicU64::new(0);
/// The flag's words in device memory; behind them one that is never raised.
static FLAG: AtomicU64 = AtomicU64::new(0);
pub(crate) static FLAG_STREAM: AtomicUsize = AtomicUsize::new(0);
static RESCUE_STREAM: AtomicUsize = AtomicUsize::new(0);
static TABLES: [AtomicU64; STREAM_SLOTS] = [const { AtomicU64::new(0) }; STREAM_SLOTS];
static EPOCHS: [AtomicU32; STREAM_SLOTS] = [const { AtomicU32::new(0) }; STREAM_SLOTS];
/// Rescues under way: see [`hold`]. Changed, and looked at before the gate opens,
/// under the lock, which is held over nothing else, and by the program's own threads
/// only when it exits.
pub(crate) static HOLDS: AtomicU32 = AtomicU32::new(0);
pub(crate) static OPENING: Lock = Lock::new();
pub(crate) static FOR_GOOD: AtomicBool = AtomicBool::new(false);
/// How the flag's thread sleeps on the core's word.
pub(crate) static ASLEEP: AtomicU32 = AtomicU32::new(AWAKE);
pub(crate) const AWAKE: u32 = 0;
/// The thread sleeps, and looks again soon without being woken.
pub(crate) const NAPS: u32 = 1;
pub(crate) const SLEEPS: u32 = 2;
/// Longer than the flag's thread is in the driver, unless that waits for the program.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// Whether a launch in this context could be transformed.
pub fn may_serve(context: usize) -> bool {
    let mine = CONTEXT.load(Acquire);
    context != 0 && (mine == 0 || mine == context)
}

pub(crate) fn make(client: &'static ClientRegion) -> Result<(), i32> {
    const MISSING: i32 = NOT_SUPPORTED;
    let d = driver();
    let address = d.share_page(&client.gates)?;
    let (mut room, mut flag) = (0, 0);
    let (mut low, mut high) = (0, 0);
    let (mut flag_stream, mut rescue_stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    let words = 2 * FLAG_LINES * FLAG_STRIDE_BYTES as usize / 4;
    let check = |r: i32| if r == SUCCESS { Ok(()) } else { Err(r) };
    // SAFETY: valid out-pointers, memory and streams of our own.
    let mut make = || unsafe {
        d.stream_wait.ok_or(MISSING)?;
        check(d.stream_priorities.ok_or(MISSING)?(&mut low, &mut high))?;
        let create = d.stream_create.ok_or(MISSING)?;
        check(create(&mut flag_stream, STREAM_NON_BLOCKING, high))?;
        check(create(&mut rescue_stream, STREAM_NON_BLOCKING, high))?;
        check(d.mem_alloc.ok_or(MISSING)?(&mut room, FLAG_ROOM_BYTES))?;
        flag = room + FLAG_ROOM_BYTES as u64 / 2;
        check(d.mem_set.ok_or(MISSING)?(flag, 0, words, flag_stream))?;
        check(d.stream_synchronize.ok_or(MISSING)?(flag_stream))
    };
    if let Err(error) = make() {
        // It may be tried again for each kernel while the GPU's memory is full.
        for stream in [flag_stream, rescue_stream] {
            if let Some(destroy) = d.stream_destroy.filter(|_| !stream.is_null()) {
                // SAFETY: a stream of our own, in which nothing runs.
                unsafe { destroy(stream) };
            }
        }
        if let Some(free) = d.mem_free.filter(|_| room != 0) {
            // SAFETY: memory of our own, which nothing uses.
            unsafe { free(room) };
        }
        return Err(error);
    }
    PAGE.store(address, Relaxed);
    FLAG.store(flag, Relaxed);
    FLAG_STREAM.store(flag_stream as usize, Relaxed);
    RESCUE_STREAM.store(rescue_stream as usize, Relaxed);
    Ok(())
}

/// The context in which launches are transformed, if there is one.
pub fn context() -> usize {
    CONTEXT.load(Acquire)
}

/// The stream that rescues run in.
pub fn rescue_stream() -> usize {
    RESCUE_STREAM.load(Relaxed)
}

/// The flag, and a word that is never raised: device addresses.
pub fn flags() -> (u64, u64) {
    let flag = FLAG.load(Relaxed);
    (flag, flag + (FLAG_LINES * FLAG_STRIDE_BYTES as usize) as u64)
}

/// The gate's word: device address.
fn gate_address() -> u64 {
    // The half of the line that the CPU writes.
    PAGE.load(Relaxed)
        + (std::mem::offset_of!(Gates, gate) + std::mem::offset_of!(SharedWord, host)) as u64
}

/// The notice word of a stream slot: device address.
pub fn notice_address(slot: usize) -> u64 {
    let at = std::mem::offset_of!(Gates, notices) + slot * size_of::<SharedWord>();
    PAGE.load(Relaxed) + at as u64
}

/// The claim words of a slot, for a launch into `stream`; made at first use.
pub fn table(slot: usize, stream: usize) -> Option<u64> {
    let known = TABLES[slot].load(Acquire);
    if known != 0 {
        return Some(known);
    }
    let d = driver();
    let (alloc, set) = (d.mem_alloc?, d.mem_set?);
    let mut table = 0;
    // SAFETY: a valid out-pointer; memory of our own, cleared before its first use
    // because that is in the same stream. The slot's lock is held.
    unsafe {
        let got = d.relaxed(|| alloc(&mut table, TABLE_WORDS as usize * 4));
        if got != SUCCESS || set(table, 0, TABLE_WORDS as usize, stream as Ptr) != SUCCESS {
            return None;
        }
    }
    TABLES[slot].store(table, Release);
    Some(table)
}

/// Takes `count` epochs of a slot's table in a row, for a launch into `stream`, and returns the first one
/// doubled. The slot's lock is held.
pub fn epochs(slot: usize, count: u32, stream: usize) -> Option<u32> {
    let (mut first, mut next) = in_a_row(EPOCHS[slot].load(Relaxed), count);
    if next > EPOCHS_MAX {
        // Used up: the table is as new once what was launched before is over. A rescue is,
        // too, by then: see `hold`.
        let (table, words) = (TABLES[slot].load(Acquire), TABLE_WORDS as usize);
        // SAFETY: memory of our own, the program's stream.
        if unsafe { driver().mem_set?(table, 0, words, stream as Ptr) } != SUCCESS {
            return None;
        }
        (first, next) = in_a_row(0, count);
    }
    EPOCHS[slot].store(next - 1, Relaxed);
    Some(first * 2)
}

/// The first of so many epochs behind `last`, and the one behind them.
fn in_a_row(last: u32, count: u32) -> (u32, u32) {
    (last + 1, last.saturating_add(1).saturating_add(count))
}

/// Close the gate, whatever the core says, until [`release`]: what passes it would
/// overtake a rescue.
pub fn hold(client: &ClientRegion) {
    let _held = OPENING.lock();
    HOLDS.fetch_add(1, SeqCst);
    if FOR_GOOD.load(SeqCst) {
        return;
    }
    client.gates.gate.host.store(1, SeqCst);
}

pub fn release() {
    let held = OPENING.lock();
    HOLDS.fetch_sub(1, SeqCst);
    drop(held);
    // Its thread may have slept since before.
    if let Some(core) = host().core() {
        wait::wake_sleepers(&core.region.yielding.word);
    }
}

/// Have a stream wait until nobody is asked to yield.
pub fn wait_in(stream: usize) -> bool {
    let wait = driver().stream_wait;
    // SAFETY: the program's stream; a registered word.
    wait.is_some_and(|f| unsafe {
        f(stream as Ptr, gate_address(), 0, WAIT_VALUE_EQUAL) == SUCCESS
    })
}

/// A transformed launch was issued: see that the flag's thread looks.
pub fn launched() {
    let asleep = ASLEEP.load(SeqCst);
    if asleep != AWAKE
        && let Some(core) = host().core()
        && (asleep == SLEEPS || !core.spin.is_zero())
    {
        wait::wake_sleepers(&core.region.yielding.word);
    }
}

/// Nobody yields any more: the driver is about to be torn down.
pub fn open_for_good() {
    FOR_GOOD.store(true, SeqCst);
    // Whoever closes it under the lock has seen that, or is done.
    let held = OPENING.lock();
    if let Some(client) = host().client() {
        client.gates.gate.host.store(0, SeqCst);
    }
    drop(held);
    if let Some(core) = host().core() {
        wait::wake_sleepers(&core.region.yielding.word);
    }
}

/// Wait until the flag's thread is out of the context that it uses.
pub fn leave_context() {
    drop(ALIVE.lock_within(LEAVE_MAX));
}

/// A context is destroyed. Nothing uses it any more. Whether it was the one that launches are transformed in.
pub fn forget_context(gone: usize) -> bool {
    let is_mine = CONTEXT.load(Acquire) == gone;
    if is_mine {
        CONTEXT.store(0, Release);
        HOLDS.store(0, SeqCst);
        for table in &TABLES {
            table.store(0, Release);
        }
    }
    is_mine
}

/// Only in a forked child.
pub fn reset() {
    CONTEXT.store(0, SeqCst);
    for (table, epoch) in TABLES.iter().zip(&EPOCHS) {
        table.store(0, SeqCst);
        epoch.store(0, SeqCst);
    }
    FOR_GOOD.store(false, SeqCst);
    ASLEEP.store(AWAKE, SeqCst);
    HOLDS.store(0, SeqCst);
    OPENING.reset();
    ALIVE.reset();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_rewriter::control::FLAG_RAISED;

    #[test]
    fn epochs_do_not_overlap_and_stay_below_the_flag() {
        let (first, next) = in_a_row(0, 3);
        assert_eq!((first, next), (1, 4));
        assert_eq!(in_a_row(next - 1, 2), (4, 6));
        assert!(in_a_row(EPOCHS_MAX - 2, 1).1 <= EPOCHS_MAX);
        assert!(in_a_row(EPOCHS_MAX - 2, 2).1 > EPOCHS_MAX);
        // The last epoch's claimed state is no raised flag.
        const { assert!(2 * (EPOCHS_MAX - 1) < FLAG_RAISED) };
    }
}
