//! How often a form may be tried that is not thought best: a bounded share of all
//! launches, without randomness. Every launch earns a little; a try costs a whole
//! launch's worth. The paper needs no bound, since it measures before it serves.

/// What a try costs, in thousandths of a launch.
const TRY: u64 = 1_000;
/// Tries that can be saved up for when there is something to try.
const SAVED_MAX: u64 = 8;

/// The account.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    permille: u64,
    credit: u64,
}

impl Share {
    /// An empty account, of this share.
    pub fn new(permille: u32) -> Self {
        Share { permille: permille.into(), credit: 0 }
    }

    /// What is in the account, for [`Share::put`].
    pub fn credit(&self) -> u64 {
        self.credit
    }

    /// Go on from an earlier account.
    pub fn put(&mut self, credit: u64) {
        self.credit = credit.min(SAVED_MAX * TRY);
    }

    /// A launch was decided.
    pub fn earn(&mut self) {
        self.credit = (self.credit + self.permille).min(SAVED_MAX * TRY);
    }

    /// A try can be paid for.
    pub fn allows(&self) -> bool {
        self.credit >= TRY
    }

    /// A try was made.
    pub fn spend(&mut self) {
        self.credit = self.credit.saturating_sub(TRY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(share: &mut Share, launches: u32) -> u32 {
        (0..launches)
            .map(|_| {
                share.earn();
                let allowed = share.allows();
                if allowed {
                    share.spend();
                }
                u32::from(allowed)
            })
            .sum()
    }

    #[test]
    fn exactly_the_share_and_never_more() {
        for permille in [0, 1, 50, 333, 1_000] {
            let mut share = Share::new(permille);
            for round in 1..=10 {
                let spent: u32 = tries(&mut share.clone(), round * 1_000);
                assert_eq!(spent, round * permille, "{permille} {round}");
            }
            assert_eq!(tries(&mut share, 999), 999 * permille / 1_000);
        }
    }

    #[test]
    fn little_is_saved() {
        let mut share = Share::new(50);
        (0..1_000_000).for_each(|_| share.earn());
        assert_eq!(tries(&mut share, 19), 8);
    }
}
