//! Which kernel a submission launches: the client's table, read once an entry
//! and cached, to the engine's ids; and what its flags say. Bounded whatever the client writes.

use super::Engine;
use super::profile_cache::ProfileCache;
use super::share::UserPass;
use crate::gpus::Witness;
use crate::quota::User;
use foldhash::quality::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use tally_contract::limits::{CLIENT_KERNELS_MAX, KERNELS_MAX};
use tally_engine::policy::{ClientId, KernelId, forms_offered, launch_state};
use tally_engine::profile::{Demand, KernelKey, Transformation};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{KERNEL_SLOTS, submission_flags, transform_state};
use tally_ipc::ring::Request;
use tally_rewriter::TransformRefusal;

/// What a user may bring into the engine's table, its clients together. Changed by the dispatch thread alone.
#[derive(Debug)]
pub struct KernelShare {
    taken: AtomicU32,
    most: u32,
    /// What the user's clients together have had in this pass.
    pub pass: UserPass,
    /// The share of all users together for whom nothing is reserved; `None` for others.
    all: Option<Arc<KernelShare>>,
}

impl KernelShare {
    fn new(most: u32, all: Option<Arc<KernelShare>>) -> Arc<Self> {
        Arc::new(KernelShare { taken: AtomicU32::new(0), most, pass: UserPass::default(), all })
    }

    /// One more. False if there is no room.
    fn take(&self) -> bool {
        let has_room = |share: &KernelShare| share.taken.load(Relaxed) < share.most;
        if !has_room(self) || self.all.as_deref().is_some_and(|all| !has_room(all)) {
            return false;
        }
        self.add(1);
        true
    }

    fn add(&self, more: u32) {
        self.taken.fetch_add(more, Relaxed);
        if let Some(all) = &self.all {
            all.add(more);
        }
    }

    fn give_back(&self, kernels: u32) {
        self.taken.fetch_sub(kernels, Relaxed);
        if let Some(all) = &self.all {
            all.give_back(kernels);
        }
    }
}

/// The shares of all users with clients. The control plane's.
#[derive(Debug)]
pub struct KernelShares {
    user_max: u32,
    others: Arc<KernelShare>,
    of: BTreeMap<User, Weak<KernelShare>>,
}

impl KernelShares {
    /// A quarter of the table is kept for those that are trusted.
    pub fn new(user_max: u32) -> Self {
        let others = KernelShare::new(KERNELS_MAX as u32 / 4 * 3, None);
        KernelShares { user_max, others, of: BTreeMap::new() }
    }

    /// The share of a user, for one more client.
    pub fn of(&mut self, user: User, is_trusted: bool) -> Arc<KernelShare> {
        if let Some(share) = self.of.get(&user).and_then(Weak::upgrade) {
            return share;
        }
        self.of.retain(|_, share| share.strong_count() > 0);
        let share = match is_trusted {
            true => KernelShare::new(KERNELS_MAX as u32 / 4 * 3, None),
            false => KernelShare::new(self.user_max, Some(self.others.clone())),
        };
        self.of.insert(user, Arc::downgrade(&share));
        share
    }
}

type Shape = (u32, [u32; 3], [u32; 3]);

/// The engine's id of a combination, and what it was last told of its transformed form and its demand.
struct Known {
    id: Option<KernelId>,
    transform: u32,
    demand: Demand,
}

/// What a word of the client's table says.
fn transformation_of(word: u32) -> Transformation {
    let (state, detail) = transform_state::unpack(word);
    match state {
        transform_state::PREPARABLE => Transformation::Preparable,
        transform_state::PREPARING => Transformation::Preparing,
        transform_state::READY => Transformation::Ready {
            sliced: detail & transform_state::SLICEABLE != 0,
            preemptible: detail & transform_state::PREEMPTIBLE != 0,
        },
        transform_state::WHOLE_ONLY => match TransformRefusal::from_code(detail) {
            // Of the client's surroundings, or of the moment: another client may transform the same kernel. Or it
            // may be limited to some of the SMs all the same.
            Some(
                why @ (TransformRefusal::VendorLibrary
                | TransformRefusal::BlocksMayWait
                | TransformRefusal::ImageGone
                | TransformRefusal::OutOfMemory
                | TransformRefusal::HostMemory
                | TransformRefusal::Sandboxed),
            ) => Transformation::WholeHere(why.text()),
            why => Transformation::WholeOnly(
                why.map_or("its client gives no reason", TransformRefusal::text),
            ),
        },
        _ => Transformation::Unknown,
    }
}

/// Finds the engine's ids of one client's kernels.
pub struct KernelCache {
    client: ClientId,
    names: Vec<Option<Box<(String, u128)>>>,
    /// The standard hasher would be a twentieth of a decision. This one's seed is not made to withstand whoever
    /// looks for collisions; what a client can bring in is bounded.
    ids: HashMap<Shape, Known, RandomState>,
    /// What it holds of the engine's table, until it leaves.
    held: Vec<KernelId>,
    share: Arc<KernelShare>,
}

impl KernelCache {
    /// Empty, for a client whose user has this share of the engine's table.
    pub fn new(client: ClientId, share: Arc<KernelShare>) -> Self {
        KernelCache { client, names: Vec::new(), ids: HashMap::default(), held: Vec::new(), share }
    }

    /// Gives back what the client held of the engine's table. For when it has left.
    pub fn release(&mut self, engine: &mut Engine) {
        let held = std::mem::take(&mut self.held);
        self.share.give_back(held.len() as u32);
        engine.release_kernels(held);
    }

    /// The engine's id of what `request` launches; `None` if it has no more.
    pub fn id(
        &mut self,
        region: &ClientRegion,
        request: &Request,
        witness: &Witness,
        engine: &mut Engine,
        profile_cache: &mut ProfileCache,
    ) -> Option<KernelId> {
        let shape = (request.kernel, request.grid, request.block);
        if let Some(known) = self.ids.get_mut(&shape) {
            if let (Some(id), Some(entry)) = (known.id, region.kernels.get(request.kernel as usize))
            {
                let transform = entry.transform.load(Relaxed);
                if transform != known.transform {
                    known.transform = transform;
                    let to = match transformation_of(transform) {
                        // It may be a lie, and would be so for all.
                        Transformation::WholeOnly(why) if !witness.is_trusted => {
                            Transformation::WholeHere(why)
                        }
                        to => to,
                    };
                    engine.set_transformation(id, to);
                }
                // Once: the dynamic shared memory, which it depends on, may change from launch to launch.
                if known.demand == Demand::default() && request.demand != known.demand {
                    known.demand = request.demand;
                    let before = engine.world().profiles.get(id).map(|profile| profile.demand);
                    if witness.is_trusted || before == Some(Demand::default()) {
                        engine.set_demand(id, request.demand);
                    }
                }
            }
            return known.id;
        }
        if self.held.len() >= CLIENT_KERNELS_MAX || !self.share.take() {
            return None;
        }
        let (mut name, image, settled) = self.name(region, request);
        if image == 0 {
            // Another client's of this name may be another kernel: graphs are named by their numbers of nodes.
            name = format!("{name} of client {}", self.client);
        }
        let key = KernelKey { name, image, grid: request.grid, block: request.block };
        let id = engine.hold_kernel(&key);
        match id {
            Some(id) => {
                self.held.push(id);
                profile_cache.restore(witness.named(&region.report), &key, id, engine);
            }
            None => self.share.give_back(1),
        }
        // Without an id it is tried again: others may make room.
        if settled && id.is_some() {
            // Its state is taken in at its next launch.
            self.ids.insert(shape, Known { id, transform: 0, demand: Demand::default() });
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

const STATES: [(u32, u32); 3] = [
    (submission_flags::GRAPH, launch_state::GRAPH),
    (submission_flags::COOPERATIVE, launch_state::COOPERATIVE),
    (submission_flags::CLUSTERED, launch_state::CLUSTERED),
];

/// What a client says it can do is believed: one that lies about it holds back
/// its own launches only, and delays others no longer than a whole launch.
const FORMS: [(u32, u32); 4] = [
    (submission_flags::CAN_SLICE, forms_offered::SLICED),
    (submission_flags::CAN_PREEMPT, forms_offered::PREEMPTIBLE),
    (submission_flags::CAN_LIMIT, forms_offered::SM_LIMITED),
    (submission_flags::CAN_PREPARE, forms_offered::PREPARABLE),
];

/// A client's bits as the engine's.
fn translated<const N: usize>(flags: u32, bits: [(u32, u32); N]) -> u32 {
    let set = bits.iter().filter(|(theirs, _)| flags & theirs != 0);
    set.fold(0, |all, (_, ours)| all | ours)
}

/// The `launch_state` bits for a submission's flags.
pub(super) fn state_of(flags: u32) -> u32 {
    translated(flags, STATES)
}

/// How the client says that it can run a launch.
pub(super) fn offered_by(flags: u32) -> u32 {
    translated(flags, FORMS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::EngineConfig;
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
            demand: Demand::default(),
            limited_sms: 0,
        }
    }

    fn cache() -> KernelCache {
        KernelCache::new(1, KernelShares::new(u32::MAX).of(User::Uid(1), false))
    }

    fn engine() -> Engine {
        Engine::with_policy(EngineConfig::default(), super::super::built_in())
    }

    #[test]
    fn what_a_client_cannot_transform_for_its_environment_another_can() {
        let mut engine = engine();
        let mut said = |refusal: TransformRefusal, is_trusted| {
            let witness = Witness { is_trusted, ..Witness::default() };
            let (_fd, region) = tally_ipc::map::create_client().unwrap();
            let mut cache = cache();
            region.kernels[3].publish(refusal.text().as_bytes(), 9);
            let word = transform_state::pack(transform_state::WHOLE_ONLY, refusal.code());
            region.kernels[3].transform.store(word, Relaxed);
            // Its state is taken in at its second launch.
            let mut launch = || {
                cache.id(
                    &region,
                    &request(3, 1),
                    &witness,
                    &mut engine,
                    &mut ProfileCache::default(),
                )
            };
            let id = launch().and(launch()).unwrap();
            engine.world().profiles.get(id).unwrap().transformation
        };
        for why in [
            TransformRefusal::VendorLibrary,
            TransformRefusal::OutOfMemory,
            TransformRefusal::Sandboxed,
        ] {
            assert_eq!(said(why, true), Transformation::WholeHere(why.text()));
        }
        // May be limited to some of the SMs if the client says so.
        let why = TransformRefusal::BlocksMayWait;
        assert_eq!(said(why, true), Transformation::WholeHere(why.text()));
        for why in [TransformRefusal::BlocksWaited, TransformRefusal::StuckLimited] {
            assert_eq!(
                said(why, false),
                Transformation::WholeHere(why.text()),
                "a stranger's word"
            );
            assert_eq!(said(why, true), Transformation::WholeOnly(why.text()));
        }
    }

    #[test]
    fn what_a_kernel_demands_is_taken_in_with_later_launches() {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let (mut cache, mut engine) = (cache(), engine());
        engine.set_sm_count(2);
        let mut launch = |blocks_per_sm, registers| {
            let demand = Demand { blocks_per_sm, registers };
            let request = Request { demand, ..request(0, 10) };
            let (witness, mut kept) = (Witness::default(), ProfileCache::default());
            let id = cache.id(&region, &request, &witness, &mut engine, &mut kept).unwrap();
            let profile = engine.world().profiles.get(id).unwrap();
            (profile.demand.blocks_per_sm, profile.demand.registers, profile.waves_permille())
        };
        region.kernels[0].publish(b"gemm", 9);
        assert_eq!(launch(0, 0), (0, 0, 0));
        assert_eq!(launch(4, 32), (4, 32, 1_250));
        assert_eq!(launch(0, 0), (4, 32, 1_250), "that nothing is known is no news");
        assert_eq!(launch(2, 32), (4, 32, 1_250), "another size of shared memory is none either");
    }

    #[test]
    fn names_are_read_once_and_shapes_told_apart() {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let (mut cache, mut engine) = (cache(), engine());
        region.kernels[3].publish(b"gemm", 9);
        let first = cache
            .id(
                &region,
                &request(3, 1),
                &Witness::default(),
                &mut engine,
                &mut ProfileCache::default(),
            )
            .unwrap();
        region.kernels[3].publish(b"other", 1);
        assert_eq!(
            cache.id(
                &region,
                &request(3, 1),
                &Witness::default(),
                &mut engine,
                &mut ProfileCache::default()
            ),
            Some(first)
        );
        let second = cache
            .id(
                &region,
                &request(3, 2),
                &Witness::default(),
                &mut engine,
                &mut ProfileCache::default(),
            )
            .unwrap();
        assert_ne!(first, second);
        assert_eq!(engine.world().profiles.get(second).unwrap().key.name, "gemm");
        let mut graph = request(KERNEL_UNKNOWN, 12);
        graph.flags = submission_flags::GRAPH;
        let graph = cache
            .id(&region, &graph, &Witness::default(), &mut engine, &mut ProfileCache::default())
            .unwrap();
        assert_eq!(engine.world().profiles.get(graph).unwrap().key.name, "graph:12 of client 1");
    }

    /// Launch so many kernels that no other client has.
    fn flood(cache: &mut KernelCache, engine: &mut Engine, name: &str, kernels: u32) -> usize {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        region.kernels[0].publish(name.as_bytes(), 1);
        let id = |x| {
            cache.id(
                &region,
                &request(0, x),
                &Witness::default(),
                engine,
                &mut ProfileCache::default(),
            )
        };
        (0..kernels).filter_map(id).count()
    }

    #[test]
    fn a_client_that_makes_shapes_up_cannot_fill_the_engines_table() {
        let (mut cache, mut engine) = (cache(), engine());
        assert_eq!(flood(&mut cache, &mut engine, "a", 100_000), CLIENT_KERNELS_MAX);
        assert_eq!(engine.world().profiles.known() as usize, CLIENT_KERNELS_MAX);
        assert!(cache.ids.len() <= CLIENT_KERNELS_MAX);
    }

    #[test]
    fn graphs_of_two_clients_are_two_kernels() {
        let mut engine = engine();
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let graph = Request {
            kernel: KERNEL_SLOTS as u32,
            flags: submission_flags::GRAPH,
            grid: [300, 1, 1],
            ..request(3, 1)
        };
        let mut id_of = |client: ClientId| {
            let share = KernelShares::new(u32::MAX).of(User::Uid(1), false);
            let mut cache = KernelCache::new(client, share);
            let (witness, mut kept) = (Witness::default(), ProfileCache::default());
            cache.id(&region, &graph, &witness, &mut engine, &mut kept).unwrap()
        };
        let ids = [1, 2, 1].map(&mut id_of);
        assert_ne!(ids[0], ids[1]);
        assert_eq!(ids[0], ids[2]);
    }

    #[test]
    fn a_users_clients_share_its_part_of_the_table_and_strangers_leave_some() {
        let mut engine = engine();
        let mut shares = KernelShares::new(10_000);
        let user = User::Uid;
        let mut clients: Vec<KernelCache> = Vec::new();
        for uid in 0..8 {
            for client in 0..3 {
                let mut cache = KernelCache::new(1, shares.of(user(uid), false));
                flood(&mut cache, &mut engine, &format!("{uid}.{client}"), 8_000);
                clients.push(cache);
            }
            let most = (10_000 * (uid + 1)).min(49_152);
            assert_eq!(engine.world().profiles.known(), most, "after user {uid}");
        }
        let mut trusted = KernelCache::new(1, shares.of(user(100), true));
        assert_eq!(flood(&mut trusted, &mut engine, "service", 10_000), 10_000);
    }

    #[test]
    fn what_a_client_brought_is_given_back_when_it_leaves() {
        let mut engine = engine();
        let mut shares = KernelShares::new(16_384);
        let user = User::Uid(1);
        let mut other = KernelCache::new(1, shares.of(User::Uid(2), false));
        for round in 0..20 {
            let mut cache = KernelCache::new(1, shares.of(user, false));
            let name = format!("junk{round}");
            assert_eq!(
                flood(&mut cache, &mut engine, &name, 20_000),
                CLIENT_KERNELS_MAX,
                "round {round}"
            );
            cache.release(&mut engine);
            while engine.sweep_kernels(64) {}
            drop(cache);
            assert_eq!(engine.world().profiles.known(), round * 3, "those of the other");
            let (_fd, region) = tally_ipc::map::create_client().unwrap();
            for x in 3 * round..3 * round + 3 {
                let kernel = request(u32::MAX, 1_000_000 + x);
                assert!(
                    other
                        .id(
                            &region,
                            &kernel,
                            &Witness::default(),
                            &mut engine,
                            &mut ProfileCache::default()
                        )
                        .is_some()
                );
            }
        }
    }
}
