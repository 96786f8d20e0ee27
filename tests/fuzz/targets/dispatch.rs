#![no_main]

#[path = "../bodies/dispatch.rs"]
mod dispatch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| dispatch::dispatch(data));
