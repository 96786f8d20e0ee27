//! What the operator's signals ask for.

use crate::error::CoreError;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Reload,
    /// SIGTERM or SIGINT.
    Stop,
}

#[derive(Debug)]
pub struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Take them over.
    ///
    /// # Errors
    /// The system call's.
    pub fn new() -> Result<Self, CoreError> {
        let take = |kind| signal(kind).map_err(CoreError::os("signal handler"));
        Ok(Signals {
            hangup: take(SignalKind::hangup())?,
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.hangup.recv() => Asked::Reload,
            _ = self.terminate.recv() => Asked::Stop,
            _ = self.interrupt.recv() => Asked::Stop,
        }
    }
}
