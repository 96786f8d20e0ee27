//! What a policy may ask of the core, during any call.
//!
//! A component imports the interfaces whose functions it calls. Three of them are capabilities that the operator has
//! to grant: [`client_identity`], [`kernel_identity`] and [`set_ungated`] say so.
//!
//! On the host target there is no core: there the calls go to the test double in
//! `testing`, which records them, or to whatever `native` was given.

use crate::{
    ClientId, ClientIdentity, ClientState, KernelId, KernelName, KernelProfile, Level, Service,
    SharingMode,
};

#[cfg(target_family = "wasm")]
mod core {
    use crate::bindings::scheduler::tally::policy;

    pub use policy::clients::{all as clients, get as client};
    pub use policy::control::{revoke_lease, set_auto_yield, set_window, set_yield};
    pub use policy::high_priority::set_ungated;
    pub use policy::identity::get as client_identity;
    pub use policy::kernel_identity::get as kernel_identity;
    pub use policy::kernels::{mean_ns as kernel_mean_ns, profile as kernel_profile};
    pub use policy::log::write as log;
    pub use policy::metrics::{counter, counter_add, gauge, gauge_set};
    pub use policy::reasons::define as define_reason;
    pub use policy::services::{get as service, slack_ns};
    pub use policy::sharing::mode as sharing_mode;
    pub use policy::timers::set as set_timer;
    pub use policy::widths::{all as widths, cost_ns as width_cost_ns, set as set_width};
}
#[cfg(not(target_family = "wasm"))]
use crate::native::current as core;

/// Write to the core's log. At most 64 lines a second; more are dropped and
/// counted.
pub fn log(level: Level, message: &str) {
    core::log(level, message);
}

/// A monotonic counter that `tallyctl status` shows under the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter(u32);

impl Counter {
    /// The counter of this name, made at first use. At most 64 counters and
    /// gauges; those beyond count nothing.
    pub fn new(name: &str) -> Self {
        Counter(core::counter(name))
    }

    /// Count so many more. Each call is a call into the core: see [`crate::Counters`].
    pub fn add(self, delta: u64) {
        core::counter_add(self.0, delta);
    }
}

/// A value that can go up and down, shown likewise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gauge {
    gauge: u32,
    /// Nothing yet by this instance: what one before it showed stays.
    shown: Option<i64>,
}

impl Gauge {
    /// The gauge of this name, made at first use; counted with the counters.
    pub fn new(name: &str) -> Self {
        Gauge { gauge: core::gauge(name), shown: None }
    }

    /// Show this value from now on. Calls the core only if that is another one.
    pub fn set(&mut self, value: i64) {
        if self.shown.replace(value) != Some(value) {
            core::gauge_set(self.gauge, value);
        }
    }
}

/// Name a reason of decisions ([`crate::Decision::because`]), 1 to 255, in at most 64 bytes. In `init`.
pub fn define_reason(reason: u8, text: &str) {
    core::define_reason(reason, text);
}

/// All connected clients: who waits since when, what they have in flight and have used.
pub fn clients() -> Vec<ClientState> {
    core::clients()
}

/// One of them, if it is connected.
pub fn client(id: ClientId) -> Option<ClientState> {
    core::client(id)
}

/// The name and labels of a client, if it is connected. Needs the capability `identity`.
pub fn client_identity(id: ClientId) -> Option<ClientIdentity> {
    core::client_identity(id)
}

/// What a high-priority client needs and how well it is served; `None` for others.
pub fn service(id: ClientId) -> Option<Service> {
    core::service(id)
}

/// The cheap form: time that can be lost before the first open unit misses its client's objective, if each takes its
/// client's median. [`crate::NO_UNIT_OPEN`] if none is open.
pub fn slack_ns(now_ns: u64) -> i64 {
    core::slack_ns(now_ns)
}

/// What was measured of a kernel; `None` for an id never passed to this policy.
pub fn kernel_profile(kernel: KernelId) -> Option<KernelProfile> {
    core::kernel_profile(kernel)
}

/// The cheap form: its mean GPU time in nanoseconds, or [`crate::UNKNOWN`].
pub fn kernel_mean_ns(kernel: KernelId) -> u64 {
    core::kernel_mean_ns(kernel)
}

/// The name of a kernel, and which code image holds it. Needs the capability `kernel-identity`.
pub fn kernel_identity(kernel: KernelId) -> Option<KernelName> {
    core::kernel_identity(kernel)
}

/// Be called by [`crate::Timer::fired`] with this token after `delay_ns`. At most 64
/// timers are pending; setting a token again moves it.
pub fn set_timer(delay_ns: u64, token: u64) {
    core::set_timer(delay_ns, token);
}

/// Let a client have at most so much predicted GPU time unfinished at once (one
/// launch is always let in). The core holds launches beyond that by itself.
pub fn set_window(client: ClientId, window_ns: u64) {
    core::set_window(client, window_ns);
}

/// End a lease given with `Decision::Run`. Launches already granted still run.
pub fn revoke_lease(client: ClientId) {
    core::revoke_lease(client);
}

/// Ask a client to yield, or to go on: its sliced and preemptible launches stop
/// at the next boundary and go on where they stopped.
pub fn set_yield(client: ClientId, yielded: bool) {
    core::set_yield(client, yielded);
}

/// Have the core ask a client to yield whenever high-priority work appears, and
/// to go on once there has been none for `idle_ns`.
pub fn set_auto_yield(client: ClientId, enabled: bool, idle_ns: u64) {
    core::set_auto_yield(client, enabled, idle_ns);
}

/// Numbers of SMs that launches can be limited to, rising. Empty where contexts take turns, and before the first
/// decision.
pub fn widths() -> Vec<u32> {
    core::widths()
}

/// Limit what is decided `Decision::Run` of a best-effort client, and its leased launches, to so many SMs, if they can
/// be; 0: do not.
pub fn set_width(client: ClientId, sms: u32) {
    core::set_width(client, sms);
}

/// How long the GPU has nothing of one of the client's streams to do before a launch that goes to some of the SMs: the
/// median of the latest measured, or UNKNOWN.
pub fn width_cost_ns(client: ClientId) -> u64 {
    core::width_cost_ns(client)
}

/// Let a client launch without being decided, or decide its launches. High-priority clients are ungated
/// from the start. Needs the capability `high-priority`.
pub fn set_ungated(client: ClientId, ungated: bool) {
    core::set_ungated(client, ungated);
}

/// How clients share this GPU; does not change while the core runs. During `init` it is not
/// known yet: ask when the first client joins.
pub fn sharing_mode() -> SharingMode {
    core::sharing_mode()
}
