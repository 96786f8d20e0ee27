//! Kernels that show how often and in what order their blocks ran.

/// What a whole run of `step` makes of one element.
pub fn step(old: u32, index: u32, k: u32) -> u32 {
    old.wrapping_mul(3).wrapping_add(index).wrapping_add(k)
}

/// Kernels. `step` counts each block's runs and changes every element in a way that shows order
/// and number of changes; `later`'s first block waits for its last one, and the others for the
/// host; `sum` adds up what is there when it runs. See [`all`].
const PTX: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry step(.param .u64 p_data, .param .u64 p_counts, .param .u32 p_k, .param .u32 p_work) {
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<6>;
    mov.u32 %r1, %ctaid.z;
    mov.u32 %r2, %nctaid.y;
    mov.u32 %r3, %ctaid.y;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %ntid.x;
    mad.lo.u32 %r6, %r1, %r5, %r4;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra counted;
    ld.param.u64 %rd1, [p_counts];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    atom.global.add.u32 %r7, [%rd1], 1;
    ld.param.u32 %r8, [p_work];
spin:
    setp.eq.u32 %p2, %r8, 0;
    @%p2 bra counted;
    sub.u32 %r8, %r8, 1;
    bra spin;
counted:
    ld.param.u64 %rd3, [p_data];
    mul.wide.u32 %rd4, %r6, 4;
    add.s64 %rd3, %rd3, %rd4;
    ld.global.u32 %r9, [%rd3];
    mul.lo.u32 %r9, %r9, 3;
    add.u32 %r9, %r9, %r6;
    ld.param.u32 %r10, [p_k];
    add.u32 %r9, %r9, %r10;
    st.global.u32 [%rd3], %r9;
    ret;
}
.visible .entry later(.param .u64 p_data, .param .u64 p_counts, .param .u64 p_words) {
    .reg .pred %p<3>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<8>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %nctaid.x;
    ld.param.u64 %rd1, [p_counts];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd1, %rd2;
    atom.global.add.u32 %r3, [%rd2], 1;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd3, %rd1, %rd3;
    ld.param.u64 %rd4, [p_words];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra others;
    st.volatile.global.u32 [%rd4], 1;
first_waits:
    ld.volatile.global.u32 %r4, [%rd3];
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra first_waits;
    bra done;
others:
    ld.volatile.global.u32 %r4, [%rd4+4];
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra others;
    add.u32 %r5, %r1, 1;
    setp.ne.u32 %p2, %r5, %r2;
    @%p2 bra done;
    st.volatile.global.u32 [%rd3], 1;
done:
    ld.param.u64 %rd5, [p_data];
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd5, %rd5, %rd6;
    ld.global.u32 %r6, [%rd5];
    mul.lo.u32 %r6, %r6, 3;
    add.u32 %r6, %r6, %r1;
    add.u32 %r6, %r6, 1;
    st.global.u32 [%rd5], %r6;
    ret;
}
.visible .entry sum(.param .u64 p_to, .param .u64 p_from, .param .u32 p_count) {
    .reg .pred %p1;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p_to];
    ld.param.u64 %rd2, [p_from];
    ld.param.u32 %r1, [p_count];
    mov.u32 %r2, 0;
next:
    ld.global.u32 %r3, [%rd2];
    add.u32 %r2, %r2, %r3;
    add.s64 %rd2, %rd2, 4;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra next;
    st.global.u32 [%rd1], %r2;
    ret;
}
.extern .shared .align 4 .b8 room[];
.visible .entry through_shared(.param .u64 p_data, .param .u32 p_at) {
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    mov.u32 %r1, %ctaid.x;
    ld.param.u32 %r2, [p_at];
    mov.u32 %r3, room;
    add.u32 %r3, %r3, %r2;
    add.u32 %r4, %r1, 7;
    st.shared.u32 [%r3], %r4;
    ld.shared.u32 %r5, [%r3];
    ld.param.u64 %rd1, [p_data];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r5;
    ret;
}
.visible .entry nothing() {
    ret;
}
";

/// These, and `unseen`: `later` with plain loads, by which it cannot be seen that its blocks wait.
/// (A compiler for a GPU would load once, and wait for ever.)
pub fn all() -> String {
    let (start, end) =
        (PTX.find(".visible .entry later").unwrap(), PTX.find(".visible .entry sum"));
    let unseen = PTX[start..end.unwrap()].replace("ld.volatile.global", "ld.global");
    // Long enough for its transformed form to be kept on disk, where that is on.
    let comment = "// which is no code\n".repeat(2_000);
    format!("{PTX}{}{comment}", unseen.replace("entry later", "entry unseen"))
}

/// The same kernels in another image.
pub fn another_image() -> String {
    all() + "// and another\n"
}
