//! Units of work of a high-priority client: requests, tokens and prefills that it marks, and requests that its shim
//! tells from launches and waits.
//!
//! From its first marked request on, a client's requests are the marked ones. What the client states is untrusted: an
//! end before its begin, or in the future, is counted as wrong and ignored; a unit is no longer than the client has
//! been registered. So a lie changes the figures of its teller only.

mod sampled;

use super::Engine;
use super::service::{SIGNIFICANT_DIGITS, STRETCH_NS, TIMES_NS};
use hdrhistogram::Histogram;
use sampled::Sampled;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use tally_ab::sample::Requests;
use tally_contract::limits::{
    OPEN_MARKS_MAX, PASS_MARKS_CLIENT_MAX, PROFILED_LAUNCHES_MAX, SMS_MAX,
};
use tally_engine::policy::{ClientId, UnitProfile};
use tally_engine::{EndedUnits, OpenUnit};
use tally_ipc::marks::{self as theirs, Kind, Polled, Stated, What, even_ns};

/// How far in the future an end may be, ns: a pass has one time, and units end while it lasts.
const AHEAD_NS_MAX: u64 = 1_000_000_000;
/// After so many requests without a marked token the program makes none any more.
const TOKEN_REQUESTS: u32 = 64;
/// A slot taken and not published for so long is passed over.
const STUCK_NS: u64 = 1_000_000_000;

/// A unit under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    /// As the client states it, ns. Tells units apart that are clamped to the same `came_ns`.
    began_ns: u64,
    /// When the program had it, queue included, ns.
    came_ns: u64,
    /// It began with the launch of a CUDA graph.
    is_graph: bool,
    /// Whether the client stated how long it queued in the program.
    queue_known: bool,
}

impl Open {
    fn is(&self, other: &Open) -> bool {
        (self.began_ns, self.came_ns) == (other.began_ns, other.came_ns)
    }
}

/// A unit that ended, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unit {
    kind: Kind,
    open: Open,
    /// Time from when the program had it to its end, ns.
    ns: u64,
    /// Part of `ns` that it queued in the program, ns; `None`: not known.
    queued_ns: Option<u64>,
}

/// How long units took lately, in two stretches that take turns.
#[derive(Debug)]
struct Times {
    now: Histogram<u32>,
    before: Histogram<u32>,
    turned_ns: u64,
    /// Longest time that keeps the objective, ns; `None` without one.
    limit_ns: Option<u64>,
    /// Units that kept it, of the stretches `now` and `before`.
    within: [u64; 2],
    /// Units of stretches that are over, those that kept it and late ones.
    over: [u64; 3],
}

impl Times {
    fn new(now_ns: u64) -> Box<Self> {
        let new = || Histogram::new_with_bounds(TIMES_NS[0], TIMES_NS[1], SIGNIFICANT_DIGITS);
        let [now, before] = [new(), new()].map(|times| times.expect("constant bounds are valid"));
        let (within, over) = ([0; 2], [0; 3]);
        Box::new(Times { now, before, turned_ns: now_ns, limit_ns: None, within, over })
    }

    /// Counts so many units that took so long each.
    fn record(&mut self, now_ns: u64, ns: u64, count: u32) {
        self.turn(now_ns);
        self.now.saturating_record_n(ns.max(1), count);
        let keeps = self.limit_ns.is_some_and(|limit_ns| ns <= limit_ns);
        self.within[0] += if keeps { u64::from(count) } else { 0 };
    }

    /// Another objective, or none. What is recent begins anew.
    fn set_limit(&mut self, limit_ns: Option<u64>) {
        self.end_stretch();
        self.before.reset();
        self.within = [0; 2];
        self.limit_ns = limit_ns;
    }

    fn end_stretch(&mut self) {
        self.over = self.totals();
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.reset();
        self.within = [0, self.within[0]];
    }

    /// Units, those that kept the objective of their time and those that took longer.
    fn totals(&self) -> [u64; 3] {
        let (units, within) = (self.now.len(), self.within[0]);
        let late = if self.limit_ns.is_some() { units - within } else { 0 };
        [self.over[0] + units, self.over[1] + within, self.over[2] + late]
    }

    fn turn(&mut self, now_ns: u64) {
        let passed_ns = now_ns.saturating_sub(self.turned_ns);
        if passed_ns >= STRETCH_NS {
            self.turned_ns = now_ns;
            self.end_stretch();
            if passed_ns >= 2 * STRETCH_NS {
                self.end_stretch();
            }
        }
    }

    fn numbers(&self) -> UnitNumbers {
        let mut recent = self.now.clone();
        // Of the same bounds: nothing can be lost.
        let _ = recent.add(&self.before);
        let quantile = |share| if recent.is_empty() { 0 } else { recent.value_at_quantile(share) };
        let [count, within, late] = self.totals();
        UnitNumbers {
            count,
            within,
            late,
            recent: recent.len(),
            recent_within: self.within.iter().sum(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
        }
    }
}

/// Figures of units of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitNumbers {
    /// Units that ended since the client registered.
    pub count: u64,
    /// Those of them that kept the objective of their time, and those that took longer.
    pub within: u64,
    pub late: u64,
    /// Units of the last five to ten minutes, or since the objective was set.
    pub recent: u64,
    pub recent_within: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// What a client has marked, and what was lost or wrong of its units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkNumbers {
    /// The program marks requests.
    pub has_requests: bool,
    /// Tokens are marked ones, not graph launches.
    pub has_tokens: bool,
    /// Requests under way, and for how long the oldest has been there, ns.
    pub open: u64,
    pub oldest_ns: u64,
    /// Longest time that a token may take, ns, if it has an objective for tokens.
    pub tpot_ns: Option<u64>,
    pub tokens: UnitNumbers,
    pub prefills: UnitNumbers,
    /// Units that the client could not report, since it registered.
    pub dropped: u64,
    /// Units that were ignored because their times cannot be.
    pub wrong: u64,
    /// Units that began, or came, before the client registered, and count from then.
    pub shortened: u64,
}

#[derive(Debug)]
pub struct Marks {
    registered_ns: u64,
    /// Next ticket to be read.
    next: u64,
    stuck_since_ns: Option<u64>,
    /// More were there than one pass takes.
    has_more: bool,
    /// The client's count of changes when `open` was read.
    changes: u64,
    /// The requests under way.
    open: Vec<Open>,
    /// The marked tokens under way. How many graphs a stream's unit has is known when it ends.
    open_tokens: Vec<Open>,
    /// What ended in the last pass.
    ended: Vec<Unit>,
    /// For A/B tests.
    sampled: Sampled,
    has_any: bool,
    has_requests: bool,
    /// The first marked request was seen in the last pass.
    is_first: bool,
    /// Longest time that a token may take, ns. With it, graph launches are tokens unless the client marks tokens.
    tpot_ns: Option<u64>,
    has_tokens: bool,
    /// The first marked token was seen in the last pass.
    is_first_token: bool,
    /// Requests that ended since the last marked token, while none was open.
    since_token: u32,
    /// Tokens that ended in the last pass, while they have an objective: what each took, ns, and how many.
    tokens_ended: Vec<(u64, u32)>,
    tokens: Option<Box<Times>>,
    prefills: Option<Box<Times>>,
    /// The latest profiled unit, whether it is news, and the client's sequence when it was read.
    profile: Option<UnitProfile>,
    is_profiled: bool,
    profile_seen: u64,
    /// The client's count of dropped units when it registered, and how far it has been above that.
    dropped_before: u64,
    dropped: u64,
    wrong: u64,
    shortened: u64,
}

impl Marks {
    /// Of a client that registers now. What it wrote down before, for another core, is passed over.
    pub fn new(from: &theirs::Marks, read: &AtomicU64, now_ns: u64) -> Self {
        let next = from.next.load(Acquire);
        read.store(next, Release);
        Marks {
            registered_ns: now_ns,
            next,
            stuck_since_ns: None,
            has_more: false,
            // Units may be open.
            changes: from.changes.load(Relaxed).wrapping_sub(1),
            open: Vec::with_capacity(OPEN_MARKS_MAX),
            open_tokens: Vec::with_capacity(OPEN_MARKS_MAX),
            ended: Vec::with_capacity(PASS_MARKS_CLIENT_MAX),
            sampled: Sampled::new(),
            has_any: false,
            has_requests: false,
            is_first: false,
            tpot_ns: None,
            has_tokens: false,
            is_first_token: false,
            since_token: 0,
            tokens_ended: Vec::with_capacity(PASS_MARKS_CLIENT_MAX),
            tokens: None,
            prefills: None,
            profile: None,
            is_profiled: false,
            profile_seen: from.profile.sequence.load(Relaxed),
            dropped_before: from.dropped.load(Relaxed),
            dropped: 0,
            wrong: 0,
            shortened: 0,
        }
    }

    /// Takes what ended since the last pass, at most so many units. How many it took.
    pub fn read(
        &mut self,
        now_ns: u64,
        from: &theirs::Marks,
        read: &AtomicU64,
        most: usize,
    ) -> usize {
        self.ended.clear();
        self.tokens_ended.clear();
        (self.is_first, self.is_first_token) = (false, false);
        self.sampled.begin_pass();
        for times in [&mut self.tokens, &mut self.prefills].into_iter().flatten() {
            times.turn(now_ns);
        }
        let had_requests = self.has_requests;
        let changes = from.changes.load(Acquire);
        if changes != self.changes {
            self.changes = changes;
            self.look_at_open(now_ns, from);
        }
        self.look_at_profile(from);
        // The client may also write less: what was counted stays.
        let dropped = from.dropped.load(Relaxed).saturating_sub(self.dropped_before);
        self.dropped = self.dropped.max(dropped);
        let taken = self.take(now_ns, from, most.min(PASS_MARKS_CLIENT_MAX));
        // The client frees the place of a unit after it has reported the end.
        for unit in &self.ended {
            if let Some(at) = self.open.iter().position(|open| open.is(&unit.open)) {
                self.open.swap_remove(at);
            }
        }
        if read.load(Relaxed) != self.next {
            read.store(self.next, Release);
        }
        self.is_first = self.has_requests && !had_requests;
        if self.is_first {
            // Others were told from its launches, of the same work or of what came before.
            self.ended.retain(|unit| unit.kind == Kind::Request);
            self.look_at_open(now_ns, from);
        }
        taken
    }

    fn look_at_open(&mut self, now_ns: u64, from: &theirs::Marks) {
        self.open.clear();
        self.open_tokens.clear();
        let last_ns = now_ns.max(self.registered_ns);
        let open = |began_ns, stated_ns: u64, is_graph, queue_known| {
            let came_ns = stated_ns.clamp(self.registered_ns, last_ns);
            Open { began_ns, came_ns, is_graph, queue_known }
        };
        for (began_ns, What { kind, age_us, .. }) in from.open() {
            self.has_any = true;
            let list = match kind {
                Kind::Request => &mut self.open,
                Kind::Token => &mut self.open_tokens,
                Kind::Prefill | Kind::Stream => continue,
            };
            let came_ns = stated_ns(began_ns, age_us);
            list.push(open(began_ns, came_ns, false, age_us.is_some()));
        }
        self.has_requests |= !self.open.is_empty();
        if !self.has_requests {
            self.open
                .extend(from.open_streams().map(|(ns, is_graph)| open(ns, ns, is_graph, false)));
        }
    }

    fn look_at_profile(&mut self, from: &theirs::Marks) {
        self.is_profiled = false;
        let Some((sequence, profile)) = from.profile.read(self.profile_seen) else { return };
        self.profile_seen = sequence;
        let UnitProfile { launches, gaps, sms_max, sms_mean, .. } = profile;
        let can_be = (1..=PROFILED_LAUNCHES_MAX as u32).contains(&launches)
            && gaps < launches
            && sms_mean <= sms_max
            && sms_max <= SMS_MAX;
        if !can_be {
            self.wrong = self.wrong.saturating_add(1);
            return;
        }
        let units = self.profile.map_or(0, |before| before.units).saturating_add(1);
        self.profile = Some(UnitProfile { units, ..profile });
        self.is_profiled = true;
    }

    fn take(&mut self, now_ns: u64, from: &theirs::Marks, most: usize) -> usize {
        let mut taken = 0;
        self.has_more = false;
        loop {
            let end = from.next.load(Acquire);
            if self.next == end {
                break;
            }
            if taken == most {
                self.has_more = true;
                break;
            }
            let mut next = self.next.wrapping_add(1);
            match from.poll(self.next) {
                Polled::Ended(stated) => self.take_one(now_ns, stated),
                Polled::Overtaken(ticket) => {
                    // One that waits too long loses its slot; a client may also state any number.
                    self.wrong = self.wrong.saturating_add(1);
                    let is_past = ticket.wrapping_sub(self.next) >= end.wrapping_sub(self.next);
                    next = if is_past { end } else { ticket };
                }
                Polled::Empty => {
                    let since_ns = *self.stuck_since_ns.get_or_insert(now_ns);
                    if now_ns.saturating_sub(since_ns) < STUCK_NS {
                        break;
                    }
                    self.wrong += 1;
                }
            }
            (self.next, self.stuck_since_ns) = (next, None);
            taken += 1;
        }
        taken
    }

    fn take_one(&mut self, now_ns: u64, stated: Stated) {
        let Some(unit) = self.checked(now_ns, stated) else {
            self.wrong += 1;
            return;
        };
        self.has_any |= unit.kind != Kind::Stream;
        let times = match unit.kind {
            Kind::Stream => {
                self.count_graphs(now_ns, stated, unit);
                if !self.has_requests {
                    self.ends_request(unit);
                }
                return;
            }
            Kind::Request => {
                self.has_requests = true;
                self.ends_request(unit);
                return;
            }
            Kind::Token => {
                // The client frees its place after it has reported the end.
                if let Some(at) = self.open_tokens.iter().position(|open| open.is(&unit.open)) {
                    self.open_tokens.swap_remove(at);
                }
                self.since_token = 0;
                if !std::mem::replace(&mut self.has_tokens, true) {
                    // Of the same tokens, or before them.
                    self.tokens = None;
                    self.set_tpot(now_ns, self.tpot_ns);
                    self.is_first_token = true;
                    self.tokens_ended.clear();
                    self.sampled.tokens.clear();
                }
                self.sampled.token(&unit, self.tpot_ns);
                if self.tpot_ns.is_some() {
                    self.tokens_ended.push((unit.ns, 1));
                }
                &mut self.tokens
            }
            Kind::Prefill => &mut self.prefills,
        };
        times.get_or_insert_with(|| Times::new(now_ns)).record(now_ns, unit.ns, 1);
    }

    fn ends_request(&mut self, unit: Unit) {
        self.ended.push(unit);
        self.since_token = self.since_token.saturating_add(self.open_tokens.is_empty().into());
    }

    /// Each graph launch of a unit is a token, if tokens have an objective and are not marked: it takes its share of
    /// the time from the unit's first launch, or the end of the unit before it if that is later, to the unit's end.
    fn count_graphs(&mut self, now_ns: u64, stated: Stated, unit: Unit) {
        let Some(What { graphs, .. }) = What::unpack(stated.what) else { return };
        if self.tpot_ns.is_none() || self.has_tokens || graphs.count == 0 {
            return;
        }
        let Open { began_ns, came_ns, .. } = unit.open;
        let from_ns = began_ns.saturating_add(graphs.after_ns.into()).max(came_ns);
        let ns = stated.ended_ns.saturating_sub(from_ns) / u64::from(graphs.count);
        let times = self.tokens.get_or_insert_with(|| Times::new(now_ns));
        times.record(now_ns, ns, graphs.count.into());
        self.tokens_ended.push((ns, graphs.count.into()));
        self.sampled.graphs(from_ns, ns, graphs.count.into(), self.tpot_ns);
    }

    /// Tell the engine of the tokens that ended in the last pass.
    pub fn tell_tokens(&self, client: ClientId, engine: &mut Engine) {
        if self.is_first_token {
            engine.forget_tokens(client);
        }
        for &(took_ns, tokens) in &self.tokens_ended {
            engine.tokens_ended(client, tokens, took_ns);
        }
    }

    /// Tell the engine of the unit that was profiled since the pass before.
    pub fn tell_profile(&self, client: ClientId, engine: &mut Engine) {
        if let Some(profile) = self.profile.filter(|_| self.is_profiled) {
            engine.unit_profiled(client, profile);
        }
    }

    /// The latest profiled unit.
    pub fn profile(&self) -> Option<UnitProfile> {
        self.profile
    }

    /// Another longest time of a token, or none. What is recent of tokens begins anew.
    pub fn set_tpot(&mut self, now_ns: u64, tpot_ns: Option<u64>) {
        self.tpot_ns = tpot_ns;
        if tpot_ns.is_some() || self.tokens.is_some() {
            let times = self.tokens.get_or_insert_with(|| Times::new(now_ns));
            times.set_limit(tpot_ns);
        }
    }

    /// The longest time that a token may take, ns.
    pub fn tpot_ns(&self) -> Option<u64> {
        self.tpot_ns
    }

    /// A unit as it may have been; `None` if it cannot.
    fn checked(&mut self, now_ns: u64, stated: Stated) -> Option<Unit> {
        let What { kind, age_us, .. } = What::unpack(stated.what)?;
        let Stated { mut began_ns, ended_ns, .. } = stated;
        let mut is_graph = false;
        if kind == Kind::Stream {
            is_graph = even_ns(began_ns) != began_ns;
            began_ns = even_ns(began_ns);
        }
        if ended_ns < began_ns || ended_ns > now_ns.saturating_add(AHEAD_NS_MAX) {
            return None;
        }
        let stated_ns = stated_ns(began_ns, age_us);
        let came_ns = stated_ns.max(self.registered_ns);
        self.shortened += u64::from(came_ns != stated_ns);
        let most_ns = now_ns.saturating_sub(self.registered_ns);
        let ns = ended_ns.saturating_sub(came_ns).min(most_ns);
        let queued_ns = age_us.map(|_| began_ns.saturating_sub(came_ns).min(ns));
        let open = Open { began_ns, came_ns, is_graph, queue_known: age_us.is_some() };
        Some(Unit { kind, open, ns, queued_ns })
    }

    /// Whether there was more than the last pass took.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether a unit has ended since the last pass.
    pub fn has_ended(&self, from: &theirs::Marks) -> bool {
        from.next.load(Acquire) != self.next && from.poll(self.next) != Polled::Empty
    }

    /// Whether requests are marked ones since the last pass: what was counted before was not.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// When the oldest request under way came.
    pub fn oldest_open_ns(&self) -> Option<u64> {
        self.open_since_ns().min()
    }

    /// Policies' units are the marked tokens: those have an objective, and the program still marks some.
    pub fn tokens_are_units(&self) -> bool {
        self.has_tokens && self.tpot_ns.is_some() && self.since_token < TOKEN_REQUESTS
    }

    /// The oldest unit under way: a token, if those are units, else a request.
    pub fn oldest_open(&self) -> Option<OpenUnit> {
        let oldest = |open: &[Open]| open.iter().min_by_key(|open| open.came_ns).copied();
        let token = oldest(&self.open_tokens).filter(|_| self.tokens_are_units());
        if let Some(Open { came_ns, .. }) = token {
            return Some(OpenUnit { since_ns: came_ns, is_token: true });
        }
        let Open { came_ns, is_graph, .. } = oldest(&self.open)?;
        Some(OpenUnit { since_ns: came_ns, is_token: is_graph && !self.has_tokens })
    }

    /// Units that ended in the last pass: tokens, if those are units, else requests.
    pub fn ended_units(&self) -> impl Iterator<Item = EndedUnits> + '_ {
        let are_tokens = self.tokens_are_units();
        let ended = |took_ns, units, is_token| EndedUnits { units, took_ns, is_token };
        let tokens = self.tokens_ended.iter().filter(move |_| are_tokens);
        let requests = self.ended.iter().filter(move |_| !are_tokens);
        tokens.map(move |&(ns, tokens)| ended(ns, tokens, true)).chain(
            requests.map(move |unit| ended(unit.ns, 1, unit.open.is_graph && !self.has_tokens)),
        )
    }

    /// Counts the requests that ended in the last pass.
    pub fn count(&self, to: &mut impl Requests) {
        self.ended.iter().for_each(|unit| unit.count(to));
    }

    /// When the requests that are under way came, ns.
    pub fn open_since_ns(&self) -> impl Iterator<Item = u64> + '_ {
        self.open.iter().map(|open| open.came_ns)
    }

    /// All figures, as of the last pass; `None` if nothing was marked.
    pub fn numbers(&self, now_ns: u64) -> Option<MarkNumbers> {
        let numbers = |times: &Option<Box<Times>>| times.as_ref().map(|times| times.numbers());
        let has_any = self.has_any || self.tokens.is_some();
        (has_any || self.dropped > 0 || self.wrong > 0).then(|| MarkNumbers {
            has_requests: self.has_requests,
            has_tokens: self.has_tokens,
            open: self.open.len() as u64,
            oldest_ns: self.oldest_open_ns().map_or(0, |came| now_ns.saturating_sub(came)),
            tpot_ns: self.tpot_ns,
            tokens: numbers(&self.tokens).unwrap_or_default(),
            prefills: numbers(&self.prefills).unwrap_or_default(),
            dropped: self.dropped,
            wrong: self.wrong,
            shortened: self.shortened,
        })
    }
}

/// When a unit came, by what the client states.
fn stated_ns(began_ns: u64, age_us: Option<u64>) -> u64 {
    began_ns.saturating_sub(age_us.unwrap_or(0).saturating_mul(1_000))
}

impl Unit {
    fn count(&self, to: &mut impl Requests) {
        match self.queued_ns {
            Some(queued_ns) => to.request_queued(queued_ns, self.ns.saturating_sub(queued_ns)),
            None => to.request(self.ns),
        }
    }
}

#[cfg(test)]
mod tests;
