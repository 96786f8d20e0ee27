//! Transforming all kernels of an image anew, against finding what was kept of it: the reading of
//! the file left out on both sides, for it lies in the page cache.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tally_rewriter::disk_cache::{self as format, Key};
use tally_rewriter::{KernelForm, image};

/// PTX of so many kernels.
fn image_of(kernels: usize) -> String {
    let head = ".version 7.0\n.target sm_75\n.address_size 64\n";
    let kernel = |i: usize| {
        let lines: String = (2..100)
            .map(|r| format!("    mad.lo.u32 %r{r}, %r{}, %r{}, {i};\n", r - 1, r - 2))
            .collect();
        format!(
            ".visible .entry k{i}(.param .u64 out) {{\n    .reg .b32 %r<101>;\n    .reg .b64 %rd<3>;\n    \
             mov.u32 %r0, %ctaid.x;\n    mov.u32 %r1, %tid.x;\n{lines}    ld.param.u64 %rd1, [out];\n    \
             mul.wide.u32 %rd2, %r0, 4;\n    add.u64 %rd1, %rd1, %rd2;\n    \
             st.global.u32 [%rd1], %r99;\n    ret;\n}}\n"
        )
    };
    (0..kernels).fold(head.to_owned(), |all, i| all + &kernel(i))
}

fn benches(c: &mut Criterion) {
    for kernels in [8, 256] {
        let ptx = image_of(kernels);
        let made = image::rewrite(ptx.as_bytes(), 75, KernelForm::ByClaims, None).unwrap();
        assert_eq!(made.kernels.len(), kernels);
        let key = Key::new(ptx.as_bytes(), 75, KernelForm::ByClaims);
        let file = format::to_bytes(&key, &made);
        let mut group = c.benchmark_group(format!("{} KiB of PTX", ptx.len() >> 10));
        group.throughput(Throughput::Bytes(ptx.len() as u64));
        group.bench_function("made", |b| {
            b.iter(|| image::rewrite(black_box(ptx.as_bytes()), 75, KernelForm::ByClaims, None))
        });
        group.bench_function("found", |b| {
            b.iter(|| {
                let key = Key::new(black_box(ptx.as_bytes()), 75, KernelForm::ByClaims);
                format::from_bytes(&key, black_box(&file)).unwrap()
            })
        });
        group.finish();
    }
}

criterion_group!(both, benches);
criterion_main!(both);
