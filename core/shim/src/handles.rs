//! Maps from handles to small values: read without locks or waiting, written
//! under the caller's lock.
//!
//! A map never grows and never moves; when it is full, insertion fails and the
//! caller does without. A value of 0 means absent. A reader that races with the
//! removal of the very handle it asks for may see either state: programs that
//! use a handle while they destroy it have no right answer anyway.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// Entries looked at for a key; one that finds no room in them is not remembered.
const PROBES_MAX: usize = 128;

struct Entry {
    key: AtomicUsize,
    value: AtomicU64,
}

/// The map, of `N` entries (a power of two).
pub struct Handles<const N: usize>([Entry; N]);

impl<const N: usize> Handles<N> {
    pub const fn new() -> Self {
        assert!(N.is_power_of_two());
        Handles([const { Entry { key: AtomicUsize::new(0), value: AtomicU64::new(0) } }; N])
    }

    #[inline]
    fn probe(&self, key: usize) -> impl Iterator<Item = &Entry> {
        let start = (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        (0..PROBES_MAX.min(N)).map(move |i| &self.0[(start as usize).wrapping_add(i) & (N - 1)])
    }

    /// The value of a handle.
    #[inline]
    pub fn get(&self, key: usize) -> Option<u64> {
        for entry in self.probe(key) {
            match entry.key.load(Acquire) {
                k if k == key => {
                    let value = entry.value.load(Acquire);
                    return (value != 0 && key != 0).then_some(value);
                }
                0 => return None,
                _ => {}
            }
        }
        None
    }

    /// Set a handle's value (not 0). Returns false if there is no room.
    /// The caller holds the map's lock.
    pub fn insert(&self, key: usize, value: u64) -> bool {
        if key == 0 || value == 0 {
            return false;
        }
        let mut free = None;
        for entry in self.probe(key) {
            let there = entry.key.load(Relaxed);
            if there == key {
                entry.value.store(value, Release);
                return true;
            }
            if free.is_none() && entry.value.load(Relaxed) == 0 {
                free = Some(entry);
            }
            if there == 0 {
                break;
            }
        }
        let Some(entry) = free else { return false };
        entry.key.store(key, Release);
        entry.value.store(value, Release);
        true
    }

    /// Forget a handle. The caller holds the map's lock.
    pub fn remove(&self, key: usize) {
        for entry in self.probe(key) {
            match entry.key.load(Relaxed) {
                k if k == key => return entry.value.store(0, Release),
                0 => return,
                _ => {}
            }
        }
    }

    /// Forget every handle whose value does not please. The caller holds the map's lock.
    pub fn retain(&self, mut keep: impl FnMut(u64) -> bool) {
        for entry in &self.0 {
            let value = entry.value.load(Relaxed);
            if value != 0 && !keep(value) {
                entry.value.store(0, Release);
            }
        }
    }
}

impl<const N: usize> Default for Handles<N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_fits_and_says_when_it_is_full() {
        let map = Box::new(Handles::<64>::new());
        let kept: Vec<usize> =
            (1..200).map(|i| i * 16).filter(|k| map.insert(*k, *k as u64)).collect();
        assert_eq!(kept.len(), 64);
        for k in &kept {
            assert_eq!(map.get(*k), Some(*k as u64));
        }
        map.remove(kept[3]);
        assert_eq!(map.get(kept[3]), None);
        assert!(map.insert(7, 1), "a removed entry is used again");
        assert_eq!(map.get(7), Some(1));
        map.retain(|v| v == 1);
        assert_eq!(map.get(kept[5]), None);
        assert_eq!(map.get(7), Some(1));
        assert!(!map.insert(0, 1));
    }

    #[test]
    fn readers_see_old_or_new_values_only() {
        static MAP: Handles<256> = Handles::new();
        std::thread::scope(|s| {
            s.spawn(|| {
                for round in 0..20_000_usize {
                    let key = 16 * (1 + round % 50);
                    MAP.insert(key, key as u64);
                    if round % 3 == 0 {
                        MAP.remove(key);
                    }
                }
            });
            s.spawn(|| {
                for round in 0..100_000_usize {
                    let key = 16 * (1 + round % 50);
                    assert!(MAP.get(key).is_none_or(|v| v == key as u64));
                }
            });
        });
    }
}
