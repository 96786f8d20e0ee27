//! Loads, bounds and calls WebAssembly scheduling policies.
