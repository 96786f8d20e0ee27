#![no_main]

#[path = "../bodies/admin.rs"]
mod admin;
#[path = "../bodies/peer.rs"]
mod peer;

libfuzzer_sys::fuzz_target!(|data: &[u8]| admin::admin(data));
