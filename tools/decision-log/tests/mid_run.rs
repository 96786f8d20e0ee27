//! Replays of logs that begin while a policy runs which remembers something and does not say what.

use tally_decision_log::record::{Answer as Answered, Outcome};
use tally_decision_log::{About, Base, Begin, Player, Record};
use tally_engine::policy::*;

/// Its answers depend on how often it was asked.
struct Counting(u64);

impl Policy for Counting {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        self.0 += 1;
        Ok(Decision::Hold(self.0).into())
    }

    fn on_event(&mut self, _: u64, _: &Event, _: &mut Context) -> Result<(), Fault> {
        Ok(())
    }
}

fn decided(hold_ns: u64) -> Record {
    let launch = Launch {
        now_ns: 5,
        client: 3,
        class: Class::BestEffort,
        kernel: 0,
        state: launch_state::HIGH_ACTIVE | launch_state::OFFERED_AGAIN,
        offered: 0,
        grid_blocks: 64,
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 3_100_000,
        waited_ns: 20,
        in_flight_ns: 0,
        high_idle_ns: 0,
        high_clients: 1,
        waiting_clients: 1,
        stream: 0,
        sm_count: 0,
    };
    let answer =
        Answered { outcome: Outcome::Ok(Decision::Hold(hold_ns).into()), commands: Vec::new() };
    Record::Decide { launch, answer }
}

/// The beginning of a log, and launches that its policy answered so.
fn log(how: Begin, holds: &[u64]) -> Vec<Record> {
    let mut all = vec![
        Record::Policy(About::default()),
        Record::Base(Base::default()),
        Record::Begin { how, lost: 0, subscribed: Subscriptions::NONE, sm_count: 0 },
    ];
    if how == Begin::PolicyStart {
        all.push(Record::Start(Vec::new()));
    }
    all.extend(holds.iter().map(|ns| decided(*ns)));
    all
}

fn replay(records: &[Record]) -> Player<'static> {
    let mut player = Player::new(|_| Ok(Box::new(Counting(0))));
    for record in records {
        player.feed(record, true).unwrap();
    }
    player
}

#[test]
fn differences_count_against_a_policy_only_where_all_that_it_knew_is_in_the_log() {
    // It had been asked 40 times before.
    let player = replay(&log(Begin::MidRun, &[41, 42, 43]));
    assert!(!player.comparison().is_equal());
    assert_eq!((player.parts().differ_known, player.parts().differ_unknown), (0, 3));
    let player = replay(&log(Begin::AfterGap, &[1, 9]));
    assert_eq!((player.parts().differ_known, player.parts().differ_unknown), (0, 1));
    let player = replay(&log(Begin::PolicyStart, &[1, 9]));
    assert_eq!((player.parts().differ_known, player.parts().differ_unknown), (1, 0));
    let both = [log(Begin::MidRun, &[7]), log(Begin::Saved, &[9])].concat();
    let parts = replay(&both).parts();
    assert_eq!((parts.differ_known, parts.differ_unknown), (1, 1));
}

#[test]
fn a_call_is_told_in_words() {
    let player = replay(&log(Begin::MidRun, &[41]));
    let call = &player.comparison().first[0].call;
    for words in
        ["launch of", "client 3", "64 blocks of 256 threads", "predicted 3100.0 us", "held before"]
    {
        assert!(call.contains(words), "{words:?} is not in {call:?}");
    }
    assert!(
        !call.contains('{') && !call.contains("Launch"),
        "no structure of this program: {call}"
    );
}
