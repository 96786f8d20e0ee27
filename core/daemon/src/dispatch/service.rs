//! How long a high-priority client's requests took lately, and how many kept its objective.
//!
//! A request is what the client marks as one, or what its shim tells from launches and waits ([`super::marks`]). Recent
//! figures are of the last five to ten minutes: two stretches take turns. Policies are told of requests, or of marked
//! tokens once those have an objective.

use super::Engine;
use super::marks::Marks;
use hdrhistogram::Histogram;
use tally_ab::accident::Before;
use tally_ab::sample::Requests;
use tally_contract::limits::PASS_MARKS_CLIENT_MAX;
use tally_contract::objective::Objective;
use tally_engine::policy::ClientId;
use tally_engine::{Action, EndedUnits, OpenUnit};

/// Length of a stretch, ns.
pub(super) const STRETCH_NS: u64 = 300_000_000_000;
/// Times told apart, ns: 1 us to 1 h, to a hundredth.
pub(super) const TIMES_NS: [u64; 2] = [1_000, 3_600_000_000_000];
pub(super) const SIGNIFICANT_DIGITS: u8 = 2;

#[derive(Debug)]
struct Stretch {
    times: Histogram<u32>,
    within: u64,
    /// Longest time that keeps the objective, ns; `u64::MAX` without one.
    slo_ns: u64,
}

/// What one look at a service's units found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked<'a> {
    /// From now on units are others: marked requests, or marked tokens.
    pub begins_anew: bool,
    /// `Some` if the oldest unit under way is over, or others are; empty if it is not known how long it took.
    pub ended: Option<&'a [EndedUnits]>,
    /// The oldest unit under way, if it was not the oldest before, or one ended.
    pub began: Option<OpenUnit>,
}

impl Looked<'_> {
    /// Tell the engine, before it hears of the client's activity, which makes it offer what was held.
    pub fn tell(self, now_ns: u64, client: ClientId, engine: &mut Engine, out: &mut Vec<Action>) {
        if self.begins_anew {
            engine.forget_units(client);
        }
        match (self.ended, self.began) {
            (Some(ended), open) => engine.units_ended(now_ns, client, ended, open, out),
            (None, Some(open)) => engine.unit_began(now_ns, client, open, out),
            (None, None) => {}
        }
    }
}

impl Stretch {
    fn new() -> Self {
        let [low, high] = TIMES_NS;
        let times = Histogram::new_with_bounds(low, high, SIGNIFICANT_DIGITS);
        // The bounds are constants that the library accepts.
        let times = times.expect("constant bounds are valid");
        Stretch { times, within: 0, slo_ns: u64::MAX }
    }

    fn clear(&mut self) {
        self.times.reset();
        self.within = 0;
    }
}

impl Requests for Stretch {
    fn request(&mut self, ns: u64) {
        self.times.saturating_record(ns.max(1));
        self.within += u64::from(ns <= self.slo_ns);
    }
}

/// Figures of a client's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServiceNumbers {
    pub objective: Option<Objective>,
    /// Requests that ended since the client registered.
    pub requests: u64,
    /// Requests that kept the objective, and that took longer; none while there was none.
    pub requests_within: u64,
    pub requests_late: u64,
    /// Recent requests, and those of them that kept the objective.
    pub recent: u64,
    pub recent_within: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

#[derive(Debug)]
pub struct Service {
    /// The oldest unit under way, as of the last look.
    open: Option<OpenUnit>,
    /// Policies' units are the marked tokens.
    units_are_tokens: bool,
    /// Units that ended in the last look.
    ended: Vec<EndedUnits>,
    objective: Option<Objective>,
    now: Stretch,
    before: Stretch,
    turned_ns: u64,
    /// When what is recent began, ns; `None`: at the next look.
    recent_since_ns: Option<u64>,
    /// Requests, those within the objective and late ones, of stretches that are over.
    over: [u64; 3],
}

impl Service {
    pub fn new(objective: Option<Objective>, now_ns: u64) -> Self {
        let (now, before) = (Stretch::new(), Stretch::new());
        let mut service = Service {
            open: None,
            units_are_tokens: false,
            ended: Vec::with_capacity(PASS_MARKS_CLIENT_MAX),
            objective,
            now,
            before,
            turned_ns: now_ns,
            recent_since_ns: None,
            over: [0; 3],
        };
        service.set_objective(objective);
        service
    }

    pub fn objective(&self) -> Option<Objective> {
        self.objective
    }

    /// Another objective, or none. What is recent begins anew.
    pub fn set_objective(&mut self, objective: Option<Objective>) {
        self.end_stretch();
        self.before.clear();
        self.recent_since_ns = None;
        self.objective = objective;
        self.now.slo_ns = objective.map_or(u64::MAX, |o| o.slo_ns);
    }

    fn end_stretch(&mut self) {
        self.over = self.totals();
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.clear();
        self.now.slo_ns = self.before.slo_ns;
    }

    /// Requests, those within the objective and late ones.
    fn totals(&self) -> [u64; 3] {
        let now = &self.now;
        let (within, late) = match self.objective {
            Some(_) => (now.within, now.times.len() - now.within),
            None => (0, 0),
        };
        [self.over[0] + now.times.len(), self.over[1] + within, self.over[2] + late]
    }

    fn turn(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.turned_ns) >= STRETCH_NS {
            self.end_stretch();
            // Before it was set anew nothing was counted.
            self.recent_since_ns = self.recent_since_ns.max(Some(self.turned_ns));
            self.turned_ns = now_ns;
        }
        self.recent_since_ns.get_or_insert(now_ns);
    }

    /// Counts requests that ended in this pass. At the first marked one what was counted before is forgotten: it was of
    /// the same requests, or before them.
    pub fn look(&mut self, now_ns: u64, marks: &Marks) -> Looked<'_> {
        self.turn(now_ns);
        if marks.is_first() {
            self.now.clear();
            self.before.clear();
            self.over = [0; 3];
            self.recent_since_ns = Some(now_ns);
        }
        marks.count(&mut self.now);
        let are_tokens = marks.tokens_are_units();
        let were_tokens = std::mem::replace(&mut self.units_are_tokens, are_tokens);
        self.ended.clear();
        self.ended.extend(marks.ended_units());
        let begins_anew = are_tokens != were_tokens || (marks.is_first() && !are_tokens);
        Looked { begins_anew, ..self.looked(marks.oldest_open()) }
    }

    /// What is new, now that the oldest unit under way began then.
    fn looked(&mut self, open: Option<OpenUnit>) -> Looked<'_> {
        let before = std::mem::replace(&mut self.open, open);
        let is_another = open != before;
        let is_over = !self.ended.is_empty() || (is_another && before.is_some());
        let ended = is_over.then_some(&*self.ended);
        // Of several under way one may have ended that was not the oldest.
        let began = open.filter(|_| is_another || ended.is_some());
        Looked { begins_anew: false, ended, began }
    }

    /// Adds how often it had requests lately, and longer ones than each limit.
    fn add_recent(&self, now_ns: u64, limits_ns: &[u64], sum: &mut Before) {
        let Some(since_ns) = self.recent_since_ns.filter(|since_ns| *since_ns < now_ns) else {
            return;
        };
        let seconds = (now_ns - since_ns) as f64 / 1e9;
        for times in [&self.before.times, &self.now.times] {
            for step in times.iter_recorded() {
                let (ns, count) = (step.value_iterated_to(), step.count_at_value());
                let per_s = f64::from(count) / seconds;
                sum.requests += u64::from(count);
                sum.per_s += per_s;
                for (over, limit_ns) in sum.over_per_s.iter_mut().zip(limits_ns) {
                    *over += if ns > *limit_ns { per_s } else { 0.0 };
                }
            }
        }
    }

    pub fn numbers(&self) -> ServiceNumbers {
        let mut recent = self.now.times.clone();
        // Of the same bounds: nothing can be lost.
        let _ = recent.add(&self.before.times);
        let has_objective = self.objective.is_some();
        let within = |n: u64| if has_objective { n } else { 0 };
        let quantile = |share| if recent.is_empty() { 0 } else { recent.value_at_quantile(share) };
        let [requests, requests_within, requests_late] = self.totals();
        ServiceNumbers {
            objective: self.objective,
            requests,
            requests_within,
            requests_late,
            recent: recent.len(),
            recent_within: within(self.now.within + self.before.within),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
        }
    }
}

/// Recent requests of all of these together.
pub fn recent<'a>(
    services: impl Iterator<Item = &'a Service>,
    now_ns: u64,
    limits_ns: &[u64],
) -> Before {
    let mut sum = Before { over_per_s: vec![0.0; limits_ns.len()], ..Before::default() };
    services.for_each(|service| service.add_recent(now_ns, limits_ns, &mut sum));
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use tally_ipc::ClientRegion;
    use tally_ipc::map::Mapped;
    use tally_ipc::marks::{Graphs, Stated, What};

    const MS: u64 = 1_000_000;

    /// What its shim writes, and what the core makes of it.
    struct Client {
        region: Mapped<ClientRegion>,
        read: AtomicU64,
        marks: Marks,
    }

    impl Client {
        fn new(now_ns: u64) -> Self {
            let (_file, region) = tally_ipc::map::create_client().unwrap();
            let read = AtomicU64::new(0);
            let marks = Marks::new(&region.marks, &read, now_ns);
            Client { region, read, marks }
        }

        fn request(&self, began_ns: u64, ended_ns: u64) {
            let what = What::stream(Graphs::default()).pack();
            let _ = self.region.marks.publish(0, Stated { began_ns, ended_ns, what });
        }

        fn look<'a>(&mut self, now_ns: u64, service: &'a mut Service) -> Looked<'a> {
            self.marks.read(now_ns, &self.region.marks, &self.read, usize::MAX);
            service.look(now_ns, &self.marks)
        }
    }

    #[test]
    fn requests_are_counted_against_the_objective() {
        let mut now = 1_000 * MS;
        let mut client = Client::new(now);
        let objective = Objective { slo_ns: 3 * MS, percentile: 99.0 };
        let mut service = Service::new(Some(objective), now);
        client.look(now, &mut service);
        for took in [1, 2, 3, 4] {
            client.request(now + MS, now + MS + took * MS);
            now += 10 * MS;
            let ended = [EndedUnits { units: 1, took_ns: took * MS, is_token: false }];
            let ended = Some(&ended[..]);
            assert_eq!(client.look(now, &mut service), Looked { ended, ..Looked::default() });
        }
        assert_eq!(client.look(now, &mut service), Looked::default());
        let n = service.numbers();
        assert_eq!((n.requests, n.requests_within, n.recent, n.recent_within), (4, 3, 4, 3));
        assert!(
            n.p50_ns.abs_diff(2 * MS) <= MS / 50 && n.p99_ns.abs_diff(4 * MS) <= MS / 25,
            "{n:?}"
        );

        // What is recent begins anew with another objective; totals go on.
        service.set_objective(Some(Objective { slo_ns: MS, ..objective }));
        client.request(now + MS, now + 3 * MS);
        client.look(now + 10 * MS, &mut service);
        let n = service.numbers();
        assert_eq!((n.requests, n.requests_within, n.recent, n.recent_within), (5, 3, 1, 0));

        service.set_objective(None);
        client.request(now + 11 * MS, now + 12 * MS);
        client.look(now + 20 * MS, &mut service);
        let n = service.numbers();
        assert_eq!((n.objective, n.requests, n.recent_within), (None, 6, 0));
        assert_eq!((n.requests_within, n.requests_late), (3, 2), "the last had no objective");
    }

    /// Ten requests in 10 s, of which three take longer than 5 ms.
    #[test]
    fn recent_requests_are_counted_against_limits() {
        let start = 1_000 * MS;
        let mut client = Client::new(start);
        let mut service = Service::new(None, start);
        client.look(start, &mut service);
        for at in 0..10 {
            let now = start + (1_000 * at + 500) * MS;
            client.request(now, now + if at < 3 { 8 * MS } else { 2 * MS });
            client.look(now + 100 * MS, &mut service);
        }
        let now = start + 10_000 * MS;
        let both = recent([&service, &service].into_iter(), now, &[5 * MS, u64::MAX]);
        assert_eq!(both.requests, 20);
        let near = |value: f64, wanted: f64| (value - wanted).abs() < 1e-9;
        assert!(near(both.per_s, 2.0) && near(both.over_per_s[0], 0.6), "{both:?}");
        assert_eq!(both.over_per_s[1], 0.0);
        // With another objective what is recent begins anew.
        service.set_objective(None);
        assert_eq!(recent([&service].into_iter(), now, &[]), Before::default());
    }

    #[test]
    fn recent_begins_with_the_objective_also_after_the_stretch_in_which_it_was_set() {
        let start = 1_000 * MS;
        let mut client = Client::new(start);
        let mut service = Service::new(None, start);
        client.look(start, &mut service);
        let set = start + STRETCH_NS - 10_000 * MS;
        service.set_objective(Some(Objective { slo_ns: MS, percentile: 99.0 }));
        client.look(set, &mut service);
        for at in 0..20 {
            let now = set + (1_000 * at + 500) * MS;
            client.request(now, now + MS);
            client.look(now + 100 * MS, &mut service);
        }
        let of = recent([&service].into_iter(), set + 20_000 * MS, &[]);
        assert!(of.requests == 20 && (of.per_s - 1.0).abs() < 1e-9, "{of:?}");
    }

    #[test]
    fn what_is_old_is_not_recent() {
        let mut now = 1_000 * MS;
        let mut client = Client::new(now);
        let mut service = Service::new(None, now);
        client.look(now, &mut service);
        client.request(now + MS, now + 3 * MS);
        for recent in [1, 1, 0] {
            now += STRETCH_NS;
            client.look(now, &mut service);
            assert_eq!((service.numbers().requests, service.numbers().recent), (1, recent));
        }
    }
}
