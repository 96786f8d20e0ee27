//! A policy's component before it is compiled: counted, and given the shorter way into its functions. Who includes this
//! has `check` and `shortened` of `core/compiler`.

use super::{check, shortened};
use wasmparser::{Validator, WasmFeatures};

fn is_valid(bytes: &[u8]) -> bool {
    Validator::new_with_features(WasmFeatures::all()).validate_all(bytes).is_ok()
}

/// No panic, and nothing valid becomes invalid.
pub fn component(data: &[u8]) {
    if check(data).is_err() {
        return;
    }
    if let Some(short) = shortened(data) {
        assert!(is_valid(&short) || !is_valid(data), "it was valid before");
        check(&short).expect("a few parts more");
    }
}
