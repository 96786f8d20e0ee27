//! Which kernel a submission launches: the client's table, read once an entry
//! and cached, to the engine's ids. Bounded whatever the client writes.

use super::recall::Recall;
use foldhash::quality::RandomState;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use tally_engine::Engine;
use tally_engine::policy::KernelId;
use tally_engine::profile::{CutState, KernelKey};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{KERNEL_SLOTS, cut_state, submission_flags};
use tally_ipc::ring::Request;
use tally_kernels::Refusal;

/// (kernel, grid, block) combinations remembered for one client; beyond it the
/// cache starts anew, which costs time and nothing else.
const CACHE_MAX: usize = 8_192;
/// Combinations one client may bring into the engine's table, so that one that
/// makes them up cannot fill it for all.
const NEW_MAX: usize = 16_384;

type Shape = (u32, [u32; 3], [u32; 3]);

/// The engine's id of a combination, and what it was last told of its cut form.
struct Known {
    id: Option<KernelId>,
    cut: u32,
}

/// What a word of the client's table says.
fn cut_state_of(word: u32) -> CutState {
    let (state, detail) = cut_state::unpack(word);
    match state {
        cut_state::PREPARABLE => CutState::Preparable,
        cut_state::PREPARING => CutState::Preparing,
        cut_state::READY => CutState::Ready {
            sliceable: detail & cut_state::SLICEABLE != 0,
            preemptible: detail & cut_state::PREEMPTIBLE != 0,
        },
        cut_state::WHOLE_ONLY => match Refusal::from_code(detail) {
            // Of the client's surroundings, or of the moment: another client may transform the same kernel. Or it
            // may be limited to some of the SMs all the same.
            Some(
                why @ (Refusal::VendorLibrary
                | Refusal::BlocksMayWait
                | Refusal::ImageGone
                | Refusal::OutOfMemory
                | Refusal::HostMemory
                | Refusal::Sandboxed),
            ) => CutState::WholeHere(why.text()),
            why => CutState::WholeOnly(why.map_or("its client gives no reason", Refusal::text)),
        },
        _ => CutState::Unknown,
    }
}

/// Of one client.
#[derive(Default)]
pub struct KernelCache {
    names: Vec<Option<Box<(String, u128)>>>,
    /// The standard hasher would be a twentieth of a decision. This one's seed is not made to withstand whoever
    /// looks for collisions; what a client can bring in is bounded.
    ids: HashMap<Shape, Known, RandomState>,
    brought: usize,
}

impl KernelCache {
    /// The engine's id of what `request` launches; `None` if it has no more.
    pub fn id(
        &mut self,
        region: &ClientRegion,
        request: &Request,
        engine: &mut Engine,
        recall: &mut Recall,
    ) -> Option<KernelId> {
        let shape = (request.kernel, request.grid, request.block);
        if let Some(known) = self.ids.get_mut(&shape) {
            if let (Some(id), Some(entry)) = (known.id, region.kernels.get(request.kernel as usize))
            {
                let cut = entry.cut.load(Relaxed);
                if cut != known.cut {
                    known.cut = cut;
                    engine.set_cut(id, cut_state_of(cut));
                }
            }
            return known.id;
        }
        if self.brought >= NEW_MAX {
            return None;
        }
        let (name, image, settled) = self.name(region, request);
        let key = KernelKey { name, image, grid: request.grid, block: request.block };
        let id = engine.intern(&key);
        self.brought += 1;
        if let Some(id) = id {
            recall.restore(&region.report, &key, id, engine);
        }
        if settled {
            if self.ids.len() >= CACHE_MAX {
                self.ids.clear();
            }
            // Its state is taken in at its next launch.
            self.ids.insert(shape, Known { id, cut: 0 });
        }
        id
    }

    /// Name and image, and whether they can be remembered.
    fn name(&mut self, region: &ClientRegion, request: &Request) -> (String, u128, bool) {
        let index = request.kernel as usize;
        if index < KERNEL_SLOTS {
            if self.names.len() <= index {
                self.names.resize_with(index + 1, || None);
            }
            if self.names[index].is_none() {
                self.names[index] = region.kernels[index].read().map(Box::new);
            }
            return match &self.names[index] {
                Some(known) => (known.0.clone(), known.1, true),
                None => ("unpublished".into(), 0, false),
            };
        }
        if request.flags & submission_flags::GRAPH != 0 {
            return (format!("graph:{}", request.grid[0]), 0, true);
        }
        // The client's table is full: told apart by shape only.
        ("unnamed".into(), 0, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::{BuiltIn, EngineConfig};
    use tally_ipc::layout::KERNEL_UNKNOWN;

    fn request(kernel: u32, x: u32) -> Request {
        Request {
            kernel,
            flags: 0,
            grid: [x, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            stream: 0,
            completion: 0,
        }
    }

    fn engine() -> Engine {
        Engine::new(EngineConfig::default(), Box::new(BuiltIn { quiet_ns: 0 }))
    }

    #[test]
    fn what_a_client_cannot_cut_for_its_environment_another_can() {
        let mut engine = engine();
        let mut said = |refusal: Refusal| {
            let (_fd, region) = tally_ipc::map::create_client().unwrap();
            let mut cache = KernelCache::default();
            region.kernels[3].publish(refusal.text().as_bytes(), 9);
            let word = cut_state::pack(cut_state::WHOLE_ONLY, refusal.code());
            region.kernels[3].cut.store(word, Relaxed);
            // Its state is taken in at its second launch.
            let mut launch =
                || cache.id(&region, &request(3, 1), &mut engine, &mut Recall::default());
            let id = launch().and(launch()).unwrap();
            engine.world().profiles.get(id).unwrap().cut
        };
        for why in [Refusal::VendorLibrary, Refusal::OutOfMemory, Refusal::Sandboxed] {
            assert_eq!(said(why), CutState::WholeHere(why.text()));
        }
        // May be limited to some of the SMs if the client says so.
        let why = Refusal::BlocksMayWait;
        assert_eq!(said(why), CutState::WholeHere(why.text()));
        for why in [Refusal::BlocksWaited, Refusal::StuckLimited] {
            assert_eq!(said(why), CutState::WholeOnly(why.text()));
        }
    }

    #[test]
    fn names_are_read_once_and_shapes_told_apart() {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let (mut cache, mut engine) = (KernelCache::default(), engine());
        region.kernels[3].publish(b"gemm", 9);
        let first = cache.id(&region, &request(3, 1), &mut engine, &mut Recall::default()).unwrap();
        region.kernels[3].publish(b"other", 1);
        assert_eq!(
            cache.id(&region, &request(3, 1), &mut engine, &mut Recall::default()),
            Some(first)
        );
        let second =
            cache.id(&region, &request(3, 2), &mut engine, &mut Recall::default()).unwrap();
        assert_ne!(first, second);
        assert_eq!(engine.world().profiles.get(second).unwrap().key.name, "gemm");
        let mut graph = request(KERNEL_UNKNOWN, 12);
        graph.flags = submission_flags::GRAPH;
        let graph = cache.id(&region, &graph, &mut engine, &mut Recall::default()).unwrap();
        assert_eq!(engine.world().profiles.get(graph).unwrap().key.name, "graph:12");
    }

    #[test]
    fn a_client_that_makes_shapes_up_cannot_fill_the_engines_table() {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let (mut cache, mut engine) = (KernelCache::default(), engine());
        for x in 0..100_000 {
            cache.id(&region, &request(u32::MAX - 1, x), &mut engine, &mut Recall::default());
        }
        assert_eq!(engine.world().profiles.iter().count(), NEW_MAX);
        assert!(cache.ids.len() <= CACHE_MAX);
        let (mut other, _) = (KernelCache::default(), ());
        assert!(other.id(&region, &request(1, 1), &mut engine, &mut Recall::default()).is_some());
    }
}
