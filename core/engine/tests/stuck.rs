//! Launches that do not end: what waits behind a full window goes on all the same.

mod common;

use common::{LOW, built_in, granted, key, submission, took};
use tally_engine::Submission;

#[test]
fn a_launch_does_not_wait_for_ever_for_one_that_may_be_waiting_for_it() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("all_reduce"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    // On another stream, or another GPU: the first ends when both run.
    e.submitted(1_000, LOW, Submission { stream: 1, ..submission(1, k) }, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    let due = e.next_deadline_ns().expect("it is looked at again");
    e.tick(due - 1, &mut out);
    assert_eq!(granted(&out, LOW), Some(1));
    e.tick(due, &mut out);
    assert_eq!(granted(&out, LOW), Some(2));
    assert_eq!(e.client_stats(LOW).unwrap().window_stalls, 1);
}

#[test]
fn a_stall_lets_twice_as_many_launches_in_as_the_one_before() {
    let mut e = built_in();
    let mut out = Vec::new();
    // What is in flight waits for the last of 100 launches: on a word, say.
    for t in 0..101 {
        e.submitted(0, LOW, submission(t, None), &mut out);
    }
    let mut grants = vec![granted(&out, LOW).unwrap()];
    while *grants.last().unwrap() < 101 {
        let due = e.next_deadline_ns().expect("it is looked at again");
        e.tick(due, &mut out);
        grants.push(granted(&out, LOW).unwrap());
    }
    assert_eq!(grants, [1, 2, 4, 8, 16, 32, 64, 101]);
    e.progress(e.next_deadline_ns().unwrap_or(1 << 40), LOW, 0, 101, None, &mut out);
    for t in 101..104 {
        e.submitted(1 << 41, LOW, submission(t, None), &mut out);
    }
    assert_eq!(granted(&out, LOW), Some(102), "something ended: one at a time again");
}

#[test]
fn a_stream_in_which_nothing_ends_holds_others_up_once() {
    let mut e = built_in();
    let mut out = Vec::new();
    let k = e.intern(&key("short"));
    e.submitted(0, LOW, submission(0, k), &mut out);
    e.progress(100_000, LOW, 0, 1, took(1, 100_000), &mut out);
    // They fill the window, behind a wait.
    for t in 1..12 {
        e.submitted(100_000, LOW, submission(t, k), &mut out);
    }
    let on_1 = |t: u64, completion| Submission { stream: 1, completion, ..submission(t, k) };
    assert_eq!(granted(&out, LOW), Some(11), "ten of 100 us fit");
    let due = e.next_deadline_ns().expect("it is looked at again");
    e.tick(due, &mut out);
    e.submitted(due, LOW, on_1(12, 1), &mut out);
    assert_eq!(granted(&out, LOW), Some(13), "the window is full of what is stuck");
    for (t, completion) in (13..40).zip(2..) {
        e.progress(due + t, LOW, 1, completion - 1, None, &mut out);
        e.submitted(due + t, LOW, on_1(t, completion), &mut out);
        assert_eq!(granted(&out, LOW), Some(t + 1));
    }
    // It goes on, and what is left of it counts again.
    e.progress(due + 50, LOW, 0, 4, None, &mut out);
    let before = e.client_state(LOW).unwrap().in_flight_ns;
    assert!((800_000..1_000_000).contains(&before), "{before}");
    for (t, completion) in (40..50).zip(29..) {
        e.submitted(due + 60, LOW, on_1(t, completion), &mut out);
    }
    assert!(granted(&out, LOW).unwrap() < 50, "the window is full");
}

/// More than the window stands behind a wait, and then as many launches as are followed.
#[test]
fn whatever_is_stuck_others_wait_once_and_have_a_window() {
    for stuck in [40, 4_096] {
        let mut e = built_in();
        let mut out = Vec::new();
        let k = e.intern(&key("short"));
        e.submitted(0, LOW, submission(0, k), &mut out);
        e.progress(100_000, LOW, 0, 1, took(1, 100_000), &mut out);
        let mut now = 100_000;
        for t in 1..=stuck {
            e.submitted(now, LOW, submission(t, k), &mut out);
        }
        while granted(&out, LOW).unwrap() <= stuck {
            now = e.next_deadline_ns().expect("it is looked at again");
            e.tick(now, &mut out);
        }
        let on_1 = |t: u64, completion| Submission { stream: 1, completion, ..submission(t, k) };
        let mut stalls = 0;
        for (t, completion) in (stuck + 1..stuck + 20).zip(1..) {
            e.submitted(now, LOW, on_1(t, completion), &mut out);
            while granted(&out, LOW).unwrap() <= t {
                now = e.next_deadline_ns().expect("it is looked at again");
                e.tick(now, &mut out);
                stalls += 1;
            }
            now += 100;
            e.progress(now, LOW, 1, completion, None, &mut out);
        }
        // Once more where the first of all that are followed is forgotten.
        assert!(stalls <= 2, "{stalls} stalls behind {stuck} launches");
        for (t, completion) in (stuck + 20..stuck + 60).zip(20..) {
            e.submitted(now, LOW, on_1(t, completion), &mut out);
        }
        assert!(granted(&out, LOW).unwrap() < stuck + 40, "of 100 us ten fit the window");
    }
}
