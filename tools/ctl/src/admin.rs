//! The core's admin protocol, client side: a JSON line out, a JSON line in.

use crate::error::CtlError;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tally_admin::{Answer, Refusal};
use tally_decision_log::text::printable_lines;
use tally_ipc::admin::File;
use tally_ipc::wire;

/// A core that says nothing for so long is not there, unless it is compiling policies.
const PATIENCE: Duration = Duration::from_secs(60);
/// The role of a file that the core writes; others are of policies, which it compiles.
pub const FILE_OUT: &str = "out";
/// Most bytes of an answer; more is an error.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Path of the core's admin socket; an error is a clients' socket that has none.
#[derive(Debug)]
pub struct AdminSocket(Result<PathBuf, PathBuf>);

impl AdminSocket {
    /// As named; else what belongs to the clients' socket that was named; else as the environment says; else the
    /// default.
    pub fn find(named: Option<PathBuf>, clients: Option<&Path>) -> Self {
        let variable = |name| std::env::var_os(name).filter(|s| !s.is_empty()).map(PathBuf::from);
        let beside =
            |socket: &Path| wire::admin_socket_of(socket).ok_or_else(|| socket.to_path_buf());
        AdminSocket(match (named, clients) {
            (Some(path), _) => Ok(path),
            (None, Some(clients)) => beside(clients),
            (None, None) => match variable(wire::ENV_ADMIN_SOCKET) {
                Some(path) => Ok(path),
                None => beside(&variable(wire::ENV_SOCKET).unwrap_or_else(wire::default_socket)),
            },
        })
    }

    pub fn path(&self) -> Result<&Path, CtlError> {
        self.0.as_deref().map_err(|clients| {
            CtlError::Usage(format!(
                "{} is not in a folder named `{}`, so the admin socket that belongs to it is not known: name it with \
                 --admin-socket or {}",
                clients.display(),
                wire::CLIENTS_FOLDER,
                wire::ENV_ADMIN_SOCKET
            ))
        })
    }
}

/// Connect to a core's socket if that takes no longer than `limit`, see whose it is, and wait no longer than the
/// rest of `limit` for what is sent and received.
pub fn connect(socket: &Path, limit: Duration) -> Result<UnixStream, CtlError> {
    let end = Instant::now() + limit;
    let connect = || -> std::io::Result<UnixStream> {
        let address = SocketAddrUnix::new(socket)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match net::connect(&fd, &address) {
                Ok(()) => break,
                // Its backlog is full.
                Err(rustix::io::Errno::AGAIN) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let stream = UnixStream::from(fd);
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))?;
        Ok(stream)
    };
    let no_core = |why: String| CtlError::NoCore { socket: socket.into(), why };
    let stream = connect().map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => {
            CtlError::NoAccess { socket: socket.into(), why: e.to_string() }
        }
        _ => no_core(e.to_string()),
    })?;
    tally_ipc::peer::check(socket, stream.as_fd()).map_err(|e| no_core(e.to_string()))?;
    Ok(stream)
}

/// A connection to a core.
pub struct Core {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Core {
    pub fn connect(socket: &AdminSocket) -> Result<Self, CtlError> {
        Self::connect_within(socket, PATIENCE)
    }

    /// The same for what needs no compiling: an answer may take no longer than `limit`.
    pub fn connect_within(socket: &AdminSocket, limit: Duration) -> Result<Self, CtlError> {
        let socket = socket.path()?;
        let stream = connect(socket, limit)?;
        Ok(Core { socket: socket.into(), stream: BufReader::new(stream) })
    }

    /// Ask and wait for the answer's `ok`, whose type `tally_admin` tells of each request.
    pub fn get<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<T, CtlError> {
        read(self.ask(request)?)
    }

    /// The same, with all that the core says, for those who read it as JSON.
    pub fn ask(&mut self, request: &impl Serialize) -> Result<Value, CtlError> {
        self.ask_about(request, &[])
    }

    /// The same, about files: the core opens none itself. It may compile them for many minutes; a note says so.
    pub fn ask_about(
        &mut self,
        request: &impl Serialize,
        files: &[File],
    ) -> Result<Value, CtlError> {
        let mut request =
            serde_json::to_value(request).map_err(|e| CtlError::Failed(e.to_string()))?;
        if !files.is_empty() {
            request["files"] = files.iter().map(|file| file.role.as_str()).collect();
        }
        let lost = |why: String| CtlError::NoCore { socket: self.socket.clone(), why };
        let line = format!("{request}\n");
        let compiles = files.iter().any(|file| file.role != FILE_OUT);
        let mut answer = Vec::new();
        let mut stream = (&mut self.stream).take(ANSWER_BYTES_MAX);
        tally_ipc::admin::send(stream.get_ref().get_ref(), line.as_bytes(), files)
            .and_then(|()| {
                loop {
                    match stream.read_until(b'\n', &mut answer) {
                        Err(e) if e.kind() == ErrorKind::WouldBlock && compiles => {
                            // A core that compiles answers others meanwhile.
                            if !answers(&self.socket) {
                                return Err(e);
                            }
                            eprintln!(
                                "tallyctl: no answer yet: the core may be compiling, and goes on if this is interrupted"
                            );
                        }
                        done => return done.map(drop),
                    }
                }
            })
            .map_err(|e| lost(format!("it does not answer ({e})")))?;
        if answer.is_empty() {
            return Err(lost("it closed the connection".into()));
        }
        match serde_json::from_slice(&answer).map_err(|e| CtlError::Answer(e.to_string()))? {
            Answer::Ok(ok) => Ok(ok),
            Answer::Error(Refusal { message, .. }) => {
                Err(CtlError::Refused { message: printable_lines(&message) })
            }
        }
    }
}

/// Whether a core answers a request that takes no time.
fn answers(socket: &Path) -> bool {
    let asked = connect(socket, PATIENCE).and_then(|stream| {
        let mut core = Core { socket: socket.into(), stream: BufReader::new(stream) };
        core.ask(&tally_admin::Request::Status { kernels: Some(0) })
    });
    !matches!(asked, Err(CtlError::NoCore { .. }))
}

/// An answer by its type. An error names the field that is missing or wrong.
pub fn read<T: DeserializeOwned>(ok: Value) -> Result<T, CtlError> {
    serde_json::from_value(ok).map_err(|e| CtlError::Answer(e.to_string()))
}

/// The files of a policy, opened here; `prefix` goes before their roles.
pub fn policy_files(
    prefix: &str,
    file: &Path,
    config: Option<&Path>,
) -> Result<Vec<File>, CtlError> {
    tally_ipc::admin::policy(prefix, file, config).map_err(|e| CtlError::Failed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_admin_socket_is_the_one_that_belongs_to_the_clients() {
        let of = |named: Option<&str>, clients: Option<&str>| {
            AdminSocket::find(named.map(Into::into), clients.map(Path::new))
        };
        let path =
            |found: AdminSocket| found.path().map(Path::to_path_buf).map_err(|e| e.to_string());
        assert_eq!(path(of(Some("/a"), Some("/b"))), Ok("/a".into()));
        assert_eq!(path(of(None, Some("/x/clients/s"))), Ok("/x/admin/s".into()));
        let error = path(of(None, Some("/x/core.sock"))).unwrap_err();
        assert!(error.contains("/x/core.sock") && error.contains("--admin-socket"), "{error}");
    }
}
