//! What came out: the report of a simulation that is over.

use super::decided::decisions;
use super::solo::Solo;
use super::{Program, Sim, Tenant};
use crate::device::{HIGH, LOW};
use crate::fairness::{self, Used};
use crate::report::{BestEffort, High, Report, ms, over, percentile};

/// How far a best-effort program has come.
pub(super) struct Progress {
    iterations: f64,
    /// GPU time so far, and what of it the core has charged.
    gpu_ns: u64,
    charged_ns: u64,
}

/// What the best-effort programs did while requests arrived.
pub(super) struct Window {
    each: Vec<Used>,
    length_ns: u64,
}

impl Window {
    /// `plain_ns`: what an iteration of each takes alone.
    pub fn new(
        length_ns: u64,
        before: &[Progress],
        after: &[Progress],
        plain_ns: impl Iterator<Item = u64>,
    ) -> Self {
        let used = |((before, after), plain_ns): ((&Progress, &Progress), u64)| {
            let iterations = after.iterations - before.iterations;
            Used {
                share: iterations * plain_ns as f64 / length_ns.max(1) as f64,
                gpu_ns: after.gpu_ns - before.gpu_ns,
                charged_ns: after.charged_ns - before.charged_ns,
            }
        };
        Window { each: before.iter().zip(after).zip(plain_ns).map(used).collect(), length_ns }
    }
}

impl<'a> Sim<'a> {
    /// Of each best-effort program.
    pub(super) fn progress(&self) -> Vec<Progress> {
        let of = |(lane, program): (usize, &super::Program<'_>)| {
            let ns = program.host.as_ref().map_or(0, |h| h.progress_ns(program.trace));
            let iterations = ns as f64 / program.trace.period_ns.max(1) as f64;
            let stats = self.engine.as_ref().and_then(|engine| engine.client_stats(lane as u32));
            let charged_ns = stats.map_or(0, |stats| stats.charged_ns);
            Progress { iterations, gpu_ns: self.device.used_ns(lane), charged_ns }
        };
        self.programs.iter().enumerate().skip(LOW).map(of).collect()
    }

    pub(super) fn report(
        mut self,
        solo: Solo,
        end_ns: u64,
        window: &Window,
        unscheduled: bool,
    ) -> Report {
        let solo_ns = solo.ns;
        let mut now_ns = 0;
        let mut solo_queued: Vec<u64> = Vec::with_capacity(self.arrivals.len());
        for &arrival in self.arrivals {
            now_ns = arrival.max(now_ns) + solo_ns;
            solo_queued.push(now_ns - arrival);
        }
        let served = self.service_ns.len();
        self.queued_ns.extend(self.arrivals[served..].iter().map(|at| end_ns.saturating_sub(*at)));
        let service = [0.5, 0.99].map(|q| percentile(&mut self.service_ns, q));
        let slo_ns = self.setup.slo.map(|slo| slo.slo_ns).into_iter().chain(self.setup.tpot_ns);
        let within = slo_ns.min().map(|slo_ns| {
            let kept = self.service_ns.iter().filter(|ns| **ns <= slo_ns).count() as u64;
            over(kept, self.arrivals.len() as u64)
        });
        let queued = [0.5, 0.99].map(|q| percentile(&mut self.queued_ns, q));
        let alone = percentile(&mut solo_queued, 0.99);
        let lows = &self.programs[LOW..];
        let decided = self.engine.as_ref().filter(|_| !lows.is_empty());
        let mut best_effort: Vec<BestEffort> = Vec::new();
        for (program, used) in lows.iter().zip(&window.each) {
            let Some(host) = &program.host else { continue };
            best_effort.push(BestEffort {
                trace: program.trace.name.clone(),
                share: used.share,
                iterations: host.done / host.program.len() as u64,
                launched: host.made,
                done: host.done,
                in_flight: host.made - host.done,
            });
        }
        let tenant = |p: &Program<'a>| Tenant {
            trace: p.trace,
            weight: p.weight,
            min_share_permille: p.min_share_permille,
        };
        let tenants: Vec<Tenant<'_>> = lows.iter().map(tenant).collect();
        let fairness =
            (tenants.len() > 1).then(|| fairness::judge(&tenants, &window.each, window.length_ns));
        Report {
            schema: 1,
            seconds: self.setup.seconds,
            seed: self.setup.seed,
            sharing: self.setup.sharing,
            transformable: self.setup.transformable,
            unscheduled,
            launches: self.programs.iter().flat_map(|p| &p.host).map(|h| h.done).sum(),
            kernels: self.kernels,
            context_changes: self.device.changes(),
            high_priority: High {
                trace: self.programs[HIGH].trace.name.clone(),
                arrived: self.arrivals.len() as u64,
                served: served as u64,
                unserved: (self.arrivals.len() - served) as u64,
                solo_ms: ms(solo_ns),
                solo_p99_ms: ms(solo.p99_ns),
                slo_ms: self.setup.slo.map(|slo| ms(slo.slo_ns)),
                tpot_ms: self.setup.tpot_ns.map(ms),
                within,
                service_p50_ms: ms(service[0]),
                service_p99_ms: ms(service[1]),
                service_p50_over_solo: over(service[0], solo_ns),
                service_p99_over_solo: over(service[1], solo.p99_ns),
                queued_p50_ms: ms(queued[0]),
                queued_p99_ms: ms(queued[1]),
                solo_queued_p99_ms: ms(alone),
                queued_p99_over_solo: over(queued[1], alone),
            },
            best_effort: best_effort.into_iter().reduce(BestEffort::with),
            fairness,
            floors: self.floors,
            decisions: decided.map(|engine| decisions(engine, self.programs.len())),
        }
    }
}
