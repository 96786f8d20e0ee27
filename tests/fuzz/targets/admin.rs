//! See `bodies/admin.rs`.
#![no_main]

#[path = "../bodies/admin.rs"]
mod admin;

libfuzzer_sys::fuzz_target!(|data: &[u8]| admin::admin(data));
