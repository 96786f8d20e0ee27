//! Recording: around the policy, on the dispatch thread.
//!
//! A [`Recorder`] goes round the active policy ([`Recorded`]) and has any number of
//! [`Tap`]s, usually none: then a call costs one load of a flag. Each tap is one ring to
//! one [`TapReader`] on another thread, and is in one of two states:
//!
//! ```text
//!          every kernel, all clients, the policy: in the ring
//!   Base ------------------------------------------------------> Live
//!    ^    (in pieces: Recorder::pump; calls meanwhile are not logged)   |
//!    +--------- a record finds no room: calls are lost, counted ----+
//! ```
//!
//! So a reader has the exact world at every call that it sees, and knows where it saw
//! none. Nothing here waits, logs or, once a tap is in, allocates; what is to be dropped
//! is handed back.

mod recorded;

pub use recorded::{Described, Recorded};

use crate::record::{About, Begin, Encoder, SavedState};
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tally_contract::limits::{KERNELS_MAX, LOG_RING_BYTES_MAX, LOG_RING_BYTES_MIN};
use tally_engine::policy::{
    ClientId, ClientView, Completion, KernelId, ServiceView, Subscriptions, Usage, World,
};
use tally_engine::profile::Profiles;

/// Kernels described in one [`Recorder::pump`].
const KERNELS_EACH: u32 = 64;
/// No kernel's id: the reader knows none at a place.
const UNTOLD: KernelId = KernelId::MAX;
/// Clients connected at once, for which room is made beforehand.
const CLIENTS_ROOM: usize = 4_096;
/// Bytes of a usual record, for which room is made beforehand.
const SCRATCH_BYTES: usize = 64 << 10;
/// Free room in a ring without which a policy is not asked for what it knows: the largest
/// state, and what goes in with it.
const STATE_ROOM_BYTES: usize = 512 << 10;

/// What both ends of a tap know.
#[derive(Debug, Default)]
struct Counts {
    dropped: AtomicU64,
    live: AtomicBool,
    too_small: AtomicBool,
}

/// How a tap is made.
#[derive(Clone, Copy, Debug)]
pub struct TapOptions {
    /// Room between the threads, bytes; kept within `LOG_RING_BYTES_MIN..=LOG_RING_BYTES_MAX`.
    pub ring_bytes: usize,
    /// Also completions that the policy did not ask for.
    pub completions: bool,
    /// The tap is inserted before the policy starts, so the log misses nothing.
    pub from_start: bool,
    /// In mid-run: begin with the policy's saved state, if it exports `state` and the ring has room.
    pub state: bool,
}

#[derive(Debug)]
enum State {
    /// `cursor`: a place in the table of kernels.
    Base {
        begun: bool,
        cursor: u32,
        how: Begin,
    },
    Live,
}

/// What readers know of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Known {
    usage: Usage,
    service: Option<ServiceView>,
}

impl Known {
    /// All that there is to know.
    fn of(view: &ClientView) -> Self {
        Known { usage: view.usage, service: view.service }
    }

    /// What a reader knows from a client's introduction.
    fn introduced(view: &ClientView) -> Self {
        Known { usage: Usage::default(), service: view.info.service() }
    }

    /// The same, without what a policy with these subscriptions does not read.
    fn read(self, view: &ClientView, subscribed: Subscriptions) -> Self {
        Known {
            usage: if subscribed.has(Subscriptions::USAGE) { view.usage } else { self.usage },
            service: match subscribed.has(Subscriptions::SERVICES) {
                true => view.service,
                false => self.service,
            },
        }
    }
}

/// The dispatch thread's end of a ring.
#[derive(Debug)]
pub struct Tap {
    ring: Producer<u8>,
    counts: Arc<Counts>,
    state: State,
    completions: bool,
    /// The policy is to be asked for what it knows; once.
    asks_state: bool,
    /// The kernel that the reader knows at each place of the table.
    told: Box<[KernelId]>,
    /// Records lost since the last `Begin`.
    lost: u64,
    list: Option<Vec<u32>>,
    known: Vec<(ClientId, Known)>,
    id: u64,
}

/// The end of a [`Tap`] that reads, on another thread.
#[derive(Debug)]
pub struct TapReader {
    ring: Consumer<u8>,
    counts: Arc<Counts>,
}

impl Tap {
    /// Both ends. `id` names it for [`Recorder::remove`].
    pub fn new(id: u64, options: TapOptions) -> (Tap, TapReader) {
        let bytes = options.ring_bytes.clamp(LOG_RING_BYTES_MIN, LOG_RING_BYTES_MAX);
        let (producer, consumer) = RingBuffer::new(bytes);
        let counts = Arc::new(Counts::default());
        counts.live.store(options.from_start, Relaxed);
        let tap = Tap {
            ring: producer,
            counts: counts.clone(),
            state: match options.from_start {
                true => State::Live,
                false => State::Base { begun: false, cursor: 0, how: Begin::MidRun },
            },
            completions: options.completions,
            asks_state: options.state && !options.from_start && bytes >= STATE_ROOM_BYTES,
            told: vec![UNTOLD; KERNELS_MAX].into(),
            lost: 0,
            list: Some(Profiles::watch_list()),
            known: Vec::with_capacity(CLIENTS_ROOM),
            id,
        };
        (tap, TapReader { ring: consumer, counts })
    }

    /// Writes all frames, or none if the ring lacks room.
    fn put(&mut self, frames: &[u8]) -> bool {
        let Ok(mut chunk) = self.ring.write_chunk(frames.len()) else {
            return false;
        };
        let (first, second) = chunk.as_mut_slices();
        let (head, tail) = frames.split_at(first.len());
        first.copy_from_slice(head);
        second.copy_from_slice(tail);
        chunk.commit_all();
        true
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Live)
    }

    /// A record of a call, or of a change between two.
    fn log(&mut self, frames: &[u8], records: u64) {
        if self.is_live() && self.put(frames) {
            return;
        }
        if self.is_live() {
            self.fall_back();
        }
        if matches!(self.state, State::Base { how: Begin::AfterGap, .. }) {
            self.lost += records;
            self.counts.dropped.fetch_add(records, Relaxed);
        }
    }

    /// The reader no longer knows the world.
    fn fall_back(&mut self) {
        self.counts.live.store(false, Relaxed);
        self.told.fill(UNTOLD);
        self.state = State::Base { begun: false, cursor: 0, how: Begin::AfterGap };
    }

    /// A kernel as it is now; what it is, if the reader does not know.
    fn describe(&mut self, id: KernelId, profiles: &Profiles, scratch: &mut Vec<u8>) -> bool {
        let Some(profile) = profiles.get(id) else { return true };
        let told = &mut self.told[Profiles::place_of(id) as usize];
        scratch.clear();
        if *told != id {
            frame(scratch, |e| e.kernel(id, &profile.key));
        }
        let before = std::mem::replace(told, id);
        frame(scratch, |e| e.profile(id, profile));
        let done = self.put(scratch);
        if !done {
            self.told[Profiles::place_of(id) as usize] = before;
        }
        done
    }

    /// A kernel's profile changed: describes it, if the log is live.
    fn changed(&mut self, id: KernelId, profiles: &Profiles, scratch: &mut Vec<u8>) {
        match self.state {
            State::Live => {
                if !self.describe(id, profiles, scratch) {
                    self.fall_back();
                    self.lost += 1;
                    self.counts.dropped.fetch_add(1, Relaxed);
                }
            }
            State::Base { cursor, .. } if Profiles::place_of(id) >= cursor => {}
            State::Base { begun, cursor, how } => {
                if !self.describe(id, profiles, scratch) {
                    self.state =
                        State::Base { begun, cursor: cursor.min(Profiles::place_of(id)), how };
                }
            }
        }
    }

    /// Go on with describing the world. True if anything was done.
    fn pump(
        &mut self,
        world: &World,
        (about, sub): (&About, Subscriptions),
        state: &mut dyn FnMut() -> Option<SavedState>,
        scratch: &mut Vec<u8>,
    ) -> bool {
        let State::Base { mut begun, mut cursor, how } = self.state else { return false };
        let mut moved = false;
        if !begun {
            scratch.clear();
            frame(scratch, |e| e.base(world.sharing, &world.reserve_sms));
            begun = self.put(scratch);
            moved |= begun;
        }
        let places = world.profiles.places();
        let until = cursor.saturating_add(KERNELS_EACH).min(places);
        while begun && cursor < until {
            if let Some((id, _)) = world.profiles.at(cursor)
                && !self.describe(id, &world.profiles, scratch)
            {
                break;
            }
            cursor += 1;
            moved = true;
        }
        self.state = State::Base { begun, cursor, how };
        if !begun || cursor < places {
            return moved;
        }
        let (mut how, mut saved) = (how, None);
        if self.asks_state && how == Begin::MidRun {
            if self.ring.slots() < STATE_ROOM_BYTES {
                return moved;
            }
            self.asks_state = false;
            saved = state();
        }
        scratch.clear();
        if saved.is_some() {
            how = Begin::Saved;
            let about = About { saved, ..about.clone() };
            frame(scratch, |e| e.policy(&about));
        } else {
            frame(scratch, |e| e.policy(about));
        }
        for view in world.clients.values() {
            frame(scratch, |e| e.connected(&view.info));
            known(scratch, view.info.id, Known::introduced(view), Known::of(view));
        }
        let lost = self.lost;
        frame(scratch, |e| e.begin(how, lost, sub, world.sm_count));
        if !self.put(scratch) {
            if scratch.len() > self.ring.buffer().capacity() {
                self.counts.too_small.store(true, Relaxed);
            }
            return moved;
        }
        self.lost = 0;
        self.state = State::Live;
        self.counts.live.store(true, Relaxed);
        true
    }
}

impl TapReader {
    /// The next record's bytes, in `record`. False if there is none now.
    pub fn next(&mut self, record: &mut Vec<u8>) -> bool {
        let mut length = [0; 4];
        {
            let Ok(start) = self.ring.read_chunk(4) else { return false };
            let (first, second) = start.as_slices();
            for (to, from) in length.iter_mut().zip(first.iter().chain(second)) {
                *to = *from;
            }
        }
        let length = u32::from_le_bytes(length) as usize;
        // Whole frames are put in at once.
        let Ok(chunk) = self.ring.read_chunk(4 + length) else { return false };
        let (first, second) = chunk.as_slices();
        record.clear();
        record.extend_from_slice(&first[first.len().min(4)..]);
        record.extend_from_slice(&second[4usize.saturating_sub(first.len())..]);
        chunk.commit_all();
        true
    }

    /// The tap was taken out and everything was read.
    pub fn is_over(&self) -> bool {
        // In this order: what was put in before it was taken out is seen.
        self.ring.is_abandoned() && self.ring.is_empty()
    }

    /// Records that found no room, since the start.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }

    /// Every call is logged now; else the world is being described.
    pub fn is_live(&self) -> bool {
        self.counts.live.load(Relaxed)
    }

    /// Something that has to go in at once is larger than the ring.
    pub fn is_too_small(&self) -> bool {
        self.counts.too_small.load(Relaxed)
    }
}

/// Records of what changed of a client; how many.
fn known(scratch: &mut Vec<u8>, id: ClientId, before: Known, now: Known) -> u64 {
    let mut records = 0;
    if now.usage != before.usage {
        frame(scratch, |e| e.usage(id, &now.usage));
        records += 1;
    }
    if let Some(view) = now.service.filter(|_| now.service != before.service) {
        frame(scratch, |e| e.service(id, &view));
        records += 1;
    }
    records
}

/// One record with its length before it.
fn frame(scratch: &mut Vec<u8>, encode: impl FnOnce(&mut Encoder<'_>)) {
    let at = scratch.len();
    scratch.extend_from_slice(&[0; 4]);
    encode(&mut Encoder(scratch));
    let length = (scratch.len() - at - 4) as u32;
    scratch[at..at + 4].copy_from_slice(&length.to_le_bytes());
}

#[derive(Debug, Default)]
struct Inner {
    taps: Vec<Tap>,
    scratch: Vec<u8>,
    /// Clients that readers of live taps know, and what of them.
    known: Vec<(ClientId, Known)>,
    about: About,
    subscribed: Subscriptions,
    /// Waiting to be given to the profiles.
    list: Option<Vec<u32>>,
}

/// A handle: clones are the same recorder. All are used on
/// one thread, so that its lock is never contended.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    on: AtomicBool,
    completions: AtomicBool,
    inner: Mutex<Inner>,
}

/// What a tap took, to be dropped elsewhere.
#[derive(Debug)]
pub struct Removed {
    _tap: Option<Tap>,
    _list: Option<Vec<KernelId>>,
}

impl Recorder {
    /// Whether there is a tap.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.on.load(Relaxed)
    }

    /// Whether a tap wants completions that the policy does not.
    #[inline]
    pub fn wants_completions(&self) -> bool {
        self.0.completions.load(Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Put in a tap; `about` is the active policy, `subscribed` what it is told.
    pub fn insert(&self, mut tap: Tap, world: &World, about: About, subscribed: Subscriptions) {
        let inner = &mut *self.lock();
        if inner.taps.is_empty() {
            inner.list = tap.list.take();
            inner.known = std::mem::take(&mut tap.known);
            inner.known.clear();
            inner.known.extend(world.clients.iter().map(|(id, view)| (*id, Known::of(view))));
            if inner.scratch.capacity() < SCRATCH_BYTES {
                inner.scratch.reserve(SCRATCH_BYTES);
            }
        }
        (inner.about, inner.subscribed) = (about, subscribed);
        inner.taps.push(tap);
        self.settle(inner);
    }

    /// Take out a tap. What it returns takes a while to drop.
    pub fn remove(&self, id: u64, world: &mut World) -> Removed {
        let inner = &mut *self.lock();
        let at = inner.taps.iter().position(|tap| tap.id == id);
        let tap = at.map(|at| inner.taps.swap_remove(at));
        let list = inner.taps.is_empty().then(|| world.profiles.watch(None)).flatten();
        self.settle(inner);
        Removed { _tap: tap, _list: list }
    }

    fn settle(&self, inner: &Inner) {
        self.0.on.store(!inner.taps.is_empty(), Relaxed);
        self.0.completions.store(inner.taps.iter().any(|tap| tap.completions), Relaxed);
    }

    /// Between calls: note what changed, go on with describing the world. True if that
    /// got anywhere and may have more to do. `state` asks the active policy what it
    /// knows; it is called at most once for a tap, right before that sees its first call.
    pub fn pump(&self, world: &mut World, state: &mut dyn FnMut() -> Option<SavedState>) -> bool {
        let inner = &mut *self.lock();
        if world.clients.len() == inner.known.len() {
            inner.changes(world);
        } else {
            // Also where the policy is not told who comes and goes.
            inner.before(world, None, Subscriptions::NONE);
        }
        let mut moved = false;
        for tap in &mut inner.taps {
            let active = (&inner.about, inner.subscribed);
            moved |= tap.pump(world, active, state, &mut inner.scratch);
        }
        moved
    }

    /// A completion that the policy did not ask for.
    pub fn completion(&self, now_ns: u64, done: &Completion) {
        let inner = &mut *self.lock();
        inner.scratch.clear();
        frame(&mut inner.scratch, |e| e.completion(now_ns, done));
        for tap in inner.taps.iter_mut().filter(|tap| tap.completions) {
            tap.log(&inner.scratch, 1);
        }
    }
}

impl Inner {
    fn changes(&mut self, world: &mut World) {
        if let Some(list) = self.list.take() {
            world.profiles.watch(Some(list));
        }
        while let Some(id) = world.profiles.next_changed() {
            for tap in &mut self.taps {
                tap.changed(id, &world.profiles, &mut self.scratch);
            }
        }
    }

    /// What changed since the last call, of what a policy with these subscriptions reads. `joining` is told by the
    /// call itself; its usage is known then to a policy that reads it.
    fn before(&mut self, world: &mut World, joining: Option<ClientId>, subscribed: Subscriptions) {
        self.changes(world);
        self.scratch.clear();
        let mut records = 0;
        let scratch = &mut self.scratch;
        if world.clients.len() != self.known.len() || joining.is_some() {
            self.known.retain(|(id, _)| {
                let there = world.clients.contains_key(id);
                if !there {
                    frame(scratch, |e| e.gone(*id));
                    records += 1;
                }
                there
            });
            for (id, view) in &world.clients {
                if self.known.iter().any(|(known, _)| known == id) {
                    continue;
                }
                let introduced = Known::introduced(view);
                self.known.push((*id, introduced));
                // A client that joins and of which more is to be told is introduced before the call.
                if joining != Some(*id) || introduced.read(view, subscribed) != introduced {
                    frame(scratch, |e| e.connected(&view.info));
                    records += 1;
                }
            }
        }
        if subscribed.has(Subscriptions::USAGE) || subscribed.has(Subscriptions::SERVICES) {
            for (id, before) in &mut self.known {
                if let Some(view) = world.clients.get(id) {
                    let now = before.read(view, subscribed);
                    records += known(scratch, *id, std::mem::replace(before, now), now);
                }
            }
        }
        if records > 0 {
            self.log(records);
        }
    }

    /// Hand what is in `scratch` to the taps.
    fn log(&mut self, records: u64) {
        for tap in &mut self.taps {
            tap.log(&self.scratch, records);
        }
    }
}
