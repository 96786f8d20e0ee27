//! The control plane: one thread, tokio. Registration and admin requests share
//! the socket; a connection's first byte tells them apart. It never touches the
//! decision path: what it wants of the dispatch thread goes through a channel.

pub mod admin;
pub mod registration;
pub mod registry;

use crate::admit::Rules;
use crate::config::Config;
use crate::dispatch::control::{AskError, Control, ControlSender, Notice};
use crate::policy_slot::{InCharge, PolicySlot, SlotError, Source, Trigger};
use crate::profile_store::ProfileStore;
use crate::record::Recordings;
use crate::residency::Residency;
use crate::status::{CoreStatus, PolicyLife, PolicyReport, SCHEMA, Status};
use crate::ungoverned::{self, Ungoverned, UngovernedStatus};
use registry::Registry;
use rustix::fd::AsFd;
use rustix::net::RecvFlags;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, Notify, mpsc};

/// Connections that have not said what they are, or are being registered.
const STRANGERS_MAX: usize = 64;
/// Kernels in a status report unless another number is asked for.
const KERNELS_DEFAULT: usize = 20;
/// Most of them.
const KERNELS_MAX: usize = 1_000;

/// What all connections share.
pub struct Plane {
    /// Settings.
    pub config: Config,
    /// Who may what.
    pub rules: Rules,
    /// To the dispatch thread.
    pub control: ControlSender,
    /// Clients.
    pub registry: RefCell<Registry>,
    /// Programs that are none.
    pub ungoverned: RefCell<Ungoverned>,
    /// The policy.
    pub policy: PolicySlot,
    /// The A/B test that runs, or ran last.
    pub lab: crate::ab::Lab,
    /// What changed about the policy's source, for the watch.
    pub source_changed: Notify,
    /// What is kept of kernels.
    pub profiles: ProfileStore,
    /// The decision log and the shadow.
    pub recordings: Recordings,
    /// How clients share the GPU.
    pub residency: RefCell<Option<Residency>>,
    /// Somebody asked the core to stop.
    pub stop: Notify,
    /// For status.
    pub started: Instant,
    /// For status.
    pub pinned: Option<u32>,
    /// One status request at a time.
    pub status_turn: Mutex<()>,
    /// Connections that have not said what they are; bounded.
    pub strangers: Cell<usize>,
    /// Admin connections.
    pub admins: Cell<usize>,
}

impl Plane {
    /// The whole status.
    ///
    /// # Errors
    /// If the dispatch thread does not answer.
    pub async fn status(&self, kernels: Option<usize>) -> Result<Status, AskError> {
        let _turn = self.status_turn.lock().await;
        let kernels = kernels.unwrap_or(KERNELS_DEFAULT).min(KERNELS_MAX);
        let s = self.control.ask(|done| Control::Status { kernels, done }).await?;
        let ungoverned = self.ungoverned().await;
        let residency = self.residency.borrow();
        let Some(residency) = residency.as_ref() else { return Err(AskError::Gone) };
        let registry = self.registry.borrow();
        Ok(Status {
            schema: SCHEMA,
            core: CoreStatus {
                version: env!("CARGO_PKG_VERSION"),
                protocol: tally_ipc::PROTOCOL_VERSION,
                pid: std::process::id(),
                uid: rustix::process::geteuid().as_raw(),
                uptime_s: self.started.elapsed().as_secs_f64(),
                spin_us: self.config.dispatch.spin_us(),
                pin_cpu_asked: self.config.dispatch.pin_cpu,
                pinned_cpu: self.pinned,
                parks: s.parks,
                socket: self.config.socket.path().display().to_string(),
            },
            residency: residency.status(),
            policy: self.policy_report(&s),
            decision_latency: s.decision,
            held_latency: s.held,
            high_priority_busy: s.high_busy,
            clients: registry.clients(&s.clients, residency.is_mps()),
            departed: registry.departed(),
            ungoverned,
            kernels: s.kernels.into_iter().map(Into::into).collect(),
            kernels_known: s.kernels_known,
            profiles: self.profiles.status(),
            experiment: self.lab.status(),
            log: self.recordings.status(),
            shadow: self.recordings.shadow_status().map(Into::into),
        })
    }

    /// Reports, and what is found among the processes now.
    async fn ungoverned(&self) -> Vec<UngovernedStatus> {
        let clients = self.registry.borrow().processes();
        let socket = self.config.socket.path();
        let found = tokio::task::spawn_blocking(move || ungoverned::look(&socket, &clients)).await;
        self.ungoverned.borrow().status(found.unwrap_or_default())
    }

    fn policy_report(&self, s: &crate::dispatch::snapshot::Snapshot) -> PolicyReport {
        let slot = &self.policy;
        let life = PolicyLife::new(&slot.in_charge(), slot.last_struck(), s);
        PolicyReport::new(slot.in_charge(), slot.last_failure(), slot.failures(), life, s)
    }

    /// Put a policy in charge.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub async fn load_policy(
        &self,
        source: Source,
        trigger: Trigger,
    ) -> Result<InCharge, SlotError> {
        let outcome = self.policy.load(&self.control, source, trigger).await;
        self.source_changed.notify_one();
        outcome
    }

    /// Go back to an earlier policy.
    ///
    /// # Errors
    /// If there is none.
    pub async fn rollback_policy(&self, to: Option<u64>) -> Result<InCharge, SlotError> {
        self.policy.rollback(&self.control, to).await
    }

    /// The policy of this generation was struck out.
    async fn recover_policy(&self, generation: u64) {
        let fault = {
            let _turn = self.status_turn.lock().await;
            let asked = self.control.ask(|done| Control::Status { kernels: 0, done }).await;
            asked.ok().and_then(|snapshot| snapshot.figures?.last_fault)
        };
        self.policy.recover(&self.control, generation, fault).await;
    }

    /// Load the policy in charge again.
    pub async fn reload(&self, trigger: Trigger) {
        match self.policy.source() {
            Some(source) => {
                // What fails is logged and shown in status by the slot.
                let _ = self.load_policy(source, trigger).await;
            }
            None => tracing::warn!("nothing to reload: the built-in rule serves"),
        }
    }
}

/// Keep what is learnt of kernels, now and then.
pub async fn keep(plane: Rc<Plane>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        match plane.profiles.gather(&plane.control).await {
            Ok(()) => plane.profiles.write().await,
            Err(AskError::Busy) => {}
            Err(AskError::Gone) => return,
        }
    }
}

/// Admin connections at once; idle ones are closed after a while.
const ADMINS_MAX: usize = 64;

/// Accept connections until the task is dropped.
pub async fn accept(plane: Rc<Plane>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if plane.strangers.get() >= STRANGERS_MAX {
                    tracing::warn!("too many connections wait to be served, one was closed");
                    continue;
                }
                tokio::task::spawn_local(serve(plane.clone(), stream));
            }
            Err(error) => {
                tracing::error!("no connection can be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Counts a connection as a stranger until dropped.
pub(crate) struct Stranger(Rc<Plane>);

impl Stranger {
    fn new(plane: &Rc<Plane>) -> Self {
        plane.strangers.set(plane.strangers.get() + 1);
        Stranger(plane.clone())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.strangers.set(self.0.strangers.get() - 1);
    }
}

async fn serve(plane: Rc<Plane>, stream: UnixStream) {
    let stranger = Stranger::new(&plane);
    let Ok(peer) = stream.peer_cred() else { return };
    let patience = Duration::from_millis(plane.config.admission.hello_timeout_ms);
    match tokio::time::timeout(patience, first_byte(&stream)).await {
        Ok(Some(b'{')) => {
            drop(stranger);
            if plane.admins.get() >= ADMINS_MAX {
                tracing::warn!("too many admin connections, one was closed");
                return;
            }
            plane.admins.set(plane.admins.get() + 1);
            admin::serve(plane.clone(), stream, peer.uid()).await;
            plane.admins.set(plane.admins.get() - 1);
        }
        Ok(Some(_)) => registration::serve(plane, stranger, stream, peer).await,
        Ok(None) | Err(_) => {}
    }
}

/// Look at the first byte without taking it.
async fn first_byte(stream: &UnixStream) -> Option<u8> {
    let mut byte = [0u8; 1];
    let received = stream
        .async_io(Interest::READABLE, || {
            rustix::net::recv(stream.as_fd(), &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT)
                .map(|(n, _)| n)
                .map_err(Into::into)
        })
        .await
        .ok()?;
    (received == 1).then_some(byte[0])
}

/// Act on what the dispatch thread notices.
pub async fn heed(plane: Rc<Plane>, mut notices: mpsc::Receiver<Notice>) {
    while let Some(notice) = notices.recv().await {
        match notice {
            Notice::Misbehaved { id, why } => {
                tracing::warn!(id, why, "client dropped");
                if let Some(record) = plane.registry.borrow().get(id) {
                    record.cut.now(why);
                }
            }
            Notice::StruckOut { generation } => {
                let plane = plane.clone();
                tokio::task::spawn_local(async move { plane.recover_policy(generation).await });
            }
        }
    }
}
