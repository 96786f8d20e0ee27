//! How much best-effort work an open unit bears, and in which of three ways: learned from the units' times.
//!
//! In *time* best effort has all SMs, for so much time in a unit. In *space* it has some SMs, for all of the unit,
//! and all SMs between units. On a *width* it has some SMs always, for so much time in a unit. Time costs a unit
//! little if the GPU is idle within it because the service's CPU part takes longer; space costs it little if its
//! kernels do not fill the GPU; a width costs one best-effort client no change of SMs, and little if the service is
//! busy most of the time. Each way has a level ([`Space`]'s is two numbers), raised while all units are early, and
//! lowered once too many are late. All are tried, and the one in which most best-effort work was let in is kept
//! until the next trial, which comes the later the more trials were lost. The others are not tried while time holds
//! nothing back, nor kept where no launch can be limited or is that small.

use crate::space::{Space, Span};
use crate::verdict::{Verdict, growth_percent};
use crate::worth::{Pace, Tally, Worth};
use trial::TRIAL_REVIEWS;

mod trial;

/// Units after which the level is looked at again, or fewer that took [`REVIEW_NS`] or of which too many were late.
pub const REVIEW_UNITS: u32 = 64;
pub const REVIEW_UNITS_MIN: u32 = 8;
pub const REVIEW_NS: u64 = 1_000_000_000;
/// Best-effort time, in thousandths of the time that a unit can spare.
pub const RATE_START: u64 = 1_000;
const RATE_MIN: u64 = 50;
const RATE_MAX: u64 = 64_000;
/// Reviews until a way is measured, at most: less if it has found its limit.
const SETTLE_REVIEWS_MAX: u32 = 24;
/// The same if so many in a row changed nothing.
const KEPT_REVIEWS: u32 = 3;
/// The same if nothing was let in.
const STUCK_REVIEWS: u32 = 4;
/// Reviews over which the work in a way is measured.
const MEASURED_REVIEWS: u32 = 6;
/// The same where a trial may have failed because nothing had run on these SMs before.
const SOON_REVIEWS: u32 = 32;
/// On a width: as often strict since it was measured, it is given up.
const LATE_TIMES_MAX: u32 = 3;
/// Another way is taken if it lets in so much more, percent.
const BETTER_PERCENT: u64 = 103;
/// Time holds something back if it does so in more than one unit in so many.
const SHORT_UNITS_PER: u64 = 10;

/// How best effort shares the GPU with an open unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Time,
    Space,
    Width,
}

const WAYS: [Way; 3] = [Way::Time, Way::Width, Way::Space];

/// How much best-effort work an open unit of a service bears, as learned so far.
#[derive(Debug)]
pub struct Share {
    way: Way,
    /// In the order in which they are tried first.
    ways: &'static [Way],
    /// SMs of the GPU, or 0 while it is not known; then there is no space to share.
    sm_count: u32,
    rate: u64,
    space: Space,
    width: Space,
    /// A service must be served strictly: nothing is on the width.
    withheld: bool,
    /// More time than some rate was too much.
    found_limit: bool,
    /// Best-effort work that each way lets in.
    worth: [Worth; 3],
    pace: Pace,
    /// Reviews since this way was taken, and since its work is measured.
    reviews: u32,
    measured: u32,
    /// Reviews since the ways were compared, after how many another way is tried, and which was tried last.
    compared: u32,
    trial_after: u32,
    last_tried: Way,
    /// This way is tried.
    is_trial: bool,
    /// What was let in since then, and since the first review of a trial.
    tally: Tally,
    since_ns: u64,
    trial: Tally,
    trial_from_ns: u64,
    trial_reviews: u32,
    /// Units meanwhile that were not measured alone, and those of them in which a launch was held for want of time.
    units: u64,
    short_units: u64,
    /// Units since the last review, and when that was.
    arrived: u64,
    reviewed_ns: u64,
    /// Since the last review: a launch was held for want of time, or there was any.
    is_short: bool,
    is_asked: bool,
    /// Since this way was taken: launches that were limited to some SMs, and all that were let in while a unit was
    /// open.
    limited: u64,
    within: u64,
    /// How often too many units were late since this way was taken, or was measured last.
    late_times: u32,
    /// Reviews in a row that changed nothing.
    kept: u32,
    /// It was measured in the last review.
    is_measured: bool,
}

impl Share {
    /// Nothing is known: time, at the rate to start with. Launches can be limited to `widths`.
    pub fn new(sm_count: u32, widths: &[u32]) -> Self {
        Share {
            way: Way::Time,
            ways: &WAYS,
            sm_count,
            rate: RATE_START,
            space: Space::new(Span::Units, sm_count, widths),
            width: Space::new(Span::Always, sm_count, widths),
            withheld: false,
            found_limit: false,
            worth: [Worth::UNKNOWN; 3],
            pace: Pace::default(),
            reviews: 0,
            measured: 0,
            compared: 0,
            trial_after: TRIAL_REVIEWS[0],
            last_tried: Way::Time,
            is_trial: false,
            tally: Tally::default(),
            since_ns: 0,
            trial: Tally::default(),
            trial_from_ns: 0,
            trial_reviews: 0,
            units: 0,
            short_units: 0,
            arrived: 0,
            reviewed_ns: 0,
            is_short: false,
            is_asked: false,
            limited: 0,
            within: 0,
            late_times: 0,
            kept: 0,
            is_measured: false,
        }
    }

    /// Forget all but the GPU.
    pub fn forget(&mut self) {
        self.space.forget();
        self.width.forget();
        let nowhere = Share::new(self.sm_count, &[]);
        let Share { ways, space, width, withheld, pace, .. } = std::mem::replace(self, nowhere);
        (self.space, self.width, self.pace) = (space, width, pace);
        (self.ways, self.withheld) = (ways, withheld);
    }

    #[cfg(test)]
    pub fn try_only(&mut self, ways: &'static [Way]) {
        self.ways = ways;
    }

    /// The levels and what was found of them, as numbers.
    pub fn saved(&self) -> String {
        let mut numbers =
            vec![self.way as u64, self.sm_count.into(), self.rate, self.found_limit.into()];
        numbers.extend(self.worth.map(|worth| worth.permille(self.pace)));
        for space in [&self.space, &self.width] {
            let (sms, rate) = space.proven();
            numbers.extend([sms.into(), rate, space.used()]);
        }
        numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
    }

    /// Go on from those numbers. False, and nothing changes, if they are none.
    pub fn remember(&mut self, numbers: &[u64]) -> bool {
        let &[way, sm_count, rate, found_limit, time, space, width, ref spaces @ ..] = numbers
        else {
            return false;
        };
        let &[sms, space_rate, space_used, width_sms, width_rate, width_used] = spaces else {
            return false;
        };
        let narrow = |number: u64| u32::try_from(number).ok();
        let (Some(sm_count), Some(sms), Some(width_sms)) =
            (narrow(sm_count), narrow(sms), narrow(width_sms))
        else {
            return false;
        };
        self.rate = rate.clamp(RATE_MIN, RATE_MAX);
        self.found_limit = found_limit > 0;
        self.worth = [time, space, width].map(Worth::of_permille);
        let nowhere = Share::new(0, &[]);
        let old = std::mem::replace(self, nowhere);
        *self = Share {
            space: old.space.remember(sm_count, sms, space_rate, space_used),
            width: old.width.remember(sm_count, width_sms, width_rate, width_used),
            ..old
        };
        if self.sm_count == 0 {
            // Until it is known.
            self.sm_count = sm_count;
        }
        let is_limited = |sms: u32| (1..sm_count).contains(&sms);
        self.way = match way {
            _ if way == Way::Space as u64 && is_limited(sms) => Way::Space,
            _ if way == Way::Width as u64 && is_limited(width_sms) => Way::Width,
            _ => Way::Time,
        };
        self.must_be_there();
        true
    }

    /// The GPU's SMs are known now, and to how many launches can be limited.
    pub fn set_gpu(&mut self, sm_count: u32, widths: &[u32]) {
        self.sm_count = sm_count;
        self.space = self.space.on_gpu(sm_count, widths);
        self.width = self.width.on_gpu(sm_count, widths);
        self.must_be_there();
    }

    /// Whether nothing may be on the width, because a service must be served strictly: what yields is over sooner.
    pub fn withhold(&mut self, withheld: bool) {
        self.withheld = withheld;
    }

    /// So much time without units is over: at the rate of units before it, a service that is not used.
    pub fn paused(&mut self, now_ns: u64, ns: u64) {
        let later = |from_ns: u64| from_ns.saturating_add(ns).min(now_ns);
        if self.reviewed_ns > 0 {
            self.reviewed_ns = later(self.reviewed_ns);
        }
        (self.since_ns, self.trial_from_ns) = (later(self.since_ns), later(self.trial_from_ns));
    }

    fn must_be_there(&mut self) {
        if !self.space.is_there() {
            self.way = Way::Time;
        }
    }

    /// SMs and time of the way taken, if it has SMs.
    fn spot(&mut self) -> Option<&mut Space> {
        match self.way {
            Way::Time => None,
            Way::Space => Some(&mut self.space),
            Way::Width => Some(&mut self.width),
        }
    }

    /// Best-effort time that a unit bears, in thousandths of the time that it can spare.
    pub fn rate(&self) -> u64 {
        match self.way {
            Way::Time => self.rate,
            // For what cannot be limited.
            Way::Space => self.space.rate(),
            Way::Width if self.withheld => self.rate_whole(),
            Way::Width => self.width.rate(),
        }
    }

    /// The same for what is not on a width, and takes all SMs.
    pub fn rate_whole(&self) -> u64 {
        match self.way {
            Way::Width => self.width.rate().min(self.rate),
            _ => self.rate(),
        }
    }

    /// SMs on which best effort may run for all of an open unit; `None` in the other ways.
    pub fn sms(&self) -> Option<u32> {
        (self.way == Way::Space).then(|| self.space.sms())
    }

    /// SMs on which best effort always runs; `None` in the other ways.
    pub fn width(&self) -> Option<u32> {
        (self.way == Way::Width && !self.withheld).then(|| self.width.sms())
    }

    /// SMs on which best effort runs, always or while a unit is open.
    pub fn limit(&self) -> Option<u32> {
        self.sms().or(self.width())
    }

    /// Best-effort work of so much GPU time, whole, is let in, while a unit is open or not.
    pub fn let_in(&mut self, predicted_ns: u64, within: bool) {
        self.tally.let_in(predicted_ns, within);
        self.trial.let_in(predicted_ns, within);
        self.is_asked = true;
        self.within += u64::from(within);
    }

    /// Units ended, of which the service was busy with one for so long.
    pub fn busy(&mut self, units: u64, busy_ns: u64) {
        self.arrived = self.arrived.saturating_add(units);
        self.tally.busy(units, busy_ns);
        self.trial.busy(units, busy_ns);
    }

    /// A unit ended that was not measured alone. `short`: a launch was held for want of time.
    pub fn unit(&mut self, short: bool) {
        self.units += 1;
        self.short_units += u64::from(short);
        self.is_short |= short;
        self.is_asked |= short;
    }

    /// A launch is limited to some SMs.
    pub fn limited(&mut self) {
        self.limited += 1;
    }

    /// A best-effort program joined.
    pub fn new_program(&mut self) {
        self.space.forget_used();
        self.width.forget_used();
    }

    /// Too many units were late, or the service is busy all of the time. Half of the time; on SMs while a unit is open
    /// at most three quarters of them. Another way until the next trial, if that was too much before.
    pub fn halve(&mut self, is_late: bool) {
        if self.way == Way::Time && self.rate == RATE_MIN {
            // It cannot be less: measured as it is, for another way may do better.
            return;
        }
        // What was measured is of another level.
        self.measured = 0;
        let Some(space) = self.spot() else {
            self.rate = (self.rate / 2).max(RATE_MIN);
            self.found_limit = true;
            return;
        };
        if space.is_trial() {
            space.narrow();
            return;
        }
        let is_time_first = space.is_time_first();
        let may_be_new = is_late && space.is_new() && !space.is_proven();
        self.late_times += 1;
        if is_time_first {
            let is_halved = self.spot().is_some_and(Space::halve);
            if self.late_times >= LATE_TIMES_MAX || !is_halved {
                self.give_up();
            }
            return;
        }
        let is_again = self.late_times > 1;
        if may_be_new && !is_again {
            // They may be late for that, once.
            return self.put_off();
        }
        let is_there = self.spot().is_some_and(|space| space.narrow_to(space.sms() / 4 * 3));
        if is_again || !is_there {
            self.give_up();
        }
    }

    /// The next [`REVIEW_UNITS`] units are over. True if what a unit bears changed.
    pub fn review(&mut self, now_ns: u64, verdict: Verdict) -> bool {
        let before = (self.way, self.rate(), self.limit());
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.reviewed_ns, now_ns));
        if passed_ns < now_ns {
            self.pace.add(self.arrived, passed_ns);
        }
        (self.arrived, self.is_measured) = (0, false);
        if !std::mem::take(&mut self.is_asked) {
            // Best effort was not there: what is let in, and what units take, tells nothing.
            self.measure_again(now_ns);
            return false;
        }
        if self.way == Way::Width && self.withheld {
            return self.review_withheld(now_ns, verdict);
        }
        self.space.pass();
        self.width.pass();
        let short = std::mem::take(&mut self.is_short);
        match self.spot().map(|space| space.review(verdict, short)) {
            None => self.change_rate(verdict),
            Some(false) => self.give_up(),
            // What was let in on other SMs does not count.
            Some(true) if self.limit() != before.2 => (self.measured, self.reviews) = (0, 0),
            Some(true) => {}
        }
        self.kept = if verdict == Verdict::Keep { self.kept + 1 } else { 0 };
        self.reviews += 1;
        self.compared += 1;
        let has_work = self.within > 0 || self.short_units > 0;
        if self.is_trial && self.has_lost(now_ns) {
            let is_early = matches!(verdict, Verdict::Raise { .. });
            self.lose_trial(is_early);
        } else if self.way != Way::Time && self.limited == 0 && has_work {
            self.give_up();
        } else {
            self.compare(now_ns);
        }
        (self.way, self.rate(), self.limit()) != before
    }

    /// Nothing is on the width: whole launches have the rate of time.
    fn review_withheld(&mut self, now_ns: u64, verdict: Verdict) -> bool {
        self.measure_again(now_ns);
        let before = self.rate;
        if verdict == Verdict::Late {
            self.change_rate(verdict);
        }
        self.rate != before
    }

    fn change_rate(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Late | Verdict::FarTooBusy | Verdict::Ease => {
                let percent = if verdict == Verdict::Ease { 80 } else { 60 };
                self.rate = (self.rate * percent / 100).max(RATE_MIN);
                self.found_limit = true;
            }
            Verdict::Keep => {}
            Verdict::Raise { longest, alone } => {
                let percent = growth_percent(longest, alone, self.found_limit);
                self.rate = (self.rate * percent).div_ceil(100).min(RATE_MAX);
            }
        }
    }

    /// Measure the way taken once it has settled, and take another if that is better or due for a trial.
    fn compare(&mut self, now_ns: u64) {
        if self.measured == 0 {
            // No unit bears even one launch: what waits is too long, and would do so for ever if there is no pause.
            let is_stuck = self.within == 0 && self.short_units > 0;
            let settle_reviews = if is_stuck { STUCK_REVIEWS } else { SETTLE_REVIEWS_MAX };
            let found_limit = self.found_limit;
            let is_settled = self.spot().map_or(found_limit, |space| space.is_settled())
                || self.kept >= KEPT_REVIEWS;
            if is_settled || self.reviews >= settle_reviews {
                self.measure(now_ns);
            }
            return;
        }
        self.measured += 1;
        if self.measured <= MEASURED_REVIEWS {
            return;
        }
        let worth = Worth::measured(self.tally, now_ns.saturating_sub(self.since_ns));
        let pace = self.pace;
        let is_kept = self.spot().is_none_or(|space| space.measured(worth, pace));
        if is_kept {
            // A trial of more SMs that is over says nothing of those before.
            self.worth[self.way as usize] = worth;
        }
        self.is_measured = true;
        if self.way == Way::Width {
            self.late_times = 0;
        }
        let mine = self.permille(self.way);
        let best = self.best_other();
        let is_worse = self.permille(best) * 100 > mine * BETTER_PERCENT;
        let holds = self.short_units * SHORT_UNITS_PER > self.units;
        self.measure(now_ns);
        let may_widen = self.spot().is_some_and(|space| space.may_widen());
        if is_worse && may_widen && self.reviews < SETTLE_REVIEWS_MAX {
            // It is judged by more than the first number of SMs.
            return;
        }
        if self.is_trial {
            self.end_trial(!is_worse);
        }
        if self.way == Way::Time && !holds {
            return;
        }
        let is_unknown = |way: &Way| self.permille(*way) == 0;
        let unknown = self.others().find(is_unknown);
        let is_due = self.compared >= self.trial_after && self.others().next().is_some();
        let trial = match unknown {
            None if is_worse => return self.take(best),
            None if is_due => self.others().find(|way| *way != self.last_tried).unwrap_or(best),
            None => return,
            Some(way) => way,
        };
        self.compared = 0;
        self.take(trial);
        (self.is_trial, self.last_tried) = (true, trial);
    }

    fn measure(&mut self, now_ns: u64) {
        (self.measured, self.tally, self.since_ns) = (1, Tally::default(), now_ns);
        (self.units, self.short_units) = (0, 0);
    }

    /// What was let in so far says nothing of the way.
    fn measure_again(&mut self, now_ns: u64) {
        self.measured = self.measured.min(1);
        (self.tally, self.since_ns, self.trial_reviews) = (Tally::default(), now_ns, 0);
    }

    /// Best-effort work let in while each way was measured last, in thousandths of the time, if the last review
    /// measured one; 0: it was not measured, 1: no unit bore it.
    pub fn found(&mut self) -> Option<[u64; 3]> {
        let permille = self.worth.map(|worth| worth.permille(self.pace));
        std::mem::take(&mut self.is_measured).then_some(permille)
    }

    /// Rate, SMs and width of the three ways.
    pub fn levels(&self) -> (u64, u32, u32) {
        (self.rate, self.space.sms(), self.width.sms())
    }

    /// Mean time from one unit to the next; 0 if it is not known.
    pub fn apart_ns(&self) -> u64 {
        self.pace.apart_ns()
    }

    /// Ways that could be taken.
    fn others(&self) -> impl Iterator<Item = Way> {
        let is_there = self.space.is_there();
        let (mine, withheld) = (self.way, self.withheld);
        self.ways.iter().copied().filter(move |way| {
            *way != mine && (*way == Way::Time || is_there) && (*way != Way::Width || !withheld)
        })
    }

    fn permille(&self, way: Way) -> u64 {
        self.worth[way as usize].permille(self.pace)
    }

    /// The one in which most was let in when it was measured.
    fn best_other(&self) -> Way {
        let worth = |way: &Way| self.permille(*way);
        // Of several the first, whose levels cost least.
        let best = self.others().reduce(|a, b| if worth(&b) > worth(&a) { b } else { a });
        best.unwrap_or(Way::Time)
    }

    /// The way taken is of no use before the next trial, which comes soon.
    fn put_off(&mut self) {
        // What is tried next is this.
        self.last_tried = Way::Width;
        self.leave();
        (self.trial_after, self.is_trial) = (SOON_REVIEWS, false);
    }

    /// The way taken is of no use before the next trial.
    fn give_up(&mut self) {
        if self.is_trial {
            self.end_trial(false);
        } else {
            self.trial_after = TRIAL_REVIEWS[0];
        }
        self.leave();
    }

    fn leave(&mut self) {
        let was_used = self.limited > 0;
        self.worth[self.way as usize] = Worth::NONE;
        if let Some(space) = self.spot() {
            space.give_up(was_used);
        }
        self.compared = 0;
        self.take(self.best_other());
    }

    fn take(&mut self, way: Way) {
        let rate = self.rate;
        (self.way, self.reviews, self.measured, self.trial_reviews) = (way, 0, 0, 0);
        (self.limited, self.within, self.late_times, self.kept) = (0, 0, 0, 0);
        if let Some(space) = self.spot() {
            space.begin(rate);
        }
    }
}
