//! `tallyctl shadow`: a second policy that sees what the active one sees.

use crate::admin::{AdminSocket, Core, policy_files, read};
use crate::error::CtlError;
use crate::log::absolute;
use crate::status::short;
use crate::table::{Align, table};
use clap::Subcommand;
use std::io::Write;
use std::path::PathBuf;
use tally_admin::{RecordRequest, ShadowStatus};

#[derive(Debug, Subcommand)]
pub enum ShadowCommand {
    /// Start a shadow policy: it gets the active policy's calls, and its answers are compared but never used.
    Start {
        /// The policy component, a `.wasm` file
        file: PathBuf,
        /// Configuration file that is passed to the policy
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Share of one CPU that the shadow policy may use, percent. Decisions beyond it are skipped.
        #[arg(long, value_name = "N", default_value_t = 5.0)]
        cpu_percent: f64,
    },
    /// Show how often the shadow policy agrees with the active one, and where they differ.
    Status {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Stop the shadow policy, and show its final comparison.
    Stop,
}

pub fn run(socket: &AdminSocket, command: ShadowCommand) -> Result<(), CtlError> {
    let mut core = Core::connect(socket)?;
    let mut out = std::io::stdout().lock();
    match command {
        ShadowCommand::Start { file, config, cpu_percent } => {
            let files = policy_files("", &file, config.as_deref())?;
            let request = RecordRequest::ShadowStart {
                path: absolute(&file),
                config: config.as_deref().map(absolute),
                cpu_percent: Some(cpu_percent),
            };
            let status: ShadowStatus = read(core.ask_about(&request, &files)?)?;
            writeln!(out, "{} is the shadow: sha256 {}", status.name, status.digest)?;
        }
        ShadowCommand::Status { json } => {
            let status = core.ask(&RecordRequest::ShadowStatus {})?;
            if json {
                writeln!(out, "{status:#}")?;
            } else {
                match read(status)? {
                    Some(status) => show(&mut out, &status)?,
                    None => writeln!(out, "there was no shadow since the core started")?,
                }
            }
        }
        ShadowCommand::Stop => show(&mut out, &core.get(&RecordRequest::ShadowStop {})?)?,
    }
    Ok(())
}

fn show(out: &mut impl Write, s: &ShadowStatus) -> std::io::Result<()> {
    writeln!(
        out,
        "shadow     {} beside {}, {:.0} ms of CPU time, at most {} % of a CPU",
        s.name, s.active, s.cpu_ms, s.cpu_percent
    )?;
    if let Some(why) = &s.ended {
        writeln!(out, "           ended: {why}")?;
    }
    let c = &s.comparison;
    writeln!(
        out,
        "decisions  {:.2} % of {} equal, {} of the same kind; {} left out, {} records dropped",
        s.agreement_percent, c.decisions, c.same_kind, s.parts.skipped, s.dropped
    )?;
    if !s.events_missing.is_empty() {
        let missing = s.events_missing.join(", ");
        writeln!(out, "           it gets no {missing}: the active policy does not")?;
    }
    if let Some(last) = &c.last_fault {
        writeln!(out, "faults     {:?}; the last: {last}", c.faults)?;
    }
    let rows: Vec<Vec<String>> = std::iter::zip(&c.matrix, &s.kinds)
        .filter(|(counts, _)| counts.iter().any(|n| *n > 0))
        .map(|(counts, kind)| {
            std::iter::once(kind.to_string()).chain(counts.iter().map(u64::to_string)).collect()
        })
        .collect();
    let header: Vec<_> = std::iter::once(("ACTIVE", Align::Left))
        .chain(s.kinds.iter().map(|kind| (&**kind, Align::Right)))
        .collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    for (shares, what) in [(&s.kernels, "KERNEL"), (&s.clients, "CLIENT")] {
        let rows: Vec<_> = shares
            .iter()
            .filter(|w| w.share.parted > 0)
            .map(|w| {
                vec![w.share.parted.to_string(), w.share.decisions.to_string(), short(&w.name)]
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let header = [("DIFFER", Align::Right), ("OF", Align::Right), (what, Align::Left)];
        writeln!(out)?;
        for line in table(&header, &rows) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}
