//! What an A/B test needs to know of a stretch of time: how long high-priority requests
//! and their tokens took, how much best-effort work ended, of whom, and what best-effort clients waited and yielded for
//! it.
//!
//! A request is what a high-priority client marks as one, or what its shim tells from launches and waits
//! ([`super::marks`]). A first launch that the policy holds has begun.
//!
//! Samples are allocated and evaluated by the control plane; here they are filled and
//! exchanged, nothing else.

use super::client::DispatchClient;
use super::{Dispatch, Engine};
use tally_ab::Sample;
use tally_ab::fairness::BestEffort;
use tally_ab::sample::Room;
use tally_engine::ClientWork;

const _: () = assert!(tally_ab::fairness::CLIENTS_MAX >= tally_contract::limits::CLIENTS_MAX);

/// What is measured now, if anything.
#[derive(Default)]
pub struct Measuring {
    sample: Option<Box<Sample>>,
    launches: u64,
    work_ns: u64,
    waited_ns: u64,
    yields: u64,
}

impl Measuring {
    /// Whether an A/B test measures now.
    pub fn is_on(&self) -> bool {
        self.sample.is_some()
    }

    /// Count what high-priority clients did.
    #[inline]
    pub fn look<'a>(&mut self, clients: impl IntoIterator<Item = &'a mut Box<DispatchClient>>) {
        let Some(sample) = &mut self.sample else { return };
        for client in clients {
            let slo_ns = client.slo_ns();
            if let Some(marks) = &mut client.marks {
                marks.sample(slo_ns, sample);
            }
        }
    }

    /// A client leaves.
    pub fn leave(&mut self, now_ns: u64, client: &mut DispatchClient) {
        let slo_ns = client.slo_ns();
        if let (Some(sample), Some(marks)) = (&mut self.sample, &mut client.marks) {
            marks.leave(now_ns, slo_ns, sample);
        }
    }

    /// Go on with another sample, or with none; `cut`: a new stretch begins. What was
    /// recorded until now.
    pub fn exchange(
        &mut self,
        now_ns: u64,
        next: Option<Box<Sample>>,
        cut: bool,
        clients: &mut [Box<DispatchClient>],
        engine: &Engine,
    ) -> Option<Box<Sample>> {
        self.look(clients.iter_mut());
        let (done, waited_ns, yields) =
            (engine.work_done(), engine.waited_ns(now_ns), engine.yields());
        let mut old = std::mem::replace(&mut self.sample, next);
        if let Some(old) = &mut old {
            old.to_ns = now_ns;
            old.launches = done.launches - self.launches;
            old.work_ns = done.ns - self.work_ns;
            old.be_waited_ns = waited_ns.saturating_sub(self.waited_ns);
            old.preemptions = yields - self.yields;
            old.faults = engine.policy_stats().faults.values().sum();
            for client in clients.iter() {
                if let Some(marks) = &client.marks {
                    marks.under_way(client.slo_ns(), old);
                }
            }
            if cut {
                for ClientWork { client, weight, work_ns, backlog_ns } in
                    engine.best_effort_work(now_ns)
                {
                    old.best_effort(BestEffort { client, weight, work_ns, backlog_ns });
                }
            }
        }
        if cut || old.is_none() {
            let room = Room::of_one(clients.iter().filter(|c| c.marks.is_some()).count());
            let marks = clients.iter_mut().filter_map(|c| c.marks.as_mut());
            marks.for_each(|marks| marks.cut(now_ns, room));
        }
        (self.launches, self.work_ns) = (done.launches, done.ns);
        (self.waited_ns, self.yields) = (waited_ns, yields);
        if let Some(new) = &mut self.sample {
            new.from_ns = now_ns;
        }
        old
    }
}

impl Dispatch {
    /// Who is killed because its requests take too long takes none of them out of an A/B test.
    pub(super) fn measure_last(&mut self, now: u64, at: usize) {
        let client = &mut self.clients[at];
        let share = client.left(self.iterations, self.share);
        let stall_ns = self.settings.high_stall_ns;
        client.poll_activity(now, share, stall_ns, &mut self.engine, &mut self.actions);
        self.measuring.leave(now, client);
    }
}
