//! `tallyctl profiles`: what is known of kernels, and forgetting it.

use crate::admin::{AdminSocket, Core};
use crate::cli::ProfilesCommand;
use crate::error::CtlError;
use crate::status::{Paint, count, kernel_us, list, print, short, text, three};
use crate::table::{Align, table};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use tally_admin::Request;

/// Show or clear.
pub fn run(socket: &AdminSocket, command: ProfilesCommand) -> Result<(), CtlError> {
    let mut core = Core::connect(socket)?;
    let mut out = std::io::stdout().lock();
    match command {
        ProfilesCommand::Show { json, kernels } => {
            let known = core.ask(&Request::ProfilesShow { kernels: Some(kernels) })?;
            if json {
                writeln!(out, "{known:#}")?;
            } else {
                let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none();
                show(&mut out, &known, Paint(colour))?;
            }
        }
        ProfilesCommand::Clear => {
            let cleared = core.ask(&Request::ProfilesClear {})?;
            cleared_lines(&mut out, &cleared)?;
        }
    }
    Ok(())
}

fn show(out: &mut impl Write, known: &Value, paint: Paint) -> std::io::Result<()> {
    let store = &known["store"];
    let place = ["/file", "/directory"].iter().find_map(|at| store.pointer(at)?.as_str());
    writeln!(
        out,
        "{}  {}: {} kernels, {} only to be run whole",
        paint.bold("kept"),
        place.unwrap_or("nowhere"),
        count(store, "/kernels"),
        count(store, "/whole_only")
    )?;
    if let Some(problem) = store["problem"].as_str() {
        writeln!(out, "      {}", paint.bad(problem))?;
    }
    writeln!(out)?;
    let kernels = list(known, "/kernels");
    if kernels.is_empty() {
        return writeln!(out, "no kernel was measured in this run");
    }
    use Align::{Left, Right};
    let header = [
        ("MEASURED", Right),
        ("MEAN us", Right),
        ("P99 us", Right),
        ("YIELDS us", Right),
        ("FORM", Left),
        ("GRID", Left),
        ("BLOCK", Left),
        ("IMAGE", Left),
        ("KERNEL", Left),
        ("FORMS", Left),
    ];
    let rows: Vec<_> = kernels.iter().flat_map(rows).collect();
    print(out, &table(&header, &rows), paint)
}

/// A kernel, and below it a row for each form other than whole.
fn rows(kernel: &Value) -> Vec<Vec<String>> {
    let us = kernel_us;
    let nothing = String::new;
    let whole = vec![
        count(kernel, "/measured"),
        us(kernel, "/mean_us"),
        us(kernel, "/p99_us"),
        nothing(),
        "whole".into(),
        three(&kernel["grid"]),
        three(&kernel["block"]),
        kernel["image"].as_str().unwrap_or_default().to_owned(),
        short(text(kernel, "/name")),
        text(kernel, "/transformed").to_owned(),
    ];
    let form = |f: &Value| {
        let form = match (text(f, "/form"), count(f, "/argument")) {
            ("sliced", blocks) => format!("slices of {blocks}"),
            ("sm-limited", sms) => format!("on {sms} SMs"),
            (other, _) => other.to_owned(),
        };
        let turnaround = Some(us(f, "/turnaround_us")).filter(|t| t != "0.0");
        vec![
            count(f, "/measured"),
            us(f, "/mean_us"),
            nothing(),
            turnaround.unwrap_or_default(),
            form,
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
        ]
    };
    std::iter::once(whole).chain(list(kernel, "/forms").iter().map(form)).collect()
}

fn cleared_lines(out: &mut impl Write, cleared: &Value) -> std::io::Result<()> {
    writeln!(out, "{} kernels are measured anew", count(cleared, "/kernels"))?;
    if let Some(file) = cleared["file"].as_str() {
        writeln!(out, "{file} was deleted")?;
    }
    if let Some(folder) = cleared["left_in"].as_str() {
        writeln!(
            out,
            "nothing was deleted: which GPU this core serves is known once a program launches \
             on it; delete its file in {folder} by hand, or clear again then"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(known: &Value) -> String {
        let mut out = Vec::new();
        show(&mut out, known, Paint(false)).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn kernels_and_their_forms_are_shown() {
        let known = json!({
            "store": {"file": "/s/GPU-1.jsonl", "kernels": 3, "whole_only": 1, "problem": null},
            "kernels": [{
                "name": "gemm", "grid": [8, 1, 1], "block": [32, 1, 1], "measured": 7,
                "mean_us": 10.04, "p99_us": 12.0, "transformed": "ready",
                "forms": [{"form": "sliced", "argument": 4, "measured": 2, "mean_us": 11.0,
                           "turnaround_us": 3.5}],
            }],
        });
        let shown = shown(&known);
        let has = ["/s/GPU-1.jsonl: 3 kernels, 1 only", "8x1x1", "slices of 4", "3.5", "ready"];
        for word in has {
            assert!(shown.contains(word), "{word:?} not in {shown}");
        }
    }

    #[test]
    fn an_empty_answer_and_a_problem_are_shown() {
        assert!(shown(&json!({})).contains("nowhere"));
        let shown = shown(&json!({"store": {"problem": "the disk is full"}}));
        assert!(shown.contains("the disk is full") && shown.contains("no kernel"), "{shown}");
    }
}
