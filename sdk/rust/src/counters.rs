//! Counters that call the core once in many counts.

use crate::host::Counter;

/// Handed over after so many [`Counters::tick`]s ...
const TICKS_MAX: u32 = 256;
/// ... or so long after the last time. That call takes some 0.1 to 0.5 us longer: far less often than one in a
/// hundred.
const HELD_NS_MAX: u64 = 100_000_000;

/// A fixed set of counters, counted here and handed to the core in batches: a call into the core for each launch
/// would cost more than deciding it.
#[derive(Debug)]
pub struct Counters<const N: usize> {
    counters: [Counter; N],
    held: [u64; N],
    ticks: u32,
    handed_over_ns: u64,
}

impl<const N: usize> Counters<N> {
    /// Counters of these names, all at 0.
    pub fn new(names: [&str; N]) -> Self {
        Counters { counters: names.map(Counter::new), held: [0; N], ticks: 0, handed_over_ns: 0 }
    }

    /// Count so many more of the counter at this place; a place that is none counts nothing.
    pub fn add(&mut self, at: usize, delta: u64) {
        if let Some(held) = self.held.get_mut(at) {
            *held += delta;
        }
    }

    /// Once a decision: hands over what is held, now and then.
    #[inline]
    pub fn tick(&mut self, now_ns: u64) {
        self.ticks += 1;
        if self.ticks >= TICKS_MAX || now_ns.saturating_sub(self.handed_over_ns) >= HELD_NS_MAX {
            self.handed_over_ns = now_ns;
            self.hand_over();
        }
    }

    /// Hand over what is held, for example in an event.
    #[inline(never)]
    pub fn hand_over(&mut self) {
        self.ticks = 0;
        for (counter, held) in self.counters.iter().zip(&mut self.held) {
            if *held > 0 {
                counter.add(std::mem::take(held));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Call, calls};

    #[test]
    fn many_counts_are_one_call_and_none_is_lost() {
        let mut counters = Counters::new(["a", "b"]);
        for n in 0..1_000 {
            counters.add(0, 1);
            counters.add(7, 1);
            counters.tick(n);
        }
        let added = |calls: &[Call]| {
            let of = |call: &Call| match call {
                Call::CounterAdd { name, delta } if name == "a" => *delta,
                other => panic!("{other:?}"),
            };
            calls.iter().map(of).sum::<u64>()
        };
        let early = calls();
        assert_eq!((early.len(), added(&early)), (3, 768));
        counters.tick(2 * HELD_NS_MAX);
        let late = calls();
        assert_eq!((late.len(), added(&late)), (1, 232));
        counters.hand_over();
        assert!(calls().is_empty());
    }
}
