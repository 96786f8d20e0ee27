//! What belongs to a block, and its figures.

use super::{Experiment, Phase, Reason};
use crate::design::Arm;
use crate::fairness::{self, Share};
use crate::report::Block;
use crate::sample::{Sample, Unit};

impl Experiment {
    /// Requests, and tokens, that began before the last cut go where they belong.
    pub(super) fn look(&mut self, now_ns: u64, sample: &Sample) {
        let (blocks, between) = (self.blocks.len(), self.phase == Phase::Between);
        for unit in Unit::ALL {
            let (units, ledger) = (sample.of(unit), &mut self.ledgers[unit.index()]);
            ledger.look(now_ns, units);
            self.lost[unit.index()] += units.lost;
            for one in &units.carried {
                let Some(own) = ledger.block_of(one) else { continue };
                if own == blocks && !between {
                    self.late[unit.index()].push(*one);
                } else if own + 1 == blocks
                    && let Some((_, first, _)) = &mut self.first
                {
                    first.of_mut(unit).add_carried(one);
                }
            }
        }
    }

    /// A block's figures. Requests and tokens of it that are under way count as their age.
    fn block(
        &self,
        arm: Arm,
        number: usize,
        mut sample: Sample,
        be_fairness: Option<f64>,
    ) -> (Block, Sample) {
        let open = Unit::ALL.map(|unit| {
            let mut open = 0;
            for one in self.ledgers[unit.index()].open_of(number) {
                sample.of_mut(unit).add_open(&one);
                open += 1;
            }
            open
        });
        let (requests, tokens) = (sample.of(Unit::Request), sample.of(Unit::Token));
        let block = Block {
            arm,
            began_s: sample.from_ns.saturating_sub(self.started_ns) as f64 / 1e9,
            measured_s: sample.span_ns() as f64 / 1e9,
            value: self.plan.metric.value(&sample, self.plan.slo_ns),
            requests: requests.count(),
            open: open[0],
            queue_known: requests.queue_known,
            requests_judged: requests.kept.judged,
            requests_within: requests.kept.within,
            hp_p50_ns: requests.quantile_ns(0.5),
            hp_p99_ns: requests.quantile_ns(0.99),
            tokens: tokens.count(),
            tokens_open: open[1],
            tokens_judged: tokens.kept.judged,
            tokens_within: tokens.kept.within,
            token_p99_ns: tokens.quantile_ns(0.99),
            be_launches: sample.launches,
            be_work_ns: sample.work_ns,
            be_waited_ns: sample.be_waited_ns,
            preemptions: sample.preemptions,
            be_fairness,
        };
        (block, sample)
    }

    pub(super) fn end_block(&mut self, now_ns: u64) {
        let empty = self.empty();
        let mut sample = std::mem::replace(&mut self.measured, empty);
        let number = self.blocks.len();
        for unit in Unit::ALL {
            self.ledgers[unit.index()].count(number, sample.of(unit));
        }
        let served = Unit::ALL.map(|unit| sample.of(unit).count());
        for unit in Unit::ALL {
            self.served_under[unit.index()][self.arm.index()] += served[unit.index()];
        }
        for unit in Unit::ALL {
            let late = self.late[unit.index()].drain(..);
            late.for_each(|one| sample.of_mut(unit).add_carried(&one));
        }
        let span_ns = sample.span_ns();
        let shares = fairness::between(&self.best_effort, &sample.best_effort, span_ns);
        let shares = self.hidden.block_ended(self.arm, shares);
        let fairness = fairness::index(&shares);
        self.phase = Phase::Between;
        // Before the pair, which may be the last one.
        self.judge_fairness(now_ns, &shares, span_ns);
        match self.first.take() {
            None => {
                let mut copy = self.empty();
                copy.extend(&sample);
                let (block, copy) = self.block(self.arm, number, copy, fairness);
                self.blocks.push(block);
                self.put_back([copy]);
                self.first = Some((self.arm, sample, served));
            }
            Some((first_arm, first, first_served)) => {
                // What of the first block was under way then may have ended.
                let before = self.blocks[number - 1].be_fairness;
                let (block, first) = self.block(first_arm, number - 1, first, before);
                self.blocks[number - 1] = block;
                let (block, second) = self.block(self.arm, number, sample, fairness);
                self.blocks.push(block);
                let pair = [(first, first_served), (second, served)];
                let [a, b] = if first_arm == Arm::A {
                    pair
                } else {
                    let [b, a] = pair;
                    [a, b]
                };
                for (at, of_unit) in self.served.iter_mut().enumerate() {
                    of_unit.push(a.1[at], b.1[at]);
                }
                self.end_pair(now_ns, &a.0, &b.0);
                self.put_back([a.0, b.0]);
            }
        }
        let last = self.arm;
        self.arm = self.assignment.next_arm();
        // After a pair: A serves already, or is to be put active first.
        if self.rest_ns > 0 && last == Arm::A && self.ended.is_none() {
            self.rest(now_ns);
        }
    }

    fn empty(&mut self) -> Sample {
        self.spare.pop().unwrap_or_default()
    }

    fn put_back<const N: usize>(&mut self, mut used: [Sample; N]) {
        used.iter_mut().for_each(Sample::clear);
        self.spare.extend(used);
    }

    /// A block of the present arm has ended in which best-effort clients did so much.
    fn judge_fairness(&mut self, now_ns: u64, shares: &[Share], span_ns: u64) {
        if self.arm == Arm::A {
            return self.shadow.block_ended(shares, span_ns);
        }
        if let Some(breach) = self.window.block_ended(shares, span_ns)
            && self.ended.is_none()
        {
            self.end(now_ns, Reason::Guard, breach);
            self.blame(Some(Arm::B));
        }
    }
}
