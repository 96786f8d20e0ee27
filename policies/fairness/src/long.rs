//! Beside high-priority clients, one client's long launch at a time.
//!
//! A launch starts that is longer than its client's window, if its client has nothing else under way. Were those of
//! several clients under way at once, high-priority work would wait for all of them.
//!
//! Kernels of two programs may wait for one another: a long launch that does not end while another one is held for it
//! has been waited for in vain. After [`IN_VAIN`] such ones in a row nothing is held for some time.

use crate::{DRAIN, MOMENT_NS};
use tally_sdk::{ClientId, Decision, Launch, UNKNOWN, host};

/// So many in a row.
const IN_VAIN: u32 = 4;
/// Nothing is held for so long, and for twice as long each time that it is in vain again, so often.
const OFF_NS: u64 = 1_000_000_000;
const DOUBLINGS_MAX: u32 = 6;

/// The long launch that may be under way.
#[derive(Debug, Default)]
pub(crate) struct LongLaunch {
    of: Option<ClientId>,
    /// By then it has ended, or takes far longer than predicted.
    until_ns: u64,
    /// Another one is held for it.
    is_waited_for: bool,
    in_vain: u32,
    off_until_ns: u64,
}

impl LongLaunch {
    /// A launch is about to start. `None`: it may, or the decision by which it waits for another client's long one.
    /// Longer than `window_ns` is long.
    pub(crate) fn hold(&mut self, launch: &Launch, window_ns: u64) -> Option<Decision> {
        let now_ns = launch.now_ns;
        let is_long = launch.predicted_ns != UNKNOWN && launch.predicted_ns > window_ns;
        if !is_long || now_ns < self.off_until_ns {
            return None;
        }
        if let Some(other) = self.of.filter(|of| *of != launch.client) {
            let has_ended = host::client(other).is_none_or(|one| one.in_flight_ns <= window_ns);
            match has_ended {
                false if now_ns < self.until_ns => {
                    self.is_waited_for = true;
                    return Some(Decision::HoldUntilCompletion(MOMENT_NS));
                }
                false => self.waited_in_vain(now_ns),
                true if self.is_waited_for => self.in_vain = 0,
                true => {}
            }
        }
        let lasts_ns = launch.in_flight_ns.saturating_add(launch.predicted_ns);
        (self.of, self.is_waited_for) = (Some(launch.client), false);
        self.until_ns = now_ns.saturating_add(lasts_ns.saturating_mul(DRAIN));
        None
    }

    fn waited_in_vain(&mut self, now_ns: u64) {
        self.in_vain += 1;
        if let Some(again) = self.in_vain.checked_sub(IN_VAIN) {
            self.off_until_ns = now_ns.saturating_add(OFF_NS << again.min(DOUBLINGS_MAX));
        }
    }
}
