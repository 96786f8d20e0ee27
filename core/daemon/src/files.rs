//! Files as the core takes them in: regular ones, read whole from their start, up to a bound. Those of admin requests
//! come as descriptors that the peer opened with its own rights; the core opens only what its own configuration names.

use crate::helpers::{Helper, PeerFd};
use crate::links;
use crate::policy_slot::Source;
use rustix::fd::AsFd;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use tally_contract::limits::POLICY_CONFIG_BYTES_MAX;
use tally_trust::{SIGNATURE_BYTES_MAX, signature_file};

/// A file that takes longer to be read is given up: a regular file may be on a file system of the peer's making.
pub const READ_MAX: Duration = Duration::from_secs(10);

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{name}: is {what}: expected a regular file")]
    Kind {
        name: String,
        /// What kind of file it is, as a noun.
        what: &'static str,
    },
    #[error(
        "{name}: is a file of user {owner} behind a link of user {other}: expected a file of theirs, or a link of root's \
         or the core's own user"
    )]
    Misled { name: String, owner: u32, other: u32 },
    #[error("{name}: has more than {bytes_max} bytes, the most that is read")]
    TooLarge { name: String, bytes_max: usize },
    #[error("{name}: cannot be {done}: {source}")]
    Os {
        name: String,
        /// What was to be done.
        done: &'static str,
        source: Errno,
    },
}

fn see_that_regular(fd: impl AsFd, name: &str) -> Result<u64, FileError> {
    let os = |source| FileError::Os { name: name.into(), done: "looked at", source };
    let found = rustix::fs::fstat(fd).map_err(os)?;
    let what = match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => return Ok(found.st_size.max(0) as u64),
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "something else",
    };
    Err(FileError::Kind { name: name.into(), what })
}

/// All bytes of an open regular file; where its descriptor stands does not matter. `name` is what messages call it.
///
/// # Errors
/// If it is no regular file, has more than `bytes_max` bytes or cannot be read.
pub fn read(fd: impl AsFd, name: &str, bytes_max: usize) -> Result<Vec<u8>, FileError> {
    let too_large = || FileError::TooLarge { name: name.into(), bytes_max };
    let size = see_that_regular(fd.as_fd(), name)?;
    if size > bytes_max as u64 {
        return Err(too_large());
    }
    // One byte more than allowed tells: it may grow meanwhile, and some files say that they have none.
    let mut bytes = vec![0; (size as usize + 1).max(4096).min(bytes_max + 1)];
    let mut have = 0;
    loop {
        let got = rustix::io::retry_on_intr(|| {
            rustix::io::pread(fd.as_fd(), &mut bytes[have..], have as u64)
        })
        .map_err(|source| FileError::Os { name: name.into(), done: "read", source })?;
        have += got;
        if have > bytes_max {
            return Err(too_large());
        }
        if got == 0 {
            bytes.truncate(have);
            return Ok(bytes);
        }
        if have == bytes.len() {
            bytes.resize((2 * have).min(bytes_max + 1), 0);
        }
    }
}

/// Reads a file whose path the core's own configuration names.
///
/// # Errors
/// Likewise.
pub fn read_path(path: &Path, bytes_max: usize) -> Result<Vec<u8>, FileError> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let name = path.display().to_string();
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let fd = opened.map_err(|source| FileError::Os { name: name.clone(), done: "read", source })?;
    see_that_not_misled(&fd, path, &name)?;
    read(fd, &name, bytes_max)
}

/// Behind somebody's link is only what is theirs.
fn see_that_not_misled(fd: impl AsFd, path: &Path, name: &str) -> Result<(), FileError> {
    let os = |source| FileError::Os { name: name.into(), done: "looked at", source };
    let owner = rustix::fs::fstat(fd).map_err(os)?.st_uid;
    match links::owners(path).into_iter().find(|other| *other != owner) {
        Some(other) => Err(FileError::Misled { name: name.into(), owner, other }),
        None => Ok(()),
    }
}

/// A descriptor to write a new file through.
///
/// # Errors
/// If it is no regular file, not open for writing, or not empty.
pub fn check_output(fd: impl AsFd, name: &str) -> Result<(), String> {
    if see_that_regular(fd.as_fd(), name).map_err(|e| e.to_string())? != 0 {
        return Err(format!("{name}: is not empty: name a file that is not there"));
    }
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| format!("{name}: {e}"))?;
    let access = flags & OFlags::RWMODE;
    if flags.contains(OFlags::PATH) || (access != OFlags::WRONLY && access != OFlags::RDWR) {
        return Err(format!("{name}: is not open for writing"));
    }
    Ok(())
}

/// A policy's files in memory.
#[derive(Clone, Debug)]
pub struct PolicyFiles {
    /// Names of the files.
    pub source: Source,
    pub component: Vec<u8>,
    /// Its signature, if there is one.
    pub signature: Option<Vec<u8>>,
    /// Text of the configuration; empty without one.
    pub config_text: String,
}

fn text(bytes: Vec<u8>, name: &str) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|_| format!("policy configuration {name}: is not UTF-8"))
}

impl PolicyFiles {
    /// Read what the core's own configuration names.
    ///
    /// # Errors
    /// Everything an operator needs to know.
    pub fn read_own(source: &Source, component_bytes_max: usize) -> Result<Self, String> {
        let config_text = match &source.config_file {
            None => String::new(),
            Some(path) => {
                let read = read_path(path, POLICY_CONFIG_BYTES_MAX);
                text(
                    read.map_err(|e| format!("policy configuration {e}"))?,
                    &path.display().to_string(),
                )?
            }
        };
        let component = read_path(&source.file, component_bytes_max).map_err(|e| e.to_string())?;
        let signature = match read_path(&signature_file(&source.file), SIGNATURE_BYTES_MAX) {
            Ok(bytes) => Some(bytes),
            Err(FileError::Os { source: Errno::NOENT, .. }) => None,
            Err(error) => return Err(error.to_string()),
        };
        Ok(PolicyFiles { source: source.clone(), component, signature, config_text })
    }

    /// Read what a peer opened.
    ///
    /// # Errors
    /// Everything an operator needs to know.
    pub fn read_opened(
        source: Source,
        opened: Opened,
        component_bytes_max: usize,
    ) -> Result<Self, String> {
        let file = source.file.display().to_string();
        let Opened { component, config, signature } = opened;
        let config_text = match config {
            None => String::new(),
            Some(fd) => {
                let name = source
                    .config_file
                    .as_ref()
                    .map_or_else(String::new, |f| f.display().to_string());
                let read = read(fd, &name, POLICY_CONFIG_BYTES_MAX);
                text(read.map_err(|e| format!("policy configuration {e}"))?, &name)?
            }
        };
        let component = read(component, &file, component_bytes_max).map_err(|e| e.to_string())?;
        let signature = signature.map(|fd| read(fd, &format!("{file}.sig"), SIGNATURE_BYTES_MAX));
        let signature = signature.transpose().map_err(|e| e.to_string())?;
        Ok(PolicyFiles { source, component, signature, config_text })
    }
}

/// Descriptors of a policy's files.
#[derive(Debug)]
pub struct Opened {
    component: PeerFd,
    config: Option<PeerFd>,
    signature: Option<PeerFd>,
}

impl Opened {
    /// The helper threads of the peer's user, which read and close these files.
    pub fn helper(&self) -> &Helper {
        self.component.helper()
    }
}

/// The descriptors of an admin request, by their roles ([`tally_ipc::admin`]).
#[derive(Debug, Default)]
pub struct Descriptors(BTreeMap<String, PeerFd>);

impl Descriptors {
    /// # Errors
    /// If roles and descriptors do not go together.
    pub fn new(roles: Vec<String>, fds: Vec<PeerFd>) -> Result<Self, String> {
        if roles.len() != fds.len() {
            return Err(format!(
                "`files` names {} files and {} descriptors came with the request",
                roles.len(),
                fds.len()
            ));
        }
        let named = roles.len();
        let all: BTreeMap<_, _> = roles.into_iter().zip(fds).collect();
        if all.len() != named {
            return Err("`files` names one twice".into());
        }
        Ok(Descriptors(all))
    }

    /// Takes the descriptor of a role out, if there is one.
    pub fn take(&mut self, role: &str) -> Option<PeerFd> {
        self.0.remove(role)
    }

    /// Those of a policy, whose roles begin with `prefix`.
    ///
    /// # Errors
    /// If the component is not there, or a configuration is named and not there, or the other way round.
    pub fn policy(&mut self, prefix: &str, source: &Source) -> Result<Opened, String> {
        let mut take = |role: &str| self.take(&format!("{prefix}{role}"));
        let (component, config, signature) = (take("component"), take("config"), take("signature"));
        let absent = |role: &str| {
            format!(
                "the file `{prefix}{role}` did not come with the request: the core opens no file that it is told of, \
                 who asks passes a descriptor"
            )
        };
        if config.is_some() != source.config_file.is_some() {
            return Err(absent("config"));
        }
        Ok(Opened { component: component.ok_or_else(|| absent("component"))?, config, signature })
    }

    /// # Errors
    /// If there is one that the request does not take.
    pub fn end(self) -> Result<(), String> {
        match self.0.into_keys().next() {
            Some(role) => Err(format!("this request takes no file `{role}`")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    fn open(path: &Path) -> rustix::fd::OwnedFd {
        tally_ipc::admin::open_to_read("component", path).unwrap().fd
    }

    #[test]
    fn regular_files_are_read_whole_up_to_the_bound() {
        let mut file = tempfile::tempfile().unwrap();
        for bytes in [0, 1, 4_095, 4_096, 10_000] {
            file.set_len(0).unwrap();
            file.rewind().unwrap();
            file.write_all(&vec![7; bytes]).unwrap();
            // It stands at its end.
            assert_eq!(read(&file, "x", 10_000).unwrap(), vec![7; bytes]);
        }
        let error = read(&file, "named", 9_999).unwrap_err().to_string();
        assert!(error.contains("named") && error.contains("9999"), "{error}");
        // It says that it has no bytes.
        let status = open(Path::new("/proc/self/status"));
        assert!(read(&status, "status", 1 << 20).unwrap().starts_with(b"Name:"));
        assert!(matches!(read(&status, "status", 10), Err(FileError::TooLarge { .. })));
    }

    #[test]
    fn what_is_no_regular_file_is_named_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let kind = FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for (path, what) in
            [(&*fifo, "a FIFO"), (Path::new("/dev/zero"), "a device"), (dir.path(), "a directory")]
        {
            for error in [read(open(path), "named", 10), read_path(path, 10)] {
                let error = error.unwrap_err().to_string();
                assert!(
                    error.contains(what) && error.contains("expected a regular file"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn outputs_are_empty_files_open_for_writing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let out = tally_ipc::admin::create("out", &path).unwrap().fd;
        check_output(&out, "out").unwrap();
        assert!(check_output(open(&path), "out").unwrap_err().contains("not open for writing"));
        std::fs::write(&path, "x").unwrap();
        assert!(check_output(&out, "out").unwrap_err().contains("not empty"));
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        assert!(check_output(&null, "out").unwrap_err().contains("a device"));
    }

    #[test]
    fn roles_and_descriptors_go_together() {
        let source = Source { file: "/p".into(), config_file: None };
        let helper = crate::helpers::Helpers::default().of(crate::quota::User::Uid(1), false);
        let fd = || helper.keep(open(Path::new("/dev/null")));
        assert!(Descriptors::new(vec!["a".into()], vec![]).unwrap_err().contains("1 files and 0"));
        assert!(Descriptors::new(vec!["a".into(), "a".into()], vec![fd(), fd()]).is_err());
        let mut none = Descriptors::default();
        assert!(none.policy("a.", &source).unwrap_err().contains("a.component"));
        let mut all =
            Descriptors::new(vec!["component".into(), "x".into()], vec![fd(), fd()]).unwrap();
        all.policy("", &source).unwrap();
        assert!(all.end().unwrap_err().contains('x'));
    }
}
