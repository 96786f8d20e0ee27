//! Units of work, as a shim tells them.

mod common;

use common::{Client, Core, eventually, policy};
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::notify;
use tally_ipc::marks::{Graphs, Stated, What};
use tally_ipc::ring::Answer;
use tally_ipc::wait::now_ns;

/// The next unit of a service that never idles has begun when one ends: no other change wakes a core that sleeps.
#[test]
fn a_core_that_sleeps_is_told_of_the_end_of_a_unit_while_a_launch_is_held_for_it() {
    for (name, is_told) in [("slo-herald", true), ("tally-priority", false)] {
        let file = policy(name);
        let file = format!("[policy]\nfile = {:?}\n", file.to_str().unwrap());
        let core = Core::start(&file, &["--spin-us", "0"]);
        let high = Client::high(&core, "server");
        let mut low = Client::best_effort(&core, "train");
        let began_ns = now_ns();
        high.region.marks.show_stream(0, began_ns, false);
        high.set_busy(true);
        eventually("the core knows", || core.status()["high_priority_busy"] == true);
        let sleeps = || high.core.parked.load(SeqCst) == 1;
        let asked = || high.core.notify.load(SeqCst) & notify::UNITS != 0;
        eventually("it sleeps, and nobody waits", || sleeps() && !asked());
        let (held, completion) = low.submit();
        assert!(low.stays_held(held));
        if !is_told {
            eventually("it sleeps", sleeps);
            assert!(!asked(), "the policy is not told of units");
            continue;
        }
        eventually("it asks to be told", asked);
        let what = What::stream(Graphs::default()).pack();
        let unit = Stated { began_ns, ended_ns: now_ns(), what };
        assert!(high.region.marks.publish(0, unit).is_some());
        high.region.marks.show_stream(0, 0, false);
        high.set_busy(false);
        high.ring();
        assert_eq!(low.wait(held), Answer::Whole);
        low.complete(completion);
        assert_eq!(core.client(high.id()).unwrap()["service"]["requests"], 1);
        eventually("it sleeps, and nobody waits", || sleeps() && !asked());
    }
}
