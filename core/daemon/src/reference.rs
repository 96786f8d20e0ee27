//! `tally-core reference`, hidden: parts of `docs/reference`, from what this program is made of.

use crate::cli::Cli;
use crate::config::Config;
use clap::{CommandFactory, ValueEnum};
use serde_json::json;
use tally_reference::settings::{Preset, tables};
use tally_reference::{cli, document};
use tally_wasm_host::Limits;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Reference {
    /// Every key of the configuration file
    Configuration,
    /// A configuration file of all defaults
    Example,
    /// Every flag of the command line
    Cli,
}

impl Reference {
    /// The document: Markdown, or TOML.
    pub fn text(self) -> String {
        match self {
            Reference::Configuration => configuration(),
            Reference::Example => example(),
            Reference::Cli => document(
                "Command line of `tally-core`",
                "Flags win over the [configuration file](configuration.md).",
                &cli::commands(&Cli::command()),
            ),
        }
    }
}

/// What settings without a default may be.
const SAMPLES: [(&str, &str); 14] = [
    ("ab.directory", "\"/var/lib/tally/ab\""),
    ("admin.socket", "\"/run/tally/admin/core.sock\""),
    ("client.spin_us", "1000"),
    ("dispatch.pin_cpu", "3"),
    ("dispatch.spin_us", "2000"),
    ("high_priority.uids", "[0, 1000]"),
    ("log.directory", "\"/var/lib/tally/logs\""),
    ("log.file", "\"/var/lib/tally/logs/core.tallylog\""),
    ("policy.config_file", "\"/etc/tally/priority.toml\""),
    ("policy.file", "\"/usr/lib/tally/policies/tally-priority.wasm\""),
    ("profiles.directory", "\"/var/lib/tally\""),
    ("sharing.mps.pipe_directory", "\"/run/tally/mps\""),
    ("sharing.mps.refresh_program", "\"/usr/bin/tally-refresh\""),
    ("socket.path", "\"/run/tally/clients/core.sock\""),
];

fn interpreted() -> Preset {
    Preset { table: "policy.limits", name: "`interpreted`", values: json!(Limits::interpreted()) }
}

fn example() -> String {
    tally_reference::settings::example(
        "Every setting of tally-core with its default. A line that starts with \"#\" and no space is a setting \
         without a fixed default. Flags win over this file. Made by `cargo xtask references`; do not edit.",
        &tally_settings::schema::<Config>(),
        &json!(Config::default()),
        &[interpreted()],
        &SAMPLES,
    )
}

fn configuration() -> String {
    document(
        "Configuration of `tally-core`",
        "The file is TOML, and the core reads it once, at start. Every key can be left out, and an unknown key or a \
         value out of its range is an error. \
         [`tally-core.example.toml`](../../core/daemon/tally-core.example.toml) is a file of all defaults; \
         `tally-core --config FILE --check-config` checks a file.",
        &tables(&tally_settings::schema::<Config>(), &json!(Config::default()), &[interpreted()]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo xtask references` writes it.
    #[test]
    fn the_committed_example_is_that_of_the_code() {
        let text = Reference::Example.text();
        assert_eq!(text, include_str!("../tally-core.example.toml"), "cargo xtask references");
    }

    #[test]
    fn every_key_of_the_configuration_is_documented() {
        let text = Reference::Configuration.text();
        let all = toml::Table::try_from(Config::default()).unwrap();
        let mut tables = vec![(String::new(), &all)];
        let mut keys = 0;
        while let Some((name, table)) = tables.pop() {
            for (key, value) in table {
                match value {
                    toml::Value::Table(inner) => {
                        let name =
                            if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                        assert!(text.contains(&format!("## `[{name}]`\n")), "{name}");
                        tables.push((name, inner));
                    }
                    _ => {
                        keys += 1;
                        let row =
                            text.lines().find(|line| line.starts_with(&format!("| `{key}` |")));
                        let meaning =
                            row.and_then(|row| row.rsplit(" | ").next()).unwrap_or_default();
                        assert!(meaning.len() > 10, "{name}.{key}: {row:?}");
                    }
                }
            }
        }
        assert!(keys > 60, "{keys}");
        assert!(
            text.contains("| `hold_ms_max` | number | `1_000` | 1 to 60_000 | ms | Longest "),
            "{text}"
        );
        let mut rows = text.lines().filter(|line| line.starts_with('|'));
        assert!(rows.all(|row| !row.contains("[`")), "links of doc comments lead nowhere: {text}");
    }
}
