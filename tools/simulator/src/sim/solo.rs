//! A service alone: what its times are compared with.

use super::service::{Service, Serving};
use super::{Setup, Sim, ns};
use crate::device::Device;
use crate::gpu::{SLICES_DRIVER_NS, SharingMode};
use crate::trace::Trace;

/// A request alone, plain.
#[derive(Clone, Copy, Default)]
pub(super) struct Solo {
    pub ns: u64,
    /// One in a hundred takes so long.
    pub p99_ns: u64,
    /// Of one that decodes: 99th percentile from a request's arrival to its last token, and its tokens a second.
    pub queued_p99_ns: u64,
    pub tokens_per_s: f64,
    /// Mean of what delays the program's own part, request by request, over its median: there is
    /// something that it takes at least, and delays on top of that, exponentially distributed.
    pub spread: f64,
}

/// From the median of an exponential distribution to its 99th percentile, over its mean: ln 50.
const P99_BEYOND_MEDIAN: f64 = 3.912;

impl Solo {
    /// `high`: what the service launches for a request.
    pub fn new(high: &Trace, service: &Service<'_>, setup: &Setup) -> Self {
        let plain = service.all_launched(SharingMode::Timeslice);
        // Of one that decodes, as long as the window and what comes before it.
        let start_ns = ns(setup.learn_seconds);
        let counted = match service.decode {
            Some(_) => start_ns..start_ns + ns(setup.seconds),
            None => 0..u64::MAX,
        };
        let end_ns = counted.end;
        // From the start of its service until it is seen done.
        let one =
            Serving::new(service, &plain, Solo::default(), vec![0], setup.seed, 0, counted.clone());
        let mut sim = Sim::new(*setup, vec![one], &[], None);
        sim.device = Device::new(SharingMode::Timeslice, setup.model, SLICES_DRIVER_NS, 1, 1);
        sim.run_until(end_ns, service.decode.is_none());
        let (first_ns, tokens) =
            sim.services.pop().map_or((None, None), |serving| (serving.first_ns(), serving.tokens));
        if let Some(tokens) = tokens {
            return tokens.solo(&counted);
        }
        let ns = first_ns.unwrap_or(0);
        let alone = high.alone[0].filter(|a| a.p99_ns > a.ns && !high.is_graph());
        let ratio = alone.map_or(1.0, |a| a.p99_ns as f64 / a.ns as f64);
        let p99_ns = (ns as f64 * ratio) as u64;
        Solo { ns, p99_ns, spread: (ratio - 1.0) / P99_BEYOND_MEDIAN, ..Solo::default() }
    }
}
