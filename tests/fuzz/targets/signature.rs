#![no_main]

#[path = "../bodies/signature.rs"]
mod signature;

libfuzzer_sys::fuzz_target!(|data: &[u8]| signature::signature(data));
