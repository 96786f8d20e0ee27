#![no_main]

#[path = "../bodies/hostile.rs"]
mod hostile;
#[path = "../bodies/marks.rs"]
mod marks;
#[path = "../bodies/scripted.rs"]
mod scripted;

libfuzzer_sys::fuzz_target!(|data: &[u8]| marks::marks(data));
