//! High priority at once, best effort while there is none, in the form that yields soonest at least cost: Tally's
//! scheduler (ASPLOS 2025, section 4).
//!
//! ```text
//! decide(launch):                                                            here: Priority::decide_by
//!     if launch is high priority:                            run
//!     if its client is due by its floor:                     go on below         Floors::due
//!     else if a high-priority client is connected:
//!         if high-priority work is active:                   hold until that changes
//!         if it has been idle for less than idle_gap:        hold for the rest of the gap
//!     if not due, and other best-effort clients go first:    hold                Shares::hold, by weight
//!     if no high-priority client is connected:               run; with a lease, long if nobody shares
//!     if not due, and longer than the window, as is another client's that is under way:
//!                                                            hold until that ends            Shares::hold_long
//!     run as form(launch)                                                        Forms::decide
//!     (a hold lasts at most until its client is due)                             Shares::with_floor
//!
//! form(launch):                                                              in tally_forms
//!     if it is a graph:                                      in parts of about graph_part    graph_form
//!     if its predicted time is within the turnaround bound:  whole
//!     if it can be transformed and is not yet:               ask for that, now and then      Forms::prepare
//!     candidates := whole, preemptible, sliced in 2 or 3 sizes, SM-limited                   candidates
//!     for each: its time and its turnaround, measured, or estimated until then               Entry::review
//!     of those within the slowdown limit:                                                    choose
//!         that keep the bound, but for SM-limited:           the fastest
//!         else of those near the least turnaround:           the fastest, SM-limited included
//!         else:                                              whole
//!     but for a small share of launches: a form that would win if it were as fast as the whole kernel
//! ```
//!
//! The core does two things by itself, because a call would come too late. Sliced and preemptible launches yield when
//! high-priority work appears, and go on after the idle gap (`set-auto-yield`). At most `window` of best-effort
//! kernels and one that is longer are under way at once: that is what a high-priority launch may have to wait behind.
//! (But each of many clients has 100 us, and launches go at once that were never measured or are due by a floor.)
//!
//! How clients share the GPU decides which half is in use. Where kernels run at once (`concurrent`), forms keep
//! kernels short. Where contexts take turns (`time-sliced`), the hardware interrupts kernels anyway: they run whole,
//! and one best-effort client launches at a time, for some milliseconds.
//!
//! | read | for |
//! | --- | --- |
//! | this file | when a launch starts |
//! | [`settings`] | the constants, with defaults for each sharing mode |
//! | [`tally_forms`] | `concurrent`: the form of each launch; a crate, for `slo-herald` needs it too |
//! | [`tally_fairness`] | not of the paper: which of several best-effort clients launches, and floors; a crate, too |
//!
//! `docs/policy-settings.md` says where this differs from the paper, and why.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod settings;

use settings::Settings;
use tally_fairness::{Due, Shares};
use tally_forms::{Forms, Why};
use tally_sdk::{
    Answer, Client, ClientId, Counters, Decision, HOLD_UNTIL_CHANGE, Launch, Level, Membership,
    Policy, Saved, SharingMode, Stateful, Terms, Timer, WINDOW_OPEN, host,
};

tally_sdk::reasons! {
    HighActive = "high-priority work is active",
    IdleGap = "the idle gap after high-priority work",
    NotItsTurn = "other best-effort clients' share of the GPU",
    Alone = "no high-priority client is connected",
    Short = "no form other than whole is needed",
    Chosen = "the best form of this kernel",
    Tried = "to measure this form",
    Prepared = "to have this kernel transformed",
    Floor = "less than the client's least share of the GPU",
}

/// The timer of clients whose launches under way are not to yield any longer.
const FLOORS: u64 = 0;

/// The policy's memory: its constants, what it knows of kernels, who is connected.
pub struct Priority {
    /// Of the sharing mode, which the core knows once the first client joins.
    settings: Settings,
    configured: Configured,
    shares: Shares,
    for_floors: Counters<1>,
    forms: Forms,
}

/// The constants of each sharing mode, and the same as text. Read before the policy takes over: launches wait for its
/// first client.
struct Configured {
    concurrent: (Settings, String),
    time_sliced: (Settings, String),
}

impl Policy for Priority {
    fn init(config: &str) -> Result<Self, String> {
        let configured = Configured {
            concurrent: Settings::read(config, SharingMode::Concurrent)?,
            time_sliced: Settings::read(config, SharingMode::TimeSliced)?,
        };
        let (settings, in_force) = configured.concurrent.clone();
        host::log(Level::Info, &in_force);
        Reason::define_all();
        Ok(Priority {
            settings,
            configured,
            shares: Shares::with_timer(FLOORS),
            for_floors: Counters::new(["launches_for_min_share"]),
            forms: Forms::new(&settings.forms, in_force),
        })
    }

    // Rare paths get a copy of the launch: as long as its address goes nowhere it stays in registers.
    #[inline(always)]
    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        if !self.shares.floors.concern(launch) {
            return self.decide_by(launch, false);
        }
        self.decide_with_floors(*launch)
    }
}

impl Priority {
    /// A best-effort launch while clients have floors. Apart, so that others do not pay for it.
    #[cold]
    #[inline(never)]
    fn decide_with_floors(&mut self, launch: Launch) -> Answer {
        let launch = &launch;
        let due = self.shares.floors.due(launch);
        let is_changed = self.shares.floors.take_changed();
        if is_changed {
            self.shares.wants_terms();
        }
        let answer = self.decide_by(launch, due == Some(Due::Now));
        if is_changed && self.shares.has_new_parts() {
            self.set_terms();
        }
        let may_yield = self.yields().is_some();
        let (answer, for_floor) =
            self.shares.with_floor(launch, answer, due, may_yield, Reason::Floor);
        if for_floor {
            self.for_floors.add(0, 1);
            self.for_floors.tick(launch.now_ns);
        }
        answer
    }

    /// A best-effort launch, of a client that is due by its floor or not.
    #[inline(always)]
    fn decide_by(&mut self, launch: &Launch, is_due: bool) -> Answer {
        let is_alone = launch.high_clients == 0;
        if !is_alone && !is_due && launch.high_active() {
            // Offered again when it ends; no need to ask in between.
            return Decision::Hold(HOLD_UNTIL_CHANGE).because(Reason::HighActive);
        }
        // A program that waits for the GPU within a request launches again some tens of
        // microseconds later. Started there, a kernel would be in the way.
        let rest_ns = self.settings.idle_gap_ns.saturating_sub(launch.high_idle_ns);
        if !is_alone && !is_due && rest_ns > 0 {
            return Decision::Hold(rest_ns).because(Reason::IdleGap);
        }
        let hold = self.shares.hold(launch, is_due);
        if self.shares.has_new_parts() {
            self.set_terms();
        }
        if let Some(hold) = hold {
            return hold.because(Reason::NotItsTurn);
        }
        if is_alone {
            let lease = self.shares.lease_behind(launch, self.settings.lease_launches);
            return Decision::Run(lease).because(Reason::Alone);
        }
        if let Some(hold) = self.shares.hold_long(launch, is_due) {
            return hold.because(Reason::NotItsTurn);
        }
        let (decision, why) = self.forms.decide(launch, &self.settings.forms);
        decision.because(match why {
            Why::Short => Reason::Short,
            Why::Chosen => Reason::Chosen,
            Why::Tried => Reason::Tried,
            Why::Prepared => Reason::Prepared,
        })
    }
}

impl Timer for Priority {
    fn fired(&mut self, now_ns: u64, _token: u64) {
        if self.shares.fired(now_ns) {
            self.set_terms();
        }
    }
}

impl Membership for Priority {
    fn joined(&mut self, now_ns: u64, client: &Client) {
        self.shares.joined(now_ns, client, |mode| {
            let (settings, in_force) = match mode {
                SharingMode::Concurrent => &self.configured.concurrent,
                SharingMode::TimeSliced => &self.configured.time_sliced,
            };
            if *settings != self.settings {
                host::log(Level::Info, in_force);
            }
            self.settings = *settings;
            settings.turn_ns
        });
        self.change_terms();
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.shares.left(client);
        self.change_terms();
    }
}

impl Priority {
    /// Somebody joined or left: what was given freely is taken back, or given again.
    fn change_terms(&mut self) {
        self.set_terms();
        self.for_floors.hand_over();
        self.forms.hand_over();
    }

    /// The idle gap until launches that yielded go on; `None`: none yields.
    fn yields(&self) -> Option<u64> {
        let is_alone = self.shares.clients.high() == 0;
        (!is_alone && self.settings.forms.forms).then_some(self.settings.idle_gap_ns)
    }

    fn set_terms(&mut self) {
        let is_alone = self.shares.clients.high() == 0;
        let window_ns = if is_alone { WINDOW_OPEN } else { self.settings.window_ns };
        let window_ns = self.shares.window_ns(window_ns);
        self.shares.set_terms(Terms { window_ns, leases: is_alone, yields: self.yields() });
    }
}

/// The constants come from the configuration and the clients from the core: what
/// outlives a reload is what was measured of kernels, who owes time, and who is owed some by its floor.
impl Stateful for Priority {
    fn snapshot(&self) -> Saved {
        self.forms.snapshot(&self.shares.saved())
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let saved = self.forms.restore(from)?;
        self.shares.restore(&saved);
        Ok(())
    }
}

tally_sdk::export!(Priority: membership, timer, state);

#[cfg(test)]
mod tests;
