//! The long kernels that are known, in bounded memory and without allocating after
//! the start: a set-associative table, as caches are. A kernel's id gives its set; in
//! a full set the one not launched for longest makes room, and starts anew if it
//! comes back.

use crate::learn::Entry;
use tally_sdk::KernelId;

/// Sets, and kernels in each: 4 096 long kernels. One training step has some hundreds.
const SETS: usize = 1_024;
const WAYS: usize = 4;

/// The table.
#[derive(Debug)]
pub struct Table {
    entries: Vec<Entry>,
    /// When each was last asked for; 0: free. Apart from the entries, so that finding the
    /// few that are used does not go through all of their memory: decisions wait for it.
    used: Vec<u64>,
    uses: u64,
    known: usize,
    long_whole: usize,
}

impl Table {
    /// An empty one. All the memory that it will ever use.
    pub fn new() -> Self {
        Table {
            entries: vec![Entry::new(KernelId::MAX); SETS * WAYS],
            used: vec![0; SETS * WAYS],
            uses: 0,
            known: 0,
            long_whole: 0,
        }
    }

    /// What is known of a kernel; an empty entry if it is new.
    pub fn entry(&mut self, kernel: KernelId) -> &mut Entry {
        self.uses += 1;
        let first = kernel as usize % SETS * WAYS;
        let mut set = first..first + WAYS;
        let known = set.find(|&at| self.used[at] > 0 && self.entries[at].kernel == kernel);
        let at = known.unwrap_or_else(|| {
            // A free one was used at 0, before all others.
            let at = (first..first + WAYS).min_by_key(|&at| self.used[at]).unwrap_or(first);
            self.known += usize::from(self.used[at] == 0);
            self.long_whole -= usize::from(self.entries[at].is_long_whole);
            self.entries[at] = Entry::new(kernel);
            at
        });
        self.used[at] = self.uses;
        &mut self.entries[at]
    }

    /// Change an entry, keeping count of the long kernels that run whole.
    pub fn update<T>(&mut self, kernel: KernelId, change: impl FnOnce(&mut Entry) -> T) -> T {
        let entry = self.entry(kernel);
        let before = entry.is_long_whole;
        let changed = change(entry);
        let after = entry.is_long_whole;
        self.long_whole = self.long_whole + usize::from(after) - usize::from(before);
        changed
    }

    /// All entries, the one used last first.
    pub fn latest_first(&self) -> impl Iterator<Item = &Entry> {
        let mut used: Vec<usize> = (0..SETS * WAYS).filter(|&at| self.used[at] > 0).collect();
        used.sort_unstable_by_key(|&at| std::cmp::Reverse(self.used[at]));
        used.into_iter().map(|at| &self.entries[at])
    }

    /// Put an entry in, as if it had been used now.
    pub fn put(&mut self, entry: Entry) {
        self.update(entry.kernel, |slot| *slot = entry);
    }

    /// Kernels in it.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Of those, the long ones that can only run whole.
    pub fn long_whole(&self) -> usize {
        self.long_whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::Choice;

    fn mark(table: &mut Table, kernel: KernelId) {
        table.update(kernel, |entry| entry.chosen = Choice::Slice(kernel));
    }

    fn marked(table: &mut Table, kernel: KernelId) -> bool {
        table.entry(kernel).chosen == Choice::Slice(kernel)
    }

    #[test]
    fn entries_are_found_again() {
        let mut table = Table::new();
        (0..4_096).for_each(|kernel| mark(&mut table, kernel));
        assert!((0..4_096).all(|kernel| marked(&mut table, kernel)));
        assert_eq!(table.known(), 4_096);
    }

    #[test]
    fn in_a_full_set_the_one_not_used_for_longest_makes_room() {
        let mut table = Table::new();
        let ids: Vec<KernelId> = (0..5).map(|n| 7 + n * SETS as u32).collect();
        ids[..4].iter().for_each(|&id| mark(&mut table, id));
        assert!(marked(&mut table, ids[0]));
        mark(&mut table, ids[4]);
        assert_eq!(table.known(), 4);
        for (at, &id) in ids.iter().enumerate().rev().filter(|(at, _)| *at != 1) {
            assert!(marked(&mut table, id), "{at}");
        }
        assert!(!marked(&mut table, ids[1]), "it starts anew");
    }

    #[test]
    fn it_stays_within_its_size_whatever_comes() {
        let mut table = Table::new();
        let bytes = table.entries.len() * (size_of::<Entry>() + size_of::<u64>());
        assert!(bytes < 4 << 20, "{bytes}");
        (0..100_000_u32).for_each(|n| mark(&mut table, n.wrapping_mul(2_654_435_761)));
        assert_eq!(table.entries.len(), SETS * WAYS);
        assert!(table.known() <= SETS * WAYS);
    }

    #[test]
    fn the_count_of_long_whole_kernels_follows_changes_and_evictions() {
        let mut table = Table::new();
        table.update(7, |entry| entry.is_long_whole = true);
        table.update(8, |entry| entry.is_long_whole = true);
        assert_eq!(table.long_whole(), 2);
        table.update(8, |entry| entry.is_long_whole = false);
        assert_eq!(table.long_whole(), 1);
        (1..5).for_each(|n| mark(&mut table, 7 + n * SETS as u32));
        assert_eq!(table.long_whole(), 0);
    }
}
