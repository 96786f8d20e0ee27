//! The contract, as wasmtime's `bindgen!` puts it into Rust.
#![allow(missing_docs, clippy::all)]

mod provided {
    wasmtime::component::bindgen!({
        path: "../../wit",
        inline: "
            package tally:host;

            world provided {
                include tally:policy/policy@0.1.0;
                import tally:policy/identity@0.1.0;
                import tally:policy/kernel-identity@0.1.0;
                import tally:policy/high-priority@0.1.0;
            }
        ",
        world: "tally:host/provided",
        // What passes data (`HostState::pass`) can end the call.
        imports: {
            "tally:policy/log@0.1.0.write": trappable,
            "tally:policy/metrics@0.1.0.counter": trappable,
            "tally:policy/metrics@0.1.0.gauge": trappable,
            "tally:policy/reasons@0.1.0.define": trappable,
            "tally:policy/clients@0.1.0.all": trappable,
            "tally:policy/clients@0.1.0.get": trappable,
            "tally:policy/services@0.1.0.get": trappable,
            "tally:policy/services@0.1.0.slack-ns": trappable,
            "tally:policy/kernels@0.1.0.profile": trappable,
            "tally:policy/widths@0.1.0.all": trappable,
            "tally:policy/identity@0.1.0.get": trappable,
            "tally:policy/kernel-identity@0.1.0.get": trappable,
        },
    });
}

/// Interfaces that a policy may export or not.
mod optional {
    wasmtime::component::bindgen!({
        path: "../../wit",
        inline: "
            package tally:host;

            world optional {
                export tally:policy/activity@0.1.0;
                export tally:policy/units@0.1.0;
                export tally:policy/completions@0.1.0;
                export tally:policy/membership@0.1.0;
                export tally:policy/timer@0.1.0;
            }
        ",
        world: "tally:host/optional",
        with: { "tally:policy/types@0.1.0": super::provided::tally::policy::types },
    });
}

pub use optional::exports::tally::policy::{activity, completions, membership, timer, units};
pub use provided::exports::tally::policy::scheduler;
pub use provided::tally::policy as imports;
pub use provided::{Provided, ProvidedPre};

/// All of the contract's types, whatever interface they are in.
pub mod types {
    pub use super::completions::Completion;
    pub use super::imports::clients::ClientState;
    pub use super::imports::identity::ClientIdentity;
    pub use super::imports::kernel_identity::KernelName;
    pub use super::imports::kernels::{
        FormProfile, KernelProfile, Transformation, TransformedForms,
    };
    pub use super::imports::log::Level;
    pub use super::imports::services::{Objective, Service, Tokens, UnitProfile};
    pub use super::imports::sharing::SharingMode;
    pub use super::imports::types::{Client, Form, PriorityClass};
    pub use super::scheduler::{Answer, Decision, FormsOffered, Launch, LaunchState};
}

/// Between these, which wasmtime generates to lift and lower them, and the core's own.
pub mod convert {
    use super::types;
    tally_engine::contract_conversions!(types);
}

/// The text of the contract, to quote from in error messages.
pub use tally_contract::TEXT as CONTRACT;
