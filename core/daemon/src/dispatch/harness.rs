//! The dispatch loop driven by hand, for the fuzz targets and their tests: in the caller's thread, an iteration at a
//! time, at whatever time it is told.

use super::control::{self, Control, ControlSender, Notice};
use super::marks::MarkNumbers;
use super::park::Parker;
use super::profile_cache::ProfileCache;
use super::service::ServiceNumbers;
use super::{Dispatch, NOTICES_MAX, Next, REQUESTS_MAX, Settings};
use crate::loader::Loaded;
use tally_decision_log::Recorder;
use tally_engine::engine::{ClientState, PolicyStats};
use tally_engine::{ClientStats, EngineConfig};
use tokio::sync::mpsc;

/// Requests of the control plane that one iteration takes.
pub const REQUESTS_OF_ITERATION_MAX: usize = REQUESTS_MAX;

/// Settings that suit virtual time: no spinning, no CPU of its own.
pub fn settings() -> Settings {
    Settings {
        spin_ns: 0,
        pin_cpu: None,
        completion_poll_ns: 50_000,
        probe_after_ns: 1_000_000,
        high_stall_ns: 0,
        engine: EngineConfig::default(),
    }
}

/// A dispatch loop without a thread.
pub struct Harness {
    dispatch: Dispatch,
    /// Sends requests, as the control plane does.
    pub control: ControlSender,
    pub notices: mpsc::Receiver<Notice>,
}

impl Harness {
    /// A loop that serves nobody yet.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn new(settings: Settings, policy: Loaded) -> rustix::io::Result<Self> {
        let parker = Parker::new()?;
        let (control, receiver) = control::channel(&parker)?;
        let (sender, notices) = mpsc::channel(NOTICES_MAX);
        let profile_cache = ProfileCache::new(Default::default());
        let recorder = Recorder::default();
        let dispatch =
            Dispatch::new(settings, policy, recorder, profile_cache, receiver, parker, sender);
        Ok(Harness { dispatch, control, notices })
    }

    /// Hand over a request; it is taken by the next iterations. False if too many wait.
    pub fn send(&self, request: Control) -> bool {
        self.control.send(request).is_ok()
    }

    /// One iteration. `None`: the next is due at once; else how long the loop would sleep if nobody rang, ns.
    pub fn iterate(&mut self, now_ns: u64) -> Option<u64> {
        if matches!(self.dispatch.iterate(now_ns), Next::Busy | Next::Waiting) {
            return None;
        }
        let sleeps = self.dispatch.may_sleep().then(|| self.dispatch.sleep_ns(now_ns));
        for client in &self.dispatch.clients {
            client.set_parked(false, 0);
        }
        sleeps
    }

    /// Clients that are served, by rising id.
    pub fn clients(&self) -> impl Iterator<Item = u32> + '_ {
        self.dispatch.clients.iter().map(|client| client.id())
    }

    /// The engine's counts of a client.
    pub fn stats(&self, client: u32) -> Option<(ClientStats, ClientState)> {
        let engine = &self.dispatch.engine;
        Some((engine.client_stats(client)?, engine.client_state(client)?))
    }

    /// A high-priority client's requests, and what it marked, as the status says them at this time.
    pub fn service(
        &self,
        client: u32,
        now_ns: u64,
    ) -> Option<(ServiceNumbers, Option<MarkNumbers>)> {
        let client = self.dispatch.clients.iter().find(|c| c.id() == client)?;
        let (service, marks) = (client.service.as_ref()?, client.marks.as_ref()?);
        Some((service.numbers(), marks.numbers(now_ns)))
    }

    /// The engine's counts about the policy.
    pub fn policy_stats(&self) -> &PolicyStats {
        self.dispatch.engine.policy_stats()
    }
}
