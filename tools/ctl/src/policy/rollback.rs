//! `tallyctl policy rollback`.

use crate::admin::Core;
use crate::error::CtlError;
use serde_json::json;
use std::io::Write;

/// Go back to that generation, or to the last good one.
pub fn run(core: &mut Core, out: &mut impl Write, to: Option<u64>) -> Result<(), CtlError> {
    let back = core.ask(&json!({"cmd": "policy_rollback", "to": to}))?;
    Ok(super::active(out, &back)?)
}
