//! From a configuration to a serving core, and back to nothing.
//!
//! Up: lock, policy, sharing mode, kept profiles, dispatch thread, socket. Down, on SIGTERM,
//! SIGINT or `tallyctl stop`: no new connections, every launch granted, rings
//! empty (at most [`DRAIN_MS_MAX`]), profiles written, MPS daemon stopped, socket removed. A second
//! signal ends at once.

use crate::admit::Rules;
use crate::config::{Config, ConfigError, see_that_apart, socket_folder};
use crate::control::accept::{EntryPoint, accept};
use crate::control::connection::Listener;
use crate::control::journal::Journal;
use crate::control::registry::Registry;
use crate::control::{self, Places, Plane};
use crate::dispatch::control::{AskError, Control};
use crate::dispatch::{self, Handle, Settings};
use crate::error::CoreError;
use crate::gpus::Gpus;
use crate::helpers::Helpers;
use crate::loader::Loader;
use crate::policy_slot::{PolicySlot, Trigger};
use crate::policy_watch::PolicyWatch;
use crate::profile_store::ProfileStore;
use crate::quota::Room;
use crate::record::Recordings;
use crate::refresh;
use crate::sharing::SharingMode;
use crate::signals::{Asked, Signals};
use crate::socket::Claim;
use crate::subordinate;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tally_contract::limits::{DRAIN_MS_MAX, RESERVES_MAX};
use tally_decision_log::Recorder;
use tally_engine::{EngineConfig, policy};
use tokio::net::UnixListener;
use tokio::sync::{Mutex, Notify, oneshot};
use tokio::task::LocalSet;

/// How often it is looked whether the sockets' files are still there.
const SOCKET_LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long until a full channel to the dispatch thread is tried again.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Run a core until it is told to stop.
///
/// # Errors
/// Why it could not start, or what ended it.
pub fn run(config: Config) -> Result<(), CoreError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Policies being compiled, files being read and written.
        .max_blocking_threads(32)
        .build()
        .map_err(CoreError::os("tokio"))?;
    let outcome = LocalSet::new().block_on(&runtime, serve(config));
    // A peer that never finishes its registration must not keep us.
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome
}

/// Each client takes descriptors: have as many as the system lets this process have.
fn raise_descriptors(clients_max: usize) -> Room {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        match setrlimit(Resource::Nofile, raised) {
            Ok(()) => limit = raised,
            Err(error) => tracing::warn!("the limit on open files cannot be raised: {error}"),
        }
    }
    let room = Room::new(limit.current.unwrap_or(u64::MAX), clients_max);
    if room.clients < clients_max {
        tracing::warn!(
            "of the {clients_max} clients of admission.clients_max {} fit, for this process may have {} open files: \
             raise its limit (LimitNOFILE=, `ulimit -n`)",
            room.clients,
            room.descriptors
        );
    }
    room
}

/// `engine.sharing` is that of the sharing mode that comes about.
fn settings(config: &Config) -> Settings {
    Settings {
        spin_ns: config.dispatch.spin_us() * 1_000,
        pin_cpu: config.dispatch.pin_cpu,
        completion_poll_ns: config.dispatch.completion_poll_us * 1_000,
        probe_after_ns: config.dispatch.probe_after_us * 1_000,
        high_stall_ns: config.engine.high_stall_ms * 1_000_000,
        engine: EngineConfig {
            window_ns: config.engine.window_us * 1_000,
            hold_ns_max: config.engine.hold_ms_max * 1_000_000,
            built_in_rule_idle_ns: config.engine.built_in_rule_idle_gap_us * 1_000,
            window_stall_ns: config.engine.window_stall_ms * 1_000_000,
            policy_stall_ns: config.policy.disabling.stall_ns(),
            ..EngineConfig::default()
        },
    }
}

/// What each partition leaves free, where launches are limited to some of the SMs.
fn reserves(config: &Config, sharing: &SharingMode) -> [u32; RESERVES_MAX] {
    let mut reserves = [0; RESERVES_MAX];
    // A program that finds fewer SMs cannot split them.
    let finds_all = !sharing.is_mps() || config.sharing.mps.best_effort_percent == 100;
    if sharing.sharing() == policy::SharingMode::Concurrent && finds_all {
        let all = &config.sm_limits.reserve_sms;
        reserves.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
    }
    reserves
}

async fn serve(config: Config) -> Result<(), CoreError> {
    let mut signals = Signals::new()?;
    let room = raise_descriptors(config.admission.clients_max);
    let (path, admin_path) = (config.socket.path(), config.admin_socket()?);
    let (mode, admin_mode) = (config.socket.mode_bits()?, config.admin.mode_bits()?);
    subordinate::load();
    let claims = [
        Claim::take_locked_beside(&path, mode, &admin_path, admin_mode)?,
        Claim::take(&admin_path, admin_mode)?,
    ];
    let real = |path| std::fs::canonicalize(socket_folder(path)).map_err(CoreError::os("socket"));
    see_that_apart(&real(&path)?.join("x"), &real(&admin_path)?.join("x"))?;
    let mut settings = settings(&config);
    let loader = Arc::new(Loader::new(&config.policy).map_err(ConfigError::Value)?);
    let (slot, policy) =
        PolicySlot::open(loader, &config.policy, settings.engine.built_in_rule_idle_ns)?;
    let folders = (socket_folder(&path), socket_folder(&admin_path));
    let sharing = SharingMode::establish(&config.sharing, folders.0, folders.1).await?;
    settings.engine.sharing = sharing.sharing();
    settings.engine.reserve_sms = reserves(&config, &sharing);
    let (profiles, loaded) = ProfileStore::open(&config.profiles).await;
    let recorder = Recorder::default();
    let experiments = crate::ab::experiments::Experiments::open(&config, &path);
    let recordings = Recordings::open(&config, &policy, &recorder)?;
    let Handle { control, notices, mut ended, pinned } =
        dispatch::start(settings, policy, loaded, recorder)?;
    if pinned != config.dispatch.pin_cpu {
        tracing::warn!(cpu = config.dispatch.pin_cpu, "the dispatch thread could not be pinned");
    }
    let listen = |claim: &Claim, mode| {
        UnixListener::from_std(claim.listen(mode)?).map_err(CoreError::os("socket"))
    };
    let listeners = [listen(&claims[0], mode)?, listen(&claims[1], admin_mode)?];
    let claims = claims.map(|claim| Rc::new(RefCell::new(claim)));
    let active = slot.active();
    tracing::info!(
        socket = %path.display(), admin_socket = %admin_path.display(),
        policy = active.name, digest = active.digest,
        spin_us = config.dispatch.spin_us(), cpu = pinned, clients_max = room.clients,
        descriptors = room.descriptors, "serving"
    );
    let places = Places::new(&config.admission, &room);
    let plane = Rc::new(Plane {
        rules: Rules::new(&config, rustix::process::geteuid().as_raw()),
        config,
        control,
        registry: RefCell::new(Registry::default()),
        ungoverned: RefCell::default(),
        looker: Rc::default(),
        policy: slot,
        experiments,
        profiles,
        recordings,
        sharing: RefCell::new(Some(sharing)),
        stop: Notify::new(),
        keeps_mps: Cell::new(false),
        started: Instant::now(),
        pinned,
        gpus: Arc::new(Gpus::listed()),
        status_turn: Mutex::new(()),
        non_admins_turn: Mutex::new(()),
        helpers: Helpers::default(),
        room,
        places,
        journal: Journal::default(),
    });
    let entry_points =
        listeners.into_iter().zip([EntryPoint::Clients, EntryPoint::Admin]).zip(claims.clone());
    let accepting: Vec<_> = entry_points
        .map(|((listener, entry_point), claim)| {
            tokio::task::spawn_local(accept_at(plane.clone(), claim, listener, entry_point))
        })
        .collect();
    tokio::task::spawn_local(control::heed(plane.clone(), notices));
    plane.recordings.heed(&plane.control);
    let refresh = plane.sharing.borrow().as_ref().and_then(SharingMode::refresh);
    if let Some((program, shown)) = refresh {
        let plane = plane.clone();
        let is_wanted = move || plane.registry.borrow().has_both_classes();
        tokio::task::spawn_local(refresh::keep(program, shown, is_wanted));
    }
    if plane.config.policy.watch {
        tokio::task::spawn_local(watch(plane.clone()));
    }
    if let Some(every) = plane.profiles.save_every() {
        tokio::task::spawn_local(control::keep(plane.clone(), every));
    }
    let outcome = until_stopped(&plane, &mut signals, &mut ended).await;
    accepting.iter().for_each(|task| task.abort());
    let outcome = match outcome {
        Ok(()) => drain(&plane, &mut signals).await,
        error => error,
    };
    plane.recordings.finish().await;
    let sharing = plane.sharing.borrow_mut().take();
    if let Some(sharing) = sharing {
        tokio::select! {
            () = sharing.end(plane.keeps_mps.get()) => {}
            () = second_stop(&mut signals) => {}
        }
    }
    drop(claims);
    outcome
}

/// Accept connections; if the socket's file is taken away, make it anew.
async fn accept_at(
    plane: Rc<Plane>,
    claim: Rc<RefCell<Claim>>,
    mut listener: UnixListener,
    entry_point: EntryPoint,
) {
    let mut said = String::new();
    loop {
        let in_place = async {
            while claim.borrow().is_in_place() {
                tokio::time::sleep(SOCKET_LOOK_EVERY).await;
            }
        };
        let taking = Listener::new(listener, plane.own_helper());
        tokio::select! {
            () = accept(plane.clone(), taking, entry_point) => return,
            () = in_place => {}
        }
        listener = loop {
            let again = claim.borrow_mut().listen_again();
            match again.and_then(|l| UnixListener::from_std(l).map_err(CoreError::os("socket"))) {
                Ok(listener) => break listener,
                Err(error) if error.to_string() != said => {
                    said = error.to_string();
                    tracing::error!(
                        ?entry_point,
                        "the socket's file is gone and cannot be made anew: {said}"
                    );
                }
                Err(_) => {}
            }
            tokio::time::sleep(SOCKET_LOOK_EVERY).await;
        };
        said.clear();
        tracing::warn!(?entry_point, "the socket's file was taken away: it is made anew");
    }
}

async fn until_stopped(
    plane: &Rc<Plane>,
    signals: &mut Signals,
    ended: &mut oneshot::Receiver<()>,
) -> Result<(), CoreError> {
    loop {
        tokio::select! {
            asked = signals.next() => match asked {
                Asked::Stop => return Ok(()),
                Asked::Reload => {
                    let plane = plane.clone();
                    tokio::task::spawn_local(async move { plane.reload(Trigger::Asked).await });
                }
            },
            () = plane.stop.notified() => return Ok(()),
            _ = &mut *ended => {
                return Err(CoreError::Dispatch("a panic, see above".into()));
            }
        }
    }
}

async fn drain(plane: &Plane, signals: &mut Signals) -> Result<(), CoreError> {
    tokio::select! {
        () = plane.experiments.close() => {}
        () = second_stop(signals) => return Ok(()),
    }
    tracing::info!("draining: every launch is granted");
    // The dispatch thread ends with the drain; what it knows is written afterwards.
    tokio::select! {
        // Gone or too busy: then the last interval's profiles are lost.
        _ = plane.profiles.gather(&plane.control) => {}
        () = second_stop(signals) => return Ok(()),
    }
    let drained = async {
        loop {
            let within = Duration::from_millis(DRAIN_MS_MAX);
            match plane.control.ask(|done| Control::Drain { within, done }).await {
                Err(AskError::Busy) => tokio::time::sleep(ASK_AGAIN).await,
                drained => return drained,
            }
        }
    };
    tokio::select! {
        drained = drained => match drained {
            Ok(true) => tracing::info!("drained"),
            Ok(false) => tracing::warn!("clients went on submitting; stopped anyway"),
            Err(error) => return Err(CoreError::Dispatch(error.to_string())),
        },
        () = second_stop(signals) => tracing::warn!("second signal: ending at once"),
    }
    tokio::select! {
        () = plane.profiles.write() => {}
        () = second_stop(signals) => {}
    }
    Ok(())
}

async fn second_stop(signals: &mut Signals) {
    while signals.next().await != Asked::Stop {}
}

/// Reload the policy that the core was started with when its files change.
async fn watch(plane: Rc<Plane>) {
    let debounce = Duration::from_millis(plane.config.policy.debounce_ms);
    let mut watch = match PolicyWatch::new(debounce) {
        Ok(watch) => watch,
        Err(error) => {
            tracing::warn!("the policy's file is not watched, use SIGHUP: {error}");
            return;
        }
    };
    let Some(source) = plane.policy.own_source() else { return };
    watch.follow(&source);
    loop {
        watch.changed().await;
        plane.reload(Trigger::Changed).await;
    }
}
