//! How well high-priority clients are served.

use crate::objective::Objective;
use crate::policy::NEVER;
use crate::unit_profile::UnitProfile;

/// What a high-priority client needs, and how well it is served; the contract's `service`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceView {
    pub objective: Option<Objective>,
    /// When the open unit began, or [`NEVER`].
    pub open_since_ns: u64,
    /// The open unit is one of tokens: it began with the launch of a CUDA graph.
    pub open_is_token: bool,
    /// Units that ended since the client joined, and those of them that kept the objective.
    pub units: u64,
    pub units_within: u64,
    /// Latest units, and those of them that kept the objective.
    pub recent: u32,
    pub recent_within: u32,
    /// Median of the latest units; 0 if there are none.
    pub p50_ns: u64,
    pub p99_ns: u64,
    /// Of a client with an objective for tokens.
    pub tokens: Option<TokensView>,
    /// Of a client of which a unit was profiled.
    pub profile: Option<UnitProfile>,
}

/// How well an objective for tokens is kept; the contract's `tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokensView {
    /// Longest time that a token may take, ns.
    pub tpot_ns: u64,
    /// Tokens that ended since the client has had an objective for them, and those of them that kept it.
    pub count: u64,
    pub within: u64,
    /// Latest tokens, and those of them that kept the objective.
    pub recent: u32,
    pub recent_within: u32,
    /// Median of the latest tokens; 0 if there are none.
    pub p50_ns: u64,
    pub p99_ns: u64,
}

impl TokensView {
    /// Of a client without any token.
    pub fn new(tpot_ns: u64) -> Self {
        TokensView {
            tpot_ns,
            count: 0,
            within: 0,
            recent: 0,
            recent_within: 0,
            p50_ns: 0,
            p99_ns: 0,
        }
    }
}

impl ServiceView {
    /// Of a client without any unit, and without an objective for tokens.
    pub fn new(objective: Option<Objective>) -> Self {
        ServiceView {
            objective,
            open_since_ns: NEVER,
            open_is_token: false,
            units: 0,
            units_within: 0,
            recent: 0,
            recent_within: 0,
            p50_ns: 0,
            p99_ns: 0,
            tokens: None,
            profile: None,
        }
    }

    /// Longest time that a unit may take; `None` without an objective. One of tokens has theirs, too.
    pub fn longest_ns(&self, is_token: bool) -> Option<u64> {
        let tpot_ns = self.tokens.filter(|_| is_token).map(|tokens| tokens.tpot_ns);
        let slo_ns = self.objective.map(|objective| objective.slo_ns);
        slo_ns.into_iter().chain(tpot_ns).min()
    }

    /// When the open unit misses its objective, or [`NEVER`].
    pub fn deadline_ns(&self) -> u64 {
        self.longest_ns(self.open_is_token)
            .map_or(NEVER, |ns| self.open_since_ns.saturating_add(ns))
    }

    /// Time that the open unit can lose, if it takes the usual time, or has taken longer and ends now. `None` without
    /// an open unit or an objective.
    pub fn slack_ns(&self, now_ns: u64) -> Option<i64> {
        let deadline_ns = Some(self.deadline_ns()).filter(|ns| *ns != NEVER)?;
        let end_ns = now_ns.max(self.open_since_ns.saturating_add(self.p50_ns));
        Some(i64::try_from(i128::from(deadline_ns) - i128::from(end_ns)).unwrap_or(i64::MIN))
    }
}
