//! What a policy may ask of the core, during any call.
//!
//! On the host target there is no core: there the calls go to the test double in
//! `testing`, which records them, or to whatever `native` was given.

use crate::{ClientId, ClientInfo, KernelId, KernelProfile, Level, Sharing, Subscription};

#[cfg(target_family = "wasm")]
use crate::bindings::tally::policy::host as core;
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

    /// Count so many more.
    pub fn add(self, delta: u64) {
        core::counter_add(self.0, delta);
    }
}

/// A value that can go up and down, shown likewise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauge(u32);

impl Gauge {
    /// The gauge of this name, made at first use; counted with the counters.
    pub fn new(name: &str) -> Self {
        Gauge(core::gauge(name))
    }

    /// Set it.
    pub fn set(self, value: i64) {
        core::gauge_set(self.0, value);
    }
}

/// Clients now connected. None yet during `init`: each is told of by
/// `Event::ClientJoined` right after it.
pub fn clients() -> Vec<ClientId> {
    core::clients()
}

/// A client, if it is connected.
pub fn client(id: ClientId) -> Option<ClientInfo> {
    core::client(id)
}

/// What is known of a kernel; `None` for an id never passed to this policy.
pub fn kernel_profile(kernel: KernelId) -> Option<KernelProfile> {
    core::kernel_profile(kernel)
}

/// The cheap form: its mean GPU time in nanoseconds, 0 if never measured.
pub fn kernel_mean_ns(kernel: KernelId) -> u64 {
    core::kernel_mean_ns(kernel)
}

/// Choose the events that cost a call each time; replaces the earlier choice.
/// Initially none.
pub fn subscribe(to: Subscription) {
    core::subscribe(to);
}

/// Be sent `Event::Timer` with this token after `delay_ns`. At most 64
/// timers are pending; setting a token again moves it.
pub fn set_timer(delay_ns: u64, token: u64) {
    core::set_timer(delay_ns, token);
}

/// Let a client have at most so much predicted GPU time unfinished at once (one
/// launch is always let in). The core holds launches beyond that by itself.
pub fn set_window(client: ClientId, window_ns: u64) {
    core::set_window(client, window_ns);
}

/// End a lease given with `Decision::Run`. Launches let go still run.
pub fn revoke_lease(client: ClientId) {
    core::revoke_lease(client);
}

/// Ask a client to give way, or to go on: its sliced and preemptible launches stop
/// at the next boundary and go on where they stopped.
pub fn set_yield(client: ClientId, yielded: bool) {
    core::set_yield(client, yielded);
}

/// Have the core ask a client to give way whenever high-priority work appears, and
/// to go on once there has been none for `quiet_ns`.
pub fn set_auto_yield(client: ClientId, enabled: bool, quiet_ns: u64) {
    core::set_auto_yield(client, enabled, quiet_ns);
}

/// Give or take away a client's right to launch without being decided.
/// High-priority clients have it from the start.
pub fn set_standing_grant(client: ClientId, granted: bool) {
    core::set_standing_grant(client, granted);
}

/// How clients share this GPU; does not change while the core runs. During `init` it is not
/// known yet: ask when the first client joins.
pub fn residency() -> Sharing {
    core::residency()
}
