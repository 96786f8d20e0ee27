//! `cargo xtask plots`: draws `docs/results/*.json` into `docs/plots/`, in a light and a dark
//! theme. The files are committed; a test keeps them what the results say.

use crate::repository;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tally_plot::{Figure, Theme};

mod headline;
mod launch_cost;
mod turnaround;

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail if the committed files are not what the results say.
    #[arg(long)]
    check: bool,
}

/// Draw and write, or compare.
pub fn run(args: &Args) -> Result<()> {
    let drawn = draw(&repository().join("docs/results"))?;
    if args.check {
        return compare(&drawn, &folder());
    }
    fs::create_dir_all(folder()).with_context(|| folder().display().to_string())?;
    for (name, svg) in drawn {
        let path = folder().join(name);
        fs::write(&path, svg).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

fn folder() -> PathBuf {
    repository().join("docs/plots")
}

/// File names and contents.
fn draw(results: &Path) -> Result<BTreeMap<String, String>> {
    let read = |name: &str| -> Result<Value> {
        let path = results.join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    };
    let figures: [(&str, Figure); 3] = [
        ("headline", headline::figure(&read("pairs.json")?).context("pairs.json")?),
        ("turnaround", turnaround::figure(&read("forms.json")?).context("forms.json")?),
        (
            "launch-cost",
            launch_cost::figure(&read("overhead.json")?, &read("latency.json")?)
                .context("overhead.json, latency.json")?,
        ),
    ];
    let mut drawn = BTreeMap::new();
    for (name, figure) in &figures {
        for theme in Theme::ALL {
            drawn.insert(format!("{name}-{}.svg", theme.name()), figure.svg(theme)?);
        }
    }
    Ok(drawn)
}

fn compare(drawn: &BTreeMap<String, String>, folder: &Path) -> Result<()> {
    for (name, svg) in drawn {
        let path = folder.join(name);
        let committed = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(
            committed == *svg,
            "{} is not what docs/results says: run `cargo xtask plots`",
            path.display()
        );
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(
            drawn.contains_key(&name) || !name.ends_with(".svg"),
            "{} is no plot that `cargo xtask plots` draws: remove it",
            folder.join(name).display()
        );
    }
    Ok(())
}

fn text<'a>(row: &'a Value, key: &str) -> Result<&'a str> {
    row[key].as_str().with_context(|| format!("no text {key:?} in {row}"))
}

fn number(row: &Value, key: &str) -> Result<f64> {
    row[key].as_f64().with_context(|| format!("no number {key:?} in {row}"))
}

fn array<'a>(of: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    of[key].as_array().with_context(|| format!("no array {key:?}"))
}

/// The values of a key, each once, in order: `NVIDIA H200`, or `2026-11-22 to 2026-11-24`.
fn each_once<'a>(rows: &[&'a Value], key: &str) -> Result<Vec<&'a str>> {
    let mut all = rows.iter().map(|row| text(row, key)).collect::<Result<Vec<_>>>()?;
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// Where and when rows were measured, as a caption says it.
fn made(rows: &[&Value]) -> Result<String> {
    let dates = each_once(rows, "date")?;
    let when = match dates[..] {
        [] => return Ok(String::new()),
        [only] => only.to_owned(),
        [first, .., last] => format!("{first} to {last}"),
    };
    let (devices, drivers) = (each_once(rows, "device")?, each_once(rows, "driver")?);
    Ok(format!("{}, driver {}, {when}", devices.join(" and "), drivers.join(" and ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use roxmltree::Document;

    #[test]
    fn the_committed_plots_are_what_the_results_say() {
        run(&Args { check: true }).unwrap();
    }

    #[test]
    fn plots_are_xml_and_the_same_each_time() {
        let results = repository().join("docs/results");
        let drawn = draw(&results).unwrap();
        assert_eq!(drawn.len(), 6);
        assert_eq!(drawn, draw(&results).unwrap());
        for (name, svg) in &drawn {
            Document::parse(svg).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(svg.contains("NVIDIA"), "{name} does not name its machine");
        }
    }

    #[test]
    fn a_stale_a_missing_and_a_foreign_file_are_told_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let drawn = BTreeMap::from([("a-light.svg".to_owned(), "<svg/>".to_owned())]);
        let refused = |words: &str| {
            let error = format!("{:#}", compare(&drawn, dir.path()).unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        refused("a-light.svg");
        fs::write(dir.path().join("a-light.svg"), "<svg></svg>").unwrap();
        refused("cargo xtask plots");
        fs::write(dir.path().join("a-light.svg"), "<svg/>").unwrap();
        compare(&drawn, dir.path()).unwrap();
        fs::write(dir.path().join("old-dark.svg"), "").unwrap();
        refused("old-dark.svg");
    }
}
