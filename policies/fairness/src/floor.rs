//! Floors: a client that has one gets at least a share of GPU time, whatever others do.
//!
//! What a client is *owed* grows with the time in which it has work (a launch waiting or on the GPU), by its share of
//! it, and falls by the GPU time that it is charged for. It is [`CREDIT_NS`] at most. What it had beyond its share
//! while it was let in like everybody counts against it for [`WINDOW_NS`] at most; what it had because it was due
//! counts in full. A client becomes *due* once it is owed [`BURST_NS`], and is so until it is owed nothing: where
//! contexts take turns, each change to another costs time. While it is due and has a launch on the GPU, that is taken
//! to use all of it until it is charged.
//!
//! ```text
//! owed := owed + share * backlogged time - charged time      since the last look
//! a launch of a client that is due:                          let in, until what it has on the GPU makes up for it
//! else:                                                      looked at again when it will be due
//! ```

use crate::saved::{numbers, put_line};
use tally_sdk::{ClientId, ClientState, Decision, Launch, NEVER, host};

/// Floors that are kept; further clients have none until others leave.
const FLOORS_MAX: usize = 90;
/// A client that had more than its share has as much less for at most so long.
const WINDOW_NS: u64 = 1_000_000_000;
/// GPU time that a client is owed when it becomes due, and at most.
pub(crate) const BURST_NS: u64 = 2_000_000;
const CREDIT_NS: i64 = 8_000_000;
/// What a saved state says that a client owes, or used without being charged, is believed up to its share of the
/// window, or up to one long launch if that is more: any policy may have written it.
const RESTORED_LAUNCH_NS: u64 = 100_000_000;
/// Floors that a timer looks at, at most: those that were to be looked at first.
const LOOKS_MAX: usize = 16;
/// Least time until a launch is looked at again.
const LOOK_NS: u64 = 50_000;
/// First words of the lines that are saved.
const FLOOR: &str = "floor";
const TIMER: &str = "floors";

/// Whether a launch goes for the sake of its client's floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Its client has had less than its floor.
    Now,
    /// Not before so long, ns.
    In(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Floor {
    id: ClientId,
    permille: u32,
    /// GPU time that it is owed, in thousandths of ns.
    owed: i64,
    /// What it is taken to have used since it was charged last, likewise.
    used: i64,
    charged_ns: u64,
    backlogged_ns: u64,
    looked_ns: u64,
    is_due: bool,
    in_flight: bool,
    /// It may become due, or cease to be, after so long.
    again_ns: u64,
    /// The timer looks at it then.
    is_watched: bool,
    /// It was read from a saved state and has not been looked at since.
    is_restored: bool,
}

fn backlogged_ns(state: &ClientState, now_ns: u64) -> u64 {
    let since_ns = Some(state.backlogged_since_ns).filter(|since_ns| *since_ns != NEVER);
    let present_ns = since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
    state.backlogged_ns.saturating_add(present_ns)
}

/// `factor` times as much; a floor is at most 1 000 permille.
fn times(ns: u64, factor: u32) -> i64 {
    0_i64.saturating_add_unsigned(ns.saturating_mul(factor.into()))
}

impl Floor {
    fn new(state: &ClientState, now_ns: u64) -> Self {
        Floor {
            id: state.id,
            permille: state.min_share_permille,
            owed: 0,
            used: 0,
            charged_ns: state.charged_ns,
            backlogged_ns: backlogged_ns(state, now_ns),
            looked_ns: now_ns,
            is_due: false,
            in_flight: false,
            again_ns: 0,
            is_watched: false,
            is_restored: false,
        }
    }

    /// GPU time that it gets in the window, in thousandths of ns.
    fn window(&self) -> i64 {
        times(WINDOW_NS, self.permille)
    }

    /// Most GPU time that it is owed, likewise, without what it used since it was charged last.
    fn most(&self) -> i64 {
        self.window().min(1_000 * CREDIT_NS)
    }

    /// Within what a saved state is believed.
    fn bound(&mut self) {
        let least = self.window().max(times(RESTORED_LAUNCH_NS, 1_000));
        self.used = self.used.clamp(0, least);
        self.owed = self.owed.clamp(-least, self.most().saturating_add(self.used));
    }

    /// When it is to be looked at again, if its client launches nothing meanwhile.
    fn due_look_ns(&self) -> u64 {
        self.looked_ns.saturating_add(self.again_ns)
    }

    fn look(&mut self, state: &ClientState, now_ns: u64) -> Due {
        self.permille = state.min_share_permille.min(1_000);
        let before = (self.charged_ns, self.backlogged_ns);
        (self.charged_ns, self.backlogged_ns) = (state.charged_ns, backlogged_ns(state, now_ns));
        let earned = times(self.backlogged_ns.saturating_sub(before.1), self.permille);
        let had = times(self.charged_ns.saturating_sub(before.0), 1_000);
        let passed_ns = now_ns.saturating_sub(self.looked_ns);
        self.looked_ns = now_ns;
        if self.is_due && self.in_flight {
            self.used = self.used.saturating_add(times(passed_ns, 1_000));
        }
        self.in_flight = state.in_flight > 0;
        self.used = if self.in_flight { self.used.saturating_sub(had).max(0) } else { 0 };
        let (window, most) = (self.window(), self.most());
        let least = if self.is_due { i64::MIN } else { self.owed.min(-window) };
        let owed = self.owed.saturating_add(earned).saturating_sub(had);
        self.owed = owed.max(least).min(most.saturating_add(self.used));
        if std::mem::take(&mut self.is_restored) {
            // What was charged before, and when that was, may be invented.
            self.bound();
        }
        let burst = times(BURST_NS, 1_000).min(most / 2);
        let owed = self.owed.saturating_sub(self.used);
        self.is_due = owed > if self.is_due { 0 } else { burst - 1 };
        // What it has on the GPU is not charged yet.
        let left = self.owed.saturating_sub(times(state.in_flight_ns, 1_000).max(self.used));
        let permille = u64::from(self.permille.max(1));
        let until_due = |missing: i64| missing.unsigned_abs() / permille + 1;
        self.again_ns = if self.is_due {
            owed.unsigned_abs() / 1_000
        } else {
            until_due(burst.saturating_sub(owed))
        };
        self.again_ns = self.again_ns.clamp(LOOK_NS, WINDOW_NS);
        let ns = match (self.is_due, left > 0) {
            (true, true) => return Due::Now,
            // It may end before that.
            (true, false) => until_due(left).min(state.in_flight_ns),
            (false, _) => until_due(burst.saturating_sub(left)),
        };
        Due::In(ns.clamp(LOOK_NS, WINDOW_NS))
    }
}

impl Due {
    /// A launch that is held is looked at again when its client will be due.
    pub fn shorten(self, decision: Decision) -> Decision {
        match (decision, self) {
            (Decision::Hold(ns), Due::In(due_ns)) => Decision::Hold(ns.min(due_ns)),
            (Decision::HoldUntilCompletion(ns), Due::In(due_ns)) => {
                Decision::HoldUntilCompletion(ns.min(due_ns))
            }
            _ => decision,
        }
    }
}

/// The floors of the clients that have one. Knows no clock: launches and timers say what time it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Floors {
    /// In order of their ids.
    all: Vec<Floor>,
    /// When a timer of [`Floors::wake`] fires.
    timer_ns: u64,
    changed: bool,
}

impl Floors {
    /// Whether [`Floors::due`] has anything to do for a launch: not if no client has a floor.
    #[inline]
    pub fn concern(&self, launch: &Launch) -> bool {
        launch.has_min_share() || self.changed || !self.all.is_empty()
    }

    /// Whether a launch goes for the sake of its client's floor; `None` without one. Costs a call into the core if it
    /// has one.
    pub fn due(&mut self, launch: &Launch) -> Option<Due> {
        if !launch.has_min_share() {
            // It may have been taken away.
            if !self.all.is_empty() {
                self.left(launch.client);
            }
            return None;
        }
        self.look(&host::client(launch.client)?, launch.now_ns)
    }

    fn look(&mut self, state: &ClientState, now_ns: u64) -> Option<Due> {
        if state.min_share_permille == 0 {
            self.left(state.id);
            return None;
        }
        let at = match self.find(state.id) {
            Ok(at) => at,
            Err(_) => self.add(Floor::new(state, now_ns))?,
        };
        let floor = &mut self.all[at];
        let was_due = floor.is_due;
        let due = floor.look(state, now_ns);
        self.changed |= floor.is_due != was_due;
        Some(due)
    }

    /// Where it is now; `None`: there are too many.
    fn add(&mut self, floor: Floor) -> Option<usize> {
        if self.all.len() == FLOORS_MAX {
            self.forget_others(&host::clients());
        }
        let at = self.find(floor.id).err().filter(|_| self.all.len() < FLOORS_MAX)?;
        self.all.insert(at, floor);
        Some(at)
    }

    fn find(&self, client: ClientId) -> Result<usize, usize> {
        self.all.binary_search_by_key(&client, |floor| floor.id)
    }

    /// Those that are not among the clients, which are in order of their ids, are gone: restored floors may be.
    fn forget_others(&mut self, clients: &[ClientState]) {
        self.all.retain(|floor| clients.binary_search_by_key(&floor.id, |one| one.id).is_ok());
    }

    /// Whether a client is due: its launches under way are not to yield.
    pub fn is_due(&self, client: ClientId) -> bool {
        self.find(client).is_ok_and(|at| self.all[at].is_due)
    }

    /// The clients that are due, in order.
    pub(crate) fn are_due(&self) -> impl Iterator<Item = ClientId> {
        self.all.iter().filter(|floor| floor.is_due).map(|floor| floor.id)
    }

    /// Whether a client has a floor, as far as was seen.
    pub fn has(&self, client: ClientId) -> bool {
        self.find(client).is_ok()
    }

    /// Whether somebody became due or is no longer, since this was asked last.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// A client is gone, or has no floor any more.
    pub(crate) fn left(&mut self, client: ClientId) {
        self.changed |= self.is_due(client);
        self.all.retain(|floor| floor.id != client);
    }

    /// After a launch that was let in and may yield: have the timer fire when its client becomes due or ceases to be,
    /// which may launch nothing else meanwhile.
    pub(crate) fn wake(&mut self, now_ns: u64, client: ClientId, token: u64) {
        let Ok(at) = self.find(client) else { return };
        self.all[at].is_watched = true;
        let ns = self.all[at].again_ns;
        self.wake_in(now_ns, ns, token);
    }

    fn watch(&mut self, client: ClientId, is_watched: bool) {
        if let Ok(at) = self.find(client) {
            self.all[at].is_watched = is_watched;
        }
    }

    fn wake_in(&mut self, now_ns: u64, ns: u64, token: u64) {
        let at_ns = now_ns.saturating_add(ns);
        if self.timer_ns <= now_ns || at_ns < self.timer_ns {
            self.timer_ns = at_ns;
            host::set_timer(ns, token);
        }
    }

    /// After a reload, which ends timers: the timer of [`Floors::wake`], if one was set.
    pub(crate) fn wake_again(&self, now_ns: u64, token: u64) {
        if self.timer_ns > 0 {
            host::set_timer(self.timer_ns.saturating_sub(now_ns).clamp(LOOK_NS, WINDOW_NS), token);
        }
    }

    /// The timer of [`Floors::wake`] fired: who of those that have work on the GPU is due?
    pub(crate) fn fired(&mut self, now_ns: u64, token: u64) {
        self.timer_ns = 0;
        // A call may cost only so much.
        for _ in 0..LOOKS_MAX {
            let watched = self.all.iter().filter(|floor| floor.is_watched);
            let Some(floor) = watched.min_by_key(|floor| floor.due_look_ns()) else { return };
            let (id, due_look_ns) = (floor.id, floor.due_look_ns());
            if due_look_ns > now_ns {
                self.wake_in(now_ns, (due_look_ns - now_ns).max(LOOK_NS), token);
                return;
            }
            match host::client(id) {
                Some(state) => {
                    self.look(&state, now_ns);
                    self.watch(id, state.in_flight > 0);
                }
                None => self.left(id),
            }
        }
        self.wake_in(now_ns, LOOK_NS, token);
    }

    /// A line for the timer and one for each floor, all of them numbers; nothing if there is none.
    pub(crate) fn saved(&self) -> String {
        if self.all.is_empty() {
            return String::new();
        }
        let mut lines = String::new();
        put_line(&mut lines, TIMER, [self.timer_ns]);
        for floor in &self.all {
            put_line(
                &mut lines,
                FLOOR,
                [
                    floor.id.into(),
                    floor.permille.into(),
                    floor.owed.cast_unsigned(),
                    floor.used.cast_unsigned(),
                    floor.charged_ns,
                    floor.backlogged_ns,
                    floor.looked_ns,
                    floor.is_due.into(),
                    floor.in_flight.into(),
                    floor.again_ns,
                    floor.is_watched.into(),
                ],
            );
        }
        lines
    }

    /// What such lines say, among others, bounded: any policy may have written them.
    pub(crate) fn read(lines: &str) -> Self {
        let floor = |line| {
            let [
                id,
                permille,
                owed,
                used,
                charged_ns,
                backlogged_ns,
                looked_ns,
                is_due,
                in_flight,
                again_ns,
                is_watched,
            ] = numbers(line, FLOOR)?;
            let mut floor = Floor {
                id: ClientId::try_from(id).ok()?,
                permille: u32::try_from(permille).ok()?.min(1_000),
                owed: owed.cast_signed(),
                used: used.cast_signed(),
                charged_ns,
                backlogged_ns,
                looked_ns,
                is_due: is_due > 0,
                in_flight: in_flight > 0,
                again_ns: again_ns.clamp(LOOK_NS, WINDOW_NS),
                is_watched: is_watched > 0,
                is_restored: true,
            };
            floor.bound();
            Some(floor)
        };
        let timer_ns = lines.lines().find_map(|line| numbers(line, TIMER)).map_or(0, |[ns]| ns);
        let mut all: Vec<Floor> = lines.lines().filter_map(floor).take(FLOORS_MAX).collect();
        all.sort_unstable_by_key(|floor| floor.id);
        all.dedup_by_key(|floor| floor.id);
        Floors { all, timer_ns, changed: false }
    }
}

#[cfg(test)]
mod tests;
