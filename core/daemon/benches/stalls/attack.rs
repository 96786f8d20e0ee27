//! What the attackers do: all in one process of another user than the core's, in a loop without pauses, on whatever
//! CPU it was put.

use crate::common::{Client, admin, hello};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FallocateFlags;
use rustix::mm::Advice;
use rustix::thread::futex;
use serde_json::json;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};
use tally_ipc::layout::{ClientRegion, RING_SLOTS, STREAM_SLOTS, submission_flags};
use tally_ipc::ring::{self, Request};
use tally_ipc::wire::WireError;

/// Threads that sleep on an attacker's words, or poll its doorbell, of all attackers.
const SLEEPERS: usize = 400;
/// Times that each of them does so at once.
const SLEEPS: usize = 128;
const POLLERS: usize = 16;
const POLLED: usize = 10_000;
/// Threads that ring the doorbell of one that leaves.
const RINGERS: usize = 4;
/// Pauses between an attacker's leaving and that of the next: as many may register a second.
const LEAVES_EVERY: Duration = Duration::from_millis(50);
/// The doorbell that is polled by those who leave.
static POLLED_ONE: Mutex<Option<OwnedFd>> = Mutex::new(None);
/// The address that the sleepers sleep on who do not sleep on the core's words.
static SLEPT_ON: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Launches as fast as it can; all end at once.
    Launches,
    /// Never lets a launch end, and says that as many as its ring holds have yielded.
    InFlight,
    /// The same, beside a high-priority client that becomes busy and idle again and again; it does so in both
    /// runs.
    Toggles,
    /// Lets thousands of launches end at once.
    Completions,
    /// Launches without end what the core must decide, and never lets one end.
    Held,
    /// Takes tickets and publishes nothing.
    Tickets,
    /// Launches another kernel each time.
    Kernels,
    /// Has many threads sleep, many times each, on the words that the core wakes.
    Sleepers,
    /// Has them sleep on another word, which the kernel keeps in the same list as those.
    Colliders,
    /// Polls its doorbell many times at once, and rings it.
    Pollers,
    /// The same, and registers and leaves all the time.
    Leavers,
    /// Rings the doorbell without a launch.
    Doorbell,
    /// Writes noise over its ring and its counts.
    Noise,
    /// Tries to take the pages of its region from under the core.
    Memory,
    /// Registers and leaves, again and again.
    Joins,
    /// Connects and says nothing, or the first byte of a frame.
    Silence,
    Status,
}

impl Attack {
    pub const ALL: [Attack; 17] = [
        Attack::Launches,
        Attack::InFlight,
        Attack::Toggles,
        Attack::Completions,
        Attack::Held,
        Attack::Tickets,
        Attack::Kernels,
        Attack::Sleepers,
        Attack::Colliders,
        Attack::Pollers,
        Attack::Leavers,
        Attack::Doorbell,
        Attack::Noise,
        Attack::Memory,
        Attack::Joins,
        Attack::Silence,
        Attack::Status,
    ];

    /// Whether the attackers are clients, and not only connections.
    fn registers(self) -> bool {
        !matches!(self, Attack::Joins | Attack::Silence | Attack::Status)
    }
}

struct Attacker {
    client: Client,
    name: String,
    ticket: u64,
    launched: u64,
}

/// Registers; waits if the core wants that.
fn register(socket: &Path, name: &str) -> Client {
    loop {
        match Client::register(socket, &hello(name, false)) {
            Ok(client) => return client,
            Err(WireError::Refused(why)) if why.contains("too fast") => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

impl Attacker {
    fn new(socket: &Path, name: String) -> Self {
        Attacker { client: register(socket, &name), name, ticket: 0, launched: 0 }
    }

    /// As many launches as there is room for; `flags`: they are said to have started already, or are to be decided.
    fn launch(&mut self, flags: u32, kernels: bool) {
        for _ in 0..RING_SLOTS {
            if !ring::has_room(&self.client.core, self.ticket) {
                break;
            }
            self.launched += 1;
            let blocks = if kernels { self.launched as u32 } else { 1 };
            let request = Request {
                kernel: 0,
                flags,
                grid: [blocks, 1, 1],
                block: [32, 1, 1],
                shared_bytes: 0,
                stream: self.ticket as u32 % STREAM_SLOTS as u32,
                completion: self.ticket as u32 + 1,
                demand: Default::default(),
                limited_sms: 0,
            };
            ring::publish(&self.client.region, self.ticket, &request);
            self.ticket += 1;
            self.client.region.activity.next_ticket.store(self.ticket, SeqCst);
        }
        if ring::core_needs_wake(&self.client.core) {
            self.client.ring();
        }
    }

    fn end_all(&self) {
        for slot in &self.client.region.completions {
            slot.done.store(self.ticket as u32, SeqCst);
        }
    }

    /// That more launches have yielded than there are.
    fn yield_all(&self, random: &mut fastrand::Rng) {
        let all = &self.client.region.turnarounds;
        let last = &all.latest[all.latest.len() - 1];
        last.ticket.store(random.u64(..), Relaxed);
        all.count.fetch_add(all.latest.len() as u64, SeqCst);
    }

    fn step(&mut self, attack: Attack, round: u64, random: &mut fastrand::Rng) {
        let region = &self.client.region;
        region.activity.waiters.store(1, SeqCst);
        match attack {
            Attack::Launches | Attack::Kernels => {
                self.launch(0, attack == Attack::Kernels);
                self.end_all();
            }
            Attack::InFlight | Attack::Toggles => {
                self.launch(submission_flags::LEASED, false);
                self.yield_all(random);
            }
            Attack::Completions => {
                self.launch(submission_flags::LEASED, false);
                if round.is_multiple_of(64) {
                    self.end_all();
                }
            }
            Attack::Held => self.launch(0, false),
            Attack::Tickets => {
                region.activity.next_ticket.fetch_add(1 << 20, SeqCst);
                self.client.ring();
            }
            // Answers wake the sleepers.
            Attack::Sleepers | Attack::Colliders => {
                self.launch(0, false);
                self.end_all();
            }
            Attack::Pollers | Attack::Leavers | Attack::Doorbell => self.client.ring(),
            Attack::Noise => {
                for _ in 0..64 {
                    let at = random.usize(..region.submissions.len());
                    region.submissions[at].sequence.store(random.u64(..), Relaxed);
                    let at = random.usize(..region.completions.len());
                    region.completions[at].done.store(random.u32(..), Relaxed);
                }
                region.turnarounds.count.store(random.u64(..), Relaxed);
                region.kernel_count.store(random.u32(..), Relaxed);
                self.client.ring();
            }
            Attack::Memory => self.take_pages(),
            Attack::Joins | Attack::Silence | Attack::Status => unreachable!("not clients"),
        }
    }

    fn take_pages(&mut self) {
        let fd = &self.client.region_fd;
        let length = size_of::<ClientRegion>();
        for flags in
            [FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE]
        {
            let punched = rustix::fs::fallocate(fd, flags, 0, length as u64);
            assert!(punched.is_err(), "the region is sealed");
        }
        assert!(rustix::fs::ftruncate(fd, 0).is_err(), "the region is sealed");
        let at = (&raw const *self.client.region).cast_mut().cast();
        for advice in [Advice::LinuxPageOut, Advice::LinuxDontNeed, Advice::LinuxRemove] {
            // SAFETY: the attacker's own mapping of a file; what is there then is what was.
            let _ = unsafe { rustix::mm::madvise(at, length, advice) };
        }
        self.launch(0, false);
        self.end_all();
    }

    /// What it did is undone as far as it can be.
    fn calm(&mut self) {
        let next = &self.client.region.activity.next_ticket;
        next.store(self.ticket, SeqCst);
        self.end_all();
        self.client.ring();
    }

    fn is_dropped(&self) -> bool {
        let mut fds = [PollFd::new(&self.client.socket, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&rustix::event::Timespec::default())), Ok(1))
    }
}

struct Attackers {
    attack: Attack,
    socket: PathBuf,
    connections: usize,
    clients: Vec<Attacker>,
    idle: Vec<UnixStream>,
    random: fastrand::Rng,
    round: u64,
    dropped: usize,
    left: Instant,
}

impl Attackers {
    fn step(&mut self) {
        self.round += 1;
        match self.attack {
            Attack::Joins => {
                let all = (0..self.connections).map(|_| UnixStream::connect(&self.socket));
                self.idle = all.filter_map(Result::ok).collect();
                for _ in 0..self.connections.min(8) {
                    let _ = Client::register(&self.socket, &hello("joins", false));
                }
            }
            Attack::Silence => {
                let all = (0..self.connections).map(|_| UnixStream::connect(&self.socket));
                self.idle = all.filter_map(Result::ok).collect();
                for mut stream in &self.idle {
                    let _ = stream.write_all(b"T");
                }
            }
            Attack::Status => {
                let admin_socket = tally_ipc::wire::admin_socket_of(&self.socket).unwrap();
                let ask = |_| admin(&admin_socket, &json!({"cmd": "status", "kernels": 1_000}));
                std::thread::scope(|scope| {
                    let asking = (0..self.connections).map(|n| scope.spawn(move || ask(n)));
                    asking.collect::<Vec<_>>().into_iter().for_each(|one| drop(one.join()));
                });
            }
            attack => {
                if attack == Attack::Leavers && self.left.elapsed() > LEAVES_EVERY {
                    self.left = Instant::now();
                    // The next one's doorbell is polled; it leaves while that rings.
                    let leaves = &mut self.clients[0];
                    *leaves = Attacker::new(&self.socket, leaves.name.clone());
                    let polled = leaves.client.doorbell.try_clone().unwrap();
                    *POLLED_ONE.lock().unwrap() = Some(polled);
                }
                for attacker in &mut self.clients {
                    attacker.step(attack, self.round, &mut self.random);
                    if self.round.is_multiple_of(256) && attacker.is_dropped() {
                        self.dropped += 1;
                        *attacker = Attacker::new(&self.socket, std::mem::take(&mut attacker.name));
                    }
                }
            }
        }
    }

    fn calm(&mut self) {
        self.idle.clear();
        self.clients.iter_mut().for_each(Attacker::calm);
    }
}

/// Finds a word whose sleepers the kernel walks over whenever it looks for those of the core's word, on which all sleep
/// now: to wake nobody there takes long.
fn collide(client: &Client) {
    const STRIDE: usize = 16;
    let words = (&raw const *client.region).cast::<AtomicU32>();
    let took = |at: usize| {
        // SAFETY: within the region, which is mapped until the process ends.
        let word: &'static AtomicU32 = unsafe { &*words.add(at) };
        let fastest = (0..3).map(|_| {
            let start = Instant::now();
            let _ = futex::wake(word, futex::Flags::empty(), 1);
            start.elapsed()
        });
        (fastest.min().unwrap_or_default(), word.as_ptr() as usize)
    };
    let count = size_of::<ClientRegion>() / size_of::<AtomicU32>() / STRIDE;
    let slowest = (0..count.min(8_192)).map(|n| took(n * STRIDE)).max();
    SLEPT_ON.store(slowest.map_or(0, |(_, address)| address), SeqCst);
}

/// Threads that wait for what the core does, until the process ends.
fn wait_for_the_core(attack: Attack, clients: &[Attacker], is_on: &'static AtomicBool) {
    let spawn = |work: Box<dyn FnMut() + Send>| {
        let mut work = work;
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        let body = move || loop {
            match is_on.load(Relaxed) {
                true => work(),
                false => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        drop(thread.spawn(body).expect("a thread"));
    };
    let sleeps = matches!(attack, Attack::Sleepers | Attack::Colliders);
    for at in 0..if sleeps { SLEEPERS } else { 0 } {
        let core: *const tally_ipc::CoreRegion =
            &raw const *clients[at % clients.len()].client.core;
        // SAFETY: mapped until the process ends: this attack breaks no rule that the core would drop a client for.
        let core: &'static tally_ipc::CoreRegion = unsafe { &*core };
        spawn(Box::new(move || {
            let own = SLEPT_ON.load(SeqCst) as *const AtomicU32;
            let word = match at % 4 {
                // SAFETY: of the first attacker's region, mapped likewise.
                _ if !own.is_null() => unsafe { &*own },
                0 if attack == Attack::Sleepers => &core.probes,
                _ => &core.wake,
            };
            let mut wait = futex::Wait::new();
            wait.val = word.load(SeqCst).into();
            wait.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
            wait.flags = futex::WaitFlags::SIZE_U32;
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let most = futex::Timespec { tv_sec: now.tv_sec + 1, tv_nsec: now.tv_nsec };
            let clock = rustix::time::ClockId::Monotonic;
            let _ = futex::waitv(&[wait; SLEEPS], futex::WaitvFlags::empty(), Some(&most), clock);
        }));
    }
    if attack == Attack::Colliders {
        is_on.store(true, SeqCst);
        std::thread::sleep(Duration::from_secs(1));
        collide(&clients[0].client);
        is_on.store(false, SeqCst);
    }
    for _ in 0..if attack == Attack::Leavers { RINGERS } else { 0 } {
        spawn(Box::new(|| {
            let polled = POLLED_ONE.lock().unwrap().as_ref().map(|one| one.try_clone().unwrap());
            match polled {
                Some(polled) => (0..100).for_each(|_| {
                    let _ = rustix::io::write(&polled, &1u64.to_ne_bytes());
                }),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }));
    }
    for at in 0..if matches!(attack, Attack::Pollers | Attack::Leavers) { POLLERS } else { 0 } {
        let own = clients[at % clients.len()].client.doorbell.try_clone().unwrap();
        spawn(Box::new(move || {
            let leaves = POLLED_ONE.lock().unwrap().as_ref().map(|one| one.try_clone().unwrap());
            let doorbell = leaves.as_ref().unwrap_or(&own);
            let most = rustix::event::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let mut fds: Vec<_> =
                (0..POLLED).map(|_| PollFd::new(doorbell, PollFlags::PRI)).collect();
            let _ = poll(&mut fds, Some(&most));
        }));
    }
}

/// The process of the attackers: `socket` is the core's. Told `on`, `off` and `end` on its standard input, it answers
/// each when it has done so.
pub fn run(attack: Attack, socket: PathBuf, connections: usize, uid: u32) {
    let user = rustix::process::Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(user, user, user)
        .expect("the rights to act as another user");
    let name = |i| format!("attacker-{i}");
    let clients: Vec<_> = (0..if attack.registers() { connections } else { 0 })
        .map(|i| Attacker::new(&socket, name(i)))
        .collect();
    let is_on: &'static AtomicBool = Box::leak(Box::default());
    wait_for_the_core(attack, &clients, is_on);
    let random = fastrand::Rng::with_seed(7);
    let idle = Vec::new();
    let mut attackers = Attackers {
        attack,
        socket,
        connections,
        clients,
        idle,
        random,
        round: 0,
        dropped: 0,
        left: Instant::now(),
    };
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        lines.for_each(|line| drop(tell.send(line)));
    });
    let say = |what: &str| {
        println!("{what}");
        std::io::stdout().flush().unwrap();
    };
    say("ready");
    while let Ok(line) = told.recv() {
        if line == "end" {
            break;
        }
        is_on.store(true, SeqCst);
        attackers.step();
        say("on");
        while told.try_recv().is_err() {
            attackers.step();
        }
        is_on.store(false, SeqCst);
        attackers.calm();
        say("off");
    }
    say(&format!("{} {}", attackers.round, attackers.dropped));
    std::process::exit(0);
}
