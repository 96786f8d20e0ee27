//! What outlives a reload: who owes time, and whose turn it is.

use crate::Rounds;
use crate::member::{Member, Used};
use tally_sdk::ClientId;

/// First words of the lines.
const ROUND: &str = "round";
const MEMBER: &str = "member";
/// Most lines are shorter.
const LINE_BYTES: usize = 128;
/// More places are never given in the time of a core.
const PLACES_MAX: u64 = u64::MAX / 2;
/// Digits of the largest number.
const DIGITS_MAX: usize = 20;

/// What [`Rounds::saved`] wrote. Read when the policy is restored: the first client joins while launches wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct SavedRounds {
    round: Option<[u64; 17]>,
    members: Vec<Member>,
}

impl SavedRounds {
    /// From such lines, among others.
    pub(crate) fn read(lines: &str) -> Self {
        let mut members: Vec<Member> =
            lines.lines().filter_map(Member::read).take(super::MEMBERS_MAX).collect();
        members.sort_by_key(|member| member.id);
        members.dedup_by_key(|member| member.id);
        SavedRounds { round: lines.lines().find_map(|line| numbers(line, ROUND)), members }
    }
}

impl Rounds {
    /// A line for the round and one for each client, all of them numbers.
    pub(crate) fn saved(&self) -> String {
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
            self.long_turn_ns,
            self.active as u64,
            self.ahead_ns,
            self.asked_until_ns,
            self.idle_look_ns,
            self.leases,
            self.is_round_over.into(),
            self.places,
            self.idle_ns.cast_unsigned(),
        ];
        let mut lines = String::with_capacity(LINE_BYTES * (1 + self.members.len()));
        put_line(&mut lines, ROUND, round);
        self.members.iter().for_each(|member| member.save(&mut lines));
        lines
    }

    /// Go on from there as soon as the clients join: of the same turn and sharing mode only.
    ///
    /// Any policy may have written the lines. Times after `now_ns` count as `now_ns`; credit, lost time and the time
    /// left are bounded once the weights of all clients are known.
    #[must_use]
    pub(crate) fn after(mut self, now_ns: u64, saved: SavedRounds) -> Self {
        let Some(round) = saved.round else { return self };
        let [turn_ns, one_at_a_time, owner, left, drain, round @ ..] = round;
        let [patience, is_patient, seen, long_turn, active, ahead, round @ ..] = round;
        let [asked_until, idle_look, leases, is_round_over, places, idle] = round;
        if (turn_ns, one_at_a_time) != (self.turn_ns, u64::from(self.one_at_a_time)) {
            return self;
        }
        self.owner = ClientId::try_from(owner).ok();
        (self.left_ns, self.drain_ns, self.seen_ns) = (left, drain, seen.min(now_ns));
        (self.patience_ns, self.is_patient) =
            (patience.min(super::PATIENCE_NS_MAX), is_patient > 0);
        if !self.one_at_a_time {
            self.long_turn_ns = long_turn.min(self.wanted_turn_ns(super::LONGEST_NS_MAX));
        }
        let least_ns = |ns: u64, after_ns| ns.min(now_ns.saturating_add(after_ns));
        self.asked_until_ns = least_ns(asked_until, self.turn_ns);
        self.idle_look_ns = least_ns(idle_look, super::IDLE_LOOK_NS);
        self.active = active.min(super::MEMBERS_MAX as u64) as usize;
        (self.ahead_ns, self.leases, self.is_round_over) = (ahead, leases, is_round_over > 0);
        self.places = places.min(PLACES_MAX);
        // A turn ends after some time in any case.
        let most_ns = (super::WALL * super::LONGEST_NS_MAX) as i64;
        self.idle_ns = idle.cast_signed().clamp(-most_ns, most_ns);
        self.known = saved.members;
        self.known.iter_mut().for_each(|member| member.active_ns = member.active_ns.min(now_ns));
        self
    }
}

impl Member {
    fn save(&self, lines: &mut String) {
        let used = self.used.unwrap_or(Used { charged_ns: 0, in_flight_ns: 0, assumed_ns: 0 });
        put_line(
            lines,
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
                self.longest_ns,
                self.stalled_ns,
                used.assumed_ns,
                self.is_kept_back.into(),
                self.place,
            ],
        )
    }

    fn read(line: &str) -> Option<Self> {
        let [id, credit, lost, is_used, charged, pending, numbers @ ..]: [u64; 15] =
            numbers(line, MEMBER)?;
        let [waits, in_flight, active, returns, longest, stalled, numbers @ ..] = numbers;
        let [assumed, is_kept_back, place] = numbers;
        Some(Member {
            credit_ns: credit.cast_signed(),
            lost_ns: lost.cast_signed(),
            used: (is_used > 0).then_some(Used {
                charged_ns: charged,
                in_flight_ns: pending,
                assumed_ns: assumed,
            }),
            waits: waits > 0,
            is_kept_back: is_kept_back > 0,
            place: place.min(PLACES_MAX),
            in_flight: in_flight > 0,
            active_ns: active,
            returns_soon: returns > 0,
            longest_ns: longest.min(super::LONGEST_NS_MAX),
            stalled_ns: stalled,
            is_restored: true,
            ..Member::none(ClientId::try_from(id).ok()?)
        })
    }
}

/// Appends a line. Decisions wait while it is written, and formatting each number would take several times as long.
pub(crate) fn put_line<const N: usize>(lines: &mut String, word: &str, numbers: [u64; N]) {
    lines.push_str(word);
    for number in numbers {
        lines.push(' ');
        put_number(lines, number);
    }
    lines.push('\n');
}

fn put_number(lines: &mut String, mut number: u64) {
    let mut digits = [b'0'; DIGITS_MAX];
    let mut first = DIGITS_MAX - 1;
    while number >= 10 {
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        first -= 1;
    }
    digits[first] = b'0' + number as u8;
    // Digits are ASCII.
    lines.push_str(std::str::from_utf8(&digits[first..]).unwrap_or_default());
}

pub(crate) fn numbers<const N: usize>(line: &str, word: &str) -> Option<[u64; N]> {
    let words = line.strip_prefix(word)?.split_ascii_whitespace();
    let numbers: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}
