#![no_main]

#[path = "../bodies/binary.rs"]
#[allow(dead_code)]
mod binary;

libfuzzer_sys::fuzz_target!(|data: &[u8]| binary::fatbin(data));
