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
//!   and puts the last good policy back after three faults. Its message is in the
//!   core's log.
//! - Crates may say `#![deny(unsafe_code)]`, but not `forbid`: [`export!`] has to
//!   define symbols, which Rust counts as unsafe.

mod bindings;
pub mod config;
pub mod host;
mod launch;
#[cfg(not(target_family = "wasm"))]
pub mod native;
mod state_bindings;
#[cfg(not(target_family = "wasm"))]
pub mod testing;

pub use bindings::exports::tally::policy::scheduler::{Decision, Event, Launch};
pub use bindings::tally::policy::types::{
    ClientId, ClientInfo, Completion, CutForms, CutState, Form, FormProfile, KernelId,
    KernelProfile, LaunchFlags, Level, PriorityClass, Sharing, Subscription,
};
pub use state_bindings::exports::tally::policy::state::Saved;

/// The longest a launch is held before it is offered again: "until something
/// changes". Longer values are cut to this.
pub const HOLD_NS_MAX: u64 = 1_000_000_000;

/// A scheduling policy. One value of the type lives as long as the policy is
/// loaded (or until it panics; then [`Policy::init`] makes another). What it learnt goes
/// with it, unless it is [`Stateful`].
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

/// A policy whose knowledge outlives a reload; exported with
/// `tally_sdk::export!(T, stateful)`.
///
/// The core asks the policy in charge for it between two decisions and offers it to
/// the next one, whatever that is: another version of the same policy, the same with
/// another configuration, or a quite different one. So `restore` must be ready for
/// anything and check what it reads.
///
/// ```
/// use tally_sdk::{Decision, Launch, Policy, Saved, Stateful};
///
/// struct Counting(u64);
///
/// impl Policy for Counting {
///     fn init(_config: &str) -> Result<Self, String> {
///         Ok(Counting(0))
///     }
///
///     fn decide(&mut self, _launch: &Launch) -> Decision {
///         self.0 += 1;
///         Decision::Run(0)
///     }
/// }
///
/// impl Stateful for Counting {
///     fn snapshot(&self) -> Saved {
///         Saved { format: "counting".into(), version: 1, data: self.0.to_le_bytes().into() }
///     }
///
///     fn restore(&mut self, from: &Saved) -> Result<(), String> {
///         from.expect("counting", 1)?;
///         let count = from.data.as_slice().try_into().map_err(|_| "expected 8 bytes")?;
///         self.0 = u64::from_le_bytes(count);
///         Ok(())
///     }
/// }
///
/// tally_sdk::export!(Counting, stateful);
///
/// let mut old = Counting::init("").unwrap();
/// old.decide(&tally_sdk::testing::launch());
/// let new: Counting = tally_sdk::testing::reloaded(&old, "").unwrap();
/// assert_eq!(new.0, 1);
/// ```
pub trait Stateful: Policy {
    /// Write down what was learnt. Every decision waits for this: it has 5 million
    /// units of fuel, and its data at most [`SAVED_BYTES_MAX`].
    fn snapshot(&self) -> Saved;

    /// Go on from what another one wrote down. Called once, right after
    /// [`Policy::init`]; no client is known yet. A panic makes the core start the
    /// policy without it.
    ///
    /// # Errors
    /// Why it is of no use, for the operator. The policy is used all the same, so it
    /// must be as it was before the call.
    fn restore(&mut self, from: &Saved) -> Result<(), String>;
}

/// The most that [`Stateful::snapshot`] may give, bytes.
pub const SAVED_BYTES_MAX: usize = 256 << 10;

impl Saved {
    /// Refuse what is not of this format, or of a later version than this.
    ///
    /// # Errors
    /// What was found and what was expected.
    pub fn expect(&self, format: &str, version_max: u32) -> Result<(), String> {
        if self.format != format {
            return Err(format!("saved by {:?}, and only {format:?} is understood", self.format));
        }
        if self.version > version_max {
            let found = self.version;
            return Err(format!(
                "version {found} of {format:?}, and {version_max} is the latest understood"
            ));
        }
        Ok(())
    }
}

/// Make a type that implements [`Policy`] the policy of this component;
/// `export!(T, stateful)` one that implements [`Stateful`] as well.
///
/// Does nothing when compiled for another target than WebAssembly, so that the
/// same crate can be tested on the host.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        $crate::__export!($policy, {});
    };
    ($policy:ty, stateful) => {
        $crate::__export!($policy, {
            impl sdk::StateGuest for Component {
                fn snapshot() -> $crate::Saved {
                    POLICY.with_borrow(|slot| match slot {
                        Some(policy) => $crate::Stateful::snapshot(policy),
                        None => sdk::not_initialised(),
                    })
                }

                fn restore(from: $crate::Saved) -> Result<(), ::std::string::String> {
                    POLICY.with_borrow_mut(|slot| match slot {
                        Some(policy) => $crate::Stateful::restore(policy, &from),
                        None => sdk::not_initialised(),
                    })
                }
            }

            sdk::export_state!(Component with_types_in sdk::state);
        });

        #[cfg(not(target_family = "wasm"))]
        const _: fn(&$policy) -> $crate::Saved = <$policy as $crate::Stateful>::snapshot;
    };
}

/// What [`export!`] has in common for all; not part of the interface.
#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($policy:ty, { $($more:tt)* }) => {
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

            $($more)*
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
    #[cfg(target_family = "wasm")]
    pub use crate::state_bindings::export_state;
    pub mod state {
        pub use crate::state_bindings::exports;
    }
    pub use crate::bindings::exports;
    pub use crate::bindings::exports::tally::policy::scheduler::Guest;
    pub use crate::state_bindings::exports::tally::policy::state::Guest as StateGuest;

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
