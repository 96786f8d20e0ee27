//! Which faults come when: all of it from a seed, so that a run can be repeated as far as scheduling allows.

use std::time::Duration;

/// A small generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator of the sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 random bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// SIGKILL; the party is started again.
    Kill,
    /// SIGSTOP, and SIGCONT before the core's heartbeat is missed.
    StopShort,
    /// SIGSTOP, and SIGCONT after that.
    StopLong,
    /// RLIMIT_NOFILE below what is open: EMFILE.
    Files,
    /// The file system of profiles and logs is full: ENOSPC.
    Space,
    /// RLIMIT_FSIZE of a page: EFBIG and SIGXFSZ.
    FileSize,
    /// Signals with handlers, or stops of a millisecond: EINTR.
    Interrupt,
    /// The party goes on with monotonic clocks that are hours or days ahead or behind.
    Clock,
    /// A hostile client tries something with the memory and descriptors it shares.
    Memory,
}

impl Kind {
    /// All of them, as they are reported.
    pub const ALL: [Kind; 9] = [
        Kind::Kill,
        Kind::StopShort,
        Kind::StopLong,
        Kind::Files,
        Kind::Space,
        Kind::FileSize,
        Kind::Interrupt,
        Kind::Clock,
        Kind::Memory,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Kill => "kill",
            Kind::StopShort => "stop",
            Kind::StopLong => "long stop",
            Kind::Files => "EMFILE",
            Kind::Space => "ENOSPC",
            Kind::FileSize => "EFBIG",
            Kind::Interrupt => "EINTR",
            Kind::Clock => "clock offset",
            Kind::Memory => "memfd trick",
        }
    }

    /// How often it is in a deck of faults.
    fn cards(self) -> usize {
        match self {
            Kind::StopLong | Kind::FileSize => 1,
            Kind::Space | Kind::Clock => 2,
            Kind::Files => 3,
            Kind::Interrupt => 4,
            Kind::Kill | Kind::StopShort => 5,
            Kind::Memory => 6,
        }
    }

    fn hits(self, party: Party) -> bool {
        match self {
            Kind::Kill | Kind::StopShort => true,
            Kind::StopLong | Kind::Files | Kind::Clock | Kind::Interrupt => party != Party::Hostile,
            Kind::Space | Kind::FileSize => party == Party::Core,
            Kind::Memory => party == Party::Hostile,
        }
    }
}

/// The process that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    Core,
    /// A program, by its number: the first is a high-priority one.
    Program(usize),
    /// The client that breaks the protocol on purpose.
    Hostile,
}

/// Programs of a world.
pub const PROGRAMS: usize = 3;
const PARTIES: [Party; PROGRAMS + 2] =
    [Party::Core, Party::Program(0), Party::Program(1), Party::Program(2), Party::Hostile];

#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub party: Party,
    /// Time from the start of its batch.
    pub after: Duration,
    /// How long, or how long the party is gone.
    pub lasts: Duration,
    pub seed: u64,
}

/// Faults that overlap; then everything is checked.
pub type Batch = Vec<Fault>;

/// Faults of a batch, at most.
const BATCH_MAX: u64 = 3;

/// Draws `faults` faults of kinds that `possible` allows.
pub fn plan(seed: u64, faults: usize, possible: &[Kind]) -> Vec<Batch> {
    let mut random = Random::new(seed);
    let mut deck: Vec<Kind> = Vec::new();
    let (mut batches, mut planned) = (Vec::new(), 0);
    while planned < faults && !possible.is_empty() {
        let wanted = (1 + random.below(BATCH_MAX) as usize).min(faults - planned);
        let mut batch = Batch::new();
        for _ in 0..wanted {
            if deck.is_empty() {
                let cards = |kind: &Kind| std::iter::repeat_n(*kind, kind.cards());
                deck = possible.iter().flat_map(cards).collect();
            }
            let kind = deck[random.below(deck.len() as u64) as usize];
            // One at a time for each party.
            let free: Vec<Party> = PARTIES
                .into_iter()
                .filter(|party| kind.hits(*party) && batch.iter().all(|f| f.party != *party))
                .collect();
            if free.is_empty() {
                continue;
            }
            let at = deck.iter().position(|card| *card == kind).unwrap_or_default();
            deck.swap_remove(at);
            let party = free[random.below(free.len() as u64) as usize];
            batch.push(fault(&mut random, kind, party));
        }
        planned += batch.len();
        if !batch.is_empty() {
            batches.push(batch);
        }
    }
    batches
}

fn fault(random: &mut Random, kind: Kind, party: Party) -> Fault {
    let lasts = match kind {
        Kind::Kill | Kind::Clock => random.ms(0, 150),
        Kind::StopShort => random.ms(5, 300),
        // The heartbeat is missed after 2 s.
        Kind::StopLong => random.ms(2_100, 3_000),
        Kind::Files | Kind::Space | Kind::FileSize => random.ms(50, 400),
        Kind::Interrupt | Kind::Memory => Duration::ZERO,
    };
    Fault { kind, party, after: random.ms(0, 60), lasts, seed: random.draw() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_has_every_kind_and_follows_from_its_seed() {
        let all = plan(7, 60, &Kind::ALL);
        assert_eq!(all.iter().map(Vec::len).sum::<usize>(), 60);
        for kind in Kind::ALL {
            assert!(all.iter().flatten().any(|fault| fault.kind == kind), "{kind:?}");
        }
        for batch in &all {
            for (n, fault) in batch.iter().enumerate() {
                assert!(fault.kind.hits(fault.party));
                assert!(batch[..n].iter().all(|other| other.party != fault.party));
            }
        }
        assert_eq!(format!("{all:?}"), format!("{:?}", plan(7, 60, &Kind::ALL)));
        assert_ne!(format!("{all:?}"), format!("{:?}", plan(8, 60, &Kind::ALL)));
        let few = plan(7, 60, &[Kind::Memory]);
        assert!(few.iter().all(|batch| batch.len() == 1 && batch[0].kind == Kind::Memory));
        assert_eq!(few.len(), 60);
    }
}
