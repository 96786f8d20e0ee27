//! Who takes part, where there are more clients than places.

use crate::member::Member;
use crate::{IDLE_LOOK_NS, MEMBERS_MAX, Rounds};
use tally_sdk::{ClientId, Decision, Launch};

/// Places that are given up at once. A call may cost only so much.
const SWAPS_MAX: usize = MEMBERS_MAX / 2;

impl Rounds {
    /// Those that have been there for longest take part. Who had a place before a reload has it again.
    pub(crate) fn fill(&mut self) {
        let mut at = 0;
        while self.members.len() < MEMBERS_MAX
            && let Some(id) = self.others.get(at).map(|other| other.id)
        {
            let known = self.known.iter().position(|known| known.id == id);
            if known.is_none() && self.members.len() + self.known.len() >= MEMBERS_MAX {
                at += 1;
                continue;
            }
            let other = self.others.remove(at);
            let known = known.map(|at| self.known.swap_remove(at));
            self.places += u64::from(known.is_none());
            let newcomer = Member { place: self.places, ..other };
            self.members.push(Member { weight: other.weight, ..known.unwrap_or(newcomer) });
        }
        self.members.sort_by_key(|member| member.id);
        self.divide();
    }

    /// A client without a place launches: it has that of one that idles from now on, if there is one.
    pub(crate) fn replace_idle(&mut self, launch: &Launch) {
        let now_ns = launch.now_ns;
        if now_ns < self.idle_look_ns {
            return;
        }
        self.idle_look_ns = now_ns.saturating_add(IDLE_LOOK_NS);
        if self.others.binary_search_by_key(&launch.client, |other| other.id).is_err() {
            return;
        }
        self.look(launch);
        let idles = self.members.iter().filter(|member| member.idles(now_ns));
        let longest = idles.min_by_key(|member| member.active_ns);
        let Some(id) = longest.map(|member| member.id) else { return };
        self.swap(&[(id, launch.client)]);
    }

    /// Members give their places to others.
    fn swap(&mut self, pairs: &[(ClientId, ClientId)]) {
        for (old, new) in pairs {
            let of = self.members.iter().position(|one| one.id == *old);
            let at = self.others.iter().position(|other| other.id == *new);
            let (Some(of), Some(at)) = (of, at) else { continue };
            self.places += 1;
            let mine = &mut self.members[of];
            // What it owes it pays once it has a place again.
            let (weight, credit_ns) = (mine.weight, mine.credit_ns.min(0));
            let gone = Member { weight, credit_ns, ..Member::none(mine.id) };
            let other = std::mem::replace(&mut self.others[at], gone);
            *mine = Member { place: self.places, ..other };
            self.owner = self.owner.filter(|owner| owner != old);
        }
        self.members.sort_by_key(|member| member.id);
        self.others.sort_by_key(|other| other.id);
        self.divide();
    }

    /// After a round in which one launched at a time, those that have had their places for longest give them to those
    /// that wait for one, for longest first.
    pub(crate) fn rotate(&mut self) {
        let mut waiting: Vec<_> =
            self.others.iter().filter(|other| other.waits).map(|o| (o.active_ns, o.id)).collect();
        if waiting.is_empty() {
            return;
        }
        let mut oldest: Vec<_> = self.members.iter().map(|one| (one.place, one.id)).collect();
        waiting.sort_unstable();
        oldest.sort_unstable();
        // The rest launches in the next round, too: who waits is to have what this round had.
        let pairs = oldest.iter().zip(&waiting).take(SWAPS_MAX);
        let pairs: Vec<_> = pairs.map(|((_, old), (_, new))| (*old, *new)).collect();
        self.swap(&pairs);
    }

    /// For what a client without a place waits: where one launches at a time, until it has one, or nobody else works.
    pub(crate) fn without_place(&mut self, launch: &Launch) -> Option<Decision> {
        let at = self.others.binary_search_by_key(&launch.client, |other| other.id).ok()?;
        if !self.one_at_a_time {
            return None;
        }
        let now_ns = launch.now_ns;
        let other = &mut self.others[at];
        if !std::mem::replace(&mut other.waits, true) {
            other.active_ns = now_ns;
        }
        let works = |m: &Member| m.is_backlogged() || m.was_just_now(now_ns);
        self.members.iter().any(works).then_some(Decision::Hold(IDLE_LOOK_NS))
    }
}
