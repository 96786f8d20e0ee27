//! Space: SMs on which best effort runs for all of an open unit, and the time that a unit bears of what cannot be
//! limited to them.
//!
//! More time is given first. Once nothing waits for want of it, the next wider number of SMs is tried: units may take
//! far longer on those that are left, and best effort has fewer units' pauses then, so it stays only if more work was
//! let in and too few units were late to tell. The same number is tried again after so many reviews, then twice as
//! many, and so on. Less is given in the same order.

use crate::share::Verdict;

/// Time for what cannot be limited, in thousandths of what a unit can spare.
const RATE_MIN: u64 = 100;
const RATE_MAX: u64 = 1_000;
/// The same on another number of SMs.
const RATE_START: u64 = 500;
/// Early reviews in a row before more SMs are tried.
const EARLY_REVIEWS: u32 = 2;
/// On more SMs the longest unit is not to take more of the objective, percent.
const LONGEST_PERCENT_MAX: u64 = 95;
/// Reviews after which a number of SMs that let in less is tried again.
const RETRY_REVIEWS_MIN: u32 = 32;
const RETRY_REVIEWS_MAX: u32 = 2_048;
/// More SMs stay if they let in so much more, percent.
const BETTER_PERCENT: u64 = 103;

/// One number of SMs.
#[derive(Clone, Copy, Debug)]
struct Width {
    sms: u32,
    /// Best-effort work let in, in thousandths of the time, when it was last measured; 0: it was not.
    worth_permille: u64,
    /// Reviews until it may be tried, and after the next trial that fails.
    wait: u32,
    wait_next: u32,
}

impl Width {
    fn new(sms: u32) -> Self {
        Width { sms, worth_permille: 0, wait: 0, wait_next: RETRY_REVIEWS_MIN }
    }
}

/// The level in space.
#[derive(Debug)]
pub struct Space {
    sm_count: u32,
    widths: Vec<Width>,
    at: usize,
    rate: u64,
    /// Widths that were in use, a bit for each. The first launch on a new one makes a stream, which holds up the GPU.
    used: u64,
    /// The width is tried: before it was the next narrower one.
    is_trial: bool,
    /// Reviews in a row that asked for more SMs.
    early: u32,
    /// More of it was too much, or is not wanted.
    is_settled: bool,
}

impl Space {
    /// On a GPU of so many SMs, or 0 while it is not known; launches can be limited to `widths`. Not used are so few SMs
    /// that a kernel would hold its program up for too long.
    pub fn new(sm_count: u32, widths: &[u32]) -> Self {
        let is_usable = |sms: &u32| (sm_count / 6..sm_count).contains(sms) && *sms > 0;
        let widths = widths.iter().copied().filter(is_usable).map(Width::new).collect();
        let mut space = Space {
            sm_count,
            widths,
            at: 0,
            rate: RATE_START,
            used: 0,
            is_trial: false,
            early: 0,
            is_settled: false,
        };
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
        let rate = rate.clamp(RATE_MIN, RATE_MAX);
        if self.sm_count == 0 {
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
        let space = Space::new(sm_count, widths);
        if self.sm_count != sm_count {
            return space;
        }
        space.remember(sm_count, self.sms(), self.rate, self.used)
    }

    /// Forget all but the GPU.
    pub fn forget(&mut self) {
        let widths: Vec<u32> = self.widths.iter().map(|width| width.sms).collect();
        *self = Space { used: self.used, ..Space::new(self.sm_count, &widths) };
    }

    /// It is to be used from now on; best effort has had so much time in a unit.
    pub fn begin(&mut self, rate: u64) {
        if self.widths.get(self.at).is_none_or(|width| width.worth_permille == 0) {
            self.rate = (rate * 3 / 4).clamp(RATE_MIN, RATE_MAX);
        }
        (self.is_trial, self.early, self.is_settled) = (false, 0, false);
    }

    /// No unit bears it.
    pub fn give_up(&mut self) {
        (self.is_trial, self.rate) = (false, RATE_START);
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

    pub fn used(&self) -> u64 {
        self.used
    }

    /// The level was changed as far as it seemed to be of use.
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Adapts to what units took; `short`: a launch waited for want of time. False if the least is too much.
    pub fn review(&mut self, verdict: Verdict, short: bool) -> bool {
        for width in &mut self.widths {
            width.wait = width.wait.saturating_sub(1);
        }
        let bit = 1u64.checked_shl(self.at as u32).unwrap_or(0);
        let is_new = self.used & bit == 0;
        self.used |= bit;
        match verdict {
            Verdict::Lower if is_new => true,
            Verdict::Lower => self.lower(60),
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
        (self.early, self.is_settled) = (0, true);
        if self.is_trial {
            self.end_trial();
            return true;
        }
        self.rate = self.rate * percent / 100;
        self.rate >= RATE_MIN || self.narrow()
    }

    /// Less SMs. False if there are none.
    pub fn narrow(&mut self) -> bool {
        (self.is_settled, self.rate) = (true, RATE_START);
        if self.at == 0 {
            return false;
        }
        self.end_trial();
        true
    }

    fn end_trial(&mut self) {
        if let Some(width) = self.widths.get_mut(self.at) {
            width.wait = width.wait_next;
            width.wait_next = (width.wait_next * 2).min(RETRY_REVIEWS_MAX);
        }
        self.at = self.at.saturating_sub(1);
        self.is_trial = false;
    }

    fn raise(&mut self, longest: u64, alone: u64, short: bool) {
        if short && self.rate < RATE_MAX {
            let percent = if longest < 65 { 150 } else { 125 };
            self.rate = (self.rate * percent / 100).min(RATE_MAX);
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
        let is_measured = self.widths.get(self.at).is_some_and(|width| width.worth_permille > 0);
        let wider = self.widths.get(self.at + 1).filter(fits).is_some();
        if self.early >= EARLY_REVIEWS && is_measured && !self.is_trial && wider {
            self.at += 1;
            (self.is_trial, self.early) = (true, 0);
            self.rate = self.rate.min(RATE_START);
        }
    }

    /// So much work was let in on this width, which goes if the narrower one lets in as much.
    pub fn measured(&mut self, worth_permille: u64) {
        let Some(width) = self.widths.get_mut(self.at) else { return };
        width.worth_permille = worth_permille;
        if !std::mem::take(&mut self.is_trial) {
            return;
        }
        width.wait_next = RETRY_REVIEWS_MIN;
        let narrower = self.at.checked_sub(1).and_then(|at| self.widths.get(at));
        if narrower.is_some_and(|one| one.worth_permille * BETTER_PERCENT > worth_permille * 100) {
            self.end_trial();
        }
    }
}
