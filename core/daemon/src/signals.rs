//! What the operator's signals ask for.

use crate::error::CoreError;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Reload,
    /// SIGTERM or SIGINT came.
    Stop,
}

#[derive(Debug)]
pub struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
    /// Never looked at: it keeps the default action away.
    _file_size: Signal,
}

/// A write beyond RLIMIT_FSIZE is to fail with EFBIG, as one to a full disk with ENOSPC. A handler, for unlike
/// an ignored signal it is not inherited by the process that compiles policies, whose limit is to end it.
const SIGXFSZ: i32 = rustix::process::Signal::XFSZ.as_raw();

impl Signals {
    /// Take them over.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn new() -> Result<Self, CoreError> {
        let take = |kind| signal(kind).map_err(CoreError::os("signal handler"));
        Ok(Signals {
            hangup: take(SignalKind::hangup())?,
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
            _file_size: take(SignalKind::from_raw(SIGXFSZ))?,
        })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.hangup.recv() => Asked::Reload,
            _ = self.terminate.recv() => Asked::Stop,
            _ = self.interrupt.recv() => Asked::Stop,
        }
    }
}
