//! The dispatch thread's start.

use super::control::{self, ControlSender, Notice};
use super::park::Parker;
use super::profile_cache::ProfileCache;
use super::{Dispatch, NOTICES_MAX};
use crate::error::CoreError;
use crate::loader::Loaded;
use crate::profile_store::profiled;
use std::sync::Arc;
use tally_decision_log::Recorder;
use tally_engine::EngineConfig;
use tokio::sync::{mpsc, oneshot};

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Spin so long after the last activity.
    pub spin_ns: u64,
    /// The CPU to run on.
    pub pin_cpu: Option<u32>,
    /// Look at completions this often at first while asleep.
    pub completion_poll_ns: u64,
    pub probe_after_ns: u64,
    pub high_stall_ns: u64,
    pub engine: EngineConfig,
}

/// A running dispatch thread.
pub struct Handle {
    /// Sends requests to the thread.
    pub control: ControlSender,
    /// What the thread reports by itself.
    pub notices: mpsc::Receiver<Notice>,
    /// Ends with it; an error is a panic's message.
    pub ended: oneshot::Receiver<()>,
    /// Whether it runs on the CPU it was told to.
    pub pinned: Option<u32>,
}

/// Start it with its first policy, what earlier runs knew of kernels, and who reads along.
///
/// # Errors
/// If a descriptor or the thread cannot be made.
pub fn start(
    settings: Settings,
    policy: Loaded,
    loaded: Arc<profiled::Loaded>,
    recorder: Recorder,
) -> Result<Handle, CoreError> {
    let parker = Parker::new().map_err(CoreError::os("epoll"))?;
    let (sender, receiver) = control::channel(&parker).map_err(CoreError::os("control eventfd"))?;
    let (notice_sender, notices) = mpsc::channel(NOTICES_MAX);
    let (end_sender, ended) = oneshot::channel();
    let (pin_sender, pin_receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("tally-dispatch".into())
        .spawn(move || {
            let _end = end_sender;
            Parker::wake_on_time();
            let _ = pin_sender.send(settings.pin_cpu.filter(|&cpu| pin(cpu)));
            let profile_cache = ProfileCache::new(loaded);
            Dispatch::new(
                settings,
                policy,
                recorder,
                profile_cache,
                receiver,
                parker,
                notice_sender,
            )
            .run();
        })
        .map_err(CoreError::os("dispatch thread"))?;
    let pinned = pin_receiver.recv().unwrap_or_default();
    Ok(Handle { control: sender, notices, ended, pinned })
}

fn pin(cpu: u32) -> bool {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu as usize);
    rustix::thread::sched_setaffinity(None, &set).is_ok()
}
