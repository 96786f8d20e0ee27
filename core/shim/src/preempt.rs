//! What transformed launches, `tally-preempt`, need of the shim.

use crate::{
    apart, bypass, capture, completion, exit, images, known, link, log, names, opens, quiesce,
    slots, state, streams, threads,
};
use std::fmt::Arguments;
use std::sync::Arc;
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_preempt::cuda::STREAM_PER_THREAD;
use tally_preempt::host::{Core, Host};
use tally_rewriter::TransformRefusal;

/// Calls of which some may have put something into a stream that another thread can still have wait at once: a stream
/// holds about a thousand operations.
const JOIN_ROOM: u64 = 128;

pub struct Shim;

impl Host for Shim {
    fn client(&self) -> Option<&'static ClientRegion> {
        state::client()
    }

    fn core(&self) -> Option<Core> {
        state::registration()
            .map(|registration| Core { region: registration.core, spin: registration.spin })
    }

    fn holds_without_core(&self) -> bool {
        state::fail_hold()
    }

    fn wait_for_core(&self, most: Duration) {
        state::wait_for_core(most);
    }

    fn is_exiting(&self) -> bool {
        state::is_exiting()
    }

    fn log(&self, line: Arguments<'_>) {
        log::line(line);
    }

    fn spawn(&self, name: &str, compiles: bool, run: fn()) -> bool {
        let stack_bytes =
            if compiles { threads::STACK_BYTES_COMPILING } else { threads::STACK_BYTES };
        let started = threads::spawn_with(name, stack_bytes, run);
        started.inspect_err(|error| log!("thread {name}: {error}")).is_ok()
    }

    fn have_filters_changed(&self) -> bool {
        link::have_filters_changed()
    }

    fn run_apart(&self, work: Box<dyn FnOnce() + Send>) -> bool {
        apart::run(work).is_some()
    }

    fn exit_before_others(&self) {
        exit::before_others();
    }

    fn library(&self, image: u128) -> Result<Option<String>, TransformRefusal> {
        images::library(image)
    }

    fn library_name(&self, image: u128) -> Option<String> {
        images::library_name(image)
    }

    fn image_bytes(&self, image: u128) -> Result<Arc<Vec<u8>>, TransformRefusal> {
        images::bytes(image)
    }

    fn image_of(&self, kernel: usize) -> u128 {
        names::image(kernel)
    }

    fn kernel_of(&self, function: usize) -> Option<u32> {
        names::known(function)
    }

    fn may_be_bypassed(&self) -> bool {
        bypass::is_found()
    }

    fn help_begins(&self) -> bool {
        quiesce::help_begins()
    }

    fn help_ends(&self) {
        quiesce::help_ends();
    }

    fn alone(&self, issue: &mut dyn FnMut()) {
        let _ = quiesce::alone(|| {
            issue();
            Some(())
        });
    }

    fn alone_and_idle(&self, context: usize, work: &mut dyn FnMut()) {
        let _ = quiesce::alone(|| quiesce::is_idle(context).then(work));
    }

    fn alone_and_idle_outside(&self, context: usize, work: &mut dyn FnMut()) {
        let work = || quiesce::is_idle(context).then(work);
        let _ = quiesce::alone_outside(Duration::ZERO, work);
    }

    fn load(&self, context: usize, patience: Duration, load: &mut dyn FnMut()) {
        let _ = quiesce::load(context, patience, load);
    }

    fn streams_used(&self) -> u32 {
        slots::used()
    }

    fn has_queues_for(&self, context: usize, more: u32) -> bool {
        streams::has_queues_for(more)
            && streams::has_queues_for(more + streams::used_without_slot(context))
    }

    fn joins_at_once(&self, slot: usize, stream: usize) -> bool {
        // Only its own thread can have its own default stream wait, and a capture may forbid others to have one wait.
        // Calls that the shim does not see would find the stream idle. And who joins must find room in it.
        stream == STREAM_PER_THREAD
            || capture::is_active()
            || opens::has_streams_elsewhere()
            || bypass::is_found()
            || known::is_new_found()
            || completion::enqueued_since_done(slot) > JOIN_ROOM
    }

    fn is_memory_attached(&self) -> bool {
        streams::is_memory_attached()
    }

    fn stream_identity(&self, stream: usize) -> usize {
        capture::identity(stream)
    }
}
