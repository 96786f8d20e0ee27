//! What an A/B test needs to know of a stretch of time: how long high-priority requests
//! took, how much best-effort work ended, and what best-effort clients waited and yielded for it.
//!
//! A request is what a high-priority client marks as one ([`super::marks`]), else a period of its activity: from its first launch on
//! an idle GPU to the return of the call that waits for the last one. A first launch that the
//! policy holds began when the core saw it: the client has not noted it yet. The client's own
//! stamps tell its length; they are untrusted, and bounded by what the core saw
//! ([`tally_ab::meter`]).
//!
//! Samples are allocated and evaluated by the control plane; here they are filled and
//! exchanged, nothing else.

use super::Engine;
use super::client::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use tally_ab::Sample;
use tally_ab::meter::{Look, Meter};
use tally_ipc::layout::Activity;

/// A consistent look at a client's words; `None` while it is changing them.
pub(super) fn look(a: &Activity) -> Option<Look> {
    let state = || (a.busy_streams.load(SeqCst) != 0, a.busy_periods.load(Acquire));
    let (busy, periods) = state();
    let look = Look {
        busy,
        periods,
        since_ns: a.busy_since_ns.load(Acquire),
        idle_ns: a.idle_since_ns.load(Acquire),
        total_ns: a.busy_total_ns.load(Acquire),
    };
    // Idle before it became busy: the period's end is not written down yet.
    let settled = busy || look.idle_ns >= look.since_ns;
    (settled && state() == (busy, periods)).then_some(look)
}

/// The same of a client whose launch waits for an answer: a period has begun that it will count
/// once the launch is granted.
pub(super) fn held(look: Look) -> Look {
    match look.busy {
        true => look,
        false => Look { busy: true, periods: look.periods.saturating_add(1), ..look },
    }
}

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
    pub fn look<'a>(
        &mut self,
        now_ns: u64,
        clients: impl IntoIterator<Item = &'a mut Box<DispatchClient>>,
    ) {
        let Some(sample) = &mut self.sample else { return };
        for client in clients.into_iter().filter(|c| c.is_high()) {
            if let Some(marks) = client.marks.as_mut().filter(|marks| marks.has_requests()) {
                marks.sample(sample);
                continue;
            }
            if let Some(look) = look(&client.link.region.activity) {
                let look = if client.waits() { held(look) } else { look };
                client.meter.look(look, now_ns, sample.as_mut());
            }
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
        self.look(now_ns, clients.iter_mut());
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
            let high = clients.iter().filter(|c| c.is_high());
            for client in high {
                match client.marks.as_ref().filter(|marks| marks.has_requests()) {
                    Some(marks) => marks.open_since_ns().iter().for_each(|at| old.open_since(*at)),
                    None => client.meter.open_since_ns().iter().for_each(|at| old.open_since(*at)),
                }
            }
        } else {
            // What was before is not known.
            clients.iter_mut().for_each(|c| c.meter = Meter::default());
        }
        if cut || old.is_none() {
            clients.iter_mut().filter_map(|c| c.marks.as_mut()).for_each(|marks| marks.cut(now_ns));
        }
        (self.launches, self.work_ns) = (done.launches, done.ns);
        (self.waited_ns, self.yields) = (waited_ns, yields);
        if cut {
            clients.iter_mut().for_each(|c| c.meter.cut());
        }
        if let Some(new) = &mut self.sample {
            new.from_ns = now_ns;
        }
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    /// 100 us until it ends, of which a policy held it for 80 us.
    #[test]
    fn what_a_policy_holds_is_under_way_and_counts() {
        let idle = Look { busy: false, periods: 5, since_ns: 100, idle_ns: 200, total_ns: 900 };
        let (mut meter, mut sample) = (Meter::default(), Sample::new());
        meter.look(idle, 1_000, &mut sample);
        meter.look(held(idle), 2_000, &mut sample);
        assert_eq!(meter.open_since_ns(), Some(2_000));
        meter.look(held(idle), 81_000, &mut sample);
        // It was granted, and its thread has not noted that it began.
        meter.look(idle, 81_500, &mut sample);
        let granted = Look { busy: true, periods: 6, since_ns: 82_000, ..idle };
        assert_eq!(held(granted), granted);
        meter.look(granted, 82_500, &mut sample);
        meter.look(granted, 101_500, &mut sample);
        let ended = Look { busy: false, idle_ns: 102_000, total_ns: 20_900, ..granted };
        meter.look(ended, 102_500, &mut sample);
        let longest_ns = sample.quantile_ns(1.0).unwrap();
        assert_eq!(sample.requests(), 1);
        assert!((99_500..=100_600).contains(&longest_ns), "{longest_ns}");
    }

    /// Words are read in the shim's order of writing them.
    #[test]
    fn words_that_are_being_changed_are_not_looked_at() {
        let (_file, region) = tally_ipc::map::create_client().unwrap();
        let a = &region.activity;
        a.busy_streams.store(1, SeqCst);
        a.busy_since_ns.store(1_000, Relaxed);
        a.busy_periods.fetch_add(1, Relaxed);
        let busy = look(a).unwrap();
        assert_eq!((busy.busy, busy.periods, busy.since_ns), (true, 1, 1_000));
        // The bit is down, the stamp not there yet.
        a.busy_streams.store(0, SeqCst);
        assert_eq!(look(a), None);
        a.idle_since_ns.store(1_100, Relaxed);
        a.busy_total_ns.fetch_add(100, Relaxed);
        let (mut meter, mut sample) = (Meter::default(), Sample::new());
        meter.look(busy, 1_010, &mut sample);
        meter.look(look(a).unwrap(), 1_120, &mut sample);
        assert_eq!(
            (sample.carried.len(), sample.requests()),
            (1, 0),
            "it was before the first look"
        );
    }
}
