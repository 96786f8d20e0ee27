//! A service that decodes, in a simulation: steps and prefills in place of requests.

use super::solo::Solo;
use crate::decode::{Batcher, Decode, Work, chunk_permille, step_permille};
use crate::report::{Decoded, High, ms, over, percentile};
use std::ops::Range;

/// What of it was counted.
#[derive(Clone, Default)]
struct Counted {
    steps_ns: Vec<u64>,
    prefills_ns: Vec<u64>,
    gaps_ns: Vec<u64>,
    /// Of requests that arrived in the window: from arrival to the last token, or to the window's end.
    requests_ns: Vec<u64>,
    served: u64,
    tokens: u64,
}

pub(super) struct Tokens<'a> {
    batcher: Batcher<'a>,
    /// How long a chunk is of a prefill that is not ours is known by its tokens only.
    is_own_prefill: bool,
    work: Option<Work>,
    counted: Counted,
}

impl<'a> Tokens<'a> {
    pub fn new(decode: &'a Decode, start_ns: u64) -> Self {
        Tokens {
            batcher: Batcher::new(&decode.requests, start_ns),
            is_own_prefill: decode.prefill.is_none(),
            work: None,
            counted: Counted::default(),
        }
    }

    pub fn ready_ns(&self) -> Option<u64> {
        self.batcher.ready_ns()
    }

    pub fn is_step(&self) -> bool {
        matches!(self.work, Some(Work::Step { .. }))
    }

    /// Begin what is next: its launches, of so many in all, and how much of their time it takes, thousandths.
    pub fn begin(&mut self, now_ns: u64, launches: usize) -> Option<(Range<usize>, u64)> {
        self.work = self.batcher.next(now_ns);
        Some(match self.work? {
            Work::Step { batch } => (0..1, step_permille(batch)),
            Work::Prefill { tokens, context } => {
                let context = self.is_own_prefill.then_some(context);
                (1..launches, chunk_permille(tokens, context))
            }
        })
    }

    /// It is done.
    pub fn end(&mut self, now_ns: u64, took_ns: u64, window: &Range<u64>) {
        let Some(work) = self.work.take() else { return };
        let ended = self.batcher.ended(work, now_ns);
        let counted = &mut self.counted;
        let is_backlog = self.batcher.is_backlog();
        for arrival_ns in ended.arrivals_ns {
            if is_backlog && window.contains(&now_ns) {
                counted.served += 1;
            } else if !is_backlog && window.contains(&arrival_ns) {
                counted.served += u64::from(now_ns < window.end);
                counted.requests_ns.push(now_ns.min(window.end) - arrival_ns);
            }
        }
        if !window.contains(&now_ns) {
            return;
        }
        match work {
            Work::Step { batch } => {
                counted.steps_ns.push(took_ns);
                counted.tokens += batch as u64;
            }
            Work::Prefill { .. } => counted.prefills_ns.push(took_ns),
        }
        counted.gaps_ns.extend(ended.gaps_ns);
    }

    /// What a step takes, as if this were the service alone.
    pub fn solo(mut self, counted: &Range<u64>) -> Solo {
        let tokens_per_s = self.counted.tokens_per_s(counted);
        let all = &mut self.counted;
        Solo {
            ns: percentile(&mut all.steps_ns, 0.5),
            p99_ns: percentile(&mut all.steps_ns, 0.99),
            queued_p99_ns: percentile(&mut all.requests_ns, 0.99),
            tokens_per_s,
            spread: 0.0,
        }
    }

    pub fn report(
        self,
        trace: String,
        tpot_ns: Option<u64>,
        solo: Solo,
        window: &Range<u64>,
    ) -> High {
        let mut all = self.counted;
        let tokens_per_s = all.tokens_per_s(window);
        let steps = all.steps_ns.len() as u64;
        let within = tpot_ns.filter(|_| steps > 0).map(|tpot_ns| {
            over(all.steps_ns.iter().filter(|ns| **ns <= tpot_ns).count() as u64, steps)
        });
        let pending_ns = self.batcher.pending_ns(window.end);
        let pending_ns = pending_ns.into_iter().filter(|ns| window.contains(ns));
        all.requests_ns.extend(pending_ns.map(|arrival_ns| window.end - arrival_ns));
        let served = all.served;
        let arrived = if self.batcher.is_backlog() { served } else { all.requests_ns.len() as u64 };
        let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|q| percentile(&mut all.steps_ns, q));
        let gaps = [0.5, 0.99].map(|q| percentile(&mut all.gaps_ns, q));
        let queued = [0.5, 0.99].map(|q| percentile(&mut all.requests_ns, q));
        let prefill_ns = percentile(&mut all.prefills_ns, 0.5);
        High {
            trace,
            arrived,
            served,
            unserved: arrived - served,
            solo_ms: ms(solo.ns),
            solo_p99_ms: ms(solo.p99_ns),
            slo_ms: None,
            tpot_ms: tpot_ns.map(ms),
            within,
            service_p50_ms: ms(p50),
            service_p99_ms: ms(p99),
            service_p50_over_solo: over(p50, solo.ns),
            service_p99_over_solo: over(p99, solo.p99_ns),
            queued_p50_ms: ms(queued[0]),
            queued_p99_ms: ms(queued[1]),
            solo_queued_p99_ms: ms(solo.queued_p99_ns),
            queued_p99_over_solo: over(queued[1], solo.queued_p99_ns),
            decode: Some(Decoded {
                steps,
                batch_mean: over(all.tokens, steps),
                tokens_per_s,
                solo_tokens_per_s: solo.tokens_per_s,
                step_p95_ms: ms(p95),
                gap_p50_ms: ms(gaps[0]),
                gap_p99_ms: ms(gaps[1]),
                prefills: all.prefills_ns.len() as u64,
                prefill_p50_ms: ms(prefill_ns),
            }),
        }
    }
}

impl Counted {
    fn tokens_per_s(&self, window: &Range<u64>) -> f64 {
        self.tokens as f64 * 1e9 / (window.end - window.start).max(1) as f64
    }
}
