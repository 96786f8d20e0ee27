//! Measured GPU time of each kernel.

use crate::policy::KernelId;
use std::collections::HashMap;

/// What makes two launches the same kernel to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// Symbol name.
    pub name: String,
    /// Identifies the code image; 0 if unknown.
    pub image: u64,
    /// Grid dimensions in blocks.
    pub grid: [u32; 3],
    /// Block dimensions in threads.
    pub block: [u32; 3],
}

/// Recent samples kept for the 99th percentile.
const RECENT: usize = 64;
/// Of these the latest few predict the next launch by their median.
const PREDICTING: usize = 9;
/// Weight of a new sample in the running mean is at least 1 / this, so that the
/// mean follows a kernel whose inputs change.
const MEAN_WINDOW: u64 = 64;

/// Measured times of one kernel.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Which kernel.
    pub key: KernelKey,
    /// Launches measured.
    pub count: u64,
    /// Running mean.
    pub mean_ns: u64,
    /// What the next launch is expected to take: the median of the latest
    /// samples. Not the mean: a kernel's first launch may include loading its
    /// code, some tens of milliseconds that would be believed for long.
    pub predicted_ns: u64,
    recent: [u64; RECENT],
}

impl Profile {
    fn new(key: KernelKey) -> Self {
        Profile { key, count: 0, mean_ns: 0, predicted_ns: 0, recent: [0; RECENT] }
    }

    fn record(&mut self, measured_ns: u64) {
        self.recent[(self.count % RECENT as u64) as usize] = measured_ns;
        self.count += 1;
        let weight = self.count.min(MEAN_WINDOW) as i128;
        let mean = self.mean_ns as i128;
        self.mean_ns = (mean + (measured_ns as i128 - mean) / weight) as u64;
        let n = self.count.min(PREDICTING as u64) as usize;
        let mut latest = [0; PREDICTING];
        for (i, sample) in latest[..n].iter_mut().enumerate() {
            *sample = self.recent[((self.count - 1 - i as u64) % RECENT as u64) as usize];
        }
        latest[..n].sort_unstable();
        // The lower one of two in the middle: the smaller of a first sample
        // with loading time and a second without.
        self.predicted_ns = latest[(n - 1) / 2];
    }

    /// 99th percentile of the recent launches (nearest rank); 0 if none.
    pub fn p99_ns(&self) -> u64 {
        let n = self.count.min(RECENT as u64) as usize;
        if n == 0 {
            return 0;
        }
        let mut sorted = self.recent;
        sorted[..n].sort_unstable();
        sorted[(n * 99).div_ceil(100) - 1]
    }
}

/// Kernels beyond this share one id each for everything new; see [`Profiles::intern`].
pub const KERNELS_MAX: usize = 65_536;

/// All kernels seen in this run.
#[derive(Debug, Default)]
pub struct Profiles {
    ids: HashMap<KernelKey, KernelId>,
    list: Vec<Profile>,
}

impl Profiles {
    /// The id of a kernel, making one at first sight. `None` when
    /// [`KERNELS_MAX`] kernels are known already: such a launch is scheduled
    /// without a profile rather than letting a client grow the core without
    /// bound.
    pub fn intern(&mut self, key: &KernelKey) -> Option<KernelId> {
        if let Some(&id) = self.ids.get(key) {
            return Some(id);
        }
        if self.list.len() >= KERNELS_MAX {
            return None;
        }
        let id = self.list.len() as KernelId;
        self.ids.insert(key.clone(), id);
        self.list.push(Profile::new(key.clone()));
        Some(id)
    }

    /// The profile of a kernel.
    pub fn get(&self, kernel: KernelId) -> Option<&Profile> {
        self.list.get(kernel as usize)
    }

    /// Mean GPU time; 0 if never measured.
    pub fn mean_ns(&self, kernel: KernelId) -> u64 {
        self.get(kernel).map_or(0, |p| p.mean_ns)
    }

    /// Expected GPU time of the next launch; 0 if never measured.
    pub fn predicted_ns(&self, kernel: KernelId) -> u64 {
        self.get(kernel).map_or(0, |p| p.predicted_ns)
    }

    /// Add a measurement.
    pub fn record(&mut self, kernel: KernelId, measured_ns: u64) {
        if let Some(p) = self.list.get_mut(kernel as usize) {
            p.record(measured_ns);
        }
    }

    /// All profiles, by id.
    pub fn iter(&self) -> impl Iterator<Item = (KernelId, &Profile)> {
        self.list.iter().enumerate().map(|(i, p)| (i as KernelId, p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prediction_forgets_a_slow_first_launch_at_once_and_the_mean_does_not() {
        let mut p =
            Profile::new(KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] });
        p.record(30_000_000);
        assert_eq!(p.predicted_ns, 30_000_000);
        p.record(500_000);
        assert_eq!(p.predicted_ns, 500_000);
        for _ in 0..10 {
            p.record(500_000);
        }
        assert_eq!(p.predicted_ns, 500_000);
        assert!(p.mean_ns > 2_000_000);
    }

    #[test]
    fn the_prediction_follows_a_change_within_a_few_launches() {
        let mut p =
            Profile::new(KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] });
        for _ in 0..100 {
            p.record(10_000);
        }
        for _ in 0..5 {
            p.record(70_000);
        }
        assert_eq!(p.predicted_ns, 70_000);
        assert_eq!(p.p99_ns(), 70_000);
    }
}
