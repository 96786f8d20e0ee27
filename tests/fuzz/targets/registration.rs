#![no_main]

#[path = "../bodies/registration.rs"]
mod registration;
#[path = "../bodies/peer.rs"]
mod peer;

libfuzzer_sys::fuzz_target!(|data: &[u8]| registration::registration(data));
