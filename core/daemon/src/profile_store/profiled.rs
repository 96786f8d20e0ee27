//! What is kept of a GPU's kernels: figures of each, verdicts of some. Plain values:
//! read by the dispatch thread, changed by the control plane only.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_contract::limits::SMS_MAX;
use tally_engine::policy::Form;
use tally_engine::profile::{
    Demand, FormStats, KEPT_COUNT_MAX, Kept, KernelKey, Profile, Transformation,
};
use tally_ipc::layout::Report;
use tally_rewriter::TransformRefusal;

/// What profiles are of: times measured on another GPU, on another part of it, or
/// under another driver (which compiles PTX) would be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// Its UUID, two little-endian words.
    pub uuid: [u64; 2],
    pub sm_count: u32,
    pub driver_version: u32,
}

impl Device {
    /// The device that a client reports; `None` before its first launch, or if it has no UUID.
    pub fn of(report: &Report) -> Option<Self> {
        // Written last.
        let sm_count = report.sm_count.load(Acquire);
        let uuid = [0, 1].map(|i| report.device_uuid[i].load(Relaxed));
        let driver_version = report.driver_version.load(Relaxed);
        ((1..=SMS_MAX).contains(&sm_count) && uuid != [0, 0]).then_some(Device {
            uuid,
            sm_count,
            driver_version,
        })
    }
}

/// A kernel in a form other than whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormFigures {
    pub form: Form,
    /// Blocks of a slice, or SMs.
    pub argument: u32,
    pub count: u64,
    pub mean_ns: u64,
    pub turnaround_ns: u64,
}

/// A kernel's measured times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Measured launches that ran whole.
    pub count: u64,
    pub mean_ns: u64,
    /// What the next was expected to take.
    pub predicted_ns: u64,
    /// 99th percentile of the recent ones.
    pub p99_ns: u64,
    pub demand: Demand,
    pub forms: Vec<FormFigures>,
}

impl Figures {
    /// GPU time measured in all; what least of is evicted first.
    pub fn total_ns(&self) -> u64 {
        let forms = self.forms.iter().map(|f| (f.count, f.mean_ns));
        forms
            .chain([(self.count, self.mean_ns)])
            .fold(0, |all, (n, ns)| all.saturating_add(n.saturating_mul(ns)))
    }

    /// With launches of earlier runs counted as few: see [`KEPT_COUNT_MAX`].
    pub fn aged(mut self) -> Self {
        self.count = self.count.min(KEPT_COUNT_MAX);
        for f in &mut self.forms {
            f.count = f.count.min(KEPT_COUNT_MAX);
        }
        self
    }

    fn kept(&self) -> Kept {
        let form = |f: &FormFigures| {
            (f.form, f.argument, FormStats::kept(f.count, f.mean_ns, f.turnaround_ns))
        };
        Kept {
            count: self.count,
            mean_ns: self.mean_ns,
            predicted_ns: self.predicted_ns,
            p99_ns: self.p99_ns,
            demand: self.demand,
            forms: self.forms.iter().map(form).collect(),
            whole_only: None,
        }
    }
}

/// What a run profiled of a kernel.
#[derive(Clone, Debug)]
pub struct News {
    pub key: KernelKey,
    pub figures: Figures,
    /// Why it is only run whole, if it is; see `TransformRefusal::text`.
    pub whole_only: Option<&'static str>,
}

impl From<&Profile> for News {
    fn from(p: &Profile) -> Self {
        // Times that others' work is in are not kept: the next core would take them for its own.
        let alone = |contended: bool, ns: u64| if contended { 0 } else { ns };
        let forms = p.forms.iter().map(|(&(form, argument), stats)| FormFigures {
            form,
            argument,
            count: alone(stats.contended, stats.count),
            mean_ns: alone(stats.contended, stats.mean_ns),
            turnaround_ns: stats.turnaround_ns(),
        });
        News {
            key: p.key.clone(),
            figures: Figures {
                count: alone(p.contended, p.count),
                mean_ns: alone(p.contended, p.mean_ns),
                predicted_ns: alone(p.contended, p.predicted_ns),
                p99_ns: alone(p.contended, p.p99_ns()),
                demand: p.demand,
                forms: forms.collect(),
            },
            whole_only: match p.transformation {
                Transformation::WholeOnly(why) => Some(why),
                _ => None,
            },
        }
    }
}

/// What is known of the kernels of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profiled {
    kernels: HashMap<KernelKey, Figures>,
    /// Reasons by image, then by the kernel's name.
    verdicts: HashMap<u128, BTreeMap<String, TransformRefusal>>,
}

/// All files that were found at start.
pub type Loaded = HashMap<Device, Arc<Profiled>>;

impl Profiled {
    /// What the engine is to know of a kernel that it sees for the first time.
    pub fn kept(&self, key: &KernelKey) -> Option<Kept> {
        let figures = self.kernels.get(key);
        let verdict = self.verdict(key.image, &key.name);
        if figures.is_none() && verdict.is_none() {
            return None;
        }
        let kept = figures.map(Figures::kept).unwrap_or_default();
        Some(Kept { whole_only: verdict.map(TransformRefusal::text), ..kept })
    }

    /// Why a kernel must not be transformed.
    pub fn verdict(&self, image: u128, name: &str) -> Option<TransformRefusal> {
        self.verdicts.get(&image)?.get(name).copied()
    }

    pub fn kernels(&self) -> impl ExactSizeIterator<Item = (&KernelKey, &Figures)> {
        self.kernels.iter()
    }

    /// Kernels that are not transformed: image, kernel name and reason.
    pub fn verdicts(&self) -> impl Iterator<Item = (u128, &str, TransformRefusal)> {
        self.verdicts.iter().flat_map(|(&image, names)| {
            names.iter().map(move |(name, &why)| (image, name.as_str(), why))
        })
    }

    /// Take figures in. A kernel whose image is not known is left out: another
    /// program's of the same name would be taken for it.
    pub fn set_figures(&mut self, key: KernelKey, figures: Figures) -> bool {
        let any = key.image != 0 && (figures.count > 0 || !figures.forms.is_empty());
        any && self.kernels.insert(key, figures.clone()).as_ref() != Some(&figures)
    }

    /// Take a verdict in, if it is one that is worth keeping.
    pub fn set_verdict(&mut self, image: u128, name: String, why: TransformRefusal) -> bool {
        let kept = image != 0 && why.is_profiled();
        kept && self.verdicts.entry(image).or_default().insert(name, why) != Some(why)
    }

    /// Take in what a run profiled. True if that changed anything.
    pub fn take(&mut self, news: News) -> bool {
        let News { key, figures, whole_only } = news;
        let verdict = match whole_only.and_then(TransformRefusal::from_text) {
            Some(why) => self.set_verdict(key.image, key.name.clone(), why),
            None => false,
        };
        self.set_figures(key, figures) | verdict
    }

    /// Keep at most so many kernels, and so many verdicts: those with the most
    /// measured GPU time.
    pub fn trim(&mut self, most: usize) {
        if self.kernels.len() > most {
            let mut stays = the_most(self.kernels.values().map(Figures::total_ns).collect(), most);
            self.kernels.retain(|_, figures| stays(figures.total_ns()));
        }
        if self.verdicts().count() > most {
            let mut times: HashMap<(u128, &str), u64> = HashMap::new();
            for (key, figures) in &self.kernels {
                let all = times.entry((key.image, &key.name)).or_default();
                *all = all.saturating_add(figures.total_ns());
            }
            let time =
                |image: u128, name: &str| times.get(&(image, name)).copied().unwrap_or_default();
            let mut stays = the_most(self.verdicts().map(|(i, n, _)| time(i, n)).collect(), most);
            self.verdicts.retain(|&image, names| {
                names.retain(|name, _| stays(time(image, name)));
                !names.is_empty()
            });
        }
    }
}

/// Tells the `most` largest of `values` from the rest; each is to be asked about once.
fn the_most(mut sorted: Vec<u64>, most: usize) -> impl FnMut(u64) -> bool {
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let least = most.checked_sub(1).and_then(|last| sorted.get(last)).copied();
    let mut ties = sorted.iter().take(most).filter(|v| Some(**v) == least).count();
    move |value| match least {
        None => false,
        Some(least) if value == least => {
            let stays = ties > 0;
            ties = ties.saturating_sub(1);
            stays
        }
        Some(least) => value > least,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn key(name: &str, image: u128, x: u32) -> KernelKey {
        KernelKey { name: name.into(), image, grid: [x, 1, 1], block: [32, 1, 1] }
    }

    pub fn figures(count: u64, mean_ns: u64) -> Figures {
        Figures { count, mean_ns, predicted_ns: mean_ns, p99_ns: mean_ns, ..Figures::default() }
    }

    #[test]
    fn news_changes_what_is_known_once() {
        let mut all = Profiled::default();
        let news = |whole_only| News { key: key("k", 7, 1), figures: figures(3, 10), whole_only };
        assert!(all.take(news(None)));
        assert!(!all.take(news(None)), "nothing new");
        assert!(
            !all.take(news(Some(TransformRefusal::GridSync.text()))),
            "seen without running it"
        );
        assert!(all.take(news(Some(TransformRefusal::BlocksWaited.text()))));
        assert!(!all.take(news(Some(TransformRefusal::BlocksWaited.text()))));
        let kept = all.kept(&key("k", 7, 1)).unwrap();
        assert_eq!((kept.count, kept.whole_only), (3, Some(TransformRefusal::BlocksWaited.text())));
        // The verdict is of the kernel, whatever its grid; the times are not.
        let kept = all.kept(&key("k", 7, 2)).unwrap();
        assert_eq!((kept.count, kept.whole_only), (0, Some(TransformRefusal::BlocksWaited.text())));
        assert!(all.kept(&key("k", 8, 1)).is_none());
    }

    #[test]
    fn kernels_without_an_image_are_not_kept() {
        let mut all = Profiled::default();
        let whole_only = Some(TransformRefusal::BlocksWaited.text());
        let graph = News { key: key("graph:3", 0, 3), figures: figures(3, 10), whole_only };
        assert!(!all.take(graph));
        assert_eq!(all, Profiled::default());
    }

    #[test]
    fn the_least_measured_go_first() {
        let mut all = Profiled::default();
        for x in 0..10 {
            all.set_figures(key(&format!("k{x}"), 1, x), figures(1, u64::from(x).max(3)));
            all.set_verdict(1, format!("k{x}"), TransformRefusal::BlocksWaited);
        }
        all.trim(4);
        let mut left: Vec<u64> = all.kernels().map(|(_, f)| f.mean_ns).collect();
        left.sort_unstable();
        assert_eq!(left, [6, 7, 8, 9]);
        assert_eq!(all.verdicts().count(), 4);
        assert!(all.verdict(1, "k9").is_some() && all.verdict(1, "k0").is_none());
        for x in 20..30 {
            all.set_figures(key("tie", 1, x), figures(1, 5));
        }
        all.trim(6);
        assert_eq!(all.kernels().len(), 6);
        all.trim(0);
        assert_eq!((all.kernels().len(), all.verdicts().count()), (0, 0));
    }
}
