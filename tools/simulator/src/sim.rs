//! The loop: the earliest of what can happen happens, the engine hears of it, what it
//! answers reaches the programs and the device.

mod decided;
mod floors;
mod introduce;
mod outcome;
mod service;
mod solo;
mod timed;
mod tokens;

pub use service::Service;

use crate::completions::{Completions, Report as Completed};
use crate::device::{Device, Happened};
use crate::gpu::{
    RESERVE_SMS, SLICES_DRIVER_NS, SLICES_GOVERNED_NS, SLICES_SHARED_NS, SMS, SharingMode,
    Transformable, work,
};
use crate::host::Host;
use crate::model::Model;
use crate::report::{Floor, Report};
use crate::trace::{LAUNCH_LATENCY_NS, Trace};
use outcome::Window;
use service::{Serving, seed_of};
use solo::Solo;
use std::collections::BTreeSet;
use std::ops::Range;
use tally_contract::limits::RESERVES_MAX;
use tally_engine::policy::{self, Decision, Form, Policy, forms_offered};
use tally_engine::{Action, Engine, EngineConfig, OpenUnit, Submission};
use timed::Timed;

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
    /// How the programs share the GPU.
    pub sharing: SharingMode,
    /// Which best-effort kernels can be transformed.
    pub transformable: Transformable,
    /// Length of the window in which requests arrive, s.
    pub seconds: f64,
    /// At most so much longer until all are served.
    pub overrun_seconds: f64,
    /// The training runs so long before the window, for the policy to learn from; `None`:
    /// five iterations.
    pub warm_up_seconds: Option<f64>,
    /// Then the services serve so long beside it before anything is counted, for the policy to learn from.
    pub learn_seconds: f64,
    /// Seed of the random arrivals. Each service has random numbers of its own.
    pub seed: u64,
    /// Figures of the machine and the core.
    pub model: Model,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            sharing: SharingMode::Timeslice,
            transformable: Transformable::Open,
            seconds: 5.0,
            overrun_seconds: 5.0,
            warm_up_seconds: None,
            learn_seconds: 0.0,
            seed: 1,
            model: Model::default(),
        }
    }
}

impl Setup {
    /// SMs that best-effort programs find.
    fn best_effort_sms(&self) -> u32 {
        match self.sharing {
            SharingMode::Timeslice => SMS,
            SharingMode::Mps => {
                let percent = self.model.best_effort_percent.clamp(1, 100) as u32;
                (SMS * percent / 100).max(1)
            }
        }
    }

    /// Whether launches can be limited to some of the SMs: where programs find fewer, the driver makes no partitions.
    fn has_partitions(&self) -> bool {
        self.sharing == SharingMode::Mps
            && self.transformable != Transformable::None
            && self.best_effort_sms() == SMS
    }
}

/// A best-effort program, and what it is to get of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Tenant<'a> {
    /// What it runs, over and over.
    pub trace: &'a Trace,
    /// Its share relative to other best-effort programs (the label `weight`).
    pub weight: u32,
    /// Its floor, permille; 0: none.
    pub min_share_permille: u32,
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

#[derive(Clone, Copy, Default)]
struct Tickets {
    next: u64,
    granted_until: u64,
}

/// A program that takes part, and how far the core is with it. Its number is its lane and its client's id.
struct Program<'a> {
    trace: &'a Trace,
    weight: u32,
    min_share_permille: u32,
    host: Host,
    known: Vec<Known>,
    /// What the core hears of its launches, if it is best effort.
    completions: Completions,
    /// The launch that is being decided is to be measured.
    measured: bool,
    /// When the launch that is being decided was submitted.
    submitted_ns: u64,
    tickets: Tickets,
    /// SMs that its leased launches are limited to; 0: they are not.
    width_sms: u32,
    /// Kernels of which a launch was decided to be SM-limited.
    limited: BTreeSet<u32>,
    /// Its kernels take so many thousandths of what its trace says.
    permille: u64,
}

struct Sim<'a> {
    setup: Setup,
    device: Device,
    engine: Option<Timed>,
    /// The services, then the best-effort programs.
    programs: Vec<Program<'a>>,
    services: Vec<Serving<'a>>,
    actions: Vec<Action>,
    happened: Vec<Happened>,
    kernels: u64,
    now_ns: u64,
    /// In the window of arrivals.
    floors: Vec<Floor>,
}

/// Run the service beside the training, if there is one. Without a policy nothing is
/// scheduled: the GPU is shared as its driver does.
pub fn simulate(
    setup: &Setup,
    service: &Service<'_>,
    low: Option<&Trace>,
    policy: Option<Box<dyn Policy + Send>>,
) -> Report {
    let tenant = |trace| Tenant { trace, weight: 1, min_share_permille: 0 };
    let tenants: Vec<Tenant> = low.map(tenant).into_iter().collect();
    simulate_several(setup, std::slice::from_ref(service), &tenants, policy)
}

/// The same with any number of services and of best-effort programs. Of no program at all there is nothing to report.
pub fn simulate_several(
    setup: &Setup,
    services: &[Service<'_>],
    low: &[Tenant<'_>],
    policy: Option<Box<dyn Policy + Send>>,
) -> Report {
    let highs: Vec<Trace> = services.iter().map(Service::as_launched).collect();
    let here: Vec<Trace> = services.iter().map(|high| high.all_launched(setup.sharing)).collect();
    let lows: Vec<Trace> = low.iter().map(|low| low.trace.timed_in(setup.sharing)).collect();
    let longest_ns = lows.iter().map(|low| low.period_ns).max();
    let warm_ns =
        longest_ns.map_or(0, |longest| setup.warm_up_seconds.map_or(WARM_ITERATIONS * longest, ns));
    let counted_ns = warm_ns + ns(setup.learn_seconds);
    let window_ns = ns(setup.seconds);
    let counted = counted_ns..counted_ns + window_ns;
    let end_ns = counted.end + ns(setup.overrun_seconds);
    let mut serving = Vec::with_capacity(services.len());
    for (at, service) in services.iter().enumerate() {
        let solo = Solo::new(&highs[at], service, setup);
        let seed = seed_of(setup, at);
        let mut times = match service.decode {
            Some(_) => Vec::new(),
            None => service.arrivals.times(solo.ns, counted.end - warm_ns, seed),
        };
        times.iter_mut().for_each(|at_ns| *at_ns += warm_ns);
        let trace = &here[at];
        serving.push(Serving::new(service, trace, solo, times, seed, warm_ns, counted.clone()));
    }
    let unscheduled = policy.is_none();
    let traces: Vec<Tenant> =
        lows.iter().zip(low).map(|(trace, low)| Tenant { trace, ..*low }).collect();
    let mut sim = Sim::new(*setup, serving, &traces, policy);
    sim.run_until(counted.start, false);
    let (before, had) = (sim.progress(), sim.had());
    sim.run_until(counted.end, false);
    sim.floors = sim.floors_since(&had);
    // In iterations, which take so long alone.
    let plain_ns = low.iter().map(|low| low.trace.timed_in(SharingMode::Timeslice).period_ns);
    let window = Window::new(window_ns, &before, &sim.progress(), plain_ns);
    sim.run_until(end_ns, true);
    sim.report(end_ns, &window, unscheduled)
}

fn ns(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1e9) as u64
}

impl<'a> Sim<'a> {
    fn new(
        setup: Setup,
        services: Vec<Serving<'a>>,
        low: &[Tenant<'a>],
        policy: Option<Box<dyn Policy + Send>>,
    ) -> Self {
        let governed = policy.is_some();
        let slices = match (governed, low.len()) {
            (false, _) => SLICES_DRIVER_NS,
            (true, 0..=1) => SLICES_GOVERNED_NS,
            (true, _) => SLICES_SHARED_NS,
        };
        // Services do not linger while there is no best effort.
        let lingers = governed && !low.is_empty();
        let linger_ns = if lingers { setup.model.linger_ns } else { 0 };
        let model = Model { linger_ns, ..setup.model };
        let program = |tenant: &Tenant<'a>, repeats| Program {
            trace: tenant.trace,
            weight: tenant.weight,
            min_share_permille: tenant.min_share_permille,
            host: Host::new(tenant.trace, repeats),
            known: Vec::new(),
            completions: Completions::default(),
            measured: false,
            submitted_ns: 0,
            tickets: Tickets::default(),
            width_sms: 0,
            limited: BTreeSet::new(),
            permille: 1_000,
        };
        let high = |serving: &Serving<'a>| Tenant {
            trace: serving.trace,
            weight: 1,
            min_share_permille: 0,
        };
        let highs = services.iter().map(|serving| program(&high(serving), false));
        let programs: Vec<Program<'a>> =
            highs.chain(low.iter().map(|low| program(low, true))).collect();
        let mut sim = Sim {
            setup,
            device: Device::new(setup.sharing, model, slices, services.len(), programs.len()),
            engine: policy.map(|policy| {
                let sharing = match setup.sharing {
                    SharingMode::Timeslice => policy::SharingMode::TimeSliced,
                    SharingMode::Mps => policy::SharingMode::Concurrent,
                };
                let mut reserve_sms = [0; RESERVES_MAX];
                if setup.has_partitions() {
                    reserve_sms[..RESERVE_SMS.len()].copy_from_slice(&RESERVE_SMS);
                }
                let config =
                    EngineConfig { sm_count: SMS, sharing, reserve_sms, ..EngineConfig::default() };
                Timed::new(Engine::new(config, policy))
            }),
            programs,
            services,
            actions: Vec::new(),
            happened: Vec::new(),
            kernels: 0,
            now_ns: 0,
            floors: Vec::new(),
        };
        if governed {
            sim.device.prefer_high();
        }
        let stretch = sim.stretch();
        for lane in sim.lows() {
            sim.programs[lane].host.stretch = stretch;
        }
        sim.introduce();
        sim
    }

    /// Go on until this time, or until every request is served if that is enough.
    fn run_until(&mut self, end_ns: u64, served_is_enough: bool) {
        loop {
            if served_is_enough && self.services.iter().all(Serving::is_done) {
                return;
            }
            match self.next_ns(self.now_ns) {
                Some(ns) if ns < end_ns => self.step(ns),
                _ => return,
            }
        }
    }

    /// Lanes of the best-effort programs.
    fn lows(&self) -> Range<usize> {
        self.services.len()..self.programs.len()
    }

    fn is_high(&self, lane: usize) -> bool {
        lane < self.services.len()
    }

    /// How much slower a best-effort program's own part is beside another program.
    fn stretch(&self) -> f64 {
        let is_beside = self.programs.len() > 1;
        1.0 + if is_beside { self.setup.model.hosts_permille as f64 / 1e3 } else { 0.0 }
    }

    fn next_ns(&self, now_ns: u64) -> Option<u64> {
        let launches = self.programs.iter().filter_map(|p| p.host.launch_ns);
        let engine = self.engine.as_ref().and_then(Timed::next_deadline_ns);
        // A deadline that a tick did not move is looked at again a little later.
        let engine = engine.map(|ns| ns.max(now_ns + LOOK_NS));
        let reports = self.programs.iter().filter_map(|p| p.completions.next_ns());
        let requests = self.services.iter().filter_map(Serving::begins_ns);
        let others = [self.device.next_ns(), engine].into_iter().flatten();
        others.chain(requests).chain(launches).chain(reports).min()
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
                        engine.launch_yielded(now_ns, lane as u32, launch, turnaround_ns);
                    }
                }
            }
        }
        self.happened = happened;
        for lane in self.lows() {
            while let Some(report) = self.programs[lane].completions.take(now_ns) {
                let Completed { word, measured } = report;
                if let Some(engine) = &mut self.engine {
                    engine.progress(now_ns, lane as u32, 0, word, measured, &mut self.actions);
                }
                self.obey(now_ns);
            }
        }
        if let Some(engine) = &mut self.engine
            && engine.next_deadline_ns().is_some_and(|ns| ns <= now_ns)
        {
            engine.tick(now_ns, &mut self.actions);
            self.obey(now_ns);
        }
        for (serving, program) in self.services.iter_mut().zip(&mut self.programs) {
            if serving.begins_ns().is_some_and(|ns| ns <= now_ns)
                && let Some(begun) = serving.begin(now_ns, program.host.program.len())
            {
                (program.host.stretch, program.permille) = (begun.stretch, begun.permille);
                program.host.begin(now_ns, begun.launches);
            }
        }
        for lane in 0..self.programs.len() {
            let host = &mut self.programs[lane].host;
            if host.launch_ns.is_some_and(|ns| ns <= now_ns) {
                host.launch_ns = None;
                self.launch(now_ns, lane);
            }
        }
    }

    /// The program makes its next launch.
    fn launch(&mut self, now_ns: u64, lane: usize) {
        let Some(engine) = &mut self.engine else {
            return self.release(now_ns, lane, UNSUBMITTED, Decision::Run(0), 0);
        };
        if let Some(serving) = self.services.get_mut(lane) {
            if let Some(since_ns) = serving.unit_since_ns.take() {
                let open = OpenUnit { since_ns, is_token: serving.is_token() };
                engine.unit_began(now_ns, lane as u32, open, &mut self.actions);
            }
            engine.high_activity(now_ns, lane as u32, true, now_ns, &mut self.actions);
            self.obey(now_ns);
        }
        let Some(engine) = &mut self.engine else { return };
        let program = &mut self.programs[lane];
        // Of an ungated client nothing is submitted.
        if program.tickets.granted_until == u64::MAX {
            return self.release(now_ns, lane, UNSUBMITTED, Decision::Run(0), 0);
        }
        let known = program.known[program.host.next];
        program.measured = known.kernel.is_some_and(|k| program.completions.is_sample(k as usize));
        let ticket = program.tickets.next;
        program.tickets.next += 1;
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
            started: ticket < program.tickets.granted_until,
            limited_sms: 0,
        };
        if submission.started {
            let is_limited = program.width_sms > 0
                && known.offered & forms_offered::SM_LIMITED != 0
                && known.kernel.is_some_and(|kernel| program.limited.contains(&kernel));
            let limited_sms = if is_limited { program.width_sms } else { 0 };
            let submission = Submission { limited_sms, ..submission };
            engine.submitted(now_ns, lane as u32, submission, &mut self.actions);
            let form = match limited_sms {
                0 => Decision::Run(0),
                sms => Decision::SmLimited(sms),
            };
            self.release(now_ns, lane, ticket, form, 0);
        } else {
            program.host.held = true;
            program.submitted_ns = now_ns;
            engine.submitted(now_ns, lane as u32, submission, &mut self.actions);
        }
        self.obey(now_ns);
    }

    /// A launch reaches the device.
    fn release(&mut self, now_ns: u64, lane: usize, launch: u64, form: Decision, cost_ns: u64) {
        let is_high = self.is_high(lane);
        let program = &mut self.programs[lane];
        let host = &mut program.host;
        let kernels = host.program[host.next].kernels.clone();
        let (last, mut host_ns) = (kernels.end - 1, now_ns + cost_ns);
        if !is_high && launch != UNSUBMITTED {
            // A launch in another form is always measured.
            let is_measured = program.measured || !matches!(form, Decision::Run(_));
            let ready_ns = now_ns + cost_ns + LAUNCH_LATENCY_NS;
            program.completions.launched(launch, ready_ns, is_measured);
        }
        for index in kernels {
            let sms = if is_high { SMS } else { self.setup.best_effort_sms() };
            let kernel = &program.trace.kernels[index];
            let mut shape = work(kernel, form, &self.setup.model, sms).scaled(program.permille);
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

    fn ended(&mut self, now_ns: u64, lane: usize, launch: u64) {
        let host = &mut self.programs[lane].host;
        host.ended(now_ns);
        let idle = host.idle();
        let is_high = self.is_high(lane);
        if launch != UNSUBMITTED {
            let is_waited_for = self.held(lane);
            if !is_high {
                self.programs[lane].completions.ended(now_ns, launch, is_waited_for);
            } else if let Some(engine) = &mut self.engine {
                let word = (launch as u32).wrapping_add(1);
                engine.progress(now_ns, lane as u32, 0, word, None, &mut self.actions);
            }
        }
        if is_high && idle {
            self.served(now_ns, lane);
        }
        self.obey(now_ns);
    }

    /// Do what the engine wants.
    fn obey(&mut self, now_ns: u64) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Grant { client, until } => {
                    let lane = client as usize;
                    let Some(program) = self.programs.get_mut(lane) else { continue };
                    program.tickets.granted_until = until;
                    let next = program.tickets.next;
                    if self.held(lane) && next <= until {
                        let cost_ns = self.decided_ns(lane, now_ns);
                        self.release(now_ns, lane, next - 1, Decision::Run(0), cost_ns);
                    }
                }
                Action::Decide { client, ticket, decision, .. } => {
                    let lane = client as usize;
                    if self.held(lane) && ticket + 1 == self.programs[lane].tickets.next {
                        let program = &self.programs[lane];
                        let known = program.known[program.host.next];
                        let form = offered(known.offered, decision);
                        if let (Decision::SmLimited(_), Some(kernel)) = (form, known.kernel) {
                            self.programs[lane].limited.insert(kernel);
                        }
                        let cost_ns = self.decided_ns(lane, now_ns);
                        self.release(now_ns, lane, ticket, form, cost_ns);
                    }
                }
                Action::SetWidth { client, sms } => {
                    if let Some(program) = self.programs.get_mut(client as usize) {
                        program.width_sms = sms;
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
    fn decided_ns(&self, lane: usize, now_ns: u64) -> u64 {
        let asleep = self.programs[lane].submitted_ns + SPIN_NS < now_ns;
        self.setup.model.decided_ns + if asleep { self.setup.model.wake_ns } else { 0 }
    }

    fn held(&self, lane: usize) -> bool {
        self.programs.get(lane).is_some_and(|p| p.host.held)
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
