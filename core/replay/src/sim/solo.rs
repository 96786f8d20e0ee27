//! The inference alone: what its times are compared with.

use super::{Setup, Sim};
use crate::device::Device;
use crate::gpu::{Residency, SLICES_DRIVER_NS};
use crate::trace::Trace;

/// A request alone, plain.
#[derive(Clone, Copy)]
pub(super) struct Solo {
    pub ns: u64,
    /// One in a hundred takes so long.
    pub p99_ns: u64,
    /// Of the logarithm of how long the program's own part takes, request by request.
    pub spread: f64,
}

/// Standard deviations to the 99th percentile.
const SIGMAS_P99: f64 = 2.326;

impl Solo {
    pub fn new(plain: &Trace, high: &Trace, setup: &Setup) -> Self {
        // From the start of its service until it is seen done.
        let mut sim = Sim::new(*setup, [plain; 2], false, &[0], None);
        sim.device = Device::new(Residency::Timeslice, setup.model, SLICES_DRIVER_NS);
        sim.run_until(u64::MAX, true);
        let ns = sim.service_ns.first().copied().unwrap_or(0);
        let alone = high.alone[0].filter(|a| a.p99_ns > a.ns && !high.is_graph());
        let ratio = alone.map_or(1.0, |a| a.p99_ns as f64 / a.ns as f64);
        Solo { ns, p99_ns: (ns as f64 * ratio) as u64, spread: ratio.ln() / SIGMAS_P99 }
    }
}
