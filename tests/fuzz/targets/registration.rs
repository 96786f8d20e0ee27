#![no_main]

#[path = "../bodies/peer.rs"]
mod peer;
#[path = "../bodies/registration.rs"]
mod registration;

libfuzzer_sys::fuzz_target!(|data: &[u8]| registration::registration(data));
