//! Whole CUDA programs, from PTX that NVRTC compiled.
#![allow(missing_docs)]

mod common;

use common::{Device, Run, params};

const BASIC: &str = include_str!("kernels/basic.ptx");

fn args(values: &[u64], n: i32) -> Vec<u8> {
    let mut bytes = params(values);
    bytes.extend(n.to_le_bytes());
    bytes
}

#[test]
fn vector_add_with_a_ragged_end() {
    let mut d = Device::default();
    let n = 1000;
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.37).collect();
    let b: Vec<f32> = (0..n).map(|i| 1.0 / (i + 1) as f32).collect();
    let (pa, pb, pc) = (d.upload(&a), d.upload(&b), d.upload(&vec![-1f32; n]));
    let program = d.link(BASIC);
    let run = Run { kernel: "vector_add", grid: [5, 1, 1], block: [224, 1, 1], ..Run::default() };
    let stats = run.go(&d, &program, &args(&[pa, pb, pc], n as i32)).unwrap();
    let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(d.download::<f32>(pc, n), want);
    assert!(stats.thread_instructions > 5 * 224 * 10);
}

fn matmul(kernel: &str, tile: u32, n: usize) {
    let mut d = Device::default();
    let a: Vec<f32> = (0..n * n).map(|i| ((i * 7919) % 101) as f32 * 0.01 - 0.5).collect();
    let b: Vec<f32> = (0..n * n).map(|i| ((i * 104_729) % 97) as f32 * 0.02 - 1.0).collect();
    let (pa, pb, pc) = (d.upload(&a), d.upload(&b), d.upload(&vec![0f32; n * n]));
    let program = d.link(BASIC);
    let grid = [n as u32 / tile, n as u32 / tile, 1];
    let run = Run { kernel, grid, block: [tile, tile, 1], workers: 2, ..Run::default() };
    run.go(&d, &program, &args(&[pa, pb, pc], n as i32)).unwrap();
    let got = d.download::<f32>(pc, n * n);
    for i in 0..n {
        for j in 0..n {
            // The compiler contracts to fma, in order of k.
            let want = (0..n).fold(0f32, |s, k| a[i * n + k].mul_add(b[k * n + j], s));
            assert_eq!(got[i * n + j].to_bits(), want.to_bits(), "at {i}, {j}");
        }
    }
}

#[test]
fn tiled_matrix_products_are_bit_exact() {
    matmul("matmul16", 16, 64);
    matmul("matmul32", 32, 96);
}

#[test]
fn reduction_across_host_threads() {
    let mut d = Device::default();
    let n = 10_000;
    let values: Vec<i32> = (0..n).map(|i| (i * 31) % 1000 - 300).collect();
    let (input, out) = (d.upload(&values), d.upload(&[0i32]));
    let program = d.link(BASIC);
    let run =
        Run { kernel: "reduce", grid: [40, 1, 1], block: [256, 1, 1], shared: 1024, workers: 4 };
    run.go(&d, &program, &args(&[input, out], n)).unwrap();
    assert_eq!(d.download::<i32>(out, 1)[0], values.iter().sum::<i32>());
}

#[test]
fn recursion_of_different_depths() {
    let mut d = Device::default();
    let out = d.upload(&[0i32; 64]);
    let program = d.link(BASIC);
    Run { kernel: "fibonacci", block: [64, 1, 1], ..Run::default() }
        .go(&d, &program, &params(&[out]))
        .unwrap();
    let fib = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144];
    let want: Vec<i32> = (0..64).map(|i| fib[i % 13]).collect();
    assert_eq!(d.download::<i32>(out, 64), want);
}

#[test]
fn indirect_calls_through_a_table_in_memory() {
    let mut d = Device::default();
    let x: Vec<f32> = (0..32).map(|i| i as f32 + 0.5).collect();
    let px = d.upload(&x);
    let program = d.link(BASIC);
    Run { kernel: "indirect", ..Run::default() }.go(&d, &program, &params(&[px])).unwrap();
    let want: Vec<f32> = x
        .iter()
        .enumerate()
        .map(|(i, x)| match i % 3 {
            0 => x + 3.0,
            1 => x * 3.0,
            _ => x - 3.0,
        })
        .collect();
    assert_eq!(d.download::<f32>(px, 32), want);
}

#[test]
fn structures_by_value() {
    let mut d = Device::default();
    let out = d.upload(&[0u64; 6 * 32]);
    let program = d.link(BASIC);
    let kernel = program.kernel("structs").unwrap();
    assert_eq!((kernel.params[0].size, kernel.params[1].offset, kernel.param_bytes), (48, 48, 56));
    let mut bytes: Vec<u8> = (0..10i32).flat_map(|i| (i * 11).to_le_bytes()).collect();
    bytes.extend(2.5f64.to_le_bytes());
    bytes.extend(out.to_le_bytes());
    Run { kernel: "structs", ..Run::default() }.go(&d, &program, &bytes).unwrap();
    for t in 0..32 {
        let v = d.download::<i32>(out + 48 * t, 10);
        let want: Vec<i32> = (0..10).map(|i| (i + t as i32) % 10 * 11).collect();
        assert_eq!(v, want, "thread {t}");
        assert_eq!(d.download::<f64>(out + 48 * t + 40, 1)[0], 2.5 * t as f64);
    }
}

#[test]
fn loops_of_different_lengths_with_early_exits() {
    let mut d = Device::default();
    let n = 300;
    let out = d.upload(&vec![-7i32; n + 20]);
    let program = d.link(BASIC);
    Run { kernel: "collatz", grid: [3, 1, 1], block: [128, 1, 1], ..Run::default() }
        .go(&d, &program, &args(&[out], n as i32))
        .unwrap();
    let want: Vec<i32> = (1..=n as u64)
        .map(|mut v| {
            let mut steps = 0;
            while v != 1 {
                v = if v % 2 == 1 { 3 * v + 1 } else { v / 2 };
                steps += 1;
            }
            if steps > 100 { -1 } else { steps }
        })
        .collect();
    assert_eq!(d.download::<i32>(out, n), want);
    assert_eq!(d.download::<i32>(out + 4 * n as u64, 20), [-7; 20]);
}

#[test]
fn constants_and_initialised_globals() {
    let mut d = Device::default();
    let x: Vec<f32> = (0..32).map(|i| i as f32 * 0.1).collect();
    let (px, old) = (d.upload(&x), d.upload(&[0i32; 32]));
    let program = d.link(BASIC);
    Run { kernel: "globals", ..Run::default() }.go(&d, &program, &params(&[px, old])).unwrap();
    let want: Vec<f32> = x
        .iter()
        .map(|&v| [1.0f32, -0.5, 0.25, -0.125].iter().rev().fold(0f32, |r, c| r.mul_add(v, *c)))
        .collect();
    assert_eq!(d.download::<f32>(px, 32), want);
    let mut olds = d.download::<i32>(old, 32);
    olds.sort_unstable();
    assert_eq!(olds, (7..39).collect::<Vec<i32>>());
}

#[test]
fn a_lock_within_a_warp_and_between_blocks() {
    let mut d = Device::default();
    let sum = d.upload(&[0i32]);
    let program = d.link(BASIC);
    Run { kernel: "spin_lock", grid: [6, 1, 1], block: [64, 1, 1], workers: 3, ..Run::default() }
        .go(&d, &program, &params(&[sum]))
        .unwrap();
    assert_eq!(d.download::<i32>(sum, 1), [6 * 64]);
}

#[test]
fn switches_and_local_arrays() {
    let mut d = Device::default();
    let x: Vec<i32> = (0..64).map(|i| i * 37 - 900).collect();
    let px = d.upload(&x);
    let program = d.link(BASIC);
    Run { kernel: "switcher", block: [64, 1, 1], ..Run::default() }
        .go(&d, &program, &params(&[px]))
        .unwrap();
    let want: Vec<i32> = x
        .iter()
        .enumerate()
        .map(|(i, &v)| match i & 7 {
            0 => v + 3,
            1 => v * 5,
            2 => v ^ 0x55,
            3 => -v,
            4 => v << 2,
            5 => v / 3,
            6 => v % 7,
            _ => 0,
        })
        .collect();
    assert_eq!(d.download::<i32>(px, 64), want);

    let idx: Vec<i32> = (0..16).map(|i| i * 5 + 3).collect();
    let (out, pidx) = (d.upload(&[0i32; 40]), d.upload(&idx));
    Run { kernel: "local_array", block: [40, 1, 1], ..Run::default() }
        .go(&d, &program, &params(&[out, pidx]))
        .unwrap();
    let want: Vec<i32> = (0..40)
        .map(|t| {
            let mut a: Vec<i32> = (0..16).map(|i| i * i + t).collect();
            let mut s = 0;
            for i in 0..8 {
                a[(idx[i] & 15) as usize] += i as i32;
                s += a[(idx[i + 8] & 15) as usize];
            }
            s
        })
        .collect();
    assert_eq!(d.download::<i32>(out, 40), want);
}

#[test]
fn votes_matches_shuffles_and_counting_barriers() {
    let mut d = Device::default();
    let out = d.upload(&[0u32; 96]);
    let program = d.link(BASIC);
    Run { kernel: "votes", block: [96, 1, 1], ..Run::default() }
        .go(&d, &program, &params(&[out]))
        .unwrap();
    let want: Vec<u32> = (0..96u32)
        .map(|t| {
            let (first, lane) = (t & !31, t & 31);
            let mask = |f: &dyn Fn(u32) -> bool| {
                (0..32).filter(|&l| f(first + l)).fold(0u32, |m, l| m | 1 << l)
            };
            let b = mask(&|t| t % 3 == 0);
            let any = u32::from((first..first + 32).contains(&40));
            let all = u32::from(first + 31 < 64);
            let same = mask(&|u| u / 5 == t / 5);
            let up = if lane >= 3 { t - 3 } else { t };
            let w = first + (lane & 16) + 9;
            b ^ (any << 1)
                ^ (all << 2)
                ^ same
                ^ ((first + (lane ^ 5)) << 8)
                ^ (up << 16)
                ^ (w << 24)
                ^ 48
        })
        .collect();
    assert_eq!(d.download::<u32>(out, 96), want);
}

#[test]
fn the_clock_moves() {
    let mut d = Device::default();
    let out = d.upload(&[0i64; 32]);
    let program = d.link(BASIC);
    Run { kernel: "clocked", ..Run::default() }.go(&d, &program, &params(&[out])).unwrap();
    assert!(d.download::<i64>(out, 32).iter().all(|&t| t >= 10_000));
}
