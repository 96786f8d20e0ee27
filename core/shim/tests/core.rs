//! Against a core that answers: decisions, completion, activity, captures, the probe.

mod common;

use common::{Core, attached, eventually, welcome};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::report_state;
use tally_ipc::layout::submission_flags::{
    self, CAN_PARTITION, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE,
};
use tally_ipc::ring::{self, Answer};
use tally_ipc::wire::Welcome;

#[test]
fn a_launch_waits_for_its_grant_and_reports_its_end() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0");
    let request = client.take();
    assert_eq!((request.grid, request.block, request.shared_bytes), ([4, 2, 1], [128, 1, 1], 256));
    assert_eq!((request.flags, request.completion), (0, 1));
    let (name, image) = client.region.kernels[request.kernel as usize].read().unwrap();
    assert_eq!(name, "a_kernel");
    assert_ne!(image, 0);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!client.done(&request) && !client.busy(), "it is held");
    client.grant();
    assert_eq!(p.answer(), "0");
    assert!(client.done(&request), "the fake GPU runs at once");
    assert_eq!(client.region.report.completion.load(SeqCst), report_state::ACTIVE);
    assert_eq!(client.region.report.governed.load(SeqCst), report_state::ACTIVE);
    assert_eq!(p.driver("fake_ran"), 1);
    assert!(client.region.counters.waited_ns.load(SeqCst) > 0);
    p.ends_well();
}

#[test]
fn every_kind_of_launch_is_submitted_as_what_it_is() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    let mut one = |line: &str| {
        p.tell(line);
        let r = client.serve(1)[0];
        assert_eq!(p.answer(), "0", "{line}");
        r
    };
    let ex = one("ex 0");
    assert_eq!((ex.flags, ex.grid), (submission_flags::CLUSTERED, [4, 2, 1]));
    assert_eq!(one("coop 0").flags, submission_flags::COOPERATIVE);
    let graph = one("graph 0");
    assert_eq!((graph.flags, graph.grid[0]), (submission_flags::GRAPH, 4));
    p.ok(&["foreign 13107"]);
    p.tell("launch 0");
    let foreign = client.serve(1)[0];
    assert_eq!(p.answer(), "0");
    let named = client.region.kernels[foreign.kernel as usize].read().unwrap().0;
    assert_eq!(named, "named_by_the_driver");
    p.ok(&["foreign 4369"]);
    p.tell("launch 0");
    let unknown = client.serve(1)[0];
    assert_eq!(p.answer(), "0");
    assert_eq!(client.region.kernels[unknown.kernel as usize].read().unwrap().0, "unknown");
    p.ends_well();
}

#[test]
fn granted_ahead_it_does_not_wait() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    ring::grant(&client.core, 10);
    p.ok(&["launch 0 10"]);
    let mut last = None;
    for i in 0..10 {
        let request = client.take();
        // A kernel's first launches are measured one by one.
        let late = if i < 8 { 0 } else { submission_flags::COALESCED };
        assert_eq!(request.flags, submission_flags::LEASED | late);
        assert_eq!(request.completion, i + 1);
        last = Some(request);
    }
    p.ok(&["sync 0"]);
    assert!(last.is_some_and(|r| client.done(&r)), "a call that waits shows it at the latest");
    p.tell("launch 0");
    assert_eq!(client.take().flags, submission_flags::COALESCED, "the eleventh asks");
    client.grant();
    assert_eq!(p.answer(), "0");
    p.ends_well();
}

#[test]
fn one_write_stands_for_several_launches_unless_someone_waits() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    ring::grant(&client.core, 200);
    p.ok(&["launch 0 200"]);
    let leased: Vec<_> = (0..200).map(|_| client.take()).collect();
    let writes = p.driver("fake_writes");
    assert!((10..150).contains(&writes), "{writes} writes for 200 launches");
    // The next launch waits for a decision: what was launched before it is
    // reported done without any call of the program's.
    p.tell("launch 0");
    let waiting = client.take();
    eventually("all leased launches are done", || leased.iter().all(|r| client.done(r)));
    assert!(!client.done(&waiting));
    client.grant();
    assert_eq!(p.answer(), "0");
    p.ends_well();
}

#[test]
fn forms_that_were_not_offered_run_whole() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    for form in [Answer::Slice(4), Answer::Preemptible(0), Answer::Partition(16)] {
        p.tell("launch 0");
        let offered = client.take().flags;
        assert_eq!(offered & (CAN_SLICE | CAN_PREEMPT | CAN_PARTITION | CAN_PREPARE), 0);
        ring::decide(&client.core, client.next - 1, form);
        tally_ipc::wait::wake(&client.region, &client.core);
        assert_eq!(p.answer(), "0");
    }
    // The core knows what was offered, and counts.
    assert_eq!(client.region.counters.degraded.load(SeqCst), 0);
    assert_eq!(p.driver("fake_ran"), 3);
    p.ends_well();
}

#[test]
fn threads_and_streams_keep_their_order_and_lose_nothing() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.ok(&["stream 1", "stream 2", "stream 3", "stream 4"]);
    p.tell("threads 4 500");
    let served = client.serve(2000);
    assert_eq!(p.answer(), "0");
    assert!(served.iter().all(|r| client.done(r)));
    let mut next = [0; 64];
    for r in &served {
        next[r.stream as usize] += 1;
        assert_eq!(
            r.completion, next[r.stream as usize],
            "numbers of a stream are in ticket order"
        );
    }
    assert_eq!(p.driver("fake_launched"), 2000);
    assert_eq!(p.driver("fake_ran"), 2000);
    assert_eq!(p.driver("fake_disorder"), 0);
    assert!(!client.busy());
    p.ends_well();
}

#[test]
fn a_full_ring_makes_launches_wait_for_room() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    // All granted ahead, none consumed: the ring holds 256.
    ring::grant(&client.core, 300);
    p.tell("launch 0 300");
    eventually("the ring is full", || client.region.activity.next_ticket.load(SeqCst) == 257);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(client.region.counters.launches(), 256);
    let served: Vec<_> = (0..300).map(|_| client.take()).collect();
    assert_eq!(p.answer(), "0");
    assert_eq!(
        served.iter().map(|r| r.completion).collect::<Vec<_>>(),
        (1..=300).collect::<Vec<_>>()
    );
    p.ends_well();
}

#[test]
fn a_sleeping_core_is_rung() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    client.core.parked.store(1, SeqCst);
    p.tell("launch 0");
    eventually("the doorbell", || client.rang() != 0);
    client.serve(1);
    assert_eq!(p.answer(), "0");
    client.core.parked.store(0, SeqCst);
    p.ok(&["sync 0"]);
    client.rang();
    client.core.notify_activity.store(1, SeqCst);
    client.standing();
    p.ok(&["launch 0"]);
    assert_eq!(client.rang(), 1, "busy");
    p.ok(&["launch 0", "launch 0"]);
    assert_eq!(client.rang(), 0, "still busy");
    p.ok(&["sync 0"]);
    assert_eq!(client.rang(), 1, "idle");
    p.ends_well();
}

#[test]
fn grants_come_and_go_and_numbers_go_on() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0 3");
    client.serve(3);
    assert_eq!(p.answer(), "0");
    client.standing();
    p.ok(&["launch 0 5"]);
    assert!(client.poll().is_none(), "nobody asks under a standing grant");
    client.revoke();
    p.tell("launch 0");
    assert_eq!(client.take().completion, 9);
    // While it waits, the grant becomes standing: that is an answer too.
    client.standing();
    assert_eq!(p.answer(), "0");
    assert_eq!(client.region.counters.launches(), 9);
    assert_eq!(p.driver("fake_disorder"), 0);
    p.ends_well();
}

#[test]
fn captured_launches_neither_wait_nor_count() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.ok(&["stream 1", "stream 2", "capture 1", "launch 1 4"]);
    assert!(client.poll().is_none());
    // Another stream is not captured and asks as usual.
    p.tell("launch 2");
    client.serve(1);
    assert_eq!(p.answer(), "0");
    p.ok(&["endcapture 1"]);
    assert_eq!(client.region.counters.captured.load(SeqCst), 4);
    p.tell("launch 1");
    client.serve(1);
    assert_eq!(p.answer(), "0");
    assert_eq!(client.region.counters.launches(), 2);
    p.ends_well();
}

#[test]
fn refused_launches_are_reported_done_behind_what_still_runs() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.driver("fake_hold 1");
    p.tell("launch 0");
    let running = client.serve(1)[0];
    assert_eq!(p.answer(), "0");
    p.driver("fake_fail 1");
    p.tell("launch 0");
    let refused = client.serve(1)[0];
    assert_eq!(p.answer(), "700", "the program learns of it");
    assert!(!client.done(&running) && !client.done(&refused));
    p.driver("fake_hold 0");
    assert!(client.done(&running) && client.done(&refused));
    assert_eq!(client.region.counters.failed.load(SeqCst), 1);
    // Launch and write both refused: waited for, then stored by hand.
    p.driver("fake_fail 1");
    p.driver("fake_fail_writes 1");
    p.tell("launch 0");
    let lost = client.serve(1)[0];
    assert_eq!(p.answer(), "700");
    assert!(client.done(&lost));
    assert_eq!(client.region.report.completion.load(SeqCst), report_state::ACTIVE);
    p.ends_well();
}

#[test]
fn without_stream_writes_launches_are_waited_for() {
    let core = Core::new();
    for trouble in ["fake_fail_register 1", "fake_fail_writes 1000"] {
        let (mut p, mut client) = attached(&core, &welcome(), &[]);
        p.driver(trouble);
        p.driver("fake_hold 1");
        p.tell("launch 0 2");
        let requests = client.serve(2);
        assert_eq!(p.answer(), "0");
        assert!(requests.iter().all(|r| client.done(r)), "{trouble}");
        assert_ne!(requests[1].flags & submission_flags::SYNCHRONOUS, 0);
        assert_eq!(p.driver("fake_ran"), 2, "waited for, although held");
        assert!(!client.busy());
        let report = &client.region.report;
        assert_eq!(report.completion.load(SeqCst), report_state::FALLBACK);
        assert_eq!(report.completion_error.load(SeqCst), 801);
        p.ends_well();
    }
}

#[test]
fn more_streams_than_slots_run_one_at_a_time() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.driver("fake_hold 1");
    for i in 1..=70 {
        p.ok(&[&format!("stream {i}")]);
        p.tell(&format!("launch {i}"));
        let request = client.serve(1)[0];
        assert_eq!(p.answer(), "0");
        let overflow = i > 63;
        assert_eq!(request.stream == 63, overflow, "stream {i}");
        assert_eq!(client.done(&request), overflow, "stream {i}");
    }
    assert_eq!(client.region.counters.stream_overflow.load(SeqCst), 7);
    p.driver("fake_hold 0");
    p.ok(&["ctxsync"]);
    assert!(!client.busy());
    assert_eq!(p.driver("fake_ran"), 70);
    p.ends_well();
}

#[test]
fn calls_that_wait_make_it_idle_and_others_do_not() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.standing();
    p.ok(&["stream 1", "stream 2"]);
    p.driver("fake_hold 1");
    p.ok(&["launch 1", "launch 2"]);
    assert!(client.busy());
    assert_eq!(p.ask("query 1"), "600");
    let bits = || client.region.activity.busy_streams.load(SeqCst).count_ones();
    assert_eq!(bits(), 2);
    p.ok(&["sync 1"]);
    assert_eq!(bits(), 1);
    p.ok(&["event 0 2", "launch 2"]);
    p.ok(&["evsync 0"]);
    assert_eq!(bits(), 1, "launched since the event was recorded");
    p.ok(&["launch 2", "event 0 2"]);
    assert_eq!(p.ask("evquery 0"), "600");
    p.driver("fake_hold 0");
    p.ok(&["evquery 0"]);
    assert_eq!(bits(), 0);
    let a = &client.region.activity;
    assert!(a.idle_since_ns.load(SeqCst) >= a.busy_since_ns.load(SeqCst));
    p.ok(&["launch 1", "launch 2", "copy"]);
    assert_eq!(bits(), 0, "a copy to the host waits for all");
    p.ok(&["launch 1", "launch 2", "launch 0", "ctxsync"]);
    assert_eq!(bits(), 0);
    assert_eq!(a.busy_periods.load(SeqCst), 3);
    assert!(a.busy_total_ns.load(SeqCst) > 0);
    p.ends_well();
}

#[test]
fn the_probe_finds_out_what_still_runs() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.standing();
    p.ok(&["stream 1"]);
    p.driver("fake_hold 1");
    p.ok(&["launch 1", "launch 0"]);
    client.probe();
    eventually("a write behind each stream", || client.region.report.completion.load(SeqCst) == 1);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(client.region.activity.busy_streams.load(SeqCst).count_ones(), 2, "it still runs");
    p.driver("fake_hold 0");
    eventually("idle without any waiting call", || !client.busy());
    assert_eq!(p.driver("fake_writes"), 2);
    // Under a capture nothing is done to any stream.
    p.ok(&["launch 0", "capture 1"]);
    client.probe();
    std::thread::sleep(Duration::from_millis(30));
    assert!(client.busy());
    assert_eq!(p.driver("fake_writes"), 2);
    p.ok(&["endcapture 1"]);
    client.probe();
    eventually("idle", || !client.busy());
    p.ends_well();
}

#[test]
fn destroyed_streams_give_their_slots_back() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.standing();
    for _ in 0..200 {
        p.ok(&["stream 1", "launch 1 3", "sync 1", "destroy 1"]);
    }
    eventually("nothing overflowed", || client.region.counters.stream_overflow.load(SeqCst) == 0);
    assert_eq!(client.region.counters.launches(), 600);
    assert!(!client.busy());
    p.ends_well();
}

#[test]
fn only_best_effort_clients_keep_copies_of_graphs() {
    let core = Core::new();
    for high_priority in [true, false] {
        let welcome = Welcome { high_priority, ..welcome() };
        let (mut p, client) = attached(&core, &welcome, &[]);
        // By class: a best-effort client with nobody to yield to has a standing grant as well.
        client.standing();
        p.ok(&["graph 0", "graph 0"]);
        // The same handle twice: the second instantiation's copy takes the place of the first's.
        assert_eq!(p.driver("fake_clones"), i64::from(!high_priority));
        assert_eq!(p.driver("fake_ran"), 2);
        p.ends_well();
    }
}
