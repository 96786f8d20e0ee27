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
//!     if not due, and other best-effort clients go first:    hold                Rounds::hold, by weight
//!     if no high-priority client is connected:               run; with a long lease if nobody shares
//!     run as form(launch)                                                        Forms::decide
//!     (a hold lasts at most until its client is due)                             Due::shorten
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
//! high-priority work appears, and go on after the idle gap (`set-auto-yield`). At most `window` of a best-effort
//! client's kernels are under way at once: that is what a high-priority launch may have to wait behind.
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
//! `docs/policies.md` says where this differs from the paper, and why.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod settings;

use settings::Settings;
use tally_fairness::{Due, Floors, Rounds, SavedRounds};
use tally_forms::{Forms, Why};
use tally_sdk::{
    Answer, Client, ClientId, Clients, Counters, Decision, HOLD_UNTIL_CHANGE, Launch, Level,
    Membership, Policy, PriorityClass, Saved, SharingMode, Stateful, Terms, Timer, WINDOW_OPEN,
    host,
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
    /// Of the sharing mode, once that is known: see [`Priority::adapt`].
    settings: Settings,
    configured: Configured,
    rounds: Rounds,
    floors: Floors,
    for_floors: Counters<1>,
    /// What was saved of rounds and floors, until clients join.
    saved: Option<(SavedRounds, Floors)>,
    forms: Forms,
    clients: Clients,
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
            rounds: Rounds::default(),
            floors: Floors::default(),
            for_floors: Counters::new(["launches_for_min_share"]),
            saved: None,
            forms: Forms::new(&settings.forms, in_force),
            clients: Clients::default(),
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        if !self.floors.concern(launch) {
            return self.decide_by(launch, false);
        }
        let due = self.floors.due(launch);
        if self.floors.take_changed() {
            self.set_terms();
        }
        let answer = self.decide_by(launch, due == Some(Due::Now));
        match due {
            Some(due) => self.with_floor(launch, answer, due),
            None => answer,
        }
    }
}

impl Priority {
    /// A best-effort launch, of a client that is due by its floor or not.
    fn decide_by(&mut self, launch: &Launch, is_due: bool) -> Answer {
        let is_alone = launch.high_clients == 0;
        if !is_alone && !is_due && launch.high_active() {
            // Offered again when it ends; no need to ask in between.
            return Decision::Hold(HOLD_UNTIL_CHANGE).because(Reason::HighActive);
        }
        // Between the kernels of one request high priority is idle for some tens of
        // microseconds. Started there, a kernel would be in the way of the next.
        let rest_ns = self.settings.idle_gap_ns.saturating_sub(launch.high_idle_ns);
        if !is_alone && !is_due && rest_ns > 0 {
            return Decision::Hold(rest_ns).because(Reason::IdleGap);
        }
        let is_shared = self.rounds.is_shared();
        if !is_due
            && is_shared
            && let Some(hold) = self.rounds.hold(launch)
        {
            return hold.because(Reason::NotItsTurn);
        }
        if is_alone {
            let lease = if is_shared { 0 } else { self.settings.lease_launches };
            return Decision::Run(lease).because(Reason::Alone);
        }
        let (decision, why) = self.forms.decide(launch, &self.settings.forms);
        decision.because(match why {
            Why::Short => Reason::Short,
            Why::Chosen => Reason::Chosen,
            Why::Tried => Reason::Tried,
            Why::Prepared => Reason::Prepared,
        })
    }

    /// The answer to a launch of a client that has a floor.
    fn with_floor(&mut self, launch: &Launch, answer: Answer, due: Due) -> Answer {
        let decision = due.shorten(answer.decision);
        if matches!(decision, Decision::Hold(_) | Decision::HoldUntilCompletion(_)) {
            return decision.because(answer.reason);
        }
        if self.yields().is_some() {
            self.floors.wake(launch.now_ns, launch.client, FLOORS);
        }
        if due == Due::Now && (launch.high_active() || self.rounds.is_shared()) {
            self.for_floors.add(0, 1);
            self.for_floors.tick(launch.now_ns);
            return decision.because(Reason::Floor);
        }
        decision.because(answer.reason)
    }
}

impl Timer for Priority {
    fn fired(&mut self, now_ns: u64, _token: u64) {
        self.floors.fired(now_ns, FLOORS);
        if self.floors.take_changed() {
            self.set_terms();
        }
    }
}

impl Membership for Priority {
    fn joined(&mut self, now_ns: u64, client: &Client) {
        self.adapt(now_ns);
        self.clients.joined(client);
        if client.class == PriorityClass::BestEffort {
            self.rounds.joined(client);
        }
        self.change_terms();
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.clients.left(client);
        self.rounds.left(client);
        self.floors.left(client);
        self.change_terms();
    }
}

impl Priority {
    /// The core says how the GPU is shared once it has clients.
    fn adapt(&mut self, now_ns: u64) {
        let mode = host::sharing_mode();
        if self.clients.high() + self.clients.best_effort() == 0 {
            let (settings, in_force) = match mode {
                SharingMode::Concurrent => &self.configured.concurrent,
                SharingMode::TimeSliced => &self.configured.time_sliced,
            };
            if *settings != self.settings {
                host::log(Level::Info, in_force);
            }
            self.settings = *settings;
            self.rounds =
                Rounds::begin(mode, settings.turn_ns, self.saved.take(), &mut self.floors);
            self.floors.wake_again(now_ns, FLOORS);
        }
    }

    /// Somebody joined or left: what was given freely is taken back, or given again.
    fn change_terms(&mut self) {
        self.set_terms();
        self.for_floors.hand_over();
        self.forms.hand_over();
    }

    /// The idle gap until launches that yielded go on; `None`: none yields.
    fn yields(&self) -> Option<u64> {
        let is_alone = self.clients.high() == 0;
        (!is_alone && self.settings.forms.forms).then_some(self.settings.idle_gap_ns)
    }

    fn set_terms(&mut self) {
        let (is_alone, is_shared) = (self.clients.high() == 0, self.rounds.is_shared());
        let window_ns = if is_alone { WINDOW_OPEN } else { self.settings.window_ns };
        let turn_ns = if is_shared { self.rounds.window_ns() } else { WINDOW_OPEN };
        let (yields, floors) = (self.yields(), &self.floors);
        self.clients.set_terms_of(|client| Terms {
            window_ns: window_ns.min(turn_ns),
            leases: is_alone && !is_shared,
            // Who is due by its floor would not get on.
            yields: yields.filter(|_| !floors.is_due(client)),
        });
    }
}

/// The constants come from the configuration and the clients from the core: what
/// outlives a reload is what was measured of kernels, who owes time, and who is owed some by its floor.
impl Stateful for Priority {
    fn snapshot(&self) -> Saved {
        self.forms.snapshot(&(self.rounds.saved() + &self.floors.saved()))
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let saved = self.forms.restore(from)?;
        self.saved = Some((SavedRounds::read(&saved), Floors::read(&saved)));
        Ok(())
    }
}

tally_sdk::export!(Priority: membership, timer, state);

#[cfg(test)]
mod tests;
