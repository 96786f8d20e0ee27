//! `cargo xtask bindings`: what `sdk/c` and `sdk/rust` need of the contract, made by
//! `wit-bindgen`'s generators and committed, so that no author of a policy builds a
//! generator. A test keeps them what the contract says.

use crate::repository;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use wit_bindgen_core::{Files, WorldGenerator};
use wit_bindgen_rust::WithOption;
use wit_parser::Resolve;

/// The world that a policy implements: all that there is to import, of which the linker keeps what is called.
/// In C, what it may export besides is in `tally_events.h` and `tally_state.h`.
const WORLD: &str = "every-import";
const WORLD_TEXT: &str = "world every-import {
    include policy;
    import identity;
    import kernel-identity;
    import high-priority;
}
";
/// What C's files and types are called.
const NAME: &str = "tally";
/// What a policy in Rust may export besides: a module and a macro for each, so that it exports only what it asks
/// for; and whether it uses [`TYPES`].
const OPTIONAL: [(&str, bool); 6] = [
    ("activity", false),
    ("units", true),
    ("completions", true),
    ("membership", true),
    ("timer", false),
    ("state", false),
];
/// An interface, and where the SDK has its types.
const TYPES: (&str, &str) =
    ("tally:policy/types@0.1.0", "crate::bindings::scheduler::tally::policy::types");

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail if what is committed is not what the contract says.
    #[arg(long)]
    check: bool,
}

/// Write them, or compare.
pub fn run(args: &Args) -> Result<()> {
    for (name, bytes) in c()?.into_iter().chain(rust()?) {
        let path = repository().join("sdk").join(&name);
        if args.check {
            let committed = fs::read(&path).with_context(|| path.display().to_string())?;
            ensure!(
                committed == bytes,
                "{} is not what wit/policy.wit says: run `cargo xtask bindings`",
                path.display()
            );
        } else {
            fs::write(&path, bytes).with_context(|| path.display().to_string())?;
            println!("{}", path.display());
        }
    }
    Ok(())
}

/// Contents of generated files by name, below `sdk`.
type Generated = BTreeMap<PathBuf, Vec<u8>>;

fn c() -> Result<Generated> {
    let options =
        wit_bindgen_c::Opts { rename_world: Some(NAME.into()), ..wit_bindgen_c::Opts::default() };
    let files = generate(&mut *options.build(), WORLD, WORLD_TEXT)?;
    let in_folder =
        |(name, bytes): (&str, &[u8])| (PathBuf::from("c/bindings").join(name), bytes.to_vec());
    Ok(files.iter().map(in_folder).collect())
}

fn rust() -> Result<Generated> {
    let mut generated = Generated::new();
    let scheduler = rust_module("scheduler", WORLD, WORLD_TEXT, None)?;
    generated.insert("rust/src/bindings/scheduler.rs".into(), scheduler);
    for (module, uses_types) in OPTIONAL {
        let text = format!("world optional-{module} {{ export {module}; }}\n");
        let elsewhere = uses_types.then_some(TYPES);
        let bytes = rust_module(module, &format!("optional-{module}"), &text, elsewhere)?;
        generated.insert(format!("rust/src/bindings/{module}.rs").into(), bytes);
    }
    Ok(generated)
}

fn rust_module(
    module: &str,
    world: &str,
    text: &str,
    elsewhere: Option<(&str, &str)>,
) -> Result<Vec<u8>> {
    let options = wit_bindgen_rust::Opts {
        format: true,
        generate_all: true,
        pub_export_macro: true,
        export_macro_name: Some(format!("export_{module}")),
        additional_derive_attributes: vec!["PartialEq".into()],
        with: elsewhere
            .map(|(interface, path)| (interface.into(), WithOption::Path(path.into())))
            .into_iter()
            .collect(),
        ..wit_bindgen_rust::Opts::default()
    };
    let files = generate(&mut options.build(), world, text)?;
    let (_, bytes) = files.iter().next().context("no file was generated")?;
    Ok(bytes.to_vec())
}

fn generate(generator: &mut dyn WorldGenerator, world: &str, text: &str) -> Result<Files> {
    let contract = repository().join("wit/policy.wit");
    let contract_text =
        fs::read_to_string(&contract).with_context(|| contract.display().to_string())?;
    let mut resolve = Resolve::default();
    let package = resolve.push_str("policy.wit", &format!("{contract_text}\n{text}"))?;
    let world = resolve.select_world(&[package], Some(world))?;
    let mut files = Files::default();
    generator.generate(&mut resolve, world, &mut files)?;
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_bindings_are_those_of_the_contract() {
        assert_eq!(c().unwrap().len(), 3);
        assert_eq!(rust().unwrap().len(), 1 + OPTIONAL.len());
        run(&Args { check: true }).unwrap();
    }
}
