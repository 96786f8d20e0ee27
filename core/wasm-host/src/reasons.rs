//! The texts of a policy's reasons, and how often each was given. They outlive the instance, as its metrics do.

use crate::metrics::beginning;
use std::collections::BTreeMap;
use tally_contract::limits::REASON_BYTES_MAX;
use tally_ipc::text::printable;

/// The texts of a policy's reasons by number, and how many decisions gave each.
#[derive(Debug)]
pub struct Reasons {
    texts: BTreeMap<u8, String>,
    counts: Box<[u64; 256]>,
}

impl Default for Reasons {
    fn default() -> Self {
        Reasons { texts: BTreeMap::new(), counts: Box::new([0; 256]) }
    }
}

/// A reason, its text and how often it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasonStatus {
    pub reason: u8,
    /// What the policy calls it; empty if it never said.
    pub text: String,
    /// Decisions that named this reason.
    pub decisions: u64,
}

impl Reasons {
    /// Name a reason; 0 has no name.
    pub fn define(&mut self, reason: u8, text: &str) {
        if reason > 0 {
            self.texts.insert(reason, printable(beginning(text, REASON_BYTES_MAX).into()));
        }
    }

    /// Counts a decision that gives this reason.
    #[inline]
    pub fn count(&mut self, reason: u8) {
        self.counts[usize::from(reason)] += 1;
    }

    /// Reasons that were named or given for a decision.
    pub fn status(&self) -> Vec<ReasonStatus> {
        let known =
            |reason: &u8| self.texts.contains_key(reason) || self.counts[usize::from(*reason)] > 0;
        let one = |reason: u8| ReasonStatus {
            reason,
            text: self.texts.get(&reason).cloned().unwrap_or_default(),
            decisions: self.counts[usize::from(reason)],
        };
        (1..=u8::MAX).filter(known).map(one).collect()
    }

    pub fn texts(&self) -> &BTreeMap<u8, String> {
        &self.texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_named_counted_and_bounded() {
        let mut reasons = Reasons::default();
        reasons.define(0, "nothing has a name");
        reasons.define(3, &"x".repeat(200));
        reasons.define(3, "idle gap");
        for reason in [0, 3, 3, 255] {
            reasons.count(reason);
        }
        let shown: Vec<_> =
            reasons.status().into_iter().map(|r| (r.reason, r.text, r.decisions)).collect();
        assert_eq!(shown, [(3, "idle gap".into(), 2), (255, String::new(), 1)]);
        reasons.define(4, &"x".repeat(200));
        assert_eq!(reasons.texts()[&4].len(), REASON_BYTES_MAX);
    }
}
