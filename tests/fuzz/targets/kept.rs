#![no_main]

#[path = "../bodies/kept.rs"]
mod kept;

libfuzzer_sys::fuzz_target!(|data: &[u8]| kept::kept(data));
