//! Atomic operations, on host memory: other blocks and processes may be at
//! the same words.

use crate::ir::AtomFn;
use crate::lanes::{float, half};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Device atomics are relaxed unless fenced; the host's strongest costs the
/// same on x86, and is right for every `.sem`.
const ORDER: Ordering = Ordering::SeqCst;

macro_rules! native {
    ($cell:ty, $int:ty, $method:ident) => {{
        unsafe fn f(at: *mut u8, b: u64, _: u64) -> u64 {
            // SAFETY: the caller checked that the word is mapped and aligned.
            u64::from(unsafe { <$cell>::from_ptr(at.cast()) }.$method(b as $int, ORDER))
        }
        f as AtomFn
    }};
}

/// Any function of the old value, by compare and exchange.
macro_rules! update {
    ($cell:ty, $int:ty, |$old:ident, $b:ident| $new:expr) => {{
        unsafe fn f(at: *mut u8, b: u64, _: u64) -> u64 {
            // SAFETY: the caller checked that the word is mapped and aligned.
            let cell = unsafe { <$cell>::from_ptr(at.cast()) };
            let $b = b as $int;
            let mut $old = cell.load(Ordering::Relaxed);
            loop {
                match cell.compare_exchange_weak($old, $new as $int, ORDER, Ordering::Relaxed) {
                    Ok(was) => return u64::from(was),
                    Err(now) => $old = now,
                }
            }
        }
        f as AtomFn
    }};
}

macro_rules! cas {
    ($cell:ty, $int:ty) => {{
        unsafe fn f(at: *mut u8, b: u64, c: u64) -> u64 {
            // SAFETY: the caller checked that the word is mapped and aligned.
            let cell = unsafe { <$cell>::from_ptr(at.cast()) };
            let done = cell.compare_exchange(b as $int, c as $int, ORDER, ORDER);
            u64::from(match done {
                Ok(was) | Err(was) => was,
            })
        }
        f as AtomFn
    }};
}

fn f32_op(old: u32, b: u32, f: impl Fn(f32, f32) -> f32) -> u32 {
    let r = f(f32::from_bits(old), f32::from_bits(b));
    if r.is_nan() { float::NAN32 } else { r.to_bits() }
}

fn halves(old: u32, b: u32, name: &str, own: u32) -> u32 {
    half::by_name(name).map_or(old, |f| f(own, u64::from(old), u64::from(b), 0) as u32)
}

/// The function of an operation on a type.
pub(crate) fn by_name(
    op: &str,
    brain: bool,
    float: bool,
    signed: bool,
    packed: bool,
    bits: u32,
) -> Option<AtomFn> {
    const BF: u32 = half::BRAIN;
    const PK: u32 = half::PACKED;
    Some(match (op, bits) {
        ("add", 16) if brain => {
            update!(AtomicU16, u16, |old, b| halves(old.into(), b.into(), "add", BF))
        }
        ("add", 16) if float => {
            update!(AtomicU16, u16, |old, b| halves(old.into(), b.into(), "add", 0))
        }
        ("add", 32) if brain => update!(AtomicU32, u32, |old, b| halves(old, b, "add", BF | PK)),
        ("add", 32) if packed => update!(AtomicU32, u32, |old, b| halves(old, b, "add", PK)),
        ("min", 32) if brain => update!(AtomicU32, u32, |old, b| halves(old, b, "min", BF | PK)),
        ("min", 32) if packed => update!(AtomicU32, u32, |old, b| halves(old, b, "min", PK)),
        ("max", 32) if brain => update!(AtomicU32, u32, |old, b| halves(old, b, "max", BF | PK)),
        ("max", 32) if packed => update!(AtomicU32, u32, |old, b| halves(old, b, "max", PK)),
        ("add", 32) if float => update!(AtomicU32, u32, |old, b| f32_op(old, b, |x, y| x + y)),
        ("add", 64) if float => update!(AtomicU64, u64, |old, b| {
            (f64::from_bits(old) + f64::from_bits(b)).to_bits()
        }),
        (_, _) if float || brain => return None,
        ("add", 32) => native!(AtomicU32, u32, fetch_add),
        ("add", 64) => native!(AtomicU64, u64, fetch_add),
        ("and", 32) => native!(AtomicU32, u32, fetch_and),
        ("and", 64) => native!(AtomicU64, u64, fetch_and),
        ("or", 32) => native!(AtomicU32, u32, fetch_or),
        ("or", 64) => native!(AtomicU64, u64, fetch_or),
        ("xor", 32) => native!(AtomicU32, u32, fetch_xor),
        ("xor", 64) => native!(AtomicU64, u64, fetch_xor),
        ("exch", 16) => native!(AtomicU16, u16, swap),
        ("exch", 32) => native!(AtomicU32, u32, swap),
        ("exch", 64) => native!(AtomicU64, u64, swap),
        ("cas", 16) => cas!(AtomicU16, u16),
        ("cas", 32) => cas!(AtomicU32, u32),
        ("cas", 64) => cas!(AtomicU64, u64),
        ("min", 32) if signed => update!(AtomicU32, u32, |old, b| (old as i32).min(b as i32)),
        ("max", 32) if signed => update!(AtomicU32, u32, |old, b| (old as i32).max(b as i32)),
        ("min", 64) if signed => update!(AtomicU64, u64, |old, b| (old as i64).min(b as i64)),
        ("max", 64) if signed => update!(AtomicU64, u64, |old, b| (old as i64).max(b as i64)),
        ("min", 32) => native!(AtomicU32, u32, fetch_min),
        ("max", 32) => native!(AtomicU32, u32, fetch_max),
        ("min", 64) => native!(AtomicU64, u64, fetch_min),
        ("max", 64) => native!(AtomicU64, u64, fetch_max),
        ("inc", 32) => update!(AtomicU32, u32, |old, b| if old >= b { 0 } else { old + 1 }),
        ("dec", 32) => {
            update!(AtomicU32, u32, |old, b| if old == 0 || old > b { b } else { old - 1 })
        }
        _ => return None,
    })
}
