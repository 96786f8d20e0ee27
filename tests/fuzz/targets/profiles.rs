#![no_main]

#[path = "../bodies/profiles.rs"]
mod profiles;

libfuzzer_sys::fuzz_target!(|data: &[u8]| profiles::profiles(data));
