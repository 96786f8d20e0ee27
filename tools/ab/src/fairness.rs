//! How evenly best-effort clients are served.
//!
//! Jain's index of what each did for its weight (Jain, Chiu and Hawe, DEC-TR-301, 1984): 1 if all are served alike,
//! 1/n if one of n has everything. A client that had nothing to do for a while would be served less by any policy, so
//! only those count that had work waiting or running for the whole block.
//!
//! A policy can also keep a client from having work: [`Hidden`] finds those that have some under A and not under B,
//! pair after pair, and they count in B's blocks, too. One that sleeps or ends by itself does so under either arm.

use crate::design::Arm;
use crate::guard::RELATIVE_ALPHA;
use std::collections::BTreeMap;

/// Best-effort clients of one block: as many as the core admits at most.
pub const CLIENTS_MAX: usize = 4_096;
/// A client whose work was there for this part of a block had some for the whole block: a program that waits for its
/// step before it launches the next one leaves gaps of microseconds.
const WHOLE: f64 = 0.98;

/// A best-effort client as of some moment, since it registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BestEffort {
    pub client: u32,
    pub weight: u32,
    /// Its work that ended, in GPU time that it takes undisturbed, ns.
    pub work_ns: u64,
    /// Time in which it had work waiting or running, ns.
    pub backlog_ns: u64,
}

/// What a client did that was there for the whole time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub client: u32,
    pub weight: u32,
    pub work_ns: u64,
    /// It had work waiting or running all the time.
    pub is_busy: bool,
}

/// The clients that were there from one moment to another, `span_ns` later, and what they did. Both lists are by rising
/// id.
pub fn between(from: &[BestEffort], to: &[BestEffort], span_ns: u64) -> Vec<Share> {
    let share = |to: &BestEffort| {
        let at = from.binary_search_by_key(&to.client, |from| from.client).ok()?;
        let backlog_ns = to.backlog_ns.saturating_sub(from[at].backlog_ns);
        let work_ns = to.work_ns.saturating_sub(from[at].work_ns);
        let is_busy = span_ns > 0 && backlog_ns as f64 >= WHOLE * span_ns as f64;
        Some(Share { client: to.client, weight: to.weight, work_ns, is_busy })
    };
    to.iter().filter_map(share).collect()
}

fn of_client(shares: &[Share], client: u32) -> Option<&Share> {
    let at = shares.binary_search_by_key(&client, |share| share.client).ok()?;
    Some(&shares[at])
}

/// Clients that have work under A and not under B.
///
/// Of each client it is bet that B's block of a pair is the one in which it was not busy. If policies make no
/// difference, a fair coin decides which block that is, so a client is taken for hidden by accident at most at
/// [`RELATIVE_ALPHA`] divided by the number of clients, whenever it sleeps: five pairs in a row for one client, eight
/// for ten.
#[derive(Clone, Debug, Default)]
pub struct Hidden {
    /// Natural logarithm of each client's betting wealth.
    ln: BTreeMap<u32, f64>,
    /// The last block of A.
    a: Vec<Share>,
    /// The first block of the pair.
    first: Option<(Arm, Vec<Share>)>,
}

impl Hidden {
    /// A block has ended. Those of its clients that count.
    pub fn block_ended(&mut self, arm: Arm, shares: Vec<Share>) -> Vec<Share> {
        if arm == Arm::A {
            self.a.clone_from(&shares);
        }
        match self.first.take() {
            None => self.first = Some((arm, shares.clone())),
            Some((Arm::A, first)) => self.pair_ended(&first, &shares),
            Some((Arm::B, first)) => self.pair_ended(&shares, &first),
        }
        let counts = |share: &Share| share.is_busy || arm == Arm::B && self.is_hidden(share.client);
        shares.into_iter().filter(counts).collect()
    }

    fn pair_ended(&mut self, a: &[Share], b: &[Share]) {
        self.ln.retain(|client, _| of_client(a, *client).is_some());
        for a in a {
            let Some(b) = of_client(b, a.client) else { continue };
            let ln = self.ln.entry(a.client).or_default();
            *ln += match (a.is_busy, b.is_busy) {
                (true, false) => 1.95_f64.ln(),
                (false, true) => 0.05_f64.ln(),
                _ => 0.0,
            };
        }
    }

    /// Whether B keeps it from having work that it had in the last block of A.
    fn is_hidden(&self, client: u32) -> bool {
        let needed = (self.ln.len() as f64 / RELATIVE_ALPHA).ln();
        self.ln.get(&client).is_some_and(|ln| *ln >= needed)
            && of_client(&self.a, client).is_some_and(|share| share.is_busy)
    }
}

/// Jain's index; `None` for fewer than two clients, or if none of them did any work.
pub fn index(shares: &[Share]) -> Option<f64> {
    let each = || shares.iter().map(|share| share.work_ns as f64 / f64::from(share.weight.max(1)));
    let (sum, squares): (f64, f64) = (each().sum(), each().map(|x| x * x).sum());
    (shares.len() >= 2 && squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// Blocks taken together until they are as long as a guard's window: in a short block few launches end, and their
/// number is uneven by chance.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    shares: Vec<Share>,
    span_ns: u64,
}

impl Blocks {
    /// A block has ended with these clients. The index of all since the last one, if they are long enough now. Clients
    /// count that are in all of them; if fewer than two are left, what came before this block is forgotten.
    pub fn push(&mut self, shares: &[Share], span_ns: u64, least_ns: u64) -> Option<f64> {
        let sum = |before: &Share| {
            let share = of_client(shares, before.client)?;
            Some(Share { work_ns: before.work_ns.saturating_add(share.work_ns), ..*before })
        };
        let both: Vec<Share> = self.shares.iter().filter_map(sum).collect();
        (self.shares, self.span_ns) = match both.len() {
            0 | 1 => (shares.to_vec(), span_ns),
            _ => (both, self.span_ns.saturating_add(span_ns)),
        };
        if self.span_ns < least_ns {
            return None;
        }
        let index = index(&self.shares);
        *self = Blocks::default();
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(client: u32, weight: u32, work_ns: u64) -> Share {
        Share { client, weight, work_ns, is_busy: true }
    }

    proptest! {
        /// Between 1/n and 1, and the same in whatever unit work is counted.
        #[test]
        fn the_index_is_a_share(work in proptest::collection::vec((1..=100u32, 0..1_000_000u64), 2..40)) {
            let shares = |times: u64| -> Vec<Share> {
                work.iter().enumerate().map(|(at, (weight, ns))| share(at as u32, *weight, ns * times)).collect()
            };
            let (one, many) = (index(&shares(1)), index(&shares(1_000)));
            if let (Some(one), Some(many)) = (one, many) {
                prop_assert!((one - many).abs() < 1e-9);
                prop_assert!(one >= 1.0 / work.len() as f64 - 1e-9 && one <= 1.0 + 1e-9, "{one}");
            } else {
                prop_assert!(work.iter().all(|(_, ns)| *ns == 0));
            }
        }
    }

    #[test]
    fn work_counts_by_weight_and_one_client_has_no_index() {
        let near = |shares: &[Share], wanted: f64| (index(shares).unwrap() - wanted).abs() < 1e-9;
        assert!(near(&[share(1, 1, 50), share(2, 3, 150)], 1.0));
        assert!(near(&[share(1, 1, 100), share(2, 1, 0)], 0.5));
        assert!(near(&[share(1, 1, 3), share(2, 1, 1)], 0.8));
        assert_eq!(index(&[share(1, 1, 100)]), None);
        assert_eq!(index(&[share(1, 1, 0), share(2, 1, 0)]), None, "none was served");
    }

    #[test]
    fn clients_are_busy_that_have_work_for_the_whole_time() {
        let at =
            |client, work_ns, backlog_ns| BestEffort { client, weight: 2, work_ns, backlog_ns };
        let from = [at(1, 10, 100), at(2, 20, 7), at(3, 0, 0), at(5, 9, 9)];
        // 3 paused, 4 came, 5 left.
        let to = [at(1, 510, 1_100), at(2, 20, 1_000), at(3, 400, 900), at(4, 600, 1_000)];
        let paused = Share { is_busy: false, ..share(3, 2, 400) };
        assert_eq!(between(&from, &to, 1_000), [share(1, 2, 500), share(2, 2, 0), paused]);
        assert!(between(&to, &to, 0).iter().all(|share| !share.is_busy));
        let counted = Hidden::default().block_ended(Arm::B, between(&from, &to, 1_000));
        assert_eq!(counted, [share(1, 2, 500), share(2, 2, 0)]);
    }

    /// Whether client 2, beside 1, which is busy, counts in B's block of each pair. `busy`: whether it is in A's and in
    /// B's block; `None`: it has left.
    fn counts(pairs: usize, busy: impl Fn(usize) -> Option<[bool; 2]>) -> Vec<bool> {
        let mut hidden = Hidden::default();
        let of_pair = |pair: usize| {
            let block = |arm: Arm| {
                let two =
                    busy(pair).map(|busy| Share { is_busy: busy[arm.index()], ..share(2, 1, 0) });
                [share(1, 1, 9)].into_iter().chain(two).collect()
            };
            let order = if pair.is_multiple_of(3) { [Arm::A, Arm::B] } else { [Arm::B, Arm::A] };
            let counted = order.map(|arm| (arm, hidden.block_ended(arm, block(arm))));
            counted.iter().any(|(arm, shares)| *arm == Arm::B && shares.len() == 2)
        };
        (0..pairs).map(of_pair).collect()
    }

    #[test]
    fn a_client_that_b_keeps_from_having_work_counts_and_one_that_sleeps_or_ends_does_not() {
        // Of two clients: after six pairs.
        let first = counts(20, |_| Some([true, false])).iter().position(|counts| *counts);
        assert!(first == Some(5) || first == Some(6), "{first:?}");
        assert_eq!(
            counts(20, |pair| (pair < 10).then_some([true, false]))[11..],
            [false; 9],
            "left"
        );
        // It sleeps from the tenth pair on, under A, too.
        let sleeps = counts(20, |pair| Some([pair < 10, false]));
        assert_eq!((sleeps[9], &sleeps[11..]), (true, &[false; 9][..]));
        assert_eq!(counts(20, |pair| Some([pair < 10; 2]))[10..], [false; 10], "ends under both");
        // One that sleeps at times of its own: of 1000 tests.
        let accidents = (0..1_000).filter(|seed| {
            let times = std::cell::RefCell::new(fastrand::Rng::with_seed(*seed));
            let awake = || times.borrow_mut().bool();
            let busy: Vec<[bool; 2]> = (0..300).map(|_| [awake(), awake()]).collect();
            (0..300)
                .zip(counts(300, |pair| Some(busy[pair])))
                .any(|(pair, counts)| counts && !busy[pair][1])
        });
        let accidents = accidents.count();
        assert!(accidents <= 50, "{accidents} of 1000");
    }

    #[test]
    fn short_blocks_are_judged_together() {
        let mut blocks = Blocks::default();
        let uneven = [share(1, 1, 9), share(2, 1, 1)];
        let other_way = [share(1, 1, 1), share(2, 1, 9), share(3, 1, 5)];
        assert_eq!(blocks.push(&uneven, 400, 800), None);
        // 3 had no work in the first block.
        assert_eq!(blocks.push(&other_way, 400, 800), Some(1.0));
        assert_eq!(blocks.push(&other_way, 400, 800), None, "begins anew");
        assert_eq!(blocks.push(&uneven[..1], 400, 800), None, "one is left: forgotten");
        assert_eq!(blocks.push(&uneven[..1], 800, 800), None, "one has no index");
    }
}
