//! The core's admin protocol, client side: a JSON line out, a JSON line in.

use crate::error::CtlError;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Loading a policy of an interpreted language takes 15 s.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest answer read.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A connection to a core.
pub struct Core {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Core {
    /// Connect.
    pub fn connect(socket: &Path) -> Result<Self, CtlError> {
        let stream = UnixStream::connect(socket)
            .and_then(|s| {
                s.set_read_timeout(Some(PATIENCE))?;
                s.set_write_timeout(Some(PATIENCE))?;
                Ok(s)
            })
            .map_err(|e| CtlError::NoCore { socket: socket.into(), why: e.to_string() })?;
        Self::believe(socket, stream)
    }

    fn believe(socket: &Path, stream: UnixStream) -> Result<Self, CtlError> {
        tally_ipc::peer::check(socket, stream.as_fd())
            .map_err(|e| CtlError::NoCore { socket: socket.into(), why: e.to_string() })?;
        Ok(Core { socket: socket.into(), stream: BufReader::new(stream) })
    }

    /// Connect if that takes no longer than `limit`, and wait no longer than that for an answer.
    pub fn connect_within(socket: &Path, limit: Duration) -> Result<Self, CtlError> {
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
        let stream = connect()
            .map_err(|e| CtlError::NoCore { socket: socket.into(), why: e.to_string() })?;
        Self::believe(socket, stream)
    }

    /// The connection itself.
    pub fn stream(&self) -> &UnixStream {
        self.stream.get_ref()
    }

    /// Ask and wait for the answer's `ok`.
    pub fn ask(&mut self, request: &Value) -> Result<Value, CtlError> {
        let lost = |why: String| CtlError::NoCore { socket: self.socket.clone(), why };
        let line = format!("{request}\n");
        let mut answer = String::new();
        self.stream
            .get_mut()
            .write_all(line.as_bytes())
            .and_then(|()| {
                (&mut self.stream).take(ANSWER_BYTES_MAX).read_line(&mut answer).map(drop)
            })
            .map_err(|e| lost(format!("it does not answer ({e})")))?;
        if answer.is_empty() {
            return Err(lost("it closed the connection".into()));
        }
        let mut answer: Value =
            serde_json::from_str(&answer).map_err(|e| CtlError::Answer(e.to_string()))?;
        if let Some(message) = answer.pointer("/error/message").and_then(Value::as_str) {
            return Err(CtlError::Refused { message: message.to_owned() });
        }
        match answer.get_mut("ok") {
            Some(ok) => Ok(ok.take()),
            None => Err(CtlError::Answer("neither `ok` nor `error`".into())),
        }
    }
}
