//! Clients that write into their shared memory what no shim writes: counted in the status, then disconnected with the
//! reason, at nobody else's cost.

mod common;

use common::{BUILT_IN, Client, Core, eventually};
use std::sync::atomic::Ordering::SeqCst;
use tally_contract::limits::BREACHES_MAX;
use tally_ipc::layout::{RING_SLOTS, STREAM_SLOTS};
use tally_ipc::ring::{self, Answer, Request};

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
