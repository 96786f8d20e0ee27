//! A high-priority service: what it is to serve, and how far it is with that.

use super::solo::Solo;
use super::tokens::Tokens;
use super::{Setup, Sim};
use crate::arrivals::{Arrivals, Random};
use crate::decode::{self, Decode};
use crate::gpu::{SEEN_NS, SharingMode};
use crate::report::{High, ms, over, percentile};
use crate::trace::Trace;
use std::ops::Range;
use tally_engine::EndedUnits;
use tally_engine::policy::{Objective, UnitProfile};

/// A high-priority program that serves requests one after another, such as an inference.
#[derive(Clone, Copy, Debug)]
pub struct Service<'a> {
    /// What it runs for each request; of one that decodes, a step of its largest batch.
    pub trace: &'a Trace,
    /// Of one that decodes, not looked at.
    pub arrivals: &'a Arrivals,
    /// Its objective for requests.
    pub slo: Option<Objective>,
    /// Its objective for tokens: longest time of a request that is one CUDA graph, ns.
    pub tpot_ns: Option<u64>,
    /// A request is one CUDA graph; otherwise it launches as recorded.
    pub graph: bool,
    /// It serves these in batches, a token at a time; its steps are CUDA graphs.
    pub decode: Option<&'a Decode>,
}

impl<'a> Service<'a> {
    /// Without an objective; a request is one CUDA graph.
    pub fn new(trace: &'a Trace, arrivals: &'a Arrivals) -> Self {
        Service { trace, arrivals, slo: None, tpot_ns: None, graph: true, decode: None }
    }

    /// What it launches for a request, or a step, as its program does it.
    pub(super) fn as_launched(&self) -> Trace {
        let is_graph = self.graph || self.decode.is_some();
        if is_graph { self.trace.as_graph() } else { self.trace.clone() }
    }

    /// All that it launches, in that sharing mode.
    pub(super) fn all_launched(&self, sharing: SharingMode) -> Trace {
        let launched = self.as_launched().timed_in(sharing);
        match self.decode {
            Some(decode) => decode::joined(&launched, &decode.prefill().timed_in(sharing)),
            None => launched,
        }
    }
}

/// What a service begins.
pub(super) struct Begun {
    /// Its program's own part takes so many times as long.
    pub stretch: f64,
    /// Its launches: none but these of its trace.
    pub launches: Range<usize>,
    /// Its kernels take so many thousandths of what the trace says.
    pub permille: u64,
}

/// A service in a simulation. Its lane is its index.
pub(super) struct Serving<'a> {
    /// As its requests launch it, in the simulation's sharing mode.
    pub trace: &'a Trace,
    pub slo: Option<Objective>,
    pub tpot_ns: Option<u64>,
    pub graph: bool,
    pub solo: Solo,
    /// Times of all requests, rising.
    pub arrivals: Vec<u64>,
    /// Requests whose service has begun.
    pub begun: usize,
    /// Start of the one in service.
    pub since_ns: Option<u64>,
    /// The same, until the engine is told of it.
    pub unit_since_ns: Option<u64>,
    /// Of its units, once `units` of them were profiled.
    pub profile: UnitProfile,
    /// If it decodes: its units are steps and prefills, and not requests.
    pub tokens: Option<Tokens<'a>>,
    /// Requests that arrive in this time are counted; of one that decodes, also steps and prefills that end in it.
    counted: Range<u64>,
    /// Units that have ended.
    ended: u64,
    /// When it can begin the next one.
    free_ns: u64,
    service_ns: Vec<u64>,
    queued_ns: Vec<u64>,
    /// Of what delays its own part, request by request.
    random: Random,
}

/// The seed of a service's random numbers: each has another, the first the simulation's.
pub(super) fn seed_of(setup: &Setup, service: usize) -> u64 {
    let mut seeds = Random::new(setup.seed);
    (0..service).fold(setup.seed, |_, _| seeds.next())
}

impl<'a> Serving<'a> {
    /// `trace`: all that it launches, in the simulation's sharing mode. `arrivals`: times from the start. It begins at
    /// `start_ns`, and what comes in `counted` is reported.
    pub fn new(
        service: &Service<'a>,
        trace: &'a Trace,
        solo: Solo,
        arrivals: Vec<u64>,
        seed: u64,
        start_ns: u64,
        counted: Range<u64>,
    ) -> Self {
        Serving {
            trace,
            slo: service.slo,
            tpot_ns: service.tpot_ns,
            graph: service.graph,
            solo,
            arrivals,
            begun: 0,
            since_ns: None,
            unit_since_ns: None,
            profile: UnitProfile::default(),
            tokens: service.decode.map(|decode| Tokens::new(decode, start_ns)),
            counted,
            ended: 0,
            free_ns: 0,
            service_ns: Vec::new(),
            queued_ns: Vec::new(),
            random: Random::new(!seed),
        }
    }

    /// When the next request's service begins.
    pub fn begins_ns(&self) -> Option<u64> {
        if self.since_ns.is_some() {
            return None;
        }
        let arrival = match &self.tokens {
            Some(tokens) => tokens.ready_ns()?,
            None => *self.arrivals.get(self.begun)?,
        };
        Some(self.free_ns.max(arrival))
    }

    /// Begin the next request, of a service with so many launches.
    pub fn begin(&mut self, now_ns: u64, launches: usize) -> Option<Begun> {
        if let Some(tokens) = &mut self.tokens {
            let (launches, permille) = tokens.begin(now_ns, launches)?;
            self.since_ns = Some(now_ns);
            // The core sees launches only.
            self.unit_since_ns = Some(now_ns + self.trace.lead_ns);
            return Some(Begun { stretch: 1.0, launches, permille });
        }
        self.since_ns = Some(now_ns);
        self.unit_since_ns = Some(now_ns);
        self.begun += 1;
        let delay = self.solo.spread * (self.random.exponential() - std::f64::consts::LN_2);
        // Of a 99th percentile of more than 6.6 medians the least would be below nothing.
        Some(Begun { stretch: (1.0 + delay).max(0.0), launches: 0..launches, permille: 1_000 })
    }

    /// Whether what it does is one CUDA graph.
    pub fn is_token(&self) -> bool {
        self.tokens.as_ref().map_or(self.graph, Tokens::is_step)
    }

    /// The request in service is done. Returns how long it took as the core sees it, if there was one.
    fn end(&mut self, now_ns: u64) -> Option<u64> {
        let since_ns = self.since_ns.take()?;
        let seen_ns = now_ns + SEEN_NS;
        let took_ns = seen_ns - since_ns;
        self.ended += 1;
        if let Some(tokens) = &mut self.tokens {
            tokens.end(now_ns, took_ns, &self.counted);
            self.free_ns = seen_ns + decode::BETWEEN_NS;
            return Some(took_ns.saturating_sub(self.trace.lead_ns));
        }
        self.free_ns = seen_ns;
        let arrival_ns = self.arrivals[self.begun - 1];
        if self.counted.contains(&arrival_ns) {
            self.service_ns.push(took_ns);
            self.queued_ns.push(self.free_ns - arrival_ns);
        }
        Some(took_ns)
    }

    /// Whether every request was served. One that decodes serves no longer than the window.
    pub fn is_done(&self) -> bool {
        self.tokens.is_some() || self.ended == self.arrivals.len() as u64
    }

    /// Time of the first request from the start of its service to its end, ns.
    pub fn first_ns(&self) -> Option<u64> {
        self.service_ns.first().copied()
    }

    /// What became of its requests by the end of the simulation.
    pub fn report(mut self, end_ns: u64) -> High {
        if let Some(tokens) = self.tokens {
            let name = self.trace.name.clone();
            return tokens.report(name, self.tpot_ns, self.solo, &self.counted);
        }
        let Solo { ns: solo_ns, p99_ns, .. } = self.solo;
        let mut now_ns = 0;
        let mut solo_queued: Vec<u64> = Vec::with_capacity(self.arrivals.len());
        for &arrival in &self.arrivals {
            now_ns = arrival.max(now_ns) + solo_ns;
            if self.counted.contains(&arrival) {
                solo_queued.push(now_ns - arrival);
            }
        }
        self.arrivals.retain(|arrival| self.counted.contains(arrival));
        let served = self.service_ns.len();
        self.queued_ns.extend(self.arrivals[served..].iter().map(|at| end_ns.saturating_sub(*at)));
        let service = [0.5, 0.99].map(|q| percentile(&mut self.service_ns, q));
        let slo_ns = self.slo.map(|slo| slo.slo_ns).into_iter().chain(self.tpot_ns);
        let within = slo_ns.min().map(|slo_ns| {
            let kept = self.service_ns.iter().filter(|ns| **ns <= slo_ns).count() as u64;
            over(kept, self.arrivals.len() as u64)
        });
        // Of no requests no share is kept or missed.
        let within = within.filter(|_| !self.arrivals.is_empty());
        let queued = [0.5, 0.99].map(|q| percentile(&mut self.queued_ns, q));
        let alone = percentile(&mut solo_queued, 0.99);
        High {
            trace: self.trace.name.clone(),
            arrived: self.arrivals.len() as u64,
            served: served as u64,
            unserved: (self.arrivals.len() - served) as u64,
            solo_ms: ms(solo_ns),
            solo_p99_ms: ms(p99_ns),
            slo_ms: self.slo.map(|slo| ms(slo.slo_ns)),
            tpot_ms: self.tpot_ns.map(ms),
            within,
            service_p50_ms: ms(service[0]),
            service_p99_ms: ms(service[1]),
            service_p50_over_solo: over(service[0], solo_ns),
            service_p99_over_solo: over(service[1], p99_ns),
            queued_p50_ms: ms(queued[0]),
            queued_p99_ms: ms(queued[1]),
            solo_queued_p99_ms: ms(alone),
            queued_p99_over_solo: over(queued[1], alone),
            decode: None,
        }
    }
}

impl Sim<'_> {
    /// A service has no launch left: its request is done.
    pub(super) fn served(&mut self, now_ns: u64, lane: usize) {
        let serving = &mut self.services[lane];
        let is_token = serving.is_token();
        let Some(took_ns) = serving.end(now_ns) else { return };
        let Some(engine) = &mut self.engine else { return };
        let client = lane as u32;
        let ended = EndedUnits { units: 1, took_ns, is_token };
        if is_token {
            engine.tokens_ended(client, ended.units, ended.took_ns);
        }
        if UnitProfile::is_of(serving.ended - 1) {
            serving.profile.units += 1;
            engine.unit_profiled(client, serving.profile);
        }
        engine.units_ended(now_ns, client, &[ended], None, &mut self.actions);
        engine.high_activity(now_ns, client, false, now_ns, &mut self.actions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_service_has_a_seed_of_its_own_and_the_first_that_of_the_simulation() {
        for seed in [0, 1, u64::MAX] {
            let setup = Setup { seed, ..Setup::default() };
            let mut seeds: Vec<u64> = (0..16).map(|service| seed_of(&setup, service)).collect();
            assert_eq!(seeds[0], seed);
            seeds.sort_unstable();
            seeds.dedup();
            assert_eq!(seeds.len(), 16, "{seed}");
        }
    }
}
