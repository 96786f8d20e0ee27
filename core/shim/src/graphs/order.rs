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
//! Every launch of a kept exec must come through here ([`before`], then [`after`]), whole ones
//! and those under a standing grant too.

use super::{Reason, TABLE};
use crate::capture;
use crate::cu::{Ptr, SUCCESS, driver};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Streams destroyed so far: a handle may be another stream's since.
static DESTROYED: AtomicU64 = AtomicU64::new(0);

/// Where an exec was launched last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Last {
    /// Nowhere.
    Never,
    /// On this stream.
    On {
        /// Its identity, see [`capture::identity`].
        stream: usize,
        /// Streams destroyed until then: a handle may be another stream's now.
        destroyed: u64,
        /// In parts: the event is behind it.
        in_parts: bool,
    },
}

/// What to do about the launch before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Behind {
    Nothing,
    WaitForEvent,
    LaunchWhole,
}

impl Last {
    fn behind(self, stream: usize, destroyed: u64, in_parts: bool) -> Behind {
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

/// A stream was destroyed.
pub fn stream_destroyed() {
    if super::is_any_kept() {
        DESTROYED.fetch_add(1, SeqCst);
    }
}

/// Before a launch of `exec` on `stream` (an explicit handle, not capturing), whole or
/// `in_parts`. Returns whether it may be launched in parts; if it says no, launch it whole.
pub fn before(exec: Ptr, stream: usize, in_parts: bool) -> bool {
    if !super::is_any_kept() {
        return false;
    }
    let identity = capture::identity(stream);
    let found = TABLE.with(|table| {
        let record = table.records.get(&(exec as usize))?;
        let behind = record.last.behind(identity, DESTROYED.load(SeqCst), in_parts);
        Some((behind, record.event.clone()))
    });
    match found {
        None | Some((Behind::LaunchWhole, _)) => false,
        Some((Behind::Nothing, _)) => in_parts,
        Some((Behind::WaitForEvent, event)) => {
            if !event.is_some_and(|e| e.hold(stream)) {
                // As a last resort; the context is lost, most likely.
                let _ = driver().ctx_synchronize.map(|f| {
                    // SAFETY: no arguments.
                    unsafe { f() }
                });
            }
            in_parts
        }
    }
}

/// After it, however it ended.
pub fn after(exec: Ptr, stream: usize, in_parts: bool) {
    if !super::is_any_kept() {
        return;
    }
    let identity = capture::identity(stream);
    let event = TABLE.with(|table| {
        let record = table.records.get_mut(&(exec as usize))?;
        record.last = Last::On { stream: identity, destroyed: DESTROYED.load(SeqCst), in_parts };
        record.event.clone()
    });
    if !in_parts || event.is_some_and(|e| e.record(stream)) {
        return;
    }
    // Nothing would show when it ends: wait for it, and do without parts from now on.
    // SAFETY: the launch's stream.
    let ended = driver().stream_synchronize.map(|f| unsafe { f(stream as Ptr) });
    crate::log!("graph {exec:?}: no event behind it, waited for: {}", ended == Some(SUCCESS));
    let _old = TABLE.with(|table| {
        if let Some(record) = table.records.get_mut(&(exec as usize)) {
            record.last = Last::Never;
        }
        table.spoil(exec as usize, Reason::Driver("cuEventRecord", 0))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_stream_needs_more_than_the_stream_s_own_order() {
        let on = |in_parts| Last::On { stream: 16, destroyed: 3, in_parts };
        for in_parts in [false, true] {
            assert_eq!(Last::Never.behind(16, 3, in_parts), Behind::Nothing);
            assert_eq!(on(false).behind(16, 3, in_parts), Behind::Nothing);
            assert_eq!(on(true).behind(16, 3, in_parts), Behind::Nothing);
            assert_eq!(on(true).behind(32, 3, in_parts), Behind::WaitForEvent);
            assert_eq!(on(true).behind(16, 4, in_parts), Behind::WaitForEvent);
        }
        assert_eq!(on(false).behind(32, 3, true), Behind::LaunchWhole);
        assert_eq!(on(false).behind(16, 4, true), Behind::LaunchWhole, "another's handle now");
        assert_eq!(on(false).behind(32, 3, false), Behind::Nothing);
    }
}
