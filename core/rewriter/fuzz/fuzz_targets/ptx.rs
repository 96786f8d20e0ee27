//! Any text, rewritten in every way.
#![no_main]

#[path = "../bodies/ptx.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::ptx(data));
