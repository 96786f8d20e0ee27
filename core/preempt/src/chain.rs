//! Graphs in parts: the chain of a graph's parts and of the kernels that are launched by themselves.

use crate::cuda::{CuResult, Ptr, SUCCESS, driver};
use crate::graphs::build::Step;
use crate::graphs::reason::GraphState;
use crate::graphs::solo::Solo;
use crate::graphs::{self, Making, order};
use crate::launch::PlannedLaunch;
use crate::progress::Progress;
use crate::watch::{self, Open, PARTS_MAX, record};
use crate::{form, gate, host, issue};
use std::sync::atomic::Ordering::Relaxed;
use tally_ipc::wait::now_ns;

/// Launch a graph as a chain of parts of about so many kernels. `None`: nothing was issued.
pub fn launch(planned: &PlannedLaunch<'_>, exec: Ptr, kernels: u32) -> Option<CuResult> {
    let GraphState::Transformable { kernel_nodes } = graphs::state(exec) else { return None };
    if !graphs::is_at_home(exec, planned.context) {
        return None;
    }
    let kernels = kernels.max(kernel_nodes.div_ceil(PARTS_MAX as u32));
    let chain = graphs::chain(exec, kernels, Making::IfIdle).ok()?;
    let steps = chain.steps();
    driver().graph_launch?;
    if steps.len() < 2 || planned.slot >= gate::NOTICES {
        return None;
    }
    let is_own = |step: &Step| matches!(step, Step::Kernel(_));
    // A graph can be launched in any context, a kernel only in its own.
    if steps.iter().any(is_own) && driver().current_context() != gate::context() {
        return None;
    }
    // If a part fails after others were issued, the program gets the error, as for any launch that fails.
    host::alone(|| {
        // An exec's kernels may have the shared memory that their functions might have when it was made.
        let lacks_memory =
            |step: &Step| matches!(step, Step::Kernel(solo) if !solo.may_have_its_memory());
        if steps.iter().any(lacks_memory) {
            return None;
        }
        // Not earlier: a thread that waits for the exec counts as being in the driver, and `alone` waits until none is.
        let launching = order::begin(exec, planned.stream, true);
        if !launching.may_be_in_parts {
            return None;
        }
        let result = all(planned, steps)?;
        launching.end(true);
        Some(result)
    })
}

/// All steps of a chain. `None`: nothing was issued.
fn all(planned: &PlannedLaunch<'_>, steps: &[Step]) -> Option<CuResult> {
    let is_own = |step: &Step| matches!(step, Step::Kernel(_));
    let mut result = None;
    // Parts that follow one another are watched as one.
    let together = steps.chunk_by(|a, b| !is_own(a) && !is_own(b));
    for group in together.flat_map(|group| group.chunks(PARTS_MAX)) {
        let planned = PlannedLaunch { follows: result.is_some(), ..*planned };
        let done = match group {
            [Step::Kernel(solo)] => kernel(&planned, solo),
            graphs => parts(&planned, graphs),
        };
        // Whatever was issued, even of a group that failed, is not launched again. A context in which a part is
        // refused behind others is in error: the program hears that.
        result = done.or(result);
        if done != Some(SUCCESS) {
            break;
        }
    }
    result
}

/// Parts, one after the other. `None`: nothing was issued.
fn parts(planned: &PlannedLaunch<'_>, steps: &[Step]) -> Option<CuResult> {
    let graph_launch = driver().graph_launch?;
    let stream = planned.stream as Ptr;
    let events = watch::events(steps.len());
    if events.is_none() && !planned.follows {
        return None;
    }
    let mark = |at: usize| events.iter().for_each(|events| record(events, at, stream));
    mark(0);
    let mut issued = 0;
    let mut result = SUCCESS;
    for step in steps {
        let Step::Graph(exec) = step else { continue };
        if issued > 0 || planned.follows {
            let _ = gate::wait_in(planned.stream);
            mark(2 * issued);
        }
        // SAFETY: an exec that the chain keeps alive, the program's stream.
        result = unsafe { graph_launch(*exec as Ptr, stream) };
        if result != SUCCESS {
            break;
        }
        mark(2 * issued + 1);
        issued += 1;
    }
    let Some(events) = events else { return Some(result) };
    if issued == 0 {
        watch::give_back(events);
        return if planned.follows { Some(result) } else { None };
    }
    watch::opened(Open {
        ticket: planned.ticket,
        kernel: usize::MAX,
        slot: planned.slot,
        number: planned.number,
        events,
        // Parts of a graph end whatever others do: there is nothing to rescue.
        progress: Progress::new(issued, true, 0, false, now_ns()),
        epoch2: 0,
        again: None,
        launches_yielded: false,
        helping: None,
    });
    Some(result)
}

/// A kernel by itself: transformed, or, should that not be possible any more, as it is. `None`: nothing was issued.
fn kernel(planned: &PlannedLaunch<'_>, solo: &Solo) -> Option<CuResult> {
    let planned = PlannedLaunch { kernel: solo.kernel, ..*planned };
    // A queue's room is the whole program's: see `watch::has_room`.
    let in_parts = || solo.with(|arguments| form::solo(&planned, arguments, solo.way));
    if let Some(result) = watch::has_room().then(in_parts).flatten() {
        planned.client.counters.graph_nodes_transformed.fetch_add(1, Relaxed);
        return Some(result);
    }
    if planned.follows {
        let _ = gate::wait_in(planned.stream);
    }
    let mut result = solo.with(|arguments| issue::whole(arguments, planned.stream));
    if result != SUCCESS && solo.has_hints() {
        // A launch of the program's does not fail for a hint, which it gave to a graph.
        result = solo.without_hints(|arguments| issue::whole(arguments, planned.stream));
    }
    (result == SUCCESS || planned.follows).then_some(result)
}
