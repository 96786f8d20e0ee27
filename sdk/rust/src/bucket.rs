//! A bounded share of something, without randomness: a token bucket that fills by events, not by time.

/// What one unit costs, in thousandths.
const UNIT: u64 = 1_000;

/// Every event earns a little; one unit is spent at a time.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    permille: u64,
    credit: u64,
    burst: u64,
}

impl TokenBucket {
    /// An empty bucket, for one unit in a thousand events for each `permille`. At most `burst` units are saved up.
    pub fn new(permille: u32, burst: u32) -> Self {
        TokenBucket { permille: permille.into(), credit: 0, burst: u64::from(burst) * UNIT }
    }

    /// What is in it, for [`TokenBucket::put`].
    pub fn credit(&self) -> u64 {
        self.credit
    }

    /// Go on from an earlier bucket.
    pub fn put(&mut self, credit: u64) {
        self.credit = credit.min(self.burst);
    }

    /// Add what a decision earns, up to the burst.
    pub fn earn(&mut self) {
        self.credit = (self.credit + self.permille).min(self.burst);
    }

    /// Whether there is a unit to spend.
    pub fn allows(&self) -> bool {
        self.credit >= UNIT
    }

    /// Takes a unit out; the credit does not fall below 0.
    pub fn spend(&mut self) {
        self.credit = self.credit.saturating_sub(UNIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spent(bucket: &mut TokenBucket, events: u32) -> u32 {
        (0..events)
            .map(|_| {
                bucket.earn();
                let allowed = bucket.allows();
                if allowed {
                    bucket.spend();
                }
                u32::from(allowed)
            })
            .sum()
    }

    #[test]
    fn exactly_the_share_and_never_more() {
        for permille in [0, 1, 50, 333, 1_000] {
            let bucket = TokenBucket::new(permille, 8);
            for round in 1..=10 {
                assert_eq!(
                    spent(&mut bucket.clone(), round * 1_000),
                    round * permille,
                    "{permille}"
                );
            }
            assert_eq!(spent(&mut bucket.clone(), 999), 999 * permille / 1_000);
        }
    }

    #[test]
    fn no_more_than_the_burst_is_saved_up() {
        let mut bucket = TokenBucket::new(50, 8);
        (0..1_000_000).for_each(|_| bucket.earn());
        assert_eq!(spent(&mut bucket, 19), 8);
        bucket.put(u64::MAX);
        assert_eq!(bucket.credit(), 8 * UNIT);
    }
}
