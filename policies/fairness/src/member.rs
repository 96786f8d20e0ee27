//! What is known of a client that takes part: its weight, what it used, and whether it has work.

use crate::{IDLE_NS, MOMENT_NS, PAUSE_NS, RESTORED_ROUNDS, WALL};
use tally_sdk::{ClientId, ClientState, NEVER};

/// A client that takes part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) id: ClientId,
    pub(crate) weight: u64,
    pub(crate) quantum_ns: i64,
    pub(crate) credit_ns: i64,
    /// Time for which it was backlogged, less the GPU time that it got. Halved with each round.
    pub(crate) lost_ns: i64,
    /// When it was looked at last; `None`: not yet.
    pub(crate) used: Option<Used>,
    pub(crate) waits: bool,
    /// The policy has kept its launch back since anybody was asked about it here.
    pub(crate) is_kept_back: bool,
    pub(crate) in_flight: bool,
    /// How long it has had something on the GPU since it was charged last, or something ended.
    pub(crate) stalled_ns: u64,
    /// When it was last backlogged.
    pub(crate) active_ns: u64,
    /// The last time that it was not, it launched again within [`PAUSE_NS`].
    pub(crate) returns_soon: bool,
    /// It was read from a saved state and has not been looked at since.
    pub(crate) is_restored: bool,
    /// The longest of its latest launches that were asked about.
    pub(crate) longest_ns: u64,
    /// Places that were given before it had its own.
    pub(crate) place: u64,
}

impl Member {
    pub(crate) fn none(id: ClientId) -> Self {
        Member {
            id,
            weight: 1,
            quantum_ns: i64::MAX,
            credit_ns: i64::MAX,
            lost_ns: 0,
            used: None,
            waits: false,
            is_kept_back: false,
            in_flight: false,
            stalled_ns: 0,
            active_ns: 0,
            returns_soon: false,
            is_restored: false,
            longest_ns: 0,
            place: 0,
        }
    }

    pub(crate) fn is_backlogged(&self) -> bool {
        self.waits || self.in_flight
    }

    /// What it has on the GPU does not end.
    pub(crate) fn is_overdue(&self) -> bool {
        self.used.is_some_and(|used| used.assumed_ns > 0)
    }

    /// It has had no work for long.
    pub(crate) fn idles(&self, now_ns: u64) -> bool {
        !self.is_backlogged() && now_ns >= self.active_ns.saturating_add(IDLE_NS)
    }

    pub(crate) fn was_just_now(&self, now_ns: u64) -> bool {
        now_ns < self.moment_ends_ns()
    }

    pub(crate) fn moment_ends_ns(&self) -> u64 {
        self.active_ns.saturating_add(MOMENT_NS)
    }

    pub(crate) fn pause_ends_ns(&self) -> u64 {
        self.active_ns.saturating_add(PAUSE_NS)
    }

    /// Within what a few rounds amount to. `round_ns` is the GPU time of a round of all clients, `turn_ns` that of a
    /// client of average weight.
    pub(crate) fn bound(&mut self, round_ns: u64, turn_ns: u64) {
        let signed = |ns: u64| 0_i64.saturating_add_unsigned(ns.saturating_mul(RESTORED_ROUNDS));
        let debt_ns = signed(turn_ns.max(self.quantum_ns.unsigned_abs()));
        let lost_ns = signed(round_ns.saturating_mul(WALL));
        self.credit_ns = self.credit_ns.clamp(-debt_ns, self.quantum_ns);
        self.lost_ns = self.lost_ns.clamp(-lost_ns, lost_ns);
    }

    /// What it did in the time since it was looked at last.
    pub(crate) fn look(&mut self, state: &ClientState, now_ns: u64, since: &Passed) {
        let was_backlogged = self.is_backlogged();
        let had_in_flight = self.in_flight;
        let before = self.used;
        let now = (state.charged_ns, state.in_flight_ns);
        let has_moved = before.is_none_or(|before| now != (before.charged_ns, before.in_flight_ns));
        let is_same = had_in_flight && state.in_flight > 0 && !has_moved;
        self.stalled_ns = if is_same { self.stalled_ns.saturating_add(since.passed_ns) } else { 0 };
        let now = Used {
            charged_ns: state.charged_ns,
            in_flight_ns: state.in_flight_ns,
            assumed_ns: self.stalled_ns.saturating_sub(since.drain_ns),
        };
        let before = self.used.replace(now).unwrap_or(now);
        self.credit_ns = self.credit_ns.saturating_sub(more(now.all_ns(), before.all_ns()));
        // What was assumed and is not charged is not to be saved up.
        self.credit_ns = self.credit_ns.min(self.quantum_ns);
        let got_ns = more(now.got_ns(), before.got_ns());
        let waited_ns = since.waited_ns;
        let backlogged_ns = if was_backlogged { waited_ns } else { 0 };
        self.lost_ns = self.lost_ns.saturating_sub(got_ns).saturating_add_unsigned(backlogged_ns);
        self.waits = state.waiting_since_ns != NEVER;
        self.in_flight = state.in_flight > 0;
        if !was_backlogged && self.is_backlogged() {
            self.returns_soon = now_ns < self.pause_ends_ns();
        }
        // What ended meanwhile ended just now, as far as anybody can tell.
        if was_backlogged || self.is_backlogged() {
            self.active_ns = now_ns;
        }
    }
}

/// GPU time of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub(crate) charged_ns: u64,
    pub(crate) in_flight_ns: u64,
    /// What it is taken to use beyond that.
    pub(crate) assumed_ns: u64,
}

impl Used {
    pub(crate) fn got_ns(self) -> u64 {
        self.charged_ns.saturating_add(self.assumed_ns)
    }

    pub(crate) fn all_ns(self) -> u64 {
        self.got_ns().saturating_add(self.in_flight_ns)
    }
}

/// Time since all clients were looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    /// Without that of high-priority work.
    pub(crate) passed_ns: u64,
    /// For which who waits has waited.
    pub(crate) waited_ns: u64,
    /// What a client has on the GPU may take so long until it is charged.
    pub(crate) drain_ns: u64,
}

fn more(now_ns: u64, before_ns: u64) -> i64 {
    0_i64.saturating_add_unsigned(now_ns).saturating_sub_unsigned(before_ns)
}
