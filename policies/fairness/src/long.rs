//! Beside high-priority clients, one client's long launch at a time.
//!
//! A launch starts that is longer than its client's window, if its client has nothing else under way. Were those of
//! several clients under way at once, high-priority work would wait for all of them.
//!
//! Kernels of two programs may wait for one another. Each is then held for a moment, takes the longer for it, and is
//! held for longer the next time: so those of over [`LONG_NS_MAX`] neither wait nor are waited for.

use crate::MOMENT_NS;
use tally_sdk::{ClientId, Decision, Launch, host};

/// The longest launch that others wait for, or that waits.
const LONG_NS_MAX: u64 = 10_000_000;
/// It is waited for so many times as long as predicted: what runs beside it lengthens it.
const TIMES: u64 = 2;

/// The long launch that may be under way.
#[derive(Debug, Default)]
pub(crate) struct LongLaunch {
    of: Option<ClientId>,
    /// By then it has ended, or takes far longer than predicted.
    until_ns: u64,
}

impl LongLaunch {
    /// A launch is about to start. `None`: it may, or the decision by which it waits for another client's long one.
    /// Longer than `window_ns` is long.
    pub(crate) fn hold(&mut self, launch: &Launch, window_ns: u64) -> Option<Decision> {
        if launch.predicted_ns <= window_ns || launch.predicted_ns > LONG_NS_MAX {
            return None;
        }
        let other = self.of.filter(|of| *of != launch.client && launch.now_ns < self.until_ns);
        let is_under_way = |of| host::client(of).is_some_and(|one| one.in_flight_ns > window_ns);
        if other.is_some_and(is_under_way) {
            return Some(Decision::HoldUntilCompletion(MOMENT_NS));
        }
        let before_ns = launch.in_flight_ns.min(window_ns);
        self.of = Some(launch.client);
        self.until_ns = launch.now_ns.saturating_add(TIMES * (before_ns + launch.predicted_ns));
        None
    }
}
