//! Who answers [`crate::host`] where there is no core: on the host target, not in a
//! component.
//!
//! By default it is the recording double of [`crate::testing`]. Whoever runs a policy
//! natively (a simulator, say) provides a [`Core`] of its own for the length of each call,
//! with [`with`].

use crate::testing::double;
use crate::{
    Client, ClientId, ClientIdentity, ClientState, Completion, KernelId, KernelName, KernelProfile,
    Level, Policy, Saved, Service, SharingMode,
};
use std::any::Any;
use std::cell::RefCell;

macro_rules! host_functions {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions of [`crate::host`].
        #[allow(missing_docs, reason = "each is the function of `host` of that name")]
        pub trait Core: Any {
            $(fn $name(&mut self, $($arg: $ty),*) $(-> $answer)?;)*
        }

        /// The same on whichever core this thread has.
        pub(crate) mod current {
            use super::*;

            $(pub fn $name($($arg: $ty),*) $(-> $answer)? {
                CORE.with_borrow_mut(|core| match core {
                    Some(core) => core.$name($($arg),*),
                    None => double::$name($($arg),*),
                })
            })*
        }
    };
}

host_functions! {
    log(level: Level, message: &str);
    counter(name: &str) -> u32;
    counter_add(counter: u32, delta: u64);
    gauge(name: &str) -> u32;
    gauge_set(gauge: u32, value: i64);
    define_reason(reason: u8, text: &str);
    clients() -> Vec<ClientState>;
    client(id: ClientId) -> Option<ClientState>;
    client_identity(id: ClientId) -> Option<ClientIdentity>;
    service(id: ClientId) -> Option<Service>;
    slack_ns(now_ns: u64) -> i64;
    kernel_profile(kernel: KernelId) -> Option<KernelProfile>;
    kernel_mean_ns(kernel: KernelId) -> u64;
    kernel_identity(kernel: KernelId) -> Option<KernelName>;
    set_timer(delay_ns: u64, token: u64);
    set_window(client: ClientId, window_ns: u64);
    revoke_lease(client: ClientId);
    set_yield(client: ClientId, yielded: bool);
    set_auto_yield(client: ClientId, enabled: bool, idle_ns: u64);
    set_ungated(client: ClientId, ungated: bool);
    sharing_mode() -> SharingMode;
    widths() -> Vec<u32>;
    set_width(client: ClientId, sms: u32);
    width_cost_ns(client: ClientId) -> u64;
}

thread_local! {
    static CORE: RefCell<Option<Box<dyn Core>>> = const { RefCell::new(None) };
}

/// Call something with this core behind [`crate::host`], on this thread. It is given back
/// with the answer: nothing is allocated. Calls may not be nested, and a panic keeps it.
///
/// # Panics
/// If it is called within itself.
pub fn with<C: Core, R>(core: Box<C>, call: impl FnOnce() -> R) -> (Box<C>, R) {
    let before = CORE.replace(Some(core));
    assert!(before.is_none_or(|_| std::thread::panicking()), "a core within a core");
    let answer = call();
    let core: Option<Box<dyn Any>> = CORE.take().map(|core| core as _);
    match core.and_then(|core| core.downcast().ok()) {
        Some(core) => (core, answer),
        None => unreachable!("only this function changes which core there is"),
    }
}

/// A policy with the optional traits that [`crate::export!`] named, for who runs it natively. Those that were not named
/// do nothing.
#[allow(missing_docs, reason = "each is the function of that name of one of the traits")]
pub trait Exported: Policy {
    const ACTIVITY: bool = false;
    const UNITS: bool = false;
    const COMPLETIONS: bool = false;
    const MEMBERSHIP: bool = false;
    const TIMER: bool = false;

    fn high_started(&mut self, now_ns: u64) {
        let _ = now_ns;
    }
    fn high_ended(&mut self, now_ns: u64) {
        let _ = now_ns;
    }
    fn unit_began(&mut self, now_ns: u64, client: ClientId, since_ns: u64, deadline_ns: u64) {
        let _ = (now_ns, client, since_ns, deadline_ns);
    }
    fn units_ended(&mut self, now_ns: u64, client: ClientId, units: u32, took_ns: u64) {
        let _ = (now_ns, client, units, took_ns);
    }
    fn completed(&mut self, now_ns: u64, completion: &Completion) {
        let _ = (now_ns, completion);
    }
    fn joined(&mut self, now_ns: u64, client: &Client) {
        let _ = (now_ns, client);
    }
    fn left(&mut self, now_ns: u64, client: ClientId) {
        let _ = (now_ns, client);
    }
    fn fired(&mut self, now_ns: u64, token: u64) {
        let _ = (now_ns, token);
    }
    fn saved(&self) -> Option<Saved> {
        None
    }
}
