//! The claim protocol of transformed kernels (`tally_rewriter::control`): blocks of any
//! size, on several host threads, in launches that overlap, while the flag is
//! raised.
#![allow(missing_docs)]

mod common;

use common::{Device, Run, params};
use std::sync::atomic::{AtomicU32, Ordering};

/// `k(count, table, flag, epoch2, base2)`: claims its block, then counts each
/// of its threads and notes lane, warp and SM.
const PTX: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry k(
    .param .u64 count, .param .u64 table, .param .u64 flag, .param .u64 epoch2, .param .u64 base2
) {
.reg .pred %p<6>;
.reg .b32 %r<30>;
.reg .b64 %rd<20>;
ld.param.u64 %rd1, [table];
ld.param.u64 %rd2, [flag];
ld.param.u32 %r1, [epoch2];
ld.param.u32 %r2, [base2];
add.u32 %r3, %r1, 1;
mov.u32 %r4, %r1;
mov.u32 %r5, %ctaid.x;
mov.u32 %r6, %laneid;
setp.ne.u32 %p1, %r6, 0;
@%p1 bra AGREE;
mul.wide.u32 %rd3, %r5, 4;
add.u64 %rd3, %rd3, %rd1;
ld.relaxed.gpu.global.u32 %r4, [%rd3];
mov.u32 %r7, %smid;
and.b32 %r7, %r7, 1;
mad.wide.u32 %rd4, %r7, 128, %rd2;
ld.relaxed.sys.global.u32 %r8, [%rd4];
setp.ge.u32 %p2, %r8, %r1;
selp.b32 %r9, %r1, %r3, %p2;
AGAIN:
and.b32 %r10, %r4, 1;
setp.eq.u32 %p3, %r10, 0;
setp.lt.and.u32 %p3, %r4, %r1, %p3;
setp.lt.or.u32 %p3, %r4, %r2, %p3;
@!%p3 bra AGREE;
nanosleep.u32 20;
atom.relaxed.gpu.global.cas.b32 %r11, [%rd3], %r4, %r9;
setp.ne.u32 %p3, %r11, %r4;
mov.u32 %r4, %r11;
@%p3 bra AGAIN;
mov.u32 %r4, %r9;
@!%p2 bra AGREE;
// Where a flag raised by the device itself would go.
st.relaxed.sys.global.u32 [%rd4+4], %r1;
AGREE:
setp.eq.u32 %p4, %r4, %r3;
vote.sync.any.pred %p4, %p4, 0xffffffff;
@!%p4 exit;
// The kernel's own code: all of the block is here.
ld.param.u64 %rd5, [count];
mov.u32 %r12, %tid.x;
mov.u32 %r13, %ntid.x;
mad.lo.u32 %r14, %r5, %r13, %r12;
mul.wide.u32 %rd6, %r14, 16;
add.u64 %rd6, %rd6, %rd5;
atom.global.add.u32 %r15, [%rd6], 1;
bar.sync 0;
vote.sync.ballot.b32 %r16, %p4, 0xffffffff;
popc.b32 %r16, %r16;
mov.u32 %r17, %warpid;
mad.lo.u32 %r17, %r17, 32, %r6;
mov.u32 %r18, %nsmid;
mov.u32 %r19, %smid;
setp.lt.u32 %p5, %r19, %r18;
selp.b32 %r18, %r18, 0, %p5;
st.global.u32 [%rd6+4], %r16;
st.global.u32 [%rd6+8], %r17;
st.global.u32 [%rd6+12], %r18;
ret;
}
";

const BLOCKS: u32 = 40;
const WORKERS: usize = 3;

fn word(at: u64) -> &'static AtomicU32 {
    // SAFETY: words of the test's device, which are never freed.
    unsafe { AtomicU32::from_ptr(at as *mut u32) }
}

#[test]
fn every_thread_of_every_block_runs_once() {
    let mut device = Device::default();
    let program = device.link(PTX);
    // A table for all: words of earlier launches count as untouched.
    let (table, flag) = (device.alloc(4 * BLOCKS as usize), device.alloc(256));
    let mut epoch2 = 2;
    for threads in [1, 31, 32, 33, 45, 97, 1000] {
        let count = device.alloc((BLOCKS * threads) as usize * 16);
        let (base2, device) = (epoch2, &device);
        let run = |epoch2: u32| {
            let list = [count, table, flag, epoch2.into(), base2.into()];
            let block = [threads, 1, 1];
            let run = Run { grid: [BLOCKS, 1, 1], block, workers: WORKERS, ..Run::default() };
            run.go(device, &program, &params(&list)).unwrap();
        };
        // Two launches at one time, stopped once a few blocks have run.
        std::thread::scope(|scope| {
            let first = scope.spawn(|| run(epoch2));
            let second = scope.spawn(|| run(epoch2 + 2));
            let ran = || {
                (0..BLOCKS)
                    .any(|b| word(count + u64::from(b * threads) * 16).load(Ordering::SeqCst) != 0)
            };
            while !(ran() || first.is_finished() && second.is_finished()) {
                std::thread::yield_now();
            }
            word(flag).store(u32::MAX, Ordering::SeqCst);
            word(flag + 128).store(u32::MAX, Ordering::SeqCst);
        });
        word(flag).store(0, Ordering::SeqCst);
        word(flag + 128).store(0, Ordering::SeqCst);
        // What is left, twice at one time again.
        std::thread::scope(|scope| {
            scope.spawn(|| run(epoch2 + 4));
            scope.spawn(|| run(epoch2 + 6));
        });
        epoch2 += 8;
        let seen = device.download::<[u32; 4]>(count, (BLOCKS * threads) as usize);
        for (i, &thread) in seen.iter().enumerate() {
            let at = i as u32 % threads;
            let warp_threads = (threads - at / 32 * 32).min(32);
            assert_eq!(thread, [1, warp_threads, at, WORKERS as u32], "thread {i} of {threads}");
        }
    }
}
