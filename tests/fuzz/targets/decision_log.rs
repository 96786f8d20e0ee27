#![no_main]

#[path = "../bodies/decision_log.rs"]
mod decision_log;

libfuzzer_sys::fuzz_target!(|data: &[u8]| decision_log::decision_log(data));
