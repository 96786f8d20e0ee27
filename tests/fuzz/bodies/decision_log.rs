//! Decision logs. Checksums would keep a fuzzer from the records behind them, so records are read without as well.

use tally_decision_log::{Reader, decode, world};
use tally_engine::policy::Context;

/// No panic, no endless loop, and no more records than bytes.
pub fn decision_log(data: &[u8]) {
    if let Ok(mut reader) = Reader::new(data) {
        let mut context = Context::default();
        while let Ok(Some(record)) = reader.next_record() {
            let _ = world::apply(&mut context, &record);
        }
        assert!(reader.records() <= data.len() as u64);
    }
    // Records of a length in front, two bytes, without a header or checksums.
    let (mut rest, mut context) = (data, Context::default());
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (bytes, behind) = behind.split_at(length);
        if let Ok(record) = decode::record(bytes) {
            let _ = world::apply(&mut context, &record);
        }
        rest = behind;
    }
}
