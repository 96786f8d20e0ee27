//! What came out: the report of a simulation that is over.

use super::decided::decisions;
use super::{Program, Sim, Tenant};
use crate::fairness::{self, Used};
use crate::report::{BestEffort, High, Report};

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
    /// Progress of each best-effort program.
    pub(super) fn progress(&self) -> Vec<Progress> {
        let of = |(lane, program): (usize, &super::Program<'_>)| {
            let ns = program.host.progress_ns(program.trace);
            let iterations = ns as f64 / program.trace.period_ns.max(1) as f64;
            let stats = self.engine.as_ref().and_then(|engine| engine.client_stats(lane as u32));
            let charged_ns = stats.map_or(0, |stats| stats.charged_ns);
            Progress { iterations, gpu_ns: self.device.used_ns(lane), charged_ns }
        };
        self.programs.iter().enumerate().skip(self.services.len()).map(of).collect()
    }

    pub(super) fn report(self, end_ns: u64, window: &Window, unscheduled: bool) -> Report {
        let lows = &self.programs[self.lows()];
        let decided = self.engine.as_ref().filter(|_| !lows.is_empty());
        let mut best_effort: Vec<BestEffort> = Vec::new();
        for (program, used) in lows.iter().zip(&window.each) {
            let host = &program.host;
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
        let decisions = decided.map(|engine| decisions(engine, self.lows()));
        let launches = self.programs.iter().map(|p| p.host.done).sum();
        let mut services: Vec<High> =
            self.services.into_iter().map(|serving| serving.report(end_ns)).collect();
        let only = if services.len() == 1 { services.pop() } else { None };
        Report {
            schema: 1,
            seconds: self.setup.seconds,
            seed: self.setup.seed,
            sharing: self.setup.sharing,
            transformable: self.setup.transformable,
            unscheduled,
            high_priority: only.unwrap_or_default(),
            services,
            best_effort: best_effort.into_iter().reduce(BestEffort::with),
            fairness,
            floors: self.floors,
            decisions,
            launches,
            kernels: self.kernels,
            context_changes: self.device.changes(),
        }
    }
}
