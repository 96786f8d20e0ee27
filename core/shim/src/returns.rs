//! Has the program's streams [return](lazy_return) from some of the SMs before a call that could tell the difference.
//!
//! | call | what returns, or is waited for |
//! | --- | --- |
//! | puts something into a stream, or waits for it | that stream |
//! | copies and fills without a stream, and any call that puts something into a stream | the legacy stream |
//! | waits for the context, gives memory back, unloads code | all: the calling thread waits |
//! | concerns several streams or contexts | all |
//!
//! A stream of another thread's is used only while that thread cannot destroy or capture it ([`asking`]).

use crate::slots::{self, LIVE, SLOTS};
use crate::{asking, capture, quiesce, state};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use tally_ipc::wait;
use tally_preempt::cuda::{Ptr, STREAM_LEGACY, SUCCESS, driver};
use tally_preempt::lazy_return::{self, Away};

/// How long the end of a context waits for what its streams have not returned from.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

/// Before a call that is given these arguments, of which one may be the stream that it puts something into.
#[cold]
pub fn before(arguments: &[usize]) {
    each(|away| match away.stream {
        // Beside a capture only if the call may be about it.
        STREAM_LEGACY if capture::is_active() && !arguments.iter().any(|a| *a <= STREAM_LEGACY) => {
            false
        }
        STREAM_LEGACY => is_legacy_here(away),
        of => arguments.contains(&of),
    });
}

/// Before a call that uses a stream.
#[inline]
pub fn stream(stream: Ptr, per_thread: bool) {
    if lazy_return::is_any() {
        let stream = slots::explicit(stream, per_thread);
        each(|away| match away.stream {
            STREAM_LEGACY => stream == STREAM_LEGACY && is_legacy_here(away),
            of => of == stream,
        });
    }
}

/// Before a blocking stream of a context is used for the first time: it waits for the legacy one.
#[inline]
pub fn legacy(context: usize) {
    if lazy_return::is_any() {
        legacy_now(context);
    }
}

#[cold]
fn legacy_now(context: usize) {
    let is_legacy = |away: &Away| away.stream == STREAM_LEGACY && away.context == context;
    for away in lazy_return::away().filter(is_legacy) {
        if is_legacy_here(&away) {
            quiesce::while_open(|| give(away.slot));
        } else {
            driver().relaxed(|| lazy_return::wait(away.slot));
        }
    }
}

/// Before a call that concerns more streams than its arguments name.
#[inline]
pub fn all() {
    if lazy_return::is_any() {
        all_now();
    }
}

#[cold]
fn all_now() {
    for away in lazy_return::away() {
        if away.stream == STREAM_LEGACY {
            legacy_now(away.context);
        } else {
            let slot = &SLOTS[away.slot & 63];
            let is_there = || {
                slot.phase.load(SeqCst) == LIVE
                    && slot.stream.load(SeqCst) == away.stream
                    && !capture::is_active()
            };
            let _ = asking::ask(is_there, || give(away.slot));
        }
    }
}

/// Before a call that waits for the whole context.
#[inline]
pub fn settle() {
    if lazy_return::is_any() {
        settle_now();
    }
}

#[cold]
fn settle_now() {
    for away in lazy_return::away() {
        // Asking for an event is allowed while another thread captures.
        driver().relaxed(|| lazy_return::wait(away.slot));
    }
}

/// Before the streams of a context's green contexts are destroyed.
pub fn before_end(context: usize) {
    let start = Instant::now();
    while !are_done(context) && start.elapsed() < END_WAIT_MAX && !state::is_exiting() {
        wait::nap(Duration::from_micros(50));
    }
}

/// Whether nothing runs in a context that its streams have not returned from. By a thread of the shim's.
pub fn are_done(context: usize) -> bool {
    lazy_return::away().filter(|away| away.context == context).all(|away| is_done(away.slot))
}

/// The same of a slot.
pub fn is_done(slot: usize) -> bool {
    asking::ask(|| true, || lazy_return::is_done(slot)).unwrap_or(true)
}

#[cold]
fn each(returns: impl Fn(&Away) -> bool) {
    for away in lazy_return::away().filter(|away| returns(away)) {
        quiesce::while_open(|| give(away.slot));
    }
}

fn give(slot: usize) -> i32 {
    lazy_return::give(slot);
    SUCCESS
}

/// It is the legacy stream, and that of the current context.
fn is_legacy_here(away: &Away) -> bool {
    away.stream == STREAM_LEGACY && driver().current_context() == away.context
}
