//! What kernels demand of an SM reaches the core, as the driver says it.

use crate::governor::Governor;
use crate::program::{Device, ask, ok};
use crate::{both, welcome};
use std::ptr::null_mut;
use tally_ipc::ring::Answer;

/// Threads of a block, and its dynamic shared memory.
const SHAPES: [(u32, u32); 3] = [(4, 0), (1_024, 0), (32, 40_000)];

fn launch(device: &Device, (threads, shared_bytes): (u32, u32)) {
    let (data, counts, k, work) = (device.memory(1_024), device.memory(1), 1_u32, 0_u32);
    let mut params = [
        std::ptr::from_ref(&data).cast_mut().cast(),
        std::ptr::from_ref(&counts).cast_mut().cast(),
        std::ptr::from_ref(&k).cast_mut().cast(),
        std::ptr::from_ref(&work).cast_mut().cast(),
    ];
    let (f, none) = (device.function("step"), null_mut());
    let launch = device.cuda.cuLaunchKernel;
    // SAFETY: a function of ours with its parameters, in the default stream.
    ok(unsafe {
        launch(f, 1, 1, 1, threads, 1, 1, shared_bytes, none, params.as_mut_ptr(), null_mut())
    });
    device.sync(null_mut());
}

/// What the driver tells a program that asks.
fn told(device: &Device, (threads, shared_bytes): (u32, u32)) -> String {
    let (f, mut blocks, mut registers) = (device.function("step"), 0, 0);
    // SAFETY: valid out-pointers, a function of ours.
    unsafe {
        let occupancy = device.cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor;
        ok(occupancy(&mut blocks, f, threads as i32, shared_bytes as usize));
        ok((device.cuda.cuFuncGetAttribute)(&mut registers, 4, f));
    }
    format!("{blocks} {registers}")
}

/// The first launch of each shape is made before the driver is asked; the others tell what it said.
#[test]
fn what_a_kernel_demands_is_what_the_driver_says_of_its_shape() {
    both(
        what_a_kernel_demands_is_what_the_driver_says_of_its_shape,
        &welcome(),
        |device| {
            for _ in 0..3 {
                SHAPES.iter().for_each(|shape| launch(device, *shape));
            }
            SHAPES.iter().for_each(|shape| {
                ask(&told(device, *shape));
            });
        },
        |core: &mut Governor| {
            core.answer(Answer::Whole);
            for (threads, shared_bytes) in SHAPES {
                let told = core.hear();
                assert!(!told.starts_with('0') && !told.ends_with(" 0"), "{told}");
                let requests = core.requests("step");
                let of_shape = requests.iter().map(|(request, _)| request);
                let of_shape = of_shape
                    .filter(|r| (r.block[0], r.shared_bytes) == (threads, shared_bytes))
                    .map(|r| format!("{} {}", r.demand.blocks_per_sm, r.demand.registers));
                let unknown = "0 0".to_owned();
                assert_eq!(of_shape.collect::<Vec<_>>(), [unknown, told.clone(), told]);
                core.say("next");
            }
            core.ends(0);
        },
    );
}
