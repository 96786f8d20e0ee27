//! Services that are not used.

use super::Service;
use tally_sdk::NEVER;

/// A service without a unit for so long, and for so many times as long as its units are apart, is not used.
const IDLE_NS: u64 = 1_000_000_000;
const IDLE_TIMES: u64 = 16;
/// Nor is one whose next unit is expected, after so many times its longest gap of late.
const GAP_TIMES: u64 = 4;
/// That is forgotten by one part in so many with each unit.
const GAP_FOLLOW: u64 = 64;

impl Service {
    /// Time for which it is not used.
    pub(super) fn idle_ns(&self, now_ns: u64) -> u64 {
        if self.open.is_some() {
            return 0;
        }
        let ended_ns = self.ended_ns.unwrap_or(self.joined_ns);
        let used_ns = IDLE_NS.max(self.share.apart_ns().saturating_mul(IDLE_TIMES));
        now_ns.saturating_sub(ended_ns).saturating_sub(used_ns)
    }

    /// It has had no unit for long.
    pub fn is_idle(&self, now_ns: u64) -> bool {
        self.idle_ns(now_ns) > 0
    }

    /// Whether what runs now must be over soon when its next unit begins. One that is not used and has an objective, or
    /// had no unit yet, has to bear what the others do, once.
    pub fn is_expected(&self, now_ns: u64) -> bool {
        if self.misses || !self.is_idle(now_ns) {
            return true;
        }
        let idle_ns = now_ns.saturating_sub(self.ended_ns.unwrap_or(self.joined_ns));
        match (self.is_new, self.longest_gap_ns) {
            (true, _) => false,
            (false, 0) => true,
            (false, gap_ns) => self.slo_ns == NEVER || idle_ns < gap_ns.saturating_mul(GAP_TIMES),
        }
    }

    /// A unit begins.
    pub(super) fn note_gap(&mut self, now_ns: u64) {
        if let Some(ended_ns) = self.ended_ns.filter(|_| self.open.is_none()) {
            let kept_ns = self.longest_gap_ns - self.longest_gap_ns.div_ceil(GAP_FOLLOW);
            self.longest_gap_ns = kept_ns.max(now_ns.saturating_sub(ended_ns)).max(1);
        }
        self.is_new = false;
    }
}
