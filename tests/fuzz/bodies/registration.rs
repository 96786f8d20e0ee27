//! A connection at the clients' socket: whatever a peer sends, and whichever descriptors with it. Who includes
//! this has `peer.rs` beside it.

use super::peer::{self, Input};
use tally_core::control::accept::EntryPoint;
use tally_core::control::harness;
use tally_ipc::frame::{FRAME_BYTES_MAX, frame};
use tally_ipc::wire::{Hello, NOTICE, Notice, PING, PING_HIGH, Welcome, WireError};

/// The payload of a frame that the core sent.
fn payload(answer: &[u8]) -> &[u8] {
    let header = frame(&[]).len();
    let payload = &answer[header..];
    assert_eq!(answer, frame(payload), "one frame");
    payload
}

/// No panic and no connection that hangs; nothing is left of it; nobody is of higher class than may be.
pub fn registration(data: &[u8]) {
    if let Ok(hello) = Hello::decode(data) {
        assert_eq!(Hello::decode(&hello.encode()).expect("what it wrote"), hello);
    }
    if let Ok(welcome) = Welcome::decode(data) {
        assert_eq!(Welcome::decode(&welcome.encode()).expect("what it wrote"), welcome);
    }
    drop(Notice::decode(data));
    let Some(input) = Input::new(data) else { return };
    let (is_framed, more) = (input.flags & 2 != 0, input.flags & 4 != 0);
    let bytes = match is_framed && input.rest.len() <= FRAME_BYTES_MAX {
        true => frame(input.rest),
        false => input.rest.to_vec(),
    };
    let bytes = if more { [bytes, b"more".to_vec()].concat() } else { bytes };
    let (trusted, asked) = (input.is_trusted(), Hello::decode(input.rest).ok());
    let asks_high = is_framed && input.rest.get(..2) == Some(&[PING, PING_HIGH][..]);
    let messages = input.messages(bytes);
    peer::runtime(|runtime| {
        let before = peer::descriptors() - messages.iter().map(|m| m.fds.len()).sum::<usize>();
        let after = harness::connect(runtime, EntryPoint::Clients, trusted, messages);
        assert_eq!((after.clients, after.places), (0, 0), "something of the connection is left");
        peer::see_that_none_is_left(before);
        assert!(!after.stops && !after.records && after.generation == 1);
        if after.answer.is_empty() {
            return;
        }
        let answer = payload(&after.answer);
        if answer[0] == PING {
            // Behind it: why its user may not be high priority, if that was asked.
            assert!(!is_framed || (answer.len() > 1) == (asks_high && !trusted));
            assert!(std::str::from_utf8(&answer[1..]).is_ok());
            return;
        }
        assert_ne!(answer[0], NOTICE);
        match Welcome::decode(answer) {
            Ok(welcome) if is_framed => {
                let asked = asked.as_ref().expect("nobody is welcome who asked for nothing");
                assert_eq!(welcome.high_priority, asked.high_priority && trusted);
            }
            Ok(_) => {}
            Err(WireError::Refused(why)) => assert!(!why.is_empty()),
            Err(error) => panic!("the answer is no answer: {error}"),
        }
    });
}
