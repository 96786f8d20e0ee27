//! Who answers [`crate::host`] where there is no core: on the host target, not in a
//! component.
//!
//! By default it is the recording double of [`crate::testing`]. Whoever runs a policy
//! natively (a simulator, say) provides a [`Core`] of its own for the length of each call,
//! with [`with`].

use crate::testing::double;
use crate::{ClientId, ClientInfo, KernelId, KernelProfile, Level, Sharing, Subscription};
use std::any::Any;
use std::cell::RefCell;

macro_rules! host_functions {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions of the contract's `host`.
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
    clients() -> Vec<ClientId>;
    client(id: ClientId) -> Option<ClientInfo>;
    kernel_profile(kernel: KernelId) -> Option<KernelProfile>;
    kernel_mean_ns(kernel: KernelId) -> u64;
    subscribe(to: Subscription);
    set_timer(delay_ns: u64, token: u64);
    set_window(client: ClientId, window_ns: u64);
    revoke_lease(client: ClientId);
    set_yield(client: ClientId, yielded: bool);
    set_auto_yield(client: ClientId, enabled: bool, quiet_ns: u64);
    set_standing_grant(client: ClientId, granted: bool);
    residency() -> Sharing;
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
