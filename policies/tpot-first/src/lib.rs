//! Token generation first, on as many SMs as its objective needs: DetShare's TPOT-First ("Guaranteeing Semantic and
//! Performance Determinism in Flexible GPU Sharing", arXiv 2603.15042), a reconstruction, for its exact rules are not
//! public. The paper has the three callbacks, and that the others get what token generation leaves; how the width is
//! learned, slack, the rhythm, and when a service is served strictly are ours.
//!
//! ```text
//! pick(launch):     which waiting launch goes next                       here: TpotFirst::pick
//!     high priority is ungated: a step of a service never waits
//!     a launch of a client that is due by its floor:     goes            Floors::due
//!     a launch to which Select gives no SMs now:         waits
//!     of the others: by weight, of long ones one at a time               Shares::hold, Shares::hold_long
//!
//! select(launch):   on how many SMs                                      select.rs, widths.rs
//!     beside a step on the widest width at which the 95th percentile of steps stays within 0.9 of the objective
//!     between two steps on all SMs
//!
//! prepare:          take SMs back before the next step                   prepare.rs, rhythm.rs
//!     launches that can yield do so one turnaround before the next step is predicted to begin
//! ```
//!
//! A *step* is a unit of work that has an objective: that for tokens (`--tpot`) if it is a token, else that for units
//! (`--slo`). Other units of a service with an objective, such as prefills, hold nothing back, and the others keep to
//! the width beside them.
//!
//! A service is served strictly (the others wait while it has a unit open) if it has no objective, or more than 5 % of
//! its latest 200 steps were late, until at most 5 % are.
//!
//! Where contexts take turns (`time-sliced`) there is no width: a launch waits if the open step would miss the target
//! share of its objective otherwise.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod prepare;
mod rhythm;
mod select;
mod service;
mod settings;
mod widths;

use select::Place;
use service::{Busy, Service};
use settings::Settings;
use std::collections::BTreeMap;
use tally_fairness::{ClientWidth, Due, Shares, Yields};
use tally_forms::Forms;
use tally_sdk::host::{self, Gauge};
use tally_sdk::{
    Activity, Answer, Client, ClientId, Counters, Decision, Form, KernelId, Launch, Level,
    Membership, NEVER, Policy, PriorityClass, Saved, SharingMode, Stateful, Terms, Timer, UNKNOWN,
    Units, WINDOW_OPEN,
};

tally_sdk::reasons! {
    Strict = "a service that must be served strictly is at work",
    IdleGap = "the idle gap after a service's unit",
    NoSlack = "the open step has no slack left for it",
    NextStep = "the next step would have no slack for it",
    NotItsTurn = "other best-effort clients' share of the GPU",
    Alone = "no high-priority client is connected",
    Free = "each service bears all SMs beside its steps",
    Between = "no step is open",
    Narrow = "it has no more blocks than the width beside the step",
    Width = "the width beside the step",
    Slack = "within the slack of the step",
    Yielding = "in a form that yields before the slack is used up",
    Overdue = "it has waited for too long",
    Floor = "less than the client's least share of the GPU",
}

const COUNTERS: [&str; 9] = [
    "launches_on_width",
    "launches_whole_in_steps",
    "launches_between_steps",
    "launches_overdue",
    "launches_for_min_share",
    "steps",
    "steps_late",
    "steps_prepared",
    "steps_prepared_in_vain",
];
const ON_WIDTH: usize = 0;
const IN_STEPS: usize = 1;
const BETWEEN: usize = 2;
const OVERDUE: usize = 3;
const FOR_FLOOR: usize = 4;
const STEPS: usize = 5;
const LATE: usize = 6;
const PREPARED: usize = 7;
const IN_VAIN: usize = 8;

/// The timer of clients whose launches under way are not to yield any longer.
const FLOORS: u64 = 0;
/// The gauge of the 95th percentile follows after so many steps.
const SHOW_STEPS: u64 = 16;
/// First word of a line of what is saved.
const SAVED: &str = "tpot";

/// The policy's memory: who is connected, and what each service leaves to the others.
pub struct TpotFirst {
    settings: Settings,
    shares: Shares,
    services: Vec<Service>,
    forms: Forms,
    /// What was saved of services, until their first unit.
    remembered: Vec<[u64; 5]>,
    busy: Busy,
    client_width: ClientWidth,
    /// Launches that may have to yield, and whether they do.
    yields: Yields,
    /// The latest of them: its kernel and its form.
    yielding: Option<(KernelId, Decision)>,
    /// When a client's launch last went because it had waited for too long.
    overdue_ns: BTreeMap<ClientId, u64>,
    turnaround_ns: u64,
    /// When the step is predicted for which SMs are taken back.
    next_ns: u64,
    high_is_active: bool,
    /// As the last launch told.
    sm_count: u32,
    /// Launches can be limited to some of the SMs.
    has_widths: bool,
    steps: u64,
    counters: Counters<9>,
    strict: Gauge,
    width_gauge: Gauge,
    p95_gauge: Gauge,
}

impl Policy for TpotFirst {
    fn init(config: &str) -> Result<Self, String> {
        let (settings, in_force) = Settings::read(config)?;
        host::log(Level::Info, &in_force);
        Reason::define_all();
        Ok(TpotFirst {
            settings,
            shares: Shares::with_timer(FLOORS),
            services: Vec::new(),
            forms: Forms::new(&settings.forms, in_force),
            remembered: Vec::new(),
            busy: Busy::default(),
            client_width: ClientWidth::default(),
            yields: Yields::default(),
            yielding: None,
            overdue_ns: BTreeMap::new(),
            turnaround_ns: settings.turnaround_ns,
            next_ns: 0,
            high_is_active: false,
            sm_count: 0,
            has_widths: false,
            steps: 0,
            counters: Counters::new(COUNTERS),
            strict: Gauge::new("services_served_strictly"),
            width_gauge: Gauge::new("sms_beside_steps"),
            p95_gauge: Gauge::new("step_p95_permille"),
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        self.counters.tick(launch.now_ns);
        let due = self.shares.floors.due(launch);
        if self.shares.floors.take_changed() {
            self.floors_changed();
        }
        let answer = self.decide_by(launch, due == Some(Due::Now));
        let may_yield = !self.shares.time_sliced && launch.high_clients > 0;
        let (answer, for_floor) =
            self.shares.with_floor(launch, answer, due, may_yield, Reason::Floor);
        self.counters.add(FOR_FLOOR, for_floor.into());
        answer
    }
}

impl TpotFirst {
    /// A best-effort launch, of a client that is due by its floor or not.
    fn decide_by(&mut self, launch: &Launch, is_due: bool) -> Answer {
        if launch.high_clients == 0 {
            return self.alone(launch, is_due);
        }
        if self.sm_count != launch.sm_count {
            self.sm_count = launch.sm_count;
            let all = host::widths();
            self.has_widths = !all.is_empty();
            self.services.iter_mut().for_each(|one| one.widths.set_gpu(&all, launch.sms()));
        }
        match self.pick(launch, is_due) {
            Ok(place) => self.go(launch, place),
            Err(hold) => hold,
        }
    }

    /// Which launch goes next: this one, and where; or not yet.
    fn pick(&mut self, launch: &Launch, is_due: bool) -> Result<Place, Answer> {
        let place = if is_due { Ok(Place::Between) } else { self.select(launch) };
        let place = place.inspect_err(|_| {
            self.shares.rounds.keep_back(launch.client);
        })?;
        // Contexts that take turns run beside steps, too, so that all time counts for whose turn it is.
        let high_idle_ns = if self.shares.time_sliced { NEVER } else { launch.high_idle_ns };
        let hold = self.shares.hold(&Launch { high_idle_ns, ..*launch }, is_due);
        if self.shares.has_new_parts() {
            self.set_terms();
        }
        match hold.or_else(|| self.shares.hold_long(launch, is_due)) {
            Some(hold) => Err(hold.because(Reason::NotItsTurn)),
            None => Ok(place),
        }
    }

    /// Starts the launch in this place.
    fn go(&mut self, launch: &Launch, place: Place) -> Answer {
        let now_ns = launch.now_ns;
        let cost_ns = self.cost_ns(launch);
        let under_way_ns = self.under_way_ns(launch, cost_ns);
        let (decision, ns) = self.form(launch, place, cost_ns);
        let until_ns = now_ns.saturating_add(launch.in_flight_ns).saturating_add(ns);
        self.busy.until_ns = self.busy.until_ns.max(until_ns);
        if let Place::Slack(ns) = place {
            self.services.iter_mut().for_each(|service| service.takes_slack(ns));
        } else {
            self.busy.on_width_until_ns = self.busy.on_width_until_ns.max(until_ns);
            let width = if let Place::Width(sms) = place { sms } else { u32::MAX };
            self.services.iter_mut().for_each(|service| service.goes_on_width(width));
        }
        let is_whole = launch.runs_as(decision) == Form::Whole;
        if place == Place::Between && is_whole && !self.shares.time_sliced {
            let settings = self.settings;
            self.services
                .iter_mut()
                .filter(|one| one.risks(under_way_ns, &settings))
                .for_each(|one| one.unborne_until_ns = now_ns.saturating_add(under_way_ns));
        }
        let decision = match self.on_client_width(launch, place, decision) {
            // Its code was not read: it runs whole, and later ones can be limited.
            Decision::Run(_) if self.has_widths && select::is_unread(launch) => {
                Decision::SmLimited(self.least_width())
            }
            other => other,
        };
        if select::yields(launch, decision) {
            self.starts_yielding(now_ns, launch.kernel, decision, until_ns);
        }
        let (counter, reason) = match place {
            Place::Free => {
                // Under a lease nobody tells what is under way.
                self.busy = Busy { until_ns: u64::MAX, on_width_until_ns: u64::MAX };
                let lease = self.shares.lease(self.settings.lease_launches);
                self.counters.add(IN_STEPS, 1);
                return Decision::Run(lease).because(Reason::Free);
            }
            Place::Between => (BETWEEN, Reason::Between),
            Place::Narrow => (IN_STEPS, Reason::Narrow),
            Place::Width(_) => (ON_WIDTH, Reason::Width),
            Place::Slack(_) => (IN_STEPS, Reason::Slack),
            Place::Yielding(_) => (IN_STEPS, Reason::Yielding),
            Place::Overdue => {
                self.overdue_ns.insert(launch.client, now_ns);
                (OVERDUE, Reason::Overdue)
            }
        };
        self.counters.add(counter, 1);
        decision.because(reason)
    }

    /// What runs on the width beside steps, launch after launch, has it as its client's.
    fn on_client_width(&mut self, launch: &Launch, place: Place, decision: Decision) -> Decision {
        let is_short = matches!(place, Place::Slack(ns) if ns < self.settings.limit_ns_min);
        let sms = match place {
            Place::Width(sms) if self.shares.lease(1) > 0 => sms,
            // They take few SMs, or little time.
            Place::Narrow => return decision,
            Place::Slack(_) if is_short => return decision,
            _ => {
                self.client_width.end();
                return decision;
            }
        };
        // One that was never measured would run whole first.
        match self.client_width.beside(launch.client, sms) && launch.predicted_ns != UNKNOWN {
            true => Decision::Run(0),
            false => decision,
        }
    }

    /// While no high-priority client is connected.
    fn alone(&mut self, launch: &Launch, is_due: bool) -> Answer {
        self.client_width.end();
        if !is_due && let Some(hold) = self.shares.rounds.hold(launch) {
            return hold.because(Reason::NotItsTurn);
        }
        let lease = self.shares.lease_behind(launch, self.settings.lease_launches);
        Decision::Run(lease).because(Reason::Alone)
    }

    /// A client is due by its floor, and its launches do not yield, or it is no longer.
    fn floors_changed(&mut self) {
        self.yields.floors_changed(&self.shares);
        self.set_terms();
    }

    /// A width is another, or whether a service is served strictly.
    fn changed(&mut self) {
        self.strict.set(self.services.iter().filter(|one| one.is_strict()).count() as i64);
        let is_strict = self.services.iter().any(Service::is_strict);
        self.width_gauge.set(if is_strict { 0 } else { self.width().into() });
        self.show_p95();
        self.set_terms();
    }

    /// Of the service whose steps come closest to their objective.
    fn show_p95(&mut self) {
        let p95 = self.services.iter().filter_map(|service| service.widths.p95()).max();
        self.p95_gauge.set(p95.unwrap_or(0).into());
    }

    /// What best effort has under way when a step begins delays it.
    fn set_terms(&mut self) {
        let is_alone = self.shares.clients.high() == 0;
        let window_ns = match (self.shares.time_sliced, is_alone) {
            (true, _) => self.settings.turn_ns,
            (false, true) => WINDOW_OPEN,
            (false, false) => self.settings.window_ns,
        };
        let window_ns = self.shares.window_ns(window_ns);
        let leases = !self.shares.rounds.is_shared() && (is_alone || self.is_free());
        if !leases && self.busy.until_ns == u64::MAX {
            // What the lease let in is within the window.
            self.busy = Busy::default();
        }
        let yields = !self.shares.time_sliced && self.services.iter().any(Service::is_strict);
        let yields = yields.then_some(self.settings.idle_gap_ns);
        self.shares.set_terms(Terms { window_ns, leases, yields });
    }

    fn service(&mut self, client: ClientId) -> Option<&mut Service> {
        self.services.iter_mut().find(|service| service.client == client)
    }

    /// What was learned of widths is of these neighbours: how many, and the sum of their ids.
    fn neighbours(&self) -> [u64; 2] {
        let ids = || self.shares.clients.best_effort_ids();
        [ids().count() as u64, ids().map(u64::from).sum()]
    }
}

impl Units for TpotFirst {
    fn began(&mut self, now_ns: u64, client: ClientId, since_ns: u64, deadline_ns: u64) {
        self.shares.rounds.look_again();
        let (busy, settings) = (self.busy, self.settings);
        let neighbours = self.neighbours();
        let saved = self.remembered.iter().position(|line| line[0] == u64::from(client));
        let saved = saved.map(|at| self.remembered.swap_remove(at));
        let Some(service) = self.service(client) else { return };
        let was_strict = service.is_strict();
        if let Some([_, own_permille, sms, count, sum]) = saved
            && [count, sum] == neighbours
        {
            service.remember(own_permille as u32, sms as u32);
        }
        service.began(now_ns, since_ns, deadline_ns, busy, &settings);
        let is_strict = service.is_strict();
        if is_strict != was_strict || saved.is_some() {
            self.changed();
        }
        if is_strict {
            return;
        }
        self.take_back_in_step(now_ns);
    }

    fn ended(&mut self, now_ns: u64, client: ClientId, units: u32, took_ns: u64) {
        self.shares.rounds.look_again();
        let settings = self.settings;
        let Some(service) = self.service(client) else { return };
        let was_strict = service.is_strict();
        let ended = service.ended(now_ns, units, took_ns, &settings);
        let (is_strict, own) = (service.is_strict(), service.own_permille());
        if ended.permille.is_some() {
            self.steps = self.steps.wrapping_add(1);
            self.counters.add(STEPS, 1);
            self.counters.add(LATE, ended.late.into());
        }
        if is_strict != was_strict {
            let own = own.map_or("not known".into(), |own| format!("{own} permille of it"));
            let late = settings.late_percent_max;
            let text = match is_strict {
                true => format!(
                    "service {client}: more than {late} % of its latest steps took longer than its objective, so others wait \
                     during its steps; alone a step takes {own}"
                ),
                false => {
                    format!("service {client} keeps its objective again; others run beside it")
                }
            };
            host::log(Level::Info, &text);
        }
        if ended.changed {
            self.changed();
        } else if self.steps.is_multiple_of(SHOW_STEPS) {
            self.show_p95();
        }
        if !self.is_in_step(now_ns) {
            self.set_yield(now_ns, false);
            self.prepare(now_ns);
        }
    }
}

/// A unit without high-priority work holds nothing back for long, and takes it back when there is some again.
impl Activity for TpotFirst {
    fn high_started(&mut self, now_ns: u64) {
        self.high_is_active = true;
        if self.is_in_step(now_ns) {
            self.take_back_in_step(now_ns);
        }
    }

    fn high_ended(&mut self, _now_ns: u64) {
        self.shares.rounds.look_again();
        self.high_is_active = false;
        if self.yields.is_on() {
            host::set_timer(select::GAP_NS, prepare::GAP);
        }
    }
}

impl Timer for TpotFirst {
    fn fired(&mut self, now_ns: u64, token: u64) {
        if token != FLOORS {
            return self.timer(now_ns, token);
        }
        if self.shares.fired(now_ns) {
            self.floors_changed();
        }
    }
}

impl Membership for TpotFirst {
    fn joined(&mut self, now_ns: u64, client: &Client) {
        self.client_width.end();
        self.shares.joined(now_ns, client, |mode| {
            if mode == SharingMode::TimeSliced {
                let text = "contexts take turns, so launches are not limited to some SMs: they wait if a step would be late";
                host::log(Level::Info, text);
            }
            self.settings.turn_ns
        });
        if client.class == PriorityClass::BestEffort {
            self.services.iter_mut().for_each(|service| service.neighbours_changed(now_ns, true));
        }
        if client.class == PriorityClass::High {
            let mut service = Service::new(client.id, self.sm_count, &self.settings);
            service.ask(now_ns);
            self.services.push(service);
        }
        self.changed();
    }

    fn left(&mut self, now_ns: u64, client: ClientId) {
        if self.shares.clients.best_effort_ids().any(|id| id == client) {
            self.services.iter_mut().for_each(|service| service.neighbours_changed(now_ns, false));
        }
        self.services.retain(|service| service.client != client);
        self.shares.left(client);
        self.overdue_ns.remove(&client);
        self.changed();
        if !self.is_in_step(now_ns) {
            self.set_yield(now_ns, false);
        }
        self.counters.hand_over();
        self.forms.hand_over();
    }
}

/// What was measured of kernels outlives a reload, from and for `tally-priority` too, and what services left to the
/// same neighbours.
impl Stateful for TpotFirst {
    fn snapshot(&self) -> Saved {
        let [count, sum] = self.neighbours();
        let line = |service: &Service| {
            let own = service.own_permille()?;
            let sms = service.widths.sms();
            Some(format!("{SAVED} {} {own} {sms} {count} {sum}\n", service.client))
        };
        let services: String = self.services.iter().filter_map(line).collect();
        self.forms.snapshot(&(self.shares.saved() + &services))
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let saved = self.forms.restore(from)?;
        self.shares.restore(&saved);
        let read = |line: &str| {
            let words = line.strip_prefix(SAVED)?.split_ascii_whitespace();
            let numbers: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
            numbers.try_into().ok()
        };
        self.remembered = saved.lines().filter_map(read).collect();
        Ok(())
    }
}

tally_sdk::export!(TpotFirst: activity, units, membership, timer, state);

#[cfg(test)]
mod tests;
