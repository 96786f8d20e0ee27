//! What the core measures of kernels, as far as a policy may read it.

use crate::policy::Form;

/// One (kernel, image, grid, block); dense.
pub type KernelId = u32;

/// What makes two launches the same kernel to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    pub name: String,
    /// Digest of its code image and its whole name; 0 if the image is unknown.
    pub image: u128,
    /// Grid dimensions in blocks.
    pub grid: [u32; 3],
    /// Block dimensions in threads.
    pub block: [u32; 3],
}

/// Whether a kernel is transformed, so that it can run sliced or preemptible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transformation {
    #[default]
    Unknown,
    /// It may be transformed when a policy asks for it.
    Preparable,
    /// Its transformed form is being made.
    Preparing,
    Ready {
        /// It can run as several launches of block ranges.
        sliced: bool,
        /// It can yield when asked.
        preemptible: bool,
    },
    /// No client can transform it, for this reason.
    WholeOnly(&'static str),
    /// The client that said so last cannot, and why; another may.
    WholeHere(&'static str),
}

/// What a kernel asks of an SM, as its client's driver says; 0: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Demand {
    /// Blocks that one SM holds at once, of this block size and dynamic shared memory.
    pub blocks_per_sm: u16,
    /// Registers of a thread.
    pub registers: u16,
}

impl Demand {
    /// How often the blocks of a grid fill a GPU of so many SMs, thousandths; 0 if that cannot be told.
    pub fn waves_permille(self, grid: [u32; 3], sm_count: u32) -> u64 {
        let blocks = grid.iter().fold(1_u128, |all, n| all * u128::from(*n));
        let room = u128::from(self.blocks_per_sm) * u128::from(sm_count);
        (blocks * 1_000).checked_div(room).map_or(0, |waves| waves.try_into().unwrap_or(u64::MAX))
    }
}

/// What a policy can learn of a kernel besides its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelView {
    /// Measured launches that ran whole.
    pub count: u64,
    pub mean_ns: u64,
    /// Median of the most recent measurements.
    pub p50_ns: u64,
    /// 99th percentile of the same measurements.
    pub p99_ns: u64,
    /// GPU time of the latest measured launch.
    pub latest_ns: u64,
    pub demand: Demand,
    /// [`Demand::waves_permille`] of its grid on this GPU.
    pub waves_permille: u64,
    pub transformation: Transformation,
    /// Other forms, at most [`FORMS_MAX`].
    pub forms: Vec<FormView>,
}

/// A form other than whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormView {
    pub form: Form,
    /// Blocks of a slice, or SMs; else 0.
    pub argument: u32,
    pub count: u64,
    pub mean_ns: u64,
    /// Median of the recent ones.
    pub p50_ns: u64,
    /// 99th percentile of the recent ones.
    pub p99_ns: u64,
    /// GPU time of the latest measured launch in this form.
    pub latest_ns: u64,
    pub turnaround_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::Demand;

    #[test]
    fn waves_are_blocks_over_what_fits() {
        let demand = Demand { blocks_per_sm: 4, registers: 32 };
        assert_eq!(demand.waves_permille([132, 3, 2], 132), 1_500);
        assert_eq!(demand.waves_permille([1, 1, 1], 132), 1, "1/528, rounded down");
        assert_eq!(demand.waves_permille([132, 3, 2], 0), 0);
        assert_eq!(Demand::default().waves_permille([132, 3, 2], 132), 0);
        assert_eq!(demand.waves_permille([u32::MAX; 3], 1), u64::MAX);
    }
}
