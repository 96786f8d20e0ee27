//! How long a high-priority client's requests took lately, and how many kept its objective.
//!
//! A request is what the client marks as one ([`super::marks`]), else a period of activity, as in an A/B test
//! ([`super::measure`]). One that was under way when the client
//! registered is not counted. Recent figures are of the last five to ten minutes: two stretches take turns.

use super::marks::Marks;
use super::{Engine, measure};
use hdrhistogram::Histogram;
use tally_ab::accident::Before;
use tally_ab::meter::{Meter, Requests};
use tally_ab::sample::Carried;
use tally_contract::objective::Objective;
use tally_engine::policy::ClientId;
use tally_engine::{Action, EndedUnits};
use tally_ipc::layout::Activity;

/// Length of a stretch, ns.
pub(super) const STRETCH_NS: u64 = 300_000_000_000;
/// Times told apart, ns: 1 us to 1 h, to a hundredth.
pub(super) const TIMES_NS: [u64; 2] = [1_000, 3_600_000_000_000];
pub(super) const SIGNIFICANT_DIGITS: u8 = 2;
/// Requests counted at once, so that a client's wild counter stays within a stretch.
const TOGETHER_MAX: u64 = 1_000_000;

#[derive(Debug)]
struct Stretch {
    times: Histogram<u32>,
    within: u64,
    /// Longest time that keeps the objective, ns; `u64::MAX` without one.
    slo_ns: u64,
    /// Requests of this look, and the sum of what they took.
    look: (u64, u64),
}

/// What a look found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// From now on requests are others: marked ones.
    pub begins_anew: bool,
    /// Requests that ended.
    pub ended: Option<EndedUnits>,
    /// When the oldest request under way began, if it was not the oldest before, or one ended.
    pub began_ns: Option<u64>,
}

impl Looked {
    /// Tell the engine, before it hears of the client's activity, which makes it offer what was held.
    pub fn tell(self, now_ns: u64, client: ClientId, engine: &mut Engine, out: &mut Vec<Action>) {
        if self.begins_anew {
            engine.forget_units(client);
        }
        if let Some(ended) = self.ended {
            engine.units_ended(now_ns, client, ended, out);
        }
        if let Some(since_ns) = self.began_ns {
            engine.unit_began(now_ns, client, since_ns, out);
        }
    }
}

impl Stretch {
    fn new() -> Self {
        let [low, high] = TIMES_NS;
        let times = Histogram::new_with_bounds(low, high, SIGNIFICANT_DIGITS);
        // The bounds are constants that the library accepts.
        let times = times.expect("constant bounds are valid");
        Stretch { times, within: 0, slo_ns: u64::MAX, look: (0, 0) }
    }

    fn add(&mut self, count: u64, sum_ns: u64) {
        let (requests, all_ns) = self.look;
        self.look = (requests + count, all_ns.saturating_add(sum_ns));
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
        self.add(1, ns);
    }

    fn requests_together(&mut self, count: u64, sum_ns: u64) {
        let Some(mean_ns) = sum_ns.checked_div(count) else { return };
        let count = count.min(TOGETHER_MAX);
        self.times.saturating_record_n(mean_ns.max(1), count as u32);
        self.within += if mean_ns <= self.slo_ns { count } else { 0 };
        self.add(count, mean_ns.saturating_mul(count));
    }

    fn carry(&mut self, _: Carried) {}
}

/// Figures of a client's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServiceNumbers {
    pub objective: Option<Objective>,
    /// Requests that ended since the client registered.
    pub requests: u64,
    /// Requests that kept the objective; 0 without one.
    pub requests_within: u64,
    /// Recent requests, and those of them that kept the objective.
    pub recent: u64,
    pub recent_within: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Service {
    meter: Meter,
    /// When the oldest request under way began, as of the last look.
    open_ns: Option<u64>,
    objective: Option<Objective>,
    now: Stretch,
    before: Stretch,
    turned_ns: u64,
    /// When what is recent began, ns; `None`: at the next look.
    recent_since_ns: Option<u64>,
    /// Requests, and those within the objective, of stretches that are over.
    over: [u64; 2],
}

impl Service {
    pub fn new(objective: Option<Objective>, now_ns: u64) -> Self {
        let (now, before) = (Stretch::new(), Stretch::new());
        let (meter, over) = (Meter::default(), [0; 2]);
        let mut service = Service {
            meter,
            open_ns: None,
            objective,
            now,
            before,
            turned_ns: now_ns,
            recent_since_ns: None,
            over,
        };
        service.set_objective(objective);
        service
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
        let within = if self.objective.is_some() { self.now.within } else { 0 };
        self.over = [self.over[0] + self.now.times.len(), self.over[1] + within];
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.clear();
        self.now.slo_ns = self.before.slo_ns;
    }

    fn turn(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.turned_ns) >= STRETCH_NS {
            self.end_stretch();
            self.recent_since_ns = Some(self.turned_ns);
            self.turned_ns = now_ns;
        }
        self.recent_since_ns.get_or_insert(now_ns);
    }

    /// Counts marked requests that ended in this pass. At the first one what was counted before is forgotten: it was
    /// activity of the same requests, or before them.
    pub fn look_at_marks(&mut self, now_ns: u64, marks: &Marks) -> Looked {
        self.turn(now_ns);
        if marks.is_first() {
            self.now.clear();
            self.before.clear();
            self.over = [0; 2];
            self.recent_since_ns = Some(now_ns);
        }
        marks.count(&mut self.now);
        Looked { begins_anew: marks.is_first(), ..self.looked(marks.oldest_open_ns()) }
    }

    /// Counts what ended since the last look; `waits`: a launch is held.
    pub fn look(&mut self, now_ns: u64, activity: &Activity, waits: bool) -> Looked {
        self.turn(now_ns);
        let Some(look) = measure::look(activity) else { return Looked::default() };
        let look = if waits { measure::held(look) } else { look };
        self.meter.look(look, now_ns, &mut self.now);
        self.looked(self.meter.open_since_ns())
    }

    /// What is new, now that the oldest request under way began then.
    fn looked(&mut self, open_ns: Option<u64>) -> Looked {
        let before_ns = std::mem::replace(&mut self.open_ns, open_ns);
        let (count, sum_ns) = std::mem::take(&mut self.now.look);
        let is_another = open_ns != before_ns;
        let ended = (count > 0 || (is_another && before_ns.is_some())).then(|| EndedUnits {
            units: u32::try_from(count).unwrap_or(u32::MAX),
            took_ns: sum_ns.checked_div(count).unwrap_or(0),
        });
        // Of several under way one may have ended that was not the oldest.
        let began_ns = open_ns.filter(|_| is_another || ended.is_some());
        Looked { begins_anew: false, ended, began_ns }
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
        ServiceNumbers {
            objective: self.objective,
            requests: self.over[0] + self.now.times.len(),
            requests_within: self.over[1] + within(self.now.within),
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
    use std::sync::atomic::Ordering::SeqCst;

    const MS: u64 = 1_000_000;

    /// A request as the shim writes it down.
    fn request(a: &Activity, from_ns: u64, to_ns: u64) {
        a.busy_streams.store(1, SeqCst);
        a.busy_since_ns.store(from_ns, SeqCst);
        a.busy_periods.fetch_add(1, SeqCst);
        a.busy_streams.store(0, SeqCst);
        a.idle_since_ns.store(to_ns, SeqCst);
        a.busy_total_ns.fetch_add(to_ns - from_ns, SeqCst);
    }

    #[test]
    fn requests_are_counted_against_the_objective() {
        let (_file, region) = tally_ipc::map::create_client().unwrap();
        let (a, mut now) = (&region.activity, 1_000 * MS);
        let objective = Objective { slo_ns: 3 * MS, percentile: 99.0 };
        let mut service = Service::new(Some(objective), now);
        service.look(now, a, false);
        for took in [1, 2, 3, 4] {
            request(a, now + MS, now + MS + took * MS);
            now += 10 * MS;
            let ended = Some(EndedUnits { units: 1, took_ns: took * MS });
            assert_eq!(service.look(now, a, false), Looked { ended, ..Looked::default() });
        }
        assert_eq!(service.look(now, a, false), Looked::default());
        let n = service.numbers();
        assert_eq!((n.requests, n.requests_within, n.recent, n.recent_within), (4, 3, 4, 3));
        assert!(
            n.p50_ns.abs_diff(2 * MS) <= MS / 50 && n.p99_ns.abs_diff(4 * MS) <= MS / 25,
            "{n:?}"
        );

        // What is recent begins anew with another objective; totals go on.
        service.set_objective(Some(Objective { slo_ns: MS, ..objective }));
        request(a, now + MS, now + 3 * MS);
        service.look(now + 10 * MS, a, false);
        let n = service.numbers();
        assert_eq!((n.requests, n.requests_within, n.recent, n.recent_within), (5, 3, 1, 0));

        service.set_objective(None);
        request(a, now + 11 * MS, now + 12 * MS);
        service.look(now + 20 * MS, a, false);
        let n = service.numbers();
        assert_eq!((n.objective, n.requests, n.requests_within, n.recent_within), (None, 6, 3, 0));
    }

    /// Ten requests in 10 s, of which three take longer than 5 ms.
    #[test]
    fn recent_requests_are_counted_against_limits() {
        let (_file, region) = tally_ipc::map::create_client().unwrap();
        let (a, start) = (&region.activity, 1_000 * MS);
        let mut service = Service::new(None, start);
        service.look(start, a, false);
        for at in 0..10 {
            let now = start + (1_000 * at + 500) * MS;
            request(a, now, now + if at < 3 { 8 * MS } else { 2 * MS });
            service.look(now + 100 * MS, a, false);
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
    fn what_is_old_is_not_recent() {
        let (_file, region) = tally_ipc::map::create_client().unwrap();
        let (a, mut now) = (&region.activity, 1_000 * MS);
        let mut service = Service::new(None, now);
        service.look(now, a, false);
        request(a, now + MS, now + 3 * MS);
        for recent in [1, 1, 0] {
            now += STRETCH_NS;
            service.look(now, a, false);
            assert_eq!((service.numbers().requests, service.numbers().recent), (1, recent));
        }
    }
}
