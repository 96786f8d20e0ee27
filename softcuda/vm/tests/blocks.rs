//! Warps, barriers, calls and what can go wrong in them.
#![allow(missing_docs)]

mod common;

use common::{Device, Run, kernel, params, run_body, try_body};
use std::sync::atomic::{AtomicBool, Ordering};
use tally_softcuda_vm::{BlockLaunch, Module, Scratch, Trap, run_block};

const MORE: &str = include_str!("kernels/more.ptx");

fn more(kernel: &str, threads: u32, out: &[i32]) -> Result<Vec<i32>, Trap> {
    let mut d = Device::default();
    let at = d.upload(out);
    let program = d.link(MORE);
    Run { kernel, block: [threads, 1, 1], ..Run::default() }.go(&d, &program, &params(&[at]))?;
    Ok(d.download(at, out.len()))
}

#[test]
fn threads_that_left_do_not_count_at_barriers() {
    let left = |round| (0..100).filter(|t| t % 5 > round || *t == 0).count() as i32;
    let mut total = 0;
    let want: Vec<i32> = (0..5)
        .map(|round| {
            total += left(round);
            total
        })
        .collect();
    assert_eq!(more("leavers", 100, &[0; 5]).unwrap(), want);
}

#[test]
fn nested_branches_meet_again() {
    let value = |t: i32| {
        if t & 1 == 0 {
            return std::iter::successors(Some(t), |k| Some(k >> 1)).take_while(|&k| k > 0).sum();
        }
        if t & 2 == 0 { -t } else { (0..t.min(17)).filter(|i| i & 1 == 0).sum() }
    };
    let want: Vec<i32> = (0..128).map(|t| value(127 - t)).collect();
    assert_eq!(more("nested", 128, &[0; 128]).unwrap(), want);
}

#[test]
fn a_warp_may_wait_for_another() {
    assert_eq!(more("handoff", 64, &[0; 32]).unwrap(), [42; 32]);
}

#[test]
fn blocks_may_wait_for_each_other() {
    let mut d = Device::default();
    let (count, out) = (d.upload(&[0u32]), d.upload(&[0u32; 3]));
    let program = d.link(MORE);
    Run { kernel: "grid_barrier", grid: [3, 1, 1], workers: 3, ..Run::default() }
        .go(&d, &program, &params(&[count, out]))
        .unwrap();
    assert_eq!(d.download::<u32>(out, 3), [3; 3]);
}

#[test]
fn named_barriers_with_counts() {
    let want: Vec<i32> = (0..32).map(|lane| 600 + 4 * (31 - lane)).collect();
    assert_eq!(more("named", 64, &[0; 32]).unwrap(), want);
}

#[test]
fn frames_of_recursive_calls_are_apart() {
    fn deep(n: i32, up: i32) -> i32 {
        if n == 0 { up } else { deep(n - 1, n + (n & 3)) + (n + ((n + 1) & 3)) * 1000 }
    }
    let want: Vec<i32> = (0..64).map(|x| deep(x & 7, x)).collect();
    assert_eq!(more("depths", 64, &[0; 64]).unwrap(), want);
}

#[test]
fn endless_recursion_overflows_the_stack() {
    let trap = more("overflow", 32, &[0; 2]).unwrap_err();
    assert!(matches!(trap, Trap::StackOverflow { .. }), "{trap}");
}

#[test]
fn printf_returns_and_is_counted() {
    let mut d = Device::default();
    let out = d.upload(&[-1i32; 32]);
    let program = d.link(MORE);
    let stats =
        Run { kernel: "hello", ..Run::default() }.go(&d, &program, &params(&[out])).unwrap();
    assert_eq!((stats.printf_calls, d.download::<i32>(out, 32)), (32, vec![0; 32]));
}

#[test]
fn assertions_say_where() {
    let trap = more("asserts", 32, &[0; 32]).unwrap_err();
    let Trap::Assert { site, message } = &trap else { panic!("{trap}") };
    assert_eq!(site.thread, [7, 0, 0]);
    assert_eq!(message, "`x > 0` at file.cu:12 in asserts");
}

#[test]
fn atomics_from_several_host_threads() {
    let mut d = Device::default();
    let (i, f, f2) = (d.upload(&[0i32, 0]), d.upload(&[0f32]), d.upload(&[0f64]));
    let (u, w) = (d.upload(&[5u64]), d.upload(&[0u32; 3]));
    let program = d.link(MORE);
    Run { kernel: "atomics", grid: [16, 1, 1], block: [96, 1, 1], workers: 4, ..Run::default() }
        .go(&d, &program, &params(&[i, f, f2, u, w]))
        .unwrap();
    let n = 16 * 96;
    assert_eq!(d.download::<i32>(i, 2), [n - 1, 1 - n]);
    assert_eq!(d.download::<f32>(f, 1), [n as f32 * 0.5]);
    assert_eq!(d.download::<f64>(f2, 1), [f64::from(n) * 0.25]);
    assert_eq!(d.download::<u64>(u, 1), [5 + 3 * n as u64]);
    // 1536 increments modulo 10; 48 flips of each bit; every thread once.
    assert_eq!(d.download::<u32>(w, 3), [6, 0, n as u32]);
}

fn site_of(trap: &Trap) -> (u32, [u32; 3]) {
    match trap {
        Trap::IllegalAddress { site, .. }
        | Trap::Misaligned { site, .. }
        | Trap::TrapInstruction { site }
        | Trap::IllegalInstruction { site, .. }
        | Trap::BarrierDeadlock { site, .. } => (site.line, site.thread),
        other => panic!("{other}"),
    }
}

/// The line of the body's first instruction in `common::kernel`.
const FIRST: u32 = 14;

#[test]
fn wild_accesses_trap_with_their_thread_and_line() {
    // Thread 9 goes past a buffer of 9 words.
    let body = "mul.wide.u32 %rd1, %r0, 4;\nadd.u64 %rd1, %rd0, %rd1;\nst.global.u32 [%rd1], %r0;";
    let trap = try_body::<u32>(body, 32, 9).unwrap_err();
    assert_eq!(site_of(&trap), (FIRST + 2, [9, 0, 0]));
    assert!(matches!(trap, Trap::IllegalAddress { space: "global", bytes: 4, write: true, .. }));
    for (body, space) in [
        ("mov.u64 %rd1, 0; ld.global.u32 %r1, [%rd1];", "global"),
        ("ld.global.u32 %r1, [%rd0+-4];", "global"),
        ("mov.u64 %rd1, -4; ld.u32 %r1, [%rd1];", "generic"),
        ("mov.u32 %r1, 64; ld.shared.u32 %r1, [%r1];", "shared"),
        (".local .b8 a[16]; ld.local.u32 %r1, [a+16];", "local"),
        ("mov.u64 %rd1, 64; ld.param.u32 %r1, [%rd1];", "param"),
        ("mov.u64 %rd1, 0x4000000000000000; ld.u32 %r1, [%rd1];", "generic"),
        ("mov.u64 %rd1, 0xffffffffffffffff; atom.global.add.u32 %r1, [%rd1+1], 1;", "global"),
    ] {
        let trap = try_body::<u32>(body, 1, 4).unwrap_err();
        let Trap::IllegalAddress { space: got, .. } = trap else { panic!("{body}: {trap}") };
        assert_eq!(got, space, "{body}");
    }
    let trap = try_body::<u32>("ld.global.v2.u32 {%r1, %r2}, [%rd0+4];", 1, 4).unwrap_err();
    assert!(matches!(trap, Trap::Misaligned { bytes: 8, .. }), "{trap}");
    assert!(try_body::<u32>("@!%p1 bra L; trap; L:", 1, 1).is_ok());
    let trap = try_body::<u32>("setp.eq.u32 %p1, %r0, 3; @%p1 trap;", 8, 1).unwrap_err();
    assert_eq!(site_of(&trap), (FIRST, [3, 0, 0]));
}

#[test]
fn barriers_that_cannot_complete_are_found() {
    let body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 0;\n@!%p1 bar.sync 1;";
    let trap = try_body::<u32>(body, 64, 1).unwrap_err();
    let Trap::BarrierDeadlock { waiting, .. } = trap else { panic!("{trap}") };
    assert_eq!(waiting, 64);
    assert!(try_body::<u32>("mov.u32 %r1, 16; bar.sync %r1;", 32, 1).is_err());
}

#[test]
fn cancelling_stops_an_endless_loop() {
    let mut d = Device::default();
    let out = d.upload(&[0u32]);
    let program = d.link(&kernel("L: bra L;"));
    let kernel = program.kernel("k").unwrap();
    let args = params(&[out]);
    let launch = BlockLaunch {
        program: &program,
        kernel,
        params: &args,
        grid: [1; 3],
        block: [32, 1, 1],
        block_index: [0; 3],
        dynamic_shared_bytes: 0,
        sm_id: 0,
        sm_count: 1,
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let t = s.spawn(|| run_block(&launch, &d, &mut Scratch::new(), &stop));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!t.is_finished());
        stop.store(true, Ordering::Relaxed);
        assert_eq!(t.join().unwrap(), Err(Trap::Cancelled));
    });
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let mut d = Device::default();
    let ptx = kernel("").replace("out)\n", "out) .reqntid 32, 2\n");
    let program = d.link(&ptx);
    let run = |block, args: &[u64]| {
        Run { block, ..Run::default() }.go(&d, &program, &params(args)).map(|_| ())
    };
    assert_eq!(program.kernel("k").unwrap().required_block, Some([32, 2, 1]));
    assert!(run([32, 2, 1], &[0]).is_ok());
    assert!(matches!(run([64, 1, 1], &[0]), Err(Trap::BadLaunch { .. })));
    assert!(matches!(run([32, 2, 1], &[]), Err(Trap::BadLaunch { .. })));
    assert!(matches!(run([0, 2, 1], &[0]), Err(Trap::BadLaunch { .. })));
}

#[test]
fn unknown_instructions_spoil_only_their_kernel() {
    let bad = kernel("add.u32 %r1, %r0, 1;\nwgmma.fence.sync.aligned;");
    let good = kernel("").replace(".version 8.0\n.target sm_90\n.address_size 64\n", "");
    let ptx = bad.replace(" k(", " bad(") + &good;
    let mut d = Device::default();
    let program = d.link(&ptx);
    let error = program.kernel("bad").unwrap().unsupported.clone().unwrap();
    assert_eq!(error.line, FIRST + 1);
    let text = error.to_string();
    assert!(
        text.starts_with("PTX line 15: unsupported instruction `wgmma.fence.sync.aligned`"),
        "{text}"
    );
    let run = |kernel| Run { kernel, ..Run::default() }.go(&d, &program, &params(&[0]));
    assert!(matches!(run("bad"), Err(Trap::Unsupported { .. })));
    assert!(run("k").is_ok());
    // A known instruction with a modifier that is not.
    let ptx = kernel("add.rn.sparkling.f32 %f1, %f2, %f3;");
    let error = d.link(&ptx).kernel("k").unwrap().unsupported.clone().unwrap();
    assert!(error.message.contains("`.sparkling`"), "{error}");
}

#[test]
fn syntax_errors_have_their_line() {
    for (ptx, line) in [
        ("", 1),
        ("int main() {}", 1),
        (".version 8.0\n.target sm_90\n.address_size 32\n", 3),
        (&kernel("mov.u32 %r1, %nothing;"), FIRST),
        (&kernel("mov.u32 %r1, ;"), FIRST),
        (&kernel("\nadd.u32 %r1, %r2 %r3;"), FIRST + 1),
        (&kernel("L:\nL: ret;"), FIRST + 1),
    ] {
        let error = Module::parse(ptx).unwrap_err();
        assert_eq!(error.line, line, "{error}");
    }
}

#[test]
fn lanes_of_a_part_filled_warp() {
    // 20 threads: the lanes that do not exist take no part.
    let body = "activemask.b32 %r1; vote.sync.ballot.b32 %r2, 1, 0xffffffff; xor.b32 %r1, %r1, %r2;\n\
                mul.wide.u32 %rd1, %r0, 8; add.u64 %rd1, %rd0, %rd1;\n\
                st.global.v2.u32 [%rd1], {%r1, %r2};";
    let got = run_body::<u32>(body, 20, 40);
    assert_eq!(got, [0, 0xf_ffff].repeat(20));
}

#[test]
fn diverged_lanes_meet_at_a_warp_barrier() {
    // Half the warp takes the long way; the shuffle still sees all lanes.
    let body = "and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, %r0;\n\
        @%p1 bra EVEN;\n add.u32 %r2, %r2, 100; bra.uni LATE;\n\
        EVEN: add.u32 %r3, %r0, 0; LOOP: add.u32 %r2, %r2, 1; sub.u32 %r3, %r3, 1;\n\
        setp.gt.s32 %p2, %r3, 0; @%p2 bra LOOP; bra.uni LATE;\n\
        LATE: shfl.sync.bfly.b32 %r4|%p3, %r2, 1, 31, -1;\n\
        mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r4;";
    let value = |t: u32| if t % 2 == 1 { t + 100 } else { t + t.max(1) };
    let want: Vec<u32> = (0..32).map(|t| value(t ^ 1)).collect();
    assert_eq!(run_body::<u32>(body, 32, 32), want);
}

#[test]
fn branch_tables() {
    let body = "rem.u32 %r1, %r0, 3; T: .branchtargets A, B, C;\nbrx.idx %r1, T;\n\
        A: mov.u32 %r2, 10; bra.uni D; B: mov.u32 %r2, 20; bra.uni D; C: mov.u32 %r2, 30;\n\
        D: mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r2;";
    let want: Vec<u32> = (0..32).map(|t| [10, 20, 30][t % 3]).collect();
    assert_eq!(run_body::<u32>(body, 32, 32), want);
    let trap = try_body::<u32>(&body.replace("%r0, 3;", "%r0, 4;"), 32, 32).unwrap_err();
    assert_eq!(site_of(&trap).1, [3, 0, 0]);
}

#[test]
fn bar_red_gives_every_thread_the_result() {
    let body = "setp.lt.u32 %p1, %r0, 40; bar.red.popc.u32 %r1, 0, %p1;\n\
        bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, !%p1;\n\
        selp.u32 %r2, 1000, 0, %p2; selp.u32 %r3, 100, 0, %p3; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;\n\
        mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r1;";
    assert_eq!(run_body::<u32>(body, 64, 64), [140; 64]);
    assert_eq!(run_body::<u32>(body, 36, 36), [1036; 36]);
}

#[test]
fn copies_fill_with_zeroes() {
    let body = ".shared .align 16 .b8 s[32]; mov.u32 %r1, s; mov.u32 %r2, 6;\n\
        cp.async.ca.shared.global [%r1], [%rd0], 16; cp.async.cg.shared.global [%r1+16], [%rd0], 16, %r2;\n\
        cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;\n\
        ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r1]; ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r1+16];\n\
        st.global.v4.u32 [%rd0+16], {%r3, %r4, %r5, %r6}; st.global.v4.u32 [%rd0+32], {%r7, %r8, %r9, %r10};";
    let mut d = Device::default();
    let words = [0x11223344u32, 0x55667788, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9];
    let out = d.upload(&words);
    let program = d.link(&kernel(body));
    Run { block: [1, 1, 1], ..Run::default() }.go(&d, &program, &params(&[out])).unwrap();
    let got = d.download::<u32>(out, 12);
    assert_eq!(got[4..8], words[..4]);
    assert_eq!(got[8..], [0x11223344, 0x7788, 0, 0]);
}

#[test]
fn generic_addresses_reach_every_space() {
    let body = ".shared .align 4 .b8 s[64]; .local .align 4 .b8 l[16];\n\
        cvta.shared.u64 %rd1, s; mov.u64 %rd2, l; cvta.local.u64 %rd2, %rd2;\n\
        st.u32 [%rd1+4], 7; st.u32 [%rd2+8], %r0; st.u32 [%rd0+8], 9;\n\
        ld.shared.u32 %r1, [s+4]; ld.local.u32 %r2, [l+8];\n\
        isspacep.shared %p1, %rd1; isspacep.local %p2, %rd2; isspacep.global %p3, %rd0; isspacep.global %p4, %rd1;\n\
        selp.u32 %r3, 1, 0, %p1; @%p2 add.u32 %r3, %r3, 2; @%p3 add.u32 %r3, %r3, 4; @%p4 add.u32 %r3, %r3, 8;\n\
        atom.add.u32 %r4, [%rd1+4], 5; ld.shared.u32 %r5, [s+4];\n\
        setp.ne.u32 %p5, %r0, 3; @%p5 bra E; st.global.v4.u32 [%rd0+16], {%r1, %r2, %r3, %r4}; E:";
    let got = run_body::<u32>(body, 4, 8);
    // The fourth thread of the warp sees three earlier additions.
    assert_eq!(got, [0, 0, 9, 0, 7, 3, 7, 22]);
}

#[test]
fn matrix_products_of_fragments() {
    // A is 16 by 16 of f16, B 16 by 8; element (i, j) is i - j and i + 2j.
    let half = |x: i32| -> u32 {
        let f = (x as f32).to_bits();
        if x == 0 {
            0
        } else {
            (f >> 16 & 0x8000) | (((f >> 23 & 0xff) - 112) << 10) | (f >> 13 & 0x3ff)
        }
    };
    let mut d = Device::default();
    let (mut a, mut b) = (vec![0u32; 128], vec![0u32; 64]);
    for i in 0..16i32 {
        for j in 0..16i32 {
            a[(i * 16 + j) as usize / 2] |= half(i - j) << (16 * (j & 1));
            if j < 8 {
                // B transposed: columns are contiguous.
                b[(j * 16 + i) as usize / 2] |= half(i + 2 * j) << (16 * (i & 1));
            }
        }
    }
    let (pa, pb, out) = (d.upload(&a), d.upload(&b), d.upload(&[0f32; 128]));
    let body = ".shared .align 16 .b8 s[512];\n\
        shr.u32 %r1, %r0, 2; and.b32 %r2, %r0, 3;\n\
        mad.lo.u32 %r3, %r0, 16, 0; mul.wide.u32 %rd3, %r0, 16; ld.global.u64 %rd4, [%rd0]; ld.global.u64 %rd5, [%rd0+8]; ld.global.u64 %rd6, [%rd0+16];\n\
        add.u64 %rd4, %rd4, %rd3; ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4]; mov.u32 %r8, s; add.u32 %r9, %r8, %r3;\n\
        st.shared.v4.u32 [%r9], {%r4, %r5, %r6, %r7}; bar.sync 0;\n\
        and.b32 %r10, %r0, 15; shr.u32 %r11, %r0, 4; mad.lo.u32 %r12, %r10, 32, %r8; mad.lo.u32 %r12, %r11, 16, %r12;\n\
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r12];\n\
        mul.wide.u32 %rd7, %r1, 32; add.u64 %rd5, %rd5, %rd7; mul.wide.u32 %rd8, %r2, 4; add.u64 %rd5, %rd5, %rd8;\n\
        ld.global.u32 %r24, [%rd5]; ld.global.u32 %r25, [%rd5+16];\n\
        mov.f32 %f0, 0f3F000000;\n\
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f0, %f0, %f0, %f0};\n\
        mul.wide.u32 %rd9, %r1, 32; add.u64 %rd6, %rd6, %rd9; mul.wide.u32 %rd9, %r2, 8; add.u64 %rd6, %rd6, %rd9;\n\
        st.global.v2.f32 [%rd6], {%f1, %f2}; st.global.v2.f32 [%rd6+256], {%f3, %f4};";
    let table = d.upload(&[pa, pb, out]);
    let program = d.link(&kernel(body));
    Run::default().go(&d, &program, &params(&[table])).unwrap();
    let got = d.download::<f32>(out, 128);
    for i in 0..16i32 {
        for j in 0..8i32 {
            let want: i32 = (0..16).map(|k| (i - k) * (k + 2 * j)).sum();
            assert_eq!(got[(i * 8 + j) as usize], want as f32 + 0.5, "at {i}, {j}");
        }
    }
}

#[test]
fn parameters_have_their_own_alignment() {
    let ptx = ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u32 n, \
        .param .u64 .ptr .global .align 1 p, .param .u8 c, .param .align 8 .b8 s[12], .param .f32 x)\n\
        .maxntid 128, 2\n{ ret; }";
    let program = Device::default().link(ptx);
    let k = program.kernel("k").unwrap();
    let layout: Vec<_> = k.params.iter().map(|p| (p.offset, p.size, p.align)).collect();
    assert_eq!(layout, [(0, 4, 4), (8, 8, 8), (16, 1, 1), (24, 12, 8), (36, 4, 4)]);
    assert_eq!((k.param_bytes, k.max_threads, k.unsupported.is_none()), (40, 256, true));
}

#[test]
fn shared_memory_is_laid_out_per_kernel() {
    let ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.shared .align 4 .b8 big[40000];\n\
        .shared .align 8 .f64 small[3];\n.extern .shared .align 16 .b8 dyn[];\n\
        .visible .entry a() { .reg .f32 %f<2>; ld.shared.f32 %f1, [big+4]; ret; }\n\
        .visible .entry b(.param .u64 out) { .reg .f64 %d<2>; .reg .u32 %r<3>; .reg .u64 %q;\n\
        ld.shared.f64 %d1, [small]; mov.u32 %r1, dyn; mov.u32 %r2, %dynamic_smem_size;\n\
        ld.param.u64 %q, [out]; st.global.v2.u32 [%q], {%r1, %r2}; st.shared.u32 [%r1+60], %r1; ret; }";
    let mut d = Device::default();
    let out = d.upload(&[0u32; 2]);
    let program = d.link(ptx);
    let bytes = |k| program.kernel(k).unwrap().static_shared_bytes;
    assert_eq!((bytes("a"), bytes("b")), (40_000, 32));
    let run = |shared| {
        Run { kernel: "b", shared, block: [1, 1, 1], ..Run::default() }.go(
            &d,
            &program,
            &params(&[out]),
        )
    };
    assert!(run(64).is_ok());
    assert_eq!(d.download::<u32>(out, 2), [32, 64]);
    assert!(matches!(run(60), Err(Trap::IllegalAddress { space: "shared", .. })));
}
