//! The engine's types as the SDK's. The same as `core/wasm-host/src/bindings.rs` does
//! for components, for the types that the SDK generates from the same contract.

use tally_engine::policy as engine;
use tally_engine::profile::{CutState, FormStats, Profile};
use tally_sdk as sdk;

/// Ask with the engine's launch. The flags have the same bits on both sides: the
/// contract's order.
#[inline]
pub fn launch(launch: &engine::Launch) -> sdk::Launch {
    sdk::Launch {
        now_ns: launch.now_ns,
        client: launch.client,
        class: class(launch.class),
        kernel: launch.kernel,
        flags: sdk::LaunchFlags::from_bits_truncate(launch.flags as u16),
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
fn class(class: engine::Class) -> sdk::PriorityClass {
    match class {
        engine::Class::High => sdk::PriorityClass::High,
        engine::Class::BestEffort => sdk::PriorityClass::BestEffort,
    }
}

/// Tell of the engine's event.
pub fn event(event: &engine::Event) -> sdk::Event {
    match event {
        engine::Event::ClientJoined(info) => sdk::Event::ClientJoined(client_info(info)),
        engine::Event::ClientLeft(client) => sdk::Event::ClientLeft(*client),
        engine::Event::HighBusy => sdk::Event::HighBusy,
        engine::Event::HighIdle => sdk::Event::HighIdle,
        engine::Event::KernelDone(done) => sdk::Event::KernelDone(sdk::Completion {
            client: done.client,
            kernel: done.kernel,
            form: form(done.form),
            argument: done.argument,
            predicted_ns: done.predicted_ns,
            measured_ns: done.contract_measured_ns(),
        }),
        engine::Event::Timer(token) => sdk::Event::Timer(*token),
    }
}

fn form(form: engine::Form) -> sdk::Form {
    match form {
        engine::Form::Whole => sdk::Form::Whole,
        engine::Form::Sliced => sdk::Form::Sliced,
        engine::Form::Preemptible => sdk::Form::Preemptible,
        engine::Form::Partitioned => sdk::Form::Partitioned,
    }
}

/// Describe a client.
pub fn client_info(info: &engine::ClientInfo) -> sdk::ClientInfo {
    sdk::ClientInfo {
        id: info.id,
        class: class(info.class),
        name: info.name.clone(),
        labels: info.labels.clone(),
    }
}

/// Describe a kernel.
pub fn kernel_profile(profile: &Profile) -> sdk::KernelProfile {
    let cut = match profile.cut {
        CutState::Unknown => sdk::CutState::Unknown,
        CutState::Preparable => sdk::CutState::Preparable,
        CutState::Preparing => sdk::CutState::Preparing,
        CutState::Ready { sliceable, preemptible } => {
            let mut forms = sdk::CutForms::empty();
            forms.set(sdk::CutForms::SLICEABLE, sliceable);
            forms.set(sdk::CutForms::PREEMPTIBLE, preemptible);
            sdk::CutState::Ready(forms)
        }
        CutState::WholeOnly(why) | CutState::WholeHere(why) => sdk::CutState::WholeOnly(why.into()),
    };
    let one = |(&(kind, argument), stats): (&(engine::Form, u32), &FormStats)| sdk::FormProfile {
        form: form(kind),
        argument,
        count: stats.count,
        mean_ns: stats.mean_ns,
        turnaround_ns: stats.turnaround_ns(),
    };
    sdk::KernelProfile {
        name: profile.key.name.clone(),
        image: profile.key.image as u64,
        grid: profile.key.grid.into(),
        block: profile.key.block.into(),
        count: profile.count,
        mean_ns: profile.mean_ns,
        p99_ns: profile.p99_ns(),
        cut,
        forms: profile.forms.iter().map(one).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::launch_flags as bit;

    /// That the bits may be copied.
    #[test]
    fn flags_have_the_same_bits_on_both_sides() {
        use sdk::LaunchFlags as Flag;
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
            assert_eq!(u32::from(flag.bits()), bit);
        }
        assert_eq!(Flag::all().bits().count_ones(), 9, "all are listed above");
        use sdk::Subscription;
        let bits = |flag: Subscription| u32::from(flag.bits());
        assert_eq!(bits(Subscription::HIGH_ACTIVITY), engine::subscription::HIGH_ACTIVITY);
        assert_eq!(bits(Subscription::COMPLETIONS), engine::subscription::COMPLETIONS);
    }
}
