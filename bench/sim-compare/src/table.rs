//! The table of `docs/results-simulator.md`.

use crate::row::Compared;
use std::io::Write;

/// What was aimed at: p99 and share off by at most so much.
const AIMS_PERCENT: [f64; 2] = [15.0, 10.0];

/// Behind a share of what the training makes alone in the row's mode.
const OF_OWN: &str = " of own";

/// A configuration behind a row's mode.
pub fn with(config: &str) -> String {
    format!(", `{}`", config.lines().collect::<Vec<_>>().join("; "))
}

/// An objective behind a row's mode.
pub fn at(multiple: f64) -> String {
    format!(", objective {multiple}x")
}

/// The table in Markdown.
pub fn show(out: &mut impl Write, rows: &[Compared]) -> std::io::Result<()> {
    writeln!(
        out,
        "| pair | mode | p99 over alone, simulated | measured | off by | share, simulated | measured | off by |"
    )?;
    writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
    let off = |a: f64, b: f64| (a / b - 1.0) * 100.0;
    let mut within = [0; 2];
    for r in rows {
        let ([share, measured_share], is_own) = r.shares();
        let offs = [off(r.p99_over_alone, r.measured_p99_over_alone), off(share, measured_share)];
        let own = if is_own { OF_OWN } else { "" };
        for (count, (off, aim)) in within.iter_mut().zip(offs.iter().zip(AIMS_PERCENT)) {
            *count += u32::from(off.abs() <= aim);
        }
        writeln!(
            out,
            "| {} + {} | {}{}{}{} | {:.2} | {:.2} | {:+.0} % | {share:.2}{own} | {measured_share:.2}{own} | {:+.0} % |",
            r.hp,
            r.be,
            r.mode,
            if r.vendor_rewrite { ", vendor kernels transformed" } else { "" },
            r.objective.map_or(String::new(), at),
            r.policy_config.as_deref().map_or(String::new(), with),
            r.p99_over_alone,
            r.measured_p99_over_alone,
            offs[0],
            offs[1],
        )?;
    }
    writeln!(out)?;
    if rows.iter().any(|r| r.shares().1) {
        writeln!(
            out,
            "A share{OF_OWN} is of what the same training makes alone in that mode; other shares are of what it makes alone without a core.\n"
        )?;
    }
    writeln!(
        out,
        "p99 within {} % in {} of {} rows, share within {} % in {}.",
        AIMS_PERCENT[0],
        within[0],
        rows.len(),
        AIMS_PERCENT[1],
        within[1]
    )?;
    Ok(())
}
