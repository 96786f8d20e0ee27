//! A client's requests, from what it says of its periods of activity.
//!
//! A request is a period of activity. The client's words are untrusted: a request is never
//! shorter than the core saw it under way, nor longer than the time since the core last
//! saw it not begun.

use crate::sample::Carried;

/// Where a client's requests are counted.
pub trait Requests {
    /// A request took so long, ns.
    fn request(&mut self, ns: u64);
    /// So many requests took so long in all, ns.
    fn requests_together(&mut self, count: u64, sum_ns: u64);
    /// A request took so long after it had waited in the program, as the program marked it, ns.
    fn request_queued(&mut self, queued_ns: u64, ns: u64) {
        self.request(queued_ns.saturating_add(ns));
    }
    /// A request ended that was under way at a cut.
    fn carry(&mut self, request: Carried);
}

/// What a client's words say at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// A period is under way.
    pub busy: bool,
    /// Periods that have begun so far.
    pub periods: u64,
    /// When the last period began, ns.
    pub since_ns: u64,
    /// When the last period ended, ns.
    pub idle_ns: u64,
    /// Sum of the lengths of all periods that ended, ns.
    pub total_ns: u64,
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// The core's last look before it first saw the request, ns.
    before_ns: u64,
    /// When the core first saw it, ns.
    seen_ns: u64,
    /// It was under way at a cut.
    carried: bool,
    /// When it was first seen neither held nor begun, ns: its launch was granted.
    granted_ns: Option<u64>,
}

/// Longest from the grant of a held launch until its thread notes that a period began, ns.
const GRANTED_MAX_NS: u64 = 10_000_000;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    begun: bool,
    /// Periods that ended, as of the last look.
    ended: u64,
    /// Length of all periods that ended, as far as it was asked for.
    total_ns: u64,
    looked_ns: u64,
    open: Option<Open>,
}

impl Meter {
    /// Count what ended since the last look. The first look counts nothing: a request that it
    /// finds is as old as this look.
    pub fn look(&mut self, look: Look, now_ns: u64, sample: &mut impl Requests) {
        let ended = look.periods.saturating_sub(u64::from(look.busy));
        if !self.begun {
            let open = Open { before_ns: now_ns, seen_ns: now_ns, carried: true, granted_ns: None };
            *self = Meter {
                begun: true,
                ended,
                total_ns: look.total_ns,
                looked_ns: now_ns,
                open: look.busy.then_some(open),
            };
            return;
        }
        let before_ns = std::mem::replace(&mut self.looked_ns, now_ns);
        let count = ended.saturating_sub(self.ended);
        self.ended = ended;
        if let Some(open) = &mut self.open {
            let granted_ns = (!look.busy).then(|| open.granted_ns.unwrap_or(now_ns));
            open.granted_ns = granted_ns;
            // Else it was given up.
            if count == 0 && granted_ns.is_some_and(|ns| now_ns.saturating_sub(ns) < GRANTED_MAX_NS)
            {
                return;
            }
        }
        if count == 0 && (look.busy || self.open.is_none()) {
            let began = Open { before_ns, seen_ns: now_ns, carried: false, granted_ns: None };
            self.open = self.open.or(look.busy.then_some(began));
            return;
        }
        let since_look_ns = now_ns.saturating_sub(before_ns);
        // The total may lack the last one still; its own stamps do not.
        let last_ns = look.idle_ns.saturating_sub(look.since_ns);
        let alone = count <= 1 && !look.busy;
        let sum_ns = if alone { last_ns } else { look.total_ns.saturating_sub(self.total_ns) };
        self.total_ns = if alone { self.total_ns.saturating_add(last_ns) } else { look.total_ns };
        let mut others = count;
        let mut rest_ns = sum_ns;
        if let Some(open) = self.open.take() {
            others = count.saturating_sub(1);
            let least_ns = before_ns.saturating_sub(open.seen_ns);
            let most_ns = now_ns.saturating_sub(open.before_ns).max(least_ns);
            let claimed_ns = if others == 0 { sum_ns } else { least_ns };
            let ns = claimed_ns.clamp(least_ns, most_ns);
            rest_ns = sum_ns.saturating_sub(ns);
            if open.carried {
                sample.carry(Carried { began_ns: open.seen_ns, ns });
            } else {
                sample.request(ns);
            }
        }
        match others {
            0 => {}
            1 => sample.request(rest_ns.min(since_look_ns)),
            _ => sample.requests_together(others, rest_ns.min(since_look_ns)),
        }
        if look.busy {
            self.open = Some(Open { before_ns, seen_ns: now_ns, carried: false, granted_ns: None });
        }
    }

    /// A new stretch begins: a request under way is told from those that begin in it.
    pub fn cut(&mut self) {
        if let Some(open) = &mut self.open {
            open.carried = true;
        }
    }

    /// When the request under way began, as the core saw it, ns.
    pub fn open_since_ns(&self) -> Option<u64> {
        self.open.map(|open| open.seen_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sample;
    use proptest::prelude::*;

    /// A client's words, changed as the shim does.
    #[derive(Clone, Copy)]
    struct Client(Look);

    impl Client {
        fn new() -> Self {
            Client(Look { busy: false, periods: 0, since_ns: 0, idle_ns: 0, total_ns: 0 })
        }
        fn begin(&mut self, at_ns: u64) {
            (self.0.busy, self.0.since_ns) = (true, at_ns);
            self.0.periods += 1;
        }
        fn end(&mut self, at_ns: u64) {
            (self.0.busy, self.0.idle_ns) = (false, at_ns);
            self.0.total_ns += at_ns - self.0.since_ns;
        }
        fn request(&mut self, from_ns: u64, to_ns: u64) {
            self.begin(from_ns);
            self.end(to_ns);
        }
    }

    fn looked(meter: &mut Meter, client: &Client, now_ns: u64) -> Sample {
        let mut sample = Sample::new();
        meter.look(client.0, now_ns, &mut sample);
        sample
    }

    fn longest(sample: &Sample) -> u64 {
        sample.quantile_ns(1.0).unwrap()
    }

    #[test]
    fn a_request_is_counted_once_with_its_own_length() {
        let (mut client, mut meter) = (Client::new(), Meter::default());
        client.request(10, 500);
        assert_eq!(looked(&mut meter, &client, 600).requests(), 0, "before the first look");
        client.begin(1_000);
        assert_eq!(looked(&mut meter, &client, 1_010).requests(), 0);
        assert_eq!(meter.open_since_ns(), Some(1_010));
        client.end(1_400);
        let sample = looked(&mut meter, &client, 1_410);
        assert_eq!((sample.requests(), longest(&sample)), (1, 400));
        assert_eq!(looked(&mut meter, &client, 1_420).requests(), 0);
        // One ended and the next began between two looks.
        client.request(2_000, 2_300);
        client.begin(2_500);
        let sample = looked(&mut meter, &client, 2_550);
        assert_eq!((sample.requests(), longest(&sample)), (1, 300));
        client.end(2_600);
        let sample = looked(&mut meter, &client, 2_610);
        assert_eq!((sample.requests(), longest(&sample), sample.merged), (1, 100, 0));
    }

    #[test]
    fn requests_between_two_looks_share_their_sum() {
        let (mut client, mut meter) = (Client::new(), Meter::default());
        looked(&mut meter, &client, 50);
        client.request(100, 200);
        client.request(300, 600);
        let sample = looked(&mut meter, &client, 700);
        assert_eq!((sample.requests(), sample.merged, longest(&sample)), (2, 2, 200));
    }

    #[test]
    fn a_request_that_a_cut_falls_into_is_carried_with_its_whole_length() {
        for next_before_look in [false, true] {
            let (mut client, mut meter) = (Client::new(), Meter::default());
            looked(&mut meter, &client, 50);
            client.begin(100);
            looked(&mut meter, &client, 110);
            meter.cut();
            assert_eq!(meter.open_since_ns(), Some(110));
            assert_eq!(looked(&mut meter, &client, 900).carried, []);
            client.end(1_000);
            if next_before_look {
                client.begin(1_100);
            }
            let sample = looked(&mut meter, &client, 1_150);
            assert_eq!(sample.carried, [Carried { began_ns: 110, ns: 900 }]);
            assert_eq!(sample.requests(), 0);
            if !next_before_look {
                client.begin(1_160);
                looked(&mut meter, &client, 1_170);
            }
            client.end(1_200);
            let sample = looked(&mut meter, &client, 1_210);
            assert_eq!((sample.requests(), sample.carried.len()), (1, 0));
        }
    }

    #[test]
    fn requests_that_end_with_a_carried_one_share_the_rest() {
        let (mut client, mut meter) = (Client::new(), Meter::default());
        looked(&mut meter, &client, 50);
        client.begin(100);
        looked(&mut meter, &client, 100);
        meter.cut();
        looked(&mut meter, &client, 990);
        client.end(1_000);
        client.request(1_100, 1_200);
        client.request(1_300, 1_350);
        let sample = looked(&mut meter, &client, 1_400);
        assert_eq!(sample.carried, [Carried { began_ns: 100, ns: 890 }]);
        assert_eq!((sample.requests(), longest(&sample)), (2, 80));
    }

    /// A client that states a start long ago, or far too late, does not change the age.
    #[test]
    fn an_age_is_the_cores_own() {
        for stated in [0, 1, u64::MAX] {
            let (mut client, mut meter) = (Client::new(), Meter::default());
            looked(&mut meter, &client, 1_000_000);
            client.begin(2_000_000);
            client.0.since_ns = stated;
            looked(&mut meter, &client, 2_000_100);
            looked(&mut meter, &client, 5_000_000);
            assert_eq!(meter.open_since_ns(), Some(2_000_100));
            (client.0.busy, client.0.idle_ns) = (false, 5_000_050);
            let sample = looked(&mut meter, &client, 5_000_100);
            // Seen for 2.9999 ms, and not before 1 ms.
            let ns = longest(&sample);
            assert!((2_995_000..=4_005_000).contains(&ns), "{stated}: {ns}");
        }
    }

    proptest! {
        /// Whatever the words are, a request is no longer than the core has looked.
        #[test]
        fn words_that_lie_are_survived(
            words in proptest::collection::vec(
                (any::<bool>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<bool>()),
                1..30,
            ),
        ) {
            let (mut meter, mut sample) = (Meter::default(), Sample::new());
            for (turn, (busy, periods, since_ns, idle_ns, total_ns, cut)) in
                words.iter().copied().enumerate()
            {
                let now_ns = 1_000_000 + turn as u64 * 1_000;
                meter.look(Look { busy, periods, since_ns, idle_ns, total_ns }, now_ns, &mut sample);
                if cut {
                    meter.cut();
                }
                prop_assert!(meter.open_since_ns().is_none_or(|at| at >= 1_000_000 && at <= now_ns));
            }
            let most = words.len() as u64 * 1_000;
            prop_assert!(sample.quantile_ns(1.0).is_none_or(|ns| ns <= most + most / 500));
            prop_assert!(sample.carried.iter().all(|c| c.ns <= most));
        }
    }
}
