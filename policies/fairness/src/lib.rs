//! Best-effort clients share the GPU's time by weight: deficit round robin (Shreedhar and Varghese, *Efficient Fair
//! Queuing using Deficit Round Robin*, SIGCOMM 1995), with the GPU time that the core charges for bytes.
//!
//! ```text
//! a round begins:            credit := min(credit + quantum, quantum) of each client; quantum in proportion to weight
//! a client launches:         its credit falls by the GPU time, at first as predicted, then as charged
//! a launch of a client with credit:                      run
//! else, if others are backlogged and have a claim:       hold
//! else, if one with a claim was backlogged just now:     hold, within patience; else run this one
//! else:                                                  begin a round
//! ```
//!
//! Who was idle has no claim to the time: credit that was not used ends with the round. Who took more than its credit,
//! for a launch is not divided, has less in the next rounds. Who joins takes part in the current round. A round takes
//! at most [`WALL`] times its GPU time, so nobody waits for long for a client that is slow to use its credit. A launch
//! that is on the GPU for far longer than predicted is taken to use it: it may be one that does not end. Side by side,
//! a round has room for the longest launches, such as steps that are one graph.
//!
//! Where kernels run side by side, holding one client may gain the others nothing. There only a client that has lost
//! time to the one that asks has a claim: it was backlogged for longer than it got GPU time.
//!
//! *Backlogged* is who has a launch waiting or on the GPU. A program that waits for each launch is not, for a moment
//! after it. It is waited for as in anticipatory scheduling (Iyer and Druschel, SOSP 2001) if the last such moment was
//! short, for [`PATIENCE_PERCENT`] of the time at most: shares by weight are not worth an idle GPU.
//!
//! Where contexts take turns, a change to another client's costs about 0.2 ms (measured; `docs/operate.md`). There one
//! client launches until its credit is used up, then the next one that has some. One that idles is waited for as long
//! as changing to another and back would take; if it idles for more than half of its turn, that costs it the rest as if
//! it had used it.
//!
//! [`Shares`] has these rounds and [`Floors`] for a policy, [`Yields`] those of its launches that may have to yield,
//! [`Leases`] and [`ClientWidth`] what starts unasked beside services.
#![deny(unsafe_code)]

mod floor;
mod leases;
mod long;
mod member;
mod places;
mod saved;
mod shares;
mod yields;

pub use floor::{Due, Floors};
pub use leases::{ClientWidth, Lease, Leases, Runs};
pub use shares::Shares;
pub use yields::Yields;

use member::{Member, Passed, Used};
use saved::SavedRounds;
use tally_sdk::{Client, ClientId, ClientState, Decision, Launch, UNKNOWN, host};

/// Clients that take part; further ones have the places of those that leave or idle, and where one
/// launches at a time, places in turn; else nobody is held for them, nor they for anybody.
const MEMBERS_MAX: usize = 64;
/// Without work for so long, a client gives its place to one that has some.
const IDLE_NS: u64 = 1_000_000_000;
/// Whether somebody idles is looked at again after so long.
const IDLE_LOOK_NS: u64 = 10_000_000;
/// Without work for less than this, a client was backlogged just now.
const MOMENT_NS: u64 = 500_000;
/// A longer launch waits for that moment.
const LONG_NS: u64 = 16 * MOMENT_NS;
/// Least and most time until a launch that is held is looked at again; the most for each [`HELD`] clients.
const HOLD_NS: (u64, u64) = (50_000, MOMENT_NS);
/// Among more clients a launch is held for longer: to look at them all takes longer, and a round, too.
const HELD: u64 = 16;
/// For so long for each client, who has credit launches without another look at all of them.
const LOOK_NS: u64 = 20_000;
const LOOK_NS_MAX: u64 = 250_000;
/// Least GPU time of a client in a round.
const QUANTUM_NS_MIN: u64 = 1_000_000;
/// A round, or a turn, takes at most so many times its GPU time.
const WALL: u64 = 2;
/// What another client has on the GPU is waited for so many times as long. What it has there for longer, for nobody
/// knew how long it takes or its program stands still, it is taken to use from then on.
const DRAIN: u64 = 4;
/// Rounds that one decision may begin; then the launch runs.
const ROUNDS_MAX: u32 = 4;
/// Side by side, a round is to have room for so many of the longest launches, of up to this time: it ends before
/// those that wait have had their part otherwise.
const LONGEST: u64 = 2;
const LONGEST_NS_MAX: u64 = 250_000_000;
/// A claim has who lost this part of what the client that asks has used.
const LOST: i64 = 8;
/// The GPU may idle so long for a client that will launch again soon.
const PAUSE_NS: u64 = 100_000;
/// Share of the time that may be spent so.
pub const PATIENCE_PERCENT: u64 = 2;
/// As much of it is saved up.
const PATIENCE_NS_MAX: u64 = 20 * PAUSE_NS;
/// Launches of a lease where several share, at most and at least. They fit a client's window.
const LEASE_LAUNCHES: (u64, u64) = (8, 32);
/// The longest launch of late is forgotten by one part in so many with each launch.
const FORGETS: u64 = 32;
/// What a saved state says of a client's debt and lost time is believed up to so many rounds: any policy may have
/// written it.
const RESTORED_ROUNDS: u64 = 4;

/// For what a launch waits.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// Others' launches that wait, of so much GPU time.
    Queue(u64),
    /// A launch of another client that is on the GPU.
    Launch,
    /// So long for others that may launch again.
    Idle(u64),
}

/// Who of several best-effort clients may launch. Knows no clock: launches say what time it is.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// GPU time of a client in a round, if all have the same weight; 0: nobody is held.
    turn_ns: u64,
    one_at_a_time: bool,
    /// In order of their ids.
    members: Vec<Member>,
    /// Those for which there was no place, in order of their ids.
    others: Vec<Member>,
    /// Whether one of them may have a place is looked at again then.
    idle_look_ns: u64,
    /// Places that were given so far.
    places: u64,
    /// One at a time: a round has ended.
    is_round_over: bool,
    /// Side by side: GPU time of a client in a round, if all have the same weight and some launches are long.
    long_turn_ns: u64,
    /// As they were saved, for those that have not joined since.
    known: Vec<Member>,
    /// Whose turn it is, if one launches at a time.
    owner: Option<ClientId>,
    /// Time that is left of the round, or of the turn, without that of high-priority work.
    left_ns: u64,
    /// Time for which the turn still waits for what the last owner launched.
    drain_ns: u64,
    /// For so long others waited in this turn, less [`WALL`] times what its owner used.
    idle_ns: i64,
    patience_ns: u64,
    /// A launch is held for clients that have nothing to launch.
    is_patient: bool,
    /// When all of them were looked at.
    seen_ns: u64,
    /// Those that did not idle then.
    active: usize,
    /// Predicted GPU time of what was started since.
    ahead_ns: u64,
    /// All members have the same weight.
    are_alike: bool,
    /// Until then leases are not given unless all are alike, for a launch was held.
    asked_until_ns: u64,
    /// Leases that were given.
    leases: u64,
}

impl Rounds {
    /// Clients launch side by side.
    pub(crate) fn side_by_side(turn_ns: u64) -> Self {
        Rounds { turn_ns, ..Rounds::default() }
    }

    /// One client launches at a time.
    pub(crate) fn one_at_a_time(turn_ns: u64) -> Self {
        Rounds { turn_ns, one_at_a_time: true, ..Rounds::default() }
    }

    /// Several clients share, and each launch of theirs has to be asked about.
    pub fn is_shared(&self) -> bool {
        self.turn_ns > 0 && self.members.len() + self.others.len() > 1
    }

    /// Clients that have work now and then, as far as is known.
    pub(crate) fn active(&self) -> usize {
        (self.active + self.others.len()).max(1)
    }

    /// What a client may have under way among several: others wait for it.
    pub(crate) fn window_ns(&self) -> u64 {
        (self.turn_ns / 4).max(1)
    }

    /// A best-effort client is there.
    pub(crate) fn joined(&mut self, client: &Client) {
        let at = self.others.partition_point(|other| other.id < client.id);
        let weight = client.weight.max(1).into();
        self.others.insert(at, Member { weight, ..Member::none(client.id) });
        self.fill();
    }

    pub(crate) fn left(&mut self, client: ClientId) {
        self.members.retain(|member| member.id != client);
        self.others.retain(|other| other.id != client);
        self.owner = self.owner.filter(|owner| *owner != client);
        self.fill();
    }

    /// A best-effort launch that could start now: `None`, or the decision by which it waits.
    #[inline]
    pub fn hold(&mut self, launch: &Launch) -> Option<Decision> {
        if self.is_shared() { self.hold_among(*launch) } else { None }
    }

    /// The policy holds a launch of this client for a reason that others may not have: nobody waits for it until it is
    /// asked about here, or the reason may be gone.
    pub fn keep_back(&mut self, client: ClientId) {
        if let Ok(at) = self.members.binary_search_by_key(&client, |member| member.id) {
            self.members[at].is_kept_back = true;
        }
    }

    /// The reasons for which launches were kept back may be gone.
    pub fn look_again(&mut self) {
        self.members.iter_mut().for_each(|member| member.is_kept_back = false);
    }

    #[inline(never)]
    fn hold_among(&mut self, launch: Launch) -> Option<Decision> {
        let launch = &launch;
        let find = |all: &[Member]| all.binary_search_by_key(&launch.client, |one| one.id);
        if std::mem::take(&mut self.is_round_over) {
            self.rotate();
        }
        if find(&self.members).is_err() {
            self.replace_idle(launch);
        }
        let Ok(me) = find(&self.members) else { return self.without_place(launch) };
        self.members[me].is_kept_back = false;
        self.note_length(me, launch.predicted_ns);
        if self.has_credit_left(me, launch) {
            self.ahead_ns = self.ahead_ns.saturating_add(launch.predicted_ns);
            return None;
        }
        self.look(launch);
        self.members[me].waits = true;
        let predicted_ns = launch.predicted_ns;
        let wait = if self.one_at_a_time {
            self.not_its_turn(me)
        } else {
            self.without_credit(me, predicted_ns)
        };
        self.is_patient = matches!(wait, Some(Wait::Idle(_)));
        let wait = wait?;
        self.asked_until_ns = launch.now_ns.saturating_add(self.turn_ns);
        Some(match wait {
            Wait::Queue(ns) => {
                let most_ns = HOLD_NS.1 * (self.members.len() as u64).div_ceil(HELD);
                Decision::Hold(ns.clamp(HOLD_NS.0, most_ns))
            }
            Wait::Launch => Decision::HoldUntilCompletion(MOMENT_NS),
            // Those others may launch meanwhile, and idle again.
            Wait::Idle(ns) => Decision::HoldUntilCompletion(ns.max(1)),
        })
    }

    /// Side by side, and while nobody has to wait for anybody with another weight: launches that may follow this one
    /// unasked. A program that its own CPU limits is slowed down by being asked about each.
    pub fn lease(&mut self, launch: &Launch) -> u32 {
        let found = self.members.binary_search_by_key(&launch.client, |member| member.id);
        let (Ok(me), true) = (found, launch.predicted_ns != UNKNOWN) else { return 0 };
        let launches = self.window_ns() / self.members[me].longest_ns.max(1);
        let launches = launches.min(LEASE_LAUNCHES.1);
        let is_asked = launch.now_ns < self.asked_until_ns && !self.are_alike;
        if self.one_at_a_time || launches < LEASE_LAUNCHES.0 || is_asked {
            return 0;
        }
        // Of another length each time: a program's loop must not have the same launches asked about for ever.
        self.leases = self.leases.wrapping_add(1);
        let launches = launches - self.leases % LEASE_LAUNCHES.0;
        self.ahead_ns = self.ahead_ns.saturating_add(launches.saturating_mul(launch.predicted_ns));
        launches as u32
    }

    /// A launch is asked about.
    fn note_length(&mut self, me: usize, predicted_ns: u64) {
        if predicted_ns == UNKNOWN {
            return;
        }
        let mine = &mut self.members[me];
        let shorter_ns = mine.longest_ns - mine.longest_ns.div_ceil(FORGETS);
        mine.longest_ns = predicted_ns.min(LONGEST_NS_MAX).max(shorter_ns);
        let longest_ns = mine.longest_ns;
        let wanted_ns = self.wanted_turn_ns(longest_ns);
        if wanted_ns > self.long_turn_ns && !self.one_at_a_time {
            self.long_turn_ns = wanted_ns;
            self.divide();
        }
    }

    fn wanted_turn_ns(&self, longest_ns: u64) -> u64 {
        self.turn_ns.max(LONGEST * longest_ns.min(LONGEST_NS_MAX))
    }

    /// A launch starts although its client may have no credit: there is room for it beside the others. What its client
    /// used beyond a round is not owed.
    pub fn goes_beside(&mut self, launch: &Launch) {
        let found = self.members.binary_search_by_key(&launch.client, |member| member.id);
        if let Some(me) = found.ok().filter(|_| self.is_shared()) {
            self.look(launch);
            self.is_patient = false;
            let mine = &mut self.members[me];
            mine.credit_ns = mine.credit_ns.max(-mine.quantum_ns);
        }
    }

    /// A launch that nobody holds goes, for the sake of its client's floor: who has work is looked at all the same.
    pub(crate) fn goes_first(&mut self, launch: &Launch) {
        let found = self.members.binary_search_by_key(&launch.client, |member| member.id);
        let Some(me) = found.ok().filter(|_| self.is_shared()) else { return };
        self.note_length(me, launch.predicted_ns);
        if launch.now_ns >= self.seen_ns.saturating_add(self.recent_ns()) {
            self.look(launch);
            self.is_patient = false;
        }
    }

    /// Who was looked at within this time is not looked at again.
    fn recent_ns(&self) -> u64 {
        LOOK_NS.saturating_mul(self.members.len() as u64).min(LOOK_NS_MAX)
    }

    /// All were looked at just now, and then it had credit for this launch, too, and for all that was started since.
    fn has_credit_left(&self, me: usize, launch: &Launch) -> bool {
        let ahead_ns = self.ahead_ns.saturating_add(launch.predicted_ns);
        let mine = &self.members[me];
        let is_its_turn = self.owner == Some(mine.id) && self.drain_ns == 0;
        self.known.is_empty()
            && !self.is_patient
            && self.left_ns > 0
            && launch.now_ns < self.seen_ns.saturating_add(self.recent_ns())
            && mine.credit_ns > 0_i64.saturating_add_unsigned(ahead_ns)
            && (is_its_turn || !self.one_at_a_time)
    }

    /// What everybody used and has waiting, and how much time went by.
    fn look(&mut self, launch: &Launch) {
        if !self.known.is_empty() {
            // They are gone.
            self.known.clear();
            self.fill();
        }
        let now_ns = launch.now_ns;
        // One by one: there may be hundreds of other clients.
        let ids = self.members.iter().map(|member| member.id);
        let states: Vec<ClientState> = ids.filter_map(host::client).collect();
        let wall_ns = now_ns.saturating_sub(self.seen_ns);
        // Beside active high-priority work, what they got is all that is known of the time that they had. Who waits
        // loses all of it.
        let passed_ns = wall_ns.min(launch.high_idle_ns.max(self.got_ns(&states)));
        let waited_ns = if launch.high_active() { wall_ns } else { passed_ns };
        self.seen_ns = now_ns;
        self.ahead_ns = 0;
        let in_turn_ns = passed_ns.min(self.left_ns);
        self.left_ns -= in_turn_ns;
        self.drain_ns = self.drain_ns.saturating_sub(passed_ns);
        let earned_ns = passed_ns / (100 / PATIENCE_PERCENT);
        let spent_ns = if self.is_patient { waited_ns } else { 0 };
        let patience_ns = self.patience_ns.saturating_add(earned_ns).saturating_sub(spent_ns);
        self.patience_ns = patience_ns.min(PATIENCE_NS_MAX);
        let (round_ns, turn_ns) = (self.round_ns(), self.turn_ns);
        let in_flight_ns = states.iter().map(|state| state.in_flight_ns);
        let drain_ns = in_flight_ns.fold(turn_ns, u64::saturating_add).saturating_mul(DRAIN);
        let since = Passed { passed_ns, waited_ns, drain_ns };
        let had = self.owner_used();
        for state in &states {
            if let Ok(at) = self.members.binary_search_by_key(&state.id, |member| member.id) {
                let member = &mut self.members[at];
                member.look(state, now_ns, &since);
                if std::mem::take(&mut member.is_restored) {
                    // The saved usage, from which the core's differs, may be invented.
                    member.bound(round_ns, turn_ns);
                }
            }
        }
        if let Some((at, had_ns)) = had {
            self.charge_idle(at, had_ns, in_turn_ns);
        }
        self.active = self.members.iter().filter(|member| !member.idles(now_ns)).count();
    }

    /// Whose turn it is, if others wait for nobody else, and GPU time that it used.
    fn owner_used(&self) -> Option<(usize, u64)> {
        let owner = self.owner.filter(|_| self.one_at_a_time);
        let at = self.members.iter().position(|member| Some(member.id) == owner)?;
        let id = self.members[at].id;
        let is_waited_for = |m: &Member| m.id != id && m.waits;
        let is_drained = |m: &Member| m.id == id || !m.in_flight || m.is_overdue();
        let waits = self.members.iter().any(is_waited_for);
        (waits && self.members.iter().all(is_drained))
            .then(|| (at, self.members[at].used.map_or(0, Used::all_ns)))
    }

    /// Beyond [`WALL`] times what it uses, a turn costs its owner the time for which others wait as if it had used it.
    fn charge_idle(&mut self, at: usize, had_ns: u64, passed_ns: u64) {
        let mine = &mut self.members[at];
        let used_ns = mine.used.map_or(0, Used::all_ns).saturating_sub(had_ns).saturating_mul(WALL);
        let before_ns = self.idle_ns.max(0);
        self.idle_ns =
            self.idle_ns.saturating_add_unsigned(passed_ns).saturating_sub_unsigned(used_ns);
        mine.credit_ns = mine.credit_ns.saturating_sub(self.idle_ns.max(0) - before_ns);
    }

    /// GPU time that all of them were charged since they were looked at.
    fn got_ns(&self, states: &[ClientState]) -> u64 {
        let got_ns = |state: &ClientState| {
            let at = self.members.binary_search_by_key(&state.id, |member| member.id).ok()?;
            let before_ns = self.members[at].used?.charged_ns;
            Some(state.charged_ns.saturating_sub(before_ns))
        };
        states.iter().filter_map(got_ns).fold(0, u64::saturating_add)
    }

    /// Side by side: for what a client without credit waits.
    fn without_credit(&mut self, me: usize, predicted_ns: u64) -> Option<Wait> {
        let is_long = predicted_ns != UNKNOWN && predicted_ns > LONG_NS;
        if self.left_ns == 0 {
            // The round is over, whoever has credit left.
            self.members.iter_mut().for_each(|member| member.credit_ns = member.credit_ns.min(0));
        }
        for _ in 0..ROUNDS_MAX {
            let mine = &self.members[me];
            if mine.credit_ns > 0 {
                return None;
            }
            let used_ns = mine.quantum_ns.saturating_sub(mine.credit_ns);
            let has_claim = |m: &&Member| m.credit_ns > 0 && m.lost_ns > used_ns / LOST;
            let claims = || self.members.iter().filter(has_claim);
            let waiting = claims().filter(|member| member.waits && !member.is_kept_back);
            if let Some(most_ns) = waiting.map(|member| member.credit_ns).max() {
                return Some(Wait::Queue(most_ns.unsigned_abs()));
            }
            let now_ns = self.seen_ns;
            let comes = |member: &&Member| !member.waits && member.was_just_now(now_ns);
            if claims().any(|member| member.in_flight && !member.is_overdue()) {
                return Some(Wait::Launch);
            }
            let pause_ns = claims()
                .filter(|member| member.returns_soon && !member.waits)
                .map(|member| member.pause_ends_ns().saturating_sub(now_ns))
                .max();
            // The GPU would idle otherwise, but a long launch would keep the other waiting for far longer.
            let coming = claims().filter(comes).map(Member::moment_ends_ns).max();
            if let Some(ends_ns) = coming.filter(|_| is_long) {
                return Some(Wait::Idle(ends_ns.saturating_sub(now_ns)));
            }
            match pause_ns {
                Some(ns @ 1..) if self.patience_ns > 0 => {
                    return Some(Wait::Idle(ns.min(self.patience_ns)));
                }
                _ if claims().any(|member| member.waits || member.was_just_now(now_ns)) => {
                    // The GPU would idle otherwise: it costs nobody anything, and is not owed.
                    let mine = &mut self.members[me];
                    mine.credit_ns = mine.credit_ns.max(-mine.quantum_ns);
                    return None;
                }
                _ => self.begin_round(),
            }
        }
        None
    }

    /// One at a time: for what a client waits whose turn it is not, or not yet.
    fn not_its_turn(&mut self, me: usize) -> Option<Wait> {
        let now_ns = self.seen_ns;
        let last = self.members.iter().position(|member| Some(member.id) == self.owner);
        let keeps = |at: &usize| {
            let member = &self.members[*at];
            let is_there = member.is_backlogged() || member.was_just_now(now_ns);
            is_there && member.credit_ns > 0 && self.left_ns > 0
        };
        let owner = last.filter(keeps).unwrap_or_else(|| self.next(last));
        let member = &self.members[owner];
        if owner == me {
            // What the last owner launched goes first, and this turn begins then. But that may wait for what this one
            // will launch.
            let is_other =
                |other: &Member| other.in_flight && !other.is_overdue() && other.id != member.id;
            let waits = self.drain_ns > 0 && self.members.iter().any(is_other);
            if waits {
                self.left_ns = self.turn_of(owner);
            }
            return waits.then_some(Wait::Launch);
        }
        Some(if member.is_backlogged() {
            Wait::Queue(member.credit_ns.unsigned_abs())
        } else {
            Wait::Idle(member.moment_ends_ns().saturating_sub(now_ns))
        })
    }

    /// The turn goes to the next client in the circle that is backlogged and has credit.
    fn next(&mut self, last: Option<usize>) -> usize {
        if let Some(last) = last
            && self.left_ns == 0
        {
            let member = &mut self.members[last];
            member.credit_ns = member.credit_ns.min(0);
        }
        let (count, from) = (self.members.len(), last.map_or(0, |last| last + 1));
        let now_ns = self.seen_ns;
        let is_there = |member: &Member| member.is_backlogged() || member.was_just_now(now_ns);
        let can = |member: &Member| member.credit_ns > 0 && is_there(member);
        let find =
            |all: &[Member]| (0..count).map(|by| (from + by) % count).find(|&at| can(&all[at]));
        let next = find(&self.members).or_else(|| {
            self.begin_round();
            find(&self.members)
        });
        let next = next.unwrap_or(0);
        self.idle_ns = 0;
        self.owner = Some(self.members[next].id);
        self.left_ns = self.turn_of(next);
        self.drain_ns = self.left_ns.saturating_mul(DRAIN);
        next
    }

    /// GPU time of a round of all clients.
    fn round_ns(&self) -> u64 {
        let quanta = self.members.iter().map(|member| member.quantum_ns.unsigned_abs());
        quanta.fold(0, u64::saturating_add)
    }

    fn turn_of(&self, at: usize) -> u64 {
        WALL.saturating_mul(self.members[at].quantum_ns.unsigned_abs())
    }

    /// So many rounds at once that another one who is backlogged has credit: who asks is.
    fn begin_round(&mut self) {
        // Also who launches again in a moment: its debt is not to be forgiven meanwhile.
        let now_ns = self.seen_ns;
        let is_there = |m: &Member| m.is_backlogged() || m.was_just_now(now_ns);
        let is_in_debt = |m: &&Member| is_there(m) && m.credit_ns <= 0;
        let backlogged = self.members.iter().filter(is_in_debt);
        let missing =
            |m: &Member| 1 + m.credit_ns.min(0).unsigned_abs() / m.quantum_ns.unsigned_abs();
        let rounds = backlogged.map(missing).min().unwrap_or(1);
        for member in &mut self.members {
            let quantum_ns = member.quantum_ns;
            let more_ns = quantum_ns.saturating_mul(i64::try_from(rounds).unwrap_or(i64::MAX));
            member.credit_ns = member.credit_ns.saturating_add(more_ns).min(quantum_ns);
            member.lost_ns /= 2;
        }
        if self.one_at_a_time {
            self.is_round_over = true;
        } else {
            let is_there = |m: &&Member| !m.idles(self.seen_ns);
            let longest_ns = self.members.iter().filter(is_there).map(|m| m.longest_ns).max();
            let wanted_ns = self.wanted_turn_ns(longest_ns.unwrap_or(0));
            if wanted_ns < self.long_turn_ns / 2 {
                self.long_turn_ns = wanted_ns;
                self.divide();
            }
            self.left_ns = self.round_ns().saturating_mul(WALL);
        }
    }

    /// Quanta in proportion to weights: together a turn for each client, but none too short to be worth it.
    fn divide(&mut self) {
        let weights = || self.members.iter().map(|member| member.weight);
        let (sum, least) = (weights().sum::<u64>().max(1), weights().min().unwrap_or(1));
        let turn_ns = self.turn_ns.max(self.long_turn_ns);
        let all_ns = turn_ns.saturating_mul(self.members.len() as u64);
        let least_ns = QUANTUM_NS_MIN.min(self.turn_ns).div_ceil(least);
        let unit_ns = (all_ns / sum).max(least_ns).max(1);
        self.are_alike = weights().max() == Some(least);
        for member in &mut self.members {
            let quantum_ns = i64::try_from(unit_ns.saturating_mul(member.weight));
            member.quantum_ns = quantum_ns.unwrap_or(i64::MAX);
        }
        // What was saved was of a round with all of them.
        if self.known.is_empty() {
            let (round_ns, turn_ns) = (self.round_ns(), self.turn_ns);
            for member in &mut self.members {
                member.credit_ns = member.credit_ns.min(member.quantum_ns);
                if member.is_restored {
                    member.bound(round_ns, turn_ns);
                }
            }
            let wall_ns = round_ns.saturating_mul(WALL);
            self.left_ns = self.left_ns.min(wall_ns);
            self.drain_ns = self.drain_ns.min(wall_ns.saturating_mul(DRAIN));
        }
    }
}

#[cfg(test)]
mod tests;
