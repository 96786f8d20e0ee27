//! Prepare: when the next step of a service will begin, from when the latest ones did.

/// Pauses between two beginnings that are remembered; as many are needed.
const PAUSES: usize = 8;
/// They are a rhythm if they differ by no more than this part of their median.
const EVEN: u64 = 4;

/// The beginnings of a service's steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rhythm {
    last_ns: Option<u64>,
    pauses_ns: [u64; PAUSES],
    count: usize,
}

impl Rhythm {
    /// A step began.
    pub fn began(&mut self, since_ns: u64) {
        let Some(last_ns) = self.last_ns.replace(since_ns) else { return };
        self.pauses_ns[self.count % PAUSES] = since_ns.saturating_sub(last_ns);
        // Which is the oldest follows from the count, so it may not end.
        self.count = if self.count + 1 == 2 * PAUSES { PAUSES } else { self.count + 1 };
    }

    /// A step did not begin when it should have.
    pub fn broke(&mut self) {
        *self = Rhythm::default();
    }

    /// When the next step begins; `None` if they do not come evenly.
    pub fn next_ns(&self) -> Option<u64> {
        let last_ns = self.last_ns.filter(|_| self.count >= PAUSES)?;
        let mut sorted = self.pauses_ns;
        sorted.sort_unstable();
        let (least_ns, median_ns, most_ns) = (sorted[0], sorted[PAUSES / 2], sorted[PAUSES - 1]);
        let is_even = median_ns > 0 && most_ns - least_ns <= median_ns / EVEN;
        is_even.then(|| last_ns.saturating_add(median_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_beginnings_tell_the_next_one() {
        let mut rhythm = Rhythm::default();
        for n in 0..8 {
            rhythm.began(1_000 * n);
            assert_eq!(rhythm.next_ns(), None, "{n} pauses");
        }
        for n in 8..100 {
            rhythm.began(1_000 * n + n % 3 * 50);
            assert_eq!(rhythm.next_ns().map(|ns| ns.abs_diff(1_000 * (n + 1)) <= 200), Some(true));
        }
        // One that came late is remembered for as long as the others.
        rhythm.began(101_000);
        assert_eq!(rhythm.next_ns(), None);
        rhythm.broke();
        (0..9).for_each(|n| rhythm.began(500 * n));
        assert_eq!(rhythm.next_ns(), Some(4_500));
        (0..9).for_each(|_| rhythm.began(u64::MAX));
        assert_eq!(rhythm.next_ns(), None, "all at once is no rhythm");
    }
}
