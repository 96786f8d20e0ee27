//! Which of a client's launches yielded, and how soon, as its shim says.

use super::super::Engine;
use super::super::share::Share;
use super::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_ipc::layout::TURNAROUND_SLOTS;

impl DispatchClient {
    /// Tell the engine which launches yielded, and how soon.
    pub(super) fn poll_turnarounds(&mut self, now_ns: u64, share: Share, engine: &mut Engine) {
        let count = self.link.region.turnarounds.count.load(Acquire);
        self.check_turnarounds(count);
        let all = &self.link.region.turnarounds;
        // A hostile count is read as at most a ring of them, and of a ring in some passes; one that falls, as none.
        let from = self.turnarounds_seen.max(count.saturating_sub(TURNAROUND_SLOTS as u64));
        let count = count.clamp(from, from.saturating_add(share.turnarounds as u64));
        for n in from..count {
            let t = &all.latest[(n % TURNAROUND_SLOTS as u64) as usize];
            let (ticket, ns) = (t.ticket.load(Relaxed), t.ns.load(Relaxed));
            engine.launch_yielded(now_ns, self.link.info.id, ticket, ns);
        }
        self.turnarounds_seen = count;
        let turnarounds = (count - from) as usize;
        self.user().used(Share { turnarounds, ..Share::default() });
    }
}
