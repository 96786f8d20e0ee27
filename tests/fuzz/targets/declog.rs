//! See `bodies/declog.rs`.
#![no_main]

#[path = "../bodies/declog.rs"]
mod declog;

libfuzzer_sys::fuzz_target!(|data: &[u8]| declog::declog(data));
