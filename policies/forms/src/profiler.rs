//! What is known of one long kernel, and how that becomes its form (paper: section
//! 4.2, the transparent profiler).
//!
//! The paper measures every candidate before it serves. Here a kernel is run at once
//! in the form that the estimates favour, and what the core measures replaces the
//! estimates: of the form in use by itself, of the others by trying them now and then
//! (`explore_permille` bounds how often). Pure: everything comes in as arguments.

use super::candidates::{Candidate, Candidates};
use super::choose::choose;
use crate::Settings;
use tally_sdk::codec::{Field, Reader, Writer};
use tally_sdk::grid::scaled;
use tally_sdk::{ClientId, Decision, FormsOffered, KernelProfile, Launch};

/// Launches measured whole before another form is chosen: the very first may include loading
/// its code, tens of milliseconds that every form would be compared to.
const WHOLE_SAMPLES: u64 = 2;
/// A form is tried at most so many times as often as it has to be measured: a launch
/// that high priority disturbed is not measured.
const TRIES_PER_SAMPLE: u32 = 8;
/// A whole kernel slower than its own chosen form by this much is out of date.
const STALE_WHOLE_PERCENT: u64 = 110;
/// Launches until a choice is looked at again: from this on, doubling.
const PERIOD_FIRST: u32 = 16;
/// Forms remembered of a kernel; more than the candidates, which change with its time.
const TRIED: usize = 8;
const WHOLE: Decision = Decision::Run(0);

/// How often a form was run to measure it; free at 0.
#[derive(Clone, Copy, Debug, Default)]
struct Tried {
    form: Decision,
    tries: u32,
}

/// Saved up to the last that is used: most kernels have two or three, and decisions wait while all are written down.
#[derive(Clone, Copy, Debug, Default)]
struct AllTried([Tried; TRIED]);

impl Field for AllTried {
    fn put(&self, out: &mut Writer) {
        let used = self.0.iter().rposition(|t| t.tries > 0).map_or(0, |last| last + 1);
        out.number(used as u64);
        self.0[..used].iter().for_each(|tried| out.put(tried));
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        let (count, mut all) = (from.number()?, AllTried::default());
        let used = usize::try_from(count).ok().and_then(|count| all.0.get_mut(..count));
        for tried in used.ok_or_else(|| format!("{count} forms of a kernel, of {TRIED} at most"))? {
            *tried = from.get()?;
        }
        Ok(all)
    }
}

/// What is kept of one kernel. By default nothing is known of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry {
    /// The form to use.
    pub chosen: Decision,
    /// The form to try when the share allows.
    pub next: Option<Decision>,
    /// It is over the bound, runs whole, and nothing can be done about it.
    pub is_long_whole: bool,
    /// It need not be reported again as long and running whole only.
    pub is_told: bool,
    /// Launches until its transformation is asked for again.
    pub ask_in: u32,
    /// For whom it was asked for last. Not kept over a reload: asking once more costs little.
    pub asked_for: Option<ClientId>,
    /// What its launches offered when `chosen` was chosen.
    offers: FormsOffered,
    /// Launches until the next look at it, and from that one to the one after: at least [`PERIOD_FIRST`].
    due: u32,
    period: u32,
    /// The chosen form is measured enough.
    is_settled: bool,
    /// Launches run whole since it was last due, to see whether its time has changed.
    whole_tries: u32,
    tried: AllTried,
}

impl Entry {
    /// The choice stands for this launch: nothing changed, and it is not time to look
    /// again. Counts the launch. A restored entry is looked at again as soon as one that was chosen here.
    pub fn stands(&mut self, launch: &Launch, settings: &Settings) -> bool {
        if self.due == 0 || self.offers != launch.offered {
            return false;
        }
        self.due = self.due.min(settings.review_launches) - 1;
        true
    }

    /// Choose anew among the launch's candidates from what the core measured, and say what is worth trying.
    pub fn review(
        &mut self,
        launch: &Launch,
        mut all: Candidates,
        profile: Option<&KernelProfile>,
        settings: &Settings,
    ) {
        let before = (self.chosen, self.offers);
        // Not one of the launches in a row by which a new form is measured.
        let is_periodic = self.due == 0 && self.is_settled;
        if is_periodic {
            self.allow_more_tries(profile, settings);
        }
        if all.len() > 1 {
            for at in 0..all.len() {
                all[at] = self.measured(all[at], profile, &all, settings);
            }
        } else {
            all[0].is_settled = true;
        }
        // Until its time is believed there is nothing to compare to.
        let is_believed = all[0].is_settled;
        let best = if is_believed { choose(&all, settings) } else { all[0] };
        (self.chosen, self.offers) = (best.form, launch.offered);
        self.is_settled = best.is_settled;
        let changed = before != (self.chosen, self.offers);
        if is_periodic || changed {
            self.whole_tries = 0;
        }
        self.next = if is_believed { self.worth_trying(&all, settings) } else { None };
        self.is_long_whole = best.form == WHOLE
            && best.turnaround_ns > settings.turnaround_ns_max
            && is_believed
            && self.next.is_none()
            && !launch.can_prepare();
        if changed {
            self.look_again();
        }
        if !self.is_settled {
            // In use and not measured enough: its launches are the samples.
            self.count_try(self.chosen, &all);
            self.due = 0;
        } else if self.due == 0 {
            let period = self.period.clamp(PERIOD_FIRST, settings.review_launches);
            (self.due, self.period) = (period - 1, period.saturating_mul(2));
        }
    }

    /// High priority may have disturbed all tries of a form so far.
    fn allow_more_tries(&mut self, profile: Option<&KernelProfile>, settings: &Settings) {
        for tried in self.tried.0.iter_mut().filter(|tried| tried.form != WHOLE) {
            let figures = profile.and_then(|profile| profile.of_form(tried.form));
            if figures.is_none_or(|figures| figures.count < settings.samples.into()) {
                tried.tries = tried.tries.saturating_sub(settings.samples);
            }
        }
    }

    /// A launch is run in this form to measure it.
    pub fn count_try(&mut self, form: Decision, candidates: &[Candidate]) {
        if form == WHOLE && self.chosen != WHOLE {
            self.whole_tries = self.whole_tries.saturating_add(1);
            return;
        }
        let tried = self.tried(form, candidates);
        tried.tries = tried.tries.saturating_add(1);
    }

    /// The candidate with what was measured in the place of the estimate. It is settled if that, or the time
    /// spent trying, is enough.
    fn measured(
        &mut self,
        mut candidate: Candidate,
        profile: Option<&KernelProfile>,
        all: &[Candidate],
        settings: &Settings,
    ) -> Candidate {
        let tries = self.tried(candidate.form, all).tries;
        if candidate.form == WHOLE {
            // Its time is the core's prediction, a median: no slow first launch in it.
            let count = profile.map_or(0, |p| p.count);
            candidate.is_settled = count >= WHOLE_SAMPLES || tries >= settings.samples;
            return candidate;
        }
        candidate.is_settled = tries >= settings.samples.saturating_mul(TRIES_PER_SAMPLE);
        let Some(figures) = profile.and_then(|p| p.of_form(candidate.form)) else {
            return candidate;
        };
        candidate.is_settled |= figures.count >= settings.samples.into();
        if figures.count > 0 {
            // A median: a slow first launch is not in it either.
            candidate.time_ns = figures.p50_ns.max(1);
        }
        match candidate.form {
            Decision::Sliced(_) => candidate.turnaround_ns = slice_ns(&candidate),
            // It cannot take longer than running to the end.
            Decision::Preemptible if figures.turnaround_ns > 0 => {
                candidate.turnaround_ns = figures.turnaround_ns.min(candidate.time_ns);
            }
            _ => {}
        }
        candidate
    }

    /// The first form that would be chosen if it were as fast as the whole kernel, and
    /// is not measured enough to know that it is not.
    fn worth_trying(&self, all: &Candidates, settings: &Settings) -> Option<Decision> {
        let whole = all[0];
        // A form that is faster than the kernel itself: the kernel has changed since it
        // was last run whole, and all is compared to that.
        let is_stale = |c: &Candidate| {
            let time_ns = scaled(c.time_ns, STALE_WHOLE_PERCENT, 100);
            c.is_settled && c.form == self.chosen && c.form != WHOLE && time_ns < whole.time_ns
        };
        if self.whole_tries < settings.samples && all.iter().any(is_stale) {
            return Some(WHOLE);
        }
        let would_win = |&at: &usize| {
            let mut hoped = *all;
            hoped[at].time_ns = whole.time_ns;
            if let Decision::Sliced(_) = hoped[at].form {
                hoped[at].turnaround_ns = slice_ns(&hoped[at]);
            }
            choose(&hoped, settings).form == hoped[at].form
        };
        let is_open = |at: &usize| !all[*at].is_settled && all[*at].form != self.chosen;
        let open = (1..all.len()).filter(is_open).find(would_win).map(|at| all[at].form);
        // What it takes whole is not seen while it runs otherwise: look once each time.
        open.or_else(|| (self.chosen != WHOLE && self.whole_tries == 0).then_some(WHOLE))
    }

    /// What is remembered of trying a form. Makes room by forgetting one that is no
    /// candidate any more.
    fn tried(&mut self, form: Decision, candidates: &[Candidate]) -> &mut Tried {
        let known = self.tried.0.iter().position(|t| t.form == form && t.tries > 0);
        let free = || self.tried.0.iter().position(|t| t.tries == 0);
        let at = known.or_else(free).unwrap_or_else(|| {
            let is_past = |t: &Tried| candidates.iter().all(|c| c.form != t.form);
            self.tried.0.iter().position(is_past).unwrap_or(0)
        });
        if known.is_none() {
            self.tried.0[at] = Tried { form, tries: 0 };
        }
        &mut self.tried.0[at]
    }

    /// Look again at its next launch: it was chosen under other settings, or is new.
    pub fn look_again(&mut self) {
        (self.due, self.period) = (0, 0);
    }
}

tally_sdk::saved_fields!(Tried { form, tries });

tally_sdk::saved_fields!(Entry {
    chosen,
    next,
    is_long_whole,
    is_told,
    ask_in,
    offers,
    due,
    period,
    is_settled,
    whole_tries,
    tried,
    ..Entry::default()
});

/// The turnaround of a sliced kernel: the time of one slice.
fn slice_ns(candidate: &Candidate) -> u64 {
    candidate.time_ns / candidate.parts.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(blocks: u32) -> Candidate {
        Candidate {
            form: Decision::Sliced(blocks),
            parts: 1,
            time_ns: 0,
            turnaround_ns: 0,
            is_settled: false,
        }
    }

    #[test]
    fn what_was_tried_makes_room_when_the_candidates_change() {
        let mut entry = Entry::default();
        for n in 1..100 {
            let now = [candidate(n), candidate(n + 1)];
            entry.count_try(Decision::Sliced(n), &now);
            entry.count_try(Decision::Sliced(n + 1), &now);
            assert_eq!(entry.tried(Decision::Sliced(n), &now).tries, if n == 1 { 1 } else { 2 });
        }
    }

    #[test]
    fn a_restored_entry_is_looked_at_within_the_configured_launches() {
        let config = &mut tally_sdk::config::Config::parse("review_launches = 20").unwrap();
        let settings = Settings::take(config, true).unwrap();
        let launch = tally_sdk::testing::launch();
        let mut entry = Entry { due: u32::MAX, offers: launch.offered, ..Entry::default() };
        let stood = (0..1_000).take_while(|_| entry.stands(&launch, &settings)).count();
        assert_eq!(stood, 20);
    }
}
