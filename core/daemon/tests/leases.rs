//! Launches under a lease, which nobody answers.

mod common;

use common::{Client, Core, eventually, policy};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::RING_SLOTS;
use tally_ipc::{ring, wait};

#[test]
fn a_leased_launch_that_waits_for_room_is_woken() {
    let policy = policy("tally-priority");
    let core = Core::start("", &["--policy", policy.to_str().unwrap()]);
    let mut client = Client::best_effort(&core, "train");
    eventually("it has a lease", || {
        client.launch();
        client.leased
    });
    let skipped = |client: &Client| core.client(client.id()).unwrap()["tickets_skipped"].clone();
    // The core gives up a ticket that does not come within a second, and wakes whoever sleeps then, too. On a machine
    // that stands still for so long that happens here.
    for _ in 0..5 {
        let before = skipped(&client);
        // As many launches at once as there is room for, and one more, which sleeps.
        let first = client.region.activity.next_ticket.fetch_add(RING_SLOTS as u64 + 1, SeqCst);
        let last = first + RING_SLOTS as u64;
        assert!(client.core.granted.ticket.load(SeqCst) > last, "they are leased, too");
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let room = || ring::has_room(&client.core, last).then_some(());
                wait::wait(&client.region, &client.core, Duration::ZERO, common::PATIENCE, room)
            });
            eventually("it sleeps", || client.region.activity.waiters.load(SeqCst) > 0);
            (first..last).for_each(|ticket| client.publish(ticket));
            assert_eq!(sleeper.join().unwrap(), Some(()));
        });
        client.publish(last);
        if skipped(&client) == before {
            return;
        }
    }
    panic!("it is woken only as a ticket that did not come is given up");
}
