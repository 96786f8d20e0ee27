//! See `shared/binary.rs`.
#![no_main]

#[path = "shared/binary.rs"]
#[allow(dead_code)]
mod binary;

libfuzzer_sys::fuzz_target!(|data: &[u8]| binary::cubin(data));
