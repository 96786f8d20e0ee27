//! Clients that send what no shim sends as they register, or write it into their shared memory, which is counted in the
//! status: they are disconnected with the reason, at nobody else's cost.

mod common;

use common::{BUILT_IN, Client, Core, eventually, hello};
use rustix::fd::AsFd;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use tally_contract::limits::BREACHES_MAX;
use tally_ipc::layout::{RING_SLOTS, STREAM_SLOTS};
use tally_ipc::ring::{self, Answer, Request};
use tally_ipc::wire::{self, Welcome, WireError};

/// Publishes a launch of a stream that there is not.
fn launch_wrongly(client: &Client) {
    let ticket = ring::take_ticket(&client.region);
    assert!(ring::has_room(&client.core, ticket), "fewer than {RING_SLOTS} are enough");
    let request = Request {
        kernel: 0,
        flags: 0,
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        stream: STREAM_SLOTS as u32,
        completion: ticket as u32 + 1,
        demand: Default::default(),
        limited_sms: 0,
    };
    ring::publish(&client.region, ticket, &request);
    client.ring();
}

#[test]
fn a_breach_is_shown_and_at_the_last_the_client_is_disconnected_with_the_reason() {
    let core = Core::start(BUILT_IN, &[]);
    let mut honest = Client::best_effort(&core, "honest");
    let hostile = Client::best_effort(&core, "hostile");
    for count in 1..BREACHES_MAX {
        launch_wrongly(&hostile);
        eventually("it is counted", || core.client(hostile.id()).unwrap()["breaches"] == count);
    }
    assert!(!hostile.is_dropped(), "{}", core.log());
    launch_wrongly(&hostile);
    eventually("it is disconnected", || {
        launch_wrongly_if_room(&hostile);
        hostile.is_dropped()
    });
    eventually("the reason is logged", || core.log().contains("stream slot that does not exist"));
    assert_eq!(honest.launch(), Answer::Whole);
    assert_eq!(core.client(honest.id()).unwrap()["breaches"], 0);
}

/// The core looks again when it is woken.
fn launch_wrongly_if_room(client: &Client) {
    if ring::has_room(&client.core, client.region.activity.next_ticket.load(SeqCst)) {
        launch_wrongly(client);
    }
}

#[test]
fn programs_that_die_in_the_middle_of_launches_break_nothing() {
    let core = Core::start(BUILT_IN, &[]);
    let mut honest = Client::best_effort(&core, "honest");
    for _ in 0..50 {
        let mut dying = Client::best_effort(&core, "dying");
        dying.launch();
        let id = dying.id();
        // Its threads had taken tickets, and one was about to publish.
        dying.region.activity.next_ticket.fetch_add(3, SeqCst);
        dying.submit();
        assert_eq!(core.client(id).unwrap()["breaches"], 0);
        drop(dying);
        assert_eq!(honest.launch(), Answer::Whole);
    }
    assert!(!core.log().contains("client dropped"), "{}", core.log());
}

#[test]
fn what_one_client_counted_does_not_hide_what_others_do() {
    let core = Core::start(BUILT_IN, &[]);
    let totals = || {
        let of = core.status()["totals"]["best-effort"].clone();
        ["launches", "unscheduled"].map(|key| of[key].as_u64().unwrap())
    };
    let hostile = Client::best_effort(&core, "hostile");
    let says = |count: u64| {
        hostile.region.counters.by_entry_point.kernel.store(count, SeqCst);
        hostile.region.counters.unscheduled.store(count, SeqCst);
    };
    says(9);
    eventually("it is counted", || totals() == [9; 2]);
    says(0);
    assert_eq!(totals(), [9; 2], "counters do not fall");
    says(u64::MAX);
    let id = hostile.id();
    drop(hostile);
    eventually("it is gone", || core.client(id).is_none());
    let before = totals();
    assert!(before.iter().all(|count| *count < 1 << 40), "{before:?}");
    let honest = Client::best_effort(&core, "honest");
    honest.region.counters.by_entry_point.kernel.fetch_add(7, SeqCst);
    honest.region.counters.unscheduled.fetch_add(3, SeqCst);
    eventually("it is counted", || totals() == [before[0] + 7, before[1] + 3]);
}

#[test]
fn bad_registrations_cost_only_their_own_connection() {
    // Bounds the core's own reads of files, too.
    let core = Core::start(&format!("{BUILT_IN}[admission]\nhello_timeout_ms = 1500\n"), &[]);
    let mut good = Client::best_effort(&core, "good");
    let refusal = |bytes: &[u8], fds: &[rustix::fd::BorrowedFd<'_>]| -> String {
        let stream = UnixStream::connect(&core.socket).unwrap();
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        let sent = if fds.is_empty() {
            (&stream).write_all(bytes).map_err(|e| e.to_string())
        } else {
            wire::send(stream.as_fd(), bytes, fds).map_err(|e| e.to_string())
        };
        sent.unwrap();
        match wire::receive(stream.as_fd()).map(|(p, _)| Welcome::decode(&p)) {
            Ok(Err(WireError::Refused(why))) => why,
            Err(WireError::Closed) => "closed".into(),
            other => panic!("{other:?}"),
        }
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(64).unwrap();
    let hello = hello("x", false).encode();
    let mut other_version = wire::frame(&hello);
    other_version[8] = 77;
    let mut huge = wire::frame(&hello);
    huge[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refusal(b"GET / HTTP/1.1\r\n\r\n", &[]).contains("not a Tally registration"));
    assert!(refusal(&other_version, &[]).contains("version 77"));
    assert!(refusal(&huge, &[]).contains("too long"));
    assert!(refusal(&wire::frame(&hello), &[]).contains("one descriptor"));
    assert!(refusal(&wire::frame(&[9; 40]), &[]).contains("malformed"));
    // Half a frame, then silence; and nothing at all.
    for part in [&wire::frame(&hello)[..20], b"T"] {
        let why = refusal(part, &[]);
        assert!(why == "closed" || why.contains("registration"), "{why}");
    }
    // One whose fields lie elsewhere.
    let (fd, region) = tally_ipc::map::create_client().unwrap();
    region.version.fetch_add(1, SeqCst);
    let why = refusal(&hello, &[fd.as_fd()]);
    assert!(why.contains("install shim and core of one release"), "{why}");
    // A file that is no region, and a region that could be shrunk under us.
    let why = refusal(&hello, &[file.as_fd()]);
    assert!(why.contains("shared region"), "{why}");
    let (region, _mapped) = tally_ipc::map::create_client().unwrap();
    let why = refusal(&hello, &[region.as_fd(), region.as_fd()]);
    assert!(why.contains("one descriptor"), "{why}");
    assert_eq!(good.launch(), Answer::Whole);
    assert_eq!(core.status()["clients"].as_array().unwrap().len(), 1);
}
