//! SMs on which best effort runs, and the time that a unit bears: while a unit is open, for all of it, and the time of
//! what cannot be limited to them; or always, and the time of everything.
//!
//! More time is given first. Once nothing waits for want of it, or no more can be given, the next wider number of SMs
//! is tried: units may take far longer on those that are left, and best effort has fewer pauses between units then,
//! so it stays only if more work was let in and too few units were late to tell. Else it is tried again after so many
//! reviews, then after twice as many, and so on. Time is taken before SMs.

use crate::verdict::{Verdict, growth_percent};
use crate::worth::{Pace, Worth};

/// Time in thousandths of what a unit can spare, for what cannot be limited, or for everything.
const RATE_MIN: u64 = 100;
const RATE_MAX: u64 = 1_000;
const RATE_MAX_ALWAYS: u64 = 64_000;
const RATE_START_ALWAYS: u64 = 200;
const RATE_MIN_ALWAYS: u64 = 50;
/// The same on another number of SMs.
const RATE_START: u64 = 500;
/// Reviews on a width that was not used before in which late units say nothing of it.
const NEW_REVIEWS: u32 = 4;
/// Early reviews in a row before more SMs are tried.
const EARLY_REVIEWS: u32 = 2;
/// On more SMs the longest unit is not to take more of the objective, percent.
const LONGEST_PERCENT_MAX: u64 = 95;
/// Reviews after which a number of SMs that let in less is tried again.
const RETRY_REVIEWS_MIN: u32 = 32;
const RETRY_REVIEWS_MAX: u32 = 2_048;
/// The same of one that units had borne for [`RETRY_REVIEWS_MIN`].
const RETRY_REVIEWS_LONG_BORNE: u32 = 8;
/// More SMs stay if they let in so much more, percent.
const BETTER_PERCENT: u64 = 103;

/// One number of SMs.
#[derive(Clone, Copy, Debug)]
struct Width {
    sms: u32,
    /// Best-effort work let in, when it was last measured.
    worth: Worth,
    /// Reviews until it may be tried, and after the next trial that fails.
    wait: u32,
    wait_next: u32,
}

impl Width {
    fn new(sms: u32) -> Self {
        Width { sms, worth: Worth::UNKNOWN, wait: 0, wait_next: RETRY_REVIEWS_MIN }
    }
}

/// When best effort is limited to SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// While a unit is open, all of it.
    Units,
    /// Always, and while a unit is open for some time.
    Always,
}

/// SMs and time.
#[derive(Debug)]
pub struct Space {
    span: Span,
    sm_count: u32,
    widths: Vec<Width>,
    at: usize,
    rate: u64,
    /// Widths that were in use, a bit for each 8 SMs, and reviews on this one. The first launch of each kernel on a new
    /// one may hold up the GPU.
    used: u64,
    reviews: u32,
    /// The width is tried: before it was the next narrower one, and this the rate there.
    trial_from: Option<u64>,
    /// Reviews in a row that asked for more SMs.
    early: u32,
    /// More of it was too much, or is not wanted.
    is_settled: bool,
    /// More time than some rate was too much on these SMs.
    found_limit: bool,
    /// What is let in on this width was measured since it was taken.
    is_measured: bool,
}

impl Space {
    /// On a GPU of so many SMs, or 0 while it is not known; launches can be limited to `widths`. Not used are so few
    /// SMs that a kernel would hold its program up for too long.
    pub fn new(span: Span, sm_count: u32, widths: &[u32]) -> Self {
        let is_usable = |sms: &u32| (sm_count / 6..sm_count).contains(sms) && *sms > 0;
        let widths = widths.iter().copied().filter(is_usable).map(Width::new).collect();
        let mut space = Space {
            span,
            sm_count,
            widths,
            at: 0,
            rate: 0,
            used: 0,
            reviews: 0,
            trial_from: None,
            early: 0,
            is_settled: false,
            found_limit: false,
            is_measured: false,
        };
        space.rate = space.rate_start();
        space.start_over();
        space
    }

    /// A third of the SMs, or the next wider width.
    fn start_over(&mut self) {
        let wide = self.widths.iter().position(|width| width.sms >= self.sm_count / 3);
        self.at = wide.unwrap_or(self.widths.len().saturating_sub(1));
    }

    /// Goes on from what was saved on a GPU of so many SMs. As long as none is known, it is taken to be that.
    pub fn remember(self, sm_count: u32, sms: u32, rate: u64, used: u64) -> Self {
        let rate = rate.clamp(self.rate_min(), self.rate_max());
        if self.sm_count == 0 && (1..sm_count).contains(&sms) {
            let widths = vec![Width::new(sms)];
            return Space { sm_count, widths, at: 0, rate, used, ..self };
        }
        let at = self.widths.iter().position(|width| width.sms == sms);
        match at.filter(|_| self.sm_count == sm_count) {
            Some(at) => Space { at, rate, used, ..self },
            None => self,
        }
    }

    /// The GPU is known now; what was saved on one like it holds.
    pub fn on_gpu(&self, sm_count: u32, widths: &[u32]) -> Self {
        let space = Space::new(self.span, sm_count, widths);
        if self.sm_count != sm_count {
            return space;
        }
        space.remember(sm_count, self.sms(), self.rate, self.used)
    }

    /// SMs and rate of the width that is not tried only.
    pub fn proven(&self) -> (u32, u64) {
        match self.trial_from {
            Some(rate) => (self.widths[self.at - 1].sms, rate),
            None => (self.sms(), self.rate),
        }
    }

    /// Other programs launch from now on, whose kernels were on no width yet.
    pub fn forget_used(&mut self) {
        (self.used, self.reviews) = (0, 0);
    }

    /// Forget all but the GPU.
    pub fn forget(&mut self) {
        let widths: Vec<u32> = self.widths.iter().map(|width| width.sms).collect();
        *self = Space { used: self.used, ..Space::new(self.span, self.sm_count, &widths) };
    }

    /// It is to be used from now on; best effort has had so much time in a unit.
    pub fn begin(&mut self, rate: u64) {
        if self.widths.get(self.at).is_none_or(|width| width.worth == Worth::UNKNOWN) {
            self.rate = match self.span {
                Span::Units => (rate * 3 / 4).clamp(RATE_MIN, RATE_MAX),
                Span::Always => RATE_START_ALWAYS,
            };
        }
        (self.trial_from, self.early, self.reviews) = (None, 0, 0);
        (self.is_settled, self.found_limit, self.is_measured) = (false, false, false);
    }

    /// No unit bears it, or no launch was limited, which `was_used` tells.
    pub fn give_up(&mut self, was_used: bool) {
        self.used |= if was_used { self.bit() } else { 0 };
        self.reviews = 0;
        (self.trial_from, self.rate) = (None, self.rate_start());
        self.start_over();
    }

    /// Launches can be limited.
    pub fn is_there(&self) -> bool {
        !self.widths.is_empty()
    }

    pub fn sms(&self) -> u32 {
        self.widths.get(self.at).map_or(0, |width| width.sms)
    }

    pub fn rate(&self) -> u64 {
        self.rate
    }

    fn rate_min(&self) -> u64 {
        match self.span {
            Span::Units => RATE_MIN,
            Span::Always => RATE_MIN_ALWAYS,
        }
    }

    fn rate_start(&self) -> u64 {
        match self.span {
            Span::Units => RATE_START,
            Span::Always => RATE_START_ALWAYS,
        }
    }

    fn rate_max(&self) -> u64 {
        match self.span {
            Span::Units => RATE_MAX,
            Span::Always => RATE_MAX_ALWAYS,
        }
    }

    pub fn used(&self) -> u64 {
        self.used
    }

    /// The level was changed as far as it seemed to be of use.
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    fn bit(&self) -> u64 {
        1u64.checked_shl(self.sms() / 8).unwrap_or(0)
    }

    /// What is late may be so because the width was not used before.
    pub fn is_new(&self) -> bool {
        self.bit() & !self.used != 0
    }

    /// The width is only tried.
    pub fn is_trial(&self) -> bool {
        self.trial_from.is_some()
    }

    /// The width was measured, now or before.
    pub fn is_proven(&self) -> bool {
        self.widths.get(self.at).is_some_and(|width| width.worth != Worth::UNKNOWN)
    }

    /// More SMs are due to be tried.
    pub fn may_widen(&self) -> bool {
        self.widths.get(self.at + 1).is_some_and(|one| one.wait == 0)
    }

    /// A review is over, in whichever way.
    pub fn pass(&mut self) {
        for width in &mut self.widths {
            width.wait = width.wait.saturating_sub(1);
        }
    }

    /// Adapts to what units took; `short`: a launch waited for want of time. False if the least is too much.
    pub fn review(&mut self, verdict: Verdict, short: bool) -> bool {
        let is_new = self.is_new();
        self.reviews += 1;
        if self.reviews >= NEW_REVIEWS {
            self.used |= self.bit();
        }
        match verdict {
            Verdict::Late if is_new => true,
            Verdict::Late | Verdict::FarTooBusy => self.lower(60),
            Verdict::Ease => self.lower(80),
            Verdict::Keep => {
                self.early = 0;
                true
            }
            Verdict::Raise { longest, alone } => {
                self.raise(longest, alone, short);
                true
            }
        }
    }

    fn lower(&mut self, percent: u64) -> bool {
        (self.early, self.is_settled, self.found_limit) = (0, true, true);
        if let Some(rate) = self.trial_from {
            self.leave_width(rate);
            return true;
        }
        self.rate = self.rate * percent / 100;
        self.rate >= self.rate_min() || self.narrow()
    }

    /// Late units take time, not SMs.
    pub fn is_time_first(&self) -> bool {
        self.span == Span::Always
    }

    /// These SMs let in too little, and half as many more are due to be tried. False if there are none.
    pub fn widen(&mut self) -> bool {
        let enough = self.sms() / 2 * 3;
        let is_due = |width: &Width| width.sms >= enough && width.wait == 0;
        let Some(at) = self.widths.iter().position(is_due).filter(|_| !self.is_trial()) else {
            return false;
        };
        self.used |= self.bit();
        self.at = at;
        (self.rate, self.early, self.reviews) = (self.rate_start(), 0, 0);
        (self.is_settled, self.found_limit, self.is_measured) = (false, false, false);
        true
    }

    /// Half of the time, or less SMs. False if there are none.
    pub fn halve(&mut self) -> bool {
        self.lower(50)
    }

    /// Less SMs. False if there are none.
    pub fn narrow(&mut self) -> bool {
        self.is_settled = true;
        if self.at == 0 {
            return false;
        }
        self.leave_width(
            self.trial_from.unwrap_or(self.rate.clamp(self.rate_min(), self.rate_start())),
        );
        true
    }

    /// At most so many SMs. False if there is no such width.
    pub fn narrow_to(&mut self, most: u32) -> bool {
        while self.sms() > most {
            if !self.narrow() {
                return false;
            }
        }
        true
    }

    /// To the next narrower width, at this rate.
    fn leave_width(&mut self, rate: u64) {
        if let Some(width) = self.widths.get_mut(self.at) {
            if self.reviews >= RETRY_REVIEWS_MIN {
                width.wait_next = RETRY_REVIEWS_LONG_BORNE;
            }
            width.wait = width.wait_next;
            width.wait_next = (width.wait_next * 2).min(RETRY_REVIEWS_MAX);
        }
        if self.reviews > 0 {
            self.used |= self.bit();
        }
        self.at = self.at.saturating_sub(1);
        (self.rate, self.trial_from, self.reviews) = (rate, None, 0);
        (self.found_limit, self.is_measured) = (false, false);
    }

    fn raise(&mut self, longest: u64, alone: u64, short: bool) {
        if short && self.rate < self.rate_max() {
            let percent = match self.span {
                Span::Always => growth_percent(longest, alone, self.found_limit),
                Span::Units if longest < 65 => 150,
                Span::Units => 125,
            };
            self.rate = (self.rate * percent).div_ceil(100).min(self.rate_max());
            return;
        }
        self.is_settled = true;
        self.early += 1;
        // What best effort adds to a unit grows at least with its SMs.
        let sms = u64::from(self.sms().max(1));
        let fits = |width: &&Width| {
            let added = longest.saturating_sub(alone) * u64::from(width.sms);
            width.wait == 0 && alone + added / sms <= LONGEST_PERCENT_MAX
        };
        let wider = self.widths.get(self.at + 1).filter(fits).is_some();
        if self.early >= EARLY_REVIEWS && self.is_measured && !self.is_trial() && wider {
            self.at += 1;
            (self.trial_from, self.early, self.reviews) = (Some(self.rate), 0, 0);
            self.rate = match self.span {
                Span::Units => self.rate.min(RATE_START),
                Span::Always => self.rate / 2,
            };
            (self.is_settled, self.found_limit, self.is_measured) = (false, false, false);
        }
    }

    /// So much work was let in on this width, which goes if the narrower one lets in as much: then false.
    pub fn measured(&mut self, worth: Worth, pace: Pace) -> bool {
        let Some(width) = self.widths.get_mut(self.at) else { return true };
        (width.worth, self.is_measured) = (worth, true);
        let Some(rate) = self.trial_from.take() else { return true };
        let narrower = self.at.checked_sub(1).map_or(Worth::UNKNOWN, |at| self.widths[at].worth);
        if narrower.permille(pace) * BETTER_PERCENT > worth.permille(pace) * 100 {
            self.leave_width(rate);
            return false;
        }
        self.widths[self.at].wait_next = RETRY_REVIEWS_MIN;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLY: Verdict = Verdict::Raise { longest: 50, alone: 48 };

    fn space() -> Space {
        let mut space = Space::new(Span::Units, 132, &[16, 32, 64, 96, 112]);
        space.begin(400);
        pass_new(&mut space);
        space
    }

    fn measured(space: &mut Space, permille: u64) -> bool {
        space.measured(Worth::of_permille(permille), Pace::default())
    }

    fn pass_new(space: &mut Space) {
        while space.is_new() {
            assert!(space.review(Verdict::Late, false), "late units say nothing yet");
        }
    }

    #[test]
    fn time_is_given_before_sms_and_taken_before_them() {
        let mut space = space();
        assert_eq!((space.sms(), space.rate()), (64, 300));
        measured(&mut space, 500);
        while space.rate() < RATE_MAX {
            let before = space.rate();
            assert!(space.review(EARLY, true) && !space.is_settled());
            assert!(space.rate() > before && space.sms() == 64);
        }
        assert!(space.review(EARLY, false) && space.is_settled());
        assert_eq!(space.sms(), 64);
        assert!(space.review(EARLY, false) && !space.is_settled());
        assert_eq!((space.sms(), space.proven()), (96, (64, RATE_MAX)), "it is tried");
        assert!(space.rate() <= RATE_START, "what was borne on fewer SMs says little");
        assert!(measured(&mut space, 600));
        assert_eq!((space.sms(), space.proven().0), (96, 96), "more was let in");
        pass_new(&mut space);
        let mut levels = Vec::new();
        while space.review(Verdict::Late, false) {
            levels.push((space.sms(), space.rate()));
            pass_new(&mut space);
        }
        assert_eq!(levels[..4], [(96, 300), (96, 180), (96, 108), (64, RATE_MIN)]);
        assert_eq!(levels.last().map(|(sms, _)| *sms), Some(32), "16 SMs are too few");
    }

    /// Whether it is on more SMs after an early review.
    fn widens(space: &mut Space) -> bool {
        let before = space.sms();
        space.pass();
        assert!(space.review(EARLY, false));
        space.sms() > before
    }

    /// How many early reviews it takes until it is on more SMs.
    fn until_wider(space: &mut Space) -> u32 {
        let reviews = (1..10_000).find(|_| widens(space)).expect("it is tried again");
        assert!(space.review(Verdict::Keep, false));
        reviews
    }

    #[test]
    fn more_sms_that_let_in_no_more_are_tried_ever_more_seldom() {
        let mut space = space();
        measured(&mut space, 500);
        assert_eq!(until_wider(&mut space), EARLY_REVIEWS);
        assert!(!measured(&mut space, 510));
        assert_eq!(space.sms(), 64, "no more than by chance");
        assert_eq!((0..100).find(|_| widens(&mut space)), None);
        measured(&mut space, 500);
        assert_eq!(until_wider(&mut space), 1, "it was measured since");
        assert!(!measured(&mut space, 400));
        measured(&mut space, 500);
        assert_eq!(until_wider(&mut space), 2 * RETRY_REVIEWS_MIN);
        // Too many units are late there: told without a measurement.
        assert!(space.review(Verdict::Late, false));
        assert_eq!((space.sms(), space.rate()), (64, 300), "as before");
        measured(&mut space, 500);
        let mut longest = 0;
        for _ in 0..10 {
            longest = until_wider(&mut space);
            assert!(space.review(Verdict::Ease, false));
            measured(&mut space, 500);
        }
        assert_eq!(longest, RETRY_REVIEWS_MAX);
    }

    #[test]
    fn sms_that_were_borne_for_long_come_back_soon() {
        let mut space = space();
        measured(&mut space, 500);
        for _ in 0..RETRY_REVIEWS_MIN {
            assert!(space.review(Verdict::Keep, false));
        }
        assert!(space.narrow() && space.sms() == 32);
        measured(&mut space, 300);
        assert_eq!(until_wider(&mut space), RETRY_REVIEWS_LONG_BORNE);
        assert!(space.narrow());
        measured(&mut space, 300);
        assert_eq!(until_wider(&mut space), 2 * RETRY_REVIEWS_LONG_BORNE);
    }

    #[test]
    fn what_was_saved_holds_on_a_gpu_like_it() {
        let nowhere = || Space::new(Span::Units, 0, &[]).remember(132, 96, 10, 3);
        assert_eq!((nowhere().sms(), nowhere().rate()), (96, RATE_MIN), "no GPU is known yet");
        let widths = [32, 64, 96];
        let there = nowhere().on_gpu(132, &widths);
        assert_eq!((there.sms(), there.rate(), there.used()), (96, RATE_MIN, 3));
        assert!(
            !Space::new(Span::Units, 0, &[]).remember(132, 132, 500, 0).is_there(),
            "all SMs are no width"
        );
        assert_eq!(nowhere().on_gpu(132, &widths[..2]).sms(), 64, "there is no such width");
        assert_eq!(nowhere().on_gpu(108, &widths).sms(), 64, "another GPU");
        assert!(!nowhere().on_gpu(132, &[]).is_there());
        assert_eq!(space().remember(132, 32, u64::MAX, 0).rate(), RATE_MAX);
        assert_eq!(space().remember(108, 32, 500, 0).sms(), 64, "of another GPU");
    }

    #[test]
    fn after_it_was_given_up_a_width_begins_with_little_time_again() {
        let mut space = Space::new(Span::Always, 132, &[24, 32, 40, 48]);
        space.begin(1_000);
        let start = space.rate();
        assert!(start < RATE_START);
        measured(&mut space, 300);
        while space.halve() {}
        assert!(space.sms() == 24 && space.rate() < RATE_MIN_ALWAYS);
        space.give_up(true);
        space.begin(1_000);
        assert_eq!((space.sms(), space.rate()), (48, start));
        let saved = space.remember(132, 48, RATE_MIN_ALWAYS, 0);
        assert_eq!(saved.rate(), RATE_MIN_ALWAYS, "as it was learned");
    }
}
