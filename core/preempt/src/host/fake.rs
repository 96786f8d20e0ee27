//! A host for tests: it knows images that it is told of, and runs what opens files at once.

use super::{Core, Host};
use crate::lock::Locked;
use std::fmt::Arguments;
use std::sync::Arc;
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_rewriter::TransformRefusal;

/// Images that are loaded.
static IMAGES: Locked<Vec<u128>> = Locked::new(Vec::new());

struct Fake;

/// Have it be the host, and an image loaded, or not.
pub(crate) fn set_loaded(image: u128, is_loaded: bool) {
    start();
    IMAGES.with(|all| {
        all.retain(|other| *other != image);
        all.extend(is_loaded.then_some(image));
    });
}

/// Have it be the host.
pub(crate) fn start() {
    super::install(&Fake);
}

impl Host for Fake {
    fn client(&self) -> Option<&'static ClientRegion> {
        None
    }
    fn core(&self) -> Option<Core> {
        None
    }
    fn holds_without_core(&self) -> bool {
        false
    }
    fn wait_for_core(&self, most: Duration) {
        tally_ipc::wait::nap(most);
    }
    fn is_exiting(&self) -> bool {
        false
    }
    fn log(&self, _: Arguments<'_>) {}
    fn spawn(&self, _: &str, _: bool, _: fn()) -> bool {
        false
    }
    fn have_filters_changed(&self) -> bool {
        false
    }
    fn run_apart(&self, work: Box<dyn FnOnce() + Send>) -> bool {
        work();
        true
    }
    fn exit_before_others(&self) {}
    fn library(&self, image: u128) -> Result<Option<String>, TransformRefusal> {
        let is_loaded = IMAGES.with(|all| all.contains(&image));
        if is_loaded { Ok(None) } else { Err(TransformRefusal::ImageGone) }
    }
    fn library_name(&self, _: u128) -> Option<String> {
        None
    }
    fn image_bytes(&self, _: u128) -> Result<Arc<Vec<u8>>, TransformRefusal> {
        Err(TransformRefusal::ImageGone)
    }
    fn image_of(&self, _: usize) -> u128 {
        0
    }
    fn kernel_of(&self, _: usize) -> Option<u32> {
        None
    }
    fn may_be_bypassed(&self) -> bool {
        true
    }
    fn help_begins(&self) -> bool {
        true
    }
    fn help_ends(&self) {}
    fn alone(&self, _: &mut dyn FnMut()) {}
    fn alone_and_idle(&self, _: usize, _: &mut dyn FnMut()) {}
    fn alone_and_idle_outside(&self, _: usize, _: &mut dyn FnMut()) {}
    fn load(&self, _: usize, _: Duration, _: &mut dyn FnMut()) {}
    fn streams_used(&self) -> u32 {
        0
    }
    fn has_queues_for(&self, _: usize, _: u32) -> bool {
        false
    }
    fn joins_at_once(&self, _: usize, _: usize) -> bool {
        true
    }
    fn is_memory_attached(&self) -> bool {
        true
    }
    fn stream_identity(&self, stream: usize) -> usize {
        stream
    }
}
