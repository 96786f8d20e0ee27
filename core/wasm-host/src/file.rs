//! A component and what stands beside it, as somebody has read it. The host itself opens no files.

use crate::LoadError;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use tally_ipc::text::printable;
use tally_trust::{SIGNATURE_BYTES_MAX, signature_file};

/// The bytes of a component, of its signature, and what they are called.
#[derive(Clone, Debug)]
pub struct ComponentFile {
    pub(crate) name: String,
    /// The file's name in messages.
    pub(crate) file: String,
    pub(crate) path: Option<PathBuf>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) signature: Option<Vec<u8>>,
}

impl ComponentFile {
    /// Bytes that came from this path, which is not opened: messages and status show it, and the policy has its name.
    pub fn new(path: &Path, bytes: Vec<u8>, signature: Option<Vec<u8>>) -> Self {
        let stem = path.file_stem().unwrap_or(path.as_os_str());
        ComponentFile {
            name: printable(stem.to_string_lossy().into_owned()),
            file: printable(path.display().to_string()),
            path: Some(path.into()),
            bytes,
            signature,
        }
    }

    /// Bytes without a file or a signature.
    pub fn from_memory(name: &str, bytes: Vec<u8>) -> Self {
        let name = printable(name.into());
        ComponentFile { file: name.clone(), name, path: None, bytes, signature: None }
    }

    /// Read a component, and the signature beside it if `signed`. Of a longer one than `bytes_max`, one byte more is
    /// read, for it may be anything, and endless.
    ///
    /// # Errors
    /// [`LoadError::Read`].
    pub fn read(path: &Path, bytes_max: usize, signed: bool) -> Result<Self, LoadError> {
        let bytes = read(path, bytes_max)?;
        let signature = if signed { signature_of(path)? } else { None };
        Ok(ComponentFile::new(path, bytes, signature))
    }
}

fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, LoadError> {
    let unreadable =
        |source| LoadError::Read { file: printable(path.display().to_string()), source };
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(unreadable)?;
    opened.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// What is in the file beside a policy that is its signature, if there is one.
fn signature_of(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    match read(&signature_file(path), SIGNATURE_BYTES_MAX) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(LoadError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
