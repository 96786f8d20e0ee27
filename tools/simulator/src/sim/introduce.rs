//! What the engine is told before anything happens: the clients and their kernels.

use super::{Known, Sim};
use crate::gpu::SMS;
use crate::host::Launch;
use crate::trace::Kernel;
use tally_engine::policy::{Class, ClientInfo, UnitProfile, forms_offered, launch_state};
use tally_engine::profile::{Demand, KernelKey, Transformation};

/// What a unit of these launches does on an idle GPU.
fn alone(launches: &[Launch], kernels: &[Kernel]) -> UnitProfile {
    let (mut measured, mut gaps_ns, mut before_ns) = (Vec::new(), Vec::new(), None);
    for launch in launches {
        let Some([first, .., last] | [first @ last]) = kernels.get(launch.kernels.clone()) else {
            continue;
        };
        let end_ns = last.start_ns + last.dur_ns;
        let needed = first.blocks().div_ceil(first.blocks_per_sm().into()).min(SMS.into()) as u32;
        let sms = if launch.kernels.len() > 1 { 0 } else { needed };
        measured.push((end_ns - first.start_ns, sms));
        gaps_ns.extend(before_ns.map(|before_ns| first.start_ns.saturating_sub(before_ns)));
        before_ns = Some(end_ns);
    }
    UnitProfile { units: 0, ..UnitProfile::new(&measured, &mut gaps_ns) }
}

impl Sim<'_> {
    /// Tell the engine of the clients and their kernels.
    pub(super) fn introduce(&mut self) {
        for lane in 0..self.programs.len() {
            let program = &mut self.programs[lane];
            let host = &program.host;
            let mut serving = self.services.get_mut(lane);
            if let Some(serving) = &mut serving {
                // Of one that decodes: a step.
                let launches = if serving.tokens.is_some() { 1 } else { host.program.len() };
                serving.profile = alone(&host.program[..launches], &program.trace.kernels);
            }
            let is_low = serving.is_none();
            for launch in &host.program {
                let k = &program.trace.kernels[launch.kernels.start];
                let graph = launch.kernels.len() > 1;
                let transformable = is_low && !graph && self.setup.transformable.allows(&k.name);
                let state = if graph { launch_state::GRAPH } else { 0 };
                let mut offered = 0;
                if transformable {
                    offered |= forms_offered::SLICED | forms_offered::PREEMPTIBLE;
                }
                // Blocks that fit the GPU at once may wait for each other, as far as nobody read their code.
                let fits = k.blocks()
                    <= u64::from(k.blocks_per_sm()) * u64::from(self.setup.best_effort_sms());
                if is_low && (transformable || !fits) && self.setup.has_partitions() {
                    offered |= forms_offered::SM_LIMITED;
                }
                let key =
                    KernelKey { name: k.name.clone(), image: 1, grid: k.grid, block: k.block };
                let kernel = self.engine.as_mut().and_then(|e| {
                    let id = e.intern(&key)?;
                    if !graph {
                        let registers = k.regs.try_into().unwrap_or(u16::MAX);
                        let blocks_per_sm = k.blocks_per_sm() as u16;
                        e.set_demand(id, Demand { blocks_per_sm, registers });
                    }
                    if transformable {
                        e.set_transformation(
                            id,
                            Transformation::Ready { sliced: true, preemptible: true },
                        );
                    }
                    Some(id)
                });
                program.known.push(Known {
                    kernel,
                    state,
                    offered,
                    blocks: k.blocks(),
                    threads: k.threads(),
                    shared: k.smem,
                });
            }
            if let Some(engine) = &mut self.engine {
                let class = if is_low { Class::BestEffort } else { Class::High };
                let name = program.trace.name.clone();
                let labels = vec![("weight".to_owned(), program.weight.to_string())];
                let info = ClientInfo { id: lane as u32, class, name, labels };
                engine.client_joined(0, info, 0, &mut self.actions);
                let floor = program.min_share_permille;
                engine.set_min_share(0, lane as u32, floor, &mut self.actions);
                if let Some(serving) = serving {
                    let (client, tpot_ns) = (lane as u32, serving.tpot_ns);
                    engine.set_objectives(0, client, serving.slo, tpot_ns, &mut self.actions);
                }
            }
        }
        self.obey(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Pace;

    #[test]
    fn a_unit_is_profiled_as_its_trace_says() {
        let kernel = |start_ns, dur_ns, blocks| Kernel {
            name: "k".into(),
            grid: [blocks, 1, 1],
            block: [1_024, 1, 1],
            regs: 16,
            smem: 0,
            start_ns,
            dur_ns,
            gap_ns: 0,
            pace: Pace::AfterLaunch(0),
            launch: 0,
        };
        let kernels = [kernel(5, 10, 3), kernel(20, 30, 1_000), kernel(50, 10, 3)];
        let launch = |kernels| Launch { kernels, pace: Pace::AfterLaunch(0) };
        let each = [launch(0..1), launch(1..2), launch(2..3)];
        let profile = alone(&each, &kernels);
        let expected = UnitProfile {
            units: 0,
            launches: 3,
            gpu_busy_ns: 50,
            gaps: 1,
            gaps_ns: 5,
            gap_median_ns: 5,
            gap_longest_ns: 5,
            sms_max: SMS,
            sms_mean: 80,
        };
        assert_eq!(profile, expected);
        let graph = alone(&[launch(0..3)], &kernels);
        assert_eq!((graph.launches, graph.gpu_busy_ns, graph.gaps, graph.sms_max), (1, 55, 0, 0));
    }
}
