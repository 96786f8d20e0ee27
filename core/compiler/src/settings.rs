//! The settings of wasmtime that change native code: the same for the compiler and for the host.

use std::num::NonZeroUsize;
use wasmtime::Config;

/// Native stack of a policy.
const STACK_BYTES: usize = 256 << 10;
/// Most frames that a policy's backtrace has.
const FRAMES_MAX: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// Everything but how instances are allocated, which is the host's.
pub fn settings() -> Config {
    let mut config = Config::new();
    config
        // What async calls would need costs every call, async or not.
        .concurrency_support(false)
        // Fuel bounds a call tightly and alike on each run; epochs bound time.
        .consume_fuel(true)
        .epoch_interruption(true)
        .memory_init_cow(true)
        .max_wasm_stack(STACK_BYTES)
        .wasm_backtrace_max_frames(Some(FRAMES_MAX))
        // The same inputs give the same decisions, on any processor.
        .cranelift_nan_canonicalization(true)
        .wasm_relaxed_simd(false)
        // Not needed, so not there to go wrong.
        .wasm_simd(false)
        .wasm_memory64(false);
    config
}
