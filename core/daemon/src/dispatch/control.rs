//! What the control plane asks of the dispatch thread. A bounded channel, a
//! flag that the loop looks at, and an eventfd that ends its sleep.

use super::background::{Forgotten, Piece};
use super::kernels::KernelShare;
use super::park::{Bells, Parker};
use super::snapshot::{ClientNumbers, Snapshot};
use crate::gpus::Witness;
use crate::loader::Loaded;
use crate::quota::User;
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tally_ab::Sample;
use tally_ab::accident::Before;
use tally_contract::objective::Objective;
use tally_decision_log::Tap;
use tally_decision_log::recorder::Removed;
use tally_engine::policy::{ClientInfo, Fault};
use tally_ipc::map::Mapped;
use tally_ipc::{ClientRegion, CoreRegion};
use tally_wasm_host::{LastFault, PolicyStatus, Saved};
use tokio::sync::oneshot;

/// Requests that may wait for the dispatch thread.
const PENDING_MAX: usize = 1_024;

/// A client as handed to the dispatch thread.
pub struct NewClient {
    /// What the engine is told.
    pub info: ClientInfo,
    /// The client's region, mapped read-only.
    pub region: Mapped<ClientRegion>,
    /// The core's region, which the client maps read-only.
    pub core: Mapped<CoreRegion>,
    /// Rings when the client writes its doorbell ([`super::park::doorbell`]); watched already.
    pub doorbell: OwnedFd,
    /// What its word on the GPU counts for.
    pub witness: Witness,
    /// Ticket at which the core begins to read the client's ring.
    pub first_ticket: u64,
    /// What its user may take of the kernel table.
    pub kernels: Arc<KernelShare>,
}

/// What programs may have by asking, permille.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// All of them together.
    pub together: u32,
    /// Those of the client's user together; `None`: no less.
    pub of_user: Option<(User, u32)>,
}

/// The floor that a best-effort client asks for as it registers.
#[derive(Clone, Copy, Debug)]
pub struct AskedMinShare {
    /// The floor asked for, permille.
    pub asked: u32,
    pub allowed: Allowed,
}

pub enum Control {
    /// Serve this client from now on.
    Join {
        client: Box<NewClient>,
        min_share: Option<AskedMinShare>,
        /// Told when it is served: it may be welcomed.
        done: oneshot::Sender<()>,
    },
    /// Serve this client no longer.
    Leave {
        id: u32,
        /// Gets its last figures and what must be dropped elsewhere.
        done: oneshot::Sender<Option<Left>>,
    },
    /// One at a time: a second one would take the place of the first.
    Status {
        /// Most kernels that the snapshot lists.
        kernels: usize,
        done: oneshot::Sender<Snapshot>,
    },
    /// What the active policy last did wrong.
    LastFault { done: oneshot::Sender<Option<LastFault>> },
    /// Tell what was profiled of kernels since it was told last.
    Profiled {
        /// From this place of the table on.
        from: u32,
        /// Receives one piece of the profile.
        done: oneshot::Sender<Piece>,
    },
    /// Forget what is known of kernels.
    Forget {
        /// Told when it is done; gets what must be dropped elsewhere.
        done: oneshot::Sender<Forgotten>,
    },
    /// Have the active policy write down what it knows.
    SavePolicy {
        /// Gets it; `None` if it keeps nothing.
        done: oneshot::Sender<Option<Result<Saved, Fault>>>,
    },
    /// Measure, for an A/B test.
    Measure {
        /// Where to record from now on; `None`: no longer.
        next: Option<Box<Sample>>,
        /// A new stretch begins: requests under way belong to neither.
        cut: bool,
        /// Gets what was recorded until now.
        done: oneshot::Sender<Option<Box<Sample>>>,
    },
    /// Count recent requests, for the guards of an A/B test.
    Recent {
        /// Times to count longer requests of, ns.
        limits_ns: Vec<u64>,
        done: oneshot::Sender<Before>,
    },
    /// Give a client other objectives, or none. One that is as before changes nothing.
    SetObjectives {
        id: u32,
        objective: Option<Objective>,
        /// Longest time of a token, ns.
        tpot_ns: Option<u64>,
        /// Told whether there is such a high-priority client.
        done: oneshot::Sender<bool>,
    },
    /// A best-effort client's floor, permille; 0: none.
    SetMinShare {
        id: u32,
        asked: u32,
        /// `None`: an admin asks.
        allowed: Option<Allowed>,
        /// Told what it is granted; `None`: there is no such best-effort client.
        done: oneshot::Sender<Option<u32>>,
    },
    SetPolicy {
        policy: Loaded,
        /// Generation of the policy, for [`Notice::Disabled`].
        generation: u64,
        /// Gets the old one, to be dropped elsewhere.
        done: oneshot::Sender<Retired>,
    },
    /// Let somebody read along what reaches the policy.
    Tap {
        tap: Box<Tap>,
        /// Told when it is in.
        done: oneshot::Sender<()>,
    },
    Untap {
        id: u64,
        /// Gets what must be dropped elsewhere.
        done: oneshot::Sender<Removed>,
    },
    /// Let everything go, then end the thread.
    Drain {
        /// Wait at most so long for the rings to empty.
        within: Duration,
        /// Gets whether the rings became empty.
        done: oneshot::Sender<bool>,
    },
}

/// A client that is no longer served. Dropping it unmaps and closes things,
/// which takes long enough to be done off the dispatch thread.
pub struct Left {
    /// Its figures when it left.
    pub numbers: ClientNumbers,
    pub(super) _client: Box<super::client::DispatchClient>,
}

impl std::fmt::Debug for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Left").finish_non_exhaustive()
    }
}

/// A policy that is no longer active; takes tens of microseconds to drop.
pub struct Retired {
    /// Turns that policies had lost when it was replaced.
    pub faults: u64,
    pub(super) policy: Loaded,
}

impl Retired {
    /// Its figures when it was replaced; `None` for the built-in rule.
    pub fn figures(&self) -> Option<PolicyStatus> {
        self.policy.figures()
    }
}

/// Something the dispatch thread noticed.
#[derive(Debug)]
pub enum Notice {
    /// A client broke the protocol and is no longer served.
    Misbehaved {
        id: u32,
        why: &'static str,
        /// To be dropped elsewhere.
        left: Box<Left>,
    },
    /// The active policy failed too often: the built-in rule serves.
    Disabled { generation: u64 },
}

/// Why a request could not be handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    #[error("the core is busy: too many control requests wait")]
    Busy,
    /// The dispatch thread has ended, or is about to.
    #[error("the core is stopping")]
    Gone,
}

/// The control plane's end.
#[derive(Clone, Debug)]
pub struct ControlSender {
    sender: SyncSender<Control>,
    shared: Arc<Bell>,
    bells: Bells,
}

/// The dispatch thread's end.
pub struct ControlReceiver {
    receiver: Receiver<Control>,
    shared: Arc<Bell>,
}

#[derive(Debug)]
struct Bell {
    pending: AtomicBool,
    eventfd: OwnedFd,
}

/// Both ends; what is sent ends the parker's sleep.
///
/// # Errors
/// If no eventfd can be made or watched.
pub fn channel(parker: &Parker) -> rustix::io::Result<(ControlSender, ControlReceiver)> {
    let (sender, receiver) = sync_channel(PENDING_MAX);
    let shared =
        Arc::new(Bell { pending: AtomicBool::new(false), eventfd: super::park::eventfd()? });
    let bells = parker.bells();
    bells.watch(&shared.eventfd)?;
    let sender = ControlSender { sender, shared: shared.clone(), bells };
    Ok((sender, ControlReceiver { receiver, shared }))
}

impl ControlSender {
    /// Have the dispatch thread hear a client's doorbell.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn watch(&self, doorbell: &OwnedFd) -> rustix::io::Result<()> {
        self.bells.watch(doorbell)
    }

    /// Hand over a request made around a reply channel, and wait for the reply.
    ///
    /// # Errors
    /// If the dispatch thread cannot take it or ended without answering.
    pub async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Control,
    ) -> Result<T, AskError> {
        let (done, reply) = oneshot::channel();
        self.send(request(done))?;
        reply.await.map_err(|_| AskError::Gone)
    }

    /// Hand over a request.
    ///
    /// # Errors
    /// If the dispatch thread cannot take it.
    pub(super) fn send(&self, request: Control) -> Result<(), AskError> {
        self.sender.try_send(request).map_err(|error| match error {
            TrySendError::Full(_) => AskError::Busy,
            TrySendError::Disconnected(_) => AskError::Gone,
        })?;
        self.shared.pending.store(true, SeqCst);
        let _ = rustix::io::write(&self.shared.eventfd, &1u64.to_ne_bytes());
        Ok(())
    }
}

impl ControlReceiver {
    /// Whether there may be something.
    pub fn is_pending(&self) -> bool {
        self.shared.pending.load(SeqCst)
    }

    /// Take everything: call after [`ControlReceiver::is_pending`].
    pub fn next(&self) -> Option<Control> {
        // Cleared before looking, so that a request sent while we look sets it
        // again.
        self.shared.pending.store(false, SeqCst);
        let request = self.receiver.try_recv().ok();
        if request.is_some() {
            self.shared.pending.store(true, SeqCst);
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::harness::{self, Harness};
    use crate::loader::Loaded;

    /// A policy is recovered while somebody asks for the status.
    #[test]
    fn a_status_in_the_making_is_finished() {
        let mut harness = Harness::new(harness::settings(), Loaded::built_in(0)).unwrap();
        let (status, mut snapshot) = oneshot::channel();
        let (last_fault, mut fault) = oneshot::channel();
        assert!(harness.send(Control::Status { kernels: 1, done: status }));
        assert!(harness.send(Control::LastFault { done: last_fault }));
        for now_ns in 0..100 {
            harness.iterate(now_ns);
        }
        assert!(fault.try_recv().unwrap().is_none(), "the built-in rule has no faults");
        assert_eq!(snapshot.try_recv().unwrap().kernels_known, 0);
    }
}
