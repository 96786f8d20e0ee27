//! `tallyctl profiles`: what is known of kernels, and forgetting it.

use crate::admin::{AdminSocket, Core, read};
use crate::cli::ProfilesCommand;
use crate::error::CtlError;
use crate::status::{Paint, kernel_us, print, short, three, waves};
use crate::table::{Align, table};
use std::io::{IsTerminal, Write};
use tally_admin::{Cleared, Form, FormStatus, KernelStatus, Profiles, Request};

/// Shows the profiles, or has the core forget them.
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
                show(&mut out, &read(known)?, Paint(colour))?;
            }
        }
        ProfilesCommand::Clear => {
            let cleared = core.get(&Request::ProfilesClear {})?;
            cleared_lines(&mut out, &cleared)?;
        }
    }
    Ok(())
}

fn show(out: &mut impl Write, known: &Profiles, paint: Paint) -> std::io::Result<()> {
    let store = &known.store;
    let place = store.file.as_ref().or(store.directory.as_ref());
    writeln!(
        out,
        "{}  {}: {} kernels, {} only to be run whole",
        paint.bold("kept"),
        place.map_or("nowhere", String::as_str),
        store.kernels,
        store.whole_only
    )?;
    if let Some(problem) = &store.problem {
        writeln!(out, "      {}", paint.bad(problem))?;
    }
    writeln!(out)?;
    if known.kernels.is_empty() {
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
        ("WAVES", Right),
        ("IMAGE", Left),
        ("KERNEL", Left),
        ("FORMS", Left),
    ];
    let rows: Vec<_> = known.kernels.iter().flat_map(rows).collect();
    print(out, &table(&header, &rows), paint)
}

/// A kernel, and below it a row for each form other than whole.
fn rows(kernel: &KernelStatus) -> Vec<Vec<String>> {
    let us = |us| kernel_us(kernel, us);
    let nothing = String::new;
    let whole = vec![
        kernel.measured.to_string(),
        us(kernel.mean_us),
        us(kernel.p99_us),
        nothing(),
        Form::Whole.to_string(),
        three(kernel.grid),
        three(kernel.block),
        waves(kernel),
        kernel.image.clone(),
        short(&kernel.name),
        kernel.transformed.clone(),
    ];
    let form = |f: &FormStatus| {
        let form = match f.form {
            Form::Sliced => format!("slices of {}", f.argument),
            Form::SmLimited => format!("on {} SMs", f.argument),
            other => other.to_string(),
        };
        let turnaround = Some(format!("{:.1}", f.turnaround_us)).filter(|t| t != "0.0");
        vec![
            f.measured.to_string(),
            format!("{:.1}", f.mean_us),
            nothing(),
            turnaround.unwrap_or_default(),
            form,
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
        ]
    };
    std::iter::once(whole).chain(kernel.forms.iter().map(form)).collect()
}

fn cleared_lines(out: &mut impl Write, cleared: &Cleared) -> std::io::Result<()> {
    writeln!(out, "{} kernels are measured anew", cleared.kernels)?;
    if let Some(file) = &cleared.file {
        writeln!(out, "{file} was deleted")?;
    }
    if let Some(folder) = &cleared.left_in {
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
    use tally_admin::ProfilesStatus;

    fn shown(store: ProfilesStatus, kernels: Vec<KernelStatus>) -> String {
        let mut out = Vec::new();
        show(&mut out, &Profiles { store, kernels }, Paint(false)).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn kernels_and_their_forms_are_shown() {
        let store = ProfilesStatus {
            file: Some("/s/GPU-1.jsonl".into()),
            kernels: 3,
            whole_only: 1,
            ..ProfilesStatus::default()
        };
        let form = FormStatus {
            form: Form::Sliced,
            argument: 4,
            measured: 2,
            mean_us: 11.0,
            turnaround_us: 3.5,
        };
        let kernel = KernelStatus {
            name: "gemm".into(),
            grid: [8, 1, 1],
            block: [32, 1, 1],
            blocks_per_sm: 2,
            waves: 1.5,
            measured: 7,
            mean_us: 10.04,
            p99_us: 12.0,
            transformed: "ready".into(),
            forms: vec![form],
            ..KernelStatus::default()
        };
        let shown = shown(store, vec![kernel]);
        let has =
            ["/s/GPU-1.jsonl: 3 kernels, 1 only", "8x1x1", "1.50", "slices of 4", "3.5", "ready"];
        for word in has {
            assert!(shown.contains(word), "{word:?} not in {shown}");
        }
    }

    #[test]
    fn an_empty_store_and_a_problem_are_shown() {
        assert!(shown(ProfilesStatus::default(), Vec::new()).contains("nowhere"));
        let problem = Some("the disk is full".into());
        let shown = shown(ProfilesStatus { problem, ..ProfilesStatus::default() }, Vec::new());
        assert!(shown.contains("the disk is full") && shown.contains("no kernel"), "{shown}");
    }
}
