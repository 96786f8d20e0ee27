//! What outlives a reload: who owes time, and whose turn it is.

use super::{Member, Rounds, Used};
use tally_sdk::{Client, ClientId};

/// First words of the lines.
const ROUND: &str = "round";
const MEMBER: &str = "member";

impl Rounds {
    /// A line for the round and one for each client, all of them numbers.
    pub fn saved(&self) -> String {
        if self.members.is_empty() {
            return String::new();
        }
        let round = [
            self.turn_ns,
            self.one_at_a_time.into(),
            self.owner.map_or(u64::MAX, u64::from),
            self.left_ns,
            self.drain_ns,
            self.patience_ns,
            self.is_patient.into(),
            self.seen_ns,
        ];
        let mut lines = line(ROUND, round);
        for member in &self.members {
            lines += &member.saved();
        }
        lines
    }

    /// Go on from such lines, among others, as soon as their clients join: of the same turn and sharing mode only.
    #[must_use]
    pub fn after(mut self, lines: &str) -> Self {
        let round = lines.lines().find_map(|line| numbers(line, ROUND));
        let Some([turn_ns, one_at_a_time, owner, left, drain, patience, is_patient, seen]) = round
        else {
            return self;
        };
        if (turn_ns, one_at_a_time) != (self.turn_ns, u64::from(self.one_at_a_time)) {
            return self;
        }
        self.owner = ClientId::try_from(owner).ok();
        (self.left_ns, self.drain_ns, self.seen_ns) = (left, drain, seen);
        (self.patience_ns, self.is_patient) =
            (patience.min(super::PATIENCE_NS_MAX), is_patient > 0);
        self.known = lines.lines().filter_map(Member::read).take(super::MEMBERS_MAX).collect();
        self
    }
}

impl Member {
    /// As it was saved, if it was.
    pub fn new(client: &Client, known: &[Member]) -> Self {
        let known = known.iter().find(|member| member.id == client.id).copied();
        Member { weight: client.weight.max(1).into(), ..known.unwrap_or(Member::none(client.id)) }
    }

    fn saved(&self) -> String {
        let used = self.used.unwrap_or(Used { charged_ns: 0, in_flight_ns: 0 });
        line(
            MEMBER,
            [
                self.id.into(),
                self.credit_ns.cast_unsigned(),
                self.lost_ns.cast_unsigned(),
                self.used.is_some().into(),
                used.charged_ns,
                used.in_flight_ns,
                self.waits.into(),
                self.in_flight.into(),
                self.active_ns,
                self.returns_soon.into(),
            ],
        )
    }

    fn read(line: &str) -> Option<Self> {
        let [id, credit, lost, is_used, charged, pending, waits, in_flight, active, returns] =
            numbers(line, MEMBER)?;
        Some(Member {
            credit_ns: credit.cast_signed(),
            lost_ns: lost.cast_signed(),
            used: (is_used > 0).then_some(Used { charged_ns: charged, in_flight_ns: pending }),
            waits: waits > 0,
            in_flight: in_flight > 0,
            active_ns: active,
            returns_soon: returns > 0,
            ..Member::none(ClientId::try_from(id).ok()?)
        })
    }
}

pub(crate) fn line<const N: usize>(word: &str, numbers: [u64; N]) -> String {
    let numbers = numbers.map(|number| format!(" {number}"));
    format!("{word}{}\n", numbers.concat())
}

pub(crate) fn numbers<const N: usize>(line: &str, word: &str) -> Option<[u64; N]> {
    let words = line.strip_prefix(word)?.split_ascii_whitespace();
    let numbers: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}
