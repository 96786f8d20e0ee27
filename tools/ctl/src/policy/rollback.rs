//! `tallyctl policy rollback`: puts an earlier policy back.

use crate::admin::Core;
use crate::error::CtlError;
use std::io::Write;
use tally_admin::Request;

/// Go back to that generation, or to the last good one.
pub fn run(core: &mut Core, out: &mut impl Write, to: Option<u64>) -> Result<(), CtlError> {
    let back = core.get(&Request::PolicyRollback { to })?;
    Ok(super::active(out, &back)?)
}
