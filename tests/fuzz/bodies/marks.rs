//! Units of work that clients mark, around the real dispatch loop and engine at a virtual time: a high-priority client
//! that keeps to the protocol, and others that write what they like into their rings, between passes. An input is a
//! sequence of what they do.

use super::hostile::{self, Bytes, Client};
use super::scripted::{Calls, Script, policy};
use rustix::fd::AsFd;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use tally_ab::Sample;
use tally_contract::limits::{MARK_SLOTS, OPEN_MARKS_MAX, PASS_MARKS_CLIENT_MAX};
use tally_contract::objective::Objective;
use tally_core::dispatch::control::{Control, NewClient};
use tally_core::dispatch::harness::Harness;
use tally_core::dispatch::kernels::KernelShares;
use tally_core::dispatch::marks::MarkNumbers;
use tally_core::dispatch::service::ServiceNumbers;
use tally_core::dispatch::{Settings, park};
use tally_core::quota::User;
use tally_engine::EngineConfig;
use tally_engine::policy::{Class, ClientInfo, Event};
use tally_ipc::map;
use tally_ipc::marks::{Kind, Stated, What};
use tokio::sync::oneshot;

/// Id of the honest client.
const HONEST: u32 = 1;
/// Most other clients at once.
const OTHERS_MAX: usize = 6;
/// When the core starts, ns.
const START_NS: u64 = 1_000_000_000;
/// Of an A/B test's sample, which then has no room for more requests carried over a cut.
const CARRIED_MAX: usize = 4_096;
/// Bits of a policy's subscriptions.
const ALL: u32 = 7;

/// A unit of the honest client, from its begin on.
#[derive(Clone, Copy)]
struct Unit {
    place: usize,
    began_ns: u64,
    what: What,
    /// When it came, as the core may take it.
    came_ns: u64,
    /// 0: it has not ended.
    ended_ns: u64,
    is_shortened: bool,
}

/// What the honest client has marked, and what the core must have counted of it.
#[derive(Default)]
struct Honest {
    open: VecDeque<Unit>,
    /// Units that are published and not yet read by the core.
    unread: VecDeque<Unit>,
    /// Requests, tokens and prefills that the core has read.
    read: [u64; 3],
    /// Longest that it has read of each kind, ns.
    longest_ns: [u64; 3],
    dropped: u64,
    shortened: u64,
    has_requests: bool,
    has_any: bool,
}

type Figures = (ServiceNumbers, Option<MarkNumbers>);

struct World {
    harness: Harness,
    script: Arc<Script>,
    shares: KernelShares,
    honest_client: Client,
    honest: Honest,
    others: Vec<Client>,
    /// When each client registered, ns.
    registered_ns: BTreeMap<u32, u64>,
    /// As they were after the last iteration.
    figures: BTreeMap<u32, Figures>,
    next_id: u32,
    now_ns: u64,
    /// Marked requests that were counted since the A/B test's sample was last exchanged.
    sampled: u64,
    is_measuring: bool,
}

fn of_kind(kind: Kind) -> usize {
    match kind {
        // The honest client marks its units: none is of a stream.
        Kind::Request | Kind::Stream => 0,
        Kind::Token => 1,
        Kind::Prefill => 2,
    }
}

/// Figures of times are kept to a hundredth, and to a microsecond.
fn at_most(ns: u64) -> u64 {
    ns + ns / 64 + 2_048
}

impl World {
    fn new(setup: u8) -> Self {
        let settings = Settings {
            spin_ns: 0,
            pin_cpu: None,
            completion_poll_ns: 50_000,
            probe_after_ns: 1_000_000,
            high_stall_ns: 5_000_000_000,
            engine: EngineConfig::default(),
        };
        let script = Arc::new(Script::default());
        let harness = Harness::new(settings, policy(&script, ALL)).unwrap();
        let mut shares = KernelShares::new(64);
        let (honest_client, new) = new_client(HONEST, Class::High, &mut shares);
        if setup & 1 != 0 {
            // Meant for the core before this one.
            let unit = Stated { began_ns: 1, ended_ns: 2, what: 1 };
            (0..=setup).for_each(|_| _ = honest_client.region.marks.publish(0, unit));
            honest_client.region.marks.drop_one();
        }
        let mut world = World {
            harness,
            script,
            shares,
            honest_client,
            honest: Honest::default(),
            others: Vec::new(),
            registered_ns: BTreeMap::new(),
            figures: BTreeMap::new(),
            next_id: HONEST + 1,
            now_ns: START_NS,
            sampled: 0,
            is_measuring: false,
        };
        world.join(HONEST, new);
        world
    }

    fn join(&mut self, id: u32, client: Box<NewClient>) {
        let (done, _joined) = oneshot::channel();
        self.registered_ns.insert(id, self.now_ns);
        assert!(self.harness.send(Control::Join { client, min_share: None, done }));
        self.iterate();
    }

    fn join_other(&mut self, bytes: &mut Bytes<'_>) {
        if self.others.len() == OTHERS_MAX {
            return;
        }
        let how = bytes.u8();
        let class = if how.is_multiple_of(4) { Class::BestEffort } else { Class::High };
        let (client, new) = new_client(self.next_id, class, &mut self.shares);
        self.next_id += 1;
        (0..how >> 6).for_each(|_| hostile::mark(&client, self.now_ns, bytes));
        let id = client.id;
        self.others.push(client);
        self.join(id, new);
    }

    fn leave(&mut self, at: usize) {
        let client = self.others.remove(at);
        let (done, mut left) = oneshot::channel();
        let before = self.figures.get(&client.id).copied();
        assert!(self.harness.send(Control::Leave { id: client.id, done }));
        self.iterate();
        let left = left.try_recv().expect("it leaves at once");
        if let (Some(left), Some((service, marks))) = (left, before) {
            assert_eq!(left.numbers.service, Some(service), "its last figures");
            let wrong = |marks: Option<MarkNumbers>| marks.map(|n| (n.wrong, n.dropped));
            assert_eq!(wrong(left.numbers.marks), wrong(marks), "its last figures");
        }
        self.registered_ns.remove(&client.id);
    }

    /// The honest client begins a unit of work.
    fn begin(&mut self, kind: u8, age: u8) {
        let kind = [Kind::Request, Kind::Token, Kind::Prefill][usize::from(kind % 3)];
        let age_us = (age > 0).then(|| u64::from(age) << (age % 24));
        let what = What::marked(kind, age_us);
        let marks = &self.honest_client.region.marks;
        let is_free = |place: &usize| self.honest.open.iter().all(|unit| unit.place != *place);
        let Some(place) = (0..OPEN_MARKS_MAX).find(is_free) else {
            marks.drop_one();
            self.honest.dropped += 1;
            return;
        };
        // A thread reads its clock for each: no two begin in the same nanosecond.
        self.now_ns += 1;
        let began_ns = self.now_ns;
        marks.begin(place, began_ns, what.pack());
        let registered_ns = self.registered_ns[&HONEST];
        let stated_ns = began_ns.saturating_sub(age_us.unwrap_or(0) * 1_000);
        self.honest.open.push_back(Unit {
            place,
            began_ns,
            what,
            came_ns: stated_ns.max(registered_ns),
            ended_ns: 0,
            is_shortened: stated_ns < registered_ns,
        });
    }

    /// The honest client's unit that began first, or last, is over.
    fn end(&mut self, is_first: bool) {
        let open = &mut self.honest.open;
        let ended = if is_first { open.pop_front() } else { open.pop_back() };
        let Some(unit) = ended else { return };
        let unit = Unit { ended_ns: self.now_ns, ..unit };
        let Client { region, core, .. } = &self.honest_client;
        region.marks.free(unit.place);
        let Unit { began_ns, ended_ns, what, .. } = unit;
        let stated = Stated { began_ns, ended_ns, what: what.pack() };
        let is_full = self.honest.unread.len() == MARK_SLOTS;
        let published = region.marks.publish(core.marks_read.load(SeqCst), stated);
        assert_eq!(published.is_none(), is_full, "room for what the core has read");
        match published {
            Some(_) => self.honest.unread.push_back(unit),
            None => self.honest.dropped += 1,
        }
    }

    /// One iteration, at `now_ns`.
    fn iterate(&mut self) {
        *self.script.calls.lock().unwrap() = Calls::default();
        self.harness.iterate(self.now_ns);
        while self.harness.notices.try_recv().is_ok() {}
        let figures = |id| Some((id, self.harness.service(id, self.now_ns)?));
        let after: BTreeMap<u32, Figures> = self.harness.clients().filter_map(figures).collect();
        let before = std::mem::replace(&mut self.figures, after.clone());
        for (id, figures) in &after {
            self.see_that_possible(*id, figures);
            let none = (ServiceNumbers::default(), None);
            self.see_that_counted(*id, before.get(id).unwrap_or(&none), figures);
        }
        self.see_to_honest(&after[&HONEST]);
    }

    /// Whatever a client says, it is as old as its registration.
    fn see_that_possible(&self, id: u32, (service, marks): &Figures) {
        let since_ns = self.now_ns - self.registered_ns[&id];
        let old = |what: &str, ns: u64, most_ns: u64| {
            assert!(ns <= most_ns, "client {id}: {what} of {ns} ns, registered for {since_ns}");
        };
        assert!(service.requests_within <= service.requests && service.recent <= service.requests);
        assert!(service.recent_within <= service.recent);
        if let Some(marks) = marks {
            assert!(marks.open <= OPEN_MARKS_MAX as u64, "client {id}: {} are open", marks.open);
            old("an open request", marks.oldest_ns, since_ns);
            for units in [&marks.tokens, &marks.prefills] {
                assert!(units.recent <= units.count);
                old("a unit", units.p99_ns.max(units.p50_ns), at_most(since_ns));
            }
            if marks.has_requests {
                old("a request", service.p99_ns.max(service.p50_ns), at_most(since_ns));
            }
        }
        for event in &self.script.calls.lock().unwrap().units {
            match event {
                Event::UnitBegan { client, since_ns: began_ns, .. } if *client == id => {
                    assert!((self.registered_ns[&id]..=self.now_ns).contains(began_ns));
                }
                Event::UnitsEnded { client, took_ns, .. } if *client == id => {
                    old("the mean of units", *took_ns, since_ns);
                }
                _ => {}
            }
        }
    }

    /// Nothing that is counted falls, and a pass counts as much as one may; the policy and an A/B test hear of the
    /// same.
    fn see_that_counted(&mut self, id: u32, before: &Figures, after: &Figures) {
        let ((service_before, marks_before), (service, marks)) = (before, after);
        let Some(marks) = marks else {
            assert!(marks_before.is_none(), "client {id}: its marks are gone");
            return;
        };
        let before = marks_before.unwrap_or_default();
        // Before the first marked one, requests were units of streams, and tokens were their graph launches.
        let is_first = marks.has_requests && !before.has_requests;
        let requests_before = if is_first { 0 } else { service_before.requests };
        let is_first_token = marks.has_tokens && !before.has_tokens;
        let tokens_before = if is_first_token { 0 } else { before.tokens.count };
        let more = |what: &str, now: u64, before: u64| {
            assert!(now >= before, "client {id}: {what} fell from {before} to {now}");
            now - before
        };
        assert!(marks.has_requests || !before.has_requests, "client {id}: requests as before");
        assert!(marks.has_tokens || !before.has_tokens, "client {id}: tokens as before");
        let requests = more("requests", service.requests, requests_before);
        let marked = if marks.has_requests { requests } else { 0 };
        more("dropped units", marks.dropped, before.dropped);
        more("shortened units", marks.shortened, before.shortened);
        if !is_first {
            more("requests within", service.requests_within, service_before.requests_within);
        }
        let tokens = more("tokens", marks.tokens.count, tokens_before);
        // A unit has at most so many graph launches.
        let graphs_max = if marks.has_tokens { 1 } else { u16::MAX.into() };
        let read = marked
            + tokens.div_ceil(graphs_max)
            + more("prefills", marks.prefills.count, before.prefills.count)
            + more("wrong units", marks.wrong, before.wrong);
        assert!(
            read <= PASS_MARKS_CLIENT_MAX as u64,
            "client {id}: {read} units in one pass: {after:?}, before {before:?}"
        );
        if self.is_measuring {
            self.sampled += marked;
        }
        let calls = self.script.calls.lock().unwrap();
        let (mut told, mut ends, mut begins) = (0, 0, 0);
        for event in &calls.units {
            match event {
                Event::UnitsEnded { client, units, .. } if *client == id => {
                    (told, ends) = (told + u64::from(*units), ends + 1);
                }
                Event::UnitBegan { client, .. } if *client == id => begins += 1,
                _ => {}
            }
        }
        assert!(!marks.has_requests || told == marked, "client {id}: the policy heard of {told}");
        // One more of each where another policy takes over.
        assert!(ends <= 1 && begins <= 2, "client {id}: {ends} events of ends, {begins} of begins");
    }

    /// All that it marked is counted, once, and as soon as the limits let it.
    fn see_to_honest(&mut self, (service, marks): &Figures) {
        let Honest { open, unread, read, longest_ns, shortened, has_any, has_requests, dropped } =
            &mut self.honest;
        for unit in unread.drain(..unread.len().min(PASS_MARKS_CLIENT_MAX)) {
            let kind = of_kind(unit.what.kind);
            read[kind] += 1;
            longest_ns[kind] = longest_ns[kind].max(unit.ended_ns - unit.came_ns);
            *shortened += u64::from(unit.is_shortened);
            *has_any = true;
        }
        let requests: Vec<u64> =
            open.iter().filter(|u| u.what.kind == Kind::Request).map(|u| u.came_ns).collect();
        *has_any |= !open.is_empty() || *dropped > 0;
        *has_requests |= !requests.is_empty() || read[0] > 0;
        let oldest_ns = requests.iter().min().map_or(0, |came_ns| self.now_ns - came_ns);
        let Some(marks) = marks else {
            assert!(!*has_any, "the honest client's marks are not seen");
            return;
        };
        let MarkNumbers { tokens, prefills, tpot_ns, .. } = *marks;
        let counted = MarkNumbers {
            has_requests: *has_requests,
            has_tokens: read[1] > 0,
            open: requests.len() as u64,
            oldest_ns,
            tpot_ns,
            tokens,
            prefills,
            dropped: *dropped,
            wrong: 0,
            shortened: *shortened,
        };
        assert_eq!(*marks, counted, "the honest client's marks");
        let counts = [service.requests, tokens.count, prefills.count];
        assert_eq!(counts, *read, "the honest client's requests, tokens and prefills");
        let p99_ns = [service.p99_ns, tokens.p99_ns, prefills.p99_ns];
        for (p99_ns, longest_ns) in p99_ns.iter().zip(longest_ns) {
            assert!(*p99_ns <= at_most(*longest_ns), "{p99_ns} of at most {longest_ns}");
        }
    }

    /// Another sample for the A/B test.
    fn measure(&mut self, how: u8) {
        let (done, mut old) = oneshot::channel();
        let next = (how & 1 != 0).then(|| Box::new(Sample::new()));
        let is_measuring = next.is_some();
        assert!(self.harness.send(Control::Measure { next, cut: how & 2 != 0, done }));
        let (sampled, to_ns) = (std::mem::take(&mut self.sampled), self.now_ns);
        // The iteration samples for the next one.
        self.is_measuring = is_measuring;
        self.iterate();
        let Some(old) = old.try_recv().expect("it is exchanged at once") else { return };
        let since_ns = to_ns - START_NS;
        // The end of a unit may be a second ahead, and graphs of it are not cut to what can be.
        let longest = [since_ns, since_ns + 1_000_000_000];
        for (unit, since_ns) in tally_ab::Unit::ALL.into_iter().zip(longest) {
            let units = old.of(unit);
            assert!(units.open.iter().all(|open| (START_NS..=to_ns).contains(&open.began_ns)));
            assert!(units.carried.iter().all(|one| one.ns <= since_ns));
            assert!(units.quantile_ns(1.0).unwrap_or(0) <= at_most(since_ns));
            assert!(units.carried.len() <= CARRIED_MAX && units.open.len() <= CARRIED_MAX);
        }
        let carried = old.of(tally_ab::Unit::Request).carried.len();
        let seen = old.requests() + carried as u64;
        assert!(
            seen >= sampled || carried == CARRIED_MAX,
            "{seen} requests in a sample, {sampled} were counted"
        );
    }

    fn control(&mut self, which: u8, more: u8) {
        match which % 5 {
            0 => {
                let (done, _) = oneshot::channel();
                assert!(self.harness.send(Control::Status { kernels: more.into(), done }));
            }
            1 => {
                let (done, _) = oneshot::channel();
                let limits_ns = vec![0, u64::from(more) << 16, u64::MAX];
                assert!(self.harness.send(Control::Recent { limits_ns, done }));
            }
            2 => {
                let id = 1 + u32::from(more) % self.next_id;
                let slo_ns = 1 << (more % 40);
                let objective = (more & 128 == 0).then_some(Objective { slo_ns, percentile: 99.0 });
                let (done, _) = oneshot::channel();
                let tpot_ns = (more & 64 == 0).then_some(slo_ns / 2);
                let set = Control::SetObjectives { id, objective, tpot_ns, done };
                assert!(self.harness.send(set));
            }
            3 => {
                let (done, _) = oneshot::channel();
                let policy = policy(&self.script, ALL);
                let generation = more.into();
                assert!(self.harness.send(Control::SetPolicy { policy, generation, done }));
            }
            _ => return self.measure(more),
        }
        self.iterate();
    }
}

/// Makes both sides of a client.
fn new_client(id: u32, class: Class, shares: &mut KernelShares) -> (Client, Box<NewClient>) {
    let (region_fd, region) = map::create_client().unwrap();
    let (core_fd, core) = map::create_core().unwrap();
    let new = Box::new(NewClient {
        info: ClientInfo { id, class, name: format!("c{id}"), labels: Vec::new() },
        region: map::open_client(region_fd.as_fd()).unwrap(),
        core,
        doorbell: park::eventfd().unwrap(),
        witness: Default::default(),
        first_ticket: 0,
        // What a pass takes of a user's units is for the honest client alone.
        kernels: shares.of(User::Uid(if id == HONEST { 3 } else { id % 3 }), false),
    });
    let core = map::open_core(core_fd.as_fd()).unwrap();
    (Client { id, region, core, ticket: 0, completion: 0 }, new)
}

/// No panic; a pass takes no more units of a client than it may; none is longer than its client has been registered;
/// no count falls; those of an honest client are counted exactly, as soon as they may be.
pub fn marks(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut world = World::new(bytes.u8());
    while !bytes.0.is_empty() {
        match bytes.u8() % 16 {
            0 => {
                world.now_ns += 1 + (u64::from(bytes.u16()) << (bytes.u8() % 24));
                world.iterate();
            }
            1 => {
                for _ in 0..=bytes.u8() % 8 {
                    world.now_ns += 1_000;
                    world.iterate();
                }
            }
            2 => world.now_ns += u64::from(bytes.u16()),
            3 => world.join_other(&mut bytes),
            4 => {
                let at = usize::from(bytes.u8());
                if !world.others.is_empty() {
                    world.leave(at % world.others.len());
                }
            }
            5 => {
                let (how, age) = (bytes.u8(), bytes.u8());
                (0..=how >> 4).for_each(|n| world.begin((how & 15) + n, age));
            }
            6 => {
                let how = bytes.u8();
                (0..how >> 1).for_each(|_| world.end(how & 1 != 0));
            }
            7 => {
                // Short ones, with more of them than the ring has room for.
                let how = bytes.u8();
                for _ in 0..usize::from(how) * 8 {
                    world.begin(how % 4, how / 32);
                    world.end(false);
                }
            }
            8 => world.control(bytes.u8(), bytes.u8()),
            9 => hostile::act(&mut world.others, world.now_ns, &mut bytes),
            _ => {
                let who = usize::from(bytes.u8());
                let count = world.others.len();
                if let Some(client) = world.others.get(who % count.max(1)) {
                    hostile::mark(client, world.now_ns, &mut bytes);
                }
            }
        }
    }
    while !world.others.is_empty() {
        world.leave(0);
    }
    for _ in 0..OPEN_MARKS_MAX {
        world.end(true);
    }
    for _ in 0..=MARK_SLOTS / PASS_MARKS_CLIENT_MAX {
        world.iterate();
    }
    assert!(world.honest.unread.is_empty(), "all is read in the end");
    let read = world.honest_client.core.marks_read.load(Relaxed);
    assert_eq!(read, world.honest_client.region.marks.next.load(Relaxed), "and said to be");
}
