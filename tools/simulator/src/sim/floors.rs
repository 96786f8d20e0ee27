//! What best-effort programs with a floor got.

use super::Sim;
use crate::report::Floor;
use tally_engine::engine::Had;

impl Sim<'_> {
    /// Of each program, so far.
    pub(super) fn had(&self) -> Vec<Had> {
        let of =
            |lane| self.engine.as_ref().and_then(|engine| engine.had(self.now_ns, lane as u32));
        (0..self.programs.len()).map(|lane| of(lane).unwrap_or_default()).collect()
    }

    /// Of each with a floor, since then.
    pub(super) fn floors_since(&self, before: &[Had]) -> Vec<Floor> {
        let now = self.had();
        let floor = |lane: usize| {
            let program = &self.programs[lane];
            let charged_ns = now[lane].charged_ns - before[lane].charged_ns;
            let backlogged_ns = now[lane].backlogged_ns - before[lane].backlogged_ns;
            (program.min_share_permille > 0).then(|| Floor {
                trace: program.trace.name.clone(),
                min_share: f64::from(program.min_share_permille) / 1e3,
                had: charged_ns as f64 / backlogged_ns.max(1) as f64,
            })
        };
        self.lows().filter_map(floor).collect()
    }
}
