//! Against a core that answers: decisions, completion, activity, captures, the probe.

mod common;

use common::{Core, attached, eventually, welcome};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::submission_flags::{self, CAN_LIMIT, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::{report_state, whole_because};
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
    client.ends(&request);
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

/// Such a function may put work into a stream, or wait for it.
#[test]
fn once_a_function_of_a_newer_cuda_is_looked_up_launches_go_whole_and_the_report_says_so() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    let mut why = |p: &mut common::Program, lookup: &str| {
        p.ok(&[lookup]);
        p.tell("launch 0");
        client.serve(1);
        assert_eq!(p.answer(), "0");
        client.region.report.whole_because.load(SeqCst)
    };
    assert_eq!(why(&mut p, "newer 13050"), whole_because::NOTHING, "of a CUDA that is known");
    assert_eq!(why(&mut p, "newer 13060"), whole_because::NEW_CALL);
    p.ends_well();
}

#[test]
fn granted_ahead_it_does_not_wait() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    ring::grant(&client.core, 10);
    p.ok(&["launch 0 10"]);
    let leased: Vec<_> = (0..10).map(|_| client.take()).collect();
    for (i, request) in (1..).zip(&leased) {
        assert_eq!((request.flags, request.completion), (submission_flags::LEASED, i));
    }
    p.ok(&["sync 0"]);
    assert!(leased.iter().all(|r| client.done(r)), "a call that waits shows it at the latest");
    p.tell("launch 0");
    assert_eq!(client.take().flags, 0, "the eleventh asks");
    client.grant();
    assert_eq!(p.answer(), "0");
    p.ends_well();
}

#[test]
fn many_launches_on_their_way_share_events() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.driver("fake_hold 1");
    ring::grant(&client.core, 200);
    p.ok(&["launch 0 200"]);
    let leased: Vec<_> = (0..200).map(|_| client.take()).collect();
    let events = p.driver("fake_events");
    assert!((8..40).contains(&events), "{events} events for 200 launches");
    // The next launch waits for a decision: what was launched before it is
    // reported done without any call of the program's.
    p.tell("launch 0");
    let waiting = client.take();
    std::thread::sleep(Duration::from_millis(30));
    assert!(!leased.iter().any(|r| client.done(r)));
    client.grant();
    assert_eq!(p.answer(), "0");
    p.driver("fake_hold 0");
    leased.iter().chain([&waiting]).for_each(|r| client.ends(r));
    eventually("idle", || !client.busy());
    p.ends_well();
}

#[test]
fn under_a_lease_one_launch_in_four_gets_an_event() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    // The first launches of a kernel are measured one by one.
    ring::grant(&client.core, 32);
    p.ok(&["launch 0 12", "sync 0"]);
    let before = p.driver("fake_events");
    p.driver("fake_hold 1");
    p.ok(&["launch 0 20"]);
    let leased: Vec<_> = (0..32).map(|_| client.take()).collect();
    let events = p.driver("fake_events") - before;
    // The first, each fourth, and both sides of one that is measured.
    assert!((5..=8).contains(&events), "{events} events for 20 launches");
    p.driver("fake_hold 0");
    leased.iter().for_each(|request| client.ends(request));
    eventually("idle", || !client.busy());
    // Asked about, each of a few gets one.
    let before = p.driver("fake_events");
    p.driver("fake_hold 1");
    for _ in 0..6 {
        p.tell("launch 0");
        client.serve(1);
        assert_eq!(p.answer(), "0");
    }
    assert_eq!(p.driver("fake_events") - before, 6);
    p.driver("fake_hold 0");
    p.ends_well();
}

#[test]
fn launches_far_behind_others_are_measured_too() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    // A busy machine may see the ends of all 400 at once, and then measures none.
    let measured = (1..=20).find_map(|round| {
        p.driver("fake_hold 1");
        ring::grant(&client.core, 400 * round);
        let mut leased = Vec::new();
        for _ in 0..2 {
            p.ok(&["launch 0 200"]);
            leased.extend((0..200).map(|_| client.take()));
        }
        p.driver("fake_hold 0");
        leased.iter().for_each(|request| client.ends(request));
        let word = &client.region.completions[leased[0].stream as usize];
        word.measured().map(|(number, _)| (number, leased[199].completion))
    });
    let (number, half) = measured.expect("some launches are measured");
    assert!(number > half, "the last one that was measured is launch {number}, half are {half}");
    p.ends_well();
}

#[test]
fn forms_that_were_not_offered_run_whole() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    for form in [Answer::Slice(4), Answer::Preemptible(0), Answer::SmLimited(16)] {
        p.tell("launch 0");
        let offered = client.take().flags;
        assert_eq!(offered & (CAN_SLICE | CAN_PREEMPT | CAN_LIMIT | CAN_PREPARE), 0);
        ring::decide(&client.core, client.next - 1, form);
        let _ = tally_ipc::wait::wake(&client.region, &client.core);
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
    served.iter().for_each(|r| client.ends(r));
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
    eventually("idle", || !client.busy());
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
    std::thread::sleep(std::time::Duration::from_millis(50));
    client.rang();
    client.core.notify.store(1, SeqCst);
    client.ungated();
    p.ok(&["launch 0"]);
    eventually("busy", || client.rang() == 1);
    p.ok(&["launch 0", "launch 0"]);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(client.rang(), 0, "still busy");
    p.ok(&["sync 0"]);
    eventually("idle", || client.rang() == 1);
    p.ends_well();
}

#[test]
fn grants_come_and_go_and_numbers_go_on() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0 3");
    client.serve(3);
    assert_eq!(p.answer(), "0");
    client.ungated();
    p.ok(&["launch 0 5"]);
    assert!(client.poll().is_none(), "an ungated client does not ask");
    client.revoke();
    p.tell("launch 0");
    assert_eq!(client.take().completion, 9);
    // While it waits, the client becomes ungated: that is an answer too.
    client.ungated();
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
    client.ends(&running);
    client.ends(&refused);
    assert_eq!(client.region.counters.failed.load(SeqCst), 1);
    p.ends_well();
}

#[test]
fn without_events_the_end_of_a_stream_says_that_its_launches_are_done() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.driver("fake_fail_events 1000");
    p.driver("fake_hold 1");
    p.tell("launch 0 2");
    let requests = client.serve(2);
    assert_eq!(p.answer(), "0");
    std::thread::sleep(Duration::from_millis(30));
    assert!(client.busy() && !requests.iter().any(|r| client.done(r)));
    assert_eq!(p.driver("fake_ran"), 0, "nobody waits for them");
    p.driver("fake_hold 0");
    requests.iter().for_each(|r| client.ends(r));
    eventually("idle", || !client.busy());
    p.ends_well();
}

#[test]
fn more_streams_than_slots_share_the_last() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.driver("fake_hold 1");
    let mut requests = Vec::new();
    for i in 1..=70 {
        p.ok(&[&format!("stream {i}")]);
        p.tell(&format!("launch {i}"));
        let request = client.serve(1)[0];
        assert_eq!(p.answer(), "0", "nobody waits for another stream");
        assert_eq!(request.stream == 63, i > 63, "stream {i}");
        requests.push(request);
    }
    assert_eq!(client.region.counters.stream_overflow.load(SeqCst), 7);
    std::thread::sleep(Duration::from_millis(30));
    assert!(!requests.iter().any(|r| client.done(r)));
    p.driver("fake_hold 0");
    requests.iter().for_each(|r| client.ends(r));
    p.ok(&["ctxsync"]);
    eventually("idle", || !client.busy());
    assert_eq!(p.driver("fake_ran"), 70);
    p.ends_well();
}

#[test]
fn streams_that_share_a_slot_are_idle_once_all_of_them_are() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.ungated();
    for i in 1..=70 {
        p.ok(&[&format!("stream {i}"), &format!("launch {i}"), &format!("sync {i}")]);
    }
    assert_eq!(client.region.counters.stream_overflow.load(SeqCst), 7);
    eventually("idle", || !client.busy());
    p.driver("fake_hold 1");
    p.ok(&["launch 65", "launch 66", "sync 65"]);
    std::thread::sleep(Duration::from_millis(30));
    assert!(client.busy(), "the other one still runs");
    p.ok(&["sync 66"]);
    eventually("idle", || !client.busy());
    p.driver("fake_hold 0");
    p.ends_well();
}

#[test]
fn calls_that_wait_make_it_idle_and_others_do_not() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.ungated();
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
    client.ungated();
    p.ok(&["stream 1"]);
    p.driver("fake_hold 1");
    p.ok(&["launch 1", "launch 0"]);
    client.probe();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(client.region.activity.busy_streams.load(SeqCst).count_ones(), 2, "it still runs");
    p.driver("fake_hold 0");
    eventually("idle without any waiting call", || !client.busy());
    assert_eq!(p.driver("fake_events"), 0, "nothing of ours in the streams");
    // Under a capture no stream is asked.
    p.ok(&["launch 0", "capture 1"]);
    client.probe();
    std::thread::sleep(Duration::from_millis(30));
    assert!(client.busy());
    p.ok(&["endcapture 1"]);
    client.probe();
    eventually("idle", || !client.busy());
    p.ends_well();
}

#[test]
fn destroyed_streams_give_their_slots_back() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.ungated();
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
        // By class: a best-effort client with nobody to yield to is ungated as well.
        client.ungated();
        p.ok(&["graph 0", "graph 0"]);
        // The same handle twice: the second instantiation's copy takes the place of the first's.
        assert_eq!(p.driver("fake_clones"), i64::from(!high_priority));
        assert_eq!(p.driver("fake_ran"), 2);
        p.ends_well();
    }
}

fn signal(p: &common::Program, number: i32) {
    // SAFETY: sends a signal to a child that lives.
    assert_eq!(unsafe { libc::kill(p.pid() as libc::pid_t, number) }, 0);
}

/// Until a thread that is in a held launch waits for its answer.
const HELD: Duration = Duration::from_millis(100);

/// Serves launches, on any stream, until the program answers; returns how many there were.
fn serve_until_answered(p: &mut common::Program, client: &mut common::Client) -> usize {
    let mut served = 0;
    std::thread::scope(|scope| {
        let answered = scope.spawn(|| p.answer());
        while !answered.is_finished() {
            served += usize::from(client.poll().is_some());
            client.grant();
            client.beat_for(Duration::from_millis(1));
        }
        assert_eq!(answered.join().unwrap(), "0");
    });
    served
}

#[test]
fn a_jump_out_of_a_held_launch_leaves_the_stream_to_its_thread_and_others() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.ok(&["stream 1"]);
    // Stream 0 is used again by the thread that jumped, stream 1 by another one.
    for stream in [0, 1] {
        p.tell(&format!("jump {stream}"));
        let left = client.take();
        client.beat_for(HELD);
        signal(&p, libc::SIGUSR1);
        assert_eq!(p.answer(), "jumped");
        assert!(!client.done(&left), "nothing was launched");
    }
    assert_eq!(p.driver("fake_launched"), 0);
    for line in ["launch 0 3", "threads 1 3"] {
        p.tell(line);
        assert_eq!(serve_until_answered(&mut p, &mut client), 3, "{line}");
    }
    assert_eq!((p.driver("fake_ran"), p.driver("fake_disorder")), (6, 0));
    let done = |stream: usize| client.region.completions[stream].done.load(SeqCst);
    eventually("all are done", || (0..2).all(|stream| done(stream) == 3));
    p.ends_well();
}

#[test]
fn a_thread_that_is_cancelled_in_a_held_launch_leaves_the_stream_to_others() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.ok(&["begin 0"]);
    let left = client.take();
    client.beat_for(HELD);
    assert_eq!(p.ask("cancel 0"), "cancelled");
    assert!(!client.done(&left));
    p.tell("launch 0 3");
    assert_eq!(serve_until_answered(&mut p, &mut client), 3);
    assert_eq!((p.driver("fake_ran"), p.driver("fake_disorder")), (3, 0));
    p.ends_well();
}

#[test]
fn a_handler_that_launches_within_a_held_launch_passes_and_the_held_one_follows() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.ok(&["stream 1", "handler 0"]);
    p.tell("launch 0");
    let held = client.take();
    client.beat_for(HELD);
    signal(&p, libc::SIGUSR2);
    let launches = || client.region.counters.launches();
    eventually("the handler's launch", || launches() == 1);
    client.beat_for(HELD);
    assert!(!client.done(&held), "the other one is held still");
    client.grant();
    assert_eq!(p.answer(), "0");
    p.ok(&["handled"]);
    assert_eq!(p.driver("fake_ran"), 2);
    eventually("both are done", || client.region.completions[0].done.load(SeqCst) == 2);
    // In another stream it asks as any launch does.
    p.ok(&["handler 1"]);
    p.tell("launch 0");
    client.take();
    client.beat_for(HELD);
    signal(&p, libc::SIGUSR2);
    assert_eq!(client.take().stream, 1, "the handler's");
    client.grant();
    assert_eq!(p.answer(), "0");
    p.ok(&["handled"]);
    assert_eq!(p.driver("fake_ran"), 4);
    p.ends_well();
}
