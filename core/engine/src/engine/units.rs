//! Units of work of high-priority clients: what a caller saw of them, for the policy.

use super::{Action, Engine};
use crate::policy::{
    ClientId, Event, NEVER, Objective, Policy, ServiceView, Subscriptions, TokensView, UnitProfile,
};

/// Units that ended and took as long each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedUnits {
    pub units: u32,
    /// What each took, ns.
    pub took_ns: u64,
    /// They began with the launch of a CUDA graph: see [`OpenUnit::is_token`].
    pub is_token: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenUnit {
    /// When it began, as far as the caller knows, ns.
    pub since_ns: u64,
    /// It began with the launch of a CUDA graph: the objective for tokens is its own, too.
    pub is_token: bool,
}

impl From<u64> for OpenUnit {
    fn from(since_ns: u64) -> Self {
        OpenUnit { since_ns, is_token: false }
    }
}

impl<P: Policy> Engine<P> {
    /// A client's objective from now on, and its longest time of a token, ns. Where one of them changes its latest
    /// units begin anew, and a unit that is open may have another deadline. False for a client that has no units.
    pub fn set_objectives(
        &mut self,
        now_ns: u64,
        client: ClientId,
        objective: Option<Objective>,
        tpot_ns: Option<u64>,
        out: &mut Vec<Action>,
    ) -> bool {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        let (Some(view), Some(c)) = (view, self.clients.get_mut(client)) else { return false };
        let before_ns = view.deadline_ns();
        let is_other_tpot = view.tokens.map(|tokens| tokens.tpot_ns) != tpot_ns;
        if !is_other_tpot && view.objective == objective {
            return true;
        }
        if is_other_tpot {
            c.tokens.clear();
            view.tokens = tpot_ns.map(|tpot_ns| {
                let TokensView { count, within, .. } =
                    view.tokens.unwrap_or(TokensView::new(tpot_ns));
                TokensView { count, within, ..TokensView::new(tpot_ns) }
            });
        }
        view.objective = objective;
        c.units.clear();
        c.units.show(view);
        if view.open_since_ns != NEVER && view.deadline_ns() != before_ns {
            self.tell_open_unit(now_ns, client, out);
        }
        self.offer_after_unit(now_ns, out);
        true
    }

    /// What was counted of a client's tokens does not tell of those to come.
    pub fn forget_tokens(&mut self, client: ClientId) {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        let tokens = view.and_then(|view| view.tokens.as_mut());
        if let (Some(tokens), Some(c)) = (tokens, self.clients.get_mut(client)) {
            c.tokens.clear();
            *tokens = TokensView::new(tokens.tpot_ns);
        }
    }

    /// So many tokens of a client ended that took so long each. Only a client with an objective for tokens has any.
    pub fn tokens_ended(&mut self, client: ClientId, tokens: u32, took_ns: u64) {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        let Some(view) = view.and_then(|view| view.tokens.as_mut()) else { return };
        let Some(c) = self.clients.get_mut(client) else { return };
        view.count = view.count.saturating_add(tokens.into());
        let is_kept = took_ns <= view.tpot_ns;
        if is_kept {
            view.within = view.within.saturating_add(tokens.into());
        }
        c.tokens.add(tokens, took_ns, is_kept);
        c.tokens.show_tokens(view);
    }

    /// A unit of a client was profiled.
    pub fn unit_profiled(&mut self, client: ClientId, profile: UnitProfile) {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        if let Some(view) = view {
            view.profile = Some(profile);
        }
    }

    /// What was counted of a client's units does not tell of those to come.
    pub fn forget_units(&mut self, client: ClientId) {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        if let (Some(view), Some(c)) = (view, self.clients.get_mut(client)) {
            c.units.clear();
            *view = ServiceView {
                open_since_ns: view.open_since_ns,
                open_is_token: view.open_is_token,
                tokens: view.tokens,
                profile: view.profile,
                ..ServiceView::new(view.objective)
            };
        }
    }

    /// A high-priority client's unit began.
    pub fn unit_began(
        &mut self,
        now_ns: u64,
        client: ClientId,
        open: impl Into<OpenUnit>,
        out: &mut Vec<Action>,
    ) {
        let OpenUnit { since_ns, is_token } = open.into();
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        let Some(view) = view else { return };
        let since_ns = since_ns.min(now_ns);
        (view.open_since_ns, view.open_is_token) = (since_ns, is_token);
        let deadline_ns = view.deadline_ns();
        self.tell(now_ns, &Event::UnitBegan { client, since_ns, deadline_ns }, out);
    }

    /// A high-priority client's open unit is over, and perhaps others before; it is not known how long it took if none
    /// ended. `open`: the next one has begun. What is held is offered once the policy knows both.
    pub fn units_ended(
        &mut self,
        now_ns: u64,
        client: ClientId,
        ended: &[EndedUnits],
        open: Option<OpenUnit>,
        out: &mut Vec<Action>,
    ) {
        let view = self.context.world.clients.get_mut(&client).and_then(|c| c.service.as_mut());
        let (Some(view), Some(c)) = (view, self.clients.get_mut(client)) else { return };
        (view.open_since_ns, view.open_is_token) = (NEVER, false);
        let (mut units_all, mut sum_ns) = (0_u32, 0_u64);
        for &EndedUnits { units, took_ns, is_token } in ended {
            let is_kept = view.longest_ns(is_token).is_some_and(|longest_ns| took_ns <= longest_ns);
            view.units = view.units.saturating_add(units.into());
            if is_kept {
                view.units_within = view.units_within.saturating_add(units.into());
            }
            c.units.add(units, took_ns, is_kept);
            units_all = units_all.saturating_add(units);
            sum_ns = sum_ns.saturating_add(took_ns.saturating_mul(units.into()));
        }
        c.units.show(view);
        let took_ns = sum_ns.checked_div(units_all.into()).unwrap_or(0);
        self.tell(now_ns, &Event::UnitsEnded { client, units: units_all, took_ns }, out);
        if let Some(open) = open {
            self.unit_began(now_ns, client, open, out);
        }
        self.offer_after_unit(now_ns, out);
    }

    /// What the policy held for a unit may start.
    fn offer_after_unit(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        if self.policy.subscriptions().has(Subscriptions::UNITS) {
            self.offer_all = true;
            self.settle(now_ns, out);
        }
    }

    /// A client leaves: nobody knows how long its open unit took.
    pub(super) fn end_open_unit(&mut self, now_ns: u64, client: ClientId, out: &mut Vec<Action>) {
        if self.open_unit(client).is_some() {
            self.units_ended(now_ns, client, &[], None, out);
        }
    }

    fn open_unit(&self, client: ClientId) -> Option<OpenUnit> {
        let view = self.context.world.clients.get(&client)?.service?;
        let unit = OpenUnit { since_ns: view.open_since_ns, is_token: view.open_is_token };
        (unit.since_ns != NEVER).then_some(unit)
    }

    fn tell_open_unit(&mut self, now_ns: u64, client: ClientId, out: &mut Vec<Action>) {
        if let Some(unit) = self.open_unit(client) {
            self.unit_began(now_ns, client, unit, out);
        }
    }

    /// Tell a policy that takes over of the units that are open.
    pub(super) fn tell_open_units(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        let clients: Vec<_> = self.context.world.clients.keys().copied().collect();
        for client in clients {
            self.tell_open_unit(now_ns, client, out);
        }
    }
}
