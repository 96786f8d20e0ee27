//! Kernels as a policy may see them: told of as they change, and put into another
//! table, so that what a policy saw can be shown to a policy again.
//!
//! A [`Profile`] keeps more than it tells (the samples behind a percentile). What is
//! put back with [`Profiles::adopt`] tells the same, and is not for measuring on.

use super::samples::Samples;
use super::table::{VACANT, place};
use super::{FormStats, FormView, KernelView, Profile, Profiles};
use crate::policy::KernelId;
use tally_contract::limits::{FORMS_MAX, KERNELS_MAX, TURNAROUND_SAMPLES};

impl Profile {
    /// What a policy can learn of it.
    pub fn view(&self) -> KernelView {
        KernelView {
            count: self.count,
            mean_ns: self.mean_ns,
            p50_ns: self.p50_ns(),
            p99_ns: self.p99_ns(),
            latest_ns: self.latest_ns(),
            demand: self.demand,
            waves_permille: self.waves_permille,
            transformation: self.transformation,
            forms: self.form_views().collect(),
        }
    }

    /// Its forms, in the order in which a policy gets them.
    pub fn form_views(&self) -> impl ExactSizeIterator<Item = FormView> {
        self.forms.iter().map(|(&(form, argument), stats)| FormView {
            form,
            argument,
            count: stats.count,
            mean_ns: stats.mean_ns,
            p50_ns: stats.p50_ns(),
            p99_ns: stats.p99_ns(),
            latest_ns: stats.latest_ns(),
            turnaround_ns: stats.turnaround_ns(),
        })
    }
}

impl Profiles {
    /// A list for [`Profiles::watch`] that never has to grow.
    pub fn watch_list() -> Vec<u32> {
        Vec::with_capacity(KERNELS_MAX)
    }

    /// From now on note which kernels are new or change, in `list`; with `None`, no
    /// more. Returns the list in use before, to be dropped where time does not matter.
    pub fn watch(&mut self, list: Option<Vec<u32>>) -> Option<Vec<u32>> {
        let mut old = std::mem::replace(&mut self.changed, list)?;
        for at in old.drain(..) {
            if let Some(p) = self.list.get_mut(at as usize) {
                p.changed = false;
            }
        }
        Some(old)
    }

    /// A kernel that is new or changed since it was returned last; in no order.
    pub fn next_changed(&mut self) -> Option<KernelId> {
        let list = self.changed.as_mut()?;
        while let Some(at) = list.pop() {
            let Some(p) = self.list.get_mut(at as usize) else { continue };
            p.changed = false;
            if p.id != VACANT {
                return Some(p.id);
            }
        }
        None
    }

    /// Note that a kernel changed. Each place is in the list once, so it never grows beyond
    /// [`KERNELS_MAX`].
    pub(super) fn note_changed(&mut self, kernel: KernelId) {
        let Some(list) = &mut self.changed else { return };
        let at = place(kernel);
        let Some(p) = self.list.get_mut(at).filter(|p| p.id == kernel) else { return };
        if !std::mem::replace(&mut p.changed, true) {
            list.push(at as u32);
        }
    }

    /// Make a kernel tell what `view` says. False if there is no such kernel or it
    /// says more forms than there may be.
    pub fn adopt(&mut self, kernel: KernelId, view: &KernelView) -> bool {
        let Some(p) = self.get_mut(kernel) else { return false };
        if view.forms.len() > FORMS_MAX {
            return false;
        }
        (p.count, p.mean_ns, p.predicted_ns) = (view.count, view.mean_ns, view.mean_ns);
        p.contended = false;
        p.samples = Samples::telling(view.p50_ns, view.p99_ns, view.latest_ns);
        (p.demand, p.waves_permille) = (view.demand, view.waves_permille);
        p.transformation = view.transformation;
        p.forms.clear();
        for f in &view.forms {
            let samples = Samples::telling(f.p50_ns, f.p99_ns, f.latest_ns);
            let mut stats =
                FormStats { count: f.count, mean_ns: f.mean_ns, samples, ..Default::default() };
            if f.turnaround_ns > 0 {
                stats.turnarounds = [f.turnaround_ns; TURNAROUND_SAMPLES];
                stats.yields = 1;
            }
            p.forms.insert((f.form, f.argument), stats);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Form;
    use crate::profile::{Demand, KernelKey, Transformation};

    fn key(x: u32) -> KernelKey {
        KernelKey { name: "k".into(), image: 1, grid: [x, 1, 1], block: [1; 3] }
    }

    #[test]
    fn what_changes_is_listed_once_and_only_while_watched() {
        let mut all = Profiles::default();
        let first = all.intern(&key(1)).unwrap();
        assert_eq!(all.next_changed(), None);
        assert!(all.watch(Some(Profiles::watch_list())).is_none());
        let second = all.intern(&key(2)).unwrap();
        all.record(second, 5);
        all.record(first, 5);
        all.set_transformation(first, Transformation::Preparable);
        let mut changed: Vec<_> = std::iter::from_fn(|| all.next_changed()).collect();
        changed.sort_unstable();
        assert_eq!(changed, [first, second]);
        for change in 0..6 {
            match change {
                0 => all.record_form(first, Form::Sliced, 3, 9),
                1 => all.record_turnaround(first, Form::Sliced, 3, 9),
                2 => all.restore(first, Default::default()),
                3 => all.set_demand(first, Demand { blocks_per_sm: 1, registers: 8 }),
                4 => all.set_sm_count(7),
                _ => assert!(all.forget(first)),
            }
            assert_eq!(all.next_changed(), Some(first), "change {change}");
        }
        all.intern(&key(2)).unwrap();
        assert_eq!(all.next_changed(), None, "seeing it again is no change");
        all.record(first, 5);
        assert!(all.watch(None).is_some());
        all.record(first, 5);
        assert_eq!(all.next_changed(), None);
        all.watch(Some(Profiles::watch_list()));
        all.record(first, 5);
        assert_eq!(all.next_changed(), Some(first), "not left marked by the watch before");
    }

    #[test]
    fn what_is_adopted_tells_the_same() {
        let mut all = Profiles::default();
        let id = all.intern(&key(1)).unwrap();
        for ns in 1..100 {
            all.record(id, ns * ns);
            all.record_form(id, Form::Preemptible, 0, ns);
            all.record_form(id, Form::Sliced, (ns % 20) as u32, ns);
            all.record_turnaround(id, Form::Preemptible, 0, 7 * ns);
        }
        all.set_transformation(id, Transformation::Ready { sliced: true, preemptible: true });
        all.set_sm_count(2);
        all.set_demand(id, Demand { blocks_per_sm: 3, registers: 40 });
        let view = all.get(id).unwrap().view();
        assert_eq!((view.forms.len(), view.waves_permille), (FORMS_MAX, 166));
        let mut other = Profiles::default();
        assert!(other.adopt_key(0, key(1)));
        assert!(other.adopt(0, &view) && !other.adopt(1, &view));
        assert_eq!(other.get(0).unwrap().view(), view);
        assert_eq!(other.mean_ns(0), all.mean_ns(id));
    }
}
