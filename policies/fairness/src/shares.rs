//! What policies do with weights and floors alike, whatever else they decide by.

use crate::floor::BURST_NS;
use crate::long::LongLaunch;
use crate::saved::{numbers, put_line};
use crate::{Due, Floors, Rounds, SavedRounds};
use tally_sdk::{
    Answer, Client, ClientId, Clients, Decision, Launch, PriorityClass, SharingMode, Terms,
    WINDOW_OPEN, host,
};

/// Least part of a window: a shorter one would have the GPU wait for the program.
const WINDOW_NS_MIN: u64 = 100_000;

/// First word of a line that is saved.
const SHARES: &str = "shares";

/// The clients that are connected, and how those of best effort share the GPU.
#[derive(Debug, Default)]
pub struct Shares {
    /// Who is connected, and on which terms.
    pub clients: Clients,
    /// Who goes first, by weight.
    pub rounds: Rounds,
    /// Who is to get a share at least.
    pub floors: Floors,
    /// Contexts take turns. Known from the first client on.
    pub time_sliced: bool,
    /// Of several beside high-priority clients.
    long: LongLaunch,
    /// Of each client, as set last, and how many had work then.
    window_ns: u64,
    parts: usize,
    /// Several share, and have had leases since a high-priority client joined.
    has_leases: bool,
    /// The timer of [`Floors::wake`]; `None`: nobody is ever asked to yield.
    timer: Option<u64>,
    /// What was saved of rounds, floors and long launches, until the first client joins.
    saved: Option<(SavedRounds, Floors, LongLaunch)>,
}

impl Shares {
    /// For a policy that asks clients to yield, which needs a timer with this token for floors. For others:
    /// [`Shares::default`].
    pub fn with_timer(token: u64) -> Self {
        Shares { timer: Some(token), ..Shares::default() }
    }

    /// A client registered. With the first one rounds begin, or go on from what was saved. `turn_ns` gives the GPU time
    /// of a client in a round by the sharing mode, which the core does not know before.
    pub fn joined(
        &mut self,
        now_ns: u64,
        client: &Client,
        turn_ns: impl FnOnce(SharingMode) -> u64,
    ) {
        if self.clients.high() + self.clients.best_effort() == 0 {
            let mode = host::sharing_mode();
            self.begin(now_ns, mode, turn_ns(mode));
        }
        self.clients.joined(client);
        if client.class == PriorityClass::BestEffort {
            self.rounds.joined(client);
        } else if std::mem::take(&mut self.has_leases) {
            self.clients.best_effort_ids().for_each(host::revoke_lease);
        }
    }

    fn begin(&mut self, now_ns: u64, mode: SharingMode, turn_ns: u64) {
        self.time_sliced = mode == SharingMode::TimeSliced;
        let rounds = match mode {
            SharingMode::Concurrent => Rounds::side_by_side(turn_ns),
            SharingMode::TimeSliced => Rounds::one_at_a_time(turn_ns),
        };
        self.rounds = match self.saved.take() {
            Some((saved, floors, long)) => {
                (self.floors, self.long) = (floors, long.bound(now_ns));
                rounds.after(now_ns, saved)
            }
            None => rounds,
        };
        if let Some(timer) = self.timer {
            self.floors.wake_again(now_ns, timer);
        }
    }

    /// Forgets a client that is gone.
    pub fn left(&mut self, client: ClientId) {
        self.clients.left(client);
        self.rounds.left(client);
        self.floors.left(client);
    }

    /// The answer to a launch as the floor of its client changes it; the given one if it has none. A hold ends when the
    /// client will be due. `may_yield`: the client may be asked to yield meanwhile, so a timer looks at its floor
    /// again. Also whether the launch goes for the sake of the floor, which is the `reason` then.
    pub fn with_floor(
        &mut self,
        launch: &Launch,
        answer: Answer,
        due: Option<Due>,
        may_yield: bool,
        reason: impl Into<u8>,
    ) -> (Answer, bool) {
        let Some(due) = due else { return (answer, false) };
        let decision = match due.shorten(answer.decision) {
            // What it has had is to be looked at with each launch.
            Decision::Run(_) if launch.high_clients > 0 => Decision::Run(0),
            decision => decision,
        };
        if matches!(decision, Decision::Hold(_) | Decision::HoldUntilCompletion(_)) {
            return (decision.because(answer.reason), false);
        }
        if may_yield && let Some(timer) = self.timer {
            self.floors.wake(launch.now_ns, launch.client, timer);
        }
        let is_contended = launch.high_active() || self.rounds.is_shared();
        let for_floor = due == Due::Now && is_contended;
        let reason = if for_floor { reason.into() } else { answer.reason };
        (decision.because(reason), for_floor)
    }

    /// The timer for floors fired. Whether somebody became due or is no longer.
    pub fn fired(&mut self, now_ns: u64) -> bool {
        if let Some(timer) = self.timer {
            self.floors.fired(now_ns, timer);
        }
        self.floors.take_changed()
    }

    /// Launches of a lease: none where several share, for each launch has to be asked about.
    pub fn lease(&self, launches: u32) -> u32 {
        if self.rounds.is_shared() { 0 } else { launches }
    }

    /// Launches that may follow this one unasked, where it waits for no high-priority work: so many, or a few where
    /// several share.
    pub fn lease_behind(&mut self, launch: &Launch, launches: u32) -> u32 {
        if !self.rounds.is_shared() {
            return launches;
        }
        // What a client with a floor has had is looked at with each launch.
        if launches == 0 || self.floors.concern(launch) {
            return 0;
        }
        let few = self.rounds.lease(launch);
        self.has_leases |= few > 0;
        few.min(launches)
    }

    /// A client's window. High-priority work waits for all that is under way, so that the clients that have work share
    /// one window beside it. And it is no longer than others may have to wait for.
    pub fn window_ns(&self, window_ns: u64) -> u64 {
        let parts = match self.time_sliced || self.clients.high() == 0 {
            true => 1,
            false if self.rounds.is_shared() => self.rounds.active() as u64,
            // Nobody looks at who has work.
            false => self.clients.best_effort().max(1) as u64,
        };
        let part_ns = (window_ns / parts).max(window_ns.min(WINDOW_NS_MIN));
        let most_ns = if self.rounds.is_shared() { self.rounds.window_ns() } else { WINDOW_OPEN };
        part_ns.min(most_ns)
    }

    /// More or fewer clients have work than when terms were set last: they are to be set again. To be asked after each
    /// [`Shares::hold`], so that nothing but what is saved says which terms a client has.
    #[inline]
    pub fn has_new_parts(&self) -> bool {
        let parts = if self.rounds.is_shared() { self.rounds.active() } else { self.parts.max(1) };
        self.parts != parts
    }

    /// Who is due by its floor has changed: [`Shares::has_new_parts`] then, so that terms are set once in a call, which
    /// takes time for each client.
    pub fn wants_terms(&mut self) {
        self.parts = 0;
    }

    /// A best-effort launch that could start now: `None`, or the decision by which it waits for its turn. One `is_due`
    /// by its client's floor does not.
    #[inline]
    pub fn hold(&mut self, launch: &Launch, is_due: bool) -> Option<Decision> {
        if is_due {
            self.rounds.goes_first(launch);
            return None;
        }
        self.rounds.hold(launch)
    }

    /// A best-effort launch starts beside high-priority clients, unless it waits for another client's long one, which
    /// one that is due does not.
    pub fn hold_long(&mut self, launch: &Launch, is_due: bool) -> Option<Decision> {
        let are_several = self.clients.best_effort() > 1;
        if self.time_sliced || launch.high_clients == 0 || !are_several {
            return None;
        }
        let (floors, window_ns) = (&self.floors, self.window_ns);
        let window_of = |other| match floors.is_due(other) {
            true => window_due(window_ns),
            false => window_ns,
        };
        self.long.hold(launch, window_ns, window_of, is_due)
    }

    /// Give best-effort clients these terms, but for leases where several share. Who is due by its floor does not
    /// yield, and has room for all that it is owed: it would not get on.
    pub fn set_terms(&mut self, terms: Terms) {
        (self.window_ns, self.parts) = (terms.window_ns, self.rounds.active());
        let leases = terms.leases && !self.rounds.is_shared();
        let others = Terms { leases, ..terms };
        let due = Terms { yields: None, window_ns: window_due(terms.window_ns), ..others };
        let are_due: Vec<ClientId> = self.floors.are_due().collect();
        self.clients.set_terms_of(|client| match are_due.binary_search(&client) {
            Ok(_) => due,
            Err(_) => others,
        });
    }

    /// Lines for all of this; nothing if there are no rounds, floors or long launches.
    pub fn saved(&self) -> String {
        let mut lines = self.rounds.saved() + &self.floors.saved() + &self.long.saved();
        if self.has_leases {
            put_line(&mut lines, SHARES, [1]);
        }
        lines
    }

    /// Go on from such lines, among others, once the first client joins.
    pub fn restore(&mut self, lines: &str) {
        let shares = lines.lines().find_map(|line| numbers(line, SHARES));
        self.has_leases = shares.is_some_and(|[has_leases]| has_leases > 0);
        let saved = (SavedRounds::read(lines), Floors::read(lines), LongLaunch::read(lines));
        self.saved = Some(saved);
    }
}

/// The window of who is due by its floor: room for what it is owed.
fn window_due(window_ns: u64) -> u64 {
    window_ns.max(BURST_NS)
}

#[cfg(test)]
mod tests;
