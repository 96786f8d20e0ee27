//! CUDA graphs: many kernels that start as one (not in the paper, where graphs run
//! outside of the scheduler).
//!
//! A graph that is short enough runs whole. A longer one is cut into parts of so many
//! kernel nodes that each takes about `graph_part_us`; giving way between two parts
//! costs a launch, so the bound of single kernels would be too small.

use crate::candidates::{scaled, step_down};
use crate::choice::Choice;
use crate::settings::Settings;
use tally_sdk::Launch;

/// The form of a graph.
pub fn choose(launch: &Launch, settings: &Settings) -> Choice {
    let nodes = launch.grid_blocks;
    let part_ns = settings.graph_part_ns.max(settings.turnaround_ns_max);
    let can_cut = launch.can_slice() || launch.can_prepare();
    if !can_cut || nodes < 2 || launch.predicted_ns <= part_ns {
        return Choice::Whole;
    }
    // Few sizes, so that a time that wavers does not make new parts each time.
    let nodes_of_part = step_down(scaled(nodes, part_ns, launch.predicted_ns)).max(1);
    match u32::try_from(nodes_of_part) {
        Ok(count) if nodes_of_part < nodes => Choice::Slice(count),
        _ => Choice::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::LaunchFlags;
    use tally_sdk::testing::launch;

    fn graph(nodes: u64, predicted_us: u64) -> Launch {
        Launch {
            flags: LaunchFlags::GRAPH | LaunchFlags::CAN_SLICE,
            grid_blocks: nodes,
            predicted_ns: predicted_us * 1_000,
            ..launch()
        }
    }

    fn chosen(launch: &Launch) -> Choice {
        choose(launch, &Settings::read("").unwrap())
    }

    #[test]
    fn a_short_one_runs_whole() {
        assert_eq!(chosen(&graph(100, 250)), Choice::Whole);
        assert_eq!(chosen(&graph(100, 0)), Choice::Whole);
    }

    #[test]
    fn a_long_one_is_cut_so_that_no_part_is_expected_to_take_longer() {
        // 10 us a node: 25 nodes are 250 us, and 24 the next size below.
        assert_eq!(chosen(&graph(280, 2_800)), Choice::Slice(24));
        for nodes in [2, 3, 17, 280, 100_000] {
            for us in [251, 400, 3_000, 1_000_000] {
                if let Choice::Slice(k) = chosen(&graph(nodes, us)) {
                    assert!(k == 1 || u64::from(k) * us <= 250 * nodes, "{nodes} {us} {k}");
                    assert!(u64::from(k) < nodes);
                } else {
                    panic!("{nodes} nodes of {us} us run whole");
                }
            }
        }
    }

    #[test]
    fn one_that_cannot_be_cut_runs_whole() {
        let whole = Launch { flags: LaunchFlags::GRAPH, ..graph(280, 2_800) };
        assert_eq!(chosen(&whole), Choice::Whole);
        assert_eq!(chosen(&graph(1, 2_800)), Choice::Whole);
        assert_eq!(chosen(&graph(0, 2_800)), Choice::Whole);
    }

    #[test]
    fn one_whose_parts_can_be_made_has_them_asked_for() {
        let flags = LaunchFlags::GRAPH | LaunchFlags::CAN_PREPARE;
        assert_eq!(chosen(&Launch { flags, ..graph(280, 2_800) }), Choice::Slice(24));
    }

    #[test]
    fn the_part_is_configuration_and_never_below_the_bound_of_a_kernel() {
        let cut = |text| choose(&graph(280, 2_800), &Settings::read(text).unwrap());
        assert_eq!(cut("graph_part_us = 40"), Choice::Slice(4));
        assert_eq!(cut("graph_part_us = 40\nturnaround_ns_max = 80000"), Choice::Slice(8));
    }
}
