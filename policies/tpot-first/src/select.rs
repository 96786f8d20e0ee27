//! Select: on how many SMs a launch of the others runs, or that it waits.
//!
//! ```text
//! select(launch):
//!     if it, and its client, waited for wait_ms_max:     run on the least width, or so that it can yield, or whole
//!     if a service is served strictly and has a unit open, or had one just now:              hold
//!         likewise if no unit is open, and high-priority work is active
//!     if each service bears all SMs:                     run on all SMs, with a lease
//!     services := those with a unit open that has work on the GPU,
//!                 and those whose step is predicted to begin before this launch ends
//!     if there are none:                                 run on all SMs: whole, if a step that begins meanwhile could
//!                                                        bear it, or each service takes the risk; else so that it
//!                                                        yields
//!     width := the least of them; slack := the least that is left of their steps
//!     if it has no more blocks than the width:           run whole: it takes no more SMs
//!     if it is short and within the slack:               run whole: to limit it costs more than it gives, unless its
//!                                                        client has the width
//!     if it can be limited, and the width is not 0:      run on the width; after 64 in a row its client has the width
//!     if it is within the slack:                         run whole
//!     if it can yield:                                   run in that form, until the slack is used up (`prepare.rs`)
//!     else:                                              hold until the step is over
//! ```
//!
//! A service takes the *risk* of a launch between its steps if all that is under way takes at most two of its
//! objectives, and less than 2 % of its latest steps took too long for that, or were late.
//!
//! Of a kernel that could only run whole because its code was not read, a launch that runs whole has it read.
//!
//! *Slack* is a learned part of the time between what a step takes without others and the target share of its
//! objective. Where contexts take turns nothing can be limited, and a launch costs a change of context, too.

use crate::service::Service;
use crate::settings::Settings;
use crate::{Reason, TpotFirst};
use tally_sdk::grid::scaled;
use tally_sdk::{
    Answer, Decision, Form, HOLD_UNTIL_CHANGE, Launch, LaunchState, NO_KERNEL, UNKNOWN, host,
};

/// Within an open unit: time without high-priority work after which it holds nothing back. Its program may be busy with
/// something else, or have lost the end of it.
pub const GAP_NS: u64 = 2_000_000;
/// To a stream on some of the SMs and back.
const HOP_NS: u64 = 5_000;
/// Beyond its predicted beginning a step is waited for so long.
pub const GRACE_NS: u64 = 1_000_000;

/// Where a launch may run now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// On all SMs, as all others: nothing is to be decided.
    Free,
    /// On all SMs: no step is open.
    Between,
    /// Whole: it has no more blocks than the width.
    Narrow,
    /// On so many SMs.
    Width(u32),
    /// Whole, at so much of the slack.
    Slack(u64),
    /// In a form that yields once the slack is used up, or before the next step.
    Yielding(Decision),
    /// It waited for too long.
    Overdue,
}

/// What services leave to a launch.
#[derive(Clone, Copy, Debug)]
struct Leave {
    width: u32,
    slack_ns: u64,
    /// A unit is open; without, a step is predicted to begin then.
    is_open: bool,
    next_ns: u64,
}

impl TpotFirst {
    /// Where a launch may run now, or for how long it waits.
    pub(crate) fn select(&mut self, launch: &Launch) -> Result<Place, Answer> {
        let now_ns = launch.now_ns;
        if self.is_overdue(launch) {
            return Ok(Place::Overdue);
        }
        // A unit may stay open for as long as its program likes.
        let idle_ns = if launch.high_active() { 0 } else { launch.high_idle_ns };
        let wait_ns = GAP_NS.saturating_sub(idle_ns);
        let hold_ns = if launch.high_active() { HOLD_UNTIL_CHANGE } else { wait_ns.max(1) };
        for service in self.services.iter().filter(|service| service.is_strict()) {
            if service.is_open() && wait_ns > 0 {
                return Err(Decision::Hold(hold_ns).because(Reason::Strict));
            }
            if let rest_ns @ 1.. = service.gap_ns(now_ns, self.settings.idle_gap_ns) {
                return Err(Decision::Hold(rest_ns).because(Reason::IdleGap));
            }
        }
        // A program that never waits for its work has no units.
        let is_strict = self.services.iter().any(Service::is_strict);
        if is_strict && launch.high_active() && !self.services.iter().any(Service::is_open) {
            return Err(Decision::Hold(HOLD_UNTIL_CHANGE).because(Reason::Strict));
        }
        if self.is_free() {
            return Ok(Place::Free);
        }
        let cost_ns = self.cost_ns(launch);
        let Some(leave) = self.leave(launch, cost_ns, wait_ns > 0) else {
            return Ok(Place::Between);
        };
        let fits = !launch.is_graph() && launch.grid_blocks <= leave.width.into();
        if fits && !self.shares.time_sliced {
            return Ok(Place::Narrow);
        }
        let on_width = can_limit(launch) && leave.width > 0 && !self.shares.time_sliced;
        // As all others of its client: that costs nothing.
        let on_width_anyway = on_width && self.client_width.sms().is_some();
        let is_short = cost_ns < self.settings.limit_ns_min && cost_ns <= leave.slack_ns;
        if is_short && !on_width_anyway {
            return Ok(Place::Slack(cost_ns));
        }
        if on_width {
            return Ok(Place::Width(leave.width));
        }
        if cost_ns <= leave.slack_ns {
            return Ok(Place::Slack(cost_ns));
        }
        let bears_yield = !leave.is_open || leave.slack_ns > self.turnaround_ns.saturating_mul(2);
        if bears_yield && (launch.can_slice() || launch.can_preempt()) && !self.shares.time_sliced {
            let (decision, _) = self.forms.decide(launch, &self.settings.forms);
            if yields(launch, decision) {
                return Ok(Place::Yielding(decision));
            }
        }
        self.services.iter_mut().for_each(|service| service.holds());
        if !leave.is_open {
            let rest_ns = leave.next_ns.saturating_sub(now_ns).saturating_add(GRACE_NS);
            return Err(Decision::Hold(rest_ns).because(Reason::NextStep));
        }
        Err(Decision::Hold(hold_ns).because(Reason::NoSlack))
    }

    /// It has waited for too long, and so has its client: a program that runs ahead has many launches that waited.
    fn is_overdue(&self, launch: &Launch) -> bool {
        let last_ns = self.overdue_ns.get(&launch.client);
        let since_ns = last_ns.map_or(u64::MAX, |last_ns| launch.now_ns.saturating_sub(*last_ns));
        launch.waited_ns.min(since_ns) >= self.settings.wait_ns_max
    }

    /// What services leave to a launch; `None`: everything.
    fn leave(&self, launch: &Launch, cost_ns: u64, has_work: bool) -> Option<Leave> {
        let now_ns = launch.now_ns;
        let ends_ns = now_ns.saturating_add(launch.in_flight_ns).saturating_add(cost_ns);
        let of = |service: &Service| {
            let next_ns = 0;
            if service.is_open() && has_work {
                let is_step = service.is_in_step(now_ns);
                let slack_ns = if is_step { service.left_ns() } else { u64::MAX };
                return Some(Leave { width: service.width(), slack_ns, is_open: true, next_ns });
            }
            let is_awaited = |ns: &u64| *ns < ends_ns && now_ns < ns.saturating_add(GRACE_NS);
            let next_ns = service.rhythm.next_ns().filter(is_awaited)?;
            let slack_ns = service.bears_ns(&self.settings);
            Some(Leave { width: service.widths.sms(), slack_ns, is_open: false, next_ns })
        };
        self.services.iter().filter_map(of).reduce(|a, b| Leave {
            width: a.width.min(b.width),
            slack_ns: a.slack_ns.min(b.slack_ns),
            is_open: a.is_open || b.is_open,
            next_ns: a.next_ns.max(b.next_ns),
        })
    }

    /// GPU time that a launch is taken to need on all SMs.
    pub(crate) fn cost_ns(&self, launch: &Launch) -> u64 {
        let switch_ns = if self.shares.time_sliced { self.settings.switch_ns } else { 0 };
        let predicted_ns = match launch.predicted_ns {
            UNKNOWN => limited_only_ns(launch).unwrap_or(self.settings.unknown_ns),
            ns => ns,
        };
        predicted_ns.saturating_add(switch_ns)
    }

    /// How a launch runs there, and until when it may be under way.
    pub(crate) fn form(&mut self, launch: &Launch, place: Place, cost_ns: u64) -> (Decision, u64) {
        let whole = (Decision::Run(0), cost_ns);
        match place {
            Place::Width(sms) => self.limited(launch, cost_ns, sms),
            Place::Yielding(decision) => (decision, cost_ns),
            _ if self.shares.time_sliced => whole,
            Place::Between if cost_ns > self.bears_ns() => (self.between(launch, cost_ns), cost_ns),
            Place::Overdue if can_limit(launch) => {
                self.limited(launch, cost_ns, self.least_width())
            }
            Place::Overdue => (self.yielding(launch), cost_ns),
            _ => whole,
        }
    }

    fn limited(&self, launch: &Launch, cost_ns: u64, sms: u32) -> (Decision, u64) {
        let sms = sms.max(1);
        let ns = scaled(cost_ns, launch.sms().into(), sms.into()).saturating_add(HOP_NS);
        (Decision::SmLimited(sms), ns)
    }

    /// The form that `tally-priority` would choose.
    fn yielding(&mut self, launch: &Launch) -> Decision {
        self.forms.decide(launch, &self.settings.forms).0
    }

    /// The least that a step which begins at any time can bear.
    pub(crate) fn bears_ns(&self) -> u64 {
        let settings: &Settings = &self.settings;
        self.services.iter().map(|service| service.bears_ns(settings)).min().unwrap_or(u64::MAX)
    }

    /// A step that begins meanwhile, as it may at any time, could not bear it: whole if each service takes that risk.
    fn between(&mut self, launch: &Launch, cost_ns: u64) -> Decision {
        let (ns, settings) = (self.under_way_ns(launch, cost_ns), &self.settings);
        let bears = |one: &Service| ns <= one.bears_ns(settings) || one.risks(ns, settings);
        if !self.services.iter().all(bears) {
            return self.yielding(launch);
        }
        // A form that is not there yet has to be asked for.
        let asks = launch.can_prepare() && !launch.can_preempt();
        match asks.then(|| self.yielding(launch)) {
            Some(Decision::Preemptible) => Decision::Preemptible,
            _ => Decision::Run(0),
        }
    }

    /// How long all that is under way takes, with this launch.
    pub(crate) fn under_way_ns(&self, launch: &Launch, cost_ns: u64) -> u64 {
        // That of other clients only as far as a service took the risk: else it is short.
        let unborne_ns = self.services.iter().map(|service| service.unborne_until_ns).max();
        let until_ns = self.busy.until_ns.max(unborne_ns.unwrap_or(0));
        let under_way_ns = until_ns.saturating_sub(launch.now_ns).max(launch.in_flight_ns);
        under_way_ns.saturating_add(cost_ns)
    }

    /// The fewest SMs that a launch can be limited to.
    pub(crate) fn least_width(&self) -> u32 {
        self.services.first().map_or(1, |one| one.widths.least_sms())
    }

    /// The least width of all services.
    pub(crate) fn width(&self) -> u32 {
        self.services.iter().map(|one| one.widths.sms()).min().unwrap_or(self.sm_count)
    }

    /// Each service bears all SMs beside its steps.
    pub(crate) fn is_free(&self) -> bool {
        let mut services = self.services.iter();
        services.all(|service| !service.is_strict() && service.widths.is_all())
    }
}

/// Whether a launch can stop in this form.
pub fn yields(launch: &Launch, decision: Decision) -> bool {
    matches!(launch.runs_as(decision), Form::Sliced | Form::Preemptible)
}

/// Whether it can run on some of the SMs.
fn can_limit(launch: &Launch) -> bool {
    launch.can_limit() && !launch.state.contains(LaunchState::COOPERATIVE)
}

/// It cannot be limited yet, for its code was not read.
pub fn is_unread(launch: &Launch) -> bool {
    launch.can_prepare() && !launch.can_limit() && !launch.is_graph()
}

/// Of a kernel that ran limited only, what it would take on all SMs.
fn limited_only_ns(launch: &Launch) -> Option<u64> {
    if launch.kernel == NO_KERNEL || !launch.can_limit() {
        return None;
    }
    let profile = host::kernel_profile(launch.kernel)?;
    let limited = |form: &&tally_sdk::FormProfile| form.form == Form::SmLimited && form.count > 0;
    let form = profile.forms.iter().find(limited)?;
    let ns = form.p50_ns.saturating_sub(HOP_NS);
    Some(scaled(ns, form.argument.into(), launch.sms().into()).max(1))
}
