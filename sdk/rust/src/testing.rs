//! For unit tests of policies on the host: launches to start from, and a core
//! that only records what it was asked for. Not there in a component.
//!
//! ```
//! use tally_sdk::testing::{self, Call};
//!
//! tally_sdk::host::set_window(3, 1_000);
//! assert_eq!(testing::calls(), [Call::SetWindow { client: 3, window_ns: 1_000 }]);
//! ```

use crate::{Client, ClientId, ClientIdentity, ClientState, FormsOffered, KernelId, KernelName};
use crate::{KernelProfile, Launch, LaunchState, Level, NEVER, NO_UNIT_OPEN, Objective, Policy};
use crate::{
    PriorityClass, SAVED_BYTES_MAX, Service, SharingMode, Stateful, Tokens, Transformation,
};
use std::cell::RefCell;

/// A best-effort launch on a GPU that no high-priority client has ever used, of
/// a kernel that was never measured. Change what a test is about:
/// `Launch { high_idle_ns: 5, ..launch() }`.
pub fn launch() -> Launch {
    Launch {
        now_ns: 1_000_000_000,
        client: 1,
        kernel: 1,
        state: LaunchState::empty(),
        offered: FormsOffered::empty(),
        grid_blocks: 1024,
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        high_idle_ns: NEVER,
        high_clients: 0,
        waiting_clients: 1,
        stream: 0,
        sm_count: 132,
    }
}

/// A client of weight 1.
pub fn client(id: ClientId, class: PriorityClass) -> Client {
    Client { id, class, weight: 1 }
}

/// The same, as [`crate::host::clients`] has it: it has done nothing yet.
pub fn client_state(id: ClientId, class: PriorityClass) -> ClientState {
    ClientState {
        id,
        class,
        weight: 1,
        waiting_since_ns: NEVER,
        in_flight: 0,
        in_flight_ns: 0,
        measured_ns: 0,
        charged_ns: 0,
        min_share_permille: 0,
        backlogged_ns: 0,
        backlogged_since_ns: NEVER,
    }
}

/// What a high-priority client needs, as [`crate::host::service`] has it: it has served nothing yet.
pub fn service(slo_ns: Option<u64>) -> Service {
    Service {
        objective: slo_ns.map(|slo_ns| Objective { slo_ns, percentile: 99.0 }),
        open_since_ns: NEVER,
        open_deadline_ns: NEVER,
        open_is_token: false,
        units: 0,
        units_within: 0,
        recent: 0,
        recent_within: 0,
        p50_ns: 0,
        p99_ns: 0,
        tokens: None,
        profile: None,
    }
}

/// Its objective for tokens, which it has served none of: `Service { tokens: Some(tokens(8_000_000)), ..service(None)
/// }`.
pub fn tokens(tpot_ns: u64) -> Tokens {
    Tokens { tpot_ns, count: 0, within: 0, recent: 0, recent_within: 0, p50_ns: 0, p99_ns: 0 }
}

/// A kernel of so many blocks of 256 threads, never measured. Change what a test is
/// about: `KernelProfile { mean_ns: 5, ..kernel(64) }`.
pub fn kernel(blocks: u32) -> KernelProfile {
    KernelProfile {
        grid: (blocks, 1, 1),
        block: (256, 1, 1),
        count: 0,
        mean_ns: 0,
        p50_ns: 0,
        p99_ns: 0,
        latest_ns: 0,
        blocks_per_sm: 0,
        registers: 0,
        waves_permille: 0,
        transformation: Transformation::Unknown,
        forms: Vec::new(),
    }
}

/// What the core makes of a policy when it is loaded again: another one of this
/// configuration that was offered what the old one knew.
///
/// # Errors
/// What `init` or `restore` said, or that the core would not carry so much.
pub fn reloaded<Old: Stateful, New: Stateful>(old: &Old, config: &str) -> Result<New, String> {
    let saved = old.snapshot();
    if saved.data.len() > SAVED_BYTES_MAX {
        return Err(format!("saved {} bytes, and may save {SAVED_BYTES_MAX}", saved.data.len()));
    }
    let mut new = <New as Policy>::init(config)?;
    new.restore(&saved)?;
    Ok(new)
}

/// Something the policy asked the core to do.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each is the function of `host` of that name")]
pub enum Call {
    Log { level: Level, message: String },
    CounterAdd { name: String, delta: u64 },
    GaugeSet { name: String, value: i64 },
    SetTimer { delay_ns: u64, token: u64 },
    SetWindow { client: ClientId, window_ns: u64 },
    RevokeLease(ClientId),
    SetYield { client: ClientId, yielded: bool },
    SetAutoYield { client: ClientId, enabled: bool, idle_ns: u64 },
    SetUngated { client: ClientId, ungated: bool },
    SetWidth { client: ClientId, sms: u32 },
    DefineReason { reason: u8, text: String },
}

/// The recording core of this thread; each test has a thread of its own.
#[derive(Default)]
struct Core {
    calls: Vec<Call>,
    metrics: Vec<String>,
    clients: Vec<ClientState>,
    identities: Vec<(ClientId, ClientIdentity)>,
    services: Vec<(ClientId, Service)>,
    kernels: Vec<(KernelId, KernelProfile)>,
    sharing: Option<SharingMode>,
    widths: Vec<u32>,
    width_cost_ns: u64,
}

thread_local! {
    static CORE: RefCell<Core> = RefCell::default();
}

/// What the policy asked for since the last time, in order.
pub fn calls() -> Vec<Call> {
    CORE.with_borrow_mut(|core| std::mem::take(&mut core.calls))
}

/// Let [`crate::host::clients`] and [`crate::host::client`] know these.
pub fn set_clients(clients: Vec<ClientState>) {
    CORE.with_borrow_mut(|core| core.clients = clients);
}

/// Let [`crate::host::client_identity`] know these.
pub fn set_identities(identities: Vec<(ClientId, ClientIdentity)>) {
    CORE.with_borrow_mut(|core| core.identities = identities);
}

/// Let [`crate::host::service`] know these.
pub fn set_services(services: Vec<(ClientId, Service)>) {
    CORE.with_borrow_mut(|core| core.services = services);
}

/// Let [`crate::host::kernel_profile`] know these.
pub fn set_kernels(kernels: Vec<(KernelId, KernelProfile)>) {
    CORE.with_borrow_mut(|core| core.kernels = kernels);
}

/// Let [`crate::host::sharing_mode`] say this; without, it is `Concurrent`.
pub fn set_sharing_mode(sharing: SharingMode) {
    CORE.with_borrow_mut(|core| core.sharing = Some(sharing));
}

/// Let [`crate::host::widths`] say this; without, it is empty.
pub fn set_widths(widths: Vec<u32>) {
    CORE.with_borrow_mut(|core| core.widths = widths);
}

/// Let [`crate::host::width_cost_ns`] say this of every client; without, it is UNKNOWN.
pub fn set_width_cost_ns(ns: u64) {
    CORE.with_borrow_mut(|core| core.width_cost_ns = ns);
}

/// The functions of the contract's `host`, on the recording core.
pub(crate) mod double {
    use super::*;

    fn record(call: Call) {
        CORE.with_borrow_mut(|core| core.calls.push(call));
    }

    fn metric(name: &str) -> u32 {
        CORE.with_borrow_mut(|core| {
            let known = core.metrics.iter().position(|metric| metric == name);
            known.unwrap_or_else(|| {
                core.metrics.push(name.into());
                core.metrics.len() - 1
            }) as u32
        })
    }

    fn metric_name(id: u32) -> String {
        CORE.with_borrow(|core| core.metrics[id as usize].clone())
    }

    pub fn log(level: Level, message: &str) {
        record(Call::Log { level, message: message.into() });
    }

    pub fn counter(name: &str) -> u32 {
        metric(name)
    }

    pub fn counter_add(counter: u32, delta: u64) {
        record(Call::CounterAdd { name: metric_name(counter), delta });
    }

    pub fn gauge(name: &str) -> u32 {
        metric(name)
    }

    pub fn gauge_set(gauge: u32, value: i64) {
        record(Call::GaugeSet { name: metric_name(gauge), value });
    }

    pub fn define_reason(reason: u8, text: &str) {
        record(Call::DefineReason { reason, text: text.into() });
    }

    pub fn clients() -> Vec<ClientState> {
        CORE.with_borrow(|core| core.clients.clone())
    }

    pub fn client(id: ClientId) -> Option<ClientState> {
        CORE.with_borrow(|core| core.clients.iter().find(|client| client.id == id).copied())
    }

    pub fn client_identity(id: ClientId) -> Option<ClientIdentity> {
        CORE.with_borrow(|core| {
            let known = core.identities.iter().find(|(known, _)| *known == id);
            known.map(|(_, identity)| identity.clone())
        })
    }

    pub fn service(id: ClientId) -> Option<Service> {
        CORE.with_borrow(|core| {
            let known = core.services.iter().find(|(known, _)| *known == id);
            known.map(|(_, service)| *service)
        })
    }

    pub fn slack_ns(now_ns: u64) -> i64 {
        let slack = |service: &Service| {
            let deadline_ns = Some(service.open_deadline_ns).filter(|ns| *ns != NEVER)?;
            let end_ns = now_ns.max(service.open_since_ns + service.p50_ns);
            Some(deadline_ns as i64 - end_ns as i64)
        };
        CORE.with_borrow(|core| {
            let services = core.services.iter().filter_map(|(_, service)| slack(service));
            services.min().unwrap_or(NO_UNIT_OPEN)
        })
    }

    /// Of a kernel that [`set_kernels`] made known: its name is its id.
    pub fn kernel_identity(kernel: KernelId) -> Option<KernelName> {
        kernel_profile(kernel).map(|_| KernelName { name: format!("kernel {kernel}"), image: 1 })
    }

    pub fn kernel_profile(kernel: KernelId) -> Option<KernelProfile> {
        CORE.with_borrow(|core| {
            let known = core.kernels.iter().find(|(id, _)| *id == kernel);
            known.map(|(_, profile)| profile.clone())
        })
    }

    pub fn kernel_mean_ns(kernel: KernelId) -> u64 {
        kernel_profile(kernel).map_or(0, |profile| profile.mean_ns)
    }

    pub fn set_timer(delay_ns: u64, token: u64) {
        record(Call::SetTimer { delay_ns, token });
    }

    pub fn set_window(client: ClientId, window_ns: u64) {
        record(Call::SetWindow { client, window_ns });
    }

    pub fn revoke_lease(client: ClientId) {
        record(Call::RevokeLease(client));
    }

    pub fn set_yield(client: ClientId, yielded: bool) {
        record(Call::SetYield { client, yielded });
    }

    pub fn set_auto_yield(client: ClientId, enabled: bool, idle_ns: u64) {
        record(Call::SetAutoYield { client, enabled, idle_ns });
    }

    pub fn set_ungated(client: ClientId, ungated: bool) {
        record(Call::SetUngated { client, ungated });
    }

    pub fn widths() -> Vec<u32> {
        CORE.with_borrow(|core| core.widths.clone())
    }

    pub fn width_cost_ns(_: ClientId) -> u64 {
        CORE.with_borrow(|core| core.width_cost_ns)
    }

    pub fn set_width(client: ClientId, sms: u32) {
        record(Call::SetWidth { client, sms });
    }

    pub fn sharing_mode() -> SharingMode {
        CORE.with_borrow(|core| core.sharing.unwrap_or(SharingMode::Concurrent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host;

    #[test]
    fn calls_are_recorded_in_order_and_once() {
        host::Counter::new("held").add(2);
        host::define_reason(1, "no room");
        assert_eq!(
            calls(),
            [
                Call::CounterAdd { name: "held".into(), delta: 2 },
                Call::DefineReason { reason: 1, text: "no room".into() }
            ]
        );
        assert_eq!(calls(), []);
    }

    #[test]
    fn metrics_of_one_name_are_one() {
        assert_eq!(host::Counter::new("a"), host::Counter::new("a"));
        assert_ne!(host::Counter::new("a"), host::Counter::new("b"));
    }

    #[test]
    fn the_double_knows_what_it_was_told() {
        set_clients(vec![client_state(7, PriorityClass::High)]);
        assert_eq!(host::clients(), [client_state(7, PriorityClass::High)]);
        assert_eq!(host::client(7).map(|client| client.class), Some(PriorityClass::High));
        assert_eq!(host::client(8), None);
        let name = ClientIdentity { name: "serve".into(), labels: Vec::new() };
        set_identities(vec![(7, name.clone())]);
        assert_eq!((host::client_identity(7), host::client_identity(8)), (Some(name), None));
        assert_eq!(host::kernel_mean_ns(1), 0);
    }
}
