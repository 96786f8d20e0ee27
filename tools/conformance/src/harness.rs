//! A core in miniature: keeps clients, kernels, time, timers and leases, and calls a
//! policy as the engine would. It is less strict than the engine where that makes a
//! harder test: it offers launches whose figures no engine would ever show together.

use crate::stream::{KERNELS, Shape, Step};
use crate::subject::Instance;
use std::collections::{BTreeMap, BTreeSet};
use tally_contract::limits::TIMERS_MAX;
use tally_contract::objective::{SLO_NS, SLO_PERCENTILE_DEFAULT};
use tally_engine::policy::{
    Answer, Class, ClientId, ClientInfo, ClientView, Command, Completion, Context, Decision, Event,
    Fault, Form, KernelId, Launch, NEVER, NO_KERNEL, Objective, Policy, ServiceView, TokensView,
    UnitProfile, Usage, forms_offered, launch_state,
};
use tally_engine::profile::{Demand, KernelKey, Transformation};
use tally_wasm_host::Saved;

/// Launches remembered until they end.
const RUNNING_MAX: usize = 256;
/// The floor of every fourth client, unless that is high priority.
const FLOOR_PERMILLE: u32 = 200;
const CLIENTS_MAX: usize = 32;

/// One call and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// What `decide` answered; `None` for an event.
    pub decision: Option<Decision>,
    /// What it asked for meanwhile.
    pub commands: Vec<Command>,
}

/// What was seen so far.
#[derive(Debug, Default)]
pub struct Seen {
    pub decide_fuel: Vec<u64>,
    pub event_fuel: Vec<u64>,
    /// High-priority launches that it held.
    pub high_held: u64,
    /// Decisions for a form that was not on offer.
    pub degraded: u64,
    /// Commands about clients that are not there.
    pub strays: u64,
    /// Timers beyond what may be pending.
    pub timers_dropped: u64,
    /// Commands beyond what one call may ask for.
    pub commands_dropped: u64,
}

struct Running {
    client: ClientId,
    kernel: KernelId,
    form: Form,
    argument: u32,
    predicted_ns: u64,
}

/// Stands for the engine: see the module's documentation.
pub struct Harness {
    policy: Box<dyn Instance>,
    context: Context,
    pub now_ns: u64,
    /// What the policy did so far.
    pub seen: Seen,
    /// Every call, if it is kept.
    turns: Option<Vec<Turn>>,
    next_client: ClientId,
    high_active: bool,
    high_idle_since_ns: Option<u64>,
    timers: BTreeMap<u64, u64>,
    leases: BTreeMap<ClientId, u32>,
    /// Clients whose launches are not decided.
    ungated: BTreeSet<ClientId>,
    /// GPU time that each has used.
    used_ns: BTreeMap<ClientId, u64>,
    /// Ask about high-priority launches in spite of it.
    asks_about_high: bool,
    running: Vec<Running>,
}

impl Harness {
    /// A core whose policy was just loaded, with kernels of every kind known to it.
    pub fn new(mut policy: Box<dyn Instance>) -> Self {
        let mut context = Context::default();
        for n in 0..KERNELS {
            known_kernel(&mut context, n);
        }
        Policy::start(&mut *policy, &mut context);
        let mut harness = Harness {
            policy,
            context,
            now_ns: 1_000_000_000,
            seen: Seen::default(),
            turns: None,
            next_client: 0,
            high_active: false,
            high_idle_since_ns: None,
            timers: BTreeMap::new(),
            leases: BTreeMap::new(),
            ungated: BTreeSet::new(),
            used_ns: BTreeMap::new(),
            asks_about_high: false,
            running: Vec::new(),
        };
        harness.carry_out();
        harness
    }

    /// Have all of this happen and keep every call with its answer. A fault counts as an
    /// answer, and the core goes on.
    pub fn record(&mut self, steps: &[Step]) -> Vec<Turn> {
        self.turns = Some(Vec::new());
        for step in steps {
            let _ = self.step(step);
        }
        self.turns.take().unwrap_or_default()
    }

    /// What the policy knows, if it keeps that.
    pub fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        self.policy.snapshot()
    }

    /// Ask about high-priority launches as if their clients were gated. A core does so
    /// only if the policy gated them, for which it needs the capability to.
    pub fn asking_about_high(mut self, asks: bool) -> Self {
        self.asks_about_high = asks;
        self
    }

    /// The policy, for its figures.
    pub fn policy(&self) -> &dyn Instance {
        &*self.policy
    }

    /// Have something happen.
    ///
    /// # Errors
    /// The policy's fault, if a call failed.
    pub fn step(&mut self, step: &Step) -> Result<(), Fault> {
        match step {
            Step::Join { high, labels, name } => {
                self.join(*high, usize::from(*labels), usize::from(*name)).map(drop)
            }
            Step::Leave(pick) => match self.pick(*pick) {
                Some(id) => self.leave(id),
                None => Ok(()),
            },
            Step::High { busy } => self.high(*busy),
            Step::Advance(ns) => self.advance(*ns),
            Step::NextTimer => {
                let next = self.timers.values().min().copied();
                self.advance(next.map_or(0, |due| due.saturating_sub(self.now_ns)))
            }
            Step::Launch(shape) => self.launch_shape(shape),
            Step::Done { pick, measured_ns } => self.end_one(usize::from(*pick), *measured_ns),
            Step::StrangeDone { kernel, measured_ns } => {
                let Some(&client) = self.context.world.clients.keys().next() else {
                    return Ok(());
                };
                let running = Running {
                    client,
                    kernel: *kernel,
                    form: Form::Whole,
                    argument: 0,
                    predicted_ns: 0,
                };
                self.completed(&running, *measured_ns)
            }
        }
    }

    /// A client registers.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn join(&mut self, high: bool, labels: usize, name: usize) -> Result<ClientId, Fault> {
        if self.context.world.clients.len() >= CLIENTS_MAX {
            let first = self.context.world.clients.keys().next().copied();
            first.map_or(Ok(()), |id| self.leave(id))?;
        }
        let id = self.next_client;
        self.next_client += 1;
        let class = if high { Class::High } else { Class::BestEffort };
        let labels = (0..labels).map(|n| (format!("key{n}"), format!("value {n}"))).collect();
        let info = ClientInfo { id, class, name: "n".repeat(name), labels };
        let mut view = ClientView::from(info.clone());
        if !high && id % 4 == 2 {
            view.usage.min_share_permille = FLOOR_PERMILLE;
        }
        // It always has work.
        view.usage.backlogged_since_ns = self.now_ns;
        self.context.world.clients.insert(id, view);
        if high {
            self.ungated.insert(id);
        }
        self.tell(&Event::Joined(info)).map(|()| id)
    }

    /// It goes, with what it had running.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn leave(&mut self, id: ClientId) -> Result<(), Fault> {
        self.context.world.clients.remove(&id);
        self.leases.remove(&id);
        self.ungated.remove(&id);
        self.used_ns.remove(&id);
        self.running.retain(|running| running.client != id);
        self.tell(&Event::Left(id))
    }

    /// High-priority work appears or ends.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn high(&mut self, busy: bool) -> Result<(), Fault> {
        if busy == self.high_active {
            return Ok(());
        }
        self.high_active = busy;
        if !busy {
            self.high_idle_since_ns = Some(self.now_ns);
        }
        let first = self.context.world.clients.values().find(|c| c.info.class == Class::High);
        if let Some(client) = first.map(|c| c.info.id) {
            self.unit(client, busy)?;
        }
        self.tell(if busy { &Event::HighStarted } else { &Event::HighEnded })
    }

    /// A high-priority client's unit begins or ends. Every other objective is one that nobody keeps.
    fn unit(&mut self, client: ClientId, begins: bool) -> Result<(), Fault> {
        let (now_ns, view) = (self.now_ns, self.context.world.clients.get_mut(&client));
        let Some(service) = view.and_then(|view| view.service.as_mut()) else { return Ok(()) };
        if begins {
            let slo_ns = if service.units.is_multiple_of(2) { SLO_NS[0] } else { SLO_NS[1] };
            service.objective = Some(Objective { slo_ns, percentile: SLO_PERCENTILE_DEFAULT });
            service.open_since_ns = now_ns;
            let deadline_ns = service.deadline_ns();
            return self.tell(&Event::UnitBegan { client, since_ns: now_ns, deadline_ns });
        }
        let took_ns = now_ns.saturating_sub(service.open_since_ns);
        service.open_since_ns = NEVER;
        service.units += 1;
        (service.recent, service.p50_ns, service.p99_ns) = (1, took_ns, took_ns);
        service.tokens = after_unit(service, took_ns);
        if UnitProfile::is_of(service.units - 1) {
            let launches = [(took_ns / 2, 1 + service.units as u32 % 132); 2];
            let units = service.profile.map_or(0, |profile| profile.units) + 1;
            let profile = UnitProfile::new(&launches, &mut vec![took_ns / 8]);
            service.profile = Some(UnitProfile { units, ..profile });
        }
        self.tell(&Event::UnitsEnded { client, units: 1, took_ns })
    }

    /// Time passes, and timers fire on the way.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn advance(&mut self, ns: u64) -> Result<(), Fault> {
        let until_ns = self.now_ns.saturating_add(ns);
        // A timer may set itself again for at once: no more than so many.
        for _ in 0..TIMERS_MAX {
            let next = self.timers.iter().map(|(&token, &due)| (due, token)).min();
            let Some((due, token)) = next.filter(|(due, _)| *due <= until_ns) else { break };
            self.timers.remove(&token);
            self.now_ns = self.now_ns.max(due);
            self.tell(&Event::Timer(token))?;
        }
        self.now_ns = until_ns;
        Ok(())
    }

    /// When the next timer fires.
    pub fn next_timer_ns(&self) -> Option<u64> {
        self.timers.values().min().copied()
    }

    fn pick(&self, pick: u8) -> Option<ClientId> {
        let clients = &self.context.world.clients;
        let at = usize::from(pick).checked_rem(clients.len())?;
        clients.keys().nth(at).copied()
    }

    fn launch_shape(&mut self, shape: &Shape) -> Result<(), Fault> {
        let Some(client) = self.pick(shape.pick) else { return Ok(()) };
        self.launch(client, shape).map(drop)
    }

    /// The launch as the policy is asked about it.
    fn asked(&self, client: ClientId, shape: &Shape) -> Launch {
        let clients = &self.context.world.clients;
        let class = clients.get(&client).map_or(Class::BestEffort, |view| view.info.class);
        let kernel = if shape.kernel < KERNELS { shape.kernel } else { NO_KERNEL };
        let predicted_ns = match self.context.world.profiles.predicted_ns(kernel) {
            0 => shape.predicted_ns,
            measured_ns => measured_ns,
        };
        let high_idle_ns = match (self.high_active, self.high_idle_since_ns) {
            (true, _) => 0,
            (false, None) => NEVER,
            (false, Some(since)) => self.now_ns.saturating_sub(since),
        };
        let mut state = shape.state;
        if self.high_active {
            state |= launch_state::HIGH_ACTIVE;
        }
        if clients.get(&client).is_some_and(|view| view.usage.min_share_permille > 0) {
            state |= launch_state::MIN_SHARE;
        }
        if shape.waited_ns > 0 {
            state |= launch_state::OFFERED_AGAIN;
        }
        let high = clients.values().filter(|view| view.info.class == Class::High).count();
        Launch {
            now_ns: self.now_ns,
            client,
            class,
            kernel,
            state,
            offered: shape.offered,
            grid_blocks: shape.grid_blocks,
            block_threads: shape.block_threads,
            shared_bytes: shape.shared_bytes,
            predicted_ns,
            waited_ns: shape.waited_ns,
            in_flight_ns: shape.in_flight_ns,
            high_idle_ns,
            high_clients: high as u32,
            waiting_clients: (clients.len() - high).max(1) as u32,
            stream: shape.stream,
            sm_count: shape.sm_count,
        }
    }

    /// Offer a launch. One that a lease covers, or of an ungated client, is granted unasked, which answers `None`.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn launch(&mut self, client: ClientId, shape: &Shape) -> Result<Option<Decision>, Fault> {
        let launch = self.asked(client, shape);
        if let Some(left) = self.leases.get_mut(&client).filter(|left| **left > 0) {
            *left -= 1;
            self.grant(&launch, Decision::Run(0));
            return Ok(None);
        }
        let asked_anyway = self.asks_about_high && launch.class == Class::High;
        if self.ungated.contains(&client) && !asked_anyway {
            self.grant(&launch, Decision::Run(0));
            return Ok(None);
        }
        self.refresh_usage();
        // The policy has no widths before its first decision, as in the engine.
        self.context.world.sm_count = launch.sm_count;
        let answer = self.policy.decide(&launch, &mut self.context);
        let Answer { decision, .. } = self.after_call(answer, true)?;
        if let Some(turn) = self.turns.as_mut().and_then(|turns| turns.last_mut()) {
            turn.decision = Some(decision);
        }
        if !offered(&launch, decision) {
            self.seen.degraded += 1;
        }
        match decision {
            Decision::Hold(_) | Decision::HoldUntilCompletion(_) => {
                self.seen.high_held += u64::from(launch.class == Class::High);
            }
            Decision::Run(lease) => {
                self.leases.insert(client, lease);
                self.grant(&launch, decision);
            }
            _ => self.grant(&launch, decision),
        }
        Ok(Some(decision))
    }

    fn grant(&mut self, launch: &Launch, decision: Decision) {
        let (form, argument) = decision.form();
        if self.running.len() < RUNNING_MAX {
            self.running.push(Running {
                client: launch.client,
                kernel: launch.kernel,
                form,
                argument,
                predicted_ns: launch.predicted_ns,
            });
        }
    }

    /// A launch that was granted ends, if there is one.
    ///
    /// # Errors
    /// The policy's fault.
    pub fn end_one(&mut self, pick: usize, measured_ns: u64) -> Result<(), Fault> {
        let Some(at) = pick.checked_rem(self.running.len()) else { return Ok(()) };
        let running = self.running.swap_remove(at);
        let profiles = &mut self.context.world.profiles;
        // What a GPU could report; the event carries the number as it is.
        let plausible_ns = measured_ns.min(60_000_000_000);
        if running.kernel < KERNELS {
            match running.form {
                Form::Whole => profiles.record(running.kernel, plausible_ns),
                form => profiles.record_form(running.kernel, form, running.argument, plausible_ns),
            }
        }
        self.completed(&running, measured_ns)
    }

    fn completed(&mut self, running: &Running, measured_ns: u64) -> Result<(), Fault> {
        let used_ns = self.used_ns.entry(running.client).or_default();
        *used_ns = used_ns.saturating_add(measured_ns);
        self.tell(&Event::Completed(Completion {
            client: running.client,
            kernel: running.kernel,
            form: running.form,
            argument: running.argument,
            predicted_ns: running.predicted_ns,
            measured_ns: Some(measured_ns).filter(|ns| *ns > 0),
            charged_ns: measured_ns.max(1),
        }))
    }

    fn tell(&mut self, event: &Event) -> Result<(), Fault> {
        if !self.policy.subscriptions().has(event.kind()) {
            return Ok(());
        }
        self.refresh_usage();
        let answer = self.policy.on_event(self.now_ns, event, &mut self.context);
        self.after_call(answer, false)
    }

    /// What the policy may read of its clients.
    fn refresh_usage(&mut self) {
        for (id, view) in &mut self.context.world.clients {
            let running = self.running.iter().filter(|running| running.client == *id);
            let charged_ns = self.used_ns.get(id).copied().unwrap_or(0);
            view.usage = Usage {
                waiting_since_ns: NEVER,
                in_flight: running.clone().count() as u32,
                in_flight_ns: running.fold(0, |all, one| all.saturating_add(one.predicted_ns)),
                measured_ns: charged_ns,
                charged_ns,
                ..view.usage
            };
        }
    }

    fn after_call<T>(&mut self, answer: Result<T, Fault>, decide: bool) -> Result<T, Fault> {
        if let (Ok(_), Some(fuel)) = (&answer, self.policy.call_fuel()) {
            let spent = &mut self.seen;
            let list = if decide { &mut spent.decide_fuel } else { &mut spent.event_fuel };
            list.push(fuel);
        }
        let commands = self.carry_out();
        if let Some(turns) = &mut self.turns {
            turns.push(Turn { decision: None, commands });
        }
        answer
    }

    /// Do what it asked for, as the engine would.
    fn carry_out(&mut self) -> Vec<Command> {
        let commands: Vec<Command> = self.context.commands.drain().collect();
        self.seen.commands_dropped = self.context.commands.dropped;
        for command in &commands {
            let about = match *command {
                Command::SetTimer { delay_ns, token } => {
                    if self.timers.len() < TIMERS_MAX || self.timers.contains_key(&token) {
                        self.timers.insert(token, self.now_ns.saturating_add(delay_ns));
                    } else {
                        self.seen.timers_dropped += 1;
                    }
                    None
                }
                Command::RevokeLease(client) => {
                    self.leases.remove(&client);
                    Some(client)
                }
                Command::SetUngated { client, ungated } => {
                    if ungated && self.context.world.clients.contains_key(&client) {
                        self.ungated.insert(client);
                    } else {
                        self.ungated.remove(&client);
                    }
                    Some(client)
                }
                Command::Reset => {
                    self.timers.clear();
                    self.leases.clear();
                    let clients = self.context.world.clients.values();
                    let high = clients.filter(|view| view.info.class == Class::High);
                    self.ungated = high.map(|view| view.info.id).collect();
                    None
                }
                Command::SetWindow { client, .. }
                | Command::SetWidth { client, .. }
                | Command::SetYield { client, .. }
                | Command::SetAutoYield { client, .. } => Some(client),
            };
            let stray = about.is_some_and(|id| !self.context.world.clients.contains_key(&id));
            self.seen.strays += u64::from(stray);
        }
        commands
    }
}

/// Whether the launch could be run in the form decided for.
fn offered(launch: &Launch, decision: Decision) -> bool {
    let any = |bits: u32| launch.offered & bits != 0;
    match decision.form().0 {
        Form::Whole => true,
        Form::Sliced => any(forms_offered::SLICED | forms_offered::PREPARABLE),
        Form::Preemptible => any(forms_offered::PREEMPTIBLE | forms_offered::PREPARABLE),
        Form::SmLimited => any(forms_offered::SM_LIMITED | forms_offered::PREPARABLE),
    }
}

/// A service's tokens after a unit of four of them. Without an objective for tokens after every fourth unit.
fn after_unit(service: &ServiceView, took_ns: u64) -> Option<TokensView> {
    let before = service.tokens.unwrap_or(TokensView::new(SLO_NS[0]));
    let token_ns = took_ns / 4;
    let within = if token_ns <= before.tpot_ns { 4 } else { 0 };
    (!service.units.is_multiple_of(4)).then_some(TokensView {
        count: before.count + 4,
        within: before.within + u64::from(within),
        recent: 4,
        recent_within: within,
        p50_ns: token_ns,
        p99_ns: token_ns,
        ..before
    })
}

/// Kernel `n`: measured or not, short or long, transformed or not.
fn known_kernel(context: &mut Context, n: u32) {
    let key = KernelKey {
        name: format!("kernel_{n}"),
        image: u128::from(n % 5),
        grid: [1 + n * 37, 1, 1],
        block: [32 << (n % 6), 1, 1],
    };
    let Some(id) = context.world.profiles.intern(&key) else { return };
    let mean_ns = 2_000u64 << (n % 16);
    for _ in 0..n % 4 * 20 {
        context.world.profiles.record(id, mean_ns);
    }
    let transformation = match n % 6 {
        0 => Transformation::Unknown,
        1 => Transformation::Preparable,
        2 => Transformation::Preparing,
        3 | 4 => Transformation::Ready { sliced: true, preemptible: n % 6 == 4 },
        _ => Transformation::WholeOnly("it synchronises its blocks"),
    };
    context.world.profiles.set_transformation(id, transformation);
    context.world.profiles.set_sm_count(132);
    context.world.reserve_sms = vec![16, 32, 64, 96];
    let demand = Demand { blocks_per_sm: n as u16 % 5, registers: n as u16 % 256 };
    context.world.profiles.set_demand(id, demand);
    if n % 6 == 4 {
        context.world.profiles.record_form(id, Form::Preemptible, 0, mean_ns + mean_ns / 8);
        context.world.profiles.record_turnaround(id, Form::Preemptible, 0, 40_000);
        context.world.profiles.record_form(id, Form::Sliced, 132, mean_ns + mean_ns / 4);
    }
}
