//! How much best-effort work an open unit bears, and in which of two ways: learned from the units' times.
//!
//! In *time* best effort has all SMs, for so much time in a unit. In *space* it has some SMs, for all of the unit. Time
//! costs a unit little if the GPU is idle within it because the service's CPU part takes longer; space costs it little
//! if its kernels do not fill the GPU. Each way has a level ([`Space`]'s is two numbers), raised while all units are
//! early, and lowered once too many are late. Both are tried, and the one in which more best-effort work was let in is
//! kept until the next trial, which comes the later the more trials were lost. Space is not tried while time holds
//! nothing back, nor kept where no launch can be limited or is that small.

use crate::space::Space;

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
/// The same if nothing was let in.
const STUCK_REVIEWS: u32 = 4;
/// Reviews over which the work in a way is measured.
const MEASURED_REVIEWS: u32 = 6;
/// Reviews after which the other way is tried again; twice as many after each trial that it lost, up to the second.
const TRIAL_REVIEWS: [u32; 2] = [96, 1_536];
/// The same where a trial may have failed because nothing had run on these SMs before.
const SOON_REVIEWS: u32 = 32;
/// More work than this is not let in, whatever a saved state says.
const WORTH_PERMILLE_MAX: u64 = 1_000_000;
/// The other way is taken if it lets in so much more, percent.
const BETTER_PERCENT: u64 = 103;
/// Time holds something back if it does so in more than one unit in so many.
const SHORT_UNITS_PER: u64 = 10;

/// How best effort shares the GPU with an open unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Time,
    Space,
}

/// What the units of a review say of the level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All units were early: the longest took so much of the objective, percent, and alone they take so much.
    Raise {
        longest: u64,
        alone: u64,
    },
    Keep,
    /// A little: the service is too busy.
    Ease,
    /// Far less: it is far too busy.
    FarTooBusy,
    /// Too many units were late.
    Late,
}

/// How much best-effort work an open unit of a service bears, as learned so far.
#[derive(Debug)]
pub struct Share {
    way: Way,
    /// SMs of the GPU, or 0 while it is not known; then there is no space to share.
    sm_count: u32,
    rate: u64,
    space: Space,
    /// More time than some rate was too much.
    found_limit: bool,
    /// Of each way: best-effort work let in, in thousandths of the time; 0: not measured yet.
    worth_permille: [u64; 2],
    /// Reviews since this way was taken, and since its work is measured.
    reviews: u32,
    measured: u32,
    /// Reviews since both ways were compared, and after how many the other way is tried.
    compared: u32,
    trial_after: u32,
    /// This way is tried.
    is_trial: bool,
    work_ns: u64,
    since_ns: u64,
    /// Units meanwhile, and those of them in which a launch was held for want of time.
    units: u64,
    short_units: u64,
    /// A launch was held for want of time since the last review.
    is_short: bool,
    /// Since this way was taken: launches that were limited to some SMs, and all that were let in while a unit was
    /// open.
    limited: u64,
    within: u64,
    /// Too many units were late since this way was taken.
    was_late: bool,
    /// It was measured in the last review.
    is_measured: bool,
}

impl Share {
    /// Nothing is known: time, at the rate to start with. Launches can be limited to `widths`.
    pub fn new(sm_count: u32, widths: &[u32]) -> Self {
        Share {
            way: Way::Time,
            sm_count,
            rate: RATE_START,
            space: Space::new(sm_count, widths),
            found_limit: false,
            worth_permille: [0; 2],
            reviews: 0,
            measured: 0,
            compared: 0,
            trial_after: TRIAL_REVIEWS[0],
            is_trial: false,
            work_ns: 0,
            since_ns: 0,
            units: 0,
            short_units: 0,
            is_short: false,
            limited: 0,
            within: 0,
            was_late: false,
            is_measured: false,
        }
    }

    /// Forget all but the GPU.
    pub fn forget(&mut self) {
        self.space.forget();
        let space = std::mem::replace(&mut self.space, Space::new(0, &[]));
        *self = Share { space, ..Share::new(self.sm_count, &[]) };
    }

    /// The levels and what was found of them, as numbers.
    pub fn saved(&self) -> String {
        let [time, space] = self.worth_permille;
        let (sms, rate_in_space) = self.space.proven();
        let numbers = [
            self.way as u64,
            self.sm_count.into(),
            self.rate,
            sms.into(),
            self.space.used(),
            self.found_limit.into(),
            time,
            rate_in_space,
            space,
        ];
        numbers.map(|number| number.to_string()).join(" ")
    }

    /// Go on from those numbers. False, and nothing changes, if they are none.
    pub fn remember(&mut self, numbers: &[u64]) -> bool {
        let [way, sm_count, rate, sms, used, found_limit, time, rate_in_space, space] = *numbers
        else {
            return false;
        };
        let (Ok(sm_count), Ok(sms)) = (u32::try_from(sm_count), u32::try_from(sms)) else {
            return false;
        };
        let is_space = way == Way::Space as u64 && (1..sm_count).contains(&sms);
        self.way = if is_space { Way::Space } else { Way::Time };
        self.rate = rate.clamp(RATE_MIN, RATE_MAX);
        self.found_limit = found_limit > 0;
        self.worth_permille = [time, space].map(|worth| worth.min(WORTH_PERMILLE_MAX));
        let space = std::mem::replace(&mut self.space, Space::new(0, &[]));
        self.space = space.remember(sm_count, sms, rate_in_space, used);
        if self.sm_count == 0 {
            // Until it is known.
            self.sm_count = sm_count;
        }
        if !self.space.is_there() {
            self.way = Way::Time;
        }
        true
    }

    /// The GPU's SMs are known now, and to how many launches can be limited.
    pub fn set_gpu(&mut self, sm_count: u32, widths: &[u32]) {
        self.sm_count = sm_count;
        self.space = self.space.on_gpu(sm_count, widths);
        if !self.space.is_there() {
            self.way = Way::Time;
        }
    }

    /// Best-effort time that a unit bears, in thousandths of the time that it can spare.
    pub fn rate(&self) -> u64 {
        match self.way {
            Way::Time => self.rate,
            // For what cannot be limited.
            Way::Space => self.space.rate(),
        }
    }

    /// SMs on which best effort may run while a unit is open; `None` in the other way.
    pub fn sms(&self) -> Option<u32> {
        (self.way == Way::Space).then(|| self.space.sms())
    }

    /// Best-effort work of so much GPU time, whole, is let in, while a unit is open or not.
    pub fn let_in(&mut self, predicted_ns: u64, within: bool) {
        self.work_ns = self.work_ns.saturating_add(predicted_ns);
        self.within += u64::from(within);
    }

    /// A unit ended that was not measured alone. `short`: a launch was held for want of time.
    pub fn unit(&mut self, short: bool) {
        self.units += 1;
        self.short_units += u64::from(short);
        self.is_short |= short;
    }

    /// A launch is limited to some SMs.
    pub fn limited(&mut self) {
        self.limited += 1;
    }

    /// A best-effort program joined.
    pub fn new_program(&mut self) {
        self.space.forget_used();
    }

    /// Too many units were late, or the service is busy all of the time: half of the time, or at most three quarters of
    /// the SMs, and none until the next trial if that was too much before.
    pub fn halve(&mut self, is_late: bool) {
        // What was measured is of another level.
        self.measured = 0;
        match self.way {
            Way::Time => {
                self.rate = (self.rate / 2).max(RATE_MIN);
                self.found_limit = true;
            }
            Way::Space => {
                if self.space.is_trial() {
                    self.space.narrow();
                    return;
                }
                if is_late && !self.was_late && self.space.is_new() && !self.space.is_proven() {
                    // They may be late for that, once.
                    return self.put_off();
                }
                let is_again = std::mem::replace(&mut self.was_late, true);
                if is_again || !self.space.narrow_to(self.space.sms() / 4 * 3) {
                    self.give_up();
                }
            }
        }
    }

    /// The next [`REVIEW_UNITS`] units are over. True if what a unit bears changed.
    pub fn review(&mut self, now_ns: u64, verdict: Verdict) -> bool {
        let before = (self.way, self.rate(), self.sms());
        self.is_measured = false;
        self.space.pass();
        let short = std::mem::take(&mut self.is_short);
        match self.way {
            Way::Time => self.change_rate(verdict),
            Way::Space if !self.space.review(verdict, short) => self.give_up(),
            // What was let in on other SMs does not count.
            Way::Space if self.sms() != before.2 => (self.measured, self.reviews) = (0, 0),
            Way::Space => {}
        }
        self.reviews += 1;
        self.compared += 1;
        let has_work = self.within > 0 || self.short_units > 0;
        if self.way == Way::Space && self.limited == 0 && has_work {
            self.give_up();
        } else {
            self.compare(now_ns);
        }
        (self.way, self.rate(), self.sms()) != before
    }

    fn change_rate(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Late | Verdict::FarTooBusy | Verdict::Ease => {
                let percent = if verdict == Verdict::Ease { 80 } else { 60 };
                self.rate = (self.rate * percent / 100).max(RATE_MIN);
                self.found_limit = true;
            }
            Verdict::Keep => {}
            Verdict::Raise { longest, .. } => {
                // What best effort adds to a unit may grow by so much and still fit.
                let percent = match (self.found_limit, longest) {
                    (false, ..50) => 200,
                    (false, 50..65) => 150,
                    (true, 50..) => 105,
                    _ => 125,
                };
                self.rate = (self.rate * percent).div_ceil(100).min(RATE_MAX);
            }
        }
    }

    /// Measure the way taken once it has settled, and take the other if it is better or due for a trial.
    fn compare(&mut self, now_ns: u64) {
        if self.measured == 0 {
            // No unit bears even one launch: what waits is too long, and would do so for ever if there is no pause.
            let is_stuck = self.within == 0 && self.short_units > 0;
            let settle_reviews = if is_stuck { STUCK_REVIEWS } else { SETTLE_REVIEWS_MAX };
            let is_settled = match self.way {
                Way::Time => self.found_limit,
                Way::Space => self.space.is_settled(),
            };
            if !is_settled && self.reviews < settle_reviews {
                return;
            }
            self.measure(now_ns);
            return;
        }
        self.measured += 1;
        if self.measured <= MEASURED_REVIEWS {
            return;
        }
        let passed_ns = now_ns.saturating_sub(self.since_ns).max(1);
        let worth_permille = self.work_ns.saturating_mul(1_000) / passed_ns;
        let mut mine = worth_permille.clamp(1, WORTH_PERMILLE_MAX);
        if self.way == Way::Space {
            // A trial of more SMs that is over says nothing of those before.
            mine = self.space.measured(mine);
        }
        self.worth_permille[self.way as usize] = mine;
        self.is_measured = true;
        let other = self.worth_permille[self.other() as usize];
        let is_worse = other * 100 > mine * BETTER_PERCENT;
        let holds = self.short_units * SHORT_UNITS_PER > self.units;
        self.measure(now_ns);
        if self.way == Way::Space
            && is_worse
            && self.space.may_widen()
            && self.reviews < SETTLE_REVIEWS_MAX
        {
            // It is judged by more than the first number of SMs.
            return;
        }
        if self.is_trial {
            self.end_trial(!is_worse);
        }
        let is_due = self.compared >= self.trial_after || other == 0;
        if self.way == Way::Time && !holds {
            return;
        }
        if self.space.is_there() && (is_worse || is_due) {
            if is_due {
                self.compared = 0;
            }
            self.take(self.other());
            self.is_trial = is_due;
        }
    }

    fn end_trial(&mut self, is_won: bool) {
        let [first, last] = TRIAL_REVIEWS;
        let after = (self.trial_after * 2).clamp(first, last);
        self.trial_after = if is_won { first } else { after };
        (self.is_trial, self.compared) = (false, 0);
    }

    fn measure(&mut self, now_ns: u64) {
        (self.measured, self.work_ns, self.since_ns) = (1, 0, now_ns);
        (self.units, self.short_units) = (0, 0);
    }

    /// Best-effort work let in while each way was measured last, in thousandths of the time, if the last review
    /// measured one; 0: it was not measured, 1: no unit bore it.
    pub fn found(&mut self) -> Option<[u64; 2]> {
        std::mem::take(&mut self.is_measured).then_some(self.worth_permille)
    }

    /// Rate of the one way, and SMs of the other.
    pub fn levels(&self) -> (u64, u32) {
        (self.rate, self.space.sms())
    }

    fn other(&self) -> Way {
        match self.way {
            Way::Time => Way::Space,
            Way::Space => Way::Time,
        }
    }

    /// Space is of no use before the next trial, which comes soon.
    fn put_off(&mut self) {
        self.leave_space();
        (self.trial_after, self.is_trial) = (SOON_REVIEWS, false);
    }

    /// Space is of no use before the next trial.
    fn give_up(&mut self) {
        if self.is_trial {
            self.end_trial(false);
        } else {
            self.trial_after = TRIAL_REVIEWS[0];
        }
        self.leave_space();
    }

    fn leave_space(&mut self) {
        self.worth_permille[Way::Space as usize] = 1;
        self.space.give_up(self.limited > 0);
        self.compared = 0;
        self.take(Way::Time);
    }

    fn take(&mut self, way: Way) {
        (self.way, self.reviews, self.measured) = (way, 0, 0);
        (self.limited, self.within, self.was_late) = (0, 0, false);
        if way == Way::Space {
            self.space.begin(self.rate);
        }
    }
}
