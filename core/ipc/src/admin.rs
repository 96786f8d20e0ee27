//! Admin requests over the core's admin socket: one JSON object a line, one answer a line. A request that is about
//! files carries their descriptors: who asks opens them, with its own rights; the core opens no path that it is told.
//!
//! `"files"` in a request names the descriptors in their order: `component`, `config`, `signature`; of an A/B test
//! `a.component` and so on; `out` for what is written. Paths in requests are names to show people, and nothing else.

use crate::frame::{
    ALLOWED_MAX, DESCRIPTORS_MAX, Peeked, peek, receive_message, send_when_allowed,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tally_contract::limits::REQUEST_BYTES_MAX;

/// A descriptor and what it is.
#[derive(Debug)]
pub struct File {
    pub role: String,
    pub fd: OwnedFd,
}

fn named(path: &Path, error: impl Into<Error>) -> Error {
    let error = error.into();
    Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Open a file to be read by the core. Does not wait at a FIFO, which the core refuses.
///
/// # Errors
/// Why not; names the file.
pub fn open_to_read(role: &str, path: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| named(path, e))?;
    Ok(File { role: role.into(), fd })
}

/// Make a file for the core to write, which is not there yet; for this user alone.
///
/// # Errors
/// Why not; names the file.
pub fn create(role: &str, path: &Path) -> Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| named(path, e))?;
    Ok(File { role: role.into(), fd })
}

/// The files of a policy: the component, its configuration if it has one, and the signature beside it if there is one.
/// `prefix` goes before their roles.
///
/// # Errors
/// Which cannot be opened, and why.
pub fn policy(prefix: &str, component: &Path, config: Option<&Path>) -> Result<Vec<File>> {
    let mut files = vec![open_to_read(&format!("{prefix}component"), component)?];
    if let Some(config) = config {
        files.push(open_to_read(&format!("{prefix}config"), config)?);
    }
    let mut signature = component.as_os_str().to_owned();
    signature.push(".sig");
    match open_to_read(&format!("{prefix}signature"), Path::new(&signature)) {
        Ok(file) => files.push(file),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(files)
}

/// Send a request, one line with its end, and its files. If the core does not take them it is asked without, and says
/// why.
///
/// # Errors
/// The error of the system call that failed.
pub fn send(socket: &UnixStream, line: &[u8], files: &[File]) -> Result<()> {
    if files.len() > DESCRIPTORS_MAX {
        return Err(Error::other(format!("a request has at most {DESCRIPTORS_MAX} files")));
    }
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.fd.as_fd()).collect();
    let sent = match send_when_allowed(socket.as_fd(), line, &fds, ALLOWED_MAX) {
        Ok(Some(sent)) => sent,
        // It has answered already.
        Ok(None) => return Ok(()),
        Err(Errno::PERM) => 0,
        Err(error) => return Err(error.into()),
    };
    let mut socket = socket;
    socket.write_all(&line[sent..])
}

/// The core's side: collects requests as they come. `F`: what is kept of a descriptor.
#[derive(Debug)]
pub struct Requests<F = OwnedFd> {
    bytes: Vec<u8>,
    fds: Vec<F>,
}

impl<F> Default for Requests<F> {
    fn default() -> Self {
        Requests { bytes: Vec::new(), fds: Vec::new() }
    }
}

#[derive(Debug)]
pub enum Incoming<F = OwnedFd> {
    /// A line, and the descriptors that came with it.
    Line(Vec<u8>, Vec<F>),
    /// A line of more than [`REQUEST_BYTES_MAX`] bytes.
    TooLong,
}

/// Bytes received at once.
const PIECE: usize = 4096;

impl<F> Requests<F> {
    /// A request that has come whole.
    pub fn take(&mut self) -> Option<Incoming<F>> {
        let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
            return (self.bytes.len() > REQUEST_BYTES_MAX).then_some(Incoming::TooLong);
        };
        let rest = self.bytes.split_off(end + 1);
        let line = std::mem::replace(&mut self.bytes, rest);
        if line.len() > REQUEST_BYTES_MAX {
            return Some(Incoming::TooLong);
        }
        Some(Incoming::Line(line, std::mem::take(&mut self.fds)))
    }

    /// What is to be received next: nothing of the request that follows, whose descriptors would count as this one's.
    ///
    /// # Errors
    /// The error of the system call that failed; [`ErrorKind::WouldBlock`] if nothing has come.
    pub fn peek(&self, socket: BorrowedFd<'_>) -> Result<Peeked> {
        let mut piece = [0; PIECE];
        let peeked = peek(socket, &mut piece)?;
        let line = piece[..peeked.bytes].iter().position(|byte| *byte == b'\n');
        Ok(Peeked { bytes: line.map_or(peeked.bytes, |end| end + 1), ..peeked })
    }

    /// Take what was looked at, without waiting. False at the end.
    ///
    /// # Errors
    /// The error of the system call that failed; [`ErrorKind::WouldBlock`] if nothing has come.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        peeked: Peeked,
        keep: impl FnMut(OwnedFd) -> F,
    ) -> Result<bool> {
        let mut piece = [0; PIECE];
        let piece = &mut piece[..peeked.bytes.min(PIECE)];
        let fds = (&mut self.fds, DESCRIPTORS_MAX);
        let got = receive_message(socket, piece, fds, RecvFlags::DONTWAIT, keep)?;
        self.bytes.extend(&piece[..got]);
        Ok(got > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_comes_with_its_files_and_the_next_one_with_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.wasm");
        std::fs::write(&path, "x").unwrap();
        std::fs::write(dir.path().join("p.wasm.sig"), "y").unwrap();
        let files = policy("a.", &path, Some(&path)).unwrap();
        let roles: Vec<_> = files.iter().map(|file| &*file.role).collect();
        assert_eq!(roles, ["a.component", "a.config", "a.signature"]);
        let (here, there) = UnixStream::pair().unwrap();
        let mut requests = Requests::default();
        assert!(requests.peek(there.as_fd()).is_err_and(|e| e.kind() == ErrorKind::WouldBlock));
        send(&here, b"{1}\n", &files).unwrap();
        assert!(receive(&mut requests, &there));
        let Some(Incoming::Line(line, fds)) = requests.take() else { panic!("no request") };
        assert_eq!((&*line, fds.len()), (&b"{1}\n"[..], 3));
        send(&here, b"{2}\n{3", &[]).unwrap();
        receive(&mut requests, &there);
        let Some(Incoming::Line(line, fds)) = requests.take() else { panic!("no request") };
        assert_eq!((&*line, fds.len()), (&b"{2}\n"[..], 0));
        receive(&mut requests, &there);
        assert!(requests.take().is_none());
        drop(here);
        assert!(!receive(&mut requests, &there));
    }

    fn receive(requests: &mut Requests, socket: &UnixStream) -> bool {
        let peeked = requests.peek(socket.as_fd()).unwrap();
        requests.receive(socket.as_fd(), peeked, |fd| fd).unwrap()
    }

    #[test]
    fn files_of_a_pipelined_request_are_not_those_of_the_one_before() {
        let file = || File { role: "x".into(), fd: tempfile::tempfile().unwrap().into() };
        let (here, there) = UnixStream::pair().unwrap();
        for (line, files) in [("{1}\n", 0), ("{2}\n", 2), ("{3}\n", 1), ("{4}\n", 0)] {
            let files: Vec<_> = (0..files).map(|_| file()).collect();
            send(&here, line.as_bytes(), &files).unwrap();
        }
        drop(here);
        let mut requests = Requests::default();
        let mut seen = Vec::new();
        while receive(&mut requests, &there) {
            while let Some(Incoming::Line(line, fds)) = requests.take() {
                seen.push((line[1], fds.len()));
            }
        }
        assert_eq!(seen, [(b'1', 0), (b'2', 2), (b'3', 1), (b'4', 0)]);
    }

    #[test]
    fn a_line_without_an_end_is_not_kept_for_ever() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut requests = Requests::default();
        let mut socket = &here;
        socket.write_all(&vec![b'{'; REQUEST_BYTES_MAX + 1]).unwrap();
        while requests.take().is_none() {
            receive(&mut requests, &there);
        }
        assert!(matches!(requests.take(), Some(Incoming::TooLong)));
    }

    #[test]
    fn an_output_that_is_there_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
        assert!(create("out", &link).is_err() && !dir.path().join("elsewhere").exists());
        create("out", &dir.path().join("new")).unwrap();
        assert!(create("out", &dir.path().join("new")).unwrap_err().to_string().contains("new"));
    }
}
