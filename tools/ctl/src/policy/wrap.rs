//! `tallyctl policy wrap`: a component of what a compiler without components makes.

use crate::error::CtlError;
use clap::Args;
use std::path::{Path, PathBuf};
use wasmparser::{BinaryReaderError, Parser, Payload};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

#[derive(Debug, Args)]
pub struct WrapArgs {
    /// The core module: exports the functions of the contract's `scheduler` by the names
    /// of the component model's ABI, as `sdk/c` has them made.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// File to write the component to.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

pub fn run(args: &WrapArgs) -> Result<(), CtlError> {
    let refused = |path: &Path, why: String| CtlError::Failed(format!("{}: {why}", path.display()));
    let module = super::read_component(&args.file).map_err(|why| refused(&args.file, why))?;
    let component = component(module).map_err(|why| refused(&args.file, why))?;
    std::fs::write(&args.output, component).map_err(|e| refused(&args.output, e.to_string()))
}

/// What interfaces of the contract are called in a module's exports.
const PACKAGE: &str = "tally:policy/";
/// Interfaces that a policy may export or not.
const OPTIONAL: [&str; 6] = ["activity", "units", "completions", "membership", "timer", "state"];

/// The optional interfaces that a module exports functions of, with their versions.
fn exported(module: &[u8]) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        if let Payload::ExportSection(section) = payload.map_err(|e| e.to_string())? {
            for export in section {
                let name = export.map_err(|e: BinaryReaderError| e.to_string())?.name;
                let Some((interface, _)) = name.split_once('#') else { continue };
                let bare = interface.strip_prefix(PACKAGE).and_then(|rest| rest.split('@').next());
                if bare.is_some_and(|bare| OPTIONAL.contains(&bare)) {
                    found.push(interface.to_owned());
                }
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// A world of this contract that imports all there is and exports `scheduler` and these.
fn world(exported: &[String]) -> String {
    // In the contract's own package an interface of it goes by its bare name; what names another version stays whole,
    // and is refused.
    let version = crate::policy::CONTRACT
        .lines()
        .find_map(|line| line.strip_prefix("package tally:policy@")?.strip_suffix(';'));
    let here = format!("@{}", version.unwrap_or_default());
    let exports: String = exported
        .iter()
        .map(|name| {
            let bare = name.strip_prefix(PACKAGE).and_then(|name| name.strip_suffix(&here));
            format!("    export {};\n", bare.unwrap_or(name))
        })
        .collect();
    format!(
        "{}\nworld wrapped {{\n    include policy;\n    import identity;\n    import kernel-identity;\n    \
         import high-priority;\n{exports}}}\n",
        crate::policy::CONTRACT
    )
}

/// The component, or what is wrong with the module.
fn component(mut module: Vec<u8>) -> Result<Vec<u8>, String> {
    const CORE: &[u8] = b"\0asm\x01\0\0\0";
    if !module.starts_with(CORE) {
        return Err(if module.starts_with(b"\0asm") {
            "is a component already: nothing to wrap".into()
        } else {
            "is not a core WebAssembly module: give what `wasm-ld` made".into()
        });
    }
    // Objects of `wit-bindgen` carry the contract that they were made from, and those of
    // `sdk/c` know nothing of the optional interfaces; else it is this one's.
    let exported = exported(&module)?;
    let (stripped, bound) =
        wit_component::metadata::decode(&module).map_err(|e| format!("{e:#}"))?;
    let knows_all = || {
        let names = bound.resolve.worlds[bound.world].exports.keys();
        let names: Vec<_> = names.map(|key| bound.resolve.name_world_key(key)).collect();
        exported.iter().all(|name| names.contains(name))
    };
    if stripped.is_none() || !knows_all() {
        module = stripped.unwrap_or(module);
        let mut resolve = Resolve::default();
        let world = resolve
            .push_str("policy.wit", &world(&exported))
            .and_then(|package| resolve.select_world(&[package], Some("wrapped")))
            .map_err(|e| {
                format!("it exports another version of this tallyctl's contract: {e:#}")
            })?;
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false)
            .map_err(|e| format!("{e:#}"))?;
    }
    let mut encoder = ComponentEncoder::default();
    let encoder = encoder.module(&module).map_err(|e| format!("{e:#}"))?;
    encoder.validate(true).encode().map_err(|e| {
        format!("does not fit the contract (wit/policy.wit): {e:#}. Were its functions left out?")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_core_module_is_told_apart() {
        assert!(component(b"hello".to_vec()).unwrap_err().contains("not a core"));
        let component_header = b"\0asm\x0d\0\x01\0".to_vec();
        assert!(component(component_header).unwrap_err().contains("already"));
    }

    #[test]
    fn optional_interfaces_are_told_by_the_exports() {
        // One function without parameters or results, exported by that name.
        let module = |name: &str| {
            let mut bytes = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0".to_vec();
            bytes.extend([7, name.len() as u8 + 4, 1, name.len() as u8]);
            bytes.extend(name.as_bytes());
            bytes.extend(b"\0\0\x0a\x04\x01\x02\0\x0b");
            bytes
        };
        let state = "tally:policy/state@0.1.0";
        assert_eq!(exported(&module("tally:policy/state@0.1.0#snapshot")), Ok(vec![state.into()]));
        for other in
            ["snapshot", "tally:policy/scheduler@0.1.0#init", "tally:policy/placement@0.1.0#f"]
        {
            assert_eq!(exported(&module(other)), Ok(vec![]), "{other}");
        }
        let mut short = module("tally:policy/state@0.1.0#snapshot");
        short.truncate(40);
        assert!(exported(&short).is_err());
    }

    #[test]
    fn the_world_of_every_interface_is_one_of_the_contract() {
        let all: Vec<String> =
            OPTIONAL.iter().map(|name| format!("{PACKAGE}{name}@0.1.0")).collect();
        let mut resolve = Resolve::default();
        let package = resolve.push_str("policy.wit", &world(&all)).unwrap();
        assert!(resolve.select_world(&[package], Some("wrapped")).is_ok());
    }

    #[test]
    fn a_module_without_the_functions_is_refused() {
        let empty = b"\0asm\x01\0\0\0".to_vec();
        let why = component(empty).unwrap_err();
        assert!(why.contains("scheduler") || why.contains("contract"), "{why}");
    }
}
