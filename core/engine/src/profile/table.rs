//! Places in the table of kernels: taken at first sight, held by clients, given back when nobody holds them and
//! nothing was measured; when there is none left, those that were held longest ago go, measured or not.

use super::{KernelKey, Profile, Profiles};
use crate::policy::KernelId;
use std::collections::VecDeque;
use tally_contract::limits::KERNELS_MAX;

/// Marks a place in the table that no kernel has.
pub(super) const VACANT: KernelId = KernelId::MAX;
/// Times that a place is given anew before its ids begin again.
const GENERATIONS: u32 = 0xffff;
/// Places looked at for one that can be given anew.
const LOOKED: usize = 64;

/// The place of a kernel.
pub(super) fn place(kernel: KernelId) -> usize {
    kernel as usize % KERNELS_MAX
}

/// Places of the table that can be given to a kernel.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The longest free one first.
    free: VecDeque<u32>,
    /// The id that each had last.
    last: Vec<KernelId>,
    /// Measured, without holders; some have got one since.
    idle: VecDeque<u32>,
    /// What clients that left held.
    left: VecDeque<Vec<KernelId>>,
}

impl Places {
    fn next_id(&mut self, at: usize) -> KernelId {
        let generation = match self.last.get(at) {
            Some(last) => (last / KERNELS_MAX as u32 + 1) % GENERATIONS,
            None => 0,
        };
        self.note(at, generation * KERNELS_MAX as u32 + at as u32)
    }

    fn note(&mut self, at: usize, id: KernelId) -> KernelId {
        while self.last.len() <= at {
            self.last.push(self.last.len() as u32);
        }
        self.last[at] = id;
        id
    }
}

impl Profiles {
    /// The id of a kernel, making one at first sight. `None` when [`KERNELS_MAX`] kernels are
    /// held or measured: such a launch is scheduled without a profile rather than letting a
    /// client grow the core without bound.
    pub fn intern(&mut self, key: &KernelKey) -> Option<KernelId> {
        if let Some(&id) = self.ids.get(key) {
            return Some(id);
        }
        let at = self.vacant_place()?;
        let id = self.places.next_id(at);
        self.put(at, id, key.clone());
        Some(id)
    }

    /// The id of a kernel for a client, which holds it until [`Profiles::release`].
    pub fn hold(&mut self, key: &KernelKey) -> Option<KernelId> {
        let id = self.intern(key)?;
        self.list[place(id)].holders += 1;
        Some(id)
    }

    fn vacant_place(&mut self) -> Option<usize> {
        if let Some(at) = self.places.free.pop_front() {
            return Some(at as usize);
        }
        if self.list.len() < KERNELS_MAX {
            return Some(self.list.len());
        }
        self.sweep(LOOKED);
        for _ in 0..LOOKED {
            if !self.places.free.is_empty() {
                break;
            }
            let at = self.places.idle.pop_front()?;
            self.list[at as usize].idle = false;
            self.vacate_if_unheld(at as usize);
        }
        self.places.free.pop_front().map(|at| at as usize)
    }

    fn put(&mut self, at: usize, id: KernelId, key: KernelKey) {
        self.ids.insert(key.clone(), id);
        let mut profile = Profile::new(key);
        profile.id = id;
        match self.list.get_mut(at) {
            Some(old) => {
                (profile.changed, profile.idle) = (old.changed, old.idle);
                *old = profile;
            }
            None => self.list.push(profile),
        }
        self.note_changed(id);
    }

    /// A client left that held these: see [`Profiles::sweep`].
    pub fn release(&mut self, held: Vec<KernelId>) {
        if !held.is_empty() {
            self.places.left.push_back(held);
        }
    }

    /// Give back up to `most` of what clients held that left. True if there is more.
    pub fn sweep(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some(held) = self.places.left.front_mut() else { return false };
            match held.pop() {
                Some(id) => self.unhold(id),
                None => drop(self.places.left.pop_front()),
            }
        }
        !self.places.left.is_empty()
    }

    fn unhold(&mut self, kernel: KernelId) {
        let Some(p) = self.get_mut(kernel) else { return };
        p.holders = p.holders.saturating_sub(1);
        if p.holders > 0 {
            return;
        }
        if !p.is_measured() {
            self.vacate_if_unheld(place(kernel));
        } else if !std::mem::replace(&mut p.idle, true) {
            self.places.idle.push_back(place(kernel) as u32);
        }
    }

    fn vacate_if_unheld(&mut self, at: usize) {
        let Some(p) = self.list.get_mut(at) else { return };
        if p.holders > 0 || p.id == VACANT {
            return;
        }
        self.ids.remove(&p.key);
        self.news -= u32::from(p.news);
        let (changed, idle) = (p.changed, p.idle);
        *p = Profile::new(KernelKey { name: String::new(), image: 0, grid: [0; 3], block: [0; 3] });
        (p.changed, p.idle) = (changed, idle);
        self.places.free.push_back(at as u32);
    }

    /// Forget the kernel at a place: all that was measured, and the kernel itself if no client
    /// holds it. Whether there was one; `None` beyond the last place.
    pub fn forget_at(&mut self, at: u32) -> Option<bool> {
        let id = self.list.get(at as usize)?.id;
        let known = self.forget(id);
        self.vacate_if_unheld(at as usize);
        Some(known)
    }

    /// Places, those that are free among them.
    pub fn places(&self) -> u32 {
        self.list.len() as u32
    }

    pub fn known(&self) -> u32 {
        self.ids.len() as u32
    }

    /// The kernel at a place.
    pub fn at(&self, at: u32) -> Option<(KernelId, &Profile)> {
        let profile = self.list.get(at as usize)?;
        (profile.id != VACANT).then_some((profile.id, profile))
    }

    /// The place of a kernel, for [`Profiles::at`].
    pub fn place_of(kernel: KernelId) -> u32 {
        place(kernel) as u32
    }

    /// Put a kernel where another table has it, in the place of what is there. False if it is
    /// known already, or no kernel can have that id.
    pub fn adopt_key(&mut self, kernel: KernelId, key: KernelKey) -> bool {
        if kernel == VACANT || self.get(kernel).is_some() {
            return false;
        }
        // The other table released it since.
        if let Some(before) = self.ids.remove(&key) {
            self.list[place(before)].id = VACANT;
        }
        let at = place(kernel);
        while self.list.len() < at {
            let none = KernelKey { name: String::new(), image: 0, grid: [0; 3], block: [0; 3] };
            self.list.push(Profile::new(none));
        }
        if let Some(old) = self.list.get(at).filter(|old| old.id != VACANT) {
            self.ids.remove(&old.key);
            self.news -= u32::from(old.news);
        }
        self.places.note(at, kernel);
        self.put(at, kernel, key);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Transformation;

    fn key(x: u32) -> KernelKey {
        KernelKey { name: "k".into(), image: 1, grid: [x, 1, 1], block: [1; 3] }
    }

    fn hold(all: &mut Profiles, keys: std::ops::Range<u32>) -> Vec<KernelId> {
        keys.map(|x| all.hold(&key(x)).unwrap()).collect()
    }

    #[test]
    fn what_a_client_that_left_held_makes_room_and_no_id_means_another_kernel() {
        let mut all = Profiles::default();
        let first = hold(&mut all, 0..KERNELS_MAX as u32);
        assert_eq!(all.intern(&key(u32::MAX)), None, "full");
        let shared = hold(&mut all, 7..8);
        all.release(first.clone());
        assert!(all.get(first[0]).is_some(), "not at once: in pieces");
        while all.sweep(1_000) {}
        assert_eq!((all.known(), all.get(7).unwrap().key.clone()), (1, key(7)));
        let second = hold(&mut all, 100_000..165_535);
        assert!(first.iter().filter(|id| **id != 7).all(|id| all.get(*id).is_none()));
        assert!(!second.iter().any(|id| first.contains(id) || *id == u32::MAX));
        all.record(first[0], 5);
        assert!(!all.has_news(), "of a kernel that is gone nothing is recorded");
        assert_eq!(all.get(shared[0]).unwrap().key, key(7));
    }

    #[test]
    fn what_was_measured_stays_until_its_place_is_needed() {
        let mut all = Profiles::default();
        let held = hold(&mut all, 0..1_000);
        for id in &held[..500] {
            all.record(*id, 5);
        }
        all.release(held.clone());
        while all.sweep(64) {}
        assert_eq!(all.known(), 500);
        assert_eq!(hold(&mut all, 3..4), held[3..4], "it is back");
        let more = hold(&mut all, 10_000..10_000 + KERNELS_MAX as u32 - 1);
        assert_eq!(all.known() as usize, KERNELS_MAX);
        assert!(all.get(held[4]).is_none() && all.get(held[3]).is_some());
        assert_eq!(all.intern(&key(5)), None, "all are held now");
        drop(more);
    }

    #[test]
    fn forgetting_frees_what_nobody_holds() {
        let mut all = Profiles::default();
        let held = hold(&mut all, 0..10);
        for id in &held {
            all.record(*id, 5);
            all.set_transformation(*id, Transformation::WholeOnly("because"));
        }
        all.release(held[2..].to_vec());
        while all.sweep(64) {}
        assert_eq!(all.known(), 10);
        let forgotten = (0..).map_while(|at| all.forget_at(at)).filter(|known| *known).count();
        assert_eq!((forgotten, all.known(), all.places()), (10, 2, 10));
        assert!(!all.has_news() && all.iter().all(|(_, p)| !p.is_measured()));
        assert_eq!(hold(&mut all, 20..21), [2 + KERNELS_MAX as u32], "the longest free place");
    }

    #[test]
    fn ids_begin_again_only_after_all_generations() {
        let mut all = Profiles::default();
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..GENERATIONS {
            let id = all.hold(&key(round)).unwrap();
            assert!(seen.insert(id) && id != VACANT);
            all.release(vec![id]);
            all.sweep(2);
        }
        assert_eq!(all.hold(&key(0)), Some(0));
    }

    #[test]
    fn another_table_is_followed_through_what_it_lets_go_of() {
        let (mut all, mut other) = (Profiles::default(), Profiles::default());
        assert!(other.adopt_key(5, key(1)) && !other.adopt_key(5, key(1)));
        assert!(!other.adopt_key(VACANT, key(2)));
        let again = 5 + KERNELS_MAX as u32;
        assert!(other.adopt_key(again, key(2)), "its place was given anew");
        assert!(other.get(5).is_none() && other.get(again).is_some());
        assert!(other.adopt_key(9, key(2)), "under another id");
        assert_eq!((other.known(), other.get(again).is_none()), (1, true));
        all.watch(Some(Profiles::watch_list()));
        let first = all.hold(&key(1)).unwrap();
        all.release(vec![first]);
        all.sweep(2);
        let second = all.hold(&key(2)).unwrap();
        assert_eq!((all.next_changed(), all.next_changed()), (Some(second), None));
    }
}
