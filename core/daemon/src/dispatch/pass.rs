//! One pass over all clients, in the order of [`Rotation`].

use super::Dispatch;
use super::client::Taken;
use super::share::{Rotation, Share};

/// Whose turn comes first.
#[derive(Default)]
pub(super) struct Order {
    completions: Rotation,
    submissions: Rotation,
    wakes: Rotation,
}

impl Dispatch {
    /// Everything that clients did since the last pass. True if it was anything.
    pub(super) fn pass(&mut self, now: u64) -> bool {
        let mut active = false;
        let share = Share::of(self.clients.len());
        let was_in_flight = self.engine.has_in_flight();
        for c in self.clients.iter_mut().filter(|c| c.is_high()) {
            active |= c.poll_activity(
                now,
                self.settings.high_stall_ns,
                &mut self.engine,
                &mut self.actions,
            );
        }
        self.measuring.look(now, self.clients.iter_mut());
        active |= self.take_completions(now, share);
        if self.engine.next_deadline_ns().is_some_and(|due| due <= now) {
            self.engine.tick(now, &mut self.actions);
            // There was too much for one.
            active |= self.engine.next_deadline_ns() == Some(0);
        }
        self.apply(now);
        active |= self.take_submissions(now, share);
        active |= self.clients.iter().any(|c| c.is_to_be_woken());
        if !was_in_flight && self.engine.has_in_flight() {
            self.last_progress_ns = now;
        }
        let high = self.wants_high_activity();
        for c in self.clients.iter_mut().filter(|c| high || !c.is_high()) {
            c.poll_probe(now);
        }
        active
    }

    fn take_completions(&mut self, now: u64, share: Share) -> bool {
        let (mut active, mut looked) = (false, 0);
        for at in self.order.completions.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if !c.is_pending() {
                continue;
            }
            let share = c.left(self.turns, share);
            if share.completions == 0 {
                self.order.completions.skip(c.id());
                continue;
            }
            let found = c.poll_completions(now, share, &mut self.engine, &mut self.actions);
            looked += found.streams;
            if found.moved {
                active = true;
                self.last_progress_ns = now;
            }
        }
        // Before it sleeps all were looked at.
        let pending: u32 = self.clients.iter().map(|c| c.pending()).sum();
        self.looks_left = match self.looks_left {
            _ if looked >= pending => 0,
            0 => pending.div_ceil(looked.max(1)),
            left => left - 1,
        };
        active || self.looks_left > 0
    }

    fn take_submissions(&mut self, now: u64, share: Share) -> bool {
        let (mut active, mut misbehaved) = (false, Vec::new());
        for at in self.order.submissions.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            let share = c.left(self.turns, share);
            if share.submissions == 0 {
                if c.has_launches() {
                    active = true;
                    self.order.submissions.skip(c.id());
                }
                continue;
            }
            let (engine, out) = (&mut self.engine, &mut self.actions);
            match c.poll_submissions(now, share, engine, &mut self.profile_cache, out) {
                Taken::Launches(0) => {}
                Taken::Launches(_) => {
                    active = true;
                    self.beat();
                }
                Taken::Misbehaved(why) => misbehaved.push((c.id(), why)),
            }
            if !self.actions.is_empty() {
                self.apply(now);
            }
        }
        for (id, why) in misbehaved {
            if let Ok(at) = self.clients.binary_search_by_key(&id, |c| c.id()) {
                self.cut_off(now, at, why);
            }
        }
        active
    }

    /// Wake threads of those that were answered, or whose shim is to look at something, as many as may be in this turn.
    pub(super) fn wake(&mut self) {
        if !self.clients.iter().any(|c| c.is_to_be_woken()) {
            return;
        }
        for at in self.order.wakes.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if c.is_to_be_woken() && !c.wake(self.turns) {
                self.order.wakes.skip(c.id());
            }
        }
    }
}
