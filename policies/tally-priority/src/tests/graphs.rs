//! The forms of CUDA graphs.

use crate::tests::forms_of;
use tally_forms::candidates::graph_form;
use tally_sdk::testing::launch;
use tally_sdk::{Decision, FormsOffered, Launch, LaunchState};

fn graph(nodes: u64, predicted_us: u64) -> Launch {
    Launch {
        state: LaunchState::GRAPH,
        offered: FormsOffered::SLICED,
        grid_blocks: nodes,
        predicted_ns: predicted_us * 1_000,
        ..launch()
    }
}

fn chosen(launch: &Launch) -> Decision {
    graph_form(launch, &forms_of(""))
}

#[test]
fn a_short_one_runs_whole() {
    assert_eq!(chosen(&graph(100, 250)), Decision::Run(0));
    assert_eq!(chosen(&graph(100, 0)), Decision::Run(0));
}

#[test]
fn a_long_one_is_divided_so_that_no_part_is_expected_to_take_longer() {
    // 10 us a node: 25 nodes are 250 us, and 24 the next size below.
    assert_eq!(chosen(&graph(280, 2_800)), Decision::Sliced(24));
    for nodes in [2, 3, 17, 280, 100_000] {
        for us in [251, 400, 3_000, 1_000_000] {
            if let Decision::Sliced(k) = chosen(&graph(nodes, us)) {
                assert!(k == 1 || u64::from(k) * us <= 250 * nodes, "{nodes} {us} {k}");
                assert!(u64::from(k) < nodes);
            } else {
                panic!("{nodes} nodes of {us} us run whole");
            }
        }
    }
}

#[test]
fn one_that_cannot_be_divided_runs_whole() {
    let whole = Launch { offered: FormsOffered::empty(), ..graph(280, 2_800) };
    assert_eq!(chosen(&whole), Decision::Run(0));
    assert_eq!(chosen(&graph(1, 2_800)), Decision::Run(0));
    assert_eq!(chosen(&graph(0, 2_800)), Decision::Run(0));
}

#[test]
fn one_whose_parts_can_be_made_has_them_asked_for() {
    let offered = FormsOffered::PREPARABLE;
    assert_eq!(chosen(&Launch { offered, ..graph(280, 2_800) }), Decision::Sliced(24));
}

#[test]
fn the_part_is_configuration_and_never_below_the_bound_of_a_kernel() {
    let form = |text| graph_form(&graph(280, 2_800), &forms_of(text));
    assert_eq!(form("graph_part_us = 40"), Decision::Sliced(4));
    assert_eq!(form("graph_part_us = 40\nturnaround_ns_max = 80000"), Decision::Sliced(8));
}
