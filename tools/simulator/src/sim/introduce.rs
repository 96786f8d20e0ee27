//! What the engine is told before anything happens: the clients and their kernels.

use super::{Known, Sim};
use crate::device::{HIGH, LOW};
use crate::gpu::{SharingMode, Transformable};
use tally_engine::policy::{Class, ClientInfo, forms_offered, launch_state};
use tally_engine::profile::{Demand, KernelKey, Transformation};

impl Sim<'_> {
    /// Tell the engine of the clients and their kernels.
    pub(super) fn introduce(&mut self) {
        for lane in 0..self.programs.len() {
            let program = &mut self.programs[lane];
            let Some(host) = &program.host else { continue };
            let is_low = lane >= LOW;
            for launch in &host.program {
                let k = &program.trace.kernels[launch.kernels.start];
                let graph = launch.kernels.len() > 1;
                let transformable = is_low && !graph && self.setup.transformable.allows(&k.name);
                let state = if graph { launch_state::GRAPH } else { 0 };
                let mut offered = 0;
                if transformable {
                    offered |= forms_offered::SLICED | forms_offered::PREEMPTIBLE;
                }
                let partition = self.setup.sharing == SharingMode::Mps && is_low;
                // Blocks that fit the GPU at once may wait for each other.
                let fits = k.blocks()
                    <= u64::from(k.blocks_per_sm()) * u64::from(self.setup.best_effort_sms());
                if partition && !fits && self.setup.transformable != Transformable::None {
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
                let class = if lane == HIGH { Class::High } else { Class::BestEffort };
                let name = program.trace.name.clone();
                let labels = vec![("weight".to_owned(), program.weight.to_string())];
                let info = ClientInfo { id: lane as u32, class, name, labels };
                engine.client_joined(0, info, 0, &mut self.actions);
                let floor = program.min_share_permille;
                engine.set_min_share(0, lane as u32, floor, &mut self.actions);
                engine.set_objective(lane as u32, self.setup.slo);
                engine.set_token_objective(lane as u32, self.setup.tpot_ns);
            }
        }
        self.obey(0);
    }
}
