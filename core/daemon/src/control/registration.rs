//! One client's registration and the rest of its connection.
//!
//! ```text
//! hello + memfd -> checked -> class decided -> dispatch thread serves it
//!     -> welcome + core region, doorbell -> silence until one side ends
//! notice (a program that is not governed, and why) -> kept for the status
//! ```
//!
//! Whatever is wrong with a client costs it this connection and nothing else.

use super::registry::Cut;
use super::{Plane, Stranger};
use crate::config::Fail;
use crate::dispatch::control::{Control, NewClient};
use crate::dispatch::park;
use crate::ungoverned;
use rustix::fd::{AsFd, OwnedFd};
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tally_engine::policy::ClientInfo;
use tally_ipc::layout::CLIENT_MAGIC;
use tally_ipc::map::{self, Mapped};
use tally_ipc::wire::{self, Hello, Notice, Welcome, WireError};
use tally_ipc::{ClientRegion, PROTOCOL_VERSION};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::net::unix::UCred;

/// Why a client is not served.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("a registration carries exactly one descriptor, the client's region; this one {0}")]
    Descriptors(usize),
    #[error(transparent)]
    Map(#[from] map::MapError),
    #[error("the client's region is not one of this protocol's version {PROTOCOL_VERSION}")]
    Region,
    #[error(
        "the core serves {0} clients already: raise admission.clients_max in its configuration"
    )]
    Full(usize),
    #[error("core: {0}")]
    Os(#[from] rustix::io::Errno),
    #[error(transparent)]
    Ask(#[from] crate::dispatch::control::AskError),
}

type BlockingStream = std::os::unix::net::UnixStream;

/// Serve a connection that does not speak JSON.
pub(super) async fn serve(plane: Rc<Plane>, stranger: Stranger, stream: UnixStream, peer: UCred) {
    let patience = Duration::from_millis(plane.config.admission.hello_timeout_ms);
    let Some(stream) = blocking(stream, patience) else { return };
    let Ok(line) = stream.try_clone() else { return };
    let Some(hello) = receive(stream, patience).await else { return };
    if let Ok((payload, _)) = &hello
        && payload.first() == Some(&wire::NOTICE)
    {
        if let (Ok(notice), Some(pid)) = (Notice::decode(payload), peer.pid()) {
            let (name, reason) = (printable(notice.name), printable(notice.reason));
            tracing::warn!(pid, uid = peer.uid(), name, reason, "a program is not governed");
            plane.ungoverned.borrow_mut().report(pid as u32, peer.uid(), name, reason);
        }
        return;
    }
    let admitted = async {
        let (hello, region) = check(hello?)?;
        admit(&plane, hello, region, &peer).await
    }
    .await;
    let (welcome, fds, info, cut) = match admitted {
        Ok(admitted) => admitted,
        Err(Refusal::Wire(WireError::Closed)) => return,
        Err(refusal) => {
            tracing::warn!(pid = peer.pid(), uid = peer.uid(), "client refused: {refusal}");
            if let Some(pid) = peer.pid() {
                let (pid, why) = (pid as u32, format!("refused by the core: {refusal}"));
                let name = ungoverned::program(pid);
                plane.ungoverned.borrow_mut().report(pid, peer.uid(), printable(name), why);
            }
            let text = Welcome::encode_refusal(&refusal.to_string());
            let _ = wire::send(line.as_fd(), &text, &[]);
            return;
        }
    };
    drop(stranger);
    plane.ungoverned.borrow_mut().is_client(peer.pid().unwrap_or(0) as u32);
    let id = info.id;
    let fds = fds.each_ref().map(OwnedFd::as_fd);
    let reason = match wire::send(line.as_fd(), &welcome.encode(), &fds) {
        Ok(()) => {
            tracing::info!(
                id,
                pid = peer.pid(),
                uid = peer.uid(),
                name = info.name,
                class = super::registry::class_name(info.class),
                class_reason = welcome.class_reason,
                "client registered"
            );
            until_gone(line, peer.pid(), &cut).await
        }
        Err(error) => format!("it did not take the welcome: {error}"),
    };
    let left = plane.control.ask(|done| Control::Leave { id, done }).await.ok().flatten();
    plane.registry.borrow_mut().depart(id, reason, left.as_ref().map(|l| &l.numbers));
    // Unmapping 2 MiB; not worth another thread here.
    drop(left);
}

fn blocking(stream: UnixStream, patience: Duration) -> Option<BlockingStream> {
    let stream = stream.into_std().ok()?;
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    stream.set_write_timeout(Some(patience)).ok()?;
    Some(stream)
}

type Frame = Result<(Vec<u8>, Vec<OwnedFd>), WireError>;

/// The first frame, on a thread of its own; cut off in the end if the peer sends
/// it byte by byte. `None` if it was.
async fn receive(stream: BlockingStream, patience: Duration) -> Option<Frame> {
    let line = stream.try_clone().ok()?;
    let reading = tokio::task::spawn_blocking(move || wire::receive(stream.as_fd()));
    match tokio::time::timeout(patience * 2, reading).await {
        Ok(outcome) => outcome.ok(),
        Err(_) => {
            let _ = line.shutdown(Shutdown::Both);
            None
        }
    }
}

fn check(
    (payload, fds): (Vec<u8>, Vec<OwnedFd>),
) -> Result<(Hello, Mapped<ClientRegion>), Refusal> {
    let hello = Hello::decode(&payload)?;
    let [region] = fds.as_slice() else { return Err(Refusal::Descriptors(fds.len())) };
    let region = map::open_client(region.as_fd())?;
    if region.magic.load(Relaxed) != CLIENT_MAGIC
        || region.version.load(Relaxed) != PROTOCOL_VERSION
    {
        return Err(Refusal::Region);
    }
    Ok((hello, region))
}

/// Names and labels are shown on terminals.
fn printable(text: String) -> String {
    if text.chars().any(char::is_control) {
        text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
    } else {
        text
    }
}

type Admitted = (Welcome, [OwnedFd; 2], ClientInfo, Rc<Cut>);

/// Decide its class and hand it to the dispatch thread.
async fn admit(
    plane: &Plane,
    hello: Hello,
    region: Mapped<ClientRegion>,
    peer: &UCred,
) -> Result<Admitted, Refusal> {
    let most = plane.config.admission.clients_max;
    let id = plane.registry.borrow_mut().reserve(most).ok_or(Refusal::Full(most))?;
    let outcome = hand_over(plane, id, hello, region, peer).await;
    let mut registry = plane.registry.borrow_mut();
    match outcome {
        Ok((welcome, fds, info)) => {
            let pid = peer.pid().unwrap_or(0) as u32;
            let cut = registry.add(&info, pid, peer.uid(), welcome.class_reason.clone());
            Ok((welcome, fds, info, cut))
        }
        Err(refusal) => {
            registry.release();
            Err(refusal)
        }
    }
}

async fn hand_over(
    plane: &Plane,
    id: u32,
    hello: Hello,
    region: Mapped<ClientRegion>,
    peer: &UCred,
) -> Result<(Welcome, [OwnedFd; 2], ClientInfo), Refusal> {
    let (class, class_reason) = plane.rules.class(peer.uid(), hello.high_priority);
    let residency = plane.residency.borrow().as_ref().map(|r| r.for_client(class));
    let welcome = Welcome {
        client_id: id,
        high_priority: class == tally_engine::policy::Class::High,
        class_reason,
        residency: residency.unwrap_or(wire::Residency::Unmanaged),
        spin_ns: plane.config.client.spin_us() * 1_000,
        fail_hold: plane.config.client.fail == Fail::Hold,
        cutting: plane.config.cutting(class),
    };
    let labels = hello.labels.into_iter().map(|(k, v)| (printable(k), printable(v))).collect();
    let info = ClientInfo { id, class, name: printable(hello.name), labels };
    let (core_fd, core) = map::create_core()?;
    core.client_id.store(id, Relaxed);
    let doorbell = park::eventfd()?;
    let fds = [core_fd, doorbell.try_clone().map_err(errno)?];
    let client = Box::new(NewClient {
        info: info.clone(),
        region,
        core,
        doorbell,
        first_ticket: hello.first_ticket,
    });
    plane.control.ask(|done| Control::Join { client, done }).await?;
    Ok((welcome, fds, info))
}

fn errno(error: std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
}

/// Wait for the end of a client: its socket, its process, or our own will. A
/// forked child can keep the socket open after the process is gone.
async fn until_gone(line: BlockingStream, pid: Option<i32>, cut: &Cut) -> String {
    let stream = line.set_nonblocking(true).and_then(|()| UnixStream::from_std(line));
    let Ok(stream) = stream else { return "its socket cannot be watched".into() };
    let pidfd = pid
        .and_then(rustix::process::Pid::from_raw)
        .map(|p| rustix::process::pidfd_open(p, rustix::process::PidfdFlags::empty()));
    let process = match pidfd {
        Some(Ok(fd)) => watch_readable(fd),
        // It registered and ended at once.
        Some(Err(rustix::io::Errno::SRCH)) => return "its process ended".into(),
        Some(Err(_)) | None => None,
    };
    let ended = async {
        match &process {
            Some(fd) => drop(fd.readable().await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        how = socket_end(&stream) => how.into(),
        () = ended => "its process ended".into(),
        why = cut.wait() => format!("dropped: {why}"),
    }
}

#[expect(deprecated, reason = "its replacement is unsafe, for types other than OwnedFd")]
fn watch_readable(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, tokio::io::Interest::READABLE).ok()
}

async fn socket_end(stream: &UnixStream) -> &'static str {
    loop {
        if stream.readable().await.is_err() {
            return "its socket failed";
        }
        match stream.try_read(&mut [0u8; 1]) {
            Ok(0) => return "it closed its socket",
            Ok(_) => return "dropped: it sent something after registering",
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return "its socket failed",
        }
    }
}
