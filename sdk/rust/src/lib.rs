//! What a Tally scheduling policy is written with.
//!
//! A policy is a WebAssembly component that the core asks about kernel launches.
//! This crate is its only dependency: implement [`Policy`], name the type in
//! [`export!`], and `cargo xtask policies` (or `cargo build --release --target
//! wasm32-unknown-unknown`) makes the component.
//!
//! ```
//! use tally_sdk::{Decision, Launch, Policy};
//!
//! /// Best effort runs only while high priority has nothing to do.
//! struct Polite;
//!
//! impl Policy for Polite {
//!     fn init(_config: &str) -> Result<Self, String> {
//!         Ok(Polite)
//!     }
//!
//!     fn decide(&mut self, launch: &Launch) -> Decision {
//!         if launch.high_busy() { Decision::Hold(tally_sdk::HOLD_NS_MAX) } else { Decision::Run(0) }
//!     }
//! }
//!
//! tally_sdk::export!(Polite);
//!
//! // The rule is plain Rust, so it is tested on the host, without WebAssembly:
//! let mut policy = Polite::init("").unwrap();
//! assert_eq!(policy.decide(&tally_sdk::testing::launch()), Decision::Run(0));
//! ```
//!
//! What the fields, decisions and events mean is written where they are defined,
//! in `wit/policy.wit`; the documentation of the types here is taken from there.
//! `policies/fifo` is the smallest complete policy.
//!
//! # Rules of the house
//! - The same inputs must give the same decisions: there is no clock, no
//!   randomness, no file. Do not let the order of a `HashMap` decide.
//! - `decide` has 200 000 units of fuel, about as many instructions. It should
//!   not allocate; none of the types it deals with does.
//! - A panic costs the policy its turn and its state: the core starts it anew,
//!   and switches it off after three faults. Its message is in the core's log.
//! - Crates may say `#![deny(unsafe_code)]`, but not `forbid`: [`export!`] has to
//!   define symbols, which Rust counts as unsafe.

mod bindings;
pub mod config;
pub mod host;
mod launch;
#[cfg(not(target_family = "wasm"))]
pub mod testing;

pub use bindings::exports::tally::policy::scheduler::{Decision, Event, Launch};
pub use bindings::tally::policy::types::{
    ClientId, ClientInfo, Completion, CutForms, CutState, Form, FormProfile, KernelId,
    KernelProfile, LaunchFlags, Level, PriorityClass, Subscription,
};

/// The longest a launch is held before it is offered again: "until something
/// changes". Longer values are cut to this.
pub const HOLD_NS_MAX: u64 = 1_000_000_000;

/// A scheduling policy. One value of the type lives as long as the policy is
/// loaded (or until it panics; then [`Policy::init`] makes another).
pub trait Policy: Sized + 'static {
    /// Make the policy from the text of its configuration, empty if it has none.
    ///
    /// # Errors
    /// A message for the operator; the core refuses to load the policy with it.
    fn init(config: &str) -> Result<Self, String>;

    /// Decide one launch. The path that must be short: no allocation, no search
    /// through long lists.
    fn decide(&mut self, launch: &Launch) -> Decision;

    /// Something happened. `now_ns` is on the same clock as `Launch::now_ns`.
    fn on_event(&mut self, now_ns: u64, event: &Event) {
        let _ = (now_ns, event);
    }
}

/// Make a type that implements [`Policy`] the policy of this component.
///
/// Does nothing when compiled for another target than WebAssembly, so that the
/// same crate can be tested on the host.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        #[cfg(target_family = "wasm")]
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::__private as sdk;

            ::std::thread_local! {
                // One thread, so this is a plain static; the cell is what lets it
                // be one without `unsafe`.
                static POLICY: ::core::cell::RefCell<::core::option::Option<$policy>> =
                    const { ::core::cell::RefCell::new(::core::option::Option::None) };
            }

            struct Component;

            impl sdk::Guest for Component {
                fn init(config: ::std::string::String) -> Result<(), ::std::string::String> {
                    sdk::tell_panics();
                    let policy = <$policy as $crate::Policy>::init(&config)?;
                    POLICY.with_borrow_mut(|slot| *slot = Some(policy));
                    Ok(())
                }

                fn decide(launch: $crate::Launch) -> $crate::Decision {
                    POLICY.with_borrow_mut(|slot| match slot {
                        Some(policy) => $crate::Policy::decide(policy, &launch),
                        None => sdk::not_initialised(),
                    })
                }

                fn on_event(now_ns: u64, event: $crate::Event) {
                    POLICY.with_borrow_mut(|slot| match slot {
                        Some(policy) => $crate::Policy::on_event(policy, now_ns, &event),
                        None => sdk::not_initialised(),
                    })
                }
            }

    sdk::export_component!(Component with_types_in sdk);
        };

        // On the host the type counts as used, and as wrong if it is no policy.
        #[cfg(not(target_family = "wasm"))]
        const _: fn(&str) -> ::core::result::Result<$policy, ::std::string::String> =
            <$policy as $crate::Policy>::init;
    };
}

/// For [`export!`]; not part of the interface.
#[doc(hidden)]
pub mod __private {
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::export_component;
    pub use crate::bindings::exports;
    pub use crate::bindings::exports::tally::policy::scheduler::Guest;

    /// A trap says where, not why: let the message of a panic out first.
    pub fn tell_panics() {
        std::panic::set_hook(Box::new(|panic| {
            crate::host::log(crate::Level::Error, &panic.to_string());
        }));
    }

    /// The core calls `init` before anything else.
    #[cold]
    pub fn not_initialised() -> ! {
        panic!("called before `init`")
    }
}
