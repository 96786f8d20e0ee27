//! `cargo xtask bindings`: what `sdk/c` needs of the contract, made by `wit-bindgen`'s
//! generator for C and committed, so that an author needs no generator. A test keeps it
//! what the contract says.

use crate::repository;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use wit_bindgen_core::Files;
use wit_parser::Resolve;

/// The world that a policy in C implements: all that there is to import, of which the linker keeps what is called.
/// What it may export besides is in `tally_events.h` and `tally_state.h`.
const WORLD: &str = "every-import";
const WORLD_TEXT: &str = "world every-import {
    include policy;
    import identity;
    import kernel-identity;
    import high-priority;
}
";
/// What its files and its own types are called.
const NAME: &str = "tally";

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail if what is committed is not what the contract says.
    #[arg(long)]
    check: bool,
}

/// Write them, or compare.
pub fn run(args: &Args) -> Result<()> {
    for (name, bytes) in generate()? {
        let path = folder().join(&name);
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

fn folder() -> PathBuf {
    repository().join("sdk/c/bindings")
}

/// Contents of the generated files by name.
fn generate() -> Result<BTreeMap<String, Vec<u8>>> {
    let contract = repository().join("wit/policy.wit");
    let text = fs::read_to_string(&contract).with_context(|| contract.display().to_string())?;
    let mut resolve = Resolve::default();
    let package = resolve.push_str("policy.wit", &format!("{text}\n{WORLD_TEXT}"))?;
    let world = resolve.select_world(&[package], Some(WORLD))?;
    let options =
        wit_bindgen_c::Opts { rename_world: Some(NAME.into()), ..wit_bindgen_c::Opts::default() };
    let mut files = Files::default();
    options.build().generate(&mut resolve, world, &mut files)?;
    Ok(files.iter().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_c_bindings_are_those_of_the_contract() {
        assert_eq!(generate().unwrap().len(), 3);
        run(&Args { check: true }).unwrap();
    }
}
