//! `tallyctl log trace`: makes a kernel trace out of a decision log.

use super::{next, open};
use crate::error::CtlError;
use std::io::Write;
use std::path::Path;
use tally_decision_log::trace::Trace;

pub fn run(out: &mut impl Write, file: &Path, client: &str, to: &Path) -> Result<(), CtlError> {
    let mut log = open(file)?;
    let mut trace = Trace::of(client);
    let rest = loop {
        match next(&mut log, file) {
            (Some(record), _) => trace.feed(&record),
            (None, rest) => break rest,
        }
    };
    trace.end();
    if !trace.has_client() {
        let why = format!("{}: no client of the name {client} is in it", file.display());
        return Err(CtlError::Failed(why));
    }
    if trace.rows() == 0 {
        return Err(CtlError::Failed(format!(
            "{}: no completion of {client} is in it: record with --completions, and the program \
             as best-effort (a high-priority program's launches are not decided)",
            file.display()
        )));
    }
    let failed = |e: std::io::Error| CtlError::Failed(format!("{}: {e}", to.display()));
    trace.save(to).map_err(failed)?;
    writeln!(out, "{}: {} kernels of {client}", to.display(), trace.rows())?;
    if trace.transformed > 0 {
        let share = format!("{} of them", trace.transformed);
        writeln!(
            out,
            "{share} ran in another form than whole, which takes longer: record the program alone"
        )?;
    }
    if trace.left_out > 0 {
        writeln!(out, "{} more do not fit a trace", trace.left_out)?;
    }
    if let Some(why) = rest {
        eprintln!("tallyctl: {why}");
    }
    Ok(())
}
