//! Where the built programs, libraries and policies are.

use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};

/// Names another folder to take everything from (an unpacked bundle).
pub const ENV_BIN_DIR: &str = "TALLY_BIN_DIR";
/// What to do when something is missing.
const HINT: &str = "run `cargo xtask test` or `cargo xtask demo`, which build everything first";

/// The folder with everything that was built.
#[derive(Clone, Debug)]
pub struct Artefacts {
    dir: PathBuf,
}

impl Artefacts {
    /// `$TALLY_BIN_DIR`, else the folder this program was built into.
    ///
    /// # Errors
    /// If this program's own place cannot be found out.
    pub fn locate() -> Result<Self> {
        if let Some(dir) = std::env::var_os(ENV_BIN_DIR) {
            return Ok(Self::at(dir));
        }
        let program = std::env::current_exe()?;
        let dir = program.parent().unwrap_or(Path::new("."));
        // Tests are one folder below the programs.
        let dir = if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir };
        Ok(Self::at(dir))
    }

    /// Artefacts that were built into `dir`.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A program or library.
    ///
    /// # Errors
    /// If it was not built; the message says how to.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.dir.join(name);
        ensure!(path.is_file(), "{} is missing: {HINT}", path.display());
        Ok(path)
    }

    /// A policy of `policies/`.
    ///
    /// # Errors
    /// If it was not built.
    pub fn policy(&self, name: &str) -> Result<PathBuf> {
        self.file(&format!("policies/{name}.wasm"))
    }

    /// A misbehaving guest of `tests/policies/`.
    ///
    /// # Errors
    /// If it was not built.
    pub fn test_policy(&self, name: &str) -> Result<PathBuf> {
        self.file(&format!("test-policies/{name}.wasm"))
    }
}

/// The newest version of glibc that a library's symbols need, told by the versions' names in it; `None` if
/// it needs none.
pub fn newest_glibc(library: &[u8]) -> Option<(u32, u32)> {
    const NAME: &[u8] = b"\0GLIBC_";
    let starts = library.windows(NAME.len()).enumerate().filter(|(_, bytes)| *bytes == NAME);
    let versions = starts.filter_map(|(at, _)| {
        let version = library[at + NAME.len()..].split(|byte| *byte == 0).next()?;
        let mut numbers = std::str::from_utf8(version).ok()?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_found() {
        let library = b"x\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.17\0";
        assert_eq!(newest_glibc(library), Some((2, 34)));
        assert_eq!(newest_glibc(b"\0GLIBCXX_3.4\0"), None);
    }
}
