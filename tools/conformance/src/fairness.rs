//! Does GPU time go to best-effort clients by their weights? Two that always have launches ready, on the engine and a
//! GPU that runs one kernel after the other.

use crate::Options;
use crate::report::{Check, Outcome};
use crate::steady::Stopped;
use crate::subject::{Instance, Subject};
use std::collections::VecDeque;
use tally_engine::policy::{Class, ClientInfo, SharingMode};
use tally_engine::profile::KernelKey;
use tally_engine::{Action, Engine, EngineConfig, Measured, Submission};

/// Weight of each client, and what its kernel takes.
const CLIENTS: [(u32, u64); 2] = [(3, 300_000), (1, 500_000)];
/// Launches that a client has submitted and not been granted.
const AHEAD: u64 = 4;
/// Launches of a client on the GPU, at most.
const UNDER_WAY_MAX: u64 = 64;
/// The time over which GPU time is compared, and the time before it.
const SETTLING_NS: u64 = 200_000_000;
const COMPARED_NS: u64 = 1_000_000_000;
/// The first client's GPU time over the second one's may be so much off the ratio of the weights, percent.
const OFF_PERCENT_MAX: f64 = 20.0;
/// Calls between two events of the GPU, at most: a policy may ask to be asked again and again.
const TICKS_MAX: u32 = 10_000;

pub(crate) struct World {
    engine: Engine<Box<dyn Instance>>,
    actions: Vec<Action>,
    now_ns: u64,
    kernels: [Option<u32>; 2],
    submitted: [u64; 2],
    granted: [u64; 2],
    /// Whose launches run, one after the other, and when the first is done.
    queue: VecDeque<usize>,
    done_ns: u64,
    done: [u64; 2],
    used_ns: [u64; 2],
}

impl World {
    pub fn new(policy: Box<dyn Instance>, sharing: SharingMode) -> Self {
        let config = EngineConfig { sm_count: 132, sharing, ..EngineConfig::default() };
        let mut world = World {
            engine: Engine::with_policy(config, policy),
            actions: Vec::new(),
            now_ns: 1_000_000_000,
            kernels: [None; 2],
            submitted: [0; 2],
            granted: [0; 2],
            queue: VecDeque::new(),
            done_ns: 0,
            done: [0; 2],
            used_ns: [0; 2],
        };
        for (at, (weight, _)) in CLIENTS.into_iter().enumerate() {
            let (id, name) = (at as u32, format!("weight-{weight}"));
            let key =
                KernelKey { name: name.clone(), image: 1, grid: [1_024, 1, 1], block: [256, 1, 1] };
            world.kernels[at] = world.engine.intern(&key);
            let labels = vec![("weight".to_owned(), weight.to_string())];
            let info = ClientInfo { id, class: Class::BestEffort, name, labels };
            world.engine.client_joined(world.now_ns, info, 0, &mut world.actions);
            world.obey();
        }
        world
    }

    /// A high-priority client is busy from now on, and the first best-effort client has this floor, permille.
    pub fn be_busy(&mut self, floor: u32) {
        let id = CLIENTS.len() as u32;
        let info = ClientInfo { id, class: Class::High, name: "high".into(), labels: Vec::new() };
        self.engine.client_joined(self.now_ns, info, 0, &mut self.actions);
        self.engine.high_activity(self.now_ns, id, true, self.now_ns, &mut self.actions);
        self.engine.set_min_share(self.now_ns, 0, floor, &mut self.actions);
        self.obey();
    }

    /// GPU time that a client had so far.
    pub fn used_ns(&self, at: usize) -> u64 {
        self.used_ns[at]
    }

    /// Lets so much time pass.
    pub fn run_for(&mut self, ns: u64) {
        self.run_until(self.now_ns + ns);
    }

    fn run_until(&mut self, end_ns: u64) {
        let mut ticks = 0;
        while self.now_ns < end_ns {
            self.submit();
            let deadline_ns = self.engine.next_deadline_ns().map(|ns| ns.max(self.now_ns + 1_000));
            match (self.queue.front().copied(), deadline_ns) {
                (Some(at), deadline_ns)
                    if deadline_ns.is_none_or(|ns| self.done_ns <= ns) || ticks > TICKS_MAX =>
                {
                    ticks = 0;
                    self.end(at);
                }
                (_, Some(ns)) => {
                    ticks += 1;
                    self.now_ns = ns;
                    self.engine.tick(ns, &mut self.actions);
                    self.obey();
                }
                _ => return,
            }
        }
    }

    fn submit(&mut self) {
        for at in 0..CLIENTS.len() {
            // A lease grants without end; the driver's queue has one.
            while self.submitted[at] < self.granted[at] + AHEAD
                && self.granted[at] < self.done[at] + UNDER_WAY_MAX
            {
                let ticket = self.submitted[at];
                self.submitted[at] += 1;
                let submission = Submission {
                    ticket,
                    kernel: self.kernels[at],
                    state: 0,
                    offered: 0,
                    grid_blocks: 1_024,
                    block_threads: 256,
                    shared_bytes: 0,
                    stream: 0,
                    completion: ticket as u32 + 1,
                    started: false,
                    limited_sms: 0,
                };
                let is_granted =
                    self.engine.submitted(self.now_ns, at as u32, submission, &mut self.actions);
                if is_granted {
                    self.start(at);
                }
                self.obey();
            }
        }
    }

    fn start(&mut self, at: usize) {
        if self.queue.is_empty() {
            self.done_ns = self.now_ns + CLIENTS[at].1;
        }
        self.granted[at] += 1;
        self.queue.push_back(at);
    }

    fn obey(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                // High priority does not wait.
                Action::Grant { client, .. } if client as usize >= CLIENTS.len() => {}
                Action::Grant { client, until } => {
                    let at = client as usize;
                    while self.granted[at] < until.min(self.submitted[at]) {
                        self.start(at);
                    }
                }
                Action::Decide { client, ticket, .. } => {
                    if self.granted[client as usize] == ticket {
                        self.start(client as usize);
                    }
                }
                Action::Yield { .. } | Action::SetWidth { .. } => {}
            }
        }
    }

    /// The first launch of the queue ends.
    fn end(&mut self, at: usize) {
        self.now_ns = self.done_ns.max(self.now_ns);
        self.queue.pop_front();
        let ns = CLIENTS[at].1;
        self.done[at] += 1;
        self.used_ns[at] += ns;
        let word = self.done[at] as u32;
        let measured = Some(Measured { completion: word, ns });
        if let Some(&next) = self.queue.front() {
            self.done_ns = self.now_ns + CLIENTS[next].1;
        }
        self.engine.progress(self.now_ns, at as u32, 0, word, measured, &mut self.actions);
        self.obey();
    }
}

/// GPU time of the first client over the second one's.
fn ratio(subject: &dyn Subject, sharing: SharingMode) -> Result<f64, Stopped> {
    let mut world = World::new(subject.start(None)?, sharing);
    let from_ns = world.now_ns + SETTLING_NS;
    world.run_until(from_ns);
    let before = world.used_ns;
    world.run_until(from_ns + COMPARED_NS);
    let used = |at: usize| (world.used_ns[at] - before[at]) as f64;
    Ok(used(0) / used(1))
}

/// Required only if the options say so: a policy need not know of weights.
pub fn by_weight(subject: &dyn Subject, options: &Options) -> Check {
    let name = "fair-by-weight";
    let modes = [SharingMode::Concurrent, SharingMode::TimeSliced];
    let [side_by_side, in_turns] = match modes.map(|sharing| ratio(subject, sharing)) {
        [Ok(first), Ok(second)] => [first, second],
        [Err(stopped), _] | [_, Err(stopped)] => return crate::checks::not_run(name, stopped),
    };
    let expected = f64::from(CLIENTS[0].0) / f64::from(CLIENTS[1].0);
    let is_fair = |ratio: f64| (ratio / expected - 1.0).abs() * 100.0 <= OFF_PERCENT_MAX;
    let detail = format!(
        "of two best-effort clients of weights {} and {} that always have launches ready the first gets {side_by_side:.2} \
         times the GPU time of the second, {in_turns:.2} where contexts take turns",
        CLIENTS[0].0, CLIENTS[1].0
    );
    let (outcome, advice) = match (is_fair(side_by_side) && is_fair(in_turns), options.fair) {
        (true, _) => (Outcome::Pass, ""),
        (false, false) => (Outcome::Info, ""),
        (false, true) => (
            Outcome::Fail,
            "hold who has had its share while others with credit wait: `clients.all` says what each was charged; \
             `policies/fairness` does it",
        ),
    };
    Check { name, outcome, detail, advice }
}
