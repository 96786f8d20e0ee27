//! Launches on some of the SMs that have not ended.

use crate::host::log;
use crate::kernels;
use crate::lock::Locked;
use std::collections::VecDeque;
use tally_ipc::ring;
use tally_rewriter::TransformRefusal;

/// What was SM-limited.
#[derive(Clone, Copy, Debug)]
enum What {
    Kernel(usize),
    /// A graph: the program's exec.
    Graph(usize),
}

/// An SM-limited launch: its slot, its number there, what it is of.
type Limited = (usize, u32, What);
/// SM-limited launches that are remembered.
const LIMITED_MAX: usize = 256;
static ALL: Locked<VecDeque<Limited>> = Locked::new(VecDeque::new());

/// A slot's launches up to `number` have not ended for
/// [`SM_LIMITED_STUCK_NS`](tally_contract::limits::SM_LIMITED_STUCK_NS): the kernels of those that were SM-limited
/// never are again. Returns the graphs among them, by their execs.
pub(crate) fn stuck(slot: usize, number: u32) -> Vec<usize> {
    let mut found = Vec::new();
    ALL.with(|all| {
        all.retain(|(of, n, what)| {
            let is_stuck = *of == slot && ring::is_done(number, *n);
            if is_stuck {
                found.push(*what);
            }
            !is_stuck
        });
    });
    let mut graphs = Vec::new();
    for what in found {
        match what {
            What::Kernel(kernel) => {
                log!("kernel {kernel} did not end on some of the SMs: it is whole from now on");
                kernels::refuse_sm_limit(kernel);
                kernels::refuse(kernel, TransformRefusal::StuckLimited);
            }
            What::Graph(exec) => graphs.push(exec),
        }
    }
    graphs
}

fn note(slot: usize, number: u32, what: What) {
    ALL.with(|all| {
        if all.len() >= LIMITED_MAX {
            all.pop_front();
        }
        all.push_back((slot, number, what));
    });
}

/// A graph was launched on some of the SMs.
pub(crate) fn note_graph(slot: usize, number: u32, exec: usize) {
    note(slot, number, What::Graph(exec));
}

/// A kernel was.
pub(crate) fn note_kernel(slot: usize, number: u32, kernel: usize) {
    note(slot, number, What::Kernel(kernel));
}

/// A slot's launches up to `number` have ended.
pub(crate) fn ended(slot: usize, number: u32) {
    ALL.with(|all| all.retain(|(of, n, _)| *of != slot || !ring::is_done(number, *n)));
}

/// Only in a forked child.
pub(crate) fn reset() {
    ALL.reset(VecDeque::new());
}
