//! The contract, as wasmtime's `bindgen!` puts it into Rust, and the few
//! conversions between its types and the engine's.
#![allow(missing_docs, clippy::all)]

use crate::capabilities::{Capabilities, Capability};
use tally_engine::policy as engine;
use tally_engine::profile::{CutState, FormStats, Profile};

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "policy",
    // What may be denied (`capabilities::GUARDED`), or passes data (`HostState::pass`), can end the call.
    imports: {
        "tally:policy/host.set-standing-grant": trappable,
        "tally:policy/host.log": trappable,
        "tally:policy/host.counter": trappable,
        "tally:policy/host.gauge": trappable,
        "tally:policy/host.clients": trappable,
        "tally:policy/host.client": trappable,
        "tally:policy/host.kernel-profile": trappable,
    },
});

pub use tally::policy::{host, types};

/// The text of the contract, to quote from in error messages.
pub const CONTRACT: &str = include_str!("../../../wit/policy.wit");

/// Ask with the engine's launch.
#[inline]
pub fn launch(launch: &engine::Launch) -> types::Launch {
    types::Launch {
        now_ns: launch.now_ns,
        client: launch.client,
        class: class(launch.class),
        kernel: launch.kernel,
        flags: launch_flags(launch.flags),
        grid_blocks: launch.grid_blocks,
        block_threads: launch.block_threads,
        shared_bytes: launch.shared_bytes,
        predicted_ns: launch.predicted_ns,
        waited_ns: launch.waited_ns,
        in_flight_ns: launch.in_flight_ns,
        high_quiet_ns: launch.high_quiet_ns,
        high_clients: launch.high_clients,
        waiting_clients: launch.waiting_clients,
        stream: launch.stream,
        sm_count: launch.sm_count,
    }
}

#[inline]
fn class(class: engine::Class) -> types::PriorityClass {
    match class {
        engine::Class::High => types::PriorityClass::High,
        engine::Class::BestEffort => types::PriorityClass::BestEffort,
    }
}

#[inline]
fn launch_flags(bits: u32) -> types::LaunchFlags {
    use engine::launch_flags as bit;
    use types::LaunchFlags as Flag;
    let mut flags = Flag::empty();
    for (bit, flag) in [
        (bit::HIGH_BUSY, Flag::HIGH_BUSY),
        (bit::OFFERED_AGAIN, Flag::OFFERED_AGAIN),
        (bit::GRAPH, Flag::GRAPH),
        (bit::COOPERATIVE, Flag::COOPERATIVE),
        (bit::CLUSTERED, Flag::CLUSTERED),
        (bit::CAN_SLICE, Flag::CAN_SLICE),
        (bit::CAN_PREEMPT, Flag::CAN_PREEMPT),
        (bit::CAN_PARTITION, Flag::CAN_PARTITION),
        (bit::CAN_PREPARE, Flag::CAN_PREPARE),
    ] {
        if bits & bit != 0 {
            flags |= flag;
        }
    }
    flags
}

/// Tell of the engine's event, as far as granted.
pub fn event(event: &engine::Event, granted: Capabilities) -> types::Event {
    match event {
        engine::Event::ClientJoined(info) => types::Event::ClientJoined(client_info(info, granted)),
        engine::Event::ClientLeft(client) => types::Event::ClientLeft(*client),
        engine::Event::HighBusy => types::Event::HighBusy,
        engine::Event::HighIdle => types::Event::HighIdle,
        engine::Event::KernelDone(done) => types::Event::KernelDone(types::Completion {
            client: done.client,
            kernel: done.kernel,
            form: form(done.form),
            argument: done.argument,
            predicted_ns: done.predicted_ns,
            measured_ns: done.contract_measured_ns(),
        }),
        engine::Event::Timer(token) => types::Event::Timer(*token),
    }
}

fn form(form: engine::Form) -> types::Form {
    match form {
        engine::Form::Whole => types::Form::Whole,
        engine::Form::Sliced => types::Form::Sliced,
        engine::Form::Preemptible => types::Form::Preemptible,
        engine::Form::Partitioned => types::Form::Partitioned,
    }
}

/// Describe a kernel, as far as granted.
pub fn kernel_profile(profile: &Profile, granted: Capabilities) -> types::KernelProfile {
    let named = granted.has(Capability::KernelIdentity);
    let cut = match profile.cut {
        CutState::Unknown => types::CutState::Unknown,
        CutState::Preparable => types::CutState::Preparable,
        CutState::Preparing => types::CutState::Preparing,
        CutState::Ready { sliceable, preemptible } => {
            let mut forms = types::CutForms::empty();
            if sliceable {
                forms |= types::CutForms::SLICEABLE;
            }
            if preemptible {
                forms |= types::CutForms::PREEMPTIBLE;
            }
            types::CutState::Ready(forms)
        }
        CutState::WholeOnly(why) | CutState::WholeHere(why) => {
            types::CutState::WholeOnly(why.into())
        }
    };
    let one = |(&(kind, argument), stats): (&(engine::Form, u32), &FormStats)| types::FormProfile {
        form: form(kind),
        argument,
        count: stats.count,
        mean_ns: stats.mean_ns,
        turnaround_ns: stats.turnaround_ns(),
    };
    types::KernelProfile {
        name: if named { profile.key.name.clone() } else { String::new() },
        image: if named { profile.key.image as u64 } else { 0 },
        grid: profile.key.grid.into(),
        block: profile.key.block.into(),
        count: profile.count,
        mean_ns: profile.mean_ns,
        p99_ns: profile.p99_ns(),
        cut,
        forms: profile.forms.iter().map(one).collect(),
    }
}

/// Describe a client, as far as granted.
pub fn client_info(info: &engine::ClientInfo, granted: Capabilities) -> types::ClientInfo {
    let named = granted.has(Capability::ClientIdentity);
    types::ClientInfo {
        id: info.id,
        class: class(info.class),
        name: if named { info.name.clone() } else { String::new() },
        labels: if named { info.labels.clone() } else { Vec::new() },
    }
}

/// The bits of a subscription.
pub fn subscription(to: types::Subscription) -> u32 {
    let mut bits = 0;
    if to.contains(types::Subscription::HIGH_ACTIVITY) {
        bits |= engine::subscription::HIGH_ACTIVITY;
    }
    if to.contains(types::Subscription::COMPLETIONS) {
        bits |= engine::subscription::COMPLETIONS;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::profile::KernelKey;

    #[test]
    fn what_is_not_granted_is_empty_and_the_rest_is_there() {
        let info = engine::ClientInfo {
            id: 7,
            class: engine::Class::High,
            name: "serve".into(),
            labels: vec![("slo".into(), "5ms".into())],
        };
        let event = |granted| event(&engine::Event::ClientJoined(info.clone()), granted);
        let types::Event::ClientJoined(bare) = event(Capabilities::NONE) else { panic!() };
        assert_eq!((bare.id, bare.class), (7, types::PriorityClass::High));
        assert!(bare.name.is_empty() && bare.labels.is_empty());
        let types::Event::ClientJoined(named) = event(Capability::ClientIdentity.into()) else {
            panic!()
        };
        assert_eq!((named.name, named.labels), (info.name.clone(), info.labels.clone()));

        let key = KernelKey { name: "gemm".into(), image: 5, grid: [6, 1, 1], block: [32, 1, 1] };
        let mut profiles = tally_engine::profile::Profiles::default();
        let id = profiles.intern(&key).unwrap();
        profiles.record(id, 1_234);
        let profile = profiles.get(id).unwrap();
        let bare = kernel_profile(profile, Capability::ClientIdentity.into());
        assert_eq!((&*bare.name, bare.image), ("", 0));
        assert_eq!((bare.grid, bare.count, bare.mean_ns), ((6, 1, 1), 1, 1_234));
        let named = kernel_profile(profile, Capability::KernelIdentity.into());
        assert_eq!((&*named.name, named.image), ("gemm", 5));
    }
}
