//! The form of each launch that may start beside a high-priority client.
//!
//! Usual paths first: a launch predicted to be within the bound runs whole without a
//! look at anything; a long kernel that is known runs in its chosen form. Only a new
//! kernel, one whose offers changed, one due for review, or a try asks the core for
//! the kernel's profile, which costs a call and allocates.

use crate::candidates::{candidates, has_boundaries};
use crate::choice::Choice;
use crate::graph;
use crate::learn::Entry;
use crate::metrics::Metrics;
use crate::saved::{Reader, Writer, fingerprint};
use crate::settings::Settings;
use crate::share::Share;
use crate::table::Table;
use tally_sdk::{CutState, Decision, KernelId, Launch, LaunchFlags, Level, Saved, host};

/// A cut form that was asked for is asked for again after so many launches of the same client: the
/// core may have been too busy to make it. Each client has cut forms of its own, for kernels of the same name, too.
const ASK_AGAIN_LAUNCHES: u32 = 256;
/// Kernels named in the log because they can only run whole.
const TOLD_MAX: u32 = 32;

/// Kernels kept over a reload, those launched last: decisions wait while they are written
/// down. One training step has some hundreds.
pub const KEPT_MAX: usize = 1_024;

/// What is known of kernels, and of the choices made.
#[derive(Debug)]
pub struct Forms {
    settings: Settings,
    /// Of the settings at first: what was learnt belongs to them.
    configured: u64,
    table: Table,
    share: Share,
    metrics: Metrics,
    told: u32,
}

impl Forms {
    /// Nothing is known.
    pub fn new(settings: Settings) -> Self {
        Forms {
            configured: fingerprint(&settings.to_string()),
            settings,
            table: Table::new(),
            share: Share::new(settings.explore_permille),
            metrics: Metrics::new(),
            told: 0,
        }
    }

    /// The same settings for another way to share the GPU, before anything was decided.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// The form of a launch that starts now.
    pub fn decide(&mut self, launch: &Launch) -> Decision {
        self.share.earn();
        let decision = if !self.settings.cut || launch.predicted_ns <= self.bound_ns(launch) {
            // Never measured is 0: it has to run whole to be.
            Decision::Run(0)
        } else if launch.flags.contains(LaunchFlags::GRAPH) {
            self.graph(launch)
        } else if launch.kernel == KernelId::MAX {
            // One id for many kernels: nothing to learn.
            Decision::Run(0)
        } else {
            self.kernel(launch)
        };
        self.metrics.launched(launch.now_ns, ran_as(decision, launch));
        decision
    }

    /// Write down what was learnt.
    pub fn snapshot(&self) -> Saved {
        let mut out = Writer::new();
        out.number(self.configured);
        out.number(self.share.credit());
        out.number(self.told.into());
        for entry in self.table.latest(KEPT_MAX) {
            if !out.has_room() {
                break;
            }
            entry.write(&mut out);
        }
        out.finish()
    }

    /// Go on from that. Nothing changes if it is refused.
    pub fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let mut from = Reader::new(from)?;
        let same_settings = from.number()? == self.configured;
        let (credit, told) = (from.number()?, from.small()?);
        let mut entries = Vec::new();
        while !from.is_done() {
            entries.push(Entry::read(&mut from)?);
        }
        for mut entry in entries.into_iter().rev() {
            entry.ask_in = entry.ask_in.min(ASK_AGAIN_LAUNCHES - 1);
            if !same_settings {
                entry.look_again();
            }
            self.table.put(entry);
        }
        self.share.put(credit);
        self.told = told.min(TOLD_MAX);
        self.metrics.show(self.table.known(), self.table.long_whole());
        Ok(())
    }

    /// Hand the counts over.
    pub fn hand_over(&mut self) {
        self.metrics.hand_over();
    }

    fn bound_ns(&self, launch: &Launch) -> u64 {
        if launch.flags.contains(LaunchFlags::GRAPH) { 0 } else { self.settings.turnaround_ns_max }
    }

    fn graph(&mut self, launch: &Launch) -> Decision {
        let choice = graph::choose(launch, &self.settings);
        if choice != Choice::Whole && !choice.is_offered(launch.flags) {
            return self.ask(launch, choice);
        }
        choice.decision()
    }

    fn kernel(&mut self, launch: &Launch) -> Decision {
        if launch.can_prepare() && !launch.can_preempt() && has_boundaries(launch) {
            let asked = self.ask(launch, Choice::Preemptible);
            if asked != Decision::Run(0) {
                return asked;
            }
        }
        let entry = self.table.entry(launch.kernel);
        let stands = entry.stands(launch);
        // What is worth trying may have been measured since, so look first.
        if !stands || (entry.next.is_some() && self.share.allows()) {
            self.review(launch);
        }
        let entry = self.table.entry(launch.kernel);
        if let Some(next) = entry.next
            && self.share.allows()
        {
            entry.count_try(next, &candidates(launch, &self.settings));
            self.share.spend();
            self.metrics.explored();
            return next.decision();
        }
        entry.chosen.decision()
    }

    /// Answer with a form that is not there yet, so that it is made; not each time.
    fn ask(&mut self, launch: &Launch, choice: Choice) -> Decision {
        let entry = self.table.entry(launch.kernel);
        if entry.ask_in > 0 && entry.asked_for == Some(launch.client) {
            entry.ask_in -= 1;
            return Decision::Run(0);
        }
        entry.ask_in = ASK_AGAIN_LAUNCHES - 1;
        entry.asked_for = Some(launch.client);
        self.metrics.requested();
        choice.decision()
    }

    fn review(&mut self, launch: &Launch) {
        let settings = &self.settings;
        // Without another form there is nothing to compare.
        let profile = if candidates(launch, settings).len() > 1 {
            host::kernel_profile(launch.kernel)
        } else {
            None
        };
        let tell = self.table.update(launch.kernel, |entry| {
            entry.review(launch, profile.as_ref(), settings);
            let tell = entry.is_long_whole && !entry.is_told;
            entry.is_told |= tell;
            tell
        });
        if tell && self.told < TOLD_MAX {
            self.told += 1;
            tell_long_whole(launch);
        }
        self.metrics.show(self.table.known(), self.table.long_whole());
    }

    /// Long kernels in the table.
    #[cfg(test)]
    pub fn known(&self) -> usize {
        self.table.known()
    }
}

/// What the core makes of a decision: one that is not on offer runs whole.
fn ran_as(decision: Decision, launch: &Launch) -> Choice {
    let choice = match decision {
        Decision::Preemptible => Choice::Preemptible,
        Decision::Slice(blocks) => Choice::Slice(blocks),
        Decision::Partition(sms) => Choice::Partition(sms),
        Decision::Run(_) | Decision::Hold(_) => Choice::Whole,
    };
    if choice.is_offered(launch.flags) { choice } else { Choice::Whole }
}

/// Name a kernel that holds high priority up and why, once.
fn tell_long_whole(launch: &Launch) {
    let Some(profile) = host::kernel_profile(launch.kernel) else { return };
    let why = match &profile.cut {
        CutState::WholeOnly(why) => why.as_str(),
        _ if !has_boundaries(launch) => "all its blocks start at once",
        _ if !launch.can_slice() && !launch.can_preempt() => "no cut form is on offer",
        _ => "no cut form is worth its cost",
    };
    let (us, blocks) = (launch.predicted_ns / 1_000, launch.grid_blocks);
    // Names have to be granted (`kernel-identity`).
    let name = match &*profile.name {
        "" => format!("kernel {}", launch.kernel),
        name => name.to_owned(),
    };
    host::log(Level::Info, &format!("{name} runs whole for {us} us ({blocks} blocks): {why}"));
}
