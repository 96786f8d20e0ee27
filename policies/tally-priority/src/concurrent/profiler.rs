//! What is known of one long kernel, and how that becomes its form (paper: section
//! 4.2, the transparent profiler).
//!
//! The paper measures every candidate before it serves. Here a kernel is run at once
//! in the form that the estimates favour, and what the core measures replaces the
//! estimates: of the form in use by itself, of the others by trying them now and then
//! (`explore_permille` bounds how often). Pure: everything comes in as arguments.

use super::candidates::{CANDIDATES_MAX, Candidate, Candidates, candidates, scaled};
use super::choose::choose;
use crate::settings::Settings;
use tally_sdk::codec::{Reader, Writer};
use tally_sdk::{ClientId, Decision, Form, FormProfile, FormsOffered, KernelProfile, Launch};

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
#[derive(Clone, Copy, Debug)]
struct Tried {
    form: Decision,
    tries: u32,
}

/// What is kept of one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The form to use.
    pub chosen: Decision,
    /// The form to try when the share allows.
    pub next: Option<Decision>,
    /// It is over the bound, runs whole, and nothing can be done about it.
    pub is_long_whole: bool,
    /// It was reported.
    pub is_told: bool,
    /// Launches until its transformation is asked for again.
    pub ask_in: u32,
    /// For whom it was asked for last. Not kept over a reload: asking once more costs little.
    pub asked_for: Option<ClientId>,
    /// What its launches offered when `chosen` was chosen.
    offers: FormsOffered,
    /// Launches until the next look at it, and from that one to the one after.
    due: u32,
    period: u32,
    /// The chosen form is measured enough.
    is_settled: bool,
    /// Launches run whole since it was last due, to see whether its time has changed.
    whole_tries: u32,
    tried: [Tried; TRIED],
}

/// Nothing is known of it yet.
impl Default for Entry {
    fn default() -> Self {
        Entry {
            chosen: WHOLE,
            next: None,
            is_long_whole: false,
            is_told: false,
            ask_in: 0,
            asked_for: None,
            offers: FormsOffered::empty(),
            due: 0,
            period: PERIOD_FIRST,
            is_settled: false,
            whole_tries: 0,
            tried: [Tried { form: WHOLE, tries: 0 }; TRIED],
        }
    }
}

impl Entry {
    /// The choice stands for this launch: nothing changed, and it is not time to look
    /// again. Counts the launch.
    pub fn stands(&mut self, launch: &Launch) -> bool {
        if self.due == 0 || self.offers != launch.offered {
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
        let samples = u64::from(settings.samples);
        let before = (self.chosen, self.offers);
        // Not one of the launches in a row by which a new form is measured.
        let is_periodic = self.due == 0 && self.is_settled;
        if is_periodic {
            // High priority may have disturbed all tries so far: allow some more.
            for tried in &mut self.tried {
                let is_cold = measured(profile, tried.form).is_none_or(|f| f.count < samples);
                if is_cold && tried.form != WHOLE {
                    tried.tries = tried.tries.saturating_sub(settings.samples);
                }
            }
        }
        let mut all = candidates(launch, settings);
        let estimates = all;
        let mut settled = [true; CANDIDATES_MAX];
        if all.len() > 1 {
            for (candidate, settled) in all.iter_mut().zip(&mut settled) {
                *settled = self.measured(candidate, profile, &estimates, settings);
            }
        }
        // Until its time is believed there is nothing to compare to.
        let best = if settled[0] { choose(&all, settings) } else { all[0] };
        self.is_settled = all.iter().zip(settled).all(|(c, done)| done || c.form != best.form);
        self.chosen = best.form;
        self.offers = launch.offered;
        let changed = before != (self.chosen, self.offers);
        if is_periodic || changed {
            self.whole_tries = 0;
        }
        self.next = if settled[0] { self.worth_trying(&all, &settled, settings) } else { None };
        self.is_long_whole = best.form == WHOLE
            && best.turnaround_ns > settings.turnaround_ns_max
            && settled[0]
            && self.next.is_none()
            && !launch.can_prepare();
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
    pub fn count_try(&mut self, form: Decision, candidates: &[Candidate]) {
        if form == WHOLE && self.chosen != WHOLE {
            self.whole_tries = self.whole_tries.saturating_add(1);
            return;
        }
        let tried = self.tried(form, candidates);
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
        let tries = self.tried(candidate.form, estimates).tries;
        if candidate.form == WHOLE {
            // Its time is the core's prediction, a median: no slow first launch in it.
            let count = profile.map_or(0, |p| p.count);
            return count >= WHOLE_SAMPLES || tries >= settings.samples;
        }
        let is_tried = tries >= settings.samples.saturating_mul(TRIES_PER_SAMPLE);
        let Some(figures) = measured(profile, candidate.form) else { return is_tried };
        if figures.count > 0 {
            // A median: a slow first launch is not in it either.
            candidate.time_ns = figures.median_ns.max(1);
        }
        match candidate.form {
            Decision::Sliced(_) => candidate.turnaround_ns = slice_ns(candidate),
            // It cannot take longer than running to the end.
            Decision::Preemptible if figures.turnaround_ns > 0 => {
                candidate.turnaround_ns = figures.turnaround_ns.min(candidate.time_ns);
            }
            _ => {}
        }
        is_tried || figures.count >= settings.samples.into()
    }

    /// The first form that would be chosen if it were as fast as the whole kernel, and
    /// is not measured enough to know that it is not.
    fn worth_trying(
        &self,
        all: &Candidates,
        settled: &[bool],
        settings: &Settings,
    ) -> Option<Decision> {
        let whole = all[0];
        // A form that is faster than the kernel itself: the kernel has changed since it
        // was last run whole, and all is compared to that.
        let is_stale = |(candidate, settled): (&Candidate, &bool)| {
            let time_ns = scaled(candidate.time_ns, STALE_WHOLE_PERCENT, 100);
            *settled && candidate.form == self.chosen && time_ns < whole.time_ns
        };
        let is_transformed = self.chosen != WHOLE;
        let is_stale = is_transformed && all.iter().zip(settled).any(is_stale);
        if is_stale && self.whole_tries < settings.samples {
            return Some(WHOLE);
        }
        for (index, candidate) in all.iter().enumerate().skip(1) {
            if settled[index] || candidate.form == self.chosen {
                continue;
            }
            let mut hoped = *all;
            hoped[index].time_ns = whole.time_ns;
            if let Decision::Sliced(_) = candidate.form {
                hoped[index].turnaround_ns = slice_ns(&hoped[index]);
            }
            if choose(&hoped, settings).form == candidate.form {
                return Some(candidate.form);
            }
        }
        // What it takes whole is not seen while it runs otherwise: look once each time.
        (is_transformed && self.whole_tries == 0).then_some(WHOLE)
    }

    /// What is remembered of trying a form. Makes room by forgetting one that is no
    /// candidate any more.
    fn tried(&mut self, form: Decision, candidates: &[Candidate]) -> &mut Tried {
        let known = self.tried.iter().position(|t| t.form == form && t.tries > 0);
        let free = || self.tried.iter().position(|t| t.tries == 0);
        let at = known.or_else(free).unwrap_or_else(|| {
            let is_past = |t: &Tried| candidates.iter().all(|c| c.form != t.form);
            self.tried.iter().position(is_past).unwrap_or(0)
        });
        if known.is_none() {
            self.tried[at] = Tried { form, tries: 0 };
        }
        &mut self.tried[at]
    }

    /// It was chosen under other settings: look again at its next launch.
    pub fn look_again(&mut self) {
        self.due = 0;
        self.period = PERIOD_FIRST;
    }

    /// Write it down.
    pub fn write(&self, out: &mut Writer) {
        let bits = [self.is_long_whole, self.is_told, self.is_settled, self.next.is_some()];
        out.number(bits.iter().rev().fold(0, |all, bit| all << 1 | u64::from(*bit)));
        write_form(out, self.chosen);
        if let Some(next) = self.next {
            write_form(out, next);
        }
        for n in [self.ask_in, self.offers.bits().into(), self.due, self.period, self.whole_tries] {
            out.number(n.into());
        }
        let used = self.tried.iter().filter(|t| t.tries > 0);
        out.number(used.clone().count() as u64);
        for tried in used {
            write_form(out, tried.form);
            out.number(tried.tries.into());
        }
    }

    /// Read it back. What it holds may be anything that an entry can.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn read(from: &mut Reader) -> Result<Self, String> {
        let bits = from.number()?;
        let mut entry = Entry {
            is_long_whole: bits & 1 != 0,
            is_told: bits & 2 != 0,
            is_settled: bits & 4 != 0,
            chosen: read_form(from)?,
            ..Entry::default()
        };
        if bits & 8 != 0 {
            entry.next = Some(read_form(from)?);
        }
        entry.ask_in = from.small()?;
        entry.offers = FormsOffered::from_bits_truncate(from.small()? as u8);
        entry.due = from.small()?;
        entry.period = from.small()?.max(PERIOD_FIRST);
        entry.whole_tries = from.small()?;
        let count = from.number()?;
        if count > TRIED as u64 {
            return Err(from.wrong("more forms were tried of one kernel than are remembered"));
        }
        for tried in entry.tried.iter_mut().take(count as usize) {
            *tried = Tried { form: read_form(from)?, tries: from.small()? };
        }
        Ok(entry)
    }
}

fn write_form(out: &mut Writer, form: Decision) {
    let (form, argument) = form.form();
    out.number(form as u64);
    out.number(argument.into());
}

fn read_form(from: &mut Reader) -> Result<Decision, String> {
    match (from.number()?, from.small()?) {
        (0, 0) => Ok(WHOLE),
        (1, blocks @ 1..) => Ok(Decision::Sliced(blocks)),
        (2, 0) => Ok(Decision::Preemptible),
        (3, sms @ 1..) => Ok(Decision::SmLimited(sms)),
        _ => Err(from.wrong("a form that is none, or of a size that is none")),
    }
}

/// What the core measured of a form other than whole.
fn measured(profile: Option<&KernelProfile>, form: Decision) -> Option<&FormProfile> {
    let (form, argument) = form.form();
    profile?.forms.iter().find(|f| f.form == form && f.argument == argument && form != Form::Whole)
}

/// The turnaround of a sliced kernel: the time of one slice.
fn slice_ns(candidate: &Candidate) -> u64 {
    candidate.time_ns / candidate.parts.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(blocks: u32) -> Candidate {
        Candidate { form: Decision::Sliced(blocks), parts: 1, time_ns: 0, turnaround_ns: 0 }
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
    fn forms_come_back_and_nothing_else_is_a_form() {
        let forms =
            [WHOLE, Decision::Preemptible, Decision::Sliced(9), Decision::SmLimited(u32::MAX)];
        let mut out = Writer::new("f", 1);
        forms.iter().for_each(|form| write_form(&mut out, *form));
        for bad in [[0, 1], [1, 0], [2, 1], [3, 0], [4, 0]] {
            bad.iter().for_each(|n| out.number(*n));
        }
        let saved = out.finish();
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        for form in forms {
            assert_eq!(read_form(&mut from), Ok(form));
        }
        while !from.is_done() {
            assert!(read_form(&mut from).unwrap_err().contains("a form that is none"));
        }
    }
}
