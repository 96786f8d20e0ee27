//! Turns among best-effort clients, for where contexts take turns.
//!
//! The hardware gives each of several best-effort processes a few tenths of a millisecond at a time, so that
//! high-priority work never waits for long. A change to another process takes about 0.2 ms (measured;
//! `docs/operate.md`), so two processes with work would spend much of the GPU on changes. So one of them
//! launches for some milliseconds, and then the next; a client that has nothing to launch loses its turn at
//! once.

use crate::{ClientId, Launch};
use std::collections::VecDeque;

/// What a launch counts as whose time is not known.
const UNKNOWN_NS: u64 = 20_000;
/// An owner that launched nothing for so long, with nothing under way, has lost its turn.
const IDLE_NS: u64 = 500_000;
/// One that waits and has not asked for so long holds no launch any more, or the core had other
/// reasons to hold it: it is not waited for.
const GONE_NS: u64 = 4 * IDLE_NS;
/// A single launch is waited for at most so long: its prediction may be wrong.
const LONGEST_NS_MAX: u64 = 1_000_000_000;
/// A turn takes at most so many times its GPU time: its owner may be slow to launch.
const WALL: u64 = 2;

/// Whose turn it is. Knows no clock: launches say what time it is.
///
/// ```
/// use tally_sdk::testing::launch;
/// use tally_sdk::{Launch, Turns};
///
/// let mut turns = Turns::new(20_000_000);
/// let of = |client, now_ns| Launch { client, now_ns, predicted_ns: 5_000_000, ..launch() };
/// assert_eq!(turns.wait_ns(&of(1, 1_000)), 0);
/// assert!(turns.wait_ns(&of(2, 2_000)) > 0, "it is the other's turn");
/// turns.left(1);
/// // What the first one launched is done by then.
/// assert_eq!(turns.wait_ns(&of(2, 6_000_000)), 0);
/// ```
#[derive(Debug, Default)]
pub struct Turns {
    /// GPU time of a turn.
    turn_ns: u64,
    owner: Option<Turn>,
    /// Clients that hold a launch for their turn, in the order in which they came, and when they
    /// asked last.
    waiting: VecDeque<(ClientId, u64)>,
    /// When all that was granted should be done.
    busy_until_ns: u64,
    /// The longest launch of the turn: it may be under way alone, whatever the window.
    longest_ns: u64,
    /// When a client last asked for a launch, ns.
    seen_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    client: ClientId,
    since_ns: u64,
    /// GPU time granted in this turn, ns.
    given_ns: u64,
    asked_ns: u64,
}

impl Turns {
    /// Turns of so much GPU time each.
    pub fn new(turn_ns: u64) -> Self {
        Turns { turn_ns, ..Turns::default() }
    }

    /// What a client may have under way: the next one waits for it.
    pub fn window_ns(&self) -> u64 {
        self.turn_ns / 4
    }

    /// A best-effort launch that could start now: 0, or for how long it waits before it is looked at
    /// again.
    pub fn wait_ns(&mut self, launch: &Launch) -> u64 {
        let (me, now_ns) = (launch.client, launch.now_ns);
        self.skip_high_priority(launch);
        match self.owner {
            Some(turn) if turn.client == me => {}
            Some(turn) if !self.is_idle(&turn, now_ns) || self.is_after_another(me, now_ns) => {
                match self.waiting.iter_mut().find(|(client, _)| *client == me) {
                    Some((_, asked_ns)) => *asked_ns = now_ns,
                    None => self.waiting.push_back((me, now_ns)),
                }
                return IDLE_NS;
            }
            _ => self.begin(me, now_ns),
        }
        let Some(turn) = &mut self.owner else { return 0 };
        turn.asked_ns = now_ns;
        // What the last owner launched goes first.
        if now_ns < turn.since_ns {
            return (turn.since_ns - now_ns).min(IDLE_NS);
        }
        let took_ns = now_ns - turn.since_ns;
        if turn.given_ns >= self.turn_ns || took_ns >= self.turn_ns.saturating_mul(WALL) {
            if let Some((next, _)) = self.waiting.pop_front() {
                self.waiting.push_back((me, now_ns));
                self.begin(next, now_ns);
                return IDLE_NS;
            }
            (turn.since_ns, turn.given_ns) = (now_ns, 0);
        }
        let takes_ns = if launch.predicted_ns == 0 { UNKNOWN_NS } else { launch.predicted_ns };
        turn.given_ns = turn.given_ns.saturating_add(takes_ns);
        self.longest_ns = self.longest_ns.max(takes_ns.min(LONGEST_NS_MAX));
        self.busy_until_ns = self.busy_until_ns.max(now_ns).saturating_add(takes_ns);
        0
    }

    /// A client left, and with it what it held.
    pub fn left(&mut self, client: ClientId) {
        self.waiting.retain(|(id, _)| *id != client);
        if self.owner.is_some_and(|turn| turn.client == client) {
            self.owner = None;
        }
    }

    fn begin(&mut self, client: ClientId, now_ns: u64) {
        self.waiting.retain(|(id, _)| *id != client);
        let most_ns = self.window_ns().max(self.longest_ns);
        let under_way_ns = self.busy_until_ns.saturating_sub(now_ns).min(most_ns);
        let since_ns = now_ns.saturating_add(under_way_ns);
        self.longest_ns = 0;
        self.owner = Some(Turn { client, since_ns, given_ns: 0, asked_ns: now_ns });
    }

    /// While high priority was busy nobody asked, and nothing of what was granted ran: all
    /// times go on where they stopped.
    fn skip_high_priority(&mut self, launch: &Launch) {
        let idle_since_ns = launch.now_ns.saturating_sub(launch.high_idle_ns);
        let skipped_ns = idle_since_ns.saturating_sub(self.seen_ns);
        if skipped_ns > 0 {
            if self.busy_until_ns > self.seen_ns {
                self.busy_until_ns = self.busy_until_ns.saturating_add(skipped_ns);
            }
            for (_, asked_ns) in &mut self.waiting {
                *asked_ns = asked_ns.saturating_add(skipped_ns);
            }
            if let Some(turn) = &mut self.owner {
                turn.asked_ns = turn.asked_ns.saturating_add(skipped_ns);
                turn.since_ns = turn.since_ns.saturating_add(skipped_ns);
            }
        }
        self.seen_ns = launch.now_ns;
    }

    fn is_idle(&self, turn: &Turn, now_ns: u64) -> bool {
        let most_ns = self.window_ns().max(self.longest_ns);
        let busy_until_ns = self.busy_until_ns.min(turn.asked_ns.saturating_add(most_ns));
        let last_ns = turn.asked_ns.max(turn.since_ns).max(busy_until_ns);
        now_ns >= last_ns.saturating_add(IDLE_NS)
    }

    /// Somebody else waits for longer.
    fn is_after_another(&self, me: ClientId, now_ns: u64) -> bool {
        let mut before = self.waiting.iter().take_while(|(client, _)| *client != me);
        before.any(|(_, asked_ns)| now_ns < asked_ns.saturating_add(GONE_NS))
    }
}
