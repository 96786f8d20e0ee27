use super::*;
use crate::cuda::{
    LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_PRIORITY, LAUNCH_ATTRIBUTE_PROGRAMMATIC,
    LaunchAttribute,
};
use crate::host::fake;
use crate::making::prepared;
use proptest::prelude::*;
use std::sync::atomic::AtomicI32;

fn transformed(cluster: Option<[u32; 3]>, required: [i32; 3]) -> Transformed {
    Transformed {
        context: 1,
        function: 2,
        is_ptx: true,
        by_offset: Default::default(),
        device: 0,
        parameters: Vec::new(),
        control_offset: 0,
        cluster,
        image: 3,
        reads_sm: false,
        originals: Default::default(),
        shared_max: AtomicI32::new(0),
        attributes_at: 0,
        compared: Default::default(),
        required_cluster: required.map(AtomicI32::new),
        wanted_blocks: 0,
        wanted_us: 0,
    }
}

#[test]
fn a_form_whose_image_was_unloaded_while_it_was_made_is_not_used() {
    const INDEX: usize = 7;
    let prepare = || prepared(INDEX, Transformed { image: 77, ..transformed(None, [0; 3]) });
    prepare();
    assert!(kernels::transformed(INDEX).is_none(), "not loaded any more");
    fake::set_loaded(77, true);
    prepare();
    assert!(kernels::transformed(INDEX).is_some());
    fake::set_loaded(77, false);
    image_unloaded(77);
    assert!(kernels::transformed(INDEX).is_none(), "unloaded");
}

#[test]
fn a_form_whose_image_may_be_written_is_not_used_before_or_behind_its_making() {
    const INDEX: usize = 8;
    let prepare = || prepared(INDEX, Transformed { image: 78, ..transformed(None, [0; 3]) });
    fake::set_loaded(78, true);
    prepare();
    assert!(kernels::transformed(INDEX).is_some());
    image_written(79);
    assert!(kernels::transformed(INDEX).is_some(), "another image");
    fake::set_loaded(78, false);
    image_written(78);
    assert!(kernels::transformed(INDEX).is_none());
    prepare();
    let state = transform_state::unpack(KERNELS[INDEX].state.load(Acquire)).0;
    assert!(kernels::transformed(INDEX).is_none() && state == transform_state::UNKNOWN);
}

#[test]
fn machine_code_has_offsets_in_one_dimension_and_ptx_in_all() {
    for (is_ptx, grid, serves) in [
        (true, [9, 1, 1], true),
        (true, [9, 2, 3], true),
        (false, [9, 1, 1], true),
        (false, [9, 2, 1], false),
        (false, [9, 1, 2], false),
    ] {
        let transformed = Transformed { is_ptx, ..transformed(None, [0; 3]) };
        transformed.by_offset.settle(Some(7));
        let found = by_offset(&transformed, 0, &launch(grid, &[]));
        assert_eq!(found, serves.then_some(7), "{is_ptx} {grid:?}");
    }
}

fn launch(grid: [u32; 3], attributes: &[LaunchAttribute]) -> KernelArguments {
    KernelArguments {
        function: std::ptr::null_mut(),
        grid,
        block: [32, 1, 1],
        shared_bytes: 0,
        attributes: attributes.as_ptr(),
        attribute_count: attributes.len() as u32,
        params: std::ptr::null_mut(),
        extra: std::ptr::null_mut(),
    }
}

fn cluster_of(attributes: &[(i32, [u32; 3])], transformed: &Transformed) -> Option<[u32; 3]> {
    let attributes: Vec<_> = attributes
        .iter()
        .map(|(id, first)| {
            let mut value = [0; 16];
            value[..3].copy_from_slice(first);
            LaunchAttribute::new(*id, value)
        })
        .collect();
    cluster(&launch([8, 1, 1], &attributes), transformed)
}

#[test]
fn clusters_are_the_launchs_or_the_kernels_and_powers_of_two() {
    let (cluster, programmatic) = (LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_PROGRAMMATIC);
    let plain = transformed(None, [0; 3]);
    assert_eq!(cluster_of(&[], &plain), Some([1; 3]));
    assert_eq!(cluster_of(&[(cluster, [4, 2, 0])], &plain), Some([4, 2, 1]));
    assert_eq!(cluster_of(&[(cluster, [3, 1, 1])], &plain), None);
    assert_eq!(cluster_of(&[], &transformed(Some([2, 1, 1]), [2, 1, 1])), Some([2, 1, 1]));
    assert_eq!(cluster_of(&[], &transformed(None, [2, 0, 4])), Some([2, 1, 4]), "by attributes");
    assert_eq!(
        cluster_of(&[(cluster, [1, 1, 1])], &transformed(Some([6, 1, 1]), [0; 3])),
        Some([1; 3])
    );
    assert_eq!(cluster_of(&[], &transformed(Some([6, 1, 1]), [0; 3])), None);
    // What a launch is repeated with, and what not.
    assert_eq!(cluster_of(&[(LAUNCH_ATTRIBUTE_PRIORITY, [7; 3])], &plain), Some([1; 3]));
    assert_eq!(cluster_of(&[(programmatic, [0; 3])], &plain), Some([1; 3]));
    assert_eq!(cluster_of(&[(programmatic, [1, 0, 0])], &plain), None);
    for unknown in [2, 7, 12, 13, 99] {
        assert_eq!(cluster_of(&[(unknown, [0; 3])], &plain), None, "{unknown}");
    }
}

/// Blocks as they are numbered, if CUDA takes the grid.
fn numbered(grid: [u32; 3]) -> Option<u32> {
    let all: u128 = grid.iter().map(|n| u128::from(*n)).product();
    let is_taken = grid[1] <= 65_535 && grid[2] <= 65_535;
    ((2..1 << 31).contains(&all) && is_taken).then_some(all as u32)
}

#[test]
fn a_grid_that_cuda_refuses_has_no_parts() {
    let grids = [[1, 65_535, 1], [1, 1, 65_535], [1, 65_536, 1], [1, 1, 65_536], [65_536, 1, 1]];
    let parts = [Some(65_535), Some(65_535), None, None, Some(65_536)];
    assert_eq!(grids.map(blocks), parts);
}

proptest! {
    #[test]
    fn blocks_are_counted_or_too_many(grid in prop::array::uniform3(any::<u32>())) {
        prop_assert_eq!(blocks(grid), numbered(grid));
    }

    #[test]
    fn small_grids_are_counted(grid in prop::array::uniform3(0_u32..2_000)) {
        prop_assert_eq!(blocks(grid), numbered(grid));
    }
}
