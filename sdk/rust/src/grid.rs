//! How a grid fits a GPU: what a policy that divides kernels has to estimate.

use crate::{Launch, LaunchState};

/// Threads that an SM holds, on every architecture since sm_70 but sm_75 and the
/// small ones: there fewer blocks fit than is said here.
const SM_THREADS: u32 = 2_048;
/// Blocks that an SM holds.
const SM_BLOCKS: u32 = 32;
/// Shared memory of an SM (sm_90), and what each block takes of it besides its own.
const SM_SHARED_BYTES: u32 = 228 * 1_024;
const BLOCK_SHARED_BYTES: u32 = 1_024;
/// SMs of a GPU whose number is unknown.
const SMS_UNKNOWN: u32 = 128;
/// SMs of a limited launch come in steps of so many.
const SM_STEP: u32 = 8;
/// A cluster has at most so many blocks and is not divided.
const CLUSTER_BLOCKS: u64 = 16;

impl Launch {
    /// SMs of the GPU, or a guess.
    pub fn sms(&self) -> u32 {
        if self.sm_count == 0 { SMS_UNKNOWN } else { self.sm_count }
    }

    /// Blocks of the kernel that an SM holds at once, as far as a launch tells: registers
    /// and static shared memory can make it fewer.
    pub fn blocks_per_sm(&self) -> u32 {
        let by_threads = SM_THREADS / self.block_threads.clamp(1, SM_THREADS);
        let by_shared = SM_SHARED_BYTES / self.shared_bytes.saturating_add(BLOCK_SHARED_BYTES);
        by_threads.min(by_shared).clamp(1, SM_BLOCKS)
    }

    /// Whether a kernel has more blocks than can start at once even if an SM holds only
    /// one: else there is no boundary to stop at.
    pub fn has_boundaries(&self) -> bool {
        self.grid_blocks > u64::from(self.sms())
            && !self.state.contains(LaunchState::COOPERATIVE)
            && !self.is_graph()
    }

    /// All SMs but the reserve, in steps of 8, for an SM-limited launch. None if the limit is not on offer, if it
    /// would limit nothing (the kernel has fewer blocks), or if it would break the kernel (a cooperative one must be
    /// resident at once).
    pub fn sms_without(&self, reserve_sms: u32) -> Option<u32> {
        let sms = self.sms().saturating_sub(reserve_sms) / SM_STEP * SM_STEP;
        let kept_from = LaunchState::COOPERATIVE | LaunchState::GRAPH;
        let can_limit = reserve_sms > 0 && self.can_limit() && !self.state.intersects(kept_from);
        (can_limit && sms > 0 && self.grid_blocks > sms.into()).then_some(sms)
    }

    /// Blocks of a slice, about `blocks`: whole clusters if the kernel has them.
    pub fn slice_blocks(&self, blocks: u64) -> u64 {
        match self.state.contains(LaunchState::CLUSTERED) {
            true => (blocks / CLUSTER_BLOCKS).max(1) * CLUSTER_BLOCKS,
            false => blocks,
        }
    }
}

/// The largest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not above `n`; 0 of 0. Of a size that follows
/// from a measured time: it makes few forms of a kernel, though the time wavers.
pub fn step_down(n: u64) -> u64 {
    let Some(exponent) = n.checked_ilog2() else { return 0 };
    let power = 1 << exponent;
    let between = power + power / 2;
    if between <= n { between } else { power }
}

/// `value * by / of`, the largest u64 if it is more than that.
pub fn scaled(value: u64, by: u64, of: u64) -> u64 {
    let of = of.max(1);
    // Nearly always: a division of 128 bits is a loop in WebAssembly.
    if let Some(product) = value.checked_mul(by) {
        return product / of;
    }
    let scaled = u128::from(value) * u128::from(by) / u128::from(of);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FormsOffered;
    use crate::testing::launch;

    #[test]
    fn blocks_are_limited_by_threads_and_by_shared_memory() {
        let blocks = |block_threads, shared_bytes| {
            Launch { block_threads, shared_bytes, ..launch() }.blocks_per_sm()
        };
        assert_eq!([blocks(256, 0), blocks(1_024, 0), blocks(32, 0), blocks(0, 0)], [8, 2, 32, 32]);
        assert_eq!([blocks(256, 100 << 10), blocks(256, u32::MAX)], [2, 1]);
    }

    #[test]
    fn a_grid_of_one_wave_has_no_boundary() {
        let grid = |grid_blocks, state| Launch { grid_blocks, state, ..launch() }.has_boundaries();
        let none = LaunchState::empty();
        assert!(!grid(132, none) && grid(133, none));
        assert!(!grid(133, LaunchState::COOPERATIVE) && !grid(133, LaunchState::GRAPH));
        assert_eq!(Launch { sm_count: 0, ..launch() }.sms(), SMS_UNKNOWN);
    }

    #[test]
    fn a_limited_launch_leaves_the_reserve_free_in_steps() {
        let sms = |reserve_sms, change: Launch| change.sms_without(reserve_sms);
        let can = Launch {
            offered: FormsOffered::SM_LIMITED,
            sm_count: 132,
            grid_blocks: 500,
            ..launch()
        };
        assert_eq!([sms(16, can), sms(14, can), sms(131, can)], [Some(112), Some(112), None]);
        assert_eq!([sms(0, can), sms(200, can)], [None, None]);
        assert_eq!(sms(16, Launch { offered: FormsOffered::SLICED, ..can }), None);
        assert_eq!(sms(16, Launch { state: LaunchState::COOPERATIVE, ..can }), None);
        assert_eq!(sms(16, Launch { grid_blocks: 112, ..can }), None);
    }

    #[test]
    fn slices_divide_no_cluster() {
        let clustered = Launch { state: LaunchState::CLUSTERED, ..launch() };
        assert_eq!([7, 40].map(|blocks| clustered.slice_blocks(blocks)), [16, 32]);
        assert_eq!(launch().slice_blocks(7), 7);
    }

    #[test]
    fn sizes_are_few() {
        let steps: Vec<u64> = (0..=17).map(step_down).collect();
        assert_eq!(steps, [0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16]);
        assert_eq!(step_down(u64::MAX), 3 << 62);
    }

    #[test]
    fn products_of_more_than_64_bits_are_divided_right() {
        assert_eq!(scaled(10, 3, 4), 7);
        assert_eq!(scaled(u64::MAX, 3, 4), (u128::from(u64::MAX) * 3 / 4) as u64);
        assert_eq!([scaled(u64::MAX, 2, 1), scaled(5, 5, 0)], [u64::MAX, 25]);
    }
}
