//! The interpreter's speed: thread instructions a second, on one core.
#![allow(missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Device, params};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::sync::atomic::AtomicBool;
use tally_softcuda_vm::{BlockLaunch, Scratch, run_block};

const PTX: &str = include_str!("../tests/kernels/basic.ptx");
/// Matrices are this many elements square.
const N: u32 = 256;

fn bench(c: &mut Criterion) {
    let mut device = Device::default();
    let ones = vec![1f32; (N * N) as usize];
    let (a, b, out) = (device.upload(&ones), device.upload(&ones), device.upload(&ones));
    let program = device.link(PTX);
    let mut args = params(&[a, b, out]);
    args.extend(N.to_le_bytes());
    let mut group = c.benchmark_group("block");
    for (name, grid, block) in [
        ("matmul16", [N / 16, N / 16, 1], [16, 16, 1]),
        ("matmul32", [N / 32, N / 32, 1], [32, 32, 1]),
        ("vector_add", [N, 1, 1], [256, 1, 1]),
    ] {
        let Some(kernel) = program.kernel(name) else { continue };
        let launch = BlockLaunch {
            program: &program,
            kernel,
            params: &args,
            grid,
            block,
            block_index: [1, 0, 0],
            dynamic_shared_bytes: 0,
            sm_id: 0,
            sm_count: 1,
        };
        let mut scratch = Scratch::new();
        let cancelled = AtomicBool::new(false);
        let mut run = || run_block(&launch, &device, &mut scratch, &cancelled).expect("a trap");
        group.throughput(Throughput::Elements(run().thread_instructions));
        group.bench_function(name, |bencher| bencher.iter(&mut run));
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
