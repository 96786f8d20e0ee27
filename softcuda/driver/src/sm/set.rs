//! Sets of SMs: which ones a kernel may run on.

use super::layout::SMS_MAX;

/// Words of a set.
pub(super) const WORDS: usize = SMS_MAX / 64;

/// Some of a device's SMs, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SmSet(pub(super) [u64; WORDS]);

impl SmSet {
    /// The SMs from 0 to `count`.
    pub fn first(count: u32) -> Self {
        Self(std::array::from_fn(|i| match count.saturating_sub(i as u32 * 64) {
            64.. => u64::MAX,
            low => (1 << low) - 1,
        }))
    }

    /// Adds `sm`, if it is a number that an SM can have.
    pub fn insert(&mut self, sm: u32) {
        if let Some(word) = self.0.get_mut(sm as usize / 64) {
            *word |= 1 << (sm % 64);
        }
    }

    /// Whether `sm` is in it.
    pub fn contains(&self, sm: u32) -> bool {
        self.0.get(sm as usize / 64).is_some_and(|word| word >> (sm % 64) & 1 != 0)
    }

    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The SMs that are in both sets.
    pub fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// The SMs that are not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// Takes the `count` lowest out, or all if there are fewer.
    pub fn split_off(&mut self, count: u32) -> Self {
        let mut taken = Self::default();
        self.iter().take(count as usize).for_each(|sm| taken.insert(sm));
        *self = self.without(&taken);
        taken
    }

    /// The SMs in it, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        let (mut words, mut at) = (self.0, 0);
        std::iter::from_fn(move || {
            while words.get(at).is_some_and(|&word| word == 0) {
                at += 1;
            }
            let word = words.get_mut(at)?;
            let sm = word.trailing_zeros();
            *word &= *word - 1;
            Some(at as u32 * 64 + sm)
        })
    }

    /// As bytes, for a place that keeps it for us.
    pub fn to_bytes(&self) -> [u8; SMS_MAX / 8] {
        let mut bytes = [0; SMS_MAX / 8];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The inverse of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: &[u8; SMS_MAX / 8]) -> Self {
        let mut set = Self::default();
        for (word, chunk) in set.0.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_split_into_disjoint_parts() {
        let mut all = SmSet::first(132);
        assert_eq!(all.count(), 132);
        assert!(all.contains(131) && !all.contains(132) && !all.contains(u32::MAX));
        let low = all.split_off(70);
        assert_eq!((low.count(), all.count()), (70, 62));
        assert!(low.and(&all).is_empty());
        assert_eq!(all.iter().next(), Some(70));
        assert_eq!(SmSet::from_bytes(&low.to_bytes()), low);
        assert_eq!(all.split_off(100).count(), 62);
        assert!(all.is_empty());
    }
}
