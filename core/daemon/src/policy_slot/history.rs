//! Which policies were active, why each was loaded and unloaded, and what is kept of them to put one back: the
//! compiled component and the text of its configuration, so that it does not matter what became of the files.

use super::Source;
use crate::status;
use std::collections::VecDeque;
use tally_admin::{Disabled, LastDisabled, LoadedBecause, PolicyRecord, UnloadedBecause};
use tally_contract::limits::{POLICIES_KEPT_MAX, POLICY_RECORDS_MAX};
use tally_wasm_host::{Compiled, PolicyStatus, Saved};

/// Disabled policies that are remembered.
const DISABLED_MAX: usize = 32;

fn because(next: LoadedBecause) -> UnloadedBecause {
    match next {
        LoadedBecause::Start
        | LoadedBecause::Asked
        | LoadedBecause::Experiment
        | LoadedBecause::Unknown => UnloadedBecause::Replaced,
        LoadedBecause::FileChanged => UnloadedBecause::FileChanged,
        LoadedBecause::Rollback => UnloadedBecause::RolledBack,
        LoadedBecause::Fallback | LoadedBecause::Retry => UnloadedBecause::Disabled,
    }
}

/// What it takes to put a policy back.
#[derive(Clone)]
pub struct Kept<P = Compiled> {
    /// Its generation when it was active.
    pub generation: u64,
    pub same_as_generation: u64,
    /// Files that the policy was loaded from.
    pub source: Source,
    pub program: P,
    pub config_text: String,
    /// What it knew when it went.
    pub saved: Option<Saved>,
}

struct Entry<P> {
    record: PolicyRecord,
    config_text: String,
    program: Option<P>,
    saved: Option<Saved>,
}

impl<P: Clone> Entry<P> {
    fn content(&self) -> Content {
        Content { digest: self.record.digest.clone(), config_text: self.config_text.clone() }
    }

    fn kept(&self) -> Option<Kept<P>> {
        Some(Kept {
            generation: self.record.generation,
            same_as_generation: self.record.same_as_generation,
            source: self.record.source.clone()?,
            program: self.program.clone()?,
            config_text: self.config_text.clone(),
            saved: self.saved.clone(),
        })
    }
}

/// What makes a policy the same policy: component and configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// SHA-256 of the component.
    pub digest: String,
    pub config_text: String,
}

/// Oldest first; the last one is active.
pub struct History<P = Compiled> {
    entries: VecDeque<Entry<P>>,
    disabled: VecDeque<Content>,
}

impl<P> Default for History<P> {
    fn default() -> Self {
        History { entries: VecDeque::new(), disabled: VecDeque::new() }
    }
}

/// Why there is no going back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWayBack {
    #[error(
        "there is no earlier policy that was not disabled: `tallyctl policy history` shows what \
         is kept, `tallyctl policy load` loads another"
    )]
    Nothing,
    /// The generation never existed, or is too old.
    #[error(
        "generation {0} is not kept: `tallyctl policy history` shows which are (those of the last \
         {POLICIES_KEPT_MAX} different policies)"
    )]
    NotKept(u64),
    #[error("generation {0} is active already")]
    Active(u64),
}

impl<P: Clone> History<P> {
    /// A policy took over; the one before is gone for that reason.
    pub fn came(&mut self, record: PolicyRecord, config_text: String, program: Option<P>) {
        if let Some(old) = self.entries.back_mut() {
            old.record.unloaded_because = Some(because(record.loaded_because));
            old.record.unloaded_at_unix_s = Some(record.loaded_at_unix_s);
        }
        if record.loaded_because == LoadedBecause::Asked {
            // Somebody wants it in spite of everything: a clean slate.
            let content =
                Content { digest: record.digest.clone(), config_text: config_text.clone() };
            self.disabled.retain(|disabled| *disabled != content);
        }
        self.entries.push_back(Entry { record, config_text, program, saved: None });
        self.trim();
    }

    /// The last figures of the one that went, and what it knew.
    pub fn retired(
        &mut self,
        generation: u64,
        figures: Option<PolicyStatus>,
        saved: Option<Saved>,
    ) {
        let Some(entry) = self.entry_mut(generation) else { return };
        if let Some(figures) = figures {
            entry.record.decides = figures.decides;
            entry.record.events = figures.events;
            entry.record.faults = status::fault_counts(figures.faults);
            entry.record.last_fault = figures.last_fault.map(status::last_fault);
        }
        if saved.is_some() {
            entry.saved = saved;
        }
        self.trim();
    }

    /// The policy of this generation was disabled.
    pub fn disabled(&mut self, generation: u64, how: Disabled) {
        let Some(entry) = self.entry_mut(generation) else { return };
        entry.record.disabled = Some(how);
        let content = entry.content();
        if !self.disabled.contains(&content) {
            self.disabled.push_back(content);
        }
        if self.disabled.len() > DISABLED_MAX {
            self.disabled.pop_front();
        }
    }

    /// Whether a policy was disabled and nobody has asked for it since.
    pub fn is_disabled(&self, content: &Content) -> bool {
        self.disabled.contains(content)
    }

    /// Why a policy was last disabled, and which.
    pub fn last_disabled(&self) -> Option<LastDisabled> {
        let is_disabled = |entry: &'_ Entry<P>| entry.record.disabled.is_some();
        let entry = self.entries.iter().rev().find(|entry| is_disabled(entry))?;
        let how = entry.record.disabled.clone()?;
        Some(LastDisabled { generation: entry.record.generation, how })
    }

    /// All records, oldest first.
    pub fn records(&self) -> Vec<PolicyRecord> {
        let kept = |entry: &Entry<P>| PolicyRecord {
            kept: entry.program.is_some(),
            ..entry.record.clone()
        };
        self.entries.iter().map(kept).collect()
    }

    /// Of the last policy that became active.
    pub fn active_content(&self) -> Option<Content> {
        self.entries.back().map(Entry::content)
    }

    /// What the latest policy that kept anything knew.
    pub fn latest_saved(&self) -> Option<Saved> {
        self.entries.iter().rev().find_map(|entry| entry.saved.clone())
    }

    /// The last policy before the active one that differs from it and was not disabled.
    pub fn last_good(&self) -> Option<Kept<P>> {
        let active = self.entries.back()?.content();
        self.before(u64::MAX, &active)
    }

    /// The active policy, to be started again.
    pub fn same(&self) -> Option<Kept<P>> {
        self.entries.back()?.kept()
    }

    /// Where a rollback leads: to that generation, or else to the last good one. Going
    /// back again leads further back.
    ///
    /// # Errors
    /// If there is none, or it is not kept.
    pub fn rollback(&self, to: Option<u64>) -> Result<Kept<P>, NoWayBack> {
        let Some(current) = self.entries.back() else { return Err(NoWayBack::Nothing) };
        let Some(to) = to else {
            let before = self.before(current.record.same_as_generation, &current.content());
            return before.ok_or(NoWayBack::Nothing);
        };
        if to == current.record.generation {
            return Err(NoWayBack::Active(to));
        }
        let entry = self.entries.iter().find(|entry| entry.record.generation == to);
        entry.and_then(Entry::kept).ok_or(NoWayBack::NotKept(to))
    }

    /// The latest kept before a generation, other than `content` and not disabled.
    fn before(&self, generation: u64, content: &Content) -> Option<Kept<P>> {
        let earlier = self.entries.iter().rev().filter(|e| e.record.generation < generation);
        let mut good = earlier.filter(|entry| {
            let its = entry.content();
            entry.program.is_some() && its != *content && !self.is_disabled(&its)
        });
        good.next().and_then(Entry::kept)
    }

    fn entry_mut(&mut self, generation: u64) -> Option<&mut Entry<P>> {
        self.entries.iter_mut().rev().find(|entry| entry.record.generation == generation)
    }

    /// Forget old records, programs of policies that are not among the latest, and all
    /// but the latest state of each.
    fn trim(&mut self) {
        while self.entries.len() > POLICY_RECORDS_MAX {
            self.entries.pop_front();
        }
        let mut contents: Vec<(Content, bool)> = Vec::new();
        for entry in self.entries.iter_mut().rev().filter(|entry| entry.program.is_some()) {
            let content = entry.content();
            let known = contents.iter().position(|(known, _)| *known == content);
            let Some(at) = known else {
                if contents.len() < POLICIES_KEPT_MAX {
                    contents.push((content, entry.saved.is_some()));
                } else {
                    (entry.program, entry.saved) = (None, None);
                }
                continue;
            };
            if contents[at].1 {
                entry.saved = None;
            }
            contents[at].1 |= entry.saved.is_some();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct Paper(&'static str);

    impl Paper {
        fn name(&self) -> &str {
            self.0
        }
    }

    type History = super::History<Paper>;

    /// Policies by name, each put active for a reason.
    fn came(
        history: &mut History,
        name: &'static str,
        loaded_because: LoadedBecause,
        same_as_generation: Option<u64>,
    ) -> u64 {
        let generation = history.entries.back().map_or(0, |e| e.record.generation) + 1;
        let record = PolicyRecord {
            generation,
            name: name.into(),
            digest: name.into(),
            signed_by: None,
            source: Some(Source { file: name.into(), config_file: None }),
            loaded_because,
            same_as_generation: same_as_generation.unwrap_or(generation),
            loaded_at_unix_s: generation,
            ..PolicyRecord::default()
        };
        history.came(record, String::new(), Some(Paper(name)));
        generation
    }

    fn disable(history: &mut History, generation: u64) {
        let how = Disabled { kind: "trap".into(), message: "m".into(), at_unix_s: 0 };
        history.disabled(generation, how);
    }

    fn saved(version: u32) -> Option<Saved> {
        Some(Saved { format: "f".into(), version, data: vec![] })
    }

    #[test]
    fn going_back_again_leads_further_back() {
        let mut h = History::default();
        for name in ["a", "b", "c"] {
            came(&mut h, name, LoadedBecause::Asked, None);
        }
        let back = h.rollback(None).unwrap();
        assert_eq!((back.generation, back.program.name()), (2, "b"));
        came(&mut h, "b", LoadedBecause::Rollback, Some(back.same_as_generation));
        let back = h.rollback(None).unwrap();
        assert_eq!(back.generation, 1);
        came(&mut h, "a", LoadedBecause::Rollback, Some(back.same_as_generation));
        assert_eq!(h.rollback(None).err(), Some(NoWayBack::Nothing));
        assert_eq!(h.rollback(Some(3)).unwrap().program.name(), "c");
        assert_eq!(h.rollback(Some(5)).err(), Some(NoWayBack::Active(5)));
        assert_eq!(h.rollback(Some(9)).err(), Some(NoWayBack::NotKept(9)));
    }

    #[test]
    fn the_same_policy_again_is_no_way_back() {
        let mut h = History::default();
        for name in ["a", "b", "b", "b"] {
            came(&mut h, name, LoadedBecause::Asked, None);
        }
        assert_eq!(h.rollback(None).unwrap().generation, 1);
        assert_eq!(h.last_good().unwrap().generation, 1);
    }

    #[test]
    fn disabled_policies_are_passed_over_until_somebody_asks() {
        let mut h = History::default();
        let [_, b, c] =
            ["a", "b", "c"].map(|name| came(&mut h, name, LoadedBecause::FileChanged, None));
        disable(&mut h, b);
        disable(&mut h, c);
        assert_eq!(h.last_good().unwrap().program.name(), "a");
        assert_eq!(h.last_disabled().unwrap().generation, c);
        came(&mut h, "b", LoadedBecause::FileChanged, None);
        came(&mut h, "d", LoadedBecause::FileChanged, None);
        assert_eq!(h.last_good().unwrap().program.name(), "a", "its file changed, that is all");
        came(&mut h, "b", LoadedBecause::Asked, None);
        came(&mut h, "d", LoadedBecause::Asked, None);
        assert_eq!(h.last_good().unwrap().program.name(), "b");
        disable(&mut h, 7);
        assert_eq!(h.same().unwrap().program.name(), "d");
    }

    #[test]
    fn each_says_why_it_went() {
        let mut h = History::default();
        for (name, why) in [
            ("a", LoadedBecause::Start),
            ("b", LoadedBecause::Asked),
            ("c", LoadedBecause::FileChanged),
            ("b", LoadedBecause::Rollback),
            ("a", LoadedBecause::Fallback),
        ] {
            came(&mut h, name, why, None);
        }
        let unloaded_because: Vec<_> = h.records().iter().map(|r| r.unloaded_because).collect();
        let expected = [
            UnloadedBecause::Replaced,
            UnloadedBecause::FileChanged,
            UnloadedBecause::RolledBack,
            UnloadedBecause::Disabled,
        ];
        assert_eq!(unloaded_because[..4], expected.map(Some));
        assert_eq!((unloaded_because[4], h.records()[3].unloaded_at_unix_s), (None, Some(5)));
    }

    #[test]
    fn what_is_kept_is_bounded_by_different_policies_not_by_reloads() {
        let mut h = History::default();
        let first = came(&mut h, "first", LoadedBecause::Asked, None);
        for _ in 0..40 {
            came(&mut h, "x", LoadedBecause::Asked, None);
            let generation = came(&mut h, "y", LoadedBecause::Asked, None);
            h.retired(generation, None, saved(1));
        }
        assert_eq!(h.records().len(), POLICY_RECORDS_MAX);
        assert!(h.rollback(Some(first)).is_err(), "too many reloads ago to be listed");
        assert_eq!(h.entries.iter().filter(|e| e.saved.is_some()).count(), 1);
        for name in ["1", "2", "3", "4", "5", "6", "7"] {
            came(&mut h, name, LoadedBecause::Asked, None);
        }
        let kept: Vec<_> = h.records().into_iter().filter(|r| r.kept).map(|r| r.name).collect();
        assert!(kept.contains(&"y".to_owned()) && !kept.contains(&"x".to_owned()), "{kept:?}");
        assert_eq!(h.last_good().unwrap().program.name(), "6");
    }

    #[test]
    fn what_was_profiled_last_is_found() {
        let mut h = History::default();
        let a = came(&mut h, "a", LoadedBecause::Asked, None);
        h.retired(a, None, saved(1));
        let b = came(&mut h, "b", LoadedBecause::Asked, None);
        h.retired(b, None, None);
        came(&mut h, "c", LoadedBecause::Asked, None);
        assert_eq!(h.latest_saved(), saved(1));
        assert_eq!(h.rollback(Some(a)).unwrap().saved, saved(1));
    }
}
