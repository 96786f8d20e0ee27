//! A connection at the admin socket: whatever a peer sends, and whichever descriptors with it. Who includes
//! this has `peer.rs` beside it.

use super::peer::{self, Input};
use serde_json::Value;
use tally_contract::limits::REQUEST_BYTES_MAX;
use tally_core::control::accept::EntryPoint;
use tally_core::control::harness;

/// Checks that a line is a well-formed answer.
fn see_that_answer(line: &str) {
    let answer: Value = serde_json::from_str(line).expect("answers are JSON");
    let fields = answer.as_object().expect("answers are objects");
    assert_eq!(fields.len(), 1, "{line}");
    match fields.get("error") {
        Some(error) => {
            assert!(error["code"].is_string() && error["message"].is_string(), "{line}");
        }
        None => assert!(fields.contains_key("ok"), "{line}"),
    }
}

/// No panic and no connection that hangs; each request has one answer; who may not change anything changes nothing.
pub fn admin(data: &[u8]) {
    let Some(input) = Input::new(data) else { return };
    let (trusted, bytes) = (input.is_trusted(), input.rest.to_vec());
    let lines: Vec<usize> = bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::len).collect();
    let requests = bytes.iter().filter(|byte| **byte == b'\n').count();
    let are_short = lines.iter().all(|length| *length <= REQUEST_BYTES_MAX);
    let messages = input.messages(bytes);
    peer::runtime(|runtime| {
        let before = peer::descriptors() - messages.iter().map(|m| m.fds.len()).sum::<usize>();
        let after = harness::connect(runtime, EntryPoint::Admin, trusted, messages);
        assert_eq!((after.clients, after.places), (0, 0), "something of the connection is left");
        peer::see_that_none_is_left(before);
        let answers = std::str::from_utf8(&after.answer).expect("answers are text");
        answers.lines().for_each(see_that_answer);
        let answered = answers.lines().count();
        if are_short {
            assert_eq!(answered, requests, "each request has one answer");
        } else {
            assert!(answered <= requests + 1);
        }
        if !trusted {
            assert!(!after.stops && !after.records && after.generation == 1, "{answers}");
        }
    });
}
