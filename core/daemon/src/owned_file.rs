//! Files that the core keeps for itself: read with suspicion, replaced whole.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum OwnedError {
    #[error("it cannot be read ({0})")]
    Io(#[from] std::io::Error),
    /// It is not a plain file, or another user's.
    #[error("it is not a plain file of the core's user or root")]
    NotOurs,
    #[error("it has more than {0} bytes")]
    Oversized(usize),
}

/// Read a plain file of the core's user or root, of at most `bytes_max`.
///
/// # Errors
/// Why not.
pub fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, OwnedError> {
    use rustix::fs::OFlags;
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let about = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !about.is_file() || (about.uid() != own && about.uid() != 0) {
        return Err(OwnedError::NotOurs);
    }
    let mut bytes = Vec::new();
    file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        return Err(OwnedError::Oversized(bytes_max));
    }
    Ok(bytes)
}

/// Put a file in the place of another, in one step; for the core's user alone (0600).
///
/// # Errors
/// The error of the system call that failed.
pub fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = crate::config::socket_folder(path);
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    // Two cores may share a folder.
    let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    let written = (|| {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
