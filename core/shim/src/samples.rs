//! Which launches are measured, and what that tells of their kernels.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU16, AtomicU64};
use tally_ipc::layout::{KERNEL_SLOTS, submission_flags};

/// A kernel's first launches are measured one by one, later one in so many, of which there are [`OFTEN`], and then one in
/// [`SELDOM_EVERY`]: each costs the poller some looks.
const FIRST_SAMPLES: u16 = 8;
const SAMPLE_EVERY: u16 = 32;
const OFTEN: u16 = 1_024;
const SELDOM_EVERY: u16 = 64;
/// The golden ratio's part of 2^16: its multiples are spread evenly.
const SCATTER: u16 = 40_503;
/// Kernels below it are short.
const SHORT_NS: u64 = 20_000;

/// Launches of each kernel of the table since the core was met, counted by [`count_on`].
static LAUNCHED: [AtomicU16; KERNEL_SLOTS] = [const { AtomicU16::new(0) }; KERNEL_SLOTS];
/// Kernels whose latest measured launch took less than [`SHORT_NS`], by their place in the table: a bit each.
static SHORT: [AtomicU64; KERNEL_SLOTS.div_ceil(64)] =
    [const { AtomicU64::new(0) }; KERNEL_SLOTS.div_ceil(64)];

/// Count a launch, and say whether its time is to be reported.
pub fn is_sample(kernel: u32, flags: u32) -> bool {
    if flags & submission_flags::GRAPH != 0 {
        return true;
    }
    let Some(launched) = LAUNCHED.get(kernel as usize) else { return false };
    let counted = launched.fetch_update(Relaxed, Relaxed, |n| Some(count_on(n)));
    let (Ok(n) | Err(n)) = counted;
    is_picked(n)
}

/// Whether launch `n` of a kernel is measured. Later ones are scattered: with a period, a step with a multiple of it
/// would have launches of some grids measured each time, and others never.
fn is_picked(n: u16) -> bool {
    let every = if n < OFTEN { SAMPLE_EVERY } else { SELDOM_EVERY };
    n < FIRST_SAMPLES || n.wrapping_mul(SCATTER) < u16::MAX / every
}

/// One more launch of a kernel. Never goes back to its first ones.
fn count_on(launched: u16) -> u16 {
    launched.checked_add(1).unwrap_or(FIRST_SAMPLES)
}

/// A core was met that knows no kernel's time yet: measure them anew.
pub fn forget_samples() {
    LAUNCHED.iter().for_each(|launched| launched.store(0, Relaxed));
    SHORT.iter().for_each(|short| short.store(0, Relaxed));
}

/// Whether the latest measured launch of a kernel took less than [`SHORT_NS`].
pub fn is_short(kernel: u32) -> bool {
    let word = SHORT.get(kernel as usize / 64);
    word.is_some_and(|word| word.load(Relaxed) & 1 << (kernel % 64) != 0)
}

/// A launch of a kernel took so long.
pub fn measured(kernel: u32, took_ns: u64) {
    let is_short = took_ns < SHORT_NS;
    let Some(word) = SHORT.get(kernel as usize / 64) else { return };
    let bit = 1 << (kernel % 64);
    match word.load(Relaxed) & bit != 0 {
        was_short if was_short == is_short => {}
        true => drop(word.fetch_and(!bit, Relaxed)),
        false => drop(word.fetch_or(bit, Relaxed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_first_launches_are_measured_and_then_ever_fewer() {
        let kernel = KERNEL_SLOTS as u32 - 1;
        assert!((0..FIRST_SAMPLES).all(|_| is_sample(kernel, 0)));
        let next = |launches| (0..launches).filter(|_| is_sample(kernel, 0)).count();
        let often = next(OFTEN - FIRST_SAMPLES);
        assert!((30..=35).contains(&often), "{often}");
        let seldom = next(u16::MAX - OFTEN);
        assert!((1_000..1_020).contains(&seldom), "{seldom}");
    }

    #[test]
    fn a_kernel_is_short_by_its_latest_measured_launch() {
        let kernel = KERNEL_SLOTS as u32 - 1_900;
        assert!(!is_short(kernel), "nothing is known");
        for (took_ns, is) in [(SHORT_NS - 1, true), (1, true), (SHORT_NS, false), (7, true)] {
            measured(kernel, took_ns);
            assert_eq!(is_short(kernel), is, "{took_ns}");
        }
        assert!(!is_short(kernel + 1) && !is_short(u32::MAX));
        measured(u32::MAX, 1);
    }

    #[test]
    fn no_place_in_a_step_is_left_out() {
        for launches in [1, 7, 32, 49, 64, 96, 200, 224, 256, 1_000] {
            let kernel = KERNEL_SLOTS as u32 - 2 - launches;
            let mut steps = vec![None; launches as usize];
            for step in 0..400 {
                for place in &mut steps {
                    if is_sample(kernel, 0) && step > 0 {
                        place.get_or_insert(step);
                    }
                }
            }
            assert!(steps.iter().all(Option::is_some), "{launches} launches a step: {steps:?}");
        }
    }
}
