//! What it costs a client's streams that their next launch runs on another number of SMs, as its shim says.

use super::super::Engine;
use super::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_ipc::layout::{SM_CHANGE_SLOTS, SmChanges};

/// Longer ones are believed to be as long, ns.
const LONGEST_NS: u64 = 1_000_000_000;

/// Median of the latest, ns; 0: none was measured.
pub fn median_ns(changes: &SmChanges) -> u64 {
    let count = changes.count.load(Acquire).min(SM_CHANGE_SLOTS as u64) as usize;
    let mut latest_ns = [0; SM_CHANGE_SLOTS];
    for (ns, word) in latest_ns.iter_mut().zip(&changes.latest_ns[..count]) {
        *ns = word.load(Relaxed).min(LONGEST_NS);
    }
    let latest_ns = &mut latest_ns[..count];
    latest_ns.sort_unstable();
    latest_ns.get(count / 2).copied().unwrap_or(0)
}

impl DispatchClient {
    /// Tell the engine.
    pub(super) fn poll_sm_changes(&mut self, engine: &mut Engine) {
        let changes = &self.link.region.sm_changes;
        self.sm_changes_seen = changes.count.load(Acquire);
        engine.sm_change_measured(self.link.info.id, median_ns(changes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn changes(count: u64, latest_ns: [u64; SM_CHANGE_SLOTS]) -> SmChanges {
        SmChanges { count: AtomicU64::new(count), latest_ns: latest_ns.map(AtomicU64::new) }
    }

    #[test]
    fn the_median_is_of_what_was_measured() {
        let mut latest_ns = [0; SM_CHANGE_SLOTS];
        assert_eq!(median_ns(&changes(0, latest_ns)), 0);
        latest_ns[..3].copy_from_slice(&[9_000, 5_000, 7_000]);
        assert_eq!(median_ns(&changes(1, latest_ns)), 9_000);
        assert_eq!(median_ns(&changes(3, latest_ns)), 7_000);
        assert_eq!(median_ns(&changes(u64::MAX, [u64::MAX; SM_CHANGE_SLOTS])), LONGEST_NS);
    }
}
