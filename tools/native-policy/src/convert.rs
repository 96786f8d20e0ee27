//! The engine's types as the SDK's: the same conversions as components get, see `tally_engine::contract_conversions!`.
//! Here and for components the types are generated from the contract by different generators, so that they differ.

use tally_sdk as types;

tally_engine::contract_conversions!(types);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::policy::{self as engine, Class, Launch};
    use tally_engine::profile::{KernelKey, Profile, Transformation};

    /// Else one client could say that a kernel of others cannot be transformed.
    #[test]
    fn what_one_client_cannot_transform_is_not_said_of_the_kernel() {
        let key = KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] };
        let mut profile = Profile::new(key);
        let why = "its context is another one";
        profile.transformation = Transformation::WholeHere(why);
        assert_eq!(kernel_profile(&profile).transformation, types::Transformation::Unknown);
        profile.transformation = Transformation::WholeOnly(why);
        let whole_only = types::Transformation::WholeOnly(why.into());
        assert_eq!(kernel_profile(&profile).transformation, whole_only);
    }

    #[test]
    fn every_flag_of_a_launch_arrives_as_itself() {
        let plain = Launch {
            now_ns: 1,
            client: 2,
            class: Class::BestEffort,
            kernel: 3,
            state: 0,
            offered: 0,
            grid_blocks: 4,
            block_threads: 5,
            shared_bytes: 6,
            predicted_ns: 7,
            waited_ns: 8,
            in_flight_ns: 9,
            high_idle_ns: 10,
            high_clients: 11,
            waiting_clients: 12,
            stream: 13,
            sm_count: 14,
        };
        // In the contract's order; the first is the class.
        for bit in 0..5 {
            let state = launch(&Launch { state: 1 << bit, ..plain }).state;
            assert_eq!(u32::from(state.bits()), 1 << (bit + 1));
        }
        assert_eq!(launch(&Launch { class: Class::High, ..plain }).state.bits(), 1);
        for bit in 0..4 {
            let offered = launch(&Launch { offered: 1 << bit, ..plain }).offered;
            assert_eq!(u32::from(offered.bits()), 1 << bit);
        }
        let all = Launch {
            class: Class::High,
            state: engine::launch_state::ALL,
            offered: engine::forms_offered::ALL,
            ..plain
        };
        assert_eq!(launch(&all).state, types::LaunchState::all());
        assert_eq!(launch(&all).offered, types::FormsOffered::all());
    }
}
