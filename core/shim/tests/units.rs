//! Units of work that the shim tells from launches and waits.

mod common;

use common::{Client, Core, Program, attached, eventually, welcome};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::notify;
use tally_ipc::marks::{Kind, MARK_SLOTS, Polled, What, even_ns};
use tally_ipc::wire::Welcome;

/// A program, its core's view of it, and how far its units were read.
struct Served {
    p: Program,
    client: Client,
    read: u64,
}

/// A unit as it was told: when it began and ended, its graphs, and how long the one before it went on within it.
#[derive(Clone, Copy, Debug)]
struct Unit {
    began_ns: u64,
    ended_ns: u64,
    graphs: u16,
    after_ns: u32,
}

impl Served {
    /// A high-priority program that is ungated.
    fn new(core: &Core) -> Self {
        let welcome = Welcome { high_priority: true, ..welcome() };
        let (p, client) = attached(core, &welcome, &[]);
        client.ungated();
        let mut served = Served { p, client, read: 0 };
        served.p.ok(&["stream 1", "stream 2"]);
        served
    }

    fn now(&mut self) -> u64 {
        self.p.ask("now").parse().unwrap()
    }

    /// What was told since last asked.
    fn units(&mut self) -> Vec<Unit> {
        let mut units = Vec::new();
        while let Polled::Ended(unit) = self.client.region.marks.poll(self.read) {
            let What { kind, graphs, .. } = What::unpack(unit.what).unwrap();
            assert_eq!(kind, Kind::Stream);
            units.push(Unit {
                began_ns: unit.began_ns,
                ended_ns: unit.ended_ns,
                graphs: graphs.count,
                after_ns: graphs.after_ns,
            });
            self.read += 1;
        }
        self.client.core.marks_read.store(self.read, SeqCst);
        units
    }

    /// When the units that are shown as open began.
    fn open(&self) -> Vec<u64> {
        self.client.region.marks.open_streams().map(|(ns, _)| ns).collect()
    }

    /// The only unit that these lines make; it began and ended while they did.
    fn unit(&mut self, lines: &[&str]) -> Unit {
        let before = self.now();
        self.p.ok(lines);
        let after = self.now();
        let units = self.units();
        assert_eq!(units.len(), 1, "{lines:?}: {units:?}");
        let Unit { began_ns, ended_ns, .. } = units[0];
        assert!(
            before <= began_ns && began_ns <= ended_ns && ended_ns <= after,
            "{lines:?}: {units:?}"
        );
        units[0]
    }
}

#[test]
fn each_call_that_waits_ends_one_unit() {
    let core = Core::new();
    let mut served = Served::new(&core);
    for wait in ["sync 1", "query 1", "ctxsync", "copy"] {
        served.unit(&["launch 1 3", wait]);
        served.p.ok(&[wait]);
        assert!(served.units().is_empty(), "{wait} waits for nothing new");
    }
    for wait in ["evsync 0", "evquery 0"] {
        served.unit(&["launch 1 3", "event 0 1", wait]);
        served.p.ok(&[wait, "sync 1"]);
        assert!(served.units().is_empty(), "{wait} waits for nothing new");
    }
    served.unit(&["launch 1", "launch 2", "launch 1", "ctxsync"]);
    assert!(served.open().is_empty());
    served.p.ends_well();
}

#[test]
fn what_the_program_does_not_wait_for_is_no_unit() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.p.ok(&["launch 1 500"]);
    for _ in 0..200 {
        served.p.ok(&["launch 1", "event 0 1"]);
    }
    assert!(served.units().is_empty() && served.open().is_empty());
    // A wait that comes after all covers them all.
    let before = served.now();
    served.p.ok(&["evsync 0"]);
    let units = served.units();
    assert!(units.len() == 1 && units[0].began_ns < before, "{units:?}");
    served.p.ends_well();
}

/// The core asks what still runs, and nothing does, before the program waits.
#[test]
fn a_unit_goes_on_until_the_program_has_waited() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.unit(&["launch 1", "sync 1"]);
    for wait in ["sync 1", "ctxsync", "evsync 0"] {
        served.p.ok(&["launch 1", "event 0 1"]);
        let began = served.open();
        assert_eq!(began.len(), 1);
        served.client.probe();
        eventually("idle", || !served.client.busy());
        assert_eq!((served.units().len(), served.open()), (0, began.clone()));
        let before = served.now();
        served.p.ok(&[wait]);
        let units = served.units();
        assert_eq!((units.len(), even_ns(units[0].began_ns)), (1, began[0]), "{wait}");
        assert!(units[0].ended_ns >= before && served.open().is_empty());
    }
    served.p.ends_well();
}

/// Two buffers: the next unit is launched before the last is waited for.
#[test]
fn a_unit_that_is_launched_before_the_last_is_waited_for_has_its_own_time() {
    let core = Core::new();
    let mut served = Served::new(&core);
    let mut launched = Vec::new();
    for n in 0..40 {
        launched.push(served.now());
        served.p.ok(&["launch 1 5", &format!("event {} 1", n % 2)]);
        if n > 0 {
            served.p.ok(&[&format!("evsync {}", (n - 1) % 2)]);
            let ended = served.now();
            let units = served.units();
            assert_eq!(units.len(), 1, "{n}");
            let Unit { began_ns, ended_ns, .. } = units[0];
            assert!(launched[n - 1] <= began_ns && began_ns <= launched[n], "{n}: {units:?}");
            assert!(launched[n] <= ended_ns && ended_ns <= ended, "{n}: {units:?}");
            let open = served.open();
            assert!(open.len() == 1 && launched[n] <= open[0] && open[0] <= ended_ns, "{open:?}");
        }
    }
    served.p.ok(&["sync 1"]);
    assert_eq!((served.units().len(), served.open().len()), (1, 0));
    served.p.ends_well();
}

#[test]
fn an_open_unit_is_told_to_begin_with_a_graph() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.unit(&["graph 1", "sync 1"]);
    for (lines, is_graph) in [(["graph 1", "launch 1"], true), (["launch 1", "graph 1"], false)] {
        served.p.ok(&lines);
        let open: Vec<_> = served.client.region.marks.open_streams().map(|(_, is)| is).collect();
        assert_eq!(open, [is_graph], "{lines:?}");
        served.p.ok(&["sync 1"]);
        served.units();
    }
    served.p.ends_well();
}

#[test]
fn graph_launches_of_a_unit_are_counted() {
    let core = Core::new();
    let mut served = Served::new(&core);
    let unit = served.unit(&["launch 1", "graph 1", "graph 1", "launch 1", "sync 1"]);
    assert_eq!((unit.graphs, unit.after_ns), (2, 0));
    assert_eq!(even_ns(unit.began_ns), unit.began_ns, "it began with another launch");
    assert_eq!(served.unit(&["launch 1", "sync 1"]).graphs, 0);
    // The one before goes on within the next.
    served.p.ok(&["graph 1", "event 0 1", "graph 1", "event 1 1", "evsync 0"]);
    let first = served.units()[0];
    served.p.ok(&["evsync 1"]);
    let second = served.units()[0];
    assert_eq!((first.graphs, second.graphs), (1, 1));
    assert_ne!(even_ns(second.began_ns), second.began_ns, "it began with a graph");
    assert_eq!(even_ns(second.began_ns) + u64::from(second.after_ns), first.ended_ns);
    // More than are noted one by one.
    (0..300).for_each(|_| served.p.ok(&["graph 2"]));
    assert_eq!(served.unit(&["graph 1", "sync 1"]).graphs, 1);
    served.p.ok(&["sync 2"]);
    assert_eq!(served.units()[0].graphs, 300);
    served.p.ends_well();
}

/// Results are copied in a stream of their own, which waits for the one that computes.
#[test]
fn a_wait_for_a_stream_that_waits_for_another_covers_both() {
    let core = Core::new();
    let mut served = Served::new(&core);
    for wait in ["evsync 1", "sync 2"] {
        let unit = ["launch 1 2", "event 0 1", "join 2 0", "event 1 2", wait];
        served.unit(&unit);
        assert!(served.open().is_empty());
        // The next step is under way meanwhile.
        served.p.ok(&["launch 1 2", "event 0 1", "join 2 0", "event 1 2", "launch 1 2", wait]);
        let open = served.open();
        let units = served.units();
        assert!(
            units.len() == 1 && open.len() == 1 && units[0].began_ns < open[0],
            "{units:?} {open:?}"
        );
        served.p.ok(&["sync 1"]);
        assert_eq!((served.units().len(), served.open().len()), (1, 0));
    }
    // A stream of the same handle has waited for nothing.
    served.p.ok(&["launch 1", "destroy 2", "stream 2", "sync 2"]);
    assert!(served.units().is_empty());
    served.p.ends_well();
}

/// A side stream that is never waited for alone is not shown, and does not make a wait for all a long unit.
#[test]
fn a_side_stream_shows_no_unit() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.unit(&["launch 1", "sync 1"]);
    served.p.ok(&["launch 2", "launch 1"]);
    assert_eq!(served.open().len(), 1);
    served.p.ok(&["sync 1"]);
    assert_eq!((served.units().len(), served.open().len()), (1, 0));
    served.unit(&["launch 1", "ctxsync"]);
    served.p.ends_well();
}

#[test]
fn a_launch_that_is_held_has_begun_its_unit() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.unit(&["launch 1", "sync 1"]);
    served.client.revoke();
    let before = served.now();
    served.p.tell("launch 1");
    let held = served.client.take();
    std::thread::sleep(Duration::from_millis(30));
    let open = served.open();
    assert!(open.len() == 1 && open[0] >= even_ns(before), "{open:?}");
    served.client.grant();
    assert_eq!(served.p.answer(), "0");
    served.client.ends(&held);
    assert_eq!(served.open(), open);
    served.p.ok(&["sync 1"]);
    let units = served.units();
    assert_eq!((units.len(), even_ns(units[0].began_ns)), (1, open[0]));
    assert!(units[0].ended_ns - units[0].began_ns >= 30_000_000);
    served.p.ends_well();
}

#[test]
fn the_end_of_a_unit_wakes_a_core_that_asked_for_it() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.unit(&["launch 1", "sync 1"]);
    assert_eq!(served.client.rang(), 0);
    served.client.core.notify.store(notify::UNITS, SeqCst);
    served.p.ok(&["launch 1", "event 0 1", "launch 1"]);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(served.client.rang(), 0, "none has ended");
    served.p.ok(&["evsync 0"]);
    eventually("the doorbell", || served.client.rang() == 1);
    assert_eq!(served.open().len(), 1, "the next is under way");
    served.p.ends_well();
}

#[test]
fn units_that_the_core_does_not_read_are_dropped_and_counted() {
    let core = Core::new();
    let mut served = Served::new(&core);
    served.client.core.parked.store(1, SeqCst);
    for _ in 0..MARK_SLOTS + 10 {
        served.p.ok(&["launch 1", "sync 1"]);
    }
    let dropped = served.client.region.marks.dropped.load(SeqCst);
    assert_eq!((served.units().len(), dropped), (MARK_SLOTS, 10));
    assert!(served.client.rang() > 0, "it was woken in time");
    served.unit(&["launch 1", "sync 1"]);
    served.p.ends_well();
}

#[test]
fn best_effort_programs_have_no_units() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.ungated();
    p.ok(&["stream 1", "launch 1", "sync 1", "launch 1", "event 0 1", "launch 1", "evsync 0"]);
    let marks = &client.region.marks;
    assert_eq!((marks.poll(0), marks.open_streams().count()), (Polled::Empty, 0));
    p.ends_well();
}
