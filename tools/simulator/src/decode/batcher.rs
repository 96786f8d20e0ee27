//! Continuous batching: what the service runs next.

use super::requests::{Request, Requests};
use super::{BATCH_MAX, CHUNK_TOKENS};
use std::collections::VecDeque;

/// What the service runs at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A chunk of a prompt, with which so much of it is in the cache.
    Prefill { tokens: u32, context: u32 },
    /// One token for each sequence.
    Step { batch: usize },
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    request: Request,
    cached: u32,
    answered: u32,
    /// When its last token was there.
    last_ns: u64,
}

/// What an end of work brought.
#[derive(Debug, Default)]
pub struct Ended {
    /// From each sequence's token before to this one, with prefills in between.
    pub gaps_ns: Vec<u64>,
    /// Arrivals of the requests that are done.
    pub arrivals_ns: Vec<u64>,
}

#[derive(Clone, Debug)]
pub struct Batcher<'a> {
    requests: &'a Requests,
    /// Arrivals count from here.
    start_ns: u64,
    /// Number of the next request that arrives.
    coming: usize,
    waiting: VecDeque<Request>,
    prefilling: Option<Sequence>,
    running: Vec<Sequence>,
    was_prefill: bool,
}

impl<'a> Batcher<'a> {
    pub fn new(requests: &'a Requests, start_ns: u64) -> Self {
        Batcher {
            requests,
            start_ns,
            coming: 0,
            waiting: VecDeque::new(),
            prefilling: None,
            running: Vec::new(),
            was_prefill: false,
        }
    }

    fn coming(&self) -> Option<Request> {
        let request = self.requests.get(self.coming)?;
        Some(Request { arrives_ns: self.start_ns + request.arrives_ns, ..request })
    }

    pub fn is_backlog(&self) -> bool {
        self.requests.is_backlog()
    }

    /// Arrivals before `end_ns` of the requests that are not done; none of a backlog.
    pub fn pending_ns(&self, end_ns: u64) -> Vec<u64> {
        if self.is_backlog() {
            return Vec::new();
        }
        let coming = (self.coming..).map_while(|number| self.requests.get(number));
        let coming = coming.map(|request| self.start_ns + request.arrives_ns);
        let served = self.running.iter().chain(&self.prefilling).map(|one| one.request);
        let all = served.chain(self.waiting.iter().copied()).map(|request| request.arrives_ns);
        all.chain(coming.take_while(|&ns| ns < end_ns)).filter(|&ns| ns < end_ns).collect()
    }

    /// When there is something to run. `None`: never again.
    pub fn ready_ns(&self) -> Option<u64> {
        let has_work =
            !self.waiting.is_empty() || self.prefilling.is_some() || !self.running.is_empty();
        if has_work { Some(0) } else { self.coming().map(|request| request.arrives_ns) }
    }

    /// What to run now.
    pub fn next(&mut self, now_ns: u64) -> Option<Work> {
        // Of a backlog no more than can be served.
        while let Some(request) = self.coming().filter(|request| request.arrives_ns <= now_ns)
            && (!self.requests.is_backlog() || self.waiting.len() < BATCH_MAX)
        {
            self.waiting.push_back(request);
            self.coming += 1;
        }
        if self.prefilling.is_none() && self.running.len() < BATCH_MAX {
            let sequence = |request| Sequence { request, cached: 0, answered: 0, last_ns: 0 };
            self.prefilling = self.waiting.pop_front().map(sequence);
        }
        if let Some(one) = &self.prefilling
            && (!self.was_prefill || self.running.is_empty())
        {
            self.was_prefill = true;
            let tokens = CHUNK_TOKENS.min(one.request.context - one.cached);
            return Some(Work::Prefill { tokens, context: one.cached + tokens });
        }
        self.was_prefill = false;
        let batch = self.running.len();
        (batch > 0).then_some(Work::Step { batch })
    }

    /// That work has ended.
    pub fn ended(&mut self, work: Work, now_ns: u64) -> Ended {
        let mut ended = Ended::default();
        match work {
            Work::Prefill { context, .. } => {
                let Some(mut one) = self.prefilling.take() else { return ended };
                one.cached = context;
                if one.cached < one.request.context {
                    self.prefilling = Some(one);
                } else {
                    // The last chunk gives the first token of the answer.
                    (one.answered, one.last_ns) = (1, now_ns);
                    self.running.push(one);
                }
            }
            Work::Step { .. } => {
                for one in &mut self.running {
                    ended.gaps_ns.push(now_ns - one.last_ns);
                    (one.answered, one.last_ns) = (one.answered + 1, now_ns);
                }
            }
        }
        self.running.retain(|one| {
            let is_done = one.answered >= one.request.generated;
            if is_done {
                ended.arrivals_ns.push(one.request.arrives_ns);
            }
            !is_done
        });
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works it off, each piece of work in 10 ns; "pTOKENS" and "sBATCH".
    fn schedule(text: &str, is_backlog: bool, pieces: usize) -> (String, Vec<u64>) {
        let requests =
            Requests::parse("r.csv", &format!("arrival_ms,context,generated\n{text}")).unwrap();
        let requests = if is_backlog { requests.backlog() } else { requests };
        let mut batcher = Batcher::new(&requests, 100);
        let (mut now_ns, mut done, mut requests_ns) = (0, Vec::new(), Vec::new());
        while done.len() < pieces
            && let Some(ready_ns) = batcher.ready_ns()
        {
            now_ns = ready_ns.max(now_ns);
            let work = batcher.next(now_ns).unwrap();
            done.push(match work {
                Work::Prefill { tokens, .. } => format!("p{tokens}"),
                Work::Step { batch } => format!("s{batch}"),
            });
            now_ns += 10;
            let ended = batcher.ended(work, now_ns);
            requests_ns.extend(ended.arrivals_ns.iter().map(|arrival| now_ns - arrival));
        }
        (done.join(" "), requests_ns)
    }

    #[test]
    fn prefills_and_steps_take_turns() {
        // As `decode_batch.Batcher` has it.
        let (done, requests_ns) = schedule("0,600,3\n0,100,2\n0,5,1\n", false, usize::MAX);
        assert_eq!(done, "p512 p88 s1 p100 s2 p5");
        assert_eq!(requests_ns, [50, 50, 60]);
        let (done, _) = schedule("0,600,5\n0,1100,2\n", false, usize::MAX);
        assert_eq!(done, "p512 p88 s1 p512 s1 p512 s1 p76 s2");
    }

    #[test]
    fn a_backlog_fills_the_batch_and_never_ends() {
        let (done, _) = schedule("0,10,1000\n", true, 40);
        let all: Vec<&str> = done.split(' ').collect();
        assert_eq!((all[0], all[1], all[30], all[31], all[39]), ("p10", "s1", "p10", "s16", "s16"));
    }

    #[test]
    fn it_pauses_until_a_request_arrives() {
        let (done, requests_ns) = schedule("0,1,2\n1,1,1\n", false, usize::MAX);
        assert_eq!((done.as_str(), requests_ns), ("p1 s1 p1", vec![20, 10]));
    }
}
