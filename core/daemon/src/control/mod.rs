//! The control plane: one thread, tokio. Registration and admin requests have a socket each. It never touches the
//! decision path: what it wants of the dispatch thread goes through a channel.

pub mod accept;
pub mod admin;
pub(crate) mod answer;
pub mod connection;
#[cfg(any(test, fuzzing))]
pub mod harness;
pub mod journal;
pub mod registration;
pub mod registry;

use crate::ab::experiments::Experiments;
use crate::admit::Rules;
use crate::config::{Admission, Config};
use crate::dispatch::control::{AskError, Control, ControlSender, Notice};
use crate::dispatch::kernels::KernelShares;
use crate::files::{Opened, PolicyFiles, READ_MAX};
use crate::gpus::Gpus;
use crate::helpers::{Helper, Helpers};
use crate::peer::Peer;
use crate::policy_slot::{PolicySlot, SlotError, Source, Trigger};
use crate::profile_store::ProfileStore;
use crate::quota::{self, Pool, Rate, Room, User};
use crate::record::Recordings;
use crate::sharing::SharingMode;
use crate::status;
use crate::ungoverned::{Looker, Ungoverned};
use journal::{Journal, Kind};
use registry::Registry;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tally_admin::{Active, CoreStatus, PolicyReport, SCHEMA, Status, UngovernedStatus};
use tally_contract::limits::{
    ADMIN_CONNECTIONS_MAX, JOINS_BURST, STATUS_KERNELS_MAX, UNGOVERNED_MAX, UNGOVERNED_USER_PER_S,
};
use tokio::sync::{Mutex, Notify, Semaphore, mpsc};

/// Kernels in a status report unless another number is asked for.
const KERNELS_DEFAULT: usize = 20;

/// What all connections share.
pub struct Plane {
    pub config: Config,
    /// Who may register as high priority, and who may administer the core.
    pub rules: Rules,
    /// Sends requests to the dispatch thread.
    pub control: ControlSender,
    pub registry: RefCell<Registry>,
    /// Programs that the core does not govern.
    pub ungoverned: RefCell<Ungoverned>,
    /// Looks for further programs that are not governed.
    pub looker: Rc<Looker>,
    pub policy: PolicySlot,
    /// The A/B test that runs, or ran last.
    pub experiments: Experiments,
    /// Profiles of kernels that outlive the core.
    pub profiles: ProfileStore,
    /// The decision log and the shadow.
    pub recordings: Recordings,
    /// How clients share the GPU.
    pub sharing: RefCell<Option<SharingMode>>,
    /// Somebody asked the core to stop.
    pub stop: Notify,
    /// A private MPS daemon is left to the next core.
    pub keeps_mps: Cell<bool>,
    pub started: Instant,
    pub pinned: Option<u32>,
    /// The GPUs that the driver lists; a client may report no other.
    pub gpus: Arc<Gpus>,
    /// One status request at a time.
    pub status_turn: Mutex<()>,
    /// One request at a time of all those that are no admins.
    pub non_admins_turn: Mutex<()>,
    /// Take, read and close what peers send.
    pub helpers: Helpers,
    /// How many clients and connections there is room for.
    pub room: Room,
    /// How many places each user has taken.
    pub places: Places,
    /// Limits how often lines of a kind are logged.
    pub journal: Journal,
}

/// Places for connections, clients and kernels, and who has taken them.
pub struct Places {
    unregistered: Rc<RefCell<Pool>>,
    admins: Rc<RefCell<Pool>>,
    clients: Rc<RefCell<Pool>>,
    joins: RefCell<Rate>,
    /// Programs that are not governed, of which the status takes note.
    ungoverned: RefCell<Rate>,
    kernels: RefCell<KernelShares>,
    /// Registrations whose descriptors are being made.
    registering: Semaphore,
    /// Connections that got no place, may hold descriptors and are not closed yet: only before Linux 6.16.
    turned_away: Cell<usize>,
}

impl Places {
    /// Places of which none is taken.
    pub fn new(settings: &Admission, room: &Room) -> Self {
        Places {
            unregistered: Pool::new(room.unregistered, quota::reserved_unregistered(room)),
            admins: Pool::new(ADMIN_CONNECTIONS_MAX, ADMIN_CONNECTIONS_MAX / 2),
            clients: Pool::new(room.clients, quota::reserved_clients(settings, room)),
            joins: RefCell::new(Rate::new(settings.user_joins_per_s, JOINS_BURST)),
            ungoverned: RefCell::new(Rate::new(UNGOVERNED_USER_PER_S, UNGOVERNED_MAX as u32)),
            kernels: RefCell::new(KernelShares::new(settings.user_kernels_max)),
            registering: Semaphore::new(quota::REGISTERING_MAX),
            turned_away: Cell::new(0),
        }
    }
}

impl Plane {
    /// The whole status.
    ///
    /// # Errors
    /// If the dispatch thread does not answer.
    pub async fn status(&self, kernels: Option<usize>) -> Result<Status, AskError> {
        let kernels = kernels.unwrap_or(KERNELS_DEFAULT).min(STATUS_KERNELS_MAX);
        let ungoverned = self.ungoverned().await;
        let s = {
            let _turn = self.status_turn.lock().await;
            self.control.ask(|done| Control::Status { kernels, done }).await?
        };
        let sharing = self.sharing.borrow();
        let Some(sharing) = sharing.as_ref() else { return Err(AskError::Gone) };
        let totals = self.registry.borrow_mut().totals(&s.clients);
        let registry = self.registry.borrow();
        Ok(Status {
            schema: SCHEMA,
            core: CoreStatus {
                version: env!("CARGO_PKG_VERSION").into(),
                protocol: tally_ipc::PROTOCOL_VERSION,
                pid: std::process::id(),
                uid: rustix::process::geteuid().as_raw(),
                uptime_s: self.started.elapsed().as_secs_f64(),
                spin_us: self.config.dispatch.spin_us(),
                pin_cpu_asked: self.config.dispatch.pin_cpu,
                pinned_cpu: self.pinned,
                parks: s.parks,
                gpu: s.device.map_or_else(String::new, |device| status::uuid(device.uuid)),
                socket: self.config.socket.path().display().to_string(),
                admin_socket: self
                    .config
                    .admin_socket()
                    .map(|p| p.display().to_string())
                    .unwrap_or_default(),
                clients_max: self.room.clients,
                clients_fit: self.room.clients_fit,
                descriptors: self.room.descriptors,
            },
            sharing: sharing.status(),
            policy: self.policy_report(&s),
            decision_latency: s.decision,
            held_latency: s.held,
            high_priority_busy: s.high_busy,
            clients: registry.clients(&s, sharing.is_mps()),
            totals,
            departed: registry.departed(),
            ungoverned,
            kernels: s.kernels.into_iter().map(status::kernel).collect(),
            kernels_known: s.kernels_known,
            profiles: self.profiles.status(),
            experiment: self.experiments.status(),
            log: self.recordings.status(),
            shadow: self.recordings.shadow_status().map(Into::into),
        })
    }

    /// Reports, and what is found among the processes now.
    async fn ungoverned(&self) -> Vec<UngovernedStatus> {
        let clients = self.registry.borrow().processes();
        let found = self.looker.found(self.config.socket.path(), clients).await;
        self.ungoverned.borrow().status(found)
    }

    fn policy_report(&self, s: &crate::dispatch::snapshot::Snapshot) -> PolicyReport {
        let slot = &self.policy;
        let (failure, failures) = (slot.last_failure(), slot.failures());
        status::policy_report(slot.active(), failure, failures, slot.last_disabled(), s)
    }

    /// Whether a peer may load policies and stop the core.
    pub fn may_change(&self, peer: &Peer) -> bool {
        peer.foreign.is_none() && self.rules.may_change(peer.uid)
    }

    /// Whether places are kept for a peer.
    pub fn is_trusted(&self, peer: &Peer) -> bool {
        peer.foreign.is_none() && self.rules.is_trusted(peer.uid)
    }

    /// The quota that a peer's connections count in.
    pub fn user(&self, peer: &Peer) -> User {
        match peer.foreign {
            Some(_) if self.rules.may_be_high(peer.uid, true) => User::HighContainers,
            _ => peer.user(),
        }
    }

    /// The threads that deal with what a peer sends: its container's own, whatever its number is there.
    pub fn helper(&self, peer: &Peer) -> Helper {
        self.helpers.of(peer.user(), self.is_trusted(peer))
    }

    /// The helper threads for the core's own sockets.
    pub fn own_helper(&self) -> Helper {
        self.helpers.of(User::Uid(rustix::process::geteuid().as_raw()), true)
    }

    /// Read the files of a policy that a peer opened.
    ///
    /// # Errors
    /// Everything an operator needs to know.
    pub async fn read_policy(&self, source: Source, opened: Opened) -> Result<PolicyFiles, String> {
        let bytes_max = self.config.policy.limits.component_bytes_max;
        let helper = opened.helper().clone();
        let read = move || PolicyFiles::read_opened(source, opened, bytes_max);
        helper.ask(READ_MAX, read).await.unwrap_or_else(|why| Err(why.to_string()))
    }

    /// Make a policy active.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub async fn load_policy(&self, files: PolicyFiles) -> Result<Active, SlotError> {
        self.policy.load(&self.control, files).await
    }

    /// Go back to an earlier policy.
    ///
    /// # Errors
    /// If there is none.
    pub async fn rollback_policy(&self, to: Option<u64>) -> Result<Active, SlotError> {
        self.policy.rollback(&self.control, to).await
    }

    /// The policy of this generation was disabled.
    async fn recover_policy(&self, generation: u64) {
        let fault = self.control.ask(|done| Control::LastFault { done }).await.ok().flatten();
        self.policy.recover(&self.control, generation, fault).await;
    }

    /// Load the policy that the core was started with again.
    pub async fn reload(&self, trigger: Trigger) {
        // What fails is logged and shown in status by the slot.
        let _ = self.policy.load_own(&self.control, trigger).await;
    }
}

/// Keep what is profiled of kernels, now and then.
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

/// Act on what the dispatch thread notices.
pub async fn heed(plane: Rc<Plane>, mut notices: mpsc::Receiver<Notice>) {
    while let Some(notice) = notices.recv().await {
        match notice {
            Notice::Misbehaved { id, why, left } => {
                if plane.journal.may(Kind::Left) {
                    tracing::warn!(id, why, "client dropped");
                }
                let mut registry = plane.registry.borrow_mut();
                registry.saw(&left.numbers);
                if let Some(record) = registry.get(id) {
                    record.dismissal.now(why);
                }
                drop(registry);
                plane.own_helper().close(left);
            }
            Notice::Disabled { generation } => {
                let plane = plane.clone();
                tokio::task::spawn_local(async move { plane.recover_policy(generation).await });
            }
        }
    }
}
