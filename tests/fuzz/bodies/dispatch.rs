//! The dispatch loop and its engine at a virtual time, an honest client, and others that write what they like into what
//! they share with the core. An input is a sequence of what they do.

use super::hostile::{self, Bytes, Client};
use super::scripted::{Calls, Script, policy};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use rustix::fd::AsFd;
use tally_contract::limits::{PASS_SUBMISSIONS_MAX, TIMERS_MAX};
use tally_core::dispatch::client::Share;
use tally_core::dispatch::control::{Control, NewClient};
use tally_core::dispatch::harness::{Harness, REQUESTS_OF_ITERATION_MAX};
use tally_core::dispatch::kernels::KernelShares;
use tally_core::dispatch::{Settings, park};
use tally_core::quota::User;
use tally_engine::policy::{Class, ClientInfo};
use tally_engine::{ClientStats, EngineConfig};
use tally_ipc::layout::{Completion, submission_flags};
use tally_ipc::map;
use tally_ipc::ring::{self, Request};
use tokio::sync::oneshot;

/// Decisions in a pass for one client, whose launches may also be offered again, and for all.
const DECISIONS_MAX: u64 = 64;
const DECISIONS_MAX_ALL: u64 = PASS_SUBMISSIONS_MAX as u64;
/// Clients at once, the honest one among them.
const CLIENTS_MAX: usize = 40;
/// Requests of the control plane that wait; the core takes more.
const REQUESTS_MAX: usize = 100;
/// Turns in which the honest client's launches are done once the others are gone.
const ITERATIONS_TO_END: usize = 4_000;
const HEARTBEAT_NS: u64 = 200_000_000;

/// The client that keeps to the protocol, in one thread.
struct Honest {
    client: Client,
    /// Published, and not answered as far as it has looked.
    asked: VecDeque<(u64, u32, u32)>,
    /// Running: stream and completion value.
    running: VecDeque<(u32, u32)>,
    streams: [u32; 4],
    launched: u64,
    heartbeat: (u64, u64),
}

impl Honest {
    fn launch(&mut self, stream: u32, flags: u32) {
        let Client { region, core, ticket, .. } = &mut self.client;
        if !ring::has_room(core, *ticket) {
            return;
        }
        let stream = stream % self.streams.len() as u32;
        let taken = ring::take_ticket(region);
        assert_eq!(taken, *ticket);
        *ticket += 1;
        let number = &mut self.streams[stream as usize];
        *number += 1;
        let starts = ring::answer(core, taken).is_some();
        let leased = if starts { submission_flags::LEASED } else { 0 };
        let request = Request {
            kernel: stream,
            flags: flags & submission_flags::ALL & !submission_flags::LEASED | leased,
            grid: [64, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            stream,
            completion: *number,
            demand: Default::default(),
            limited_sms: (*number % 5) * leased,
        };
        ring::publish(region, taken, &request);
        self.launched += 1;
        match starts {
            true => self.running.push_back((stream, *number)),
            false => self.asked.push_back((taken, stream, *number)),
        }
    }

    /// Start what was answered.
    fn look(&mut self) {
        let answered = |ticket: u64| ring::answer(&self.client.core, ticket).is_some();
        let count = self.asked.iter().take_while(|(ticket, ..)| answered(*ticket)).count();
        for (ticket, ..) in self.asked.iter().skip(count) {
            assert!(!answered(*ticket), "ticket {ticket} is answered before an earlier one");
        }
        self.running.extend(self.asked.drain(..count).map(|(_, stream, number)| (stream, number)));
    }

    /// Let the oldest that run end.
    fn end(&mut self, count: usize, took_ns: u64) {
        for _ in 0..count {
            let Some((stream, number)) = self.running.pop_front() else { break };
            let word = &self.client.region.completions[stream as usize];
            word.measured.store(Completion::pack_measured(number, took_ns), SeqCst);
            word.done.store(number, SeqCst);
        }
    }
}

/// A client's counts before an iteration.
struct Before {
    stats: ClientStats,
    consumed: u64,
    wake: u32,
}

fn granted(s: &ClientStats) -> u64 {
    s.run + s.leased + s.sliced + s.preemptible + s.sm_limited + s.degraded
}

struct World {
    harness: Harness,
    script: Arc<Script>,
    subscribes: u32,
    shares: KernelShares,
    honest: Honest,
    others: Vec<Client>,
    next_id: u32,
    now_ns: u64,
    /// Handed over, and not taken yet.
    requests: usize,
}

/// Makes both sides of a client.
fn new_client(
    id: u32,
    class: Class,
    first_ticket: u64,
    shares: &mut KernelShares,
) -> (Client, Box<NewClient>) {
    let (region_fd, region) = map::create_client().unwrap();
    let (core_fd, core) = map::create_core().unwrap();
    let client = Box::new(NewClient {
        info: ClientInfo { id, class, name: format!("c{id}"), labels: Vec::new() },
        region: map::open_client(region_fd.as_fd()).unwrap(),
        core,
        doorbell: park::eventfd().unwrap(),
        witness: Default::default(),
        first_ticket,
        kernels: shares.of(User::Uid(id % 3), false),
    });
    let core = map::open_core(core_fd.as_fd()).unwrap();
    (Client { id, region, core, ticket: first_ticket, completion: 0 }, client)
}

impl World {
    fn new(setup: u8, mode: u8) -> Self {
        let settings = Settings {
            spin_ns: 0,
            pin_cpu: None,
            completion_poll_ns: 50_000,
            probe_after_ns: 1_000_000,
            high_stall_ns: if setup & 1 != 0 { 0 } else { 5_000_000_000 },
            engine: EngineConfig {
                window_ns: if setup & 2 != 0 { u64::MAX } else { 1_000_000 },
                ..EngineConfig::default()
            },
        };
        let script = Arc::new(Script::default());
        script.mode.store(u64::from(mode % 10), Relaxed);
        let subscribes = u32::from(setup >> 2 & 3 | setup >> 3 & 4);
        let harness = Harness::new(settings, policy(&script, subscribes)).unwrap();
        let mut shares = KernelShares::new(64);
        let class = if setup & 16 != 0 { Class::High } else { Class::BestEffort };
        let (client, new) = new_client(1, class, 0, &mut shares);
        for kernel in 0..4 {
            client.region.kernels[kernel].publish(format!("k{kernel}").as_bytes(), 7);
        }
        client.region.kernel_count.store(4, SeqCst);
        let honest = Honest {
            client,
            asked: VecDeque::new(),
            running: VecDeque::new(),
            streams: [0; 4],
            launched: 0,
            heartbeat: (0, 0),
        };
        let mut world = World {
            harness,
            script,
            subscribes,
            shares,
            honest,
            others: Vec::new(),
            next_id: 2,
            now_ns: 1_000_000_000,
            requests: 0,
        };
        let (done, _joined) = oneshot::channel();
        assert!(world.send(Control::Join { client: new, min_share: None, done }));
        world.iterate();
        world
    }

    fn join(&mut self, class: Class, first_ticket: u64) {
        if self.others.len() + 1 >= CLIENTS_MAX {
            return;
        }
        let (client, new) = new_client(self.next_id, class, first_ticket, &mut self.shares);
        self.next_id += 1;
        let (done, _joined) = oneshot::channel();
        if self.send(Control::Join { client: new, min_share: None, done }) {
            self.others.push(client);
        }
    }

    fn leave(&mut self, at: usize) {
        let client = self.others.remove(at);
        let (done, mut left) = oneshot::channel();
        assert!(self.send(Control::Leave { id: client.id, done }));
        let iterations = self.requests.div_ceil(REQUESTS_OF_ITERATION_MAX);
        let answered = (0..iterations).any(|_| {
            self.iterate();
            // `None`: it was cut off before.
            left.try_recv().map(drop).is_ok()
        });
        assert!(answered, "client {} does not leave", client.id);
    }

    fn send(&mut self, request: Control) -> bool {
        if self.requests == REQUESTS_MAX {
            self.iterate();
        }
        self.requests += 1;
        self.harness.send(request)
    }

    /// The others come and go; one that was cut off stays until it leaves.
    fn client_of(&self, id: u32) -> Option<&Client> {
        std::iter::once(&self.honest.client).chain(&self.others).find(|client| client.id == id)
    }

    /// One iteration, at `now_ns`. How long the loop would sleep; `None`: not at all.
    fn iterate(&mut self) -> Option<u64> {
        let before: BTreeMap<u32, Before> = self
            .harness
            .clients()
            .filter_map(|id| {
                let core = &self.client_of(id)?.core;
                let (stats, _) = self.harness.stats(id)?;
                let (consumed, wake) = (core.consumed.load(SeqCst), core.wake.load(SeqCst));
                Some((id, Before { stats, consumed, wake }))
            })
            .collect();
        *self.script.calls.lock().unwrap() = Calls::default();
        let sleeps = self.harness.iterate(self.now_ns);
        self.requests = self.requests.saturating_sub(REQUESTS_OF_ITERATION_MAX);
        self.see_that_bounded(&before);
        self.see_to_honest();
        while self.harness.notices.try_recv().is_ok() {}
        sleeps
    }

    /// The cost oracle: what the iteration did, in counts, against what is promised.
    fn see_that_bounded(&self, before: &BTreeMap<u32, Before>) {
        let after: Vec<u32> = self.harness.clients().collect();
        // As many as were there at least: a share falls with the number of clients.
        let share = Share::of(before.len().min(after.len()));
        let (mut decided_all, mut ended_all) = (0, 0);
        for id in after {
            let (stats, state) = self.harness.stats(id).expect("it is served");
            assert_eq!(
                stats.submitted,
                granted(&stats) + state.waiting,
                "client {id}: lost or doubled"
            );
            assert!(stats.completed + state.in_flight <= granted(&stats), "client {id}: doubled");
            let (Some(before), Some(client)) = (before.get(&id), self.client_of(id)) else {
                continue;
            };
            let bounded = |what: &str, did: u64, most: u64| {
                assert!(did <= most, "client {id} in one pass: {did} {what}, at most {most}");
            };
            let taken = client.core.consumed.load(SeqCst).wrapping_sub(before.consumed);
            bounded("tickets taken", taken, share.submissions as u64);
            let ended = stats.completed - before.stats.completed;
            bounded("ends of launches", ended, share.completions as u64);
            let turned = stats.launches_yielded - before.stats.launches_yielded;
            bounded("reports of yielding", turned, share.turnarounds as u64);
            let wakes = client.core.wake.load(SeqCst).wrapping_sub(before.wake);
            bounded("wakes", wakes.into(), 1);
            // Started by the client itself: nothing was decided.
            let decided = |s: &ClientStats| granted(s) - s.leased;
            let decided = decided(&stats) - decided(&before.stats);
            bounded("decisions", decided, DECISIONS_MAX);
            (decided_all, ended_all) = (decided_all + decided, ended_all + ended);
        }
        let calls = self.script.calls.lock().unwrap();
        assert!(decided_all <= DECISIONS_MAX_ALL, "{decided_all} decisions in one pass");
        for (id, decides) in &calls.decides {
            assert!(*decides <= DECISIONS_MAX, "client {id}: the policy was asked {decides} times");
        }
        let asked: u64 = calls.decides.values().sum();
        assert!(asked <= DECISIONS_MAX_ALL, "the policy was asked {asked} times");
        let clients = before.len() as u64 + REQUESTS_OF_ITERATION_MAX as u64;
        // A begin and an end a client; a policy that takes over hears of all units that are open.
        let (units, most) =
            (calls.units.len() as u64, (2 + REQUESTS_OF_ITERATION_MAX as u64) * clients);
        assert!(units <= most, "{units} events of units in one pass, at most {most}");
        // Each end, two changes of activity a client, timers, and who came or left.
        let events = units
            + ended_all
            + share.completions as u64 * REQUESTS_OF_ITERATION_MAX as u64
            + 4 * clients
            + TIMERS_MAX as u64;
        assert!(calls.events <= events, "{} events in one pass, at most {events}", calls.events);
    }

    fn see_to_honest(&mut self) {
        let Honest { client, launched, heartbeat, .. } = &mut self.honest;
        let (stats, state) = self.harness.stats(client.id).expect("the honest client is served");
        assert!(stats.submitted <= *launched, "more launches than it made");
        assert_eq!(
            stats.completed + state.in_flight,
            granted(&stats),
            "the honest client's launches"
        );
        assert_eq!(client.core.serving.load(SeqCst), 1, "the honest client is served");
        let beats = client.core.heartbeat.load(SeqCst);
        if beats != heartbeat.1 {
            *heartbeat = (self.now_ns, beats);
        }
        let since = self.now_ns - heartbeat.0;
        assert!(since < HEARTBEAT_NS || heartbeat.0 == 0, "no heartbeat for {since} ns");
        self.honest.look();
    }

    fn control(&mut self, which: u8, more: u8) {
        match which % 6 {
            0 => {
                let (done, _) = oneshot::channel();
                self.send(Control::Status { kernels: more.into(), done });
            }
            1 => {
                let (done, _) = oneshot::channel();
                self.send(Control::Profiled { from: more.into(), done });
            }
            2 => {
                let (done, _) = oneshot::channel();
                self.send(Control::Forget { done });
            }
            3 => {
                let (done, _) = oneshot::channel();
                self.send(Control::SavePolicy { done });
            }
            4 => {
                let (done, _) = oneshot::channel();
                let next = (more & 1 != 0).then(|| Box::new(tally_ab::Sample::new()));
                self.send(Control::Measure { next, cut: more & 2 != 0, done });
            }
            _ => {
                let policy = policy(&self.script, self.subscribes ^ u32::from(more & 7));
                let (done, _) = oneshot::channel();
                self.send(Control::SetPolicy { policy, generation: more.into(), done });
            }
        }
    }
}

/// No panic; nobody's launch is lost or granted twice, the honest client's are answered in order and all done in the
/// end; an iteration does no more than what is promised of it.
pub fn dispatch(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut world = World::new(bytes.u8(), bytes.u8());
    while !bytes.0.is_empty() {
        let what = bytes.u8();
        match what % 16 {
            0 => {
                world.now_ns += 1 + (u64::from(bytes.u16()) << (bytes.u8() % 16));
                world.iterate();
            }
            1 => {
                for _ in 0..=bytes.u8() % 16 {
                    world.now_ns += 1_000;
                    world.iterate();
                }
            }
            2 | 3 => {
                let (who, ticket) = (bytes.u8(), bytes.value(0, 0).min(u64::MAX / 2));
                let class = if who & 1 != 0 { Class::High } else { Class::BestEffort };
                for _ in 0..=who >> 5 {
                    world.join(class, ticket);
                }
            }
            4 => {
                let at = usize::from(bytes.u8());
                if !world.others.is_empty() {
                    world.leave(at % world.others.len());
                }
            }
            5 | 6 => {
                let (count, flags) = (bytes.u8(), bytes.u8());
                (0..count).for_each(|n| world.honest.launch(n.into(), flags.into()));
            }
            7 => {
                let took_ns = bytes.u16().into();
                world.honest.end(bytes.u8().into(), took_ns);
            }
            8 => world.control(bytes.u8(), bytes.u8()),
            9 => world.script.mode.store(u64::from(bytes.u8() % 10), Relaxed),
            15 if what & 128 != 0 => {
                let who = usize::from(bytes.u8());
                if let Some(client) = world.others.get(who % world.others.len().max(1)) {
                    hostile::mark(client, world.now_ns, &mut bytes);
                }
            }
            _ => hostile::act(&mut world.others, world.now_ns, &mut bytes),
        }
    }
    // The others go; what the honest client asked for is done.
    world.script.mode.store(0, Relaxed);
    while !world.others.is_empty() {
        world.leave(0);
    }
    let mut iterations = 0;
    let is_done = |world: &World| {
        let (stats, _) = world.harness.stats(world.honest.client.id).expect("it is served");
        stats.completed == world.honest.launched
    };
    while !is_done(&world) {
        assert!(
            iterations < ITERATIONS_TO_END,
            "the honest client's launches are not done: {:?}",
            world.harness.stats(world.honest.client.id)
        );
        iterations += 1;
        world.honest.end(usize::MAX, 1_000);
        let sleeps = world.iterate();
        world.now_ns += sleeps.unwrap_or(1_000).clamp(1_000, HEARTBEAT_NS - 1);
    }
    let (asked, running) = (&world.honest.asked, &world.honest.running);
    assert!(asked.is_empty(), "counted as done, and not even answered: {asked:?}");
    assert!(running.is_empty(), "counted as done, and still running: {running:?}");
}
