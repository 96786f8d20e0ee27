//! What is known of one long kernel, and how that becomes its form (paper: section
//! 4.2, the transparent profiler).
//!
//! The paper measures every candidate before it serves. Here a kernel is run at once
//! in the form that the estimates favour, and what the core measures replaces the
//! estimates: of the form in use by itself, of the others by trying them now and then
//! ([`crate::share`] bounds how often). Pure: everything comes in as arguments.

mod kept;

use crate::candidates::{Candidate, Candidates, candidates, scaled};
use crate::choice::Choice;
use crate::choose::choose;
use crate::settings::Settings;
use tally_sdk::{ClientId, Form, KernelId, KernelProfile, Launch, LaunchFlags};

/// Launches measured whole before a kernel is cut: the very first may include loading
/// its code, tens of milliseconds that every form would be compared to.
const WHOLE_SAMPLES: u64 = 2;
/// A form is tried at most so many times as often as it has to be measured: a launch
/// that high priority disturbed is not measured.
const TRIES_PER_SAMPLE: u32 = 8;
/// A new sample moves the core's mean by at least 1 / this.
const MEAN_WINDOW: u64 = 64;
/// A whole kernel slower than its own cut form by this much is out of date.
const STALE_WHOLE_PERCENT: u64 = 110;
/// Launches until a choice is looked at again: from this on, doubling.
const PERIOD_FIRST: u32 = 16;
/// Forms remembered of a kernel; more than the candidates, which change with its time.
const TRIED: usize = 8;

/// What is known of one form of a kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Tried {
    choice: Choice,
    /// How often it was run to measure it.
    tries: u32,
    /// The core's figures when `time_ns` was last taken from them.
    count: u64,
    mean_ns: u64,
    /// What a launch takes, from those since.
    time_ns: u64,
    /// `time_ns` counts only launches after the ones that the core had measured when
    /// it was first asked: these may hold a slow first one (paper: warm-up launches).
    is_warm: bool,
}

/// What is kept of one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Which.
    pub kernel: KernelId,
    /// The form to use.
    pub chosen: Choice,
    /// The form to try when the share allows.
    pub next: Option<Choice>,
    /// It is over the bound, runs whole, and nothing can be done about it.
    pub is_long_whole: bool,
    /// It was reported.
    pub is_told: bool,
    /// Launches until its cut form is asked for again.
    pub ask_in: u32,
    /// For whom it was asked for last. Not kept over a reload: asking once more costs little.
    pub asked_for: Option<ClientId>,
    /// What its launches offered when `chosen` was chosen.
    offers: LaunchFlags,
    /// Launches until the next look at it, and from that one to the one after.
    due: u32,
    period: u32,
    /// The chosen form is measured enough.
    is_settled: bool,
    /// Launches run whole since it was last due, to see whether its time has changed.
    whole_tries: u32,
    tried: [Tried; TRIED],
}

/// The capabilities in the flags of a launch.
pub fn offers(launch: &Launch) -> LaunchFlags {
    const ALL: LaunchFlags = LaunchFlags::CAN_SLICE
        .union(LaunchFlags::CAN_PREEMPT)
        .union(LaunchFlags::CAN_PARTITION)
        .union(LaunchFlags::CAN_PREPARE);
    launch.flags.intersection(ALL)
}

impl Entry {
    /// Nothing is known of it yet.
    pub fn new(kernel: KernelId) -> Self {
        Entry {
            kernel,
            chosen: Choice::Whole,
            next: None,
            is_long_whole: false,
            is_told: false,
            ask_in: 0,
            asked_for: None,
            offers: LaunchFlags::empty(),
            due: 0,
            period: PERIOD_FIRST,
            is_settled: false,
            whole_tries: 0,
            tried: [Tried::default(); TRIED],
        }
    }

    /// The choice stands for this launch: nothing changed, and it is not time to look
    /// again. Counts the launch.
    pub fn stands(&mut self, launch: &Launch) -> bool {
        if self.due == 0 || self.offers != offers(launch) {
            return false;
        }
        self.due -= 1;
        true
    }

    /// Choose anew from what the core measured, and say what is worth trying.
    pub fn review(
        &mut self,
        launch: &Launch,
        profile: Option<&KernelProfile>,
        settings: &Settings,
    ) {
        let offers = offers(launch);
        let before = (self.chosen, self.offers);
        // Not one of the launches in a row by which a new form is measured.
        let is_periodic = self.due == 0 && self.is_settled;
        if is_periodic {
            // High priority may have disturbed all tries so far: allow some more.
            let is_cold = |t: &&mut Tried| !t.is_warm && t.choice != Choice::Whole;
            for tried in self.tried.iter_mut().filter(is_cold) {
                tried.tries = tried.tries.saturating_sub(settings.samples);
            }
        }
        let mut all = candidates(launch, settings);
        let estimates = all;
        let mut settled = [true; crate::candidates::CANDIDATES_MAX];
        if all.len() > 1 {
            for (candidate, settled) in all.iter_mut().zip(&mut settled) {
                *settled = self.measured(candidate, profile, &estimates, settings);
            }
        }
        // Until its time is believed there is nothing to compare to.
        let best = if settled[0] { choose(&all, settings) } else { all[0] };
        self.is_settled = all.iter().zip(settled).all(|(c, done)| done || c.choice != best.choice);
        self.chosen = best.choice;
        self.offers = offers;
        let changed = before != (self.chosen, self.offers);
        if is_periodic || changed {
            self.whole_tries = 0;
        }
        self.next = if settled[0] { self.worth_trying(&all, &settled, settings) } else { None };
        self.is_long_whole = best.choice == Choice::Whole
            && best.turnaround_ns > settings.turnaround_ns_max
            && settled[0]
            && self.next.is_none()
            && !offers.contains(LaunchFlags::CAN_PREPARE);
        if changed {
            (self.period, self.due) = (PERIOD_FIRST, 0);
        }
        if !self.is_settled {
            // In use and not measured enough: its launches are the samples.
            self.count_try(self.chosen, &estimates);
            self.due = 0;
        } else if self.due == 0 {
            self.due = self.period.min(settings.review_launches) - 1;
            self.period = self.period.saturating_mul(2).min(settings.review_launches);
        }
    }

    /// A launch is run in this form to measure it.
    pub fn count_try(&mut self, choice: Choice, candidates: &[Candidate]) {
        if choice == Choice::Whole && self.chosen != Choice::Whole {
            self.whole_tries = self.whole_tries.saturating_add(1);
            return;
        }
        let tried = self.tried(choice, candidates);
        tried.tries = tried.tries.saturating_add(1);
    }

    /// Put what was measured in the place of the estimate. True if that, or the time
    /// spent trying, is enough.
    fn measured(
        &mut self,
        candidate: &mut Candidate,
        profile: Option<&KernelProfile>,
        estimates: &[Candidate],
        settings: &Settings,
    ) -> bool {
        let (form, argument) = candidate.choice.form();
        let tries_max = settings.samples.saturating_mul(TRIES_PER_SAMPLE);
        let tried = self.tried(candidate.choice, estimates);
        if form == Form::Whole {
            // Its time is the core's prediction, a median: no warm-up in it.
            let count = profile.map_or(0, |p| p.count);
            return count >= WHOLE_SAMPLES || tried.tries >= settings.samples;
        }
        let figures =
            profile.and_then(|p| p.forms.iter().find(|f| f.form == form && f.argument == argument));
        let Some(figures) = figures else { return tried.tries >= tries_max };
        if figures.count > 0 {
            tried.follow(figures.count, figures.mean_ns, settings.samples);
            candidate.time_ns = tried.time_ns.max(1);
        }
        match candidate.choice {
            Choice::Slice(_) => candidate.turnaround_ns = slice_ns(candidate),
            // It cannot take longer than running to the end.
            Choice::Preemptible if figures.turnaround_ns > 0 => {
                candidate.turnaround_ns = figures.turnaround_ns.min(candidate.time_ns);
            }
            _ => {}
        }
        tried.is_warm || tried.tries >= tries_max
    }

    /// The first form that would be chosen if it were as fast as the whole kernel, and
    /// is not measured enough to know that it is not.
    fn worth_trying(
        &self,
        all: &Candidates,
        settled: &[bool],
        settings: &Settings,
    ) -> Option<Choice> {
        let whole = all[0];
        // A form that is faster than the kernel itself: the kernel has changed since it
        // was last run whole, and all is compared to that.
        let is_stale = |(candidate, settled): (&Candidate, &bool)| {
            let time_ns = scaled(candidate.time_ns, STALE_WHOLE_PERCENT, 100);
            *settled && candidate.choice == self.chosen && time_ns < whole.time_ns
        };
        let is_cut = self.chosen != Choice::Whole;
        let is_stale = is_cut && all.iter().zip(settled).any(is_stale);
        if is_stale && self.whole_tries < settings.samples {
            return Some(Choice::Whole);
        }
        for (index, candidate) in all.iter().enumerate().skip(1) {
            if settled[index] || candidate.choice == self.chosen {
                continue;
            }
            let mut hoped = *all;
            hoped[index].time_ns = whole.time_ns;
            if let Choice::Slice(_) = candidate.choice {
                hoped[index].turnaround_ns = slice_ns(&hoped[index]);
            }
            if choose(&hoped, settings).choice == candidate.choice {
                return Some(candidate.choice);
            }
        }
        // What it takes whole is not seen while it runs cut: look once each time.
        (is_cut && self.whole_tries == 0).then_some(Choice::Whole)
    }

    /// What is remembered of trying a form. Makes room by forgetting one that is no
    /// candidate any more.
    fn tried(&mut self, choice: Choice, candidates: &[Candidate]) -> &mut Tried {
        let is_free = |t: &Tried| t.tries == 0 && t.count == 0;
        let known = self.tried.iter().position(|t| t.choice == choice && !is_free(t));
        let at = known.or_else(|| self.tried.iter().position(is_free)).unwrap_or_else(|| {
            let is_past = |t: &Tried| candidates.iter().all(|c| c.choice != t.choice);
            self.tried.iter().position(is_past).unwrap_or(0)
        });
        if known.is_none() {
            self.tried[at] = Tried { choice, ..Tried::default() };
        }
        &mut self.tried[at]
    }
}

/// The turnaround of a sliced kernel: the time of one slice.
fn slice_ns(candidate: &Candidate) -> u64 {
    candidate.time_ns / candidate.parts.max(1)
}

impl Tried {
    /// Take note of the core's figures: the time of a launch is that of the latest
    /// `samples` or more, not the mean of all, which forgets slowly.
    fn follow(&mut self, count: u64, mean_ns: u64, samples: u32) {
        if self.count == 0 || count < self.count {
            (self.count, self.mean_ns, self.time_ns) = (count, mean_ns, mean_ns);
            self.is_warm = false;
        }
        let since = count - self.count;
        let is_enough = since >= samples.into();
        if is_enough || (since > 0 && !self.is_warm) {
            self.time_ns = mean_since(self.count, self.mean_ns, count, mean_ns);
        }
        if is_enough {
            (self.count, self.mean_ns, self.is_warm) = (count, mean_ns, true);
        }
    }
}

/// The mean of the samples between two states of the core's mean, in which the n-th
/// sample weighs 1 / n, and 1 / [`MEAN_WINDOW`] from that one on.
fn mean_since(old_count: u64, old_ns: u64, count: u64, mean_ns: u64) -> u64 {
    let plain = old_count.min(MEAN_WINDOW) as f64 / count.min(MEAN_WINDOW) as f64;
    let running = count.saturating_sub(old_count.max(MEAN_WINDOW));
    let fading = 1.0 - 1.0 / MEAN_WINDOW as f64;
    let kept = plain * fading.powi(running.min(1 << 20) as i32);
    // Exact to a few nanoseconds, and the same wherever it is computed. Saturates.
    ((mean_ns as f64 - kept * old_ns as f64) / (1.0 - kept)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The core's mean after these samples.
    fn core_mean(samples: &[u64]) -> u64 {
        let steps = samples.iter().zip(1..);
        steps.fold(0, |mean: i128, (&sample, n): (_, i128)| {
            mean + (i128::from(sample) - mean) / n.min(MEAN_WINDOW.into())
        }) as u64
    }

    #[test]
    fn the_mean_of_the_latest_samples_is_found_in_the_mean_of_all() {
        let mut samples = vec![30_000_000];
        for count in 1..300 {
            let old = samples.len();
            samples.extend(vec![1_000 * count + 500_000; 5]);
            let (before, now) = (core_mean(&samples[..old]), core_mean(&samples));
            let found = mean_since(old as u64, before, samples.len() as u64, now);
            let error = found.abs_diff(1_000 * count + 500_000);
            assert!(error < 100, "{count}: {found} is {error} off");
        }
    }

    #[test]
    fn a_time_follows_and_does_not_hold_the_first_launches() {
        let mut tried = Tried::default();
        let mut samples = vec![30_000_000, 1_000_000];
        tried.follow(2, core_mean(&samples), 5);
        assert_eq!(tried.time_ns, 15_500_000, "all there is");
        for _ in 0..200 {
            samples.push(1_000_000);
            tried.follow(samples.len() as u64, core_mean(&samples), 5);
            assert!(tried.time_ns.abs_diff(1_000_000) < 1_000, "{}", tried.time_ns);
        }
        samples.extend([2_000_000; 10]);
        tried.follow(samples.len() as u64, core_mean(&samples), 5);
        assert!(tried.time_ns.abs_diff(2_000_000) < 1_000, "{}", tried.time_ns);
    }

    #[test]
    fn figures_of_any_kind_are_survived() {
        let mut tried = Tried::default();
        for (count, mean_ns) in [(1, u64::MAX), (u64::MAX, 0), (3, 5), (u64::MAX, u64::MAX)] {
            tried.follow(count, mean_ns, 5);
        }
    }

    #[test]
    fn what_was_tried_makes_room_when_the_candidates_change() {
        let mut entry = Entry::new(1);
        let candidate = |n| Candidate { choice: Choice::Slice(n), ..Candidate::default() };
        for n in 1..100 {
            let now = [candidate(n), candidate(n + 1)];
            entry.count_try(Choice::Slice(n), &now);
            entry.count_try(Choice::Slice(n + 1), &now);
            assert_eq!(entry.tried(Choice::Slice(n), &now).tries, if n == 1 { 1 } else { 2 });
        }
    }
}
