//! What a Tally scheduling policy is written with.
//!
//! A policy is a WebAssembly component that the core asks about kernel launches.
//! This crate is its only dependency: implement [`Policy`], name the type in
//! [`export!`], and `cargo xtask policies` makes the component; in a
//! project of `tallyctl policy new`, `make` does.
//!
//! ```
//! use tally_sdk::{Answer, Decision, HOLD_UNTIL_CHANGE, Launch, Policy};
//!
//! /// Best effort runs only while high priority has nothing to do.
//! struct Polite;
//!
//! impl Policy for Polite {
//!     fn init(_config: &str) -> Result<Self, String> {
//!         Ok(Polite)
//!     }
//!
//!     fn decide(&mut self, launch: &Launch) -> Answer {
//!         if launch.high_active() { Decision::Hold(HOLD_UNTIL_CHANGE) } else { Decision::Run(0) }.into()
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
//! # Events
//! Each kind of event is a trait: [`Activity`], [`Units`], [`Completions`], [`Membership`], [`Timer`]; and so is
//! what outlives a reload, [`Stateful`]. Implement those that the policy needs and name them:
//! `tally_sdk::export!(Polite: membership, timer)`. What is not named costs nothing.
//!
//! # Rules
//! - The same inputs must give the same decisions: there is no clock, no
//!   randomness, no file. Do not let the order of a `HashMap` decide.
//! - `decide` has 200 000 units of fuel, about as many instructions. It should
//!   not allocate; none of the types it deals with does.
//! - A panic costs the policy its turn and its state: the core starts it anew,
//!   and loads the last good policy after three faults. Its message is in the
//!   core's log.
//! - Crates may say `#![deny(unsafe_code)]`, but not `forbid`: [`export!`] has to
//!   define symbols, which Rust counts as unsafe.
//!
//! # Besides the contract
//! [`config`] reads configurations, [`codec`] writes what a policy saves, [`reasons!`] names why, [`Counters`]
//! counts without a call into the core each time, [`LruMap`] is a map of bounded size, [`TokenBucket`] a bounded
//! share, [`Clients`] knows who is connected and on which [`Terms`], [`grid`] estimates how a grid fits the GPU.

mod bindings;
mod bucket;
mod clients;
pub mod codec;
pub mod config;
mod counters;
pub mod grid;
pub mod host;
mod launch;
mod lru;
#[cfg(not(target_family = "wasm"))]
pub mod native;
#[cfg(not(target_family = "wasm"))]
pub mod testing;

pub use bindings::completions::exports::tally::policy::completions::Completion;
pub use bindings::scheduler::exports::tally::policy::scheduler::{
    Answer, Decision, FormsOffered, Launch, LaunchState,
};
pub use bindings::scheduler::tally::policy::clients::ClientState;
pub use bindings::scheduler::tally::policy::identity::ClientIdentity;
pub use bindings::scheduler::tally::policy::kernel_identity::KernelName;
pub use bindings::scheduler::tally::policy::kernels::{
    FormProfile, KernelProfile, Transformation, TransformedForms,
};
pub use bindings::scheduler::tally::policy::log::Level;
pub use bindings::scheduler::tally::policy::services::{Objective, Service, Tokens, UnitProfile};
pub use bindings::scheduler::tally::policy::sharing::SharingMode;
pub use bindings::scheduler::tally::policy::types::{
    Client, ClientId, Form, KernelId, PriorityClass,
};
pub use bindings::state::exports::tally::policy::state::Saved;
pub use bucket::TokenBucket;
pub use clients::{Clients, Terms};
pub use counters::Counters;
pub use lru::LruMap;

/// A time that has not come: no high-priority activity yet, no launch waiting, no deadline.
pub const NEVER: u64 = u64::MAX;
/// A time or a number that is not known: never measured, never reported.
pub const UNKNOWN: u64 = 0;
/// [`Completion::measured_ns`] of a launch whose GPU time could not be told from that of others.
pub const NOT_MEASURED: u64 = 0;
/// The kernel id of all kernels beyond those that the core tells apart.
pub const NO_KERNEL: KernelId = KernelId::MAX;
/// Hold for as long as the core allows: until something changes.
pub const HOLD_UNTIL_CHANGE: u64 = u64::MAX;
/// A window that holds nothing back.
pub const WINDOW_OPEN: u64 = u64::MAX;
/// A decision without a reason.
pub const NO_REASON: u8 = 0;
/// Launches behind a `p50_ns` and a `p99_ns`.
pub const RECENT_SAMPLES: usize = 32;
/// Units of work, or tokens, behind a [`Service`]'s `recent`, `p50_ns` and `p99_ns`.
pub const RECENT_UNITS: usize = 256;
/// [`host::slack_ns`] while no client with an objective has a unit open.
pub const NO_UNIT_OPEN: i64 = i64::MAX;
/// The most that [`Stateful::snapshot`] may give, bytes.
pub const SAVED_BYTES_MAX: usize = 256 << 10;

/// A scheduling policy. One value of the type lives as long as the policy is
/// loaded (or until it panics; then [`Policy::init`] makes another). What it learned goes
/// with it, unless it is [`Stateful`].
pub trait Policy: Sized + 'static {
    /// Make the policy from the text of its configuration, empty if it has none.
    ///
    /// # Errors
    /// A message for the operator; the core refuses to load the policy with it.
    fn init(config: &str) -> Result<Self, String>;

    /// Decide one launch. The path that must be short: no allocation, no search
    /// through long lists.
    fn decide(&mut self, launch: &Launch) -> Answer;
}

/// Told when high-priority work is on the GPU: `export!(T: activity)`. Times are on the same clock as
/// [`Launch::now_ns`], here and in the other events.
pub trait Activity: Policy {
    /// High-priority work appeared on a GPU that had none.
    fn high_started(&mut self, now_ns: u64);
    /// The last high-priority work ended.
    fn high_ended(&mut self, now_ns: u64);
}

/// Told of the units of work of high-priority clients: `export!(T: units)`.
pub trait Units: Policy {
    /// A unit began, and misses its client's objective unless it is over at `deadline_ns` ([`NEVER`] without one).
    fn began(&mut self, now_ns: u64, client: ClientId, since_ns: u64, deadline_ns: u64);
    /// The open unit is over; so many ended, and took so long each. 0: it is not known how long it took.
    fn ended(&mut self, now_ns: u64, client: ClientId, units: u32, took_ns: u64);
}

/// Told of best-effort launches that finished: `export!(T: completions)`.
pub trait Completions: Policy {
    /// A launch finished, and what it took.
    fn completed(&mut self, now_ns: u64, completion: &Completion);
}

/// Told of clients that come and go: `export!(T: membership)`.
pub trait Membership: Policy {
    /// A client registered. Also called for each connected client right after [`Policy::init`].
    fn joined(&mut self, now_ns: u64, client: &Client);
    /// A client is gone.
    fn left(&mut self, now_ns: u64, client: ClientId);
}

/// Told when a timer fires ([`host::set_timer`]): `export!(T: timer)`.
pub trait Timer: Policy {
    /// The timer that was set with this token.
    fn fired(&mut self, now_ns: u64, token: u64);
}

/// A policy whose knowledge outlives a reload: `export!(T: state)`.
///
/// The core asks the active policy for it between two decisions and offers it to
/// the next one, whatever that is: another version of the same policy, the same with
/// another configuration, or a quite different one. So `restore` must be ready for
/// anything and check what it reads.
///
/// ```
/// use tally_sdk::codec::{Reader, Writer};
/// use tally_sdk::{Answer, Decision, Launch, Policy, Saved, Stateful};
///
/// struct Counting(u64);
///
/// impl Policy for Counting {
///     fn init(_config: &str) -> Result<Self, String> {
///         Ok(Counting(0))
///     }
///
///     fn decide(&mut self, _launch: &Launch) -> Answer {
///         self.0 += 1;
///         Decision::Run(0).into()
///     }
/// }
///
/// impl Stateful for Counting {
///     fn snapshot(&self) -> Saved {
///         let mut out = Writer::new("counting", 1);
///         out.number(self.0);
///         out.finish()
///     }
///
///     fn restore(&mut self, from: &Saved) -> Result<(), String> {
///         self.0 = Reader::new(from, "counting", 1)?.number()?;
///         Ok(())
///     }
/// }
///
/// tally_sdk::export!(Counting: state);
///
/// let mut old = Counting::init("").unwrap();
/// old.decide(&tally_sdk::testing::launch());
/// let new: Counting = tally_sdk::testing::reloaded(&old, "").unwrap();
/// assert_eq!(new.0, 1);
/// ```
pub trait Stateful: Policy {
    /// Write down what was learned. Every decision waits for this: it has 5 million
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

/// Make a type that implements [`Policy`] the policy of this component, with the named ones of `activity`, `units`,
/// `completions`, `membership`, `timer` and `state`.
///
/// When compiled for another target than WebAssembly it defines no symbols, so that the
/// same crate can be tested on the host.
#[macro_export]
macro_rules! export {
    ($policy:ty $(: $($extra:ident),+ $(,)?)?) => {
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

            fn with<R>(call: impl FnOnce(&mut $policy) -> R) -> R {
                POLICY.with_borrow_mut(|slot| match slot {
                    Some(policy) => call(policy),
                    None => sdk::not_initialised(),
                })
            }

            struct Component;

            impl sdk::scheduler::Guest for Component {
                fn init(config: ::std::string::String) -> Result<(), ::std::string::String> {
                    sdk::tell_panics();
                    let policy = <$policy as $crate::Policy>::init(&config)?;
                    POLICY.with_borrow_mut(|slot| *slot = Some(policy));
                    Ok(())
                }

                #[inline(always)]
                fn decide(launch: $crate::Launch) -> $crate::Answer {
                    with(|policy| $crate::Policy::decide(policy, &launch))
                }
            }

            sdk::export_scheduler!(Component with_types_in sdk::required);
            $($($crate::__export_one!($extra Component with sdk);)+)?
        };

        // On the host the type counts as used, and as wrong if it is no policy.
        #[cfg(not(target_family = "wasm"))]
        const _: fn(&str) -> ::core::result::Result<$policy, ::std::string::String> =
            <$policy as $crate::Policy>::init;
        #[cfg(not(target_family = "wasm"))]
        impl $crate::native::Exported for $policy {
            $($($crate::__native_one!($extra);)+)?
        }
    };
}

/// One optional interface of a component; not part of the interface.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_one {
    (activity $component:ident $with:ident $sdk:ident) => {
        impl $sdk::activity::Guest for $component {
            fn high_started(now_ns: u64) {
                $with(|policy| $crate::Activity::high_started(policy, now_ns))
            }
            fn high_ended(now_ns: u64) {
                $with(|policy| $crate::Activity::high_ended(policy, now_ns))
            }
        }
        $sdk::export_activity!($component with_types_in $sdk::optional::activity);
    };
    (units $component:ident $with:ident $sdk:ident) => {
        impl $sdk::units::Guest for $component {
            fn began(now_ns: u64, client: $crate::ClientId, since_ns: u64, deadline_ns: u64) {
                $with(|policy| $crate::Units::began(policy, now_ns, client, since_ns, deadline_ns))
            }
            fn ended(now_ns: u64, client: $crate::ClientId, units: u32, took_ns: u64) {
                $with(|policy| $crate::Units::ended(policy, now_ns, client, units, took_ns))
            }
        }
        $sdk::export_units!($component with_types_in $sdk::optional::units);
    };
    (completions $component:ident $with:ident $sdk:ident) => {
        impl $sdk::completions::Guest for $component {
            fn completed(now_ns: u64, completion: $crate::Completion) {
                $with(|policy| $crate::Completions::completed(policy, now_ns, &completion))
            }
        }
        $sdk::export_completions!($component with_types_in $sdk::optional::completions);
    };
    (membership $component:ident $with:ident $sdk:ident) => {
        impl $sdk::membership::Guest for $component {
            fn joined(now_ns: u64, client: $crate::Client) {
                $with(|policy| $crate::Membership::joined(policy, now_ns, &client))
            }
            fn left(now_ns: u64, client: $crate::ClientId) {
                $with(|policy| $crate::Membership::left(policy, now_ns, client))
            }
        }
        $sdk::export_membership!($component with_types_in $sdk::optional::membership);
    };
    (timer $component:ident $with:ident $sdk:ident) => {
        impl $sdk::timer::Guest for $component {
            fn fired(now_ns: u64, token: u64) {
                $with(|policy| $crate::Timer::fired(policy, now_ns, token))
            }
        }
        $sdk::export_timer!($component with_types_in $sdk::optional::timer);
    };
    (state $component:ident $with:ident $sdk:ident) => {
        impl $sdk::state::Guest for $component {
            fn snapshot() -> $crate::Saved {
                $with(|policy| $crate::Stateful::snapshot(policy))
            }
            fn restore(from: $crate::Saved) -> Result<(), ::std::string::String> {
                $with(|policy| $crate::Stateful::restore(policy, &from))
            }
        }
        $sdk::export_state!($component with_types_in $sdk::optional::state);
    };
}

/// The same for a policy that runs natively.
#[doc(hidden)]
#[macro_export]
macro_rules! __native_one {
    (activity) => {
        const ACTIVITY: bool = true;
        fn high_started(&mut self, now_ns: u64) {
            $crate::Activity::high_started(self, now_ns);
        }
        fn high_ended(&mut self, now_ns: u64) {
            $crate::Activity::high_ended(self, now_ns);
        }
    };
    (units) => {
        const UNITS: bool = true;
        fn unit_began(
            &mut self,
            now_ns: u64,
            client: $crate::ClientId,
            since_ns: u64,
            deadline_ns: u64,
        ) {
            $crate::Units::began(self, now_ns, client, since_ns, deadline_ns);
        }
        fn units_ended(&mut self, now_ns: u64, client: $crate::ClientId, units: u32, took_ns: u64) {
            $crate::Units::ended(self, now_ns, client, units, took_ns);
        }
    };
    (completions) => {
        const COMPLETIONS: bool = true;
        fn completed(&mut self, now_ns: u64, completion: &$crate::Completion) {
            $crate::Completions::completed(self, now_ns, completion);
        }
    };
    (membership) => {
        const MEMBERSHIP: bool = true;
        fn joined(&mut self, now_ns: u64, client: &$crate::Client) {
            $crate::Membership::joined(self, now_ns, client);
        }
        fn left(&mut self, now_ns: u64, client: $crate::ClientId) {
            $crate::Membership::left(self, now_ns, client);
        }
    };
    (timer) => {
        const TIMER: bool = true;
        fn fired(&mut self, now_ns: u64, token: u64) {
            $crate::Timer::fired(self, now_ns, token);
        }
    };
    (state) => {
        fn saved(&self) -> ::core::option::Option<$crate::Saved> {
            ::core::option::Option::Some($crate::Stateful::snapshot(self))
        }
    };
}

/// For [`export!`]; not part of the interface.
#[doc(hidden)]
pub mod __private {
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::activity::export_activity;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::completions::export_completions;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::membership::export_membership;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::scheduler::export_scheduler;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::state::export_state;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::timer::export_timer;
    #[cfg(target_family = "wasm")]
    pub use crate::bindings::units::export_units;

    pub mod required {
        pub use crate::bindings::scheduler::exports;
    }
    pub mod optional {
        pub use crate::bindings::{activity, completions, membership, state, timer, units};
    }
    pub use crate::bindings::activity::exports::tally::policy::activity;
    pub use crate::bindings::completions::exports::tally::policy::completions;
    pub use crate::bindings::membership::exports::tally::policy::membership;
    pub use crate::bindings::scheduler::exports::tally::policy::scheduler;
    pub use crate::bindings::state::exports::tally::policy::state;
    pub use crate::bindings::timer::exports::tally::policy::timer;
    pub use crate::bindings::units::exports::tally::policy::units;

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
