//! What the shim puts into streams itself: events behind launches, while no other thread puts anything into one.
//!
//! An event in a blocking stream waits for what came into the legacy stream before it. The event behind a launch must
//! not wait for more than the launch did, or a program that waits for the launch waits for that, too.

use crate::state;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};
use tally_ipc::wait;

/// Counts calls that may have put something into a stream, and more for batches.
static ENQUEUED: AtomicU64 = AtomicU64::new(0);
/// What a call counts that may put very much into a stream.
const BATCH: u64 = 1_024;
/// Threads in [`undisturbed`].
static RECORDS: AtomicU32 = AtomicU32::new(0);
/// How long calls wait for them: a thread may be lost there, or the driver may wait for room in a queue.
const RECORD_MAX: Duration = Duration::from_millis(250);
/// Thereof, without sleeping.
const RECORD_SPIN: Duration = Duration::from_micros(50);
/// Pause between two looks at other threads.
const NAP: Duration = Duration::from_micros(50);
/// One has waited so long: until all have left, none waits and none enters.
static ARE_LATE: AtomicBool = AtomicBool::new(false);

/// Calls so far that may have put something into a stream.
pub fn enqueued() -> u64 {
    ENQUEUED.load(SeqCst)
}

/// A call is about to put something into a stream, as soon as this returns.
pub fn enqueue() {
    ENQUEUED.fetch_add(1, SeqCst);
    // One of the two sees the other.
    if RECORDS.load(SeqCst) != 0 && !state::is_inside() {
        wait_for_records();
    }
}

/// The same call puts in a batch.
pub fn enqueue_batch() {
    ENQUEUED.fetch_add(BATCH, SeqCst);
}

#[cold]
fn wait_for_records() {
    let are_done = || (RECORDS.load(SeqCst) == 0 || ARE_LATE.load(SeqCst)).then_some(());
    let start = Instant::now();
    let _ = wait::spin(RECORD_SPIN, are_done);
    loop {
        // Counted anew: a call that went on meanwhile began after the first count.
        ENQUEUED.fetch_add(1, SeqCst);
        if are_done().is_some() {
            return;
        }
        if start.elapsed() >= RECORD_MAX {
            ARE_LATE.store(true, SeqCst);
        }
        wait::nap(NAP);
    }
}

/// Put something of the shim's behind the calling thread's own launch, unless another call has begun to put something
/// into a stream since there were `since` of them. Calls that begin meanwhile wait for it.
pub fn undisturbed<T>(since: u64, record: impl FnOnce() -> Option<T>) -> Option<T> {
    let alone = || {
        RECORDS.fetch_add(1, SeqCst);
        let is_undisturbed = ENQUEUED.load(SeqCst) == since && !ARE_LATE.load(SeqCst);
        let result = if is_undisturbed { record() } else { None };
        if RECORDS.fetch_sub(1, SeqCst) == 1 {
            ARE_LATE.store(false, SeqCst);
        }
        result
    };
    // A signal handler's calls do not wait for the frame below.
    if state::is_inside() { alone() } else { state::inside(alone) }
}

/// Only in a forked child.
pub fn reset() {
    RECORDS.store(0, SeqCst);
    ARE_LATE.store(false, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread;

    /// One test, as what it tests is one per process.
    #[test]
    fn calls_wait_for_a_record_and_for_a_lost_one_no_longer_than_its_bound() {
        assert_eq!(undisturbed(enqueued(), || Some(())), Some(()));
        let since = enqueued();
        enqueue();
        assert_eq!(undisturbed(since, || Some(())), None, "another call came between");

        let (say, hear) = channel();
        thread::scope(|scope| {
            undisturbed(enqueued(), || {
                let before = enqueued();
                scope.spawn(move || {
                    enqueue();
                    say.send(()).unwrap();
                });
                while enqueued() == before {
                    thread::yield_now();
                }
                // Longer than a call spins.
                thread::sleep(Duration::from_millis(20));
                assert!(hear.try_recv().is_err(), "it waits");
                Some(())
            });
            hear.recv().unwrap();

            // As one that never comes back.
            undisturbed(enqueued(), || {
                enqueue();
                assert!(!ARE_LATE.load(SeqCst), "a signal handler's call does not wait");
                thread::spawn(enqueue).join().unwrap();
                assert_eq!(undisturbed(enqueued(), || Some(())), None, "they are late");
                Some(())
            });
            assert_eq!(undisturbed(enqueued(), || Some(())), Some(()), "they have left");
        });
    }
}
