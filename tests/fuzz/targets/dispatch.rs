#![no_main]

#[path = "../bodies/dispatch.rs"]
mod dispatch;
#[path = "../bodies/hostile.rs"]
mod hostile;
#[path = "../bodies/scripted.rs"]
mod scripted;

libfuzzer_sys::fuzz_target!(|data: &[u8]| dispatch::dispatch(data));
