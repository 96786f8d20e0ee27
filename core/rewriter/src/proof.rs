//! A kernel whose results are known, to be transformed on a machine before anything else is.
//!
//! Each block mixes the numbers of its threads through shared memory for some rounds
//! and writes their sum; one block in seven ends at once. [`expected`] computes the
//! same on the host. A GPU, driver or architecture on which the prelude does not do
//! what it must gives itself away by other sums, or by blocks that ran twice or never.

pub const NAME: &str = "tally_proof";
/// Threads of a block.
pub const THREADS: u32 = 128;
/// Size of its parameters in bytes: the sums' and the counts' addresses (one word for
/// each block in both) and the rounds.
pub const PARAMETER_BYTES: usize = 20;
/// Blocks of this remainder by [`ENDS_OF`] end at once.
const ENDS_AT: u32 = 3;
const ENDS_OF: u32 = 7;
const BLOCK_FACTOR: u32 = 0x9E37_79B1;
const THREAD_FACTOR: u32 = 0x85EB_CA6B;
const ROUND_FACTOR: u32 = 0x2C1B_3C6D;

/// The kernel as PTX: `tally_proof(u64 sums, u64 counts, u32 rounds)`, for blocks of
/// [`THREADS`] threads in a row and any grid.
pub const PTX: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry tally_proof(
    .param .u64 sums, .param .u64 counts, .param .u32 rounds)
{
    .reg .pred %p<5>;
    .reg .b32 %r<24>;
    .reg .b64 %rd<6>;
    .shared .align 4 .b8 row[512];
    .shared .align 4 .b8 sum[4];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ctaid.y;
    mov.u32 %r4, %ctaid.z;
    mov.u32 %r5, %nctaid.x;
    mov.u32 %r6, %nctaid.y;
    mad.lo.u32 %r7, %r4, %r6, %r3;
    mad.lo.u32 %r8, %r7, %r5, %r2;
    mul.lo.u32 %r9, %r8, 0x9E3779B1;
    setp.ne.u32 %p1, %r1, 0;
    rem.u32 %r10, %r8, 7;
    setp.eq.u32 %p2, %r10, 3;
    @%p2 bra $ends;
    mad.lo.u32 %r11, %r1, 0x85EBCA6B, %r9;
    mov.u32 %r12, sum;
    @!%p1 st.shared.u32 [%r12], 0;
    mov.u32 %r13, row;
    shl.b32 %r14, %r1, 2;
    add.u32 %r15, %r13, %r14;
    sub.u32 %r16, 508, %r14;
    add.u32 %r16, %r13, %r16;
    ld.param.u32 %r17, [rounds];
    mov.u32 %r18, 0;
    bar.sync 0;
$round:
    setp.ge.u32 %p3, %r18, %r17;
    @%p3 bra $done;
    st.shared.u32 [%r15], %r11;
    bar.sync 0;
    ld.shared.u32 %r19, [%r16];
    bar.sync 0;
    shr.u32 %r20, %r11, 15;
    xor.b32 %r11, %r11, %r20;
    mad.lo.u32 %r11, %r11, 0x2C1B3C6D, %r19;
    add.u32 %r11, %r11, %r18;
    add.u32 %r18, %r18, 1;
    bra $round;
$done:
    atom.shared.add.u32 %r21, [%r12], %r11;
    bar.sync 0;
    ld.shared.u32 %r9, [%r12];
$ends:
    @%p1 bra $out;
    ld.param.u64 %rd1, [sums];
    ld.param.u64 %rd2, [counts];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mul.wide.u32 %rd3, %r8, 4;
    add.u64 %rd4, %rd1, %rd3;
    add.u64 %rd5, %rd2, %rd3;
    st.global.u32 [%rd4], %r9;
    atom.global.add.u32 %r22, [%rd5], 1;
$out:
    ret;
}
";

/// The sum that a block writes.
pub fn expected(block: u32, rounds: u32) -> u32 {
    let start = block.wrapping_mul(BLOCK_FACTOR);
    if block % ENDS_OF == ENDS_AT {
        return start;
    }
    let mut row: [u32; THREADS as usize] =
        std::array::from_fn(|t| (t as u32).wrapping_mul(THREAD_FACTOR).wrapping_add(start));
    for round in 0..rounds {
        let before = row;
        for (v, other) in row.iter_mut().zip(before.iter().rev()) {
            let mixed = (*v ^ (*v >> 15)).wrapping_mul(ROUND_FACTOR);
            *v = mixed.wrapping_add(*other).wrapping_add(round);
        }
    }
    row.iter().fold(0, |all, v| all.wrapping_add(*v))
}
