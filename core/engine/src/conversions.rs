//! The engine's types as those that a bindings generator makes of the contract.
//!
//! wasmtime's generator (for components) and wit-bindgen (for the SDK) make different Rust types with the same
//! names out of `wit/policy.wit`. [`contract_conversions!`](crate::contract_conversions) writes the conversions once
//! for both.

/// Defines the functions between this crate's types and those of the module `$t`, which has all of the contract's
/// types by their Rust names, whatever interface they are in.
#[macro_export]
macro_rules! contract_conversions {
    ($t:ident) => {
        #[inline]
        pub fn launch(launch: &$crate::policy::Launch) -> $t::Launch {
            use $crate::policy::{Class, forms_offered as form, launch_state as bit};
            use $t::{FormsOffered as Offered, LaunchState as State};
            let mut state = State::empty();
            if launch.class == Class::High {
                state |= State::HIGH_PRIORITY;
            }
            for (bit, flag) in [
                (bit::HIGH_ACTIVE, State::HIGH_ACTIVE),
                (bit::OFFERED_AGAIN, State::OFFERED_AGAIN),
                (bit::GRAPH, State::GRAPH),
                (bit::COOPERATIVE, State::COOPERATIVE),
                (bit::CLUSTERED, State::CLUSTERED),
                (bit::MIN_SHARE, State::MIN_SHARE),
            ] {
                if launch.state & bit != 0 {
                    state |= flag;
                }
            }
            let mut offered = Offered::empty();
            for (bit, flag) in [
                (form::SLICED, Offered::SLICED),
                (form::PREEMPTIBLE, Offered::PREEMPTIBLE),
                (form::SM_LIMITED, Offered::SM_LIMITED),
                (form::PREPARABLE, Offered::PREPARABLE),
            ] {
                if launch.offered & bit != 0 {
                    offered |= flag;
                }
            }
            $t::Launch {
                now_ns: launch.now_ns,
                client: launch.client,
                kernel: launch.kernel,
                state,
                offered,
                grid_blocks: launch.grid_blocks,
                block_threads: launch.block_threads,
                shared_bytes: launch.shared_bytes,
                predicted_ns: launch.predicted_ns,
                waited_ns: launch.waited_ns,
                in_flight_ns: launch.in_flight_ns,
                high_idle_ns: launch.high_idle_ns,
                high_clients: launch.high_clients,
                waiting_clients: launch.waiting_clients,
                stream: launch.stream,
                sm_count: launch.sm_count,
            }
        }

        #[inline]
        pub fn answer(answer: &$t::Answer) -> $crate::policy::Answer {
            use $crate::policy::Decision;
            let decision = match answer.decision {
                $t::Decision::Run(lease) => Decision::Run(lease),
                $t::Decision::Hold(ns) => Decision::Hold(ns),
                $t::Decision::HoldUntilCompletion(ns) => Decision::HoldUntilCompletion(ns),
                $t::Decision::Sliced(blocks) => Decision::Sliced(blocks),
                $t::Decision::Preemptible => Decision::Preemptible,
                $t::Decision::SmLimited(sms) => Decision::SmLimited(sms),
            };
            $crate::policy::Answer { decision, reason: answer.reason }
        }

        fn class(class: $crate::policy::Class) -> $t::PriorityClass {
            match class {
                $crate::policy::Class::High => $t::PriorityClass::High,
                $crate::policy::Class::BestEffort => $t::PriorityClass::BestEffort,
            }
        }

        fn form(form: $crate::policy::Form) -> $t::Form {
            match form {
                $crate::policy::Form::Whole => $t::Form::Whole,
                $crate::policy::Form::Sliced => $t::Form::Sliced,
                $crate::policy::Form::Preemptible => $t::Form::Preemptible,
                $crate::policy::Form::SmLimited => $t::Form::SmLimited,
            }
        }

        pub fn sharing(mode: $crate::policy::SharingMode) -> $t::SharingMode {
            match mode {
                $crate::policy::SharingMode::Concurrent => $t::SharingMode::Concurrent,
                $crate::policy::SharingMode::TimeSliced => $t::SharingMode::TimeSliced,
            }
        }

        pub fn client(info: &$crate::policy::ClientInfo) -> $t::Client {
            $t::Client { id: info.id, class: class(info.class), weight: info.weight() }
        }

        pub fn client_state(view: &$crate::policy::ClientView) -> $t::ClientState {
            let $crate::policy::ClientView { info, usage, .. } = view;
            $t::ClientState {
                id: info.id,
                class: class(info.class),
                weight: info.weight(),
                waiting_since_ns: usage.waiting_since_ns,
                in_flight: usage.in_flight,
                in_flight_ns: usage.in_flight_ns,
                measured_ns: usage.measured_ns,
                charged_ns: usage.charged_ns,
                min_share_permille: usage.min_share_permille,
                backlogged_ns: usage.backlogged_ns,
                backlogged_since_ns: usage.backlogged_since_ns,
            }
        }

        pub fn service(view: &$crate::policy::ServiceView) -> $t::Service {
            let objective = |o: $crate::policy::Objective| $t::Objective {
                slo_ns: o.slo_ns,
                percentile: o.percentile,
            };
            let tokens = |tokens: $crate::policy::TokensView| $t::Tokens {
                tpot_ns: tokens.tpot_ns,
                count: tokens.count,
                within: tokens.within,
                recent: tokens.recent,
                recent_within: tokens.recent_within,
                p50_ns: tokens.p50_ns,
                p99_ns: tokens.p99_ns,
            };
            let profile = |profile: $crate::policy::UnitProfile| $t::UnitProfile {
                profiled: profile.units,
                launches: profile.launches,
                gpu_busy_ns: profile.gpu_busy_ns,
                gaps: profile.gaps,
                gaps_ns: profile.gaps_ns,
                gap_median_ns: profile.gap_median_ns,
                gap_longest_ns: profile.gap_longest_ns,
                sms_max: profile.sms_max,
                sms_mean: profile.sms_mean,
            };
            $t::Service {
                objective: view.objective.map(objective),
                open_since_ns: view.open_since_ns,
                open_deadline_ns: view.deadline_ns(),
                open_is_token: view.open_is_token,
                units: view.units,
                units_within: view.units_within,
                recent: view.recent,
                recent_within: view.recent_within,
                p50_ns: view.p50_ns,
                p99_ns: view.p99_ns,
                tokens: view.tokens.map(tokens),
                profile: view.profile.map(profile),
            }
        }

        pub fn client_identity(info: &$crate::policy::ClientInfo) -> $t::ClientIdentity {
            $t::ClientIdentity { name: info.name.clone(), labels: info.labels.clone() }
        }

        pub fn completion(done: &$crate::policy::Completion) -> $t::Completion {
            $t::Completion {
                client: done.client,
                kernel: done.kernel,
                form: form(done.form),
                argument: done.argument,
                predicted_ns: done.predicted_ns,
                measured_ns: done.measured_ns.unwrap_or(0),
                charged_ns: done.charged_ns,
            }
        }

        pub fn kernel_name(profile: &$crate::profile::Profile) -> $t::KernelName {
            $t::KernelName { name: profile.key.name.clone(), image: profile.key.image as u64 }
        }

        pub fn kernel_profile(profile: &$crate::profile::Profile) -> $t::KernelProfile {
            use $crate::profile::Transformation;
            let transformation = match profile.transformation {
                Transformation::Unknown => $t::Transformation::Unknown,
                Transformation::Preparable => $t::Transformation::Preparable,
                Transformation::Preparing => $t::Transformation::Preparing,
                Transformation::Ready { sliced, preemptible } => {
                    let mut forms = $t::TransformedForms::empty();
                    if sliced {
                        forms |= $t::TransformedForms::SLICED;
                    }
                    if preemptible {
                        forms |= $t::TransformedForms::PREEMPTIBLE;
                    }
                    $t::Transformation::Ready(forms)
                }
                Transformation::WholeOnly(why) => $t::Transformation::WholeOnly(why.into()),
                // Of one client's; a launch says what its client offers.
                Transformation::WholeHere(_) => $t::Transformation::Unknown,
            };
            let one = |view: $crate::profile::FormView| $t::FormProfile {
                form: form(view.form),
                argument: view.argument,
                count: view.count,
                mean_ns: view.mean_ns,
                p50_ns: view.p50_ns,
                p99_ns: view.p99_ns,
                latest_ns: view.latest_ns,
                turnaround_ns: view.turnaround_ns,
            };
            $t::KernelProfile {
                grid: profile.key.grid.into(),
                block: profile.key.block.into(),
                count: profile.count,
                mean_ns: profile.mean_ns,
                p50_ns: profile.p50_ns(),
                p99_ns: profile.p99_ns(),
                latest_ns: profile.latest_ns(),
                blocks_per_sm: profile.demand.blocks_per_sm.into(),
                registers: profile.demand.registers.into(),
                waves_permille: profile.waves_permille(),
                transformation,
                forms: profile.form_views().map(one).collect(),
            }
        }
    };
}
