//! What tells clients that the core's thread is alive, and what is looked at as often.

use super::Dispatch;
use super::control::Notice;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::mpsc;

/// Clients learn from it that the core's thread is alive.
pub(super) const HEARTBEAT_NS: u64 = 200_000_000;

impl Dispatch {
    pub(super) fn heartbeat(&mut self, now: u64) {
        self.next_heartbeat_ns = now + HEARTBEAT_NS;
        while let Some(notice) = self.dropped.pop() {
            if let Err(mpsc::error::TrySendError::Full(notice)) = self.notices.try_send(notice) {
                self.dropped.push(notice);
                break;
            }
        }
        if !self.noticed && self.policy().is_disabled() {
            let notice = Notice::Disabled { generation: self.generation };
            // With too many notices waiting: at the next heartbeat.
            self.noticed = self.notices.try_send(notice).is_ok();
        }
        for c in &self.clients {
            c.link.core.heartbeat.fetch_add(1, Relaxed);
            if self.settings.engine.sm_count == 0
                && let Some(device) = c.link.witness.device(&c.link.region.report)
            {
                self.settings.engine.sm_count = device.sm_count;
                self.engine.set_sm_count(device.sm_count);
            }
        }
    }
}
