//! `tallyctl shadow`: a second policy that sees what the active one sees.

use crate::admin::{AdminSocket, Core, policy_files};
use crate::error::CtlError;
use crate::log::absolute;
use crate::status::{count, list, number, short, text};
use crate::table::{Align, table};
use clap::Subcommand;
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use tally_admin::RecordRequest;

#[derive(Debug, Subcommand)]
pub enum ShadowCommand {
    /// Let a policy see what the active one sees; its answers are compared, never used.
    Start {
        /// The policy component, a `.wasm` file
        file: PathBuf,
        /// Configuration file that is passed to the policy
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// How much of one CPU it may use, percent; decisions beyond that are left out.
        #[arg(long, value_name = "N", default_value_t = 5.0)]
        cpu_percent: f64,
    },
    /// Show how often the two agree, and where they part.
    Status {
        /// As JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// End it, and show the same for the last time.
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
            let status = core.ask_about(&request, &files)?;
            let digest = text(&status, "/digest");
            writeln!(out, "{} is the shadow: sha256 {digest}", text(&status, "/name"))?;
        }
        ShadowCommand::Status { json } => {
            let status = core.ask(&RecordRequest::ShadowStatus {})?;
            if json {
                writeln!(out, "{status:#}")?;
            } else if status.is_null() {
                writeln!(out, "there was no shadow since the core started")?;
            } else {
                show(&mut out, &status)?;
            }
        }
        ShadowCommand::Stop => show(&mut out, &core.ask(&RecordRequest::ShadowStop {})?)?,
    }
    Ok(())
}

fn show(out: &mut impl Write, s: &Value) -> std::io::Result<()> {
    writeln!(
        out,
        "shadow     {} beside {}, {:.0} ms of CPU time, at most {} % of a CPU",
        text(s, "/name"),
        text(s, "/active"),
        number(s, "/cpu_ms"),
        number(s, "/cpu_percent")
    )?;
    if let Some(why) = s["ended"].as_str() {
        writeln!(out, "           ended: {why}")?;
    }
    let c = &s["comparison"];
    writeln!(
        out,
        "decisions  {:.2} % of {} equal, {} of the same kind; {} left out, {} records dropped",
        number(s, "/agreement_percent"),
        count(c, "/decisions"),
        count(c, "/same_kind"),
        count(s, "/parts/skipped"),
        count(s, "/dropped")
    )?;
    let missing: Vec<_> = list(s, "/events_missing").iter().filter_map(Value::as_str).collect();
    if !missing.is_empty() {
        writeln!(out, "           it gets no {}: the active policy does not", missing.join(", "))?;
    }
    if let Some(last) = c["last_fault"].as_str() {
        writeln!(out, "faults     {}; the last: {last}", c["faults"])?;
    }
    let kinds: Vec<_> = list(s, "/kinds").iter().filter_map(Value::as_str).collect();
    let rows: Vec<Vec<String>> = list(c, "/matrix")
        .iter()
        .zip(&kinds)
        .map(|(row, kind)| {
            let counts = row.as_array().into_iter().flatten().map(Value::to_string);
            std::iter::once((*kind).to_owned()).chain(counts).collect()
        })
        .filter(|row: &Vec<String>| row[1..].iter().any(|n| n != "0"))
        .collect();
    let header: Vec<_> = std::iter::once(("ACTIVE", Align::Left))
        .chain(kinds.iter().map(|k| (*k, Align::Right)))
        .collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    for (at, what) in [("/kernels", "KERNEL"), ("/clients", "CLIENT")] {
        let rows: Vec<_> = list(s, at)
            .iter()
            .filter(|w| number(w, "/parted") > 0.0)
            .map(|w| vec![count(w, "/parted"), count(w, "/decisions"), short(text(w, "/name"))])
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
