//! What one lane of an instruction computes: pure functions of bits. The
//! commonest operations have vectorised twins in `exec`; everything else runs
//! through a [`LaneFn`].

pub(crate) mod cvt;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;

/// `(modifiers, a, b, c) -> d`; narrow values are zero-extended.
pub(crate) type LaneFn = fn(u32, u64, u64, u64) -> u64;

/// Rounding, in the low bits of the modifiers.
pub(crate) const RN: u32 = 0;
pub(crate) const RZ: u32 = 1;
pub(crate) const RM: u32 = 2;
pub(crate) const RP: u32 = 3;
/// Round to nearest, ties away from zero.
pub(crate) const RNA: u32 = 4;
pub(crate) const ROUND: u32 = 7;
/// Subnormal inputs and results become zero.
pub(crate) const FTZ: u32 = 1 << 3;
/// Floats clamp to [0, 1]; integers to their range.
pub(crate) const SAT: u32 = 1 << 4;
pub(crate) const RELU: u32 = 1 << 5;
/// `min`/`max` give NaN if either input is.
pub(crate) const NAN: u32 = 1 << 6;
/// `min`/`max` choose by magnitude only.
pub(crate) const XORSIGN: u32 = 1 << 7;
/// Where an operation keeps bits of its own.
pub(crate) const OWN: u32 = 8;
