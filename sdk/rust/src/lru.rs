//! A map of bounded size that forgets what was not used for longest, and allocates only when it is made: a
//! set-associative table, as caches are.

use std::cmp::Reverse;

/// Values in a set. A key gives its set; in a full set the one not used for longest makes room.
const WAYS: usize = 4;

/// Keys are ids (of kernels, of clients), which are dense.
#[derive(Debug)]
pub struct LruMap<V> {
    keys: Vec<u32>,
    values: Vec<V>,
    /// When each was last used; 0: free. Apart from the values, so that finding the
    /// few that are used does not go through all of their memory.
    used: Vec<u64>,
    uses: u64,
    len: usize,
}

impl<V: Clone> LruMap<V> {
    /// An empty one with room for `capacity` values, rounded up to a multiple of 4. `blank` fills the
    /// memory that it will ever use.
    pub fn new(capacity: usize, blank: V) -> Self {
        let places = capacity.max(1).next_multiple_of(WAYS);
        LruMap {
            keys: vec![0; places],
            values: vec![blank; places],
            used: vec![0; places],
            uses: 0,
            len: 0,
        }
    }

    /// The place of the first value that a key may have.
    fn first(&self, key: u32) -> usize {
        key as usize % (self.values.len() / WAYS) * WAYS
    }

    /// The value of a key, if it has one; it counts as used.
    #[inline]
    pub fn get_mut(&mut self, key: u32) -> Option<&mut V> {
        let first = self.first(key);
        let mut set = first..first + WAYS;
        let at = set.find(|&at| self.keys[at] == key && self.used[at] > 0)?;
        self.uses += 1;
        self.used[at] = self.uses;
        Some(&mut self.values[at])
    }

    /// The value of a key, made by `new` if there is none. Returns also the value that had to make room.
    pub fn get_or_insert_with(&mut self, key: u32, new: impl FnOnce() -> V) -> (&mut V, Option<V>) {
        let first = self.first(key);
        let mut set = first..first + WAYS;
        let known = set.find(|&at| self.keys[at] == key && self.used[at] > 0);
        let (at, evicted) = match known {
            Some(at) => (at, None),
            None => {
                // A free one was used at 0, before all others.
                let oldest = (first..first + WAYS).min_by_key(|&at| self.used[at]);
                let at = oldest.unwrap_or(first);
                let is_free = self.used[at] == 0;
                self.len += usize::from(is_free);
                self.keys[at] = key;
                let old = std::mem::replace(&mut self.values[at], new());
                (at, (!is_free).then_some(old))
            }
        };
        self.uses += 1;
        self.used[at] = self.uses;
        (&mut self.values[at], evicted)
    }

    /// The values used last, at most so many, the latest first.
    pub fn latest(&self, count_max: usize) -> impl Iterator<Item = (u32, &V)> {
        let all = self.used.iter().enumerate().filter(|(_, used)| **used > 0);
        let mut latest = Vec::with_capacity(self.len);
        // Keys are small numbers as a rule: the last value is not far from the first.
        latest.extend(all.take(self.len).map(|(at, &used)| (used, at)));
        if latest.len() > count_max {
            // Sorting them all would take longer than writing these.
            latest.select_nth_unstable_by_key(count_max, |&(used, _)| Reverse(used));
            latest.truncate(count_max);
        }
        latest.sort_unstable_by_key(|&(used, _)| Reverse(used));
        latest.into_iter().map(|(_, at)| (self.keys[at], &self.values[at]))
    }

    /// Number of values in the map.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: usize = 4_096;
    const SETS: u32 = (CAPACITY / WAYS) as u32;

    fn put(map: &mut LruMap<u32>, key: u32) -> Option<u32> {
        let (value, evicted) = map.get_or_insert_with(key, || 0);
        *value = key + 1;
        evicted
    }

    #[test]
    fn values_are_found_again() {
        let mut map = LruMap::new(CAPACITY, 0);
        assert!(map.is_empty());
        (0..4_096).for_each(|key| assert_eq!(put(&mut map, key), None));
        assert!((0..4_096).all(|key| *map.get_or_insert_with(key, || 0).0 == key + 1));
        assert!((0..4_096).all(|key| map.get_mut(key).copied() == Some(key + 1)));
        assert_eq!(map.get_mut(4_096), None);
        assert_eq!(map.len(), 4_096);
    }

    #[test]
    fn in_a_full_set_the_one_not_used_for_longest_makes_room() {
        let mut map = LruMap::new(CAPACITY, 0);
        let keys: Vec<u32> = (0..5).map(|n| 7 + n * SETS).collect();
        keys[..4].iter().for_each(|&key| assert_eq!(put(&mut map, key), None));
        assert_eq!(map.get_mut(keys[0]), Some(&mut (keys[0] + 1)));
        assert_eq!(put(&mut map, keys[4]), Some(keys[1] + 1));
        assert_eq!(map.len(), 4);
        let latest: Vec<u32> = map.latest(3).map(|(key, _)| key).collect();
        assert_eq!(latest, [keys[4], keys[0], keys[3]]);
        assert_eq!(*map.get_or_insert_with(keys[1], || 0).0, 0, "it starts anew");
    }

    #[test]
    fn it_stays_within_its_size_whatever_comes() {
        let mut map = LruMap::new(CAPACITY, 0);
        for n in 0..100_000_u32 {
            put(&mut map, n.wrapping_mul(2_654_435_761) >> 1);
        }
        assert!(map.len() <= CAPACITY && map.values.len() == CAPACITY);
        assert_eq!(map.latest(usize::MAX).count(), map.len());
    }
}
