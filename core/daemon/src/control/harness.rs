//! Connections served without sockets in the file system, for the fuzz targets and their tests: a peer's bytes and
//! descriptors go in, and what the core answered and keeps comes out. In one thread, but for files.

use super::accept::EntryPoint;
use super::connection::Connection;
use super::{Places, Plane, admin, registration};
use crate::admit::Rules;
use crate::config::{Config, SharingChoice};
use crate::dispatch::harness::{self, Harness};
use crate::loader::Loader;
use crate::peer::Peer;
use crate::policy_slot::PolicySlot;
use crate::profile_store::ProfileStore;
use crate::quota::{QuotaPlace, Room};
use crate::record::Recordings;
use crate::sharing::SharingMode;
use rustix::fd::{AsFd, OwnedFd};
use std::cell::{Cell, RefCell};
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use tally_decision_log::Recorder;
use tally_ipc::admin::{File, Incoming};
use tokio::sync::{Mutex, Notify};
use tokio::task::LocalSet;

/// A user with no rights.
const STRANGER: u32 = 54_321;
/// A connection that was not dealt with by then hangs.
const PATIENCE: Duration = Duration::from_secs(15);

/// What a peer sends in one message.
#[derive(Debug)]
pub struct Message {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// What a connection left behind.
#[derive(Debug)]
pub struct After {
    /// What the peer was sent.
    pub answer: Vec<u8>,
    pub clients: usize,
    pub places: usize,
    /// Policies that were active.
    pub generation: u64,
    /// The core was asked to stop.
    pub stops: bool,
    /// A decision log or a shadow was begun, or an A/B test.
    pub records: bool,
}

/// Takes any file for `fifo`, which refuses every configuration.
static LOADER: LazyLock<Arc<Loader>> = LazyLock::new(|| {
    let fifo = include_bytes!("../../../../tests/policies/corpus/0.1.0/fifo.wasm");
    Arc::new(Loader::always(fifo).expect("a component of the corpus"))
});

/// Open what every connection uses.
pub fn prepare() {
    LazyLock::force(&LOADER);
}

fn config() -> Config {
    // Below a device: not even root can make anything there.
    let nowhere = |name: &str| PathBuf::from(format!("/dev/null/{name}"));
    let mut config = Config::default();
    config.policy.required = false;
    config.policy.file = Some(nowhere("policy.wasm"));
    config.profiles.enabled = false;
    config.ab.keep = false;
    config.log.directory = Some(nowhere("logs"));
    config.sharing.mode = SharingChoice::None;
    config.high_priority.uids = Some(vec![0, rustix::process::geteuid().as_raw()]);
    config
}

/// A plane, and the loop behind it.
async fn open() -> (Rc<Plane>, Rc<RefCell<Harness>>) {
    let config = config();
    let room = Room::new(1_024, config.admission.clients_max);
    let (slot, policy) =
        PolicySlot::open(LOADER.clone(), &config.policy, 0).expect("the built-in rule serves");
    let sharing =
        SharingMode::establish(&config.sharing, Path::new("/dev/null"), Path::new("/dev/null"))
            .await;
    let (profiles, _) = ProfileStore::open(&config.profiles).await;
    let recordings = Recordings::open(&config, &policy, &Recorder::default());
    let harness = Harness::new(harness::settings(), policy).expect("descriptors");
    let plane = Rc::new(Plane {
        rules: Rules::new(&config, rustix::process::geteuid().as_raw()),
        control: harness.control.clone(),
        registry: RefCell::default(),
        ungoverned: RefCell::default(),
        looker: Rc::default(),
        policy: slot,
        experiments: crate::ab::experiments::Experiments::open(
            &config,
            Path::new("/dev/null/core.sock"),
        ),
        profiles,
        recordings: recordings.expect("nothing is recorded"),
        sharing: RefCell::new(Some(sharing.expect("none was asked for"))),
        stop: Notify::new(),
        keeps_mps: Cell::new(false),
        started: Instant::now(),
        pinned: None,
        gpus: Arc::default(),
        status_turn: Mutex::new(()),
        non_admins_turn: Mutex::new(()),
        helpers: Default::default(),
        room,
        places: Places::new(&config.admission, &room),
        journal: Default::default(),
        config,
    });
    (plane, Rc::new(RefCell::new(harness)))
}

/// Send the messages, as far as the other side takes them, and nothing more.
fn send(here: &UnixStream, messages: Vec<Message>) {
    here.set_nonblocking(true).expect("a socket");
    for Message { bytes, fds } in messages {
        let files = fds.into_iter().map(|fd| File { role: String::new(), fd });
        if tally_ipc::admin::send(here, &bytes, &files.collect::<Vec<_>>()).is_err() {
            break;
        }
    }
    let _ = here.shutdown(Shutdown::Write);
}

/// Serve one connection of a peer that sends this and ends. `trusted`: of the core's user.
pub fn connect(
    runtime: &tokio::runtime::Runtime,
    entry_point: EntryPoint,
    trusted: bool,
    messages: Vec<Message>,
) -> After {
    LocalSet::new().block_on(runtime, async {
        let (plane, harness) = open().await;
        let (mut here, there) = UnixStream::pair().expect("sockets");
        send(&here, messages);
        there.set_nonblocking(true).expect("a socket");
        let there = tokio::net::UnixStream::from_std(there).expect("a socket");
        let mut peer = Peer::of(there.as_fd()).expect("this process");
        if !trusted {
            peer.uid = STRANGER;
        }
        let looping = harness.clone();
        let dispatch = tokio::task::spawn_local(async move {
            for turn in 1.. {
                looping.borrow_mut().iterate(turn * 1_000_000);
                tokio::task::yield_now().await;
            }
        });
        let served = serve(&plane, entry_point, there, peer);
        tokio::time::timeout(PATIENCE, served).await.expect("the connection is dealt with");
        let mut answer = Vec::new();
        let _ = here.read_to_end(&mut answer);
        let generation = plane.policy.active().generation;
        let records = plane.recordings.shadow_status().is_some()
            || plane.recordings.status().file.is_some()
            || plane.experiments.status().is_some();
        let clients = harness.borrow().clients().count();
        // As in the core: recordings end once the dispatch loop and its ends of their rings are gone.
        dispatch.abort();
        let _ = dispatch.await;
        drop(harness);
        plane.recordings.finish().await;
        let stops = tokio::time::timeout(Duration::ZERO, plane.stop.notified()).await.is_ok();
        let places = [&plane.places.unregistered, &plane.places.admins, &plane.places.clients];
        After {
            answer,
            clients,
            places: places.iter().map(|pool| pool.borrow().taken()).sum(),
            generation,
            stops,
            records,
        }
    })
}

async fn serve(
    plane: &Rc<Plane>,
    entry_point: EntryPoint,
    stream: tokio::net::UnixStream,
    peer: Peer,
) {
    let user = plane.user(&peer);
    let stream = Connection::new(stream, plane.helper(&peer));
    match entry_point {
        EntryPoint::Clients => {
            let place =
                QuotaPlace::take(&plane.places.unregistered, user, 1, true).expect("a place");
            let place = registration::serve(plane, place, &stream, peer).await;
            stream.end().await;
            drop(place);
        }
        EntryPoint::Admin if plane.may_change(&peer) => {
            admin::serve(plane.clone(), &stream, peer).await;
            stream.end().await;
        }
        // Without the pauses that unregistered connections' requests have between them.
        EntryPoint::Admin => {
            let mut requests = admin::Requests::default();
            while let Ok(Some(Incoming::Line(line, fds))) =
                admin::next(&stream, &mut requests).await
            {
                let answer = admin::answer(plane, &line, fds, &peer).await;
                if !admin::write(&stream, &answer).await {
                    break;
                }
            }
            stream.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_contract::limits::BREACHES_MAX;
    use tally_ipc::layout::STREAM_SLOTS;
    use tally_ipc::{map, ring, wire};
    use tokio::sync::mpsc;

    /// What a client sends that has launched to a stream that there is not, as often as it may and once more.
    fn hello_of_hostile(here: &UnixStream) {
        let (fd, region) = map::create_client().unwrap();
        for ticket in 0..=BREACHES_MAX {
            let request = ring::Request {
                kernel: 0,
                flags: 0,
                grid: [1; 3],
                block: [1; 3],
                shared_bytes: 0,
                stream: STREAM_SLOTS as u32,
                completion: ticket as u32 + 1,
                demand: Default::default(),
                limited_sms: 0,
            };
            ring::publish(&region, ticket, &request);
        }
        let hello = wire::Hello {
            high_priority: false,
            first_ticket: 0,
            name: "hostile".into(),
            labels: vec![("min-share".into(), "10%".into())],
            initialised: false,
        };
        wire::send(here.as_fd(), &hello.encode(), &[fd.as_fd()]).unwrap();
    }

    #[test]
    fn a_client_that_breaks_the_protocol_before_it_is_welcomed_is_disconnected() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (plane, harness) = open().await;
            let (_, none) = mpsc::channel(1);
            let notices = std::mem::replace(&mut harness.borrow_mut().notices, none);
            tokio::task::spawn_local(super::super::heed(plane.clone(), notices));
            tokio::task::spawn_local(async move {
                for turn in 1.. {
                    harness.borrow_mut().iterate(turn * 1_000_000);
                    // It is served in one turn and dropped in the next, before anything hears of either.
                    if turn % 4 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            });
            let (here, there) = UnixStream::pair().unwrap();
            hello_of_hostile(&here);
            there.set_nonblocking(true).unwrap();
            let there = tokio::net::UnixStream::from_std(there).unwrap();
            let peer = Peer::of(there.as_fd()).unwrap();
            let served = serve(&plane, EntryPoint::Clients, there, peer);
            tokio::time::timeout(PATIENCE, served).await.expect("it is disconnected");
            let departed = plane.registry.borrow().departed();
            let reasons: Vec<_> = departed.iter().map(|client| client.reason.as_str()).collect();
            assert!(matches!(reasons[..], [one] if one.starts_with("dropped: ")), "{reasons:?}");
        });
    }
}
