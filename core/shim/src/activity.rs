//! Busy or idle: the protocol that tells it from the program's own calls.
//!
//! Every stream slot has a word: how many launches it has seen, and how many of
//! those are inside the driver's launch function now. A launch counts itself in,
//! makes sure that the slot's busy bit is set, launches, and counts itself out of
//! the second number. A call that waits for the stream takes a snapshot of the
//! word *before* it waits; afterwards, if no launch was inside then and none came
//! since, it clears the bit, looks once more, and sets the bit again if one came
//! meanwhile.
//!
//! So, all accesses being SeqCst: **while work is in flight the bit is set.**
//! A launcher changes the word first and reads the bits second; a clearer changes
//! the bits first and reads the word second; one of them sees the other. And a
//! launch that was counted but not yet issued when the waiting began is in the
//! snapshot's second number, so that wait proves nothing. The converse does not
//! hold: a bit may stay set too long, until the next call that waits, or the
//! core's probe.
//!
//! A launch does not read the bits, which the core reads all the time, but the
//! slot's own *noted* flag. It is up only while the bit is, except for the moment
//! in which a clearer that lost the race sets the bit again: the flag is raised
//! after the bit and lowered before it. Lowering it alone has the slot's next
//! launch noted, which is how [units of work](crate::units) learn when they began.
//! A third state, *measured*, stands for the raised flag while every launch is to
//! take the path of one that is noted ([`unit_profile`](crate::unit_profile)).
//!
//! Must never wait, allocate or call the system (a doorbell apart, which the
//! caller rings when told to).

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU8, AtomicU64};
use tally_ipc::layout::Activity;
use tally_ipc::wait::now_ns;

const ONE_LAUNCH: u64 = 1 << 32;

/// A slot's word: launches so far (high half, wrapping), launches inside the
/// driver's launch function (low half).
///
/// Beside it, on the same cache line, whether the slot's next launch needs no note.
#[derive(Debug, Default)]
pub struct SlotWord {
    launches: AtomicU64,
    flag: AtomicU8,
}

/// What a slot's next launch has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Flag {
    /// Set the busy bit.
    Lowered,
    /// Nothing: the busy bit is set.
    Noted,
    /// To be measured; the busy bit is set.
    Measured,
}

/// A slot's word at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot(u64);

impl Snapshot {
    /// As if no launch had been inside: for sequences kept elsewhere.
    pub fn settled_at(sequence: u32) -> Self {
        Snapshot(u64::from(sequence) << 32)
    }

    /// Launches so far, wrapping.
    pub fn sequence(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Launches that were counted and are being issued.
    pub fn inside(self) -> u32 {
        self.0 as u32
    }

    /// No launch was counted without having been issued: waiting for the stream
    /// from here on covers all of them.
    pub fn is_settled(self) -> bool {
        self.0 as u32 == 0
    }
}

/// What became of the client when a bit changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    None,
    /// The client was idle and is busy now.
    Started,
    /// The client was busy and is idle now.
    Ended,
}

impl SlotWord {
    /// Sequence number 0, and no launch being issued.
    pub const fn new() -> Self {
        SlotWord { launches: AtomicU64::new(0), flag: AtomicU8::new(Flag::Lowered as u8) }
    }

    /// Whether the busy bit is set and the next launch is of no special interest.
    #[inline(always)]
    pub fn is_noted(&self) -> bool {
        self.flag.load(SeqCst) == Flag::Noted as u8
    }

    pub fn flag(&self) -> Flag {
        match self.flag.load(SeqCst) {
            n if n == Flag::Lowered as u8 => Flag::Lowered,
            n if n == Flag::Measured as u8 => Flag::Measured,
            _ => Flag::Noted,
        }
    }

    /// Further launches are not measured.
    pub fn end_measuring(&self) {
        let (from, to) = (Flag::Measured as u8, Flag::Noted as u8);
        let _ = self.flag.compare_exchange(from, to, SeqCst, SeqCst);
    }

    /// The next launch is to be noted.
    #[inline]
    pub fn forget_note(&self) {
        self.flag.store(Flag::Lowered as u8, SeqCst);
    }

    #[inline]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(self.launches.load(SeqCst))
    }

    /// Count a launch in, before the driver is called. Returns its sequence.
    #[inline]
    pub fn begin(&self) -> u32 {
        ((self.launches.fetch_add(ONE_LAUNCH + 1, SeqCst) >> 32) as u32).wrapping_add(1)
    }

    /// The driver's launch function has returned.
    #[inline]
    pub fn end(&self) {
        self.launches.fetch_sub(1, SeqCst);
    }

    /// Only in a forked child: nothing was launched here.
    pub fn reset(&self) {
        self.launches.store(0, SeqCst);
        self.forget_note();
    }
}

/// Make sure that `bit` is set; called after [`SlotWord::begin`], if the slot's flag is lowered. `to` is what the flag
/// is to be.
#[cold]
pub fn mark(activity: &Activity, word: &SlotWord, bit: u64, to: Flag) -> Change {
    let change = set(activity, bit);
    word.flag.store(to as u8, SeqCst);
    change
}

fn set(activity: &Activity, bit: u64) -> Change {
    if activity.busy_streams.load(SeqCst) & bit != 0
        || activity.busy_streams.fetch_or(bit, SeqCst) != 0
    {
        return Change::None;
    }
    // The stamps are for statistics: where two threads race through a change,
    // they may be those of either. The bits are exact.
    activity.busy_since_ns.store(now_ns(), Relaxed);
    activity.busy_periods.fetch_add(1, Relaxed);
    Change::Started
}

/// A wait that began after `seen` was taken has covered the slot: clear its bit
/// if that still says something.
pub fn covered(activity: &Activity, word: &SlotWord, bit: u64, seen: Snapshot) -> Change {
    covered_with(activity, word, bit, seen, || ())
}

/// [`covered`], with something happening at the worst moment: for tests.
#[inline(always)]
fn covered_with(
    activity: &Activity,
    word: &SlotWord,
    bit: u64,
    seen: Snapshot,
    meanwhile: impl FnOnce(),
) -> Change {
    if !seen.is_settled() || word.snapshot() != seen {
        return Change::None;
    }
    meanwhile();
    let ended = clear(activity, word, bit);
    if word.snapshot() == seen {
        return ended;
    }
    // A launch came in between: it may have found the bit still set, or the flag up.
    match (ended, set(activity, bit)) {
        (Change::Ended, Change::Started) => Change::None,
        (Change::None, Change::Started) => Change::Started,
        // Someone else set it again and has reported that.
        (ended, _) => ended,
    }
}

/// Clear a bit whatever its word says: the slot's context is gone.
pub fn clear(activity: &Activity, word: &SlotWord, bit: u64) -> Change {
    word.forget_note();
    let before = activity.busy_streams.fetch_and(!bit, SeqCst);
    if before & bit == 0 || before & !bit != 0 {
        return Change::None;
    }
    let now = now_ns();
    activity.idle_since_ns.store(now, Relaxed);
    let length = now.saturating_sub(activity.busy_since_ns.load(Relaxed));
    activity.busy_total_ns.fetch_add(length, Relaxed);
    Change::Ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    /// Marks a slot as a launch does.
    fn mark(a: &Activity, w: &SlotWord, bit: u64) -> Change {
        if w.is_noted() { Change::None } else { super::mark(a, w, bit, Flag::Noted) }
    }

    fn activity() -> Box<Activity> {
        // SAFETY: plain data, valid when zero-filled.
        unsafe { Box::<Activity>::new_zeroed().assume_init() }
    }

    #[test]
    fn a_period_is_counted_once() {
        let (a, w) = (activity(), SlotWord::new());
        assert_eq!(w.begin(), 1);
        assert_eq!(mark(&a, &w, 1), Change::Started);
        w.end();
        w.begin();
        assert_eq!(mark(&a, &w, 1), Change::None);
        w.end();
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::Ended);
        assert_eq!(a.busy_periods.load(Relaxed), 1);
        assert!(a.idle_since_ns.load(Relaxed) >= a.busy_since_ns.load(Relaxed));
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::None, "idle already");
    }

    #[test]
    fn an_old_snapshot_clears_nothing() {
        let (a, w) = (activity(), SlotWord::new());
        w.begin();
        mark(&a, &w, 4);
        let inside = w.snapshot();
        assert!(!inside.is_settled());
        w.end();
        let before = w.snapshot();
        assert_eq!(
            covered(&a, &w, 4, inside),
            Change::None,
            "it was not issued when the wait began"
        );
        w.begin();
        mark(&a, &w, 4);
        w.end();
        assert_eq!(covered(&a, &w, 4, before), Change::None);
        assert_eq!(a.busy_streams.load(SeqCst), 4);
    }

    #[test]
    fn a_launch_can_be_noted_while_the_stream_is_busy() {
        let (a, w) = (activity(), SlotWord::new());
        w.begin();
        mark(&a, &w, 1);
        w.end();
        assert!(w.is_noted());
        w.forget_note();
        assert_eq!((mark(&a, &w, 1), a.busy_streams.load(SeqCst)), (Change::None, 1));
        assert!(w.is_noted());
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::Ended);
        assert!(!w.is_noted());
    }

    #[test]
    fn a_measured_slot_is_noted_for_the_wait_and_not_for_the_launch() {
        let (a, w) = (activity(), SlotWord::new());
        w.begin();
        super::mark(&a, &w, 1, Flag::Measured);
        w.end();
        assert_eq!((w.is_noted(), w.flag()), (false, Flag::Measured));
        w.end_measuring();
        assert_eq!((w.is_noted(), w.flag()), (true, Flag::Noted));
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::Ended);
        w.end_measuring();
        assert_eq!(w.flag(), Flag::Lowered, "the bit is not set");
    }

    #[test]
    fn a_launch_between_looking_and_clearing_stays_busy() {
        let (a, w) = (activity(), SlotWord::new());
        w.begin();
        mark(&a, &w, 1);
        w.end();
        let seen = w.snapshot();
        let launch = || {
            w.begin();
            assert_eq!(mark(&a, &w, 1), Change::None, "it finds the bit set, about to be cleared");
            w.end();
        };
        assert_eq!(covered_with(&a, &w, 1, seen, launch), Change::None);
        assert_eq!(a.busy_streams.load(SeqCst), 1);
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::Ended);
    }

    #[test]
    fn two_streams_make_one_period() {
        let (a, w, v) = (activity(), SlotWord::new(), SlotWord::new());
        w.begin();
        mark(&a, &w, 1);
        w.end();
        v.begin();
        assert_eq!(mark(&a, &v, 2), Change::None);
        v.end();
        assert_eq!(covered(&a, &w, 1, w.snapshot()), Change::None);
        assert_eq!(covered(&a, &v, 2, v.snapshot()), Change::Ended);
    }

    #[test]
    fn sequences_wrap() {
        let w = SlotWord::new();
        w.launches.store(u64::from(u32::MAX) << 32, SeqCst);
        assert_eq!(w.begin(), 0);
        w.end();
        assert_eq!(w.snapshot(), Snapshot::settled_at(0));
    }

    /// Launchers and a waiter race on one stream whose "GPU" is two counters,
    /// over many rounds. Between rounds everything stands still, and the claim is
    /// checked exactly: work in flight means that the bit is set.
    #[test]
    fn no_busy_bit_is_lost_while_work_is_in_flight() {
        const LAUNCHERS: u32 = 2;
        const ROUNDS: u32 = 20_000;
        let a = activity();
        let w = SlotWord::new();
        let (issued, done, cleared) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        let (start, end) =
            (Barrier::new(LAUNCHERS as usize + 1), Barrier::new(LAUNCHERS as usize + 1));
        let pause = |n: u32| (0..n % 61).for_each(|_| std::hint::spin_loop());
        let (mut in_flight, mut lost) = (0, 0);
        std::thread::scope(|s| {
            for seed in 1..=LAUNCHERS {
                let (a, w, issued, start, end) = (&a, &w, &issued, &start, &end);
                s.spawn(move || {
                    let mut random = seed;
                    for _ in 0..ROUNDS {
                        start.wait();
                        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        pause(random >> 8);
                        w.begin();
                        mark(a, w, 1);
                        pause(random >> 16);
                        issued.fetch_add(1, SeqCst);
                        w.end();
                        end.wait();
                    }
                });
            }
            let mut random = 77_u32;
            for _ in 0..ROUNDS {
                start.wait();
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                for i in 0..3 {
                    let seen = w.snapshot();
                    pause(random >> (4 * i + 6));
                    // A stream query that finds the stream empty; now and then
                    // the GPU is slower and it does not.
                    let all = issued.load(SeqCst);
                    if random >> (20 + i) & 3 != 0 {
                        done.store(all, SeqCst);
                        pause(random >> (3 * i + 9));
                        if covered(&a, &w, 1, seen) == Change::Ended {
                            cleared.fetch_add(1, SeqCst);
                        }
                    }
                }
                end.wait();
                if done.load(SeqCst) != issued.load(SeqCst) {
                    in_flight += 1;
                    // Not asserted here: the others wait at the barrier.
                    lost += u32::from(a.busy_streams.load(SeqCst) == 0);
                }
            }
        });
        assert_eq!(lost, 0, "busy bits lost in rounds that ended with work in flight");
        assert_eq!(issued.load(SeqCst), LAUNCHERS * ROUNDS);
        assert!(in_flight > 0, "no round ended with work in flight: nothing was checked");
        assert!(cleared.load(SeqCst) > 0, "the waiter never cleared the bit: nothing was checked");
        covered(&a, &w, 1, w.snapshot());
        assert_eq!(a.busy_streams.load(SeqCst), 0, "and a last wait ends it");
    }
}
