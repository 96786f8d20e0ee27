//! One client's registration and the rest of its connection.
//!
//! ```text
//! hello + memfd -> checked -> class decided -> dispatch thread serves it
//!     -> welcome + core region, doorbell -> silence until one side ends
//! notice (a program that is not governed, and why) -> kept for the status
//! ```
//!
//! Whatever is wrong with a client costs it this connection and nothing else.

use super::Plane;
use super::connection::Connection;
use super::journal::Kind;
use super::registry::{Dismissal, End};
use crate::admit::bound_weight;
use crate::config::Fail;
use crate::dispatch::control::{Allowed, AskError, AskedMinShare, Control, Left, NewClient};
use crate::dispatch::kernels::KernelShare;
use crate::dispatch::park;
use crate::gpus::Witness;
use crate::helpers::{HelperError, let_go};
use crate::peer::Peer;
use crate::quota::{self, QuotaExceeded, QuotaPlace, REGISTRATION_DESCRIPTORS, User};
use crate::ungoverned;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tally_contract::limits::JOIN_WAIT_MS_MAX;
use tally_contract::min_share::min_share_of_labels;
use tally_contract::objective::{Objective, tpot_of_labels};
use tally_engine::policy::{Class, ClientInfo};
use tally_ipc::ClientRegion;
use tally_ipc::frame;
use tally_ipc::layout::{CLIENT_MAGIC, REGION_VERSION};
use tally_ipc::map::{self, Mapped};
use tally_ipc::text::printable;
use tally_ipc::wire::{self, Hello, Notice, Welcome, WireError};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How long a connection is read whose descriptors are not taken for now, because helper threads hang on earlier ones
/// of its user. It cannot register; a question without descriptors (whether a core is there) is answered.
const WITHOUT_DESCRIPTORS_MAX: Duration = Duration::from_millis(200);
/// How long until a full channel to the dispatch thread is tried again.
const LEAVE_AGAIN: Duration = Duration::from_millis(10);

/// Why a client is not served.
#[derive(Debug, thiserror::Error)]
enum RegistrationError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("a registration carries exactly one descriptor, the client's region; this one {0}")]
    Descriptors(usize),
    #[error(transparent)]
    Map(#[from] map::MapError),
    #[error(
        "the client's shared memory is laid out in another way: install shim and core of one release"
    )]
    Region,
    #[error(
        "the core serves {0} clients, and has no more places, or only those reserved for high priority \
         (admission.reserved_clients): raise admission.clients_max in its configuration, and its limit on open files \
         if `tallyctl status` says that no more fit"
    )]
    Full(usize),
    #[error(
        "{0} has {1} clients already, the most that one user may have: raise admission.user_clients_max in \
         the core's configuration"
    )]
    User(User, usize),
    #[error(
        "{0} registers clients too fast: raise admission.user_joins_per_s in the core's configuration"
    )]
    TooFast(User),
    #[error(transparent)]
    Descriptor(#[from] HelperError),
    #[error("core: {0}")]
    Os(#[from] rustix::io::Errno),
    #[error(transparent)]
    Ask(#[from] crate::dispatch::control::AskError),
}

/// Serve a connection at the clients' socket. The place is taken until the connection is closed.
pub(super) async fn serve(
    plane: &Rc<Plane>,
    place: QuotaPlace,
    stream: &Connection,
    mut peer: Peer,
) -> QuotaPlace {
    let opened = stream.open();
    let mut patience = Duration::from_millis(plane.config.admission.hello_timeout_ms);
    if opened.is_err() {
        patience = patience.min(WITHOUT_DESCRIPTORS_MAX);
    }
    let received = tokio::time::timeout(patience, receive(stream, patience)).await;
    stream.bar();
    let frame = match (received, opened) {
        (Ok(frame), _) => frame,
        (Err(_), Err(why)) => Err(why.into()),
        (Err(_), Ok(())) => return place,
    };
    match frame.as_ref().map(|(payload, _)| payload.first()) {
        Ok(Some(&wire::NOTICE)) => {
            take_notice(plane, &peer, frame);
            return place;
        }
        Ok(Some(&wire::PING)) => {
            let asks_high =
                matches!(&frame, Ok((payload, _)) if payload.get(1) == Some(&wire::PING_HIGH));
            let mut answer = vec![wire::PING];
            let class = plane.rules.class(peer.uid, peer.foreign.is_some(), asks_high);
            answer.extend(class.1.into_bytes());
            let _ = wire::answer(stream.as_fd(), &answer, &[]);
            return place;
        }
        _ => {}
    }
    let admitted = async {
        let (hello, region) = check(frame?)?;
        admit(plane, hello, region, &peer).await
    }
    .await;
    let Admitted { welcome, fds, info, dismissal, place: client } = match admitted {
        Ok(admitted) => admitted,
        Err(RegistrationError::Wire(WireError::Closed)) => return place,
        Err(refusal) => {
            refuse(plane, stream, &peer, &refusal);
            return place;
        }
    };
    drop(place);
    plane.ungoverned.borrow_mut().is_client(peer.pid);
    let id = info.id;
    let sent = {
        let fds = fds.each_ref().map(OwnedFd::as_fd);
        wire::answer(stream.as_fd(), &welcome.encode(), &fds)
    };
    // The client has them now; here they would be two descriptors more for each.
    drop(fds);
    let end = match sent {
        Ok(()) => {
            if plane.journal.may(Kind::Registered) {
                tracing::info!(
                    id,
                    pid = peer.pid,
                    uid = peer.uid,
                    name = info.name,
                    class = %super::registry::class(info.class),
                    class_reason = welcome.class_reason,
                    "client registered"
                );
            }
            until_gone(stream, peer.take_pidfd(), &dismissal).await
        }
        Err(error) => End::Left(format!("it did not take the welcome: {error}")),
    };
    let left = leave(plane, id).await;
    if plane.journal.may(Kind::Left) {
        tracing::info!(id, name = info.name, reason = %end, "client left");
    }
    plane.registry.borrow_mut().depart(id, &end, left.as_ref().map(|l| &l.numbers));
    // Unmaps 2 MiB, and may wait for whoever rings the doorbell.
    stream.helper().close(left);
    client
}

/// Have the dispatch thread serve it no longer; again until that has room for the request, or it would serve the client
/// for ever.
async fn leave(plane: &Plane, id: u32) -> Option<Left> {
    loop {
        match plane.control.ask(|done| Control::Leave { id, done }).await {
            Err(AskError::Busy) => tokio::time::sleep(LEAVE_AGAIN).await,
            left => return left.ok().flatten(),
        }
    }
}

/// A descriptor, as the region that it should be.
type Region = Result<Mapped<ClientRegion>, map::MapError>;
/// A payload and what came with it.
type Frame = (Vec<u8>, Vec<Region>);

fn region(fd: OwnedFd) -> Region {
    let region = map::open_client(fd.as_fd());
    match region {
        // Memory, whose close waits for nothing.
        Ok(_) => drop(fd),
        Err(_) => let_go(fd),
    }
    region
}

/// The first frame. Takes no thread until descriptors come: a peer may send it byte by byte.
async fn receive(stream: &Connection, patience: Duration) -> Result<Frame, RegistrationError> {
    let mut receiver = wire::Receiver::taking(REGISTRATION_DESCRIPTORS);
    loop {
        let peek = || match receiver.peek(stream.as_fd()) {
            Err(WireError::Os(Errno::AGAIN)) => Err(ErrorKind::WouldBlock.into()),
            peeked => Ok(peeked),
        };
        let peeked = stream.async_io(Interest::READABLE, peek).await.map_err(errno)??;
        let step = if peeked.has_descriptors {
            let socket = stream.shared();
            let work = move || {
                let step = receiver.step(socket.as_fd(), RecvFlags::DONTWAIT, peeked.bytes, region);
                (receiver, step)
            };
            let (back, step) = stream.helper().ask(patience, work).await?;
            receiver = back;
            step
        } else {
            receiver.step(stream.as_fd(), RecvFlags::DONTWAIT, peeked.bytes, region)
        };
        if let Some(frame) = step? {
            return Ok(frame);
        }
    }
}

fn take_notice(plane: &Plane, peer: &Peer, frame: Result<Frame, RegistrationError>) {
    let Ok(Ok(notice)) = frame.map(|(payload, _)| Notice::decode(&payload)) else { return };
    let (name, reason) = (printable(notice.name), printable(notice.reason));
    if plane.journal.may(Kind::Ungoverned) {
        tracing::warn!(pid = peer.pid, uid = peer.uid, name, reason, "a program is not governed");
    }
    note_ungoverned(plane, peer, name, reason);
}

/// A program is not governed. Not noted if its user has too many: the kernel takes milliseconds to tell when a process
/// with thousands of threads started.
fn note_ungoverned(plane: &Plane, peer: &Peer, name: String, reason: String) {
    let now = Instant::now();
    let next = plane.places.ungoverned.borrow_mut().next(plane.user(peer), now, Duration::ZERO);
    if next.is_some() {
        plane.ungoverned.borrow_mut().report(peer.pid, peer.uid, name, reason);
    }
}

fn refuse(plane: &Plane, stream: &Connection, peer: &Peer, refusal: &RegistrationError) {
    let Peer { uid, pid, .. } = *peer;
    let kind = match refusal {
        RegistrationError::Descriptor(_) => Kind::Descriptors,
        _ => Kind::Refusals,
    };
    if plane.journal.may(kind) {
        tracing::warn!(pid, uid, "client refused: {refusal}");
    }
    let (why, name) = (format!("refused by the core: {refusal}"), ungoverned::program(pid));
    note_ungoverned(plane, peer, name, why);
    let _ = wire::answer(stream.as_fd(), &Welcome::encode_refusal(&refusal.to_string()), &[]);
}

fn check((payload, regions): Frame) -> Result<(Hello, Mapped<ClientRegion>), RegistrationError> {
    let hello = Hello::decode(&payload)?;
    let [region] = <[Region; 1]>::try_from(regions)
        .map_err(|all| RegistrationError::Descriptors(all.len()))?;
    let region = region?;
    if region.magic.load(Relaxed) != CLIENT_MAGIC || region.version.load(Relaxed) != REGION_VERSION
    {
        return Err(RegistrationError::Region);
    }
    Ok((hello, region))
}

struct Admitted {
    welcome: Welcome,
    fds: [OwnedFd; 2],
    info: ClientInfo,
    dismissal: Rc<Dismissal>,
    place: QuotaPlace,
}

/// Decide its class, find a place for it and hand it to the dispatch thread.
async fn admit(
    plane: &Plane,
    hello: Hello,
    region: Mapped<ClientRegion>,
    peer: &Peer,
) -> Result<Admitted, RegistrationError> {
    let user = plane.user(peer);
    let is_trusted = plane.is_trusted(peer);
    if !is_trusted {
        // The client waits for an answer no longer than a second.
        let most = Duration::from_millis(JOIN_WAIT_MS_MAX);
        let wait = plane.places.joins.borrow_mut().next(user, Instant::now(), most);
        tokio::time::sleep(wait.ok_or(RegistrationError::TooFast(user))?).await;
    }
    let (class, class_reason) =
        plane.rules.class(peer.uid, peer.foreign.is_some(), hello.high_priority);
    let is_high = class == Class::High;
    let settings = &plane.config.admission;
    let (most, may_use_reserved) =
        quota::clients_of_user(settings, &plane.room, is_trusted, is_high);
    let place =
        QuotaPlace::take(&plane.places.clients, user, most, may_use_reserved).map_err(|full| {
            match full {
                QuotaExceeded::User(has) => RegistrationError::User(user, has),
                QuotaExceeded::All(all) => RegistrationError::Full(all),
            }
        })?;
    let kernels = plane.places.kernels.borrow_mut().of(user, is_trusted);
    let _turn = plane.places.registering.acquire().await;
    let id = plane.registry.borrow_mut().next_id();
    let class = (class, class_reason);
    let witness = Witness { is_trusted, gpus: plane.gpus.clone() };
    let of_user = (user, kernels, witness);
    let Prepared { welcome, fds, info, client, min_share } =
        prepare(plane, id, hello, region, class, of_user)?;
    let class_reason = welcome.class_reason.clone();
    // Before it is served: the dispatch thread may drop it at once, and then its record is looked for.
    let dismissal = plane.registry.borrow_mut().add(&info, peer.pid, peer.uid, class_reason);
    if let Err(why) = plane.control.ask(|done| Control::Join { client, min_share, done }).await {
        plane.registry.borrow_mut().forget(id);
        return Err(why.into());
    }
    Ok(Admitted { welcome, fds, info, dismissal, place })
}

/// A client that is not served yet.
struct Prepared {
    welcome: Welcome,
    fds: [OwnedFd; 2],
    info: ClientInfo,
    client: Box<NewClient>,
    min_share: Option<AskedMinShare>,
}

fn prepare(
    plane: &Plane,
    id: u32,
    hello: Hello,
    region: Mapped<ClientRegion>,
    (class, class_reason): (Class, String),
    (user, kernels, witness): (User, Arc<KernelShare>, Witness),
) -> Result<Prepared, RegistrationError> {
    let sharing = plane.sharing.borrow().as_ref().map(|r| r.for_client(class));
    let welcome = Welcome {
        client_id: id,
        high_priority: class == Class::High,
        class_reason,
        sharing: sharing.unwrap_or(wire::SharingMode::Unmanaged),
        spin_ns: plane.config.client.spin_us() * 1_000,
        fail_hold: plane.config.client.fail == Fail::Hold,
        profiles_units: plane.config.client.profile_units,
        rewrite: plane.config.rewrite_settings(class),
    };
    let labels = hello.labels.into_iter().map(|(k, v)| (printable(k), printable(v)));
    let mut labels: Vec<(String, String)> = labels.collect();
    let admission = &plane.config.admission;
    let weight_max = admission.user_weight_max;
    if !witness.is_trusted
        && bound_weight(&mut labels, weight_max)
        && plane.journal.may(Kind::Registered)
    {
        tracing::warn!(
            id,
            weight_max,
            "the client asks for more weight than admission.user_weight_max allows and gets that"
        );
    }
    let info = ClientInfo { id, class, name: printable(hello.name), labels };
    let pairs = info.labels.iter().map(|(key, value): &(String, String)| (&**key, &**value));
    if let Err(why) = Objective::of_labels(pairs.clone())
        .and(tpot_of_labels(pairs.clone()))
        .and(min_share_of_labels(pairs.clone()))
        && plane.journal.may(Kind::Registered)
    {
        tracing::warn!(id, name = info.name, "what it asks for is ignored: label {why}");
    }
    let min_share = min_share_of_labels(pairs).unwrap_or(None);
    let min_share = min_share.filter(|_| class == Class::BestEffort).map(|asked| AskedMinShare {
        asked,
        allowed: Allowed {
            together: admission.min_share_percent_max * 10,
            of_user: (!witness.is_trusted)
                .then_some((user, admission.user_min_share_percent_max * 10)),
        },
    });
    let (core_fd, core) = map::create_core()?;
    core.client_id.store(id, Relaxed);
    let (watched, doorbell) = park::doorbell()?;
    plane.control.watch(&watched)?;
    let fds = [core_fd, doorbell];
    let client = Box::new(NewClient {
        info: info.clone(),
        region,
        core,
        doorbell: watched,
        first_ticket: hello.first_ticket,
        kernels,
        witness,
    });
    Ok(Prepared { welcome, fds, info, client, min_share })
}

fn errno(error: std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
}

/// How a client left whose process is no more.
const ENDED: &str = "its process ended";
/// Longest from a process's sockets being closed until it counts as ended.
const ENDING_MAX: Duration = Duration::from_millis(500);

/// Wait for the end of a client: its socket, its process, or our own will. A
/// forked child can keep the socket open after the process is gone.
async fn until_gone(stream: &Connection, process: Option<OwnedFd>, dismissal: &Dismissal) -> End {
    // It registered and ended at once.
    let ended = || End::Left(ENDED.into());
    let Some(process) = process else { return ended() };
    let process = watch_readable(process);
    let end_of_process = async {
        match &process {
            Some(fd) => drop(fd.readable().await),
            None => std::future::pending().await,
        }
    };
    tokio::pin!(end_of_process);
    let how = tokio::select! {
        end = socket_end(stream) => end,
        () = &mut end_of_process => return ended(),
        why = dismissal.wait() => return End::Dropped(why),
    };
    // A process that ends closes its sockets before it counts as ended. How it ended (its exit code or
    // signal) only its parent is told.
    match tokio::time::timeout(ENDING_MAX, end_of_process).await {
        Ok(()) => ended(),
        Err(_) => how,
    }
}

#[expect(deprecated, reason = "its replacement is unsafe, for types other than OwnedFd")]
fn watch_readable(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, tokio::io::Interest::READABLE).ok()
}

async fn socket_end(stream: &Connection) -> End {
    // Descriptors may have come: they are left where they are.
    let peek = || Ok(frame::peek(stream.as_fd(), &mut [0; 1])?);
    match stream.async_io(Interest::READABLE, peek).await.map(|peeked| peeked.bytes) {
        Ok(0) => End::Left("it closed its socket while its process runs on".into()),
        Ok(_) => End::Dropped("it sent something after registering"),
        Err(_) => End::Left("its socket failed".into()),
    }
}
