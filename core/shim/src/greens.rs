//! The program's green contexts.

use std::collections::BTreeMap;
use std::ffi::c_int;
use tally_preempt::lock::Locked;

/// A green context of the program's.
#[derive(Clone, Copy, Debug)]
pub struct Green {
    pub device: c_int,
    /// Its handle as a context; 0: the program has never asked for it, and nothing is known by it.
    pub context: usize,
}

pub static GREENS: Locked<BTreeMap<usize, Green>> = Locked::new(BTreeMap::new());

/// The green context that a context is the handle of; 0: of none.
pub fn of_context(context: usize) -> usize {
    GREENS.with(|all| {
        let mut found = all.iter().filter(|(_, green)| green.context == context && context != 0);
        found.next().map_or(0, |(green, _)| *green)
    })
}

/// Only in a forked child.
pub fn reset() {
    GREENS.reset(BTreeMap::new());
}
