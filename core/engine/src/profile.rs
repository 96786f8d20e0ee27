//! Measured GPU time of each kernel.

mod samples;
mod table;
mod view;

pub use tally_contract::kernel::{Demand, FormView, KernelKey, KernelView, Transformation};

use crate::policy::{Form, KernelId};
use samples::Samples;
use std::collections::{BTreeMap, HashMap};
use tally_contract::limits::{FORMS_MAX, MEAN_WINDOW, PREDICTION_SAMPLES, TURNAROUND_SAMPLES};

/// Launches of earlier runs count as so many at most, so that what was kept neither
/// outweighs what is measured now nor tops the list of busy kernels for ever.
pub const KEPT_COUNT_MAX: u64 = MEAN_WINDOW;

/// What was kept outweighs no more than so many launches: if it is wrong (measured beside other
/// work by an earlier core, or on a busier machine), a few launches put it right.
const KEPT_WEIGHT: u64 = 4;

/// What was measured of a kernel in a form other than whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormStats {
    pub count: u64,
    /// Running mean of the measured times.
    pub mean_ns: u64,
    samples: Samples,
    pub contended: bool,
    turnarounds: [u64; TURNAROUND_SAMPLES],
    yields: u64,
}

impl FormStats {
    fn record(&mut self, measured_ns: u64) {
        if std::mem::take(&mut self.contended) {
            (self.count, self.samples) = (0, Samples::default());
        }
        self.count += 1;
        self.samples.push(measured_ns);
        self.mean_ns = running_mean(self.mean_ns, measured_ns, self.samples.pushed());
    }

    fn record_contended(&mut self, measured_ns: u64) {
        if self.samples.pushed() == 0 || self.contended {
            self.samples.push(measured_ns);
            (self.count, self.mean_ns, self.contended) = (1, self.samples.least_ns(), true);
        } else if is_clearly_less(measured_ns, self.mean_ns) {
            self.record(measured_ns);
        }
    }

    /// What was kept of an earlier run: its mean stands for the samples, its turnaround
    /// is one sample.
    pub fn kept(count: u64, mean_ns: u64, turnaround_ns: u64) -> Self {
        let samples = Samples::repeated(mean_ns, count.min(KEPT_WEIGHT));
        let mut stats = FormStats { count, mean_ns, samples, ..Default::default() };
        if turnaround_ns > 0 {
            stats.yielded_in(turnaround_ns);
        }
        stats
    }

    fn yielded_in(&mut self, turnaround_ns: u64) {
        self.turnarounds[(self.yields % TURNAROUND_SAMPLES as u64) as usize] = turnaround_ns;
        self.yields += 1;
    }

    /// Median of the latest `RECENT_SAMPLES` launches.
    pub fn p50_ns(&self) -> u64 {
        self.samples.p50_ns()
    }

    /// 99th percentile of the same launches.
    pub fn p99_ns(&self) -> u64 {
        self.samples.p99_ns()
    }

    /// GPU time of the latest measured launch; 0 if there is none.
    pub fn latest_ns(&self) -> u64 {
        self.samples.latest_ns()
    }

    /// Median of the recent times from being asked to yield until it had; 0 if it
    /// never was. Not a high percentile: of a few samples that is the largest, and one
    /// that met something else (the driver loading code, another kernel before it)
    /// would speak against the form for good.
    pub fn turnaround_ns(&self) -> u64 {
        let n = self.yields.min(TURNAROUND_SAMPLES as u64) as usize;
        if n == 0 {
            return 0;
        }
        let mut sorted = self.turnarounds;
        sorted[..n].sort_unstable();
        sorted[(n - 1) / 2]
    }
}

/// Measured times of one kernel.
#[derive(Clone, Debug)]
pub struct Profile {
    pub key: KernelKey,
    pub count: u64,
    pub mean_ns: u64,
    /// What the next launch is expected to take: the median of the latest
    /// samples. Not the mean: a kernel's first launch may include loading its
    /// code, some tens of milliseconds that would be believed for long.
    pub predicted_ns: u64,
    /// The kernel never ran alone: its times are the least measured beside other clients' work, so alone it
    /// takes no longer.
    pub contended: bool,
    /// The least of all of those, while it is so.
    pub(crate) least_ever_ns: u64,
    /// The latest times; those of earlier runs count as at most [`KEPT_WEIGHT`].
    samples: Samples,
    pub demand: Demand,
    waves_permille: u64,
    pub transformation: Transformation,
    /// Measured in other forms than whole, by form and its argument.
    pub forms: BTreeMap<(Form, u32), FormStats>,
    /// The kernel's id; [`table::VACANT`]: this place in the table is free.
    id: KernelId,
    /// Clients that may launch it.
    holders: u32,
    /// No client holds it: it is in the list of kernels whose place may be reused.
    idle: bool,
    news: bool,
    /// It is in the list of changes that [`Profiles::watch`] reads.
    changed: bool,
}

fn running_mean(mean_ns: u64, measured_ns: u64, count: u64) -> u64 {
    let weight = count.min(MEAN_WINDOW) as i128;
    let mean = mean_ns as i128;
    (mean + (measured_ns as i128 - mean) / weight) as u64
}

/// Whether a time is shorter by more than chance: otherwise the times below the median alone would count, and
/// draw it down.
fn is_clearly_less(measured_ns: u64, than_ns: u64) -> bool {
    measured_ns < than_ns / 4 * 3
}

impl Profile {
    pub fn new(key: KernelKey) -> Self {
        Profile {
            key,
            count: 0,
            mean_ns: 0,
            predicted_ns: 0,
            contended: false,
            least_ever_ns: 0,
            samples: Samples::default(),
            demand: Demand::default(),
            waves_permille: 0,
            transformation: Transformation::Unknown,
            forms: BTreeMap::new(),
            id: table::VACANT,
            holders: 0,
            idle: false,
            news: false,
            changed: false,
        }
    }

    /// Whether anything is known of it that another launch would have to show again.
    fn is_measured(&self) -> bool {
        self.count > 0
            || !self.forms.is_empty()
            || matches!(self.transformation, Transformation::WholeOnly(_))
    }

    fn record(&mut self, measured_ns: u64) {
        if std::mem::take(&mut self.contended) {
            (self.count, self.samples) = (0, Samples::default());
        }
        self.count += 1;
        self.samples.push(measured_ns);
        self.mean_ns = running_mean(self.mean_ns, measured_ns, self.samples.pushed());
        // The lower one of two in the middle: the smaller of a first sample
        // with loading time and a second without.
        self.predicted_ns = self.samples.median_of_ns(PREDICTION_SAMPLES);
    }

    /// A launch that ran beside other clients' work took so long: alone it takes no longer. The least of the latest is
    /// all that is known until it runs alone; afterwards it counts only against a time that is too long.
    fn record_contended(&mut self, measured_ns: u64) {
        if self.samples.pushed() == 0 || self.contended {
            self.samples.push(measured_ns);
            let least_ns = self.samples.least_ns();
            let ever_ns = if self.contended { self.least_ever_ns } else { u64::MAX };
            self.least_ever_ns = ever_ns.min(measured_ns);
            (self.count, self.contended) = (1, true);
            (self.mean_ns, self.predicted_ns) = (least_ns, least_ns);
        } else if !self.contended && is_clearly_less(measured_ns, self.predicted_ns) {
            self.record(measured_ns);
        }
    }

    fn form(&mut self, form: Form, argument: u32) -> Option<&mut FormStats> {
        if self.forms.len() >= FORMS_MAX && !self.forms.contains_key(&(form, argument)) {
            return None;
        }
        Some(self.forms.entry((form, argument)).or_default())
    }

    /// How long the next launch takes to yield when asked to, in a form: what was
    /// measured, else `None`.
    pub fn turnaround_ns(&self, form: Form, argument: u32) -> Option<u64> {
        let stats = self.forms.get(&(form, argument))?;
        Some(stats.turnaround_ns()).filter(|ns| *ns > 0)
    }

    /// What was kept of an earlier run; nothing measured in this one is lost.
    fn restore(&mut self, kept: Kept) {
        if self.samples.pushed() == 0 && kept.count > 0 {
            self.count = kept.count.min(KEPT_COUNT_MAX);
            self.mean_ns = kept.mean_ns;
            self.predicted_ns = kept.predicted_ns;
            // The spread is not kept: one launch at the old 99th percentile stands for it.
            let weight = self.count.min(KEPT_WEIGHT);
            let spread = u64::from(weight > 2);
            self.samples = Samples::repeated(kept.p99_ns, spread);
            (spread..weight).for_each(|_| self.samples.push(kept.predicted_ns));
        }
        for (form, argument, stats) in kept.forms {
            if self.forms.len() < FORMS_MAX {
                self.forms.entry((form, argument)).or_insert(stats);
            }
        }
        if self.demand == Demand::default() {
            self.demand = kept.demand;
        }
        if let Some(why) = kept.whole_only {
            self.transformation = Transformation::WholeOnly(why);
        }
    }

    /// How often its blocks fill the GPU, thousandths; 0: unknown.
    pub fn waves_permille(&self) -> u64 {
        self.waves_permille
    }

    /// Median of the latest `RECENT_SAMPLES` launches; 0 if none.
    pub fn p50_ns(&self) -> u64 {
        self.samples.p50_ns()
    }

    /// 99th percentile of the same launches; 0 if none.
    pub fn p99_ns(&self) -> u64 {
        self.samples.p99_ns()
    }

    /// GPU time of the latest launch measured whole; 0 if there is none.
    pub fn latest_ns(&self) -> u64 {
        self.samples.latest_ns()
    }
}

/// What is kept of a profile between two runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub count: u64,
    pub mean_ns: u64,
    /// What the next was expected to take.
    pub predicted_ns: u64,
    /// 99th percentile of the recent ones.
    pub p99_ns: u64,
    pub demand: Demand,
    pub forms: Vec<(Form, u32, FormStats)>,
    /// It must not be transformed, and why.
    pub whole_only: Option<&'static str>,
}

/// All kernels known: those that clients may launch, and what was measured of others.
///
/// An id is a place in the table and a count of how often the place was reused, so an id never comes to mean
/// another kernel. Whoever still holds the id of a kernel that was dropped (a policy, a launch in flight, a
/// log) finds nothing.
#[derive(Debug, Default)]
pub struct Profiles {
    ids: HashMap<KernelKey, KernelId>,
    list: Vec<Profile>,
    places: table::Places,
    /// SMs of the GPU; 0: unknown.
    sm_count: u32,
    /// Profiles changed since [`take_news`](Self::take_news) last took them.
    news: u32,
    changed: Option<Vec<u32>>,
}

impl Profiles {
    /// The profile of a kernel.
    pub fn get(&self, kernel: KernelId) -> Option<&Profile> {
        self.list.get(table::place(kernel)).filter(|p| p.id == kernel)
    }

    fn get_mut(&mut self, kernel: KernelId) -> Option<&mut Profile> {
        self.list.get_mut(table::place(kernel)).filter(|p| p.id == kernel)
    }

    /// Mean GPU time; 0 if never measured.
    pub fn mean_ns(&self, kernel: KernelId) -> u64 {
        self.get(kernel).map_or(0, |p| p.mean_ns)
    }

    /// Expected GPU time of the next launch; 0 if never measured.
    pub fn predicted_ns(&self, kernel: KernelId) -> u64 {
        self.get(kernel).map_or(0, |p| p.predicted_ns)
    }

    /// Add a measurement of a launch that ran whole.
    pub fn record(&mut self, kernel: KernelId, measured_ns: u64) {
        if let Some(p) = self.news_of(kernel) {
            p.record(measured_ns);
        }
    }

    /// Add a measurement of a launch that ran whole, beside other clients' work.
    pub fn record_contended(&mut self, kernel: KernelId, measured_ns: u64) {
        if let Some(p) = self.news_of(kernel) {
            p.record_contended(measured_ns);
        }
    }

    /// Add a measurement of a launch that ran in another form, beside other clients' work.
    pub fn record_form_contended(
        &mut self,
        kernel: KernelId,
        form: Form,
        argument: u32,
        measured_ns: u64,
    ) {
        let profile = self.news_of(kernel);
        if let Some(stats) = profile.and_then(|p| p.form(form, argument)) {
            stats.record_contended(measured_ns);
        }
    }

    /// Add a measurement of a launch in another form.
    pub fn record_form(&mut self, kernel: KernelId, form: Form, argument: u32, measured_ns: u64) {
        let profile = self.news_of(kernel);
        if let Some(stats) = profile.and_then(|p| p.form(form, argument)) {
            stats.record(measured_ns);
        }
    }

    /// A launch had yielded so long after it was asked to.
    pub fn record_turnaround(&mut self, kernel: KernelId, form: Form, argument: u32, ns: u64) {
        let profile = self.news_of(kernel);
        if let Some(stats) = profile.and_then(|p| p.form(form, argument)) {
            stats.yielded_in(ns);
        }
    }

    /// What a client found out about transforming a kernel. A verdict that it is only to be
    /// run whole stays.
    pub fn set_transformation(&mut self, kernel: KernelId, to: Transformation) {
        match self.get_mut(kernel) {
            Some(p) if !matches!(p.transformation, Transformation::WholeOnly(_)) => {
                p.transformation = to
            }
            _ => return,
        }
        self.note_changed(kernel);
        if matches!(to, Transformation::WholeOnly(_)) {
            self.news_of(kernel);
        }
    }

    /// What a kernel demands, as a client's driver said last.
    pub fn set_demand(&mut self, kernel: KernelId, demand: Demand) {
        let sm_count = self.sm_count;
        let Some(p) = self.get_mut(kernel).filter(|p| p.demand != demand) else { return };
        (p.demand, p.waves_permille) = (demand, demand.waves_permille(p.key.grid, sm_count));
        self.news_of(kernel);
    }

    /// The GPU's number of SMs, of which all waves are counted anew.
    pub fn set_sm_count(&mut self, sm_count: u32) {
        if std::mem::replace(&mut self.sm_count, sm_count) == sm_count {
            return;
        }
        for at in 0..self.list.len() {
            let p = &mut self.list[at];
            let waves_permille = p.demand.waves_permille(p.key.grid, sm_count);
            if std::mem::replace(&mut p.waves_permille, waves_permille) != waves_permille {
                let id = p.id;
                self.note_changed(id);
            }
        }
    }

    /// What an earlier run knew of a kernel. No news.
    pub fn restore(&mut self, kernel: KernelId, kept: Kept) {
        let sm_count = self.sm_count;
        if let Some(p) = self.get_mut(kernel) {
            p.restore(kept);
            p.waves_permille = p.demand.waves_permille(p.key.grid, sm_count);
            self.note_changed(kernel);
        }
    }

    /// The profile of a kernel that something is measured of now.
    fn news_of(&mut self, kernel: KernelId) -> Option<&mut Profile> {
        self.note_changed(kernel);
        let at = table::place(kernel);
        let profile = self.list.get_mut(at).filter(|p| p.id == kernel)?;
        self.news += u32::from(!std::mem::replace(&mut profile.news, true));
        Some(profile)
    }

    /// Whether [`Profiles::take_news`] has any kernel left.
    pub fn has_news(&self) -> bool {
        self.news > 0
    }

    /// The profile of a kernel if something was measured of it, or it was found not to
    /// be transformable, since this was called last.
    pub fn take_news(&mut self, kernel: KernelId) -> Option<&Profile> {
        let at = table::place(kernel);
        let profile = self.list.get_mut(at).filter(|p| p.id == kernel)?;
        if !std::mem::take(&mut profile.news) {
            return None;
        }
        self.news -= 1;
        Some(profile)
    }

    /// Forget what was measured of a kernel, and that it must not be transformed. False if
    /// there is no such kernel.
    pub fn forget(&mut self, kernel: KernelId) -> bool {
        self.take_news(kernel);
        self.note_changed(kernel);
        let Some(p) = self.get_mut(kernel) else { return false };
        (p.count, p.samples, p.contended) = (0, Samples::default(), false);
        p.mean_ns = 0;
        p.predicted_ns = 0;
        p.forms.clear();
        if matches!(p.transformation, Transformation::WholeOnly(_)) {
            p.transformation = Transformation::Unknown;
        }
        true
    }

    /// All profiles, by their places.
    pub fn iter(&self) -> impl Iterator<Item = (KernelId, &Profile)> {
        self.list.iter().filter(|p| p.id != table::VACANT).map(|p| (p.id, p))
    }
}

#[cfg(test)]
mod tests;
