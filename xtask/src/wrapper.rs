//! Calls rustc for Cargo while guests are built, with the one flag mended that
//! would make a component depend on where the repository lies.
//!
//! Cargo tells crates apart by a hash (`-C metadata`). For a crate outside of the workspace, as the SDK is for
//! a policy, it hashes the crate's absolute path. The hash ends up in symbol names and type ids, and so in the
//! component. This wrapper replaces it with a hash of what identifies the crate wherever it lies. No setting of
//! Cargo does that, and policies could share a workspace with the SDK only in the repository's root, which
//! already has the core's.

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set for Cargo, so that a call with arguments is known to come from it.
pub const MARK: &str = "TALLY_XTASK_IS_RUSTC";

/// If Cargo calls this program in place of rustc, do that and do not return.
pub fn run_if_called() -> Result<()> {
    if std::env::var_os(MARK).is_none() {
        return Ok(());
    }
    let mut arguments = std::env::args().skip(1);
    let rustc = arguments.next().context("cargo names no rustc")?;
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let arguments = mended(arguments.collect(), &version);
    Err(Command::new(&rustc).args(arguments).exec()).with_context(|| format!("starting {rustc}"))
}

/// The arguments with another `metadata`. The hash must differ between crates of
/// one build, for which their name, version and features suffice.
fn mended(mut arguments: Vec<String>, version: &str) -> Vec<String> {
    let identity = |pair: &[String]| match &*pair[0] {
        "--crate-name" | "--crate-type" | "--cfg" => Some(pair[1].clone()),
        _ => None,
    };
    let mut identity: Vec<_> = arguments.windows(2).filter_map(identity).collect();
    identity.push(version.into());
    let hash = Sha256::digest(identity.join("\n"));
    let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    for argument in &mut arguments {
        if argument.starts_with("metadata=") {
            *argument = format!("metadata={hash}");
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(metadata: &str, rest: &[&str]) -> Vec<String> {
        let metadata = format!("metadata={metadata}");
        let mut call = vec!["--crate-name", "fifo", "-C", &metadata];
        call.extend(rest);
        mended(call.into_iter().map(String::from).collect(), "0.1.0")
    }

    #[test]
    fn the_metadata_depends_on_the_crate_and_not_on_cargo() {
        let one = call("1234", &["-C", "opt-level=3"]);
        assert_eq!(one, call("5678", &["-C", "opt-level=3"]));
        assert_eq!(one[..3], ["--crate-name", "fifo", "-C"]);
        assert!(one[3].starts_with("metadata=") && one[3] != "metadata=1234");
        assert_ne!(one[3], call("1234", &["--cfg", "feature=\"x\""])[3]);
        assert_eq!(one[4..], ["-C", "opt-level=3"]);
    }
}
