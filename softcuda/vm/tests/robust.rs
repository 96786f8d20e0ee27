//! Hostile text: the parser and the decoder answer, and never panic.
#![allow(missing_docs)]

mod common;

use proptest::prelude::*;
use tally_softcuda_vm::Module;

const SEEDS: [&str; 2] = [include_str!("kernels/basic.ptx"), include_str!("kernels/more.ptx")];

/// Parses and, if that works, links.
fn digest(ptx: &str) {
    if let Ok(module) = Module::parse(ptx) {
        let mut at = 0x1000;
        let linked = module.link(&mut |var| {
            at += 0x1000 + var.size;
            at
        });
        for kernel in linked.iter().flat_map(|p| p.kernels()) {
            assert!(kernel.params.iter().all(|p| p.offset + p.size <= kernel.param_bytes));
        }
    }
}

/// A window of a real module, cut to keep a case quick.
fn lines(seed: usize, from: usize, n: usize) -> Vec<String> {
    let all: Vec<&str> = SEEDS[seed].lines().collect();
    let start = from % all.len();
    all[..9.min(all.len())]
        .iter()
        .chain(&all[start..(start + n).min(all.len())])
        .map(|s| (*s).to_string())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn lines_moved_and_dropped(
        seed in 0usize..2,
        swaps in prop::collection::vec((any::<u16>(), any::<u16>(), 0u8..3), 1..12),
    ) {
        let mut text: Vec<&str> = SEEDS[seed].lines().collect();
        for (a, b, how) in swaps {
            let (a, b) = (usize::from(a) % text.len(), usize::from(b) % text.len());
            match how {
                0 => text.swap(a, b),
                1 => text[a] = "",
                _ => text[a] = text[b],
            }
        }
        digest(&text.join("\n"));
    }

    #[test]
    fn bytes_changed(
        seed in 0usize..2,
        from in any::<usize>(),
        edits in prop::collection::vec((any::<u16>(), any::<u8>()), 1..30),
    ) {
        let mut bytes = lines(seed, from, 200).join("\n").into_bytes();
        for (at, b) in edits {
            let at = usize::from(at) % bytes.len();
            bytes[at] = b;
        }
        digest(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn words_exchanged(
        seed in 0usize..2,
        edits in prop::collection::vec((any::<u32>(), any::<u32>()), 1..40),
    ) {
        let text = SEEDS[seed];
        let words: Vec<&str> = text.split_inclusive([' ', ',', ';', '.', '\t', '\n']).collect();
        let mut out = words.clone();
        for (a, b) in edits {
            out[a as usize % words.len()] = words[b as usize % words.len()];
        }
        digest(&out.concat());
    }

    #[test]
    fn any_text(text in "\\PC{0,200}") {
        digest(&text);
        digest(&format!(".version 8.0\n.target sm_70\n.address_size 64\n{text}"));
        digest(&common::kernel(&text));
    }
}

#[test]
fn sizes_that_would_not_fit() {
    for body in [
        ".local .b8 a[99999999999];",
        ".shared .b8 a[4294967296][4294967296][4294967296];",
        ".reg .b32 %q<99999999999>; mov.u32 %q4000000000, 1;",
        ".local .align 3 .b8 a[4];",
        ".local .align 0x80000000 .b8 a[4];",
        "ld.param.u32 %r1, [out+0x7fffffffffffffff];",
        "ld.param.u32 %r1, [out+-1];",
        "bra L9;",
        "brx.idx %r1, NOWHERE;",
        "call nothing;",
        "call (%r1), nothing, (%r2);",
        "@%r1 bra L; L:",
        "shfl.sync.idx.b32 %r1, %r2;",
        "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r1}, {%f1};",
        "prmt.b32 %r1, %r2;",
        "mov.b64 {}, %rd1;",
        "mov.b64 %rd1, {};",
        "mov.b64 {%r1,%r2,%r3}, %rd1;",
        "cvt.u32 %r1, %r2;",
        "bfi.b32 %r1;",
        "set.eq.u32.f64 %p1, %fd1, %fd2;",
        "bar.red.popc.u32 %r1;",
    ] {
        digest(&common::kernel(body));
        digest(&common::kernel(&format!("{body}\n{{ {body} }}")));
    }
    digest(&common::kernel(&"{".repeat(100_000)));
    digest(&common::kernel(&"mov.b64 {".repeat(1000)));
    let unterminated = common::kernel("").replace("ret;\n}", "");
    assert!(Module::parse(&unterminated).is_err());
}
