//! Which launches are measured.

use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use tally_contract::limits::{FIRST_SAMPLES, SAMPLE_EVERY};
use tally_ipc::layout::{KERNEL_SLOTS, submission_flags};

/// A kernel's first launches are all measured, then one in [`SAMPLE_EVERY`], and from this one on one in
/// [`SELDOM_EVERY`]: each costs the poller some looks.
const OFTEN: u16 = 1_024;
const SELDOM_EVERY: u16 = 64;
/// The golden ratio's part of 2^16: its multiples are spread evenly.
const SCATTER: u16 = 40_503;

/// Launches of each kernel of the table since the core was met, counted by [`count_on`].
static LAUNCHED: [AtomicU16; KERNEL_SLOTS] = [const { AtomicU16::new(0) }; KERNEL_SLOTS];

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
