//! A hundred clients that break the protocol, or use it up, next to programs that keep to it: these lose no launch, and
//! none of theirs goes ahead without a decision.

use anyhow::{Result, ensure};
use rustix::fd::{AsFd, OwnedFd};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};
use tally_ipc::layout::{RING_SLOTS, STREAM_SLOTS, submission_flags};
use tally_ipc::map::{self, Mapped};
use tally_ipc::ring::{self, Request};
use tally_ipc::wire::{self, Hello, Welcome};
use tally_ipc::{ClientRegion, CoreRegion};

/// Attackers of each kind.
const EACH: usize = 20;
const ROUNDS: u64 = 20;
const LAUNCHES: u64 = 50;
const HIGH_LAUNCHES: u64 = 5;

/// What a client does again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Fills its ring with tickets far in the future: the core drops it.
    FutureTickets,
    /// Talks when it should be silent: the core drops it.
    Talks,
    /// Starts launches under grants that it does not have, ends none, and says that more have yielded than there are:
    /// the core drops it.
    InFlight,
    /// Has launches decided and never ends one.
    NeverEnds,
    /// Lets launches start and end all at once, and takes tickets that it never publishes.
    Bursts,
}

const KINDS: [Kind; 5] =
    [Kind::FutureTickets, Kind::Talks, Kind::InFlight, Kind::NeverEnds, Kind::Bursts];

struct Hostile {
    kind: Kind,
    socket: UnixStream,
    region: Mapped<ClientRegion>,
    core: Mapped<CoreRegion>,
    doorbell: OwnedFd,
    ticket: u64,
}

impl Hostile {
    fn register(socket: &Path, kind: Kind) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let (fd, region) = map::create_client()?;
        let hello = Hello {
            high_priority: false,
            name: format!("{kind:?}"),
            labels: Vec::new(),
            first_ticket: 0,
            initialised: false,
        };
        wire::send(stream.as_fd(), &hello.encode(), &[fd.as_fd()])?;
        let (payload, fds) = wire::receive(stream.as_fd())?;
        Welcome::decode(&payload)?;
        let [core, doorbell] = <[OwnedFd; 2]>::try_from(fds).expect("two descriptors");
        let core = map::open_core(core.as_fd())?;
        Ok(Hostile { kind, socket: stream, region, core, doorbell, ticket: 0 })
    }

    fn launch(&mut self, flags: u32) {
        while ring::has_room(&self.core, self.ticket) {
            let request = Request {
                kernel: 0,
                flags,
                grid: [self.ticket as u32 % 64 + 1, 1, 1],
                block: [32, 1, 1],
                shared_bytes: 0,
                stream: self.ticket as u32 % STREAM_SLOTS as u32,
                completion: self.ticket as u32 + 1,
                demand: Default::default(),
                limited_sms: 0,
            };
            ring::publish(&self.region, self.ticket, &request);
            self.ticket += 1;
            self.region.activity.next_ticket.store(self.ticket, SeqCst);
        }
    }

    fn step(&mut self) {
        match self.kind {
            Kind::FutureTickets => {
                for submission in &self.region.submissions {
                    submission.sequence.store(u64::MAX, SeqCst);
                }
                self.region.activity.next_ticket.store(u64::MAX, SeqCst);
            }
            Kind::Talks => {
                self.launch(submission_flags::LEASED);
                // Fails once it is dropped.
                let _ = (&self.socket).write_all(b"hello again");
            }
            Kind::InFlight => {
                self.launch(submission_flags::LEASED);
                self.region.turnarounds.count.fetch_add(1 << 40, SeqCst);
            }
            Kind::NeverEnds => self.launch(0),
            Kind::Bursts => {
                self.launch(0);
                for slot in &self.region.completions {
                    slot.done.store(self.ticket as u32, SeqCst);
                }
                self.region.activity.next_ticket.store(self.ticket + RING_SLOTS as u64, SeqCst);
            }
        }
        self.region.activity.waiters.store(1, SeqCst);
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }
}

/// Rounds of launches of both programs, each of which is seen to have run once.
fn work(honest: &mut Probe, service: &mut Probe) -> Result<()> {
    for _ in 0..ROUNDS {
        honest.ask(&format!("launch {LAUNCHES}"))?;
        service.ask(&format!("launch {HIGH_LAUNCHES}"))?;
        for probe in [&mut *honest, &mut *service] {
            probe.ask("sync")?;
            probe.check()?;
        }
    }
    Ok(())
}

#[test]
fn a_hundred_hostile_clients_cost_an_honest_one_no_decision_and_no_launch() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    // It decides about every launch by itself.
    let mut core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let mut honest = Probe::start(&scene, Class::BestEffort, "honest")?;
    let mut service = Probe::start(&scene, Class::High, "service")?;
    let mut hostile = Vec::new();
    for at in 0..EACH * KINDS.len() {
        hostile.push(Hostile::register(&scene.socket(), KINDS[at % KINDS.len()])?);
    }
    ensure!(scene.status()?.clients()?.len() == hostile.len() + 2, "all are served");
    let stop = AtomicBool::new(false);
    let worked = std::thread::scope(|scope| {
        let stop = &stop;
        for part in hostile.chunks_mut(25) {
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    part.iter_mut().for_each(Hostile::step);
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let worked = work(&mut honest, &mut service).and_then(|()| {
            // Offenders are counted and dropped, while all go on.
            wait_until("waiting for the offenders to be dropped", JOB_MAX, || {
                let dropped = scene.status()?.0["totals"]["best-effort"]["dropped"].as_u64();
                Ok((dropped == Some(3 * EACH as u64)).then_some(()))
            })
        });
        stop.store(true, SeqCst);
        worked
    });
    worked?;
    let status = scene.status()?;
    let mut reasons = BTreeMap::<&str, usize>::new();
    for departed in status.0["departed"].as_array().into_iter().flatten() {
        *reasons.entry(departed["reason"].as_str().unwrap_or_default()).or_default() += 1;
    }
    let expected = [
        ("dropped: it sent something after registering", EACH),
        ("dropped: its ring holds tickets far in the future", EACH),
        ("dropped: more launches have yielded than can have been asked to", EACH),
    ];
    ensure!(reasons == BTreeMap::from(expected), "{reasons:?}");
    ensure!(status.clients()?.len() == 2 * EACH + 2, "nobody else: {:#}", status.0["clients"]);
    for (name, launches) in [("honest", ROUNDS * LAUNCHES), ("service", ROUNDS * HIGH_LAUNCHES)] {
        let client = status.client(name)?;
        ensure!(client.launches() == launches, "{name}: {:#}", client.0);
        ensure!(client.0["unscheduled"] == 0, "{name} ran without a core: {:#}", client.0);
    }
    let decisions = &status.client("honest")?.0["decisions"];
    ensure!(decisions["submitted"] == ROUNDS * LAUNCHES, "each was decided: {decisions:#}");
    let skipped = |of: &Value| of["tickets_skipped"].as_u64();
    ensure!(skipped(&status.client("honest")?.0) == Some(0), "{:#}", status.0);
    honest.quit()?;
    service.quit()?;
    drop(hostile);
    scene.stop(&mut core, JOB_MAX)
}
