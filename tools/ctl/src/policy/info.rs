//! `tallyctl policy info`: what a component may do and is told, read from its file.

use crate::error::CtlError;
use clap::Args;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use wasmparser::{Parser, Payload};

/// Interfaces of the contract are called so in a component, and end with `@` and a version.
const PACKAGE: &str = "tally:policy/";
/// Interfaces that have to be granted.
const CAPABILITIES: [&str; 3] = ["identity", "kernel-identity", "high-priority"];
/// Interfaces of events, which a policy subscribes to by exporting them.
const EVENTS: [&str; 5] = ["activity", "units", "completions", "membership", "timer"];
/// Interfaces without functions, or that every policy has.
const SILENT: [&str; 2] = ["types", "scheduler"];

#[derive(Debug, Args)]
pub struct InfoArgs {
    /// The component to describe
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print JSON (schema 1).
    #[arg(long)]
    pub json: bool,
}

/// What a file says of a policy.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Info {
    /// Version of this structure.
    schema: u32,
    /// Version of the contract.
    contract: String,
    /// Capabilities that have to be granted.
    needs: Vec<String>,
    /// Other interfaces that it uses.
    uses: Vec<String>,
    /// Events that it is told of.
    told: Vec<String>,
    /// It keeps what it learned over a reload.
    keeps_state: bool,
    /// Imports and exports that are none of this contract.
    unknown: Vec<String>,
}

impl Info {
    /// Reads a component's bytes; an error says what is wrong with them.
    fn of(bytes: &[u8]) -> Result<Self, String> {
        if !bytes.starts_with(b"\0asm\x0d\0\x01\0") {
            return Err(
                "is not a component: `tallyctl policy wrap` makes one of a core module".into()
            );
        }
        let mut info = Info { schema: 1, ..Info::default() };
        let mut depth = 0_u32;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload.map_err(|e| e.to_string())? {
                Payload::ComponentImportSection(section) if depth == 0 => {
                    for import in section {
                        info.import(import.map_err(|e| e.to_string())?.name.name);
                    }
                }
                Payload::ComponentExportSection(section) if depth == 0 => {
                    for export in section {
                        info.export(export.map_err(|e| e.to_string())?.name.name);
                    }
                }
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        Ok(info)
    }

    /// The bare name of an interface of the contract; else notes it as unknown.
    fn bare<'a>(&mut self, name: &'a str) -> Option<&'a str> {
        match name.strip_prefix(PACKAGE).and_then(|rest| rest.split_once('@')) {
            Some((bare, version)) => {
                self.contract = version.into();
                Some(bare)
            }
            None => {
                self.unknown.push(name.into());
                None
            }
        }
    }

    fn import(&mut self, name: &str) {
        let Some(bare) = self.bare(name) else { return };
        if CAPABILITIES.contains(&bare) {
            self.needs.push(bare.into());
        } else if !SILENT.contains(&bare) {
            self.uses.push(bare.into());
        }
    }

    fn export(&mut self, name: &str) {
        let Some(bare) = self.bare(name) else { return };
        if EVENTS.contains(&bare) {
            self.told.push(bare.into());
        } else if bare == "state" {
            self.keeps_state = true;
        } else if !SILENT.contains(&bare) {
            self.unknown.push(name.into());
        }
    }
}

pub fn run(args: &InfoArgs) -> Result<(), CtlError> {
    let file = args.file.display();
    let refused = |why: String| CtlError::Refused { message: format!("{file}: {why}") };
    let bytes = super::read_component(&args.file).map_err(refused)?;
    let info = Info::of(&bytes).map_err(refused)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let text =
            serde_json::to_string_pretty(&info).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let list =
        |names: &[String]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
    writeln!(out, "{file}: a policy for contract {}", info.contract)?;
    writeln!(out, "  has to be granted  {}", list(&info.needs))?;
    writeln!(out, "  uses               {}", list(&info.uses))?;
    writeln!(out, "  is told of         {}", list(&info.told))?;
    let kept = if info.keeps_state { "kept over a reload" } else { "lost at a reload" };
    writeln!(out, "  what it learns is  {kept}")?;
    if !info.unknown.is_empty() {
        writeln!(out, "  not understood     {}", list(&info.unknown))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_and_exports_say_what_a_policy_is() {
        let mut info = Info::default();
        for name in ["types", "log", "identity", "high-priority"] {
            info.import(&format!("{PACKAGE}{name}@0.1.3"));
        }
        info.import("wasi:clocks/wall-clock@0.2.0");
        for name in ["scheduler", "timer", "state", "placement"] {
            info.export(&format!("{PACKAGE}{name}@0.1.3"));
        }
        let expected = Info {
            schema: 0,
            contract: "0.1.3".into(),
            needs: vec!["identity".into(), "high-priority".into()],
            uses: vec!["log".into()],
            told: vec!["timer".into()],
            keeps_state: true,
            unknown: vec![
                "wasi:clocks/wall-clock@0.2.0".into(),
                "tally:policy/placement@0.1.3".into(),
            ],
        };
        assert_eq!(info, expected);
    }

    #[test]
    fn what_is_no_component_is_refused() {
        for bytes in [&b""[..], b"hello", b"\0asm\x01\0\0\0"] {
            assert!(Info::of(bytes).unwrap_err().contains("not a component"));
        }
        assert!(Info::of(b"\0asm\x0d\0\x01\0\x0b\xff").is_err());
    }

    #[test]
    fn every_interface_of_the_contract_has_its_place() {
        for name in CAPABILITIES.iter().chain(&EVENTS).chain(&SILENT) {
            assert!(crate::policy::CONTRACT.contains(&format!("\ninterface {name} {{")), "{name}");
        }
    }

    #[cfg(feature = "wasm")]
    #[test]
    fn the_capabilities_are_the_hosts() {
        assert_eq!(tally_wasm_host::Capability::ALL.map(|one| one.name()), CAPABILITIES);
    }
}
