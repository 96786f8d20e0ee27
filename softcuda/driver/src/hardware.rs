//! Hardware queues: how many streams can be worked on beside one another.
//!
//! A GPU fetches the work of a context's streams from a few queues
//! (`CUDA_DEVICE_MAX_CONNECTIONS`), each in the order in which it was submitted. An
//! entry stays at the head until the work before it *in its own stream* has ended, and
//! keeps all behind it waiting, of whatever stream. A kernel leaves its queue when it
//! starts, so a running kernel alone keeps nobody waiting.
//!
//! As measured on an H200 with driver 580: fewer than 8 connections are given out to
//! streams in turn, when they are made; from 8 on, a stream whose work is done takes, with
//! its next piece, a queue that no other stream uses, else one that nobody is kept waiting in, if there is one. Streams
//! of all priorities share the queues. A queue holds some 1020 entries; a call that would add one more waits. What does
//! not take an entry: event records without timing.

use crate::config;
use crate::sync::{Progress, lock};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// From so many connections on streams change queues.
const DYNAMIC_MIN: usize = 8;

/// One queue. Entries are numbered from 0 in the order in which they came.
#[derive(Default)]
pub(crate) struct HardwareQueue {
    /// Entries that came, written under the lock of a stream that uses the queue.
    entered: AtomicU64,
    /// Entries that left the head.
    taken: Progress,
    /// Streams whose work came through it and has not ended.
    users: AtomicU64,
}

impl HardwareQueue {
    /// A place at the end, or `None` if the queue is full.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Entry> {
        let depth = config::queue_depth();
        let room = |entered: u64| (entered < self.taken.get() + depth).then_some(entered + 1);
        let number = self.entered.fetch_update(SeqCst, SeqCst, room).ok()?;
        Some(Entry { queue: self.clone(), number })
    }

    /// Waits until [`enter`](Self::enter) may find room.
    pub(crate) fn wait_for_room(&self) {
        let full_at = self.entered.load(SeqCst).saturating_sub(config::queue_depth());
        self.taken.wait_for(full_at + 1);
    }

    /// A stream begins, or ends, to use it.
    pub(crate) fn count_user(&self, begins: bool) {
        if begins {
            self.users.fetch_add(1, SeqCst);
        } else {
            self.users.fetch_sub(1, SeqCst);
        }
    }

    fn is_free(&self) -> bool {
        self.users.load(SeqCst) == 0 && !self.is_blocked()
    }

    /// Whether an entry stands at the head.
    fn is_blocked(&self) -> bool {
        self.taken.get() < self.entered.load(SeqCst)
    }
}

/// A place in a queue.
pub(crate) struct Entry {
    queue: Arc<HardwareQueue>,
    number: u64,
}

impl Entry {
    /// Waits until it is at the head.
    pub(crate) fn wait_for_turn(&self) {
        self.queue.taken.wait_for(self.number);
    }

    /// Leaves the head to the next one.
    pub(crate) fn leave(self) {
        self.queue.taken.advance(self.number + 1);
    }
}

/// All queues of a context.
pub(crate) struct HardwareQueues {
    queues: Vec<Arc<HardwareQueue>>,
    /// Streams that were made.
    made: AtomicUsize,
    /// Held while a queue is chosen, so that no two streams take the same free one.
    choosing: Mutex<()>,
}

impl Default for HardwareQueues {
    fn default() -> Self {
        let queues = (0..config::connections()).map(|_| Arc::default()).collect();
        Self { queues, made: AtomicUsize::new(0), choosing: Mutex::default() }
    }
}

impl HardwareQueues {
    /// The queue that a new stream starts with.
    pub(crate) fn assign(&self) -> Arc<HardwareQueue> {
        let number = self.made.fetch_add(1, SeqCst);
        self.queues[number % self.queues.len()].clone()
    }

    /// Where the next work of a stream goes that used `now` and has none under way; it counts as a user there.
    pub(crate) fn take(&self, now: &Arc<HardwareQueue>) -> Arc<HardwareQueue> {
        let _held = lock(&self.choosing);
        let chosen = self.choose(now);
        chosen.count_user(true);
        chosen
    }

    fn choose(&self, now: &Arc<HardwareQueue>) -> Arc<HardwareQueue> {
        if self.queues.len() < DYNAMIC_MIN || now.is_free() {
            return now.clone();
        }
        let free = self.queues.iter().find(|queue| queue.is_free());
        let open = || Some(now).filter(|queue| !queue.is_blocked());
        let other = || self.queues.iter().find(|queue| !queue.is_blocked());
        free.or_else(open).or_else(other).unwrap_or(now).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_leave_in_the_order_in_which_they_came() {
        let queue = Arc::new(HardwareQueue::default());
        let (first, second) = (queue.enter().unwrap(), queue.enter().unwrap());
        first.wait_for_turn();
        assert!(queue.is_blocked());
        first.leave();
        second.wait_for_turn();
        second.leave();
        assert!(!queue.is_blocked());
    }

    #[test]
    fn a_full_queue_takes_no_entry() {
        let queue = Arc::new(HardwareQueue::default());
        let mut entries: Vec<_> = (0..config::queue_depth()).map_while(|_| queue.enter()).collect();
        assert_eq!(entries.len() as u64, config::queue_depth());
        assert!(queue.enter().is_none());
        entries.remove(0).leave();
        queue.wait_for_room();
        assert!(queue.enter().is_some() && queue.enter().is_none());
    }
}
