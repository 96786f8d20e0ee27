//! Floors: a client that has one gets at least a share of GPU time, whatever others do.
//!
//! What a client is *owed* grows with the time in which it has work (a launch waiting or on the GPU), by its share of it,
//! and falls by the GPU time that it is charged for. It is kept within what the share is in [`WINDOW_NS`]: what a client
//! had longer ago counts neither for nor against it. A client becomes *due* once it is owed [`BURST_NS`], and is so until
//! it is owed nothing: where contexts take turns, each change to another costs time.
//!
//! ```text
//! owed := owed + share * backlogged time - charged time      since the last look, within +-share * window
//! a launch of a client that is due:                          let in, until what it has on the GPU makes up for it
//! else:                                                      looked at again when it will be due
//! ```

use crate::saved::{line, numbers};
use tally_sdk::{ClientId, ClientState, Launch, NEVER, host};

/// Floors that are kept; further clients have none until others leave.
const FLOORS_MAX: usize = 64;
/// Time over which shares are averaged.
const WINDOW_NS: u64 = 1_000_000_000;
/// GPU time that a client is owed when it becomes due.
const BURST_NS: i64 = 2_000_000;
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
    charged_ns: u64,
    backlogged_ns: u64,
    is_due: bool,
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
            charged_ns: state.charged_ns,
            backlogged_ns: backlogged_ns(state, now_ns),
            is_due: false,
        }
    }

    fn look(&mut self, state: &ClientState, now_ns: u64) -> Due {
        self.permille = state.min_share_permille.min(1_000);
        let before = (self.charged_ns, self.backlogged_ns);
        (self.charged_ns, self.backlogged_ns) = (state.charged_ns, backlogged_ns(state, now_ns));
        let earned = times(self.backlogged_ns.saturating_sub(before.1), self.permille);
        let had = times(self.charged_ns.saturating_sub(before.0), 1_000);
        let most = times(WINDOW_NS, self.permille);
        self.owed = self.owed.saturating_add(earned).saturating_sub(had).clamp(-most, most);
        let burst = (1_000 * BURST_NS).min(most / 2);
        self.is_due = self.owed > if self.is_due { 0 } else { burst - 1 };
        // What it has on the GPU is not charged yet.
        let left = self.owed.saturating_sub(times(state.in_flight_ns, 1_000));
        let missing = match (self.is_due, left > 0) {
            (true, true) => return Due::Now,
            (true, false) => -left,
            (false, _) => burst - left,
        };
        let ns = missing.unsigned_abs() / u64::from(self.permille.max(1)) + 1;
        // It may end before that.
        let ns = if self.is_due { ns.min(state.in_flight_ns) } else { ns };
        Due::In(ns.clamp(LOOK_NS, WINDOW_NS))
    }
}

/// The floors of the clients that have one. Knows no clock: launches and timers say what time it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Floors {
    all: Vec<Floor>,
    /// When a timer of [`Floors::wake`] fires.
    timer_ns: u64,
    changed: bool,
}

impl Floors {
    /// Whether a launch goes for the sake of its client's floor; `None` without one. Costs a call into the core if it has
    /// one.
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
        let at = match self.all.iter().position(|floor| floor.id == state.id) {
            Some(at) => at,
            None if self.all.len() == FLOORS_MAX => return None,
            None => {
                self.all.push(Floor::new(state, now_ns));
                self.all.len() - 1
            }
        };
        let floor = &mut self.all[at];
        let was_due = floor.is_due;
        let due = floor.look(state, now_ns);
        self.changed |= floor.is_due != was_due;
        Some(due)
    }

    /// Whether a client is due: its launches under way are not to yield.
    pub fn is_due(&self, client: ClientId) -> bool {
        self.all.iter().any(|floor| floor.id == client && floor.is_due)
    }

    /// Whether a client has a floor, as far as was seen.
    pub fn has(&self, client: ClientId) -> bool {
        self.all.iter().any(|floor| floor.id == client)
    }

    /// Whether somebody became due or is no longer, since this was asked last.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// A client is gone, or has no floor any more.
    pub fn left(&mut self, client: ClientId) {
        self.changed |= self.is_due(client);
        self.all.retain(|floor| floor.id != client);
    }

    /// After a launch that was let in and may yield: have the timer fire when its client is due, who may launch nothing
    /// else meanwhile.
    pub fn wake(&mut self, now_ns: u64, due: Due, token: u64) {
        let Due::In(ns) = due else { return };
        let at_ns = now_ns.saturating_add(ns);
        if self.timer_ns <= now_ns || at_ns < self.timer_ns {
            self.timer_ns = at_ns;
            host::set_timer(ns, token);
        }
    }

    /// The timer of [`Floors::wake`] fired: who of those that have work is due?
    pub fn fired(&mut self, now_ns: u64, token: u64) {
        self.timer_ns = 0;
        if self.all.is_empty() {
            return;
        }
        for state in host::clients() {
            let is_known = self.all.iter().any(|floor| floor.id == state.id);
            if is_known
                && let Some(due) = self.look(&state, now_ns)
                && state.backlogged_since_ns != NEVER
            {
                self.wake(now_ns, due, token);
            }
        }
    }

    /// A line for the timer and one for each floor, all of them numbers; nothing if there is none.
    pub fn saved(&self) -> String {
        if self.all.is_empty() {
            return String::new();
        }
        let floor = |floor: &Floor| {
            line(
                FLOOR,
                [
                    floor.id.into(),
                    floor.permille.into(),
                    floor.owed.cast_unsigned(),
                    floor.charged_ns,
                    floor.backlogged_ns,
                    floor.is_due.into(),
                ],
            )
        };
        line(TIMER, [self.timer_ns]) + &self.all.iter().map(floor).collect::<String>()
    }

    /// What such lines say, among others.
    pub fn read(lines: &str) -> Self {
        let floor = |line| {
            let [id, permille, owed, charged_ns, backlogged_ns, is_due] = numbers(line, FLOOR)?;
            let permille = u32::try_from(permille).ok()?.min(1_000);
            let most = times(WINDOW_NS, permille);
            Some(Floor {
                id: ClientId::try_from(id).ok()?,
                permille,
                owed: owed.cast_signed().clamp(-most, most),
                charged_ns,
                backlogged_ns,
                is_due: is_due > 0,
            })
        };
        let timer_ns = lines.lines().find_map(|line| numbers(line, TIMER)).map_or(0, |[ns]| ns);
        let all = lines.lines().filter_map(floor).take(FLOORS_MAX).collect();
        Floors { all, timer_ns, changed: false }
    }
}

#[cfg(test)]
mod tests;
