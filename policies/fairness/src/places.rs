//! Who takes part, where there are more clients than places.

use crate::member::Member;
use crate::{IDLE_LOOK_NS, MEMBERS_MAX, Rounds};
use tally_sdk::{ClientId, Decision, Launch};

impl Rounds {
    /// Those that have been there for longest take part.
    pub(crate) fn fill(&mut self) {
        let room = MEMBERS_MAX - self.members.len();
        for other in self.others.drain(..room.min(self.others.len())) {
            self.places += 1;
            let known = self.known.iter().position(|known| known.id == other.id);
            let known = known.map(|at| self.known.swap_remove(at));
            let (weight, place) = (other.weight, self.places);
            self.members.push(Member { weight, place, ..known.unwrap_or(other) });
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
        let found = self.others.binary_search_by_key(&launch.client, |other| other.id);
        let Ok(at) = found else { return };
        self.look(launch);
        let idles = self.members.iter().filter(|member| member.idles(now_ns));
        let longest = idles.min_by_key(|member| member.active_ns);
        let Some(id) = longest.map(|member| member.id) else { return };
        self.swap(id, at);
    }

    /// A member gives its place to one of the others.
    fn swap(&mut self, member: ClientId, at: usize) {
        let Some(of) = self.members.iter().position(|one| one.id == member) else { return };
        self.places += 1;
        let other = Member { place: self.places, ..self.others.remove(at) };
        let old = std::mem::replace(&mut self.members[of], other);
        let at = self.others.partition_point(|other| other.id < old.id);
        self.others.insert(at, Member { weight: old.weight, ..Member::none(old.id) });
        self.owner = self.owner.filter(|owner| *owner != old.id);
        self.members.sort_by_key(|member| member.id);
        self.divide();
    }

    /// After a round in which one launched at a time, who has had its place for longest gives it to who waits for one
    /// for longest.
    pub(crate) fn rotate(&mut self) {
        let waiting = self.others.iter().enumerate().filter(|(_, other)| other.waits);
        let longest = waiting.min_by_key(|(_, other)| other.active_ns).map(|(at, _)| at);
        let oldest = self.members.iter().min_by_key(|member| member.place).map(|one| one.id);
        if let (Some(at), Some(oldest)) = (longest, oldest) {
            self.swap(oldest, at);
        }
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
