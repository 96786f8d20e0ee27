//! Everything runs as soon as it can: DetShare's default policy ("Guaranteeing Semantic and Performance Determinism in
//! Flexible GPU Sharing", arXiv 2603.15042), a reconstruction, for its exact rules are not public. The paper has the
//! three callbacks; how room is told, and shares by weight where there is none, are ours.
//!
//! It is for many clients of which each fills the GPU in part: the sum of their rates is to be as high as it can be.
//!
//! ```text
//! pick(launch):        which waiting launch goes next                    here: Throughput::pick
//!     high priority is ungated: it never waits, and holds nobody back
//!     if its client is due by its floor:                                 go      Floors::due
//!     if no other best-effort client is connected:                       go
//!     if it fits beside what the others have on the GPU:                 go      Room::has
//!     else by weight: hold who has had its share while others wait               Rounds::hold
//!
//! select(launch):      on how many SMs                                   here: Throughput::select
//!     all of them; with a lease if there is nobody to share with, or nobody had to wait for the others of late
//!
//! prepare:             take SMs back before a wide launch
//!     nothing: there is no launch that others have to make way for
//! ```
//!
//! A client's launches fill as much of the GPU as the widest of its latest ones: blocks over those that all SMs hold at
//! once. Where contexts take turns (`time-sliced`) there is no room beside another client: they take turns by weight.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod room;

use room::Room;
use tally_fairness::{Due, Shares};
use tally_sdk::codec::{Reader, Writer};
use tally_sdk::config::Config;
use tally_sdk::{
    Answer, Client, ClientId, Counters, Decision, Launch, Level, Membership, NEVER, Policy, Saved,
    Stateful, Terms, WINDOW_OPEN, host,
};

tally_sdk::reasons! {
    Alone = "there is no best-effort client to share with",
    Fits = "there is room beside the other clients' launches",
    ItsTurn = "within the client's share of the GPU",
    NotItsTurn = "other best-effort clients' share of the GPU",
    Floor = "less than the client's least share of the GPU",
}

const COUNTERS: [&str; 3] = ["launches_with_room", "launches_by_weight", "launches_for_min_share"];
const WITH_ROOM: usize = 0;
const BY_WEIGHT: usize = 1;
const FOR_FLOOR: usize = 2;

/// Name of the saved state's format.
const FORMAT: &str = "throughput";
const VERSION: u32 = 1;

/// The constants, all of them configuration.
#[derive(Clone, Copy, Debug)]
struct Settings {
    /// `turn_us`: GPU time that each of several best-effort clients of the same weight gets in a round where there is
    /// no room for all; 0: nobody ever waits.
    turn_ns: u64,
    /// `lease_launches`: launches that start unasked while one client is alone, or nobody ever waits.
    lease_launches: u32,
}

/// The policy's memory: who is connected, who has had how much, and how much of the GPU each fills.
pub struct Throughput {
    settings: Settings,
    shares: Shares,
    room: Room,
    counters: Counters<3>,
}

impl Policy for Throughput {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let settings = Settings {
            turn_ns: config.microseconds("turn_us", 20_000, 0..=10_000_000)?,
            lease_launches: config.small("lease_launches", 1_000_000, 0..=u32::MAX)?,
        };
        host::log(Level::Info, &config.in_force());
        config.finish()?;
        Reason::define_all();
        Ok(Throughput {
            settings,
            // Nobody is asked to yield, so floors need no timer.
            shares: Shares::default(),
            room: Room::default(),
            counters: Counters::new(COUNTERS),
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        self.counters.tick(launch.now_ns);
        match self.pick(launch) {
            Ok(reason) => self.select(launch).because(reason),
            Err(hold) => hold.because(Reason::NotItsTurn),
        }
    }
}

impl Throughput {
    /// Which launch goes next: this one, and why, or not yet.
    fn pick(&mut self, launch: &Launch) -> Result<Reason, Decision> {
        let due = self.shares.floors.due(launch);
        if !self.shares.rounds.is_shared() {
            return Ok(Reason::Alone);
        }
        if due == Some(Due::Now) {
            self.counters.add(FOR_FLOOR, 1);
            return Ok(Reason::Floor);
        }
        // Side by side, time in which high-priority work is active is shared like any other.
        let high_idle_ns = if self.shares.time_sliced { launch.high_idle_ns } else { NEVER };
        let launch = &Launch { high_idle_ns, ..*launch };
        if !self.shares.time_sliced && self.room.has(launch) {
            self.shares.rounds.goes_beside(launch);
            self.counters.add(WITH_ROOM, 1);
            return Ok(Reason::Fits);
        }
        let Some(hold) = self.shares.rounds.hold(launch) else {
            self.counters.add(BY_WEIGHT, 1);
            return Ok(Reason::ItsTurn);
        };
        Err(due.map_or(hold, |due| due.shorten(hold)))
    }

    /// On how many SMs a launch runs: on all of them.
    fn select(&mut self, launch: &Launch) -> Decision {
        Decision::Run(self.shares.lease_behind(launch, self.settings.lease_launches))
    }

    fn set_terms(&mut self) {
        let window_ns = self.shares.window_ns(WINDOW_OPEN);
        self.shares.set_terms(Terms { window_ns, leases: true, yields: None });
        self.counters.hand_over();
    }
}

impl Membership for Throughput {
    fn joined(&mut self, now_ns: u64, client: &Client) {
        self.shares.joined(now_ns, client, |_| self.settings.turn_ns);
        self.set_terms();
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.shares.left(client);
        self.room.left(client);
        self.set_terms();
    }
}

/// Who owes time, and who is owed some by its floor, outlives a reload.
impl Stateful for Throughput {
    fn snapshot(&self) -> Saved {
        let mut out = Writer::new(FORMAT, VERSION);
        out.put(&self.shares.saved());
        out.finish()
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        let saved: String = Reader::new(from, FORMAT, VERSION)?.get()?;
        self.shares.restore(&saved);
        Ok(())
    }
}

tally_sdk::export!(Throughput: membership, state);

#[cfg(test)]
mod tests;
