//! Alone in its process: it uses up what a process keeps.

use tally_decision_log::decode;

/// Reasons are kept for the life of the process, so there is a bound.
#[test]
fn reasons_are_bounded() {
    let refused = (0..2_000).find(|i| {
        let mut bytes = vec![tally_decision_log::record::kind::PROFILE];
        bytes.extend_from_slice(&[0; 28]);
        bytes.push(4);
        let why = format!("made up {i}");
        bytes.extend_from_slice(&(why.len() as u32).to_le_bytes());
        bytes.extend_from_slice(why.as_bytes());
        bytes.extend_from_slice(&[0; 4]);
        decode::record(&bytes).is_err()
    });
    assert!(refused.is_some());
}
