//! What the environment asks for, and registering with the core.

use crate::state;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};
use tally_contract::min_share::MIN_SHARE;
use tally_contract::objective;
use tally_ipc::layout::CORE_MAGIC;
use tally_ipc::wire::{self, Hello, Welcome};
use tally_ipc::{ClientRegion, CoreRegion, map, wait};

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// Longest wait for each half of the handshake.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Settings from the environment.
#[derive(Debug)]
pub struct Settings {
    socket: PathBuf,
    pub hello: Hello,
}

/// What a core gives a client that registers.
#[derive(Debug)]
pub struct Connection {
    /// What it made of us.
    pub welcome: Welcome,
    pub first_ticket: u64,
    pub core: map::Mapped<CoreRegion>,
}

impl Settings {
    pub fn from_environment() -> Option<Self> {
        let socket = std::env::var_os(wire::ENV_SOCKET).filter(|s| !s.is_empty());
        let priority = std::env::var(wire::ENV_PRIORITY).ok().filter(|p| !p.is_empty());
        if socket.is_none() && priority.is_none() {
            return None;
        }
        let name = std::env::var(wire::ENV_NAME).ok().filter(|n| !n.is_empty());
        let labels = std::env::var(wire::ENV_LABELS).unwrap_or_default();
        let labels = labels
            .split('\x1f')
            .filter_map(|l| l.split_once('='))
            .map(|(k, v)| (k.to_owned(), v.to_owned()));
        // First, for only so many are kept; a label of the same name counts instead.
        let variables = [
            (wire::ENV_SLO, objective::SLO),
            (wire::ENV_SLO_PERCENTILE, objective::SLO_PERCENTILE),
            (wire::ENV_TPOT, objective::TPOT),
            (wire::ENV_MIN_SHARE, MIN_SHARE),
        ];
        let objective = variables.into_iter().filter_map(|(variable, label)| {
            Some((label.to_owned(), std::env::var(variable).ok().filter(|v| !v.is_empty())?))
        });
        // The first label that is a weight counts.
        let weight = std::env::var(wire::ENV_WEIGHT).ok().filter(|weight| !weight.is_empty());
        let weight = weight.map(|weight| ("weight".to_owned(), weight));
        Some(Settings {
            socket: socket.map_or_else(wire::default_socket, PathBuf::from),
            hello: Hello {
                high_priority: priority.as_deref() == Some("high"),
                name: name.unwrap_or_else(program),
                labels: objective.chain(labels).chain(weight).collect(),
                first_ticket: 0,
                initialised: false,
            },
        })
    }

    /// Register with the core. Gives what it answered, the connection, and what wakes it.
    ///
    /// # Errors
    /// What went wrong, for the log.
    pub fn connect(
        &self,
        region: &OwnedFd,
        client: &ClientRegion,
    ) -> Result<(Connection, OwnedFd, OwnedFd), String> {
        let socket =
            connect(&self.socket).map_err(|e| format!("{}: {e}", self.socket.display()))?;
        tally_ipc::peer::check(&self.socket, socket.as_fd()).map_err(|e| e.to_string())?;
        let first_ticket = client.activity.next_ticket.load(SeqCst);
        let initialised = state::is_initialised();
        let hello = Hello { first_ticket, initialised, ..self.hello.clone() };
        let talk = || -> Result<(Vec<u8>, Vec<OwnedFd>), wire::WireError> {
            rustix::io::ioctl_fionbio(&socket, false)?;
            for t in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
                sockopt::set_socket_timeout(&socket, t, Some(ANSWER_MAX))?;
            }
            wire::send(socket.as_fd(), &hello.encode(), &[region.as_fd()])?;
            wire::receive(socket.as_fd())
        };
        let (payload, fds) = talk().map_err(|e| e.to_string())?;
        let welcome = Welcome::decode(&payload).map_err(|e| e.to_string())?;
        let [core, doorbell]: [OwnedFd; 2] =
            fds.try_into().map_err(|f: Vec<_>| format!("{} descriptors instead of 2", f.len()))?;
        let core = map::open_core(core.as_fd()).map_err(|e| e.to_string())?;
        if core.magic.load(Relaxed) != CORE_MAGIC {
            return Err("not a core region".into());
        }
        Ok((Connection { welcome, first_ticket, core }, socket, doorbell))
    }

    /// Have the core's status say why this process is not governed, if there is a core.
    pub fn tell_core(&self, reason: &str) {
        if let Ok(socket) = connect(&self.socket) {
            let notice = wire::Notice { name: self.hello.name.clone(), reason: reason.into() };
            let _ = wire::send(socket.as_fd(), &notice.encode(), &[]);
        }
    }
}

/// File name of the executable, or `pid N` if it cannot be read.
fn program() -> String {
    let exe = std::env::current_exe().ok();
    let name = exe.as_deref().and_then(|p| p.file_name()).map(|n| n.to_string_lossy().into_owned());
    name.unwrap_or_else(|| format!("pid {}", std::process::id()))
}

fn connect(path: &std::path::Path) -> rustix::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let start = Instant::now();
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Its backlog is full.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
                if start.elapsed() < CONNECT_MAX =>
            {
                wait::nap(Duration::from_millis(10));
            }
            Err(error) => return Err(error),
        }
    }
}
