//! A high-priority client's activity, and its units of work.

use super::super::Engine;
use super::super::share::Share;
use super::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use tally_engine::Action;

impl DispatchClient {
    /// High priority: tell the engine if it became busy or idle. True if it did, or if there are more marks to be read.
    /// `stall_ns`: after so long without a step it counts as idle.
    pub fn poll_activity(
        &mut self,
        now_ns: u64,
        share: Share,
        stall_ns: u64,
        engine: &mut Engine,
        out: &mut Vec<Action>,
    ) -> bool {
        // Before the units: they begin before it is busy, and end before it is idle.
        self.says_busy = self.link.region.activity.busy_streams.load(SeqCst) != 0;
        let has_more = engine.is_over_time() || self.poll_units(now_ns, share, engine, out);
        let a = &self.link.region.activity;
        let periods = a.busy_periods.load(Acquire);
        let launches = self.launches.look(now_ns, &self.link.region.counters);
        let id = self.link.info.id;
        let (in_flight, moves) = engine.moves(id);
        let (says, has_work) = (self.says_busy, self.says_busy || in_flight > 0);
        let steps = [launches, periods, moves];
        let counts = self.standstill.counts_as_busy(now_ns, has_work, steps, stall_ns);
        let (busy, stands) = (says && counts, has_work && !counts);
        // Idle at both looks but busy between them is activity, too.
        let changed =
            busy != self.busy || (!busy && periods != self.busy_periods) || stands != self.stands;
        if changed {
            if std::mem::replace(&mut self.stands, stands) != stands {
                engine.high_stands(now_ns, id, stands);
            }
            // Its own word for when it became idle is exact to the nanosecond,
            // but can only have happened since the last look.
            let since_ns = if busy {
                now_ns
            } else {
                a.idle_since_ns.load(Acquire).clamp(self.activity_looked_ns, now_ns)
            };
            if busy {
                self.probe.restart(now_ns, launches);
            }
            engine.high_activity(now_ns, id, busy, since_ns, out);
            self.busy = busy;
            self.busy_periods = periods;
        }
        self.activity_looked_ns = now_ns;
        changed || has_more
    }

    /// Tell the engine of units that began and ended, of as many as its user may have in this pass. True if there are
    /// more.
    fn poll_units(
        &mut self,
        now_ns: u64,
        share: Share,
        engine: &mut Engine,
        out: &mut Vec<Action>,
    ) -> bool {
        let (Some(service), Some(marks)) = (&mut self.service, &mut self.marks) else {
            return false;
        };
        let (link, id) = (&self.link, self.link.info.id);
        let marks_read = &link.core.marks_read;
        let taken = marks.read(now_ns, &link.region.marks, marks_read, share.marks);
        link.kernels.pass.used(Share { marks: taken, ..Share::default() });
        // Before the end of their unit.
        marks.tell_tokens(id, engine);
        marks.tell_profile(id, engine);
        service.look(now_ns, marks).tell(now_ns, id, engine, out);
        marks.has_more()
    }

    /// The longest time that keeps its objective for requests now, ns, if it has one.
    pub fn slo_ns(&self) -> Option<u64> {
        Some(self.service.as_ref()?.objective()?.slo_ns)
    }

    /// Whether it marked more than the last pass took.
    pub fn has_more_units(&self) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.has_more())
    }
}
