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
    /// Where to put the component.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

pub fn run(args: &WrapArgs) -> Result<(), CtlError> {
    let refused = |path: &Path, why: String| CtlError::Failed(format!("{}: {why}", path.display()));
    let module = std::fs::read(&args.file).map_err(|e| refused(&args.file, e.to_string()))?;
    let component = component(module).map_err(|why| refused(&args.file, why))?;
    std::fs::write(&args.output, component).map_err(|e| refused(&args.output, e.to_string()))
}

/// What a module exports that keeps what it learnt.
const STATE: &str = "tally:policy/state@0.1.2#snapshot";

/// Whether the module exports something of that name.
fn exports(module: &[u8], wanted: &str) -> Result<bool, String> {
    for payload in Parser::new(0).parse_all(module) {
        if let Payload::ExportSection(section) = payload.map_err(|e| e.to_string())? {
            let names: Result<Vec<_>, _> = section.into_iter().map(|e| Ok(e?.name)).collect();
            return names
                .map(|all| all.contains(&wanted))
                .map_err(|e: BinaryReaderError| e.to_string());
        }
    }
    Ok(false)
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
    // `sdk/c` know nothing of `state`; else it is this one's.
    let keeps_state = exports(&module, STATE)?;
    let (stripped, bound) =
        wit_component::metadata::decode(&module).map_err(|e| format!("{e:#}"))?;
    let knows_state = || {
        let exports = bound.resolve.worlds[bound.world].exports.keys();
        exports.map(|key| bound.resolve.name_world_key(key)).any(|name| STATE.starts_with(&name))
    };
    if stripped.is_none() || (keeps_state && !knows_state()) {
        module = stripped.unwrap_or(module);
        let world = if keeps_state { "stateful-policy" } else { "policy" };
        let mut resolve = Resolve::default();
        let world = resolve
            .push_str("policy.wit", crate::policy::CONTRACT)
            .and_then(|package| resolve.select_world(&[package], Some(world)))
            .map_err(|e| format!("this tallyctl's contract: {e:#}"))?;
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
    fn a_module_that_keeps_what_it_learnt_is_told_by_its_exports() {
        // One function without parameters or results, exported by that name.
        let module = |name: &str| {
            let mut bytes = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0".to_vec();
            bytes.extend([7, name.len() as u8 + 4, 1, name.len() as u8]);
            bytes.extend(name.as_bytes());
            bytes.extend(b"\0\0\x0a\x04\x01\x02\0\x0b");
            bytes
        };
        assert_eq!(exports(&module(STATE), STATE), Ok(true));
        assert_eq!(exports(&module("snapshot"), STATE), Ok(false));
        let mut cut = module(STATE);
        cut.truncate(40);
        assert!(exports(&cut, STATE).is_err());
        // Of the contract's own release, or nothing would be found.
        let version = STATE.split(['@', '#']).nth(1).unwrap();
        assert!(crate::policy::CONTRACT.contains(&format!("package tally:policy@{version};")));
    }

    #[test]
    fn a_module_without_the_functions_is_refused() {
        let empty = b"\0asm\x01\0\0\0".to_vec();
        let why = component(empty).unwrap_err();
        assert!(why.contains("scheduler") || why.contains("contract"), "{why}");
    }
}
