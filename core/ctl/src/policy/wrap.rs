//! `tallyctl policy wrap`: a component of what a compiler without components makes.

use crate::error::CtlError;
use clap::Args;
use std::path::{Path, PathBuf};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// `policy wrap`.
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

/// Wrap.
pub fn run(args: &WrapArgs) -> Result<(), CtlError> {
    let refused = |path: &Path, why: String| CtlError::Refused {
        message: format!("{}: {why}", path.display()),
    };
    let module = std::fs::read(&args.file).map_err(|e| refused(&args.file, e.to_string()))?;
    let component = component(module).map_err(|why| refused(&args.file, why))?;
    std::fs::write(&args.output, component).map_err(|e| refused(&args.output, e.to_string()))
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
    // Objects of `wit-bindgen` carry the contract that they were made from; else it is
    // this one's.
    let (stripped, _) = wit_component::metadata::decode(&module).map_err(|e| format!("{e:#}"))?;
    if stripped.is_none() {
        let mut resolve = Resolve::default();
        let world = resolve
            .push_str("policy.wit", crate::policy::CONTRACT)
            .and_then(|package| resolve.select_world(&[package], Some("policy")))
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
    fn a_module_without_the_functions_is_refused() {
        let empty = b"\0asm\x01\0\0\0".to_vec();
        let why = component(empty).unwrap_err();
        assert!(why.contains("scheduler") || why.contains("contract"), "{why}");
    }
}
