//! What an A/B test needs to know of a stretch of time: how long high-priority requests
//! took, and how much best-effort work ended.
//!
//! A request is a period of activity of a high-priority client: from its first launch on
//! an idle GPU to the return of the call that waits for the last one. The client's own
//! stamps tell its length; they are untrusted, and bounded by what can be true.
//!
//! Samples are allocated and evaluated by the control plane; here they are filled and
//! exchanged, nothing else.

use super::Engine;
use super::client::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use tally_ab::Sample;
use tally_ipc::layout::Activity;

/// A client's requests as far as they are counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// Periods that ended, or that began before this stretch: not to be counted again.
    counted: u64,
    /// Length of all periods that ended, as of `counted`.
    total_ns: u64,
    /// The last period of `counted` was under way when the stretch began.
    straddles: bool,
}

/// A consistent look at a client's words; `None` while it is changing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    busy: bool,
    periods: u64,
    since_ns: u64,
    idle_ns: u64,
    total_ns: u64,
}

impl Look {
    fn take(a: &Activity) -> Option<Self> {
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
}

impl Meter {
    /// A new stretch begins. Whether a request is under way; it counts nowhere.
    pub fn cut(&mut self, a: &Activity) -> bool {
        let busy = a.busy_streams.load(SeqCst) != 0;
        self.counted = a.busy_periods.load(Acquire);
        self.total_ns = a.busy_total_ns.load(Acquire);
        self.straddles = busy;
        busy
    }

    /// Count the requests that ended since the last look. None of them took longer than
    /// `most_ns`, the time since the stretch began.
    pub fn look(&mut self, a: &Activity, most_ns: u64, sample: &mut Sample) {
        let Some(look) = Look::take(a) else { return };
        let ended = look.periods.saturating_sub(u64::from(look.busy));
        if self.straddles && (!look.busy || look.periods > self.counted) {
            // It ended: what it took is in the total, and not asked for.
            self.straddles = false;
            self.total_ns = look.total_ns;
            if ended > self.counted {
                // So did others, that cannot be told from it, but for the last one.
                let others = ended - self.counted - u64::from(!look.busy);
                sample.straddle(others);
                self.counted += others;
            }
        }
        let count = ended.saturating_sub(self.counted);
        if count == 0 {
            return;
        }
        let last_ns = look.idle_ns.saturating_sub(look.since_ns);
        match (count, look.busy) {
            (1, false) => {
                sample.request(last_ns.min(most_ns));
                self.total_ns = self.total_ns.saturating_add(last_ns);
            }
            _ => {
                let sum_ns = look.total_ns.saturating_sub(self.total_ns);
                if count == 1 {
                    sample.request(sum_ns.min(most_ns));
                } else {
                    sample.requests_together(count, sum_ns.min(most_ns));
                }
                self.total_ns = look.total_ns;
            }
        }
        self.counted = ended;
    }

    /// How long the request under way has been, if it began in this stretch.
    pub fn open_ns(&self, a: &Activity, now_ns: u64) -> u64 {
        match Look::take(a) {
            Some(look) if look.busy && look.periods > self.counted => {
                now_ns.saturating_sub(look.since_ns)
            }
            _ => 0,
        }
    }
}

/// What is measured now, if anything.
#[derive(Default)]
pub struct Measuring {
    sample: Option<Box<Sample>>,
    /// When the present stretch began.
    stretch_ns: u64,
    launches: u64,
    work_ns: u64,
}

impl Measuring {
    /// Whether anything is.
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
        let most_ns = now_ns.saturating_sub(self.stretch_ns);
        for client in clients.into_iter().filter(|c| c.is_high()) {
            client.meter.look(&client.link.region.activity, most_ns, sample);
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
        let done = engine.work_done();
        let mut old = std::mem::replace(&mut self.sample, next);
        if let Some(old) = &mut old {
            old.to_ns = now_ns;
            old.launches = done.launches - self.launches;
            old.work_ns = done.ns - self.work_ns;
            old.faults = engine.policy_stats().faults.values().sum();
            let high = clients.iter().filter(|c| c.is_high());
            let ages = high.map(|c| c.meter.open_ns(&c.link.region.activity, now_ns));
            old.open_ns_max = ages.max().unwrap_or(0);
        }
        (self.launches, self.work_ns) = (done.launches, done.ns);
        let mut straddled = 0;
        if cut {
            self.stretch_ns = now_ns;
            for c in clients.iter_mut().filter(|c| c.is_high()) {
                straddled += u64::from(c.meter.cut(&c.link.region.activity));
            }
        }
        if let Some(new) = &mut self.sample {
            new.from_ns = now_ns;
            new.straddled = straddled;
        }
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    /// A client's words, changed in the shim's order.
    struct Client(tally_ipc::map::Mapped<tally_ipc::ClientRegion>);

    impl Client {
        fn new() -> Self {
            Client(tally_ipc::map::create_client().unwrap().1)
        }
        fn words(&self) -> &Activity {
            &self.0.activity
        }
        fn begin(&self, at_ns: u64) {
            self.words().busy_streams.store(1, SeqCst);
            self.words().busy_since_ns.store(at_ns, Relaxed);
            self.words().busy_periods.fetch_add(1, Relaxed);
        }
        fn end(&self, at_ns: u64) {
            let a = self.words();
            a.busy_streams.store(0, SeqCst);
            a.idle_since_ns.store(at_ns, Relaxed);
            a.busy_total_ns.fetch_add(at_ns - a.busy_since_ns.load(Relaxed), Relaxed);
        }
        fn request(&self, from_ns: u64, to_ns: u64) {
            self.begin(from_ns);
            self.end(to_ns);
        }
    }

    fn looked(meter: &mut Meter, client: &Client) -> Sample {
        let mut sample = Sample::new();
        meter.look(client.words(), u64::MAX, &mut sample);
        sample
    }

    fn longest(sample: &Sample) -> u64 {
        sample.quantile_ns(1.0).unwrap()
    }

    #[test]
    fn a_request_is_counted_once_with_its_own_length() {
        let (client, mut meter) = (Client::new(), Meter::default());
        client.request(10, 500);
        assert!(!meter.cut(client.words()), "before the stretch");
        assert_eq!(looked(&mut meter, &client).requests(), 0);
        client.begin(1_000);
        assert_eq!(looked(&mut meter, &client).requests(), 0);
        assert_eq!(meter.open_ns(client.words(), 1_200), 200);
        client.end(1_400);
        let sample = looked(&mut meter, &client);
        assert_eq!((sample.requests(), longest(&sample)), (1, 400));
        assert_eq!(looked(&mut meter, &client).requests(), 0);
        // One ended and the next began between two looks.
        client.request(2_000, 2_300);
        client.begin(2_500);
        let sample = looked(&mut meter, &client);
        assert_eq!((sample.requests(), longest(&sample)), (1, 300));
        client.end(2_600);
        let sample = looked(&mut meter, &client);
        assert_eq!((sample.requests(), longest(&sample), sample.merged), (1, 100, 0));
    }

    #[test]
    fn requests_between_two_looks_share_their_sum() {
        let (client, mut meter) = (Client::new(), Meter::default());
        meter.cut(client.words());
        client.request(100, 200);
        client.request(300, 600);
        let sample = looked(&mut meter, &client);
        assert_eq!((sample.requests(), sample.merged, longest(&sample)), (2, 2, 200));
    }

    #[test]
    fn a_request_under_way_at_a_cut_counts_nowhere() {
        for next_before_look in [false, true] {
            let (client, mut meter) = (Client::new(), Meter::default());
            client.begin(100);
            assert!(meter.cut(client.words()));
            assert_eq!(meter.open_ns(client.words(), 900), 0);
            assert_eq!(looked(&mut meter, &client).requests(), 0);
            client.end(1_000);
            if next_before_look {
                client.begin(1_100);
            }
            assert_eq!(looked(&mut meter, &client).requests(), 0);
            if !next_before_look {
                client.begin(1_100);
            }
            client.end(1_200);
            let sample = looked(&mut meter, &client);
            assert_eq!((sample.requests(), longest(&sample)), (1, 100));
        }
    }

    #[test]
    fn of_those_that_end_with_it_unseen_only_the_last_is_known() {
        let (client, mut meter) = (Client::new(), Meter::default());
        client.begin(100);
        meter.cut(client.words());
        client.end(1_000);
        client.request(1_100, 1_200);
        client.request(1_300, 1_350);
        let sample = looked(&mut meter, &client);
        assert_eq!((sample.requests(), longest(&sample), sample.straddled), (1, 50, 1));
    }

    #[test]
    fn a_count_that_lies_about_a_cut_is_survived() {
        let (client, mut meter) = (Client::new(), Meter::default());
        let mut sample = Sample::new();
        for periods in [u64::MAX / 2, u64::MAX] {
            client.words().busy_periods.store(0, Relaxed);
            client.begin(100);
            assert!(meter.cut(client.words()));
            client.words().busy_periods.store(periods, Relaxed);
            meter.look(client.words(), 5_000, &mut sample);
        }
        assert_eq!((sample.straddled, sample.requests()), (2_000_000, 0));
    }

    #[test]
    fn words_that_are_being_changed_or_lie_are_survived() {
        let (client, mut meter) = (Client::new(), Meter::default());
        meter.cut(client.words());
        client.begin(1_000);
        // The bit is down, the stamp not there yet.
        client.words().busy_streams.store(0, SeqCst);
        assert_eq!(looked(&mut meter, &client).requests(), 0);
        client.end(1_100);
        assert_eq!(looked(&mut meter, &client).requests(), 1);
        client.words().busy_periods.store(u64::MAX, Relaxed);
        client.words().busy_total_ns.store(u64::MAX, Relaxed);
        let mut sample = Sample::new();
        meter.look(client.words(), 5_000, &mut sample);
        assert!(sample.requests() <= 1_000_000 && longest(&sample) <= 5_000);
        client.words().busy_periods.store(0, Relaxed);
        assert_eq!(looked(&mut meter, &client).requests(), 0);
    }
}
