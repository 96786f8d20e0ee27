#![no_main]

#[path = "../bodies/marks.rs"]
mod marks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| marks::marks(data));
