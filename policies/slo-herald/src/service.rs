//! One service: what its units take when best effort is held back, and how much best-effort time it can bear.

use crate::share::{REVIEW_NS, REVIEW_UNITS, REVIEW_UNITS_MIN, Share};
use crate::verdict::Verdict;
use load::Load;
use std::collections::VecDeque;
use tally_sdk::{ClientId, NEVER, host};

mod idle;
mod load;

pub use load::Busy;

/// Units measured alone that are remembered.
const ALONE_UNITS: usize = 64;
/// As many are needed before anything is spared; until then each unit is measured alone.
const ALONE_UNITS_MIN: usize = 8;
/// Of later units one in so many; of a service that best effort seems to make too busy more, to be sure that it does.
const ALONE_EVERY: u32 = 64;
const ALONE_EVERY_BUSY: u32 = 16;
/// The mean of so many is what units take alone now.
const ALONE_RECENT: usize = 16;
/// Units measured alone were predicted wrongly if so many of the latest four took longer than the 95th percentile of
/// those before by more than this, percent.
const OFF_UNITS: u32 = 2;
const OFF_PERCENT: u64 = 20;
/// Units by which attainment is judged. Before there are so many the others count as kept.
const JUDGED_UNITS: usize = 200;
/// A service whose tokens have an objective makes none if so many units were others.
const TOKEN_UNITS: u32 = 64;
/// A program whose CPU runs ahead of the GPU is stopped by a window that is shorter than its step: it may be longer, at
/// most one part in so many of what a unit can spare.
const SPARE_PER_WINDOW: u64 = 16;
const PERCENTILE_DEFAULT: f64 = 99.0;
/// A service that has units is asked for its percentile as often.
const ASK_NS: u64 = 1_000_000_000;
/// Of the units that the objective allows to be late so many may be before less is let in: rare ones come of other
/// causes. As many are saved up at most.
const TOLERATED_PART: f64 = 0.75;
const TOLERATED_MAX: f64 = 1.0;

/// What came of units that ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// How many were measured alone.
    pub alone: u32,
    /// How many missed the objective.
    pub late: u32,
    /// What the service can spare may be another amount now.
    pub changed: bool,
}

/// The open unit, or the oldest of several.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// When it was the oldest, as told, and when it began.
    told_ns: u64,
    since_ns: u64,
    /// Best-effort time that it can still bear, and that was let in.
    left_ns: u64,
    spent_ns: u64,
    /// SMs on which best effort may run meanwhile, if it has SMs and not time.
    sms: Option<u32>,
    alone: bool,
    /// Best-effort work was under way when it began.
    beside: bool,
    /// It is not one of those that the objective is about.
    other: bool,
    /// A launch was held because it could spare no more.
    short: bool,
}

/// What is known of a service: its objective, its units, and how much time those leave.
#[derive(Debug)]
pub struct Service {
    pub client: ClientId,
    joined_ns: u64,
    busy: Busy,
    /// Longest time of a unit, or [`NEVER`]. Of a service whose tokens have an objective that is shorter: of a unit of
    /// tokens.
    slo_ns: u64,
    /// Longest time of a token, and of another unit of a service that has that; or [`NEVER`].
    tpot_ns: u64,
    others_ns: u64,
    /// The objective is that of tokens. Units since the last one of them.
    of_tokens: bool,
    since_token: u32,
    percentile: f64,
    /// When the core was asked for them.
    asked_ns: u64,
    open: Option<Open>,
    /// The unit that was open before.
    last: Option<Open>,
    ended_ns: Option<u64>,
    /// Longest time of late from one unit's end to the next one; 0: it is not known.
    longest_gap_ns: u64,
    /// It has not had a unit, as far as is known.
    is_new: bool,
    /// When a best-effort launch was last let in while a unit was open.
    let_in_ns: u64,
    /// Until when best-effort work may be under way, leased or not.
    under_way_until_ns: u64,
    units: u64,
    since_alone: u32,
    /// What units took alone, the latest last.
    alone_ns: VecDeque<u64>,
    alone_p95_ns: u64,
    alone_mean_ns: u64,
    /// Which of the latest four took longer than predicted, a bit each; and whether what is known of them is dropped
    /// for that, until it is known anew.
    longer_alone: u32,
    is_off: bool,
    pub share: Share,
    reviewed: u32,
    review_from_ns: u64,
    late_in_review: u32,
    /// Units of this review in which a launch was held for want of time.
    short_in_review: u32,
    /// The longest two units of this review.
    longest_ns: [u64; 2],
    /// So many units may still be late before the level falls.
    tolerated: f64,
    /// Whether each of the latest units kept the objective.
    kept: VecDeque<bool>,
    late_of_kept: usize,
    misses: bool,
    /// Units since it is served strictly.
    strict_units: u32,
    busy_from_ns: Option<u64>,
    busy_ns: u64,
    load: Load,
    /// Units of this stretch beside which best effort was let in or under way, and how long they took in all.
    beside_units: u64,
    beside_ns: u64,
    /// Units of this stretch, measured alone or not.
    stretch_units: u64,
    /// Units take longer beside best effort than alone, as far as is known.
    inflates: bool,
    /// Stretches without best effort until that is looked at again, now and after the next that it does.
    retry_in: u32,
    retry_after: u32,
    /// How busy best effort makes it; 0 if it would be as busy alone.
    busy_permille: u64,
    /// That was measured since the last review.
    is_busy_new: bool,
}

impl Service {
    /// A service of which nothing is known.
    pub fn new(now_ns: u64, client: ClientId, sm_count: u32, busy: Busy) -> Self {
        Service {
            client,
            joined_ns: now_ns,
            busy,
            slo_ns: NEVER,
            tpot_ns: NEVER,
            others_ns: NEVER,
            of_tokens: false,
            since_token: 0,
            percentile: PERCENTILE_DEFAULT,
            asked_ns: 0,
            open: None,
            last: None,
            ended_ns: None,
            longest_gap_ns: 0,
            is_new: true,
            let_in_ns: 0,
            under_way_until_ns: 0,
            units: 0,
            since_alone: 0,
            alone_ns: VecDeque::with_capacity(ALONE_UNITS),
            alone_p95_ns: 0,
            alone_mean_ns: 0,
            longer_alone: 0,
            is_off: false,
            share: Share::new(sm_count, &host::widths()),
            reviewed: 0,
            review_from_ns: 0,
            late_in_review: 0,
            short_in_review: 0,
            longest_ns: [0; 2],
            tolerated: TOLERATED_MAX,
            kept: VecDeque::with_capacity(JUDGED_UNITS),
            late_of_kept: 0,
            misses: false,
            strict_units: 0,
            busy_from_ns: None,
            busy_ns: 0,
            load: Load::default(),
            beside_units: 0,
            beside_ns: 0,
            stretch_units: 0,
            inflates: true,
            retry_in: 1,
            retry_after: 1,
            busy_permille: 0,
            is_busy_new: false,
        }
    }

    /// Ask the core for its objectives. The time is told with each unit, the percentile is not.
    pub fn ask(&mut self, now_ns: u64) {
        self.asked_ns = now_ns;
        let service = host::service(self.client);
        let objective = service.and_then(|service| service.objective);
        self.percentile = objective.map_or(PERCENTILE_DEFAULT, |objective| objective.percentile);
        self.others_ns = objective.map_or(NEVER, |objective| objective.slo_ns);
        let tpot_ns = service.and_then(|service| service.tokens).map_or(NEVER, |t| t.tpot_ns);
        if std::mem::replace(&mut self.tpot_ns, tpot_ns) != tpot_ns {
            // They are expected.
            self.since_token = 0;
        }
        self.follow();
    }

    /// A unit that may take so long begins. Whether the objective is about it.
    fn is_served(&mut self, now_ns: u64, longest_ns: u64) -> bool {
        if longest_ns != self.slo_ns || now_ns.saturating_sub(self.asked_ns) >= ASK_NS {
            self.ask(now_ns);
        }
        self.since_token = self.since_token.saturating_add(1);
        if self.tpot_ns < self.others_ns && longest_ns == self.tpot_ns {
            self.since_token = 0;
        }
        self.follow();
        if !self.of_tokens {
            self.set_slo(longest_ns);
        }
        longest_ns == self.slo_ns
    }

    /// The objective is that of tokens as long as there are any, if it is the shorter one.
    fn follow(&mut self) {
        let of_tokens = self.tpot_ns < self.others_ns && self.since_token < TOKEN_UNITS;
        if std::mem::replace(&mut self.of_tokens, of_tokens) != of_tokens {
            // It was measured of other units.
            self.alone_ns.clear();
            (self.alone_p95_ns, self.alone_mean_ns) = (0, 0);
            (self.beside_units, self.beside_ns, self.inflates) = (0, 0, true);
        }
        self.set_slo(if of_tokens { self.tpot_ns } else { self.others_ns });
    }

    /// A launch is held because the open unit can spare no more.
    pub fn is_short(&mut self) {
        if let Some(open) = &mut self.open {
            open.short = true;
        }
    }

    /// What was learned, as a line: client, objective, what its units take alone, and the levels.
    pub fn saved(&self) -> String {
        let is_known = self.alone_ns.len() >= ALONE_UNITS_MIN;
        let alone_ns = if is_known { self.alone_p95_ns } else { 0 };
        format!("{} {} {alone_ns} {}", self.client, self.slo_ns, self.share.saved())
    }

    /// Go on from such a line, if it is of this client. True if it is; what no longer applies is dropped.
    pub fn remember(&mut self, line: &str) -> bool {
        let numbers: Option<Vec<u64>> = line.split(' ').map(|word| word.parse().ok()).collect();
        let Some([client, slo_ns, alone_p95_ns, share @ ..]) = numbers.as_deref() else {
            return false;
        };
        if *client != u64::from(self.client) {
            return false;
        }
        self.is_new = *alone_p95_ns == 0;
        if *slo_ns == self.slo_ns && *alone_p95_ns > 0 && self.share.remember(share) {
            (0..ALONE_UNITS_MIN).for_each(|_| self.measured_alone(*alone_p95_ns));
        }
        true
    }

    /// Best-effort work of so much GPU time, whole, is let in, while a unit is open or not.
    pub fn let_in(&mut self, now_ns: u64, predicted_ns: u64, within: bool) {
        if !self.is_idle(now_ns) {
            self.share.let_in(predicted_ns, within);
        }
    }

    /// Units that ended.
    #[cfg(test)]
    pub fn units(&self) -> u64 {
        self.units
    }

    fn set_slo(&mut self, slo_ns: u64) {
        if self.slo_ns != slo_ns {
            self.slo_ns = slo_ns;
            self.share.forget();
            self.kept.clear();
            (self.late_of_kept, self.misses) = (0, false);
            self.new_review();
        }
    }

    /// Best effort is held while it has a unit open.
    pub fn is_strict(&self) -> bool {
        self.strict_because().is_some()
    }

    /// Why it is served strictly, if it is.
    pub fn strict_because(&self) -> Option<&'static str> {
        if self.slo_ns == NEVER {
            Some("it has no objective")
        } else if self.misses {
            Some("too few of its latest 200 units kept its objective")
        } else if self.is_off {
            Some("its units take over a fifth longer alone than they did")
        } else if self.busy_permille > self.busy.strict {
            Some("best effort makes it busy nearly all of the time")
        } else {
            None
        }
    }

    /// Best-effort time that a unit can bear; `None` if the service is served strictly or not known yet.
    pub fn allowance_ns(&self) -> Option<u64> {
        if self.is_strict() || self.alone_ns.len() < ALONE_UNITS_MIN {
            return None;
        }
        Some(self.spare_ns().saturating_mul(self.share.rate()) / 1_000)
    }

    /// The same of launches that take all SMs.
    pub fn allowance_whole_ns(&self) -> Option<u64> {
        let allowance_ns = self.allowance_ns()?;
        Some(allowance_ns.min(self.spare_ns().saturating_mul(self.share.rate_whole()) / 1_000))
    }

    /// What its objective leaves of a unit.
    fn spare_ns(&self) -> u64 {
        (self.slo_ns / 100 * 95).saturating_sub(self.alone_p95_ns)
    }

    /// Best-effort time that may be under way when a unit begins: `usual_ns` beside any service, up to `longest_ns`
    /// where that is a small part of what the unit can spare, and half of what it can bear at most.
    pub fn window_ns(&self, usual_ns: u64, longest_ns: u64) -> u64 {
        let is_known = self.slo_ns != NEVER && self.alone_ns.len() >= ALONE_UNITS_MIN;
        match self.allowance_ns() {
            Some(allowance_ns) => {
                let small_ns = self.spare_ns() / SPARE_PER_WINDOW;
                usual_ns.max(small_ns.min(longest_ns)).min(allowance_ns / 2)
            }
            // It may be late for what is under way when its units begin, and so be served strictly for ever.
            None if is_known && self.is_newly_strict() => usual_ns.min(self.spare_ns() / 2),
            None => usual_ns,
        }
    }

    /// It is served strictly, and whether that helps is not known yet.
    fn is_newly_strict(&self) -> bool {
        // It is served strictly for as many after the last late one of a burst.
        self.strict_units < 2 * JUDGED_UNITS as u32
    }

    /// What windows and leases beside it follow from: whether it is served strictly, and newly so, its objective, and
    /// what a unit takes.
    pub fn terms(&self) -> (bool, bool, u64, u64) {
        (self.is_strict(), self.is_newly_strict(), self.slo_ns, self.alone_p95_ns)
    }

    /// What is left of the open unit's allowance; `None` without one.
    pub fn left_ns(&self) -> Option<u64> {
        self.open.map(|open| open.left_ns)
    }

    /// SMs on which best effort may run beside the open unit, for all of it.
    pub fn sms(&self) -> Option<u32> {
        self.open.and_then(|open| open.sms)
    }

    /// For how long best effort still has to wait after its last unit.
    pub fn gap_ns(&self, now_ns: u64, idle_gap_ns: u64) -> u64 {
        let ended_ns = self.ended_ns.filter(|_| self.is_strict());
        ended_ns.map_or(0, |ns| idle_gap_ns.saturating_sub(now_ns.saturating_sub(ns)))
    }

    /// Best-effort work of so much GPU time is let in beside the open unit. `for_floor`: whatever the unit can bear, so
    /// that it belongs to what units take when they are measured alone.
    pub fn spend(&mut self, now_ns: u64, cost_ns: u64, for_floor: bool) {
        if let Some(open) = &mut self.open {
            open.left_ns = open.left_ns.saturating_sub(cost_ns);
            open.spent_ns = open.spent_ns.saturating_add(cost_ns);
            if !for_floor {
                self.let_in_ns = now_ns;
            }
        }
    }

    /// A best-effort launch is let in, or a lease, which may be under way until then.
    pub fn under_way(&mut self, until_ns: u64) {
        self.under_way_until_ns = self.under_way_until_ns.max(until_ns);
    }

    /// A unit began; what it can bear. One that is old already can bear less, as can one that was open beside the last.
    pub fn began(&mut self, now_ns: u64, since_ns: u64, deadline_ns: u64) -> u64 {
        let idle_ns = self.idle_ns(now_ns);
        if idle_ns > 0 {
            self.share.paused(now_ns, idle_ns);
        }
        self.note_gap(now_ns);
        let is_timed = deadline_ns != NEVER;
        let longest_ns = if is_timed { deadline_ns.saturating_sub(since_ns) } else { NEVER };
        let other = !self.is_served(now_ns, longest_ns);
        self.busy_from_ns.get_or_insert(now_ns);
        let is_too_busy = self.busy_permille > self.busy.max;
        let is_due = self.since_alone >= if is_too_busy { ALONE_EVERY_BUSY } else { ALONE_EVERY };
        let allowance_ns = self.allowance_ns().filter(|_| !is_due && !other);
        let spare_ns = deadline_ns.saturating_sub(now_ns).saturating_sub(self.alone_p95_ns);
        let overlaps = self.ended_ns.is_some_and(|ended_ns| since_ns < ended_ns);
        // It may be told again, with another objective.
        let again = self.open.filter(|open| open.since_ns == since_ns);
        let (most_ns, borne_ns, spent_ns) = match again.or(self.last) {
            // The same, or another ended meanwhile.
            Some(last) if last.since_ns == since_ns => (last.left_ns, 0, last.spent_ns),
            // It has borne what the one before it has.
            Some(last) if overlaps => (u64::MAX, last.spent_ns, 0),
            _ => (u64::MAX, 0, 0),
        };
        let in_time_ns = spare_ns.saturating_mul(self.share.rate()) / 1_000;
        let bears = |ns: u64| ns.min(in_time_ns).saturating_sub(borne_ns).min(most_ns);
        let left_ns = allowance_ns.map_or(0, bears);
        let alone = allowance_ns.is_none();
        let sms = self.share.sms().filter(|_| !alone);
        let (told_ns, short) = (again.map_or(now_ns, |open| open.told_ns), false);
        let beside = self.under_way_until_ns > since_ns;
        self.open =
            Some(Open { told_ns, since_ns, left_ns, spent_ns, sms, alone, beside, other, short });
        left_ns
    }

    /// The open unit is over, and so many took so long.
    pub fn ended(&mut self, now_ns: u64, units: u32, took_ns: u64) -> Ended {
        let open = self.open.take();
        self.last = open;
        // Units that overlap keep it busy once.
        let told_ns = open.map_or(now_ns.saturating_sub(took_ns), |open| open.told_ns);
        let since_ns = told_ns.max(self.ended_ns.unwrap_or(0));
        let busy_ns = now_ns.saturating_sub(since_ns);
        self.busy_ns = self.busy_ns.saturating_add(busy_ns);
        self.share.busy(units.into(), busy_ns);
        // It is told later than it ended.
        let end_ns = |open: Open| open.since_ns.saturating_add(took_ns).min(now_ns);
        self.ended_ns = Some(open.filter(|_| units == 1).map_or(now_ns, end_ns));
        self.units = self.units.saturating_add(units.into());
        self.stretch_units = self.stretch_units.saturating_add(units.into());
        let mut changed = self.judge_load(now_ns);
        if units == 0 || open.is_some_and(|open| open.other) {
            return Ended { changed, ..Ended::default() };
        }
        // Of several only the average is known.
        let is_late = took_ns > self.slo_ns;
        for _ in 0..units.min(JUDGED_UNITS as u32) {
            changed |= self.judge(is_late);
        }
        let is_strict = self.is_strict();
        self.strict_units = if is_strict { self.strict_units.saturating_add(units) } else { 0 };
        // What was let in beside the unit before may be beside this one, too.
        let alone = open.is_some_and(|open| open.alone && self.let_in_ns <= open.since_ns);
        if alone {
            self.since_alone = 0;
            // What was under way when it began may have lengthened it.
            if open.is_some_and(|open| !open.beside) {
                changed |= self.foretold(took_ns);
            }
            // Beside what has SMs always none is alone.
            let is_shared = open.is_some_and(|open| open.beside) && self.share.width().is_some();
            if !is_shared || self.alone_ns.len() < ALONE_UNITS_MIN {
                self.measured_alone(took_ns);
            }
            let is_known = self.alone_ns.len() >= ALONE_UNITS_MIN;
            changed |= self.alone_ns.len() == ALONE_UNITS_MIN;
            self.is_off &= !is_known;
        } else {
            self.share.unit(open.is_some_and(|open| open.short));
            // Where nothing was let in, what it took is not best effort's doing.
            if open.is_some_and(|open| open.beside || self.let_in_ns > open.since_ns) {
                let took_ns = took_ns.saturating_mul(units.into());
                self.beside_units = self.beside_units.saturating_add(units.into());
                self.beside_ns = self.beside_ns.saturating_add(took_ns);
            }
            self.since_alone = self.since_alone.saturating_add(units);
            self.short_in_review += u32::from(open.is_some_and(|open| open.short));
            if !self.misses {
                changed |= self.review(now_ns, units, took_ns, is_late);
            }
        }
        let late = if is_late { units } else { 0 };
        Ended { alone: alone.into(), late, changed }
    }

    /// Whether a unit that was measured alone took about as long as others did. True if too many did not, and what is
    /// known of them is dropped.
    fn foretold(&mut self, took_ns: u64) -> bool {
        let is_known = self.alone_ns.len() >= ALONE_UNITS_MIN;
        let longest_ns = self.alone_p95_ns.saturating_mul(100 + OFF_PERCENT) / 100;
        let is_longer = is_known && took_ns > longest_ns;
        self.longer_alone = (self.longer_alone << 1 | u32::from(is_longer)) & 0b1111;
        let is_off = self.longer_alone.count_ones() >= OFF_UNITS;
        if is_off {
            (self.is_off, self.longer_alone) = (true, 0);
            self.alone_ns.clear();
        }
        is_off
    }

    fn measured_alone(&mut self, took_ns: u64) {
        if self.alone_ns.len() == ALONE_UNITS {
            self.alone_ns.pop_front();
        }
        self.alone_ns.push_back(took_ns);
        let mut sorted: Vec<u64> = self.alone_ns.iter().copied().collect();
        sorted.sort_unstable();
        self.alone_p95_ns = sorted[(sorted.len() * 95).div_ceil(100) - 1];
        let recent = self.alone_ns.iter().rev().take(ALONE_RECENT);
        let sum_ns = recent.clone().fold(0u64, |sum, ns| sum.saturating_add(*ns));
        self.alone_mean_ns = sum_ns / recent.len() as u64;
    }

    fn new_review(&mut self) {
        (self.reviewed, self.late_in_review, self.longest_ns) = (0, 0, [0; 2]);
        self.short_in_review = 0;
    }

    /// Adapt what a unit bears, so that the objective is nearly used up. True if it changed.
    fn review(&mut self, now_ns: u64, units: u32, took_ns: u64, is_late: bool) -> bool {
        if self.reviewed == 0 {
            self.review_from_ns = now_ns.saturating_sub(took_ns);
        }
        self.reviewed = self.reviewed.saturating_add(units);
        let earned = TOLERATED_PART * (100.0 - self.percentile) / 100.0 * f64::from(units);
        self.tolerated = (self.tolerated + earned).min(TOLERATED_MAX);
        if is_late {
            self.late_in_review += 1;
            self.tolerated -= 1.0;
        }
        let [longest_ns, next_ns] = self.longest_ns;
        self.longest_ns = [longest_ns.max(took_ns), next_ns.max(took_ns.min(longest_ns))];
        let is_over = now_ns.saturating_sub(self.review_from_ns) >= REVIEW_NS;
        let is_too_late = self.late_in_review > 0 && self.tolerated < 0.0;
        // It is known early if the rest of the review cannot make up for it.
        let rest = REVIEW_UNITS.saturating_sub(self.reviewed);
        let earned = earned / f64::from(units) * f64::from(rest);
        let is_too_late_by_then = is_too_late && self.tolerated + earned < 0.0;
        let units_min =
            if is_over || is_too_late_by_then { REVIEW_UNITS_MIN } else { REVIEW_UNITS };
        if self.reviewed < units_min {
            return false;
        }
        // Of many units one may be an accident, and the others tell more of what is to come.
        let are_many = self.reviewed >= REVIEW_UNITS;
        let longest_percent =
            self.longest_ns[usize::from(are_many)].saturating_mul(100) / self.slo_ns.max(1);
        let early_percent = if are_many { 92 } else { 85 };
        let is_early = self.late_in_review == 0 && longest_percent < early_percent;
        // More time than best effort ever asked for is not known to be borne.
        let is_wanted = self.short_in_review > 0 || self.share.limit().is_some();
        let is_busy_new = std::mem::take(&mut self.is_busy_new);
        let busy_permille = if is_busy_new { self.busy_permille } else { 0 };
        self.tolerated = self.tolerated.max(0.0);
        let verdict = if is_too_late {
            Verdict::Late
        } else if busy_permille > self.busy.far {
            Verdict::FarTooBusy
        } else if busy_permille > self.busy.max {
            Verdict::Ease
        } else if is_early && is_wanted && self.busy_permille <= self.busy.raise_max {
            let alone = self.alone_p95_ns.saturating_mul(100) / self.slo_ns.max(1);
            Verdict::Raise { longest: longest_percent, alone }
        } else {
            Verdict::Keep
        };
        self.new_review();
        self.share.review(now_ns, verdict)
    }

    /// Serve strictly while too few of the latest units kept the objective. True if that changed.
    fn judge(&mut self, is_late: bool) -> bool {
        if self.kept.len() == JUDGED_UNITS {
            self.late_of_kept -= usize::from(self.kept.pop_front() == Some(false));
        }
        self.kept.push_back(!is_late);
        self.late_of_kept += usize::from(is_late);
        let late_max = JUDGED_UNITS as f64 * (100.0 - self.percentile) / 100.0;
        // At the limit it would be late again with the next accident.
        let fewer = (late_max - 1.0).max(late_max / 2.0);
        let late_max = if self.misses { fewer } else { late_max };
        let misses = self.late_of_kept as f64 > late_max;
        if misses && !self.misses {
            self.share.halve(true);
            // What was late, or is from now on of what was let in before, is paid for.
            self.new_review();
            self.tolerated = TOLERATED_MAX;
        }
        std::mem::replace(&mut self.misses, misses) != misses
    }
}
