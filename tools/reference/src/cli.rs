//! A command line: every subcommand with its usage and its arguments.

use crate::{escaped, one_line, table};
use clap::{Arg, Command};
use std::fmt::Write;

/// All commands that are not hidden, the program's own first.
pub fn commands(program: &Command) -> String {
    let mut program = program.clone();
    program.build();
    let mut out = String::new();
    command(&mut program, &[], &mut out);
    out
}

fn command(at: &mut Command, above: &[String], out: &mut String) {
    let mut path = above.to_vec();
    path.push(at.get_name().to_owned());
    // Writing to a string does not fail.
    let _ = writeln!(out, "## `{}`\n", path.join(" "));
    if let Some(about) = at.get_long_about().or(at.get_about()) {
        for paragraph in about.to_string().split("\n\n") {
            let _ = writeln!(out, "{}\n", escaped(&one_line(paragraph)));
        }
    }
    let usage = at.render_usage().to_string();
    let usage = one_line(usage.trim_start_matches("Usage:"));
    let _ = writeln!(out, "```text\n{usage}\n```\n");
    // Flags that every subcommand takes are listed with the program.
    let is_listed = |argument: &&Arg| {
        !argument.is_hide_set()
            && !matches!(argument.get_id().as_str(), "help" | "version")
            && (above.is_empty() || !argument.is_global_set())
    };
    let rows: Vec<_> = at.get_arguments().filter(is_listed).map(row).collect();
    if !rows.is_empty() {
        let _ = writeln!(out, "{}", table(["argument", "default", "meaning"], rows));
    }
    if let Some(text) = at.get_after_long_help().or(at.get_after_help()) {
        let _ = writeln!(out, "```text\n{text}\n```\n");
    }
    let names = at.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    for name in names.map(|sub| sub.get_name().to_owned()).collect::<Vec<_>>() {
        if let Some(sub) = at.find_subcommand_mut(&name) {
            command(sub, &path, out);
        }
    }
}

fn row(argument: &Arg) -> [String; 3] {
    let values = argument.get_value_names().unwrap_or_default();
    let takes = argument.get_action().takes_values();
    let name = match argument.get_long() {
        Some(long) if takes => format!("`--{long} <{}>`", values.join("> <")),
        Some(long) => format!("`--{long}`"),
        None => format!("`{}`", values.join(" ")),
    };
    let defaults = argument.get_default_values().iter();
    let defaults = defaults.map(|value| format!("`{}`", value.to_string_lossy()));
    let default = if takes { defaults.collect::<Vec<_>>().join(", ") } else { String::new() };
    let help = argument.get_long_help().or(argument.get_help());
    let mut meaning = escaped(&help.map(ToString::to_string).unwrap_or_default());
    let possible = argument.get_possible_values();
    if takes && !possible.is_empty() {
        let shown = possible.iter().filter(|value| !value.is_hide_set());
        let shown = shown.map(|value| match value.get_help() {
            Some(help) => {
                let help = one_line(&help.to_string());
                format!("`{}` ({})", value.get_name(), escaped(help.trim_end_matches('.')))
            }
            None => format!("`{}`", value.get_name()),
        });
        let end = if meaning.trim_end().ends_with('.') { "" } else { "." };
        let _ = write!(meaning, "{end} Values: {}.", shown.collect::<Vec<_>>().join(", "));
    }
    if let Some(variable) = argument.get_env() {
        let _ = write!(meaning, " Environment: `{}`.", variable.to_string_lossy());
    }
    [name, default, meaning]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::builder::PossibleValue;

    #[test]
    fn every_command_that_is_not_hidden_is_there_with_its_arguments() {
        let go = Command::new("go")
            .about("Go <there>")
            .arg(Arg::new("file").required(true).value_name("FILE").help("What"))
            .arg(
                Arg::new("how")
                    .long("how")
                    .value_name("HOW")
                    .default_value("slow")
                    .value_parser([
                        PossibleValue::new("slow").help("Later."),
                        PossibleValue::new("fast"),
                    ])
                    .help("How to."),
            );
        let program = Command::new("tool")
            .about("A tool")
            .after_help("Exit codes:\n  0  done")
            .arg(Arg::new("all").long("all").global(true).num_args(0).help("All | of it"))
            .subcommand(go)
            .subcommand(Command::new("secret").hide(true));
        let made = commands(&program);
        for part in [
            "## `tool`\n\nA tool\n",
            "| `--all` | | All \\| of it |\n",
            "```text\nExit codes:\n  0  done\n```\n",
            "## `tool go`\n\nGo \\<there>\n\n```text\ntool go [OPTIONS] <FILE>\n```\n",
            "| `FILE` | | What |\n",
            "| `--how <HOW>` | `slow` | How to. Values: `slow` (Later), `fast`. |\n",
        ] {
            assert!(made.contains(part), "{part}\n{made}");
        }
        assert_eq!(made.matches("--all").count(), 1, "{made}");
        assert!(!made.contains("secret") && !made.contains("help"), "{made}");
    }
}
