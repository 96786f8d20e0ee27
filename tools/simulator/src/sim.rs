//! The loop: the earliest of what can happen happens, the engine hears of it, what it
//! answers reaches the programs and the device.

mod decided;
mod solo;

use crate::arrivals::{Arrivals, Random};
use crate::completions::{Completions, Report as Completed};
use crate::device::{Device, HIGH, Happened, LOW};
use crate::gpu::{
    SEEN_NS, SLICES_DRIVER_NS, SLICES_GOVERNED_NS, SMS, SharingMode, Transformable, work,
};
use crate::host::Host;
use crate::model::Model;
use crate::report::{BestEffort, High, Report, ms, over, percentile};
use crate::trace::{LAUNCH_LATENCY_NS, Trace};
use decided::decisions;
use solo::Solo;
use tally_engine::policy::{
    self, Class, ClientInfo, Decision, Form, Objective, Policy, forms_offered, launch_state,
};
use tally_engine::profile::{KernelKey, Transformation};
use tally_engine::{Action, EndedUnits, Engine, EngineConfig, Submission};

/// How long after a completion the core looks.
const LOOK_NS: u64 = 1_000;
/// How long a launch that waits spins before its thread sleeps.
const SPIN_NS: u64 = 1_000_000;
/// Iterations of the training before the first request, for the policy to learn from, unless a
/// [`Setup`] says how long.
const WARM_ITERATIONS: u64 = 5;

/// Stands for the ticket of a launch of an ungated client: it was not submitted.
const UNSUBMITTED: u64 = u64::MAX;

/// What is simulated, besides the programs and the policy.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// How the two programs share the GPU.
    pub sharing: SharingMode,
    /// Which best-effort kernels can be transformed.
    pub transformable: Transformable,
    /// What the inference needs of each request.
    pub slo: Option<Objective>,
    /// Length of the window in which requests arrive, s.
    pub seconds: f64,
    /// At most so much longer until all are served.
    pub overrun_seconds: f64,
    /// The training runs so long before the window, for the policy to learn from; `None`:
    /// five iterations.
    pub warm_up_seconds: Option<f64>,
    /// Seed of the random arrivals.
    pub seed: u64,
    /// A request is one CUDA graph; otherwise it launches as recorded.
    pub graph: bool,
    /// Figures of the machine and the core.
    pub model: Model,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            sharing: SharingMode::Timeslice,
            transformable: Transformable::Open,
            slo: None,
            seconds: 5.0,
            overrun_seconds: 5.0,
            warm_up_seconds: None,
            seed: 1,
            graph: true,
            model: Model::default(),
        }
    }
}

/// A kernel launch as the engine sees it.
#[derive(Clone, Copy)]
struct Known {
    kernel: Option<u32>,
    state: u32,
    offered: u32,
    blocks: u64,
    threads: u32,
    shared: u32,
}

/// Tickets of one client.
#[derive(Clone, Copy, Default)]
struct Tickets {
    next: u64,
    granted_until: u64,
}

struct Sim<'a> {
    setup: Setup,
    device: Device,
    engine: Option<Engine>,
    traces: [&'a Trace; 2],
    hosts: [Option<Host>; 2],
    known: [Vec<Known>; 2],
    /// What the core hears of the training's launches.
    completions: Completions,
    /// The launch that is being decided is to be measured.
    measured: bool,
    /// When the launch that is being decided was submitted.
    submitted_ns: u64,
    tickets: [Tickets; 2],
    actions: Vec<Action>,
    happened: Vec<Happened>,
    kernels: u64,
    now_ns: u64,
    // Requests.
    arrivals: &'a [u64],
    begun: usize,
    /// Start of the one in service.
    serving_since: Option<u64>,
    /// The same, until the engine is told of it.
    unit_since_ns: Option<u64>,
    free_ns: u64,
    service_ns: Vec<u64>,
    queued_ns: Vec<u64>,
    spread: f64,
    random: Random,
}

/// Run the inference beside the training, if there is one. Without a policy nothing is
/// scheduled: the GPU is shared as its driver does.
pub fn simulate(
    setup: &Setup,
    high: &Trace,
    low: Option<&Trace>,
    arrivals: &Arrivals,
    policy: Option<Box<dyn Policy + Send>>,
) -> Report {
    let high = if setup.graph { high.as_graph() } else { high.clone() };
    let plain = high.timed_in(SharingMode::Timeslice);
    let solo = Solo::new(&plain, &high, setup);
    let here = high.timed_in(setup.sharing);
    let low_plain_ns = low.map_or(1, |low| low.timed_in(SharingMode::Timeslice).period_ns);
    let low = low.map(|low| low.timed_in(setup.sharing));
    let ns = |seconds: f64| (seconds.max(0.0) * 1e9) as u64;
    let warm_ns = low
        .as_ref()
        .map_or(0, |low| setup.warm_up_seconds.map_or(WARM_ITERATIONS * low.period_ns, ns));
    let window_ns = ns(setup.seconds);
    let end_ns = warm_ns + window_ns + ns(setup.overrun_seconds);
    let mut times = arrivals.times(solo.ns, window_ns, setup.seed);
    times.iter_mut().for_each(|at| *at += warm_ns);
    let unscheduled = policy.is_none();
    let traces = [&here, low.as_ref().unwrap_or(&here)];
    let mut sim = Sim::new(*setup, traces, low.is_some(), &times, policy);
    sim.spread = solo.spread;
    sim.run_until(warm_ns, false);
    let before = sim.progress();
    sim.run_until(warm_ns + window_ns, false);
    // In iterations, which take so long alone.
    let share = (sim.progress() - before) * low_plain_ns as f64 / window_ns.max(1) as f64;
    sim.run_until(end_ns, true);
    sim.report(solo, end_ns, share, unscheduled)
}

impl<'a> Sim<'a> {
    fn new(
        setup: Setup,
        traces: [&'a Trace; 2],
        shared: bool,
        arrivals: &'a [u64],
        policy: Option<Box<dyn Policy + Send>>,
    ) -> Self {
        let governed = policy.is_some();
        let slices = if governed { SLICES_GOVERNED_NS } else { SLICES_DRIVER_NS };
        let linger_ns = if governed { setup.model.linger_ns } else { 0 };
        let model = Model { linger_ns, ..setup.model };
        let mut sim = Sim {
            setup,
            device: Device::new(setup.sharing, model, slices),
            engine: policy.map(|policy| {
                let sharing = match setup.sharing {
                    SharingMode::Timeslice => policy::SharingMode::TimeSliced,
                    SharingMode::Mps => policy::SharingMode::Concurrent,
                };
                let config = EngineConfig { sm_count: SMS, sharing, ..EngineConfig::default() };
                Engine::new(config, policy)
            }),
            traces,
            hosts: [
                Some(Host::new(traces[HIGH], false)),
                shared.then(|| Host::new(traces[LOW], true)),
            ],
            known: [Vec::new(), Vec::new()],
            completions: Completions::default(),
            measured: false,
            submitted_ns: 0,
            spread: 0.0,
            random: Random::new(!setup.seed),
            tickets: [Tickets::default(); 2],
            actions: Vec::new(),
            happened: Vec::new(),
            kernels: 0,
            now_ns: 0,
            arrivals,
            begun: 0,
            serving_since: None,
            unit_since_ns: None,
            free_ns: 0,
            service_ns: Vec::new(),
            queued_ns: Vec::new(),
        };
        let stretch = sim.hosts(LOW);
        if let Some(host) = &mut sim.hosts[LOW] {
            host.stretch = stretch;
        }
        sim.introduce();
        sim
    }

    /// Tell the engine of the clients and their kernels.
    fn introduce(&mut self) {
        for lane in [HIGH, LOW] {
            let Some(host) = &self.hosts[lane] else { continue };
            for launch in &host.program {
                let k = &self.traces[lane].kernels[launch.kernels.start];
                let graph = launch.kernels.len() > 1;
                let transformable =
                    lane == LOW && !graph && self.setup.transformable.allows(&k.name);
                let state = if graph { launch_state::GRAPH } else { 0 };
                let mut offered = 0;
                if transformable {
                    offered |= forms_offered::SLICED | forms_offered::PREEMPTIBLE;
                }
                let partition = self.setup.sharing == SharingMode::Mps && lane == LOW;
                // Blocks that fit the GPU at once may wait for each other.
                let fits = k.blocks() <= u64::from(k.blocks_per_sm()) * u64::from(SMS);
                if partition && !fits && self.setup.transformable != Transformable::None {
                    offered |= forms_offered::SM_LIMITED;
                }
                let key =
                    KernelKey { name: k.name.clone(), image: 1, grid: k.grid, block: k.block };
                let kernel = self.engine.as_mut().and_then(|e| {
                    let id = e.intern(&key)?;
                    if transformable {
                        e.set_transformation(
                            id,
                            Transformation::Ready { sliced: true, preemptible: true },
                        );
                    }
                    Some(id)
                });
                self.known[lane].push(Known {
                    kernel,
                    state,
                    offered,
                    blocks: k.blocks(),
                    threads: k.threads(),
                    shared: k.smem,
                });
            }
            if let Some(engine) = &mut self.engine {
                let class = [Class::High, Class::BestEffort][lane];
                let name = self.traces[lane].name.clone();
                let info = ClientInfo { id: lane as u32, class, name, labels: vec![] };
                engine.client_joined(0, info, 0, &mut self.actions);
                engine.set_objective(lane as u32, self.setup.slo);
            }
        }
        self.obey(0);
    }

    /// Go on until this time, or until every request is served if that is enough.
    fn run_until(&mut self, end_ns: u64, served_is_enough: bool) {
        loop {
            if served_is_enough && self.service_ns.len() == self.arrivals.len() {
                return;
            }
            match self.next_ns(self.now_ns) {
                Some(ns) if ns < end_ns => self.step(ns),
                _ => return,
            }
        }
    }

    /// How much slower a program's own part is for the other.
    fn hosts(&self, lane: usize) -> f64 {
        let beside = lane == LOW && self.hosts[LOW].is_some();
        1.0 + if beside { self.setup.model.hosts_permille as f64 / 1e3 } else { 0.0 }
    }

    /// Iterations of the training done.
    fn progress(&self) -> f64 {
        let trace = self.traces[LOW];
        let ns = self.hosts[LOW].as_ref().map_or(0, |h| h.progress_ns(trace));
        ns as f64 / trace.period_ns as f64
    }

    /// When the next request's service begins.
    fn begins_ns(&self) -> Option<u64> {
        let arrival = self.arrivals.get(self.begun).filter(|_| self.serving_since.is_none())?;
        Some(self.free_ns.max(*arrival))
    }

    fn next_ns(&self, now_ns: u64) -> Option<u64> {
        let launch = |lane: usize| self.hosts[lane].as_ref().and_then(|h| h.launch_ns);
        let engine = self.engine.as_ref().and_then(Engine::next_deadline_ns);
        // A deadline that a tick did not move is looked at again a little later.
        let engine = engine.map(|ns| ns.max(now_ns + LOOK_NS));
        let reports = self.completions.next_ns();
        [self.device.next_ns(), self.begins_ns(), launch(HIGH), launch(LOW), engine, reports]
            .into_iter()
            .flatten()
            .min()
    }

    fn step(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        let mut happened = std::mem::take(&mut self.happened);
        self.device.advance(now_ns, &mut happened);
        for what in happened.drain(..) {
            match what {
                Happened::Done { lane, launch, last } => {
                    self.kernels += 1;
                    if last {
                        self.ended(now_ns, lane, launch);
                    }
                }
                Happened::Yielded { lane, launch, turnaround_ns } => {
                    if let Some(engine) = &mut self.engine {
                        engine.launch_yielded(lane as u32, launch, turnaround_ns);
                    }
                }
            }
        }
        self.happened = happened;
        while let Some(report) = self.completions.take(now_ns) {
            let Completed { word, measured } = report;
            if let Some(engine) = &mut self.engine {
                engine.progress(now_ns, LOW as u32, 0, word, measured, &mut self.actions);
            }
            self.obey(now_ns);
        }
        if let Some(engine) = &mut self.engine
            && engine.next_deadline_ns().is_some_and(|ns| ns <= now_ns)
        {
            engine.tick(now_ns, &mut self.actions);
            self.obey(now_ns);
        }
        if self.begins_ns().is_some_and(|ns| ns <= now_ns) {
            self.begin(now_ns);
        }
        for lane in [HIGH, LOW] {
            if let Some(host) = &mut self.hosts[lane]
                && host.launch_ns.is_some_and(|ns| ns <= now_ns)
            {
                host.launch_ns = None;
                self.launch(now_ns, lane);
            }
        }
    }

    fn begin(&mut self, now_ns: u64) {
        self.serving_since = Some(now_ns);
        self.unit_since_ns = Some(now_ns);
        self.begun += 1;
        let delay = self.spread * (self.random.exponential() - std::f64::consts::LN_2);
        // Of a 99th percentile of more than 6.6 medians the least would be below nothing.
        let stretch = (1.0 + delay).max(0.0) * self.hosts(HIGH);
        if let Some(host) = &mut self.hosts[HIGH] {
            host.stretch = stretch;
            host.begin(now_ns);
        }
    }

    /// The program makes its next launch.
    fn launch(&mut self, now_ns: u64, lane: usize) {
        let Some(engine) = &mut self.engine else {
            return self.release(now_ns, lane, UNSUBMITTED, Decision::Run(0), 0);
        };
        if lane == HIGH {
            if let Some(since_ns) = self.unit_since_ns.take() {
                engine.unit_began(now_ns, HIGH as u32, since_ns, &mut self.actions);
            }
            engine.high_activity(now_ns, HIGH as u32, true, now_ns, &mut self.actions);
            self.obey(now_ns);
        }
        let Some(engine) = &mut self.engine else { return };
        let Some(host) = &mut self.hosts[lane] else { return };
        let tickets = &mut self.tickets[lane];
        // Of an ungated client nothing is submitted.
        if tickets.granted_until == u64::MAX {
            return self.release(now_ns, lane, UNSUBMITTED, Decision::Run(0), 0);
        }
        let known = self.known[lane][host.next];
        self.measured = known.kernel.is_some_and(|k| self.completions.is_sample(k as usize));
        let ticket = tickets.next;
        tickets.next += 1;
        let submission = Submission {
            ticket,
            kernel: known.kernel,
            state: known.state,
            offered: known.offered,
            grid_blocks: known.blocks,
            block_threads: known.threads,
            shared_bytes: known.shared,
            stream: 0,
            completion: (ticket as u32).wrapping_add(1),
            started: ticket < tickets.granted_until,
        };
        if submission.started {
            engine.submitted(now_ns, lane as u32, submission, &mut self.actions);
            self.release(now_ns, lane, ticket, Decision::Run(0), 0);
        } else {
            host.held = true;
            self.submitted_ns = now_ns;
            engine.submitted(now_ns, lane as u32, submission, &mut self.actions);
        }
        self.obey(now_ns);
    }

    /// A launch reaches the device.
    fn release(&mut self, now_ns: u64, lane: usize, launch: u64, form: Decision, cost_ns: u64) {
        let Some(host) = &mut self.hosts[lane] else { return };
        let kernels = host.program[host.next].kernels.clone();
        let (last, mut host_ns) = (kernels.end - 1, now_ns + cost_ns);
        if lane == LOW && launch != UNSUBMITTED {
            // A launch in another form is always measured.
            let is_measured = self.measured || !matches!(form, Decision::Run(_));
            let ready_ns = now_ns + cost_ns + LAUNCH_LATENCY_NS;
            self.completions.launched(launch, ready_ns, is_measured);
        }
        for index in kernels {
            let mut shape = work(&self.traces[lane].kernels[index], form, &self.setup.model);
            let parts_ns = shape.more_launches * self.setup.model.part_ns;
            host_ns += parts_ns;
            // A part cannot run before it was launched.
            shape.total_ns = shape.total_ns.max(parts_ns + shape.tail_ns);
            let ready_ns = now_ns + cost_ns + LAUNCH_LATENCY_NS;
            self.device
                .push(lane, crate::gpu::Work { launch, last: index == last, ready_ns, ..shape });
        }
        host.held = false;
        host.launched(host_ns);
    }

    /// A launch is done.
    fn ended(&mut self, now_ns: u64, lane: usize, launch: u64) {
        let Some(host) = &mut self.hosts[lane] else { return };
        host.ended(now_ns);
        let idle = host.idle();
        if launch != UNSUBMITTED {
            let is_waited_for = self.held(lane);
            if lane == LOW {
                self.completions.ended(now_ns, launch, is_waited_for);
            } else if let Some(engine) = &mut self.engine {
                let word = (launch as u32).wrapping_add(1);
                engine.progress(now_ns, lane as u32, 0, word, None, &mut self.actions);
            }
        }
        if lane == HIGH && idle {
            self.served(now_ns);
        }
        self.obey(now_ns);
    }

    fn served(&mut self, now_ns: u64) {
        let Some(since_ns) = self.serving_since.take() else { return };
        self.free_ns = now_ns + SEEN_NS;
        self.service_ns.push(self.free_ns - since_ns);
        self.queued_ns.push(self.free_ns - self.arrivals[self.begun - 1]);
        if let Some(engine) = &mut self.engine {
            let ended = EndedUnits { units: 1, took_ns: self.free_ns - since_ns };
            engine.units_ended(now_ns, HIGH as u32, ended, &mut self.actions);
            engine.high_activity(now_ns, HIGH as u32, false, now_ns, &mut self.actions);
        }
    }

    /// Do what the engine wants.
    fn obey(&mut self, now_ns: u64) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Grant { client, until } => {
                    let lane = client as usize;
                    self.tickets[lane].granted_until = until;
                    let next = self.tickets[lane].next;
                    if self.held(lane) && next <= until {
                        let cost_ns = self.decided_ns(now_ns);
                        self.release(now_ns, lane, next - 1, Decision::Run(0), cost_ns);
                    }
                }
                Action::Decide { client, ticket, decision, .. } => {
                    let lane = client as usize;
                    if self.held(lane) && ticket + 1 == self.tickets[lane].next {
                        let known =
                            self.known[lane][self.hosts[lane].as_ref().map_or(0, |h| h.next)];
                        let form = offered(known.offered, decision);
                        let cost_ns = self.decided_ns(now_ns);
                        self.release(now_ns, lane, ticket, form, cost_ns);
                    }
                }
                Action::Yield { client, yielded } => {
                    self.device.set_yield(client as usize, yielded);
                }
            }
        }
        self.actions = actions;
    }

    /// From a decision until its launch, on the program's side.
    fn decided_ns(&self, now_ns: u64) -> u64 {
        let asleep = self.submitted_ns + SPIN_NS < now_ns;
        self.setup.model.decided_ns + if asleep { self.setup.model.wake_ns } else { 0 }
    }

    fn held(&self, lane: usize) -> bool {
        self.hosts[lane].as_ref().is_some_and(|h| h.held)
    }

    fn report(mut self, solo: Solo, end_ns: u64, share: f64, unscheduled: bool) -> Report {
        let solo_ns = solo.ns;
        let mut now_ns = 0;
        let mut solo_queued: Vec<u64> = Vec::with_capacity(self.arrivals.len());
        for &arrival in self.arrivals {
            now_ns = arrival.max(now_ns) + solo_ns;
            solo_queued.push(now_ns - arrival);
        }
        let served = self.service_ns.len();
        self.queued_ns.extend(self.arrivals[served..].iter().map(|at| end_ns.saturating_sub(*at)));
        let service = [0.5, 0.99].map(|q| percentile(&mut self.service_ns, q));
        let within = self.setup.slo.map(|slo| {
            let kept = self.service_ns.iter().filter(|ns| **ns <= slo.slo_ns).count() as u64;
            over(kept, self.arrivals.len() as u64)
        });
        let queued = [0.5, 0.99].map(|q| percentile(&mut self.queued_ns, q));
        let alone = percentile(&mut solo_queued, 0.99);
        let low = self.hosts[LOW].as_ref();
        let decided = self.engine.as_ref().filter(|_| low.is_some()).map(decisions);
        let best_effort = low.map(|host| BestEffort {
            trace: self.traces[LOW].name.clone(),
            share,
            iterations: host.done / host.program.len() as u64,
            launched: host.made,
            done: host.done,
            in_flight: host.made - host.done,
        });
        Report {
            schema: 1,
            seconds: self.setup.seconds,
            seed: self.setup.seed,
            sharing: self.setup.sharing,
            transformable: self.setup.transformable,
            unscheduled,
            launches: self.hosts.iter().flatten().map(|h| h.done).sum(),
            kernels: self.kernels,
            context_changes: self.device.changes(),
            high_priority: High {
                trace: self.traces[HIGH].name.clone(),
                arrived: self.arrivals.len() as u64,
                served: served as u64,
                unserved: (self.arrivals.len() - served) as u64,
                solo_ms: ms(solo_ns),
                solo_p99_ms: ms(solo.p99_ns),
                slo_ms: self.setup.slo.map(|slo| ms(slo.slo_ns)),
                within,
                service_p50_ms: ms(service[0]),
                service_p99_ms: ms(service[1]),
                service_p50_over_solo: over(service[0], solo_ns),
                service_p99_over_solo: over(service[1], solo.p99_ns),
                queued_p50_ms: ms(queued[0]),
                queued_p99_ms: ms(queued[1]),
                solo_queued_p99_ms: ms(alone),
                queued_p99_over_solo: over(queued[1], alone),
            },
            best_effort,
            decisions: decided,
        }
    }
}

/// What is not on offer runs whole.
fn offered(offered: u32, decision: Decision) -> Decision {
    let needed = match decision.form().0 {
        Form::Whole => 0,
        Form::Sliced => forms_offered::SLICED,
        Form::Preemptible => forms_offered::PREEMPTIBLE,
        Form::SmLimited => forms_offered::SM_LIMITED,
    };
    if offered & needed == needed { decision } else { Decision::Run(0) }
}
