//! Parts of graphs that fail, and attributes that kernels keep when they are launched by themselves.

use crate::forms::through_shared;
use crate::governor::Governor;
use crate::graphs::{BLOCKS, WORDS, in_parts_of, launch, parts_of_one, recorded};
use crate::program::{Attribute, Device, ask, ok};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;

/// A launch of which a part fails is the program's to hear of, and nothing of it runs twice.
fn failing(device: &mut Device, steps_by_themselves: bool) {
    // Kernels of less than half of these blocks stay in their part.
    let blocks = if steps_by_themselves { BLOCKS } else { 3 * BLOCKS };
    let warm = device.cells(blocks);
    device.warm_up_with(|| device.step(&warm, [blocks, 1, 1], null_mut(), 1, 0));
    let stream = device.stream(1);
    let cells = [device.cells(BLOCKS), device.cells(BLOCKS)];
    let sum = device.memory(1);
    let exec = recorded(device, stream, || {
        device.step(&cells[0], [BLOCKS, 1, 1], stream, 1, 0);
        device.sum(sum, cells[0].counts, BLOCKS, stream);
        device.step(&cells[1], [BLOCKS, 1, 1], stream, 2, 0);
    });
    assert_eq!(ask("go"), "on");
    // SAFETY: a graph and a stream of ours.
    assert_eq!(unsafe { (device.cuda.cuGraphLaunch)(exec, stream) }, 719);
    device.sync(stream);
    device.check_steps(&cells[0], &[1]);
    device.check_steps(&cells[1], &[]);
}

#[test]
fn a_part_that_fails_ends_the_launch_and_nothing_runs_twice() {
    both_under(
        a_part_that_fails_ends_the_launch_and_nothing_runs_twice,
        // The first part is launched, the second is refused.
        &[("TALLY_SOFTCUDA_FAULT_GRAPH", "2")],
        &welcome(),
        |device| failing(device, false),
        |core| parts_of_one(core, 1, 0, 1),
    );
}

#[test]
fn a_part_that_fails_behind_a_transformed_kernel_does_not_run_that_again() {
    both_under(
        a_part_that_fails_behind_a_transformed_kernel_does_not_run_that_again,
        // The kernels go by themselves; between them is the only part.
        &[("TALLY_SOFTCUDA_FAULT_GRAPH", "1")],
        &welcome(),
        |device| failing(device, true),
        |core| parts_of_one(core, 1, 1, 1),
    );
}

const ACCESS_WINDOW: u32 = 1;
const MEMORY_DOMAIN: u32 = 10;
const CARVEOUT: u32 = 14;

#[test]
fn a_kernel_of_a_graph_keeps_its_hints_when_it_goes_by_itself() {
    both_under(
        a_kernel_of_a_graph_keeps_its_hints_when_it_goes_by_itself,
        // Every part and every whole launch of it must have those of the first launch.
        &[("TALLY_SOFTCUDA_FAULT_HINTS", "step")],
        &welcome(),
        |device| {
            let (stream, cells) = (device.stream(1), device.cells(BLOCKS));
            // The second half of the data, as a window that stays in the cache.
            let (lo, hi) = (cells.data as u32, (cells.data >> 32) as u32);
            let window = [lo, hi, WORDS * 2, 0, 1.0_f32.to_bits(), 2, 1];
            let hints = [Attribute::new(ACCESS_WINDOW, &window), Attribute::new(CARVEOUT, &[50])];
            let warm = device.cells(BLOCKS);
            device.warm_up_with(|| ok(device.step_with(&hints, &warm, null_mut(), 1)));
            let without = device.step_with(&hints[1..], &warm, stream, 1);
            assert_eq!(without, 1, "the device looks at them");
            // A launch makes parts only if nothing runs: what the shim put around the one that failed has ended.
            device.sync(stream);
            let sum = device.memory(1);
            let exec = recorded(device, stream, || {
                ok(device.step_with(&hints, &cells, stream, 1));
                device.sum(sum, cells.counts, BLOCKS, stream);
                ok(device.step_with(&hints, &cells, stream, 2));
            });
            assert_eq!(ask("go"), "on");
            (0..3).for_each(|_| launch(device, exec, stream));
            device.sync(stream);
            device.check_steps(&cells, &[1, 2, 1, 2, 1, 2]);
        },
        // Only the launch without the hints failed.
        |core| parts_of_one(core, 3, 6, 1),
    );
}

#[test]
fn a_kernel_of_a_graph_with_an_attribute_that_it_would_lose_stays_in_its_part() {
    both(
        a_kernel_of_a_graph_with_an_attribute_that_it_would_lose_stays_in_its_part,
        &welcome(),
        |device| {
            let (stream, cells) = (device.stream(1), device.cells(BLOCKS));
            device.warm_up();
            let remote = [Attribute::new(MEMORY_DOMAIN, &[1])];
            let exec = recorded(device, stream, || {
                ok(device.step_with(&remote, &cells, stream, 1));
                ok(device.step_with(&[], &cells, stream, 2));
                ok(device.step_with(&remote, &cells, stream, 3));
            });
            assert_eq!(ask("go"), "on");
            launch(device, exec, stream);
            device.sync(stream);
            device.check_steps(&cells, &[1, 2, 3]);
        },
        |core| parts_of_one(core, 1, 1, 0),
    );
}

/// A graph that a kernel launches as a tail runs once all of the kernel's own graph is over.
#[test]
fn no_graph_is_divided_once_kernels_may_launch_one() {
    const DEVICE_LAUNCH: u64 = 4;
    both(
        no_graph_is_divided_once_kernels_may_launch_one,
        &welcome(),
        |device| {
            device.warm_up();
            let (stream, cells, sum) = (device.stream(1), device.cells(BLOCKS), device.memory(1));
            let record = || {
                device.step(&cells, [BLOCKS, 1, 1], stream, 1, 0);
                device.sum(sum, cells.counts, BLOCKS, stream);
                device.step(&cells, [BLOCKS, 1, 1], stream, 2, 0);
            };
            let exec = recorded(device, stream, record);
            assert_eq!(ask("go"), "on");
            launch(device, exec, stream);
            device.sync(stream);
            let (mut graph, mut other) = (null_mut(), null_mut());
            // SAFETY: a stream of ours; valid out-pointers.
            unsafe {
                ok((device.cuda.cuStreamBeginCapture_v2)(stream, 2));
                record();
                ok((device.cuda.cuStreamEndCapture)(stream, &mut graph));
                ok((device.cuda.cuGraphInstantiateWithFlags)(&mut other, graph, DEVICE_LAUNCH));
            }
            (0..2).for_each(|_| launch(device, exec, stream));
            device.sync(stream);
            device.check_steps(&cells, &[1, 2, 1, 2, 1, 2]);
        },
        |core| parts_of_one(core, 1, 2, 0),
    );
}

/// An exec keeps what its kernels might have when it was made; a launch by itself would be refused, behind parts that
/// ran.
#[test]
fn a_graph_is_whole_while_its_kernel_may_have_less_shared_memory_than_in_it() {
    const MORE: u32 = 96 << 10;
    const LESS: u32 = 64 << 10;
    both(
        a_graph_is_whole_while_its_kernel_may_have_less_shared_memory_than_in_it,
        &welcome(),
        |device| {
            let f = device.function("through_shared");
            let (data, sum, stream) =
                (device.memory(BLOCKS as usize), device.memory(1), device.stream(1));
            let launch_with = |bytes: u32, stream| {
                let at = u64::from(bytes) - 4;
                ok(through_shared(device, f, BLOCKS, bytes, (data, at), stream));
            };
            device.allow(f, MORE);
            device.warm_up_with(|| launch_with(MORE, null_mut()));
            device.sync(null_mut());
            let exec = recorded(device, stream, || {
                for _ in 0..2 {
                    launch_with(MORE, stream);
                    device.sum(sum, data, BLOCKS, stream);
                }
            });
            for bytes in [MORE, LESS, MORE] {
                device.allow(f, bytes);
                launch_with(bytes, stream);
                device.sync(stream);
                device.set(sum, 0, 1);
                assert_eq!(ask("go"), "on");
                launch(device, exec, stream);
                device.sync(stream);
                assert_eq!(device.read(data, 2), [7, 8]);
                assert_ne!(device.read(sum, 1), [0]);
            }
        },
        |core| {
            core.warm_up("through_shared");
            in_parts_of(core, 1);
            for _ in 0..3 {
                core.expect("go");
                core.say("on");
            }
            core.ends(0);
            let c = core.counters();
            assert_eq!([&c.graph_chained, &c.failed].map(|n| n.load(SeqCst)), [2, 0]);
        },
    );
}

/// Events are of one context, so that parts in another one could not be kept in order.
#[test]
fn a_graph_is_whole_in_another_context_than_its_own() {
    both(
        a_graph_is_whole_in_another_context_than_its_own,
        &welcome(),
        |device| {
            let (home, stream, cells) = (device.context, device.stream(1), device.cells(BLOCKS));
            device.warm_up();
            let exec = recorded(device, stream, || {
                (0..8).for_each(|k| device.step(&cells, [BLOCKS, 1, 1], stream, k, 200));
            });
            let mut other = null_mut();
            // SAFETY: a valid out-pointer; the new context is current now.
            ok(unsafe { (device.cuda.cuCtxCreate_v2)(&mut other, 0, 0) });
            let others = [device.stream(1), device.stream(1)];
            assert_eq!(ask("go"), "on");
            for _ in 0..3 {
                others.iter().for_each(|stream| launch(device, exec, *stream));
            }
            others.iter().for_each(|stream| device.sync(*stream));
            // SAFETY: a live context.
            ok(unsafe { (device.cuda.cuCtxSetCurrent)(home) });
            device.check_steps(&cells, &(0..8).cycle().take(6 * 8).collect::<Vec<_>>());
            assert_eq!(ask("whole?"), "yes");
            // The driver orders the first one behind those in the other streams, for which it has to be whole.
            (0..2).for_each(|_| launch(device, exec, stream));
            device.sync(stream);
            assert_eq!(ask("in parts?"), "yes");
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 1);
            core.say("on");
            let chained = |core: &Governor| core.counters().graph_chained.load(SeqCst);
            core.expect("whole?");
            core.say(if chained(core) == 0 { "yes" } else { "no" });
            core.expect("in parts?");
            core.say(if chained(core) == 1 { "yes" } else { "no" });
            core.ends(0);
        },
    );
}
