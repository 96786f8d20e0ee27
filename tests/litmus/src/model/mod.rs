//! Does a program end, whatever the schedule, and with which values?
//!
//! A conservative check: what it accepts ends bare on every device that keeps the rules
//! below, and always with the values given. What it refuses may still do so.
//!
//! A program becomes *moments*: the begin and return of each call, the start and end of each
//! piece of work. Two relations between them:
//!
//! - **before**: `a` comes before `b` in every run. From the order of a thread's calls, flags,
//!   starts and joins of threads, the order within a stream, events, the legacy stream (both ways,
//!   among blocking streams), launches of one exec, dependencies in a graph, synchronising calls, and words: a poll
//!   ends after the write that it needs ([`words`]).
//! - **waits**: `b` may have to wait for `a`. All of the above; and, where the order of two calls
//!   of different threads is open, both directions of what their order decides. Besides, as measured on an H200
//!   (driver 580), and worse where nothing is known:
//!   - *Hardware queues*: work waits until all that was submitted earlier, to any stream of that
//!     context, has left the head of the queue: kernels, graphs, copies, fills and host functions when
//!     they start, all other work when it ends. Event records without timing neither wait nor
//!     are waited for. Left out only where queues are assigned dynamically (8 connections or more) and the
//!     program's streams of that context are at most half as many.
//!   - *Depth*: no more than [`DEPTH_MAX`] pieces of work are under way in a context.
//!   - *Calls that wait for the device* (`cuMemFree`, loads and unloads of modules, the end of an exec or a context)
//!     wait for all of it, and any call of another thread may wait for them. Queries and plain stores never wait.
//!   - `CUDA_LAUNCH_BLOCKING`: a launch returns when its work has ended, and any call of another thread may wait for
//!     it. A copy from pageable memory returns when it has ended.
//!   - *Graphs*: with fewer than 8 connections, or blocking launches, nodes that do not depend on each other
//!     run in either order.
//!   - *SMs*: of kernels that may spin at one time all blocks fit, one an SM, with one SM left; or
//!     it is one kernel only, of one wave.
//!
//! Every wait but those for words, flags and threads' ends is for something submitted earlier. So if
//! there is a circle, one of these is in it: the program ends if nothing that such a
//! wait is for may itself wait for the waiter.
//!
//! Values are those of one order of execution; all give the same ones because pieces of work that touch
//! a word are ordered, unless both add to it atomically, or belong to different launches of the same exec.

mod graph;
mod moments;
mod order;
mod rules;
#[cfg(test)]
mod tests;
mod words;

use crate::program::{Device, Program};
use moments::Moments;

/// Pieces of work that may be under way in one context: a hardware queue holds about 1020.
const DEPTH_MAX: usize = 1_000;
/// From so many connections on streams are given queues that are free.
const DYNAMIC_MIN: u8 = 8;

/// The words of each context, and of the host, at the end.
pub type Values = (Vec<Vec<u32>>, Vec<u32>);

/// What every run of a program ends with on `device`.
///
/// # Errors
/// Why it is not certain that it ends, or always with the same values.
pub fn check(program: &Program, device: Device) -> Result<Values, String> {
    let mut moments = Moments::of(program, device)?;
    rules::settle(&mut moments)?;
    rules::refuse_ambiguity(&moments)?;
    graph::fits(&moments)?;
    rules::refuse_circles(&moments)?;
    words::refuse_races(&moments)?;
    words::evaluate(&moments)
}
