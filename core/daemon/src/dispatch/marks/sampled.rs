//! What an A/B test counts of a client's units: the same requests and tokens as the status, each judged by the client's
//! objective in force when it ended.

use super::{Marks, Open, Unit};
use tally_ab::sample::{Carried, Room, UnderWay};
use tally_ab::{Sample, Unit as Of};
use tally_contract::limits::PASS_MARKS_CLIENT_MAX;

/// Tokens that ended, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tokens {
    /// When the first of them began, ns.
    began_ns: u64,
    /// What each of them took, ns.
    ns: u64,
    count: u32,
    queue_known: bool,
    /// Longest time that kept the objective, ns, if there was one.
    limit_ns: Option<u64>,
}

/// Since the last pass, and since the last cut.
#[derive(Debug)]
pub(super) struct Sampled {
    /// The test has what ended in the last pass.
    is_taken: bool,
    /// Units that came before are carried over a cut.
    cut_ns: u64,
    /// For how many there is room in each stretch, and in what is left of this one.
    room: Room,
    room_left: Room,
    /// Tokens that ended in the last pass.
    pub tokens: Vec<Tokens>,
}

impl Sampled {
    /// Allocates all that it will ever need.
    pub fn new() -> Self {
        let (room, tokens) = (Room::of_one(1), Vec::with_capacity(PASS_MARKS_CLIENT_MAX));
        Sampled { is_taken: false, cut_ns: 0, room, room_left: room, tokens }
    }

    pub fn begin_pass(&mut self) {
        self.is_taken = false;
        self.tokens.clear();
    }

    /// Adds a marked token that ended.
    pub fn token(&mut self, unit: &Unit, limit_ns: Option<u64>) {
        let Open { came_ns: began_ns, queue_known, .. } = unit.open;
        self.tokens.push(Tokens { began_ns, ns: unit.ns, count: 1, queue_known, limit_ns });
    }

    /// So many graphs ran one after the other, each a token that took so long.
    pub fn graphs(&mut self, began_ns: u64, ns: u64, count: u32, limit_ns: Option<u64>) {
        self.tokens.push(Tokens { began_ns, ns, count, queue_known: false, limit_ns });
    }
}

impl Marks {
    /// Counts what ended in the last pass, once. `slo_ns`: the longest time that keeps the objective for requests.
    pub fn sample(&mut self, slo_ns: Option<u64>, sample: &mut Sample) {
        if std::mem::replace(&mut self.sampled.is_taken, true) {
            return;
        }
        let Sampled { cut_ns, room_left, tokens, .. } = &mut self.sampled;
        for unit in &self.ended {
            let Open { came_ns: began_ns, queue_known, .. } = unit.open;
            let ended =
                Carried { began_ns, ns: unit.ns, queue_known, limit_ns: slo_ns, is_age: false };
            sample.ended(Of::Request, ended, 1, *cut_ns, room_left);
        }
        for &Tokens { began_ns, ns, count, queue_known, limit_ns } in tokens.iter() {
            let first = Carried { began_ns, ns, queue_known, limit_ns, is_age: false };
            sample.ended(Of::Token, first, count.into(), *cut_ns, room_left);
        }
    }

    /// Its client leaves: counts what ended, and what is under way by its age, as at the end of a block.
    pub fn leave(&mut self, now_ns: u64, slo_ns: Option<u64>, sample: &mut Sample) {
        self.sample(slo_ns, sample);
        let Sampled { cut_ns, room_left, .. } = &mut self.sampled;
        let each =
            [(&self.open, Of::Request, slo_ns), (&self.open_tokens, Of::Token, self.tpot_ns)];
        for (all, of, limit_ns) in each {
            for &Open { came_ns: began_ns, queue_known, .. } in all {
                let ns = now_ns.saturating_sub(began_ns);
                let unit = Carried { began_ns, ns, queue_known, limit_ns, is_age: true };
                sample.left(of, unit, *cut_ns, room_left);
            }
        }
    }

    /// A new stretch of an A/B test begins. So many units may be carried into it, and be under way in it.
    pub fn cut(&mut self, now_ns: u64, room: Room) {
        let sampled = &mut self.sampled;
        (sampled.cut_ns, sampled.room, sampled.room_left) = (now_ns, room, room);
    }

    /// Adds the requests and tokens that are under way.
    pub fn under_way(&self, slo_ns: Option<u64>, sample: &mut Sample) {
        let mut room = self.sampled.room;
        let each =
            [(&self.open, Of::Request, slo_ns), (&self.open_tokens, Of::Token, self.tpot_ns)];
        for (all, of, limit_ns) in each {
            for Open { came_ns, queue_known, .. } in all {
                let open = UnderWay { began_ns: *came_ns, queue_known: *queue_known, limit_ns };
                sample.under_way(of, open, &mut room);
            }
        }
    }
}
