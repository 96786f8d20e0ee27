//! Compares the simulator with pairs of programs that `bench/gpu` measured: the same pair, load and policy, as
//! ratios. `docs/results-simulator.md` has the table.
//!
//! A program takes alone what the row's own run measured of it alone; everything that
//! comes of sharing is simulated.
#![forbid(unsafe_code)]

mod arrivals;
mod decode_row;
mod row;
mod table;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use decode_row::DecodeRow;
use row::{Measured, text};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use tally_simulator::Setup;

/// Print a table of simulated and measured p99 and training speed, a row for each measured pair whose programs have
/// built-in traces.
#[derive(Parser)]
struct Options {
    /// Measured pairs, as in docs/results/pairs.json
    file: PathBuf,
    /// Only rows measured on this day or later: older ones may be of another core
    #[arg(long, value_name = "YYYY-MM-DD", default_value = "")]
    since: String,
    /// Only rows of this GPU: the model's figures are of one
    #[arg(long, value_name = "NAME", default_value = "NVIDIA H200")]
    device: String,
    /// Configuration file of the policy, in place of the one that a row was measured with
    #[arg(long, value_name = "FILE")]
    policy_config: Option<PathBuf>,
    /// Another figure of the modelled machine (docs/results-simulator.md); may be given several times
    #[arg(long = "figure", value_name = "NAME=N")]
    figures: Vec<String>,
    /// Seed of what an inference's own part takes
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print a JSON array with more figures instead
    #[arg(long)]
    json: bool,
}

impl Options {
    fn setup(&self) -> Result<Setup> {
        let mut setup = Setup { seed: self.seed, ..Setup::default() };
        for figure in &self.figures {
            let wrong = |why: String| anyhow!("--figure {figure}: {why}");
            let (name, value) = figure.split_once('=').unwrap_or((figure, ""));
            let value = value.parse().map_err(|_| wrong("expected NAME=WHOLE-NUMBER".into()))?;
            setup.model.set(name, value).map_err(wrong)?;
        }
        Ok(setup)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let setup = options.setup()?;
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
    };
    let config = options.policy_config.as_ref().map(read).transpose()?;
    let rows: Vec<Value> = serde_json::from_str(&read(&options.file)?).with_context(|| {
        let file = options.file.display();
        format!("{file}: expected an array of rows as in docs/results/pairs.json")
    })?;
    // As dates they compare as texts do.
    let rows = rows.iter().filter(|row| text(row, "device") == &*options.device);
    let rows = rows.filter(|row| text(row, "date") >= &*options.since);
    let (decode, pairs): (Vec<_>, Vec<_>) = rows.partition(|row| decode_row::is_of(row));
    let rows: Vec<_> = pairs.into_iter().filter_map(|row| Measured::of(row, &setup)).collect();
    let (rows, left_out): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| !row.has_drifted());
    let compare = |row: &Measured| row.compare(config.as_deref());
    let mut compared = rows.iter().map(compare).collect::<Result<Vec<_>>>()?;
    for row in decode.into_iter().filter_map(|row| DecodeRow::of(row, &setup)) {
        compared.push(row.compare(config.as_deref())?);
    }
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&compared)?)?;
        return Ok(());
    }
    table::show(&mut out, &compared)?;
    if !left_out.is_empty() {
        let names = left_out.iter().map(Measured::name).collect::<Vec<_>>().join("; ");
        writeln!(out, "\nLeft out, because the inference's host had become slower: {names}.")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_the_machine_are_set_by_name() {
        let setup = |more: &[&str]| {
            Options::parse_from(["tally-sim-compare", "pairs.json"].iter().chain(more)).setup()
        };
        assert_eq!(setup(&["--figure", "linger_ns=5"]).unwrap().model.linger_ns, 5);
        for (figure, why) in [("linger_ns", "WHOLE-NUMBER"), ("mass_ns=5", "no figure `mass_ns`")] {
            let error = setup(&["--figure", figure]).unwrap_err().to_string();
            assert!(error.contains(figure) && error.contains(why), "{error}");
        }
    }
}
