//! The text of modules.

use crate::program::Kernel;

/// All kernels, with `CONSTANT` where a module's own stands.
const TEXT: &str = include_str!("kernels.ptx");

pub const NAMES: [&str; 14] = [
    "set",
    "poll",
    "meet",
    "fold",
    "each",
    "count",
    "alone",
    "window",
    "barrier",
    "streamk_gemm",
    "look_back",
    "last_block",
    "each_sm",
    "add_from",
];

/// The name of a kernel.
pub fn name(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Set { .. } => "set",
        Kernel::Poll { .. } => "poll",
        Kernel::Meet { .. } => "meet",
        Kernel::Fold { .. } => "fold",
        Kernel::Each { .. } => "each",
        Kernel::Count { .. } => "count",
        Kernel::Alone { .. } => "alone",
        Kernel::Window { .. } => "window",
        Kernel::Barrier { streamk: false, .. } => "barrier",
        Kernel::Barrier { streamk: true, .. } => "streamk_gemm",
        Kernel::LookBack { .. } => "look_back",
        Kernel::LastBlock { .. } => "last_block",
        Kernel::EachSm { .. } => "each_sm",
    }
}

const BARRIER: &str = "
    .reg .pred %q;
    .reg .b32 %r<6>;
    .reg .b64 %d<3>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %q, %r1, 0;
    @%q bra DONE;
    ld.param.u64 %d1, [p_arrived];
    ld.param.u64 %d2, [p_word];
    ld.param.u32 %r1, [p_rounds];
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, 0;
ROUND:
    add.u32 %r3, %r3, %r2;
    membar.gl;
    red.global.add.u32 [%d1], 1;
AGAIN:
    ld.volatile.global.u32 %r4, [%d1];
    setp.ge.u32 %q, %r4, %r3;
    @%q bra MET;
    nanosleep.u32 200;
    bra AGAIN;
MET:
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %q, %r1, 0;
    @%q bra ROUND;
    red.global.add.u32 [%d2], 1;
DONE:
    ret;";

/// What folds of a module's kernels add. Nine digits, whatever the constant, so that all
/// modules have the same length.
pub fn addend(constant: u32) -> u32 {
    100_000_000 + constant % 900_000_000
}

/// The PTX of a module.
pub fn ptx(constant: u32) -> String {
    let addend = format!(" {};", addend(constant));
    TEXT.replace("    BARRIER\n", BARRIER).replace(" CONSTANT;", &addend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_differ_in_their_constant_only() {
        let (one, other) = (ptx(1), ptx(899_999_999));
        assert_eq!(one.len(), other.len());
        assert_eq!(one.replace("100000001", "999999999"), other);
        assert!(NAMES.iter().all(|name| one.contains(&format!(".entry {name}("))));
    }
}
