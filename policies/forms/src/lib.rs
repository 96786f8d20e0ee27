//! The form of each launch that may start beside a high-priority client, where kernels run at once: the transparent
//! profiler of Tally (ASPLOS 2025, section 4.2). Shared by policies that decide differently when a launch may start.
//!
//! Usual paths first: a launch predicted to be within the bound runs whole without a
//! look at anything; a long kernel that is known runs in its chosen form. Only a new
//! kernel, one whose offers changed, one due for review, or a try asks the core for
//! the kernel's profile, which costs a call, and allocates if there is one.

pub mod candidates;
pub mod choose;
pub mod profiler;
mod settings;

pub use settings::Settings;

use candidates::{candidates, graph_form};
use profiler::Entry;
use tally_sdk::codec::{Reader, Writer};
use tally_sdk::host::{self, Gauge};
use tally_sdk::{
    Counters, Decision, Form, KernelId, Launch, Level, LruMap, NO_KERNEL, Saved, TokenBucket,
};

/// A form that is not there yet is asked for again after so many launches of the same client: the
/// core may have been too busy to make it. Each client has transformed kernels of its own, even of the same name.
const ASK_AGAIN_LAUNCHES: u32 = 256;
/// Kernels named in the log because they can only run whole.
const TOLD_MAX: u32 = 32;
/// Long kernels that are remembered. One training step has some hundreds.
const KERNELS_MAX: usize = 4_096;
/// Kernels kept over a reload, those launched last: decisions wait while they are written
/// down. Each takes less than 256 bytes, so they always fit.
pub const KEPT_MAX: usize = 1_024;
/// Tries that can be saved up for when there is something to try.
const TRIES_SAVED_MAX: u32 = 8;
/// Of what is saved, whichever policy saves it.
pub const FORMAT: &str = "tally-forms";
/// Rises when what is saved changes.
pub const VERSION: u32 = 1;

/// Why a form was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// No form other than whole is needed.
    Short,
    /// The best form of this kernel.
    Chosen,
    /// To measure this form.
    Tried,
    /// To have this kernel transformed.
    Prepared,
}

/// Places in [`Forms::counters`], the first four by [`tally_sdk::Form`].
const COUNTERS: [&str; 6] = [
    "launches_whole",
    "launches_sliced",
    "launches_preemptible",
    "launches_sm_limited",
    "launches_explored",
    "transformations_requested",
];
const EXPLORED: usize = 4;
const REQUESTED: usize = 5;

/// What is known of kernels, and of the forms chosen.
#[derive(Debug)]
pub struct Forms {
    /// The settings at first, as text: what was measured belongs to them.
    measured_under: String,
    kernels: LruMap<Entry>,
    /// Long kernels of `kernels` that can only run whole.
    long_whole: usize,
    /// How often a form may be tried that is not thought best: a share of all launches. The paper needs no bound,
    /// since it measures before it serves.
    tries: TokenBucket,
    counters: Counters<6>,
    known_gauge: Gauge,
    long_whole_gauge: Gauge,
    told: u32,
}

impl Forms {
    /// Knows no kernel yet. `in_force` is the settings as text, under which it measures.
    pub fn new(settings: &Settings, in_force: String) -> Self {
        Forms {
            measured_under: in_force,
            kernels: LruMap::new(KERNELS_MAX, Entry::default()),
            long_whole: 0,
            tries: TokenBucket::new(settings.explore_permille, TRIES_SAVED_MAX),
            counters: Counters::new(COUNTERS),
            known_gauge: Gauge::new("kernels_known"),
            long_whole_gauge: Gauge::new("long_whole_kernels"),
            told: 0,
        }
    }

    /// The form of a launch that starts now.
    #[inline]
    pub fn decide(&mut self, launch: &Launch, settings: &Settings) -> (Decision, Why) {
        self.tries.earn();
        let bound_ns = if launch.is_graph() { 0 } else { settings.turnaround_ns_max };
        let decided = if !settings.forms
            // Never measured is 0: it has to run whole to be.
            || launch.predicted_ns <= bound_ns
            // One id for many kernels: nothing to measure.
            || (launch.kernel == NO_KERNEL && !launch.is_graph())
        {
            self.counters.add(Form::Whole as usize, 1);
            (Decision::Run(0), Why::Short)
        } else {
            self.long(*launch, settings)
        };
        self.counters.tick(launch.now_ns);
        decided
    }

    #[inline(never)]
    fn long(&mut self, launch: Launch, settings: &Settings) -> (Decision, Why) {
        let launch = &launch;
        let (decision, why) = match launch.is_graph() {
            true => self.graph(launch, settings),
            false => self.kernel(launch, settings),
        };
        self.counters.add(launch.runs_as(decision) as usize, 1);
        (decision, why)
    }

    /// Hand the counts over.
    pub fn hand_over(&mut self) {
        self.counters.hand_over();
    }

    fn graph(&mut self, launch: &Launch, settings: &Settings) -> (Decision, Why) {
        let decision = graph_form(launch, settings);
        if !launch.offers(decision.form().0) {
            return self.prepare(launch, decision);
        }
        (decision, Why::Chosen)
    }

    fn kernel(&mut self, launch: &Launch, settings: &Settings) -> (Decision, Why) {
        if launch.can_prepare() && !launch.can_preempt() && launch.has_boundaries() {
            let answer = self.prepare(launch, Decision::Preemptible);
            if answer.0 != Decision::Run(0) {
                return answer;
            }
        }
        // The usual path: a look, and nothing else.
        let (mut stands, mut tries) = (false, false);
        if let Some(entry) = self.kernels.get_mut(launch.kernel) {
            (stands, tries) = (entry.stands(launch, settings), entry.next.is_some());
            if stands && !tries {
                return (entry.chosen, Why::Chosen);
            }
        }
        // What is worth trying may have been measured since, so look first.
        if !stands || (tries && self.tries.allows()) {
            self.review(launch, settings);
        }
        let may_try = self.tries.allows();
        let entry = self.entry(launch.kernel);
        if may_try && let Some(next) = entry.next {
            entry.count_try(next, &candidates(launch, settings));
            self.tries.spend();
            self.counters.add(EXPLORED, 1);
            return (next, Why::Tried);
        }
        (entry.chosen, Why::Chosen)
    }

    /// Answer with a form that is not there yet, so that it is made; not each time.
    fn prepare(&mut self, launch: &Launch, decision: Decision) -> (Decision, Why) {
        let entry = self.entry(launch.kernel);
        if entry.ask_in > 0 && entry.asked_for == Some(launch.client) {
            entry.ask_in -= 1;
            return (Decision::Run(0), Why::Chosen);
        }
        entry.ask_in = ASK_AGAIN_LAUNCHES - 1;
        entry.asked_for = Some(launch.client);
        self.counters.add(REQUESTED, 1);
        (decision, Why::Prepared)
    }

    /// Choose anew from what the core measured.
    fn review(&mut self, launch: &Launch, settings: &Settings) {
        // Without another form there is nothing to compare.
        let all = candidates(launch, settings);
        let profile = (all.len() > 1).then(|| host::kernel_profile(launch.kernel)).flatten();
        let mut tell = false;
        self.update(launch.kernel, |entry| {
            entry.review(launch, all, profile.as_ref(), settings);
            tell = entry.is_long_whole && !entry.is_told;
            entry.is_told |= tell;
        });
        if tell && self.told < TOLD_MAX {
            self.told += 1;
            tell_long_whole(launch);
        }
        self.show();
    }

    fn entry(&mut self, kernel: KernelId) -> &mut Entry {
        let (entry, evicted) = self.kernels.get_or_insert_with(kernel, Entry::default);
        self.long_whole -= usize::from(evicted.is_some_and(|old| old.is_long_whole));
        entry
    }

    /// Change what is known of a kernel.
    fn update(&mut self, kernel: KernelId, change: impl FnOnce(&mut Entry)) {
        let entry = self.entry(kernel);
        let before = entry.is_long_whole;
        change(entry);
        let after = entry.is_long_whole;
        self.long_whole = self.long_whole + usize::from(after) - usize::from(before);
    }

    fn show(&mut self) {
        self.known_gauge.set(self.kernels.len() as i64);
        self.long_whole_gauge.set(self.long_whole as i64);
    }

    /// Write down what was measured: the settings, tries saved up, kernels told of, the policy's own lines, and the
    /// entries, the one used last first.
    pub fn snapshot(&self, own: &str) -> Saved {
        let mut out = Writer::new(FORMAT, VERSION);
        out.put(&self.measured_under);
        out.put(&self.tries.credit());
        out.put(&self.told);
        out.put(&own.to_owned());
        out.pairs(self.kernels.latest(KEPT_MAX));
        out.finish()
    }

    /// Go on from that; the lines of the policy that wrote it. Nothing changes if it is refused.
    pub fn restore(&mut self, from: &Saved) -> Result<String, String> {
        let mut from = Reader::new(from, FORMAT, VERSION)?;
        let same_settings = from.get::<String>()? == self.measured_under;
        let (credit, told, own) = (from.get()?, from.get::<u32>()?, from.get()?);
        for (kernel, mut entry) in from.pairs::<KernelId, Entry>()?.into_iter().rev() {
            entry.ask_in = entry.ask_in.min(ASK_AGAIN_LAUNCHES - 1);
            if !same_settings {
                entry.look_again();
            }
            self.update(kernel, |known| *known = entry);
        }
        self.tries.put(credit);
        self.told = told.min(TOLD_MAX);
        self.show();
        Ok(own)
    }

    /// Long kernels that are known.
    pub fn known(&self) -> usize {
        self.kernels.len()
    }
}

/// Name a kernel that holds high priority up and why, once.
fn tell_long_whole(launch: &Launch) {
    let Some(profile) = host::kernel_profile(launch.kernel) else { return };
    let why = profile.why_whole(launch).unwrap_or("no other form is worth its cost");
    let (id, us, blocks) = (launch.kernel, launch.predicted_ns / 1_000, launch.grid_blocks);
    host::log(Level::Info, &format!("kernel {id} runs whole for {us} us ({blocks} blocks): {why}"));
}
