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
    /// Nothing is known yet.
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
    /// It cannot be transformed, for this reason.
    WholeOnly(&'static str),
    /// The process that said so last cannot transform it, and why; another may.
    WholeHere(&'static str),
}

/// What a policy can learn of a kernel besides its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelView {
    /// Measured launches that ran whole.
    pub count: u64,
    pub mean_ns: u64,
    /// Median of the most recent measurements.
    pub median_ns: u64,
    /// 99th percentile of the same measurements.
    pub p99_ns: u64,
    /// GPU time of the latest measured launch.
    pub recent_ns: u64,
    /// Whether it is transformed.
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
    pub median_ns: u64,
    /// 99th percentile of those.
    pub p99_ns: u64,
    /// GPU time of the latest measured launch in this form.
    pub recent_ns: u64,
    pub turnaround_ns: u64,
}
