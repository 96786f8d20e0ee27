//! Counts of requests by length, in steps of a thousandth or less: filled by the dispatch thread
//! without allocating. What it costs to empty, to add or to read depends on how far apart the
//! lengths are, not on how long they may be. Not an `hdrhistogram`, which walks all steps up to the longest length for
//! that: with it simulations take eight times as long.

/// Lengths below this have a step each; each doubling beyond has half as many.
const EXACT: u64 = 1 << 11;
/// Longest length told apart, ns: 73 min. Longer ones count as this; that is longer than nearly all
/// tests, because ratios of figures that are cut off are not those of the requests.
const LONGEST_NS: u64 = (1 << 42) - 1;
const STEPS: usize = step(LONGEST_NS) + 1;

#[derive(Debug)]
pub(crate) struct Lengths {
    counts: Vec<u32>,
    /// A bit for each step that is counted.
    used: Vec<u64>,
    requests: u64,
    /// Words of `used` beyond which nothing is counted.
    low: usize,
    high: usize,
}

const WORDS: usize = STEPS.div_ceil(64);

const fn step(ns: u64) -> usize {
    let ns = if ns > LONGEST_NS { LONGEST_NS } else { ns };
    if ns < EXACT {
        return ns as usize;
    }
    // How often it is halved until it is below `EXACT`: the upper half of its steps is used.
    let halvings = EXACT.leading_zeros() + 1 - ns.leading_zeros();
    (halvings as u64 * (EXACT / 2) + (ns >> halvings)) as usize
}

/// The longest length of a step, ns.
const fn longest_ns(step: usize) -> u64 {
    let step = step as u64;
    if step < EXACT {
        return step;
    }
    let halvings = step / (EXACT / 2) - 1;
    ((step - halvings * (EXACT / 2) + 1) << halvings) - 1
}

impl Clone for Lengths {
    fn clone(&self) -> Self {
        let mut clone = Lengths::new();
        clone.extend(self);
        clone
    }
}

impl Lengths {
    pub(crate) fn new() -> Self {
        Lengths { counts: vec![0; STEPS], used: vec![0; WORDS], requests: 0, low: WORDS, high: 0 }
    }

    /// Forget everything; keeps the memory.
    pub(crate) fn clear(&mut self) {
        for word in self.low..=self.high {
            if self.used[word] != 0 {
                let end = STEPS.min(64 * word + 64);
                self.counts[64 * word..end].fill(0);
                self.used[word] = 0;
            }
        }
        (self.requests, self.low, self.high) = (0, WORDS, 0);
    }

    /// So many requests took so long.
    pub(crate) fn add(&mut self, ns: u64, count: u64) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.add_step(step(ns), count);
    }

    fn add_step(&mut self, step: usize, count: u32) {
        if count == 0 {
            return;
        }
        let before = self.counts[step];
        self.counts[step] = before.saturating_add(count);
        self.requests += u64::from(self.counts[step] - before);
        let word = step / 64;
        self.used[word] |= 1 << (step % 64);
        (self.low, self.high) = (self.low.min(word), self.high.max(word));
    }

    /// Steps that are counted, from this one on.
    fn steps(&self, from: usize) -> impl Iterator<Item = usize> + '_ {
        let first = (from / 64).max(self.low);
        let words = (first..=self.high).filter(|word| self.used[*word] != 0);
        let bits = |word: usize| {
            let mut left = self.used[word];
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros();
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(64 * word + bit as usize)
            })
        };
        words.flat_map(bits).skip_while(move |step| *step < from)
    }

    pub(crate) fn extend(&mut self, other: &Lengths) {
        other.steps(0).for_each(|step| self.add_step(step, other.counts[step]));
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests
    }

    /// This share took at most so long, ns. `None` without requests.
    pub(crate) fn quantile_ns(&self, share: f64) -> Option<u64> {
        let rank = ((share * self.requests as f64).ceil() as u64).clamp(1, self.requests.max(1));
        let mut seen = 0;
        self.iter().find_map(|(ns, count)| {
            seen += count;
            (seen >= rank).then_some(ns)
        })
    }

    /// Lengths, ns, each the longest of its step, and how many there are; by rising length.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.steps(0).map(|step| (longest_ns(step), u64::from(self.counts[step])))
    }

    /// Requests that took longer than this, but for those of the same step that did.
    pub(crate) fn over(&self, ns: u64) -> u64 {
        self.steps(step(ns) + 1).map(|step| u64::from(self.counts[step])).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn steps_are_one_after_the_other() {
        for at in 0..STEPS {
            assert_eq!(step(longest_ns(at)), at);
            assert!(at + 1 == STEPS || step(longest_ns(at) + 1) == at + 1, "{at}");
        }
        assert_eq!((longest_ns(STEPS - 1), step(u64::MAX)), (LONGEST_NS, STEPS - 1));
    }

    proptest! {
        /// A thousandth from the sorted sample's nearest rank; nothing is lost or left over.
        #[test]
        fn quantiles_are_those_of_the_sample(
            mut all in proptest::collection::vec(0..4_000_000_000_000u64, 1..300),
            share in 0.0..=1.0f64, cut in 0..300usize,
        ) {
            let mut both = [Lengths::new(), Lengths::new()];
            all.iter().enumerate().for_each(|(i, ns)| both[usize::from(i < cut)].add(*ns, 1));
            let [mut one, other] = both;
            one.extend(&other);
            all.sort_unstable();
            let rank = (share * all.len() as f64).ceil() as usize;
            let exact = all[rank.max(1) - 1];
            let ns = one.quantile_ns(share).unwrap();
            prop_assert!(ns >= exact && ns - exact <= exact / 1_000, "{ns} {exact}");
            prop_assert_eq!(one.over(exact), all.iter().filter(|ns| step(**ns) > step(exact)).count() as u64);
            prop_assert_eq!(one.iter().map(|(_, count)| count).sum::<u64>(), one.requests());
            one.clear();
            prop_assert_eq!((one.requests(), one.over(0), one.quantile_ns(share)), (0, 0, None));
            prop_assert!(one.counts.iter().all(|count| *count == 0));
        }
    }
}
