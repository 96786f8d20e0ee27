//! See `bodies/component.rs`. Without wasmtime, which takes minutes to build.
#![no_main]

#[path = "../../../core/compiler/src/bounds.rs"]
mod bounds;
#[path = "../bodies/component.rs"]
mod component;
#[path = "../../../core/compiler/src/entry.rs"]
mod entry;

use bounds::check;
use entry::shortened;

/// Those of `core/compiler/src/error.rs` that do not need wasmtime.
#[derive(Debug, thiserror::Error)]
#[error("it has more than {most} {what}")]
pub struct TooMany {
    pub what: &'static str,
    pub most: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error(transparent)]
    TooMany(#[from] TooMany),
    #[error("{0}")]
    Invalid(String),
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| component::component(data));
