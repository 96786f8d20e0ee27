//! Units of work that the program marks: from begin to end, and to the core.
//!
//! Never waits: no lock, no allocation; a core that sleeps is woken if it asked to be told of units, or if the ring is
//! half full. Without a core, or in a best-effort program, units are forgotten.

use crate::{link, state};
use std::num::NonZeroU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use tally_ipc::layout::notify;
use tally_ipc::marks::{Kind, MARK_SLOTS, Marks, OPEN_MARKS_MAX, Stated, What};
use tally_ipc::ring::core_needs_wake;
use tally_ipc::wait::now_ns;

const FREE: u64 = 0;
const CLAIMED: u64 = u64::MAX;
/// Units after which a core that sleeps is woken again.
const WAKE_EVERY: u64 = 64;
/// Bits of an identity that are its place.
const PLACE_BITS: u32 = OPEN_MARKS_MAX.trailing_zeros();

const _: () = assert!(OPEN_MARKS_MAX.is_power_of_two());

/// A place for a unit that has begun.
struct Place {
    /// [`FREE`], [`CLAIMED`] while a thread changes it, or the unit's identity.
    holder: AtomicU64,
    began_ns: AtomicU64,
    what: AtomicU64,
}

static PLACES: [Place; OPEN_MARKS_MAX] = [const {
    Place { holder: AtomicU64::new(FREE), began_ns: AtomicU64::new(0), what: AtomicU64::new(0) }
}; OPEN_MARKS_MAX];

/// Units that have begun so far, and one more.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The program has marked a request.
static MARKS_REQUESTS: AtomicBool = AtomicBool::new(false);

/// Where the core reads, if one does.
fn region() -> Option<&'static Marks> {
    let client = state::client()?;
    (state::registration().is_some() && !state::is_best_effort()).then_some(&client.marks)
}

/// A unit begins now. Its identity, which is used once in a process; `None` if too many are open.
pub fn begin(what: What) -> Option<NonZeroU64> {
    if what.kind == Kind::Request && !are_requests_marked() {
        MARKS_REQUESTS.store(true, Relaxed);
    }
    let (began_ns, what) = (now_ns(), what.pack());
    let number = NEXT.fetch_add(1, Relaxed);
    for turn in 0..OPEN_MARKS_MAX {
        let at = (number as usize).wrapping_add(turn) % OPEN_MARKS_MAX;
        let place = &PLACES[at];
        if place.holder.compare_exchange(FREE, CLAIMED, Acquire, Relaxed).is_err() {
            continue;
        }
        place.began_ns.store(began_ns, Relaxed);
        place.what.store(what, Relaxed);
        if let Some(marks) = region() {
            marks.begin(at, began_ns, what);
        }
        let identity = number << PLACE_BITS | at as u64;
        place.holder.store(identity, Release);
        return NonZeroU64::new(identity);
    }
    lose();
    None
}

/// A unit ends now. Does nothing if it has ended, or never was.
pub fn end(identity: u64) {
    let at = identity as usize % OPEN_MARKS_MAX;
    let place = &PLACES[at];
    if matches!(identity, FREE | CLAIMED)
        || place.holder.compare_exchange(identity, CLAIMED, Acquire, Relaxed).is_err()
    {
        return;
    }
    let began_ns = place.began_ns.load(Relaxed);
    let unit = Stated { began_ns, ended_ns: now_ns(), what: place.what.load(Relaxed) };
    publish(unit);
    // Only now, so that the core does not see it gone before it has ended.
    if let Some(client) = state::client() {
        client.marks.free(at);
    }
    place.holder.store(FREE, Release);
}

/// Whether the program marks requests: then no others are told from its launches.
pub fn are_requests_marked() -> bool {
    MARKS_REQUESTS.load(Relaxed)
}

/// Report a unit that ended to the core.
pub fn publish(unit: Stated) {
    let (Some(marks), Some(registration)) = (region(), state::registration()) else { return };
    let waiting = marks.publish(registration.core.marks_read.load(Acquire), unit);
    // Again and again: the core may have been about to sleep.
    let is_half_full = |n: u64| n >= MARK_SLOTS as u64 / 2 && n.is_multiple_of(WAKE_EVERY);
    if registration.core.notify.load(SeqCst) & notify::UNITS != 0
        || (waiting.is_some_and(is_half_full) && core_needs_wake(registration.core))
    {
        link::wake_core();
    }
}

/// A unit is not followed: too many are open.
pub fn lose() {
    if let Some(marks) = region() {
        marks.drop_one();
    }
}

/// In a forked child: units of the parent do not end here.
pub fn reset() {
    PLACES.iter().for_each(|place| place.holder.store(FREE, Relaxed));
    MARKS_REQUESTS.store(false, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the places are the process's.
    #[test]
    fn so_many_units_are_open_at_once_and_each_ends_once() {
        let what = What::marked(Kind::Request, None);
        let open: Vec<u64> = (0..OPEN_MARKS_MAX).map(|_| begin(what).unwrap().get()).collect();
        assert_eq!(begin(what), None);
        end(open[7]);
        end(open[7]);
        let again = begin(what).unwrap().get();
        assert_ne!(again, open[7]);
        // The old identity does not end the unit that has its place.
        end(open[7]);
        [0, u64::MAX, 12_345 << PLACE_BITS].into_iter().for_each(end);
        assert_eq!(begin(what), None);
        open.into_iter().chain([again]).for_each(end);
        let all: Vec<u64> = (0..OPEN_MARKS_MAX).map(|_| begin(what).unwrap().get()).collect();
        reset();
        all.into_iter().for_each(end);
        assert!(begin(what).is_some());
        reset();
    }
}
