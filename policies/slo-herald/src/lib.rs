//! Services keep their objectives, and best effort gets the time that they can spare: a reconstruction of Herald
//! (Hafeez and Gandhi, "SLO-Aware Space-Time GPU Sharing for DL Workloads"), whose exact rule is not public.
//!
//! ```text
//! unit of a service begins:
//!     allowance := 0, if it is to be measured alone (1 unit in 64, or in 16 of a service that is too busy),
//!                     or the service must be served strictly
//!                  spare(service) * rate(service) else
//!     spare(service) := 0.95 * objective - 95th percentile of what its units take when best effort is held back
//!
//! decide(launch):
//!     if launch is high priority:                            run
//!     if no high-priority client is connected:               run, with a long lease
//!     cost := its predicted time; a tenth of it, if the launch is light; 2 ms, if it was never measured
//!     if each service with an open unit shares SMs, and the launch is not light,
//!     and it can be limited to the fewest SMs of those services or has no more blocks:
//!                                                            run on them
//!     for each service with an open unit, unless the GPU has had no high-priority work for 2 ms:
//!         if cost is more than is left of the allowance:     hold until that changes
//!                                                            (on a width: cost * its SMs / all SMs)
//!     for each other service that must be served strictly:
//!         if its last unit ended less than idle_gap ago:     hold for the rest of the gap
//!     if no unit is open, and high-priority work is active:  hold until that changes
//!     if other best-effort clients go first, or have a long launch under way:                hold
//!     take cost from each open unit's allowance
//!     run: on the width, if a service shares so and none must be served strictly
//!          whole, if each service can bear it at any time; else in the form that `tally-priority` would choose
//!         if whole, or on the width for long, with a lease: 8 to 32 launches that units bear ([`Leases`])
//!         if on some SMs, as 64 launches before it in a row: as the client's width ([`ClientWidth`])
//!
//! after each 64 units of a service that were not measured alone, or 8 in a second or of which too many were late
//! (`share.rs`):
//!     if more were late than it tolerates, or the service is
//!     far too busy:                                          level := far less
//!     if best effort makes it busy over four fifths:         level := less
//!     if nearly all kept 0.92 of it, and more was wanted:    level := more, slowly once its limit was found
//!     if the way to share was measured:                      take the one that lets more work in
//! ```
//!
//! There are three ways to share the GPU with an open unit, each with a level that is learned. In *time* the level is
//! the rate: best-effort time that a unit bears for each nanosecond that it can spare. It is low where kernels wait for
//! each other, and high where the GPU idles within a unit because the service's CPU part takes longer. In *space* the
//! level is a number of SMs on which best effort runs beside the unit for as long as it takes, and a rate for what
//! cannot be limited to them. On a *width* best effort has some SMs always, between units, too, and the level is
//! that number and a rate for everything (`space.rs`). All are learned, so that nobody has to tell what suits
//! which service.
//!
//! A service must be served strictly (best effort is held while it has a unit open) if it has no objective, or best
//! effort makes it busy nearly all of the time, or fewer of its latest 200 units kept the objective than it asked for,
//! until enough do again; or two of its last four units measured alone took over a fifth longer than the p95 of those
//! before, until eight are known.
//!
//! Several best-effort clients share what they get by weight, and a client that is due by its floor is let in whatever
//! services can spare ([`tally_fairness`]); on a third of the SMs if it can be, beside a unit that cannot bear it.
//!
//! A service that has an objective, or never had a unit, and has none for a second, and for far longer than its units
//! are apart, takes nothing of best effort: its next unit may be late.
//!
//! Of a service whose tokens have an objective, units of tokens (marked ones, else those that begin with the launch of
//! a CUDA graph) keep it, all others bear nothing, and it may be busy all of the time.
//!
//! Where contexts take turns (`time-sliced`) time cannot be shared within a unit: best effort is held while
//! high-priority work is active.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod leasing;
mod limit;
mod service;
mod settings;
mod share;
mod space;
mod unshared;
mod verdict;
mod worth;

use limit::{can_limit, exceeds, on_sms};
use service::Service;
use settings::Settings;
use tally_fairness::{ClientWidth, Due, Leases, Shares, Yields};
use tally_forms::Forms;
use tally_sdk::grid::scaled;
use tally_sdk::host::{self, Gauge};
use tally_sdk::{
    Activity, Answer, Client, ClientId, Counters, Decision, Form, HOLD_UNTIL_CHANGE, Launch, Level,
    Membership, Policy, PriorityClass, Saved, Stateful, Terms, Timer, UNKNOWN, Units, WINDOW_OPEN,
};

tally_sdk::reasons! {
    Strict = "a service that must be served strictly has a unit open",
    Spent = "a service's open unit can spare no more time",
    IdleGap = "the idle gap after a service's unit",
    HighActive = "high-priority work is active",
    NotItsTurn = "other best-effort clients' share of the GPU",
    Alone = "no high-priority client is connected",
    Between = "no unit is open",
    Spare = "the open units can spare the time",
    Beside = "the open units can spare some SMs",
    Floor = "less than the client's least share of the GPU",
}

const COUNTERS: [&str; 8] = [
    "launches_within_units",
    "launches_between_units",
    "units_measured_alone",
    "units_late",
    "launches_on_spared_sms",
    "launches_for_min_share",
    "launches_leased",
    "launches_on_width",
];
const WITHIN: usize = 0;
const BETWEEN: usize = 1;
const ALONE: usize = 2;
const LATE: usize = 3;
const BESIDE: usize = 4;
const FLOOR: usize = 5;
const LEASED: usize = 6;
const ON_WIDTH: usize = 7;

/// Within an open unit: time without high-priority work after which it holds nothing back. Its program may be busy with
/// something else, or have lost the end of it.
const GAP_NS: u64 = 2_000_000;
/// A launch that was never measured has waited for too long.
const OVERDUE_NS: u64 = 1_000_000_000;
/// The timer of that time.
const GAP: u64 = 0;
/// The timer of clients whose launches under way are not to yield any longer.
const FLOORS: u64 = 1;

/// The policy's memory: who is connected, and what each service can spare.
pub struct Herald {
    settings: Settings,
    shares: Shares,
    services: Vec<Service>,
    /// What was saved of services that have not joined since.
    remembered: Vec<String>,
    forms: Forms,
    leases: Leases,
    client_width: ClientWidth,
    window_ns: u64,
    /// High-priority work is on the GPU.
    high_is_active: bool,
    /// Launches that may have to yield, and whether they do.
    yields: Yields,
    counters: Counters<8>,
    strict: Gauge,
    /// Least SMs that a service spares; 0 if none spares SMs.
    spared_sms: Gauge,
    /// Best-effort work let in by time, by SMs, and on a width, when that was last measured of any service.
    in_time: Gauge,
    in_space: Gauge,
    on_width: Gauge,
    /// As the last launch told.
    sm_count: u32,
    /// SMs to which launches can be limited.
    widths: Vec<u32>,
    /// Services that are expected to have a unit, when that was last looked at.
    expected: Vec<ClientId>,
}

impl Policy for Herald {
    fn init(config: &str) -> Result<Self, String> {
        let (settings, in_force) = Settings::read(config)?;
        host::log(Level::Info, &in_force);
        Reason::define_all();
        Ok(Herald {
            settings,
            shares: Shares::with_timer(FLOORS),
            services: Vec::new(),
            remembered: Vec::new(),
            forms: Forms::new(&settings.forms, in_force),
            leases: Leases::default(),
            client_width: ClientWidth::default(),
            window_ns: WINDOW_OPEN,
            high_is_active: false,
            yields: Yields::default(),
            counters: Counters::new(COUNTERS),
            strict: Gauge::new("services_served_strictly"),
            spared_sms: Gauge::new("spared_sms"),
            in_time: Gauge::new("let_in_by_time_permille"),
            in_space: Gauge::new("let_in_by_sms_permille"),
            on_width: Gauge::new("let_in_on_width_permille"),
            sm_count: 0,
            widths: Vec::new(),
            expected: Vec::new(),
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        self.counters.tick(launch.now_ns);
        let due = self.shares.floors.due(launch);
        if self.shares.floors.take_changed() {
            self.floors_changed(launch.now_ns);
        }
        let answer = self.decide_by(launch, due == Some(Due::Now));
        let may_yield = !self.shares.time_sliced && launch.high_clients > 0;
        let (answer, for_floor) =
            self.shares.with_floor(launch, answer, due, may_yield, Reason::Floor);
        self.counters.add(FLOOR, for_floor.into());
        answer
    }
}

impl Herald {
    /// A best-effort launch, of a client that is due by its floor or not.
    fn decide_by(&mut self, launch: &Launch, is_due: bool) -> Answer {
        if self.shares.time_sliced {
            return self.in_turns(launch, is_due);
        }
        if launch.high_clients == 0 {
            return self.alone(launch, is_due);
        }
        if self.sm_count != launch.sm_count {
            self.sm_count = launch.sm_count;
            self.widths = host::widths();
            for service in &mut self.services {
                service.share.set_gpu(launch.sm_count, &self.widths);
            }
        }
        let cost_ns = self.cost_ns(launch);
        // A unit may stay open for as long as its program likes.
        let idle_ns = if launch.high_active() { 0 } else { launch.high_idle_ns };
        let wait_ns = GAP_NS.saturating_sub(idle_ns);
        let mut within = false;
        let width = self.width(launch.now_ns);
        let least = |sms: u32| width.map_or(sms, |width| sms.min(width));
        let beside = self.beside(launch, cost_ns).filter(|_| wait_ns > 0).map(least);
        let on_width = width.filter(|sms| beside.is_none() && can_limit(launch, *sms));
        // On some of the SMs it takes no more of a unit than those.
        let of_all = |sms: u32| scaled(cost_ns, sms.into(), launch.sm_count.max(1).into());
        let charge_ns = on_width.map_or(cost_ns, of_all);
        for service in &mut self.services {
            if let Some(left_ns) = service.left_ns().filter(|_| wait_ns > 0) {
                within = true;
                if beside.is_some() || is_due {
                    continue;
                }
                // Else what takes long because it is measured too seldom would wait for ever.
                let is_overdue = launch.predicted_ns == UNKNOWN && launch.waited_ns > OVERDUE_NS;
                if charge_ns > left_ns && !(is_overdue && left_ns > 0) {
                    let is_strict = service.is_strict();
                    let reason = if is_strict { Reason::Strict } else { Reason::Spent };
                    let hold_ns = if launch.high_active() { HOLD_UNTIL_CHANGE } else { wait_ns };
                    self.shares.rounds.keep_back(launch.client);
                    let short = |one: &&mut Service| one.left_ns().is_some_and(|ns| charge_ns > ns);
                    self.services.iter_mut().filter(short).for_each(Service::is_short);
                    return Decision::Hold(hold_ns).because(reason);
                }
            } else if !is_due
                && let rest_ns @ 1.. = service.gap_ns(launch.now_ns, self.settings.idle_gap_ns)
            {
                return Decision::Hold(rest_ns).because(Reason::IdleGap);
            }
        }
        if !within && !is_due && launch.high_active() {
            return Decision::Hold(HOLD_UNTIL_CHANGE).because(Reason::HighActive);
        }
        let hold = self.shares.hold(launch, is_due);
        if self.shares.has_new_parts() {
            self.change_terms(launch.now_ns);
        }
        if let Some(hold) = hold.or_else(|| self.shares.hold_long(launch, is_due)) {
            return hold.because(Reason::NotItsTurn);
        }
        let beside = beside.filter(|_| within);
        let is_too_much = |one: &Service| one.left_ns().is_some_and(|ns| charge_ns > ns);
        let must_spare = is_due && beside.is_none() && on_width.is_none();
        let for_floor = (must_spare && self.services.iter().any(is_too_much))
            .then(|| self.for_floor(launch, cost_ns))
            .flatten();
        let limited_ns = |sms: u32| scaled(cost_ns, launch.sms().into(), sms.max(1).into());
        let limit = beside.or(on_width).or(for_floor).filter(|sms| exceeds(launch, *sms));
        let lasts_ns = limit.map_or(cost_ns, limited_ns);
        let until_ns = launch.now_ns.saturating_add(launch.in_flight_ns).saturating_add(lasts_ns);
        let takes_ns = on_width.map_or(launch.predicted_ns, |_| charge_ns);
        self.leases.starts(launch.client, launch.predicted_ns, takes_ns);
        for service in &mut self.services {
            service.let_in(launch.now_ns, launch.predicted_ns, within);
            service.under_way(until_ns);
        }
        if let Some(sms) = beside {
            for service in &mut self.services {
                service.spend(launch.now_ns, 0, is_due);
                service.share.limited();
            }
            self.counters.add(BESIDE, 1);
            let is_alone = self.shares.lease(1) > 0 && width.is_none();
            let on_width = is_alone && !is_due && self.client_width.beside(launch.client, sms);
            return on_sms(launch, sms, on_width).because(Reason::Beside);
        }
        if within {
            let charge_ns = for_floor.map_or(charge_ns, of_all);
            let spend = |one: &mut Service| one.spend(launch.now_ns, charge_ns, is_due);
            self.services.iter_mut().for_each(spend);
        }
        self.counters.add(if within { WITHIN } else { BETWEEN }, 1);
        let reason = if within { Reason::Spare } else { Reason::Between };
        if let Some(sms) = on_width {
            self.services.iter_mut().for_each(|service| service.share.limited());
            self.counters.add(ON_WIDTH, 1);
            if self.shares.lease(1) > 0 {
                self.client_width.keep(launch.client, sms);
            }
            return self.on_width(launch, sms, charge_ns, within).because(reason);
        }
        if let Some(sms) = for_floor {
            if width.is_none() {
                self.client_width.end();
            }
            return on_sms(launch, sms, false).because(reason);
        }
        // Light ones are limited only where that costs nothing.
        let spares = self.services.iter().any(|one| one.sms().is_some());
        if width.is_none() && (!within || !spares || cost_ns == launch.predicted_ns) {
            self.client_width.end();
        }
        match self.form(launch) {
            Decision::Run(_) if let Some(sms) = self.reads_for(launch, cost_ns) => {
                Decision::SmLimited(sms).because(reason)
            }
            Decision::Run(_) => self.whole(launch, within).because(reason),
            decision => decision.because(reason),
        }
    }

    /// A client is due by its floor, and its launches do not yield, or it is no longer.
    fn floors_changed(&mut self, now_ns: u64) {
        self.yields.floors_changed(&self.shares);
        self.change_terms(now_ns);
    }
}

impl Units for Herald {
    fn began(&mut self, now_ns: u64, client: ClientId, since_ns: u64, deadline_ns: u64) {
        self.shares.rounds.look_again();
        let Some(service) = self.services.iter_mut().find(|service| service.client == client)
        else {
            return;
        };
        let before = service.terms();
        let left_ns = service.began(now_ns, since_ns, deadline_ns);
        if service.terms() != before || !self.are_as_expected(now_ns) {
            self.changed(now_ns);
        }
        self.leases.fit(left_ns, &self.shares);
        // What is under way would take more than the unit can bear.
        if self.yields.until_ns.saturating_sub(now_ns) > left_ns {
            self.yields.set(now_ns, true, &self.shares);
            if !self.high_is_active {
                host::set_timer(GAP_NS, GAP);
            }
        }
    }

    fn ended(&mut self, now_ns: u64, client: ClientId, units: u32, took_ns: u64) {
        self.shares.rounds.look_again();
        let Some(service) = self.services.iter_mut().find(|service| service.client == client)
        else {
            return;
        };
        let (before, was_strict) = (service.terms(), service.is_strict());
        let ended = service.ended(now_ns, units, took_ns);
        self.counters.add(ALONE, ended.alone.into());
        self.counters.add(LATE, ended.late.into());
        if let Some([in_time, in_space, on_width]) = service.share.found() {
            let (rate, sms, width) = service.share.levels();
            let text = format!(
                "service {client}: best effort had {in_time} permille at a rate of {rate} permille, \
                 {in_space} permille on {sms} SMs in units, {on_width} permille on {width} SMs always"
            );
            host::log(Level::Debug, &text);
            self.in_time.set(in_time as i64);
            self.in_space.set(in_space as i64);
            self.on_width.set(on_width as i64);
        }
        if service.is_strict() != was_strict {
            let text = match service.strict_because() {
                Some(why) => format!("service {client} is served strictly: {why}"),
                None => format!("service {client} is served strictly no longer"),
            };
            host::log(Level::Info, &text);
        }
        let has_changed = ended.changed || service.terms() != before;
        if has_changed || !self.are_as_expected(now_ns) {
            self.changed(now_ns);
        }
        self.go_on(now_ns);
    }
}

/// A unit without high-priority work holds nothing back for long, and takes it back when there is some again.
impl Activity for Herald {
    fn high_started(&mut self, now_ns: u64) {
        self.high_is_active = true;
        let rest_ns = self.yields.until_ns.saturating_sub(now_ns);
        if self.services.iter().filter_map(Service::left_ns).any(|left_ns| left_ns < rest_ns) {
            self.yields.set(now_ns, true, &self.shares);
        }
    }

    fn high_ended(&mut self, _now_ns: u64) {
        self.shares.rounds.look_again();
        self.high_is_active = false;
        if self.yields.is_on() {
            host::set_timer(GAP_NS, GAP);
        }
    }
}

impl Timer for Herald {
    fn fired(&mut self, now_ns: u64, token: u64) {
        if token == FLOORS {
            if self.shares.fired(now_ns) {
                self.floors_changed(now_ns);
            }
        } else if !self.high_is_active {
            self.yields.set(now_ns, false, &self.shares);
        }
    }
}

impl Membership for Herald {
    fn joined(&mut self, now_ns: u64, client: &Client) {
        self.leases.fit(0, &self.shares);
        self.client_width.end();
        self.shares.joined(now_ns, client, |_| self.settings.turn_ns);
        if client.class == PriorityClass::High {
            let mut service = Service::new(now_ns, client.id, self.sm_count, self.settings.busy);
            service.ask(now_ns);
            self.remembered.retain(|line| !service.remember(line));
            self.services.push(service);
        } else if self.sm_count > 0 {
            // Not one that was there before this instance.
            self.services.iter_mut().for_each(|service| service.share.new_program());
        }
        self.changed(now_ns);
    }

    fn left(&mut self, now_ns: u64, client: ClientId) {
        self.services.retain(|service| service.client != client);
        self.shares.left(client);
        self.changed(now_ns);
        self.go_on(now_ns);
        self.counters.hand_over();
        self.forms.hand_over();
    }
}

impl Herald {
    /// What a launch costs the open units.
    fn cost_ns(&self, launch: &Launch) -> u64 {
        if launch.predicted_ns == UNKNOWN {
            return self.settings.unknown_ns;
        }
        let few = u64::from(launch.sm_count) * u64::from(self.settings.light_sms_percent) / 100;
        let is_light = launch.predicted_ns <= self.settings.light_ns
            || (!launch.is_graph() && launch.grid_blocks <= few);
        if is_light { launch.predicted_ns.div_ceil(10) } else { launch.predicted_ns }
    }

    /// Whole if the open units, and those that may begin at any time, can bear it. Else the form that yields soonest at
    /// least cost, as in `tally-priority`.
    fn form(&mut self, launch: &Launch) -> Decision {
        let allowances_ns =
            self.expected(launch.now_ns).map(|service| service.allowance_whole_ns().unwrap_or(0));
        let bearable_ns = allowances_ns.min();
        if launch.predicted_ns <= bearable_ns.unwrap_or(0) {
            return Decision::Run(0);
        }
        let (decision, _) = self.forms.decide(launch, &self.settings.forms);
        if matches!(launch.runs_as(decision), Form::Sliced | Form::Preemptible) {
            let until_ns = launch.now_ns.saturating_add(launch.in_flight_ns);
            let until_ns = until_ns.saturating_add(launch.predicted_ns);
            self.yields.until_ns = self.yields.until_ns.max(until_ns);
        }
        decision
    }

    /// Nobody yields if each open unit can bear what is left of what is under way.
    fn go_on(&mut self, now_ns: u64) {
        let rest_ns = self.yields.left_ns(now_ns);
        let bears = |service: &Service| service.left_ns().is_none_or(|ns| ns >= rest_ns);
        if self.services.iter().all(bears) {
            self.yields.set(now_ns, false, &self.shares);
        }
    }

    /// What a service can spare is another amount.
    fn changed(&mut self, now_ns: u64) {
        let strict = self.services.iter().filter(|one| one.is_strict()).count();
        self.strict.set(strict as i64);
        self.expected = self.expected(now_ns).map(|one| one.client).collect();
        let withheld = self.expected(now_ns).any(Service::is_strict);
        self.services.iter_mut().for_each(|one| one.share.withhold(withheld));
        let spared = self.services.iter().filter_map(|one| one.share.limit()).min();
        self.spared_sms.set(spared.unwrap_or(0).into());
        self.change_terms(now_ns);
    }

    /// Services that may have a unit at any time; all of them, if none of them is expected to.
    fn expected(&self, now_ns: u64) -> impl Iterator<Item = &Service> {
        let is_any = self.services.iter().any(|one| one.is_expected(now_ns));
        self.services.iter().filter(move |one| !is_any || one.is_expected(now_ns))
    }

    /// Whether they are those that they were when that was last looked at.
    fn are_as_expected(&self, now_ns: u64) -> bool {
        self.expected(now_ns).map(|one| one.client).eq(self.expected.iter().copied())
    }

    /// What best effort has under way when a unit begins delays it: no more than the least that a service can spare.
    fn change_terms(&mut self, now_ns: u64) {
        let (most_ns, least_ns) = (self.settings.window_ns, self.settings.window_ns_min);
        let is_alone = self.shares.clients.high() == 0;
        let longest_ns = self.settings.window_ns_max;
        let of = |one: &Service| one.window_ns(most_ns, longest_ns);
        let shared_ns = self.expected(now_ns).map(of).min().unwrap_or(most_ns);
        let shared_ns = shared_ns.max(least_ns.min(most_ns));
        let window_ns = match (self.shares.time_sliced, is_alone) {
            (true, _) => self.settings.turn_ns,
            (false, true) => WINDOW_OPEN,
            (false, false) => shared_ns,
        };
        // Small changes are not worth a call each.
        if window_ns.abs_diff(self.window_ns) > self.window_ns / 4 {
            self.window_ns = window_ns;
        }
        if !is_alone && self.expected(now_ns).any(|one| one.allowance_ns().is_none()) {
            self.leases.fit(0, &self.shares);
        }
        let yields = !self.shares.time_sliced && self.expected(now_ns).any(Service::is_strict);
        let yields = yields.then_some(self.settings.idle_gap_ns);
        let window_ns = self.shares.window_ns(self.window_ns);
        self.shares.set_terms(Terms { window_ns, leases: is_alone, yields });
    }
}

/// What was measured of kernels outlives a reload, from and for `tally-priority` too, and what was learned of services.
impl Stateful for Herald {
    fn snapshot(&self) -> Saved {
        let services: Vec<String> = self.services.iter().map(Service::saved).collect();
        self.forms.snapshot(&(self.shares.saved() + &services.join("\n")))
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let saved = self.forms.restore(from)?;
        self.shares.restore(&saved);
        self.remembered = saved.lines().map(str::to_owned).collect();
        Ok(())
    }
}

tally_sdk::export!(Herald: activity, units, membership, timer, state);

#[cfg(test)]
mod tests;
