#![no_main]

#[path = "../bodies/disk_cache.rs"]
mod disk_cache;

libfuzzer_sys::fuzz_target!(|data: &[u8]| disk_cache::disk_cache(data));
