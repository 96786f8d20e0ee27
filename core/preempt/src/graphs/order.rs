//! Order between launches of one exec.
//!
//! The driver lets a launch of an exec begin when the launch of it before has ended, whichever
//! streams they are on. Launched in parts that no longer holds by itself: the parts are other
//! execs, and their first one would only wait for the first one of the launch before. So it is
//! remembered where an exec was launched last, an event is recorded behind each launch in parts,
//! and
//! - on the same stream, the stream keeps the order;
//! - behind a launch in parts on another stream, the launch waits for the event, on the GPU;
//! - behind a whole launch on another stream, or one that nobody saw, the launch is whole: the
//!   driver orders those.
//!
//! A launch of a copy on some of the SMs counts as one in parts. An exec that has such copies has the event recorded
//! behind its whole launches, too: else one that changes streams would stay whole for ever.
//!
//! Every launch of a kept exec must come through here ([`begin`], then [`Launching::end`] if anything was
//! issued), whole launches and those of ungated clients included. From one call to the other no other thread
//! launches that exec: its lock is held in the driver. CUDA lets only one thread at a time launch an exec; one that
//! does not keep to that waits for the other at most [`WHOLE_WAIT_MAX`]. Then both launches are the driver's to order,
//! and the exec is launched whole for good.

use super::TABLE;
use super::reason::Reason;
use crate::cuda::{Ptr, STREAM_PER_THREAD, driver};
use crate::host::host;
use crate::lock::ArcHeld;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// How long a whole launch waits for another launch of its exec.
const WHOLE_WAIT_MAX: Duration = Duration::from_secs(5);
/// The same for a launch in parts, while other threads' calls wait for it.
const PARTS_WAIT_MAX: Duration = Duration::from_millis(2);

/// Streams destroyed so far: a handle may be another stream's since.
static DESTROYED: AtomicU64 = AtomicU64::new(0);

/// Where an exec was launched last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Last {
    Never,
    /// Launched last on this stream.
    On {
        stream: Identity,
        /// Streams destroyed until then: a handle may be another stream's now.
        destroyed: u64,
        /// The event is behind it: it was in parts, or might have been.
        in_parts: bool,
    },
}

/// What tells a stream from all others: its identity in its context (see
/// [`Host::stream_identity`](crate::host::Host::stream_identity)), and that context where the handle does not say
/// which.
type Identity = (usize, usize);

fn identity(stream: usize) -> Identity {
    let context = if stream > STREAM_PER_THREAD { 0 } else { driver().current_context() };
    (host().stream_identity(stream), context)
}

/// What to do about the launch before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Behind {
    Nothing,
    WaitForEvent,
    LaunchWhole,
}

impl Last {
    fn behind(self, stream: Identity, destroyed: u64, in_parts: bool) -> Behind {
        match self {
            Last::Never => Behind::Nothing,
            Last::On { stream: s, destroyed: d, .. } if s == stream && d == destroyed => {
                Behind::Nothing
            }
            Last::On { in_parts: true, .. } => Behind::WaitForEvent,
            Last::On { .. } if in_parts => Behind::LaunchWhole,
            Last::On { .. } => Behind::Nothing,
        }
    }
}

pub fn stream_destroyed() {
    if super::has_copies() {
        DESTROYED.fetch_add(1, SeqCst);
    }
}

/// A launch of an exec that is being made.
pub struct Launching {
    exec: usize,
    stream: usize,
    /// Whether this launch may be made in parts.
    pub may_be_in_parts: bool,
    /// `None`: the exec is not kept, or another thread did not leave the driver with it.
    held: Option<ArcHeld>,
}

/// Before a launch of `exec` on `stream` (an explicit handle, not capturing), whole or `in_parts`.
pub fn begin(exec: Ptr, stream: usize, in_parts: bool) -> Launching {
    let exec = exec as usize;
    let mut launching = Launching { exec, stream, may_be_in_parts: false, held: None };
    if !super::has_copies() {
        return launching;
    }
    let lock = TABLE.with(|table| Some(table.records.get(&exec)?.launching.clone()));
    let Some(lock) = lock else { return launching };
    launching.held = lock.lock_arc_within(if in_parts { PARTS_WAIT_MAX } else { WHOLE_WAIT_MAX });
    if launching.held.is_none() {
        if !in_parts {
            // Where it was launched last is not known any more.
            let _old = TABLE.with(|table| table.spoil(exec, Reason::Contended));
        }
        return launching;
    }
    let identity = identity(stream);
    let found = TABLE.with(|table| {
        let record = table.records.get(&exec)?;
        let behind = record.last.behind(identity, DESTROYED.load(SeqCst), in_parts);
        Some((behind, record.event.clone()))
    });
    let ordered = match found {
        None | Some((Behind::LaunchWhole, _)) => false,
        Some((Behind::Nothing, _)) => true,
        // Refused only in a context in error, in which nothing runs.
        Some((Behind::WaitForEvent, event)) => event.is_some_and(|e| e.hold(stream)),
    };
    launching.may_be_in_parts = in_parts && ordered;
    launching
}

impl Launching {
    /// The launch was made. One of which nothing was issued is dropped without this: the launch before it is still the
    /// last one.
    pub fn end(self, in_parts: bool) {
        let Launching { exec, stream, held, .. } = self;
        if held.is_none() {
            return;
        }
        let identity = identity(stream);
        let event = TABLE.with(|table| {
            let record = table.records.get(&exec)?;
            record.event.clone().filter(|_| in_parts || record.limits.has_copies())
        });
        let is_behind = event.is_some_and(|e| e.record(stream));
        TABLE.with(|table| {
            let destroyed = DESTROYED.load(SeqCst);
            let last = Last::On { stream: identity, destroyed, in_parts: in_parts || is_behind };
            table.records.get_mut(&exec).map(|record| record.last = last)
        });
        if !in_parts || is_behind {
            return;
        }
        // The context is in error, most likely.
        let _old = TABLE.with(|table| table.spoil(exec, Reason::Driver("cuEventRecord", 0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graphs::reason::GraphState;
    use std::time::Instant;

    #[test]
    fn nobody_waits_for_ever_for_another_launch_of_the_exec() {
        let exec = std::ptr::without_provenance_mut(0x7e57);
        drop(TABLE.with(|table| table.insert(exec as usize, Err(Reason::OnePart))));
        let state = || super::super::state(exec);
        let other = begin(exec, 16, false);
        assert!(other.held.is_some());
        let start = Instant::now();
        let parts = begin(exec, 32, true);
        assert!(parts.held.is_none() && !parts.may_be_in_parts, "it is launched whole");
        assert_eq!(state(), GraphState::Whole(Reason::OnePart));
        let whole = begin(exec, 32, false);
        assert!(whole.held.is_none() && start.elapsed() >= WHOLE_WAIT_MAX);
        assert_eq!(state(), GraphState::Whole(Reason::Contended), "for good");
        whole.end(false);
        other.end(false);
        assert!(begin(exec, 16, false).held.is_some(), "it is free again");
        drop(TABLE.with(|table| table.remove(exec as usize)));
    }

    #[test]
    fn only_another_stream_needs_more_than_the_stream_s_own_order() {
        let on = |in_parts| Last::On { stream: (16, 0), destroyed: 3, in_parts };
        for in_parts in [false, true] {
            assert_eq!(Last::Never.behind((16, 0), 3, in_parts), Behind::Nothing);
            assert_eq!(on(false).behind((16, 0), 3, in_parts), Behind::Nothing);
            assert_eq!(on(true).behind((16, 0), 3, in_parts), Behind::Nothing);
            assert_eq!(on(true).behind((32, 0), 3, in_parts), Behind::WaitForEvent);
            assert_eq!(on(true).behind((16, 0), 4, in_parts), Behind::WaitForEvent);
        }
        assert_eq!(on(false).behind((32, 0), 3, true), Behind::LaunchWhole);
        assert_eq!(on(false).behind((16, 7), 3, true), Behind::LaunchWhole, "in another context");
        assert_eq!(on(false).behind((16, 0), 4, true), Behind::LaunchWhole, "another's handle now");
        assert_eq!(on(false).behind((32, 0), 3, false), Behind::Nothing);
    }
}
