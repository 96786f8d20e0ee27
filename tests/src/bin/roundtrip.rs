//! Measures the round trip of one decision: a best-effort launch published in
//! the ring until its answer is seen, against a running `tally-core`.
//!
//! It speaks the shim's protocol itself, so that nothing but the round trip is
//! in the figure. A second, idle, high-priority client is registered as well:
//! without one a policy may hand out leases and would not be asked.

use anyhow::{Context, Result, bail};
use clap::Parser;
use rustix::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};
use tally_ipc::layout::{ClientRegion, CoreRegion};
use tally_ipc::map::{self, Mapped};
use tally_ipc::ring::{self, Request};
use tally_ipc::{wait, wire};

/// Measure the round trip of a decision against a running tally-core.
#[derive(Parser)]
struct Options {
    /// Path of the socket where the core registers clients
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Number of launches to measure
    #[arg(long, default_value_t = 200_000)]
    launches: usize,
    /// Launches before measuring starts.
    #[arg(long, default_value_t = 20_000)]
    warm_up: usize,
    /// Time between an answer and the next launch, microseconds.
    #[arg(long, default_value_t = 5)]
    gap_us: u64,
}

struct Client {
    region: Mapped<ClientRegion>,
    core: Mapped<CoreRegion>,
    doorbell: OwnedFd,
    spin: Duration,
    _socket: UnixStream,
}

fn register(socket: &std::path::Path, high_priority: bool) -> Result<Client> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("connecting to the core at {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let (memory, region) = map::create_client()?;
    let hello = wire::Hello {
        high_priority,
        name: "roundtrip".into(),
        labels: vec![],
        first_ticket: 0,
        initialised: true,
    };
    wire::send(stream.as_fd(), &hello.encode(), &[memory.as_fd()])?;
    let (payload, fds) = wire::receive(stream.as_fd())?;
    let welcome = wire::Welcome::decode(&payload)?;
    if welcome.high_priority != high_priority {
        bail!("the core admitted it as another class: {}", welcome.class_reason);
    }
    let [core, doorbell] =
        <[OwnedFd; 2]>::try_from(fds).ok().context("the core sent no descriptors")?;
    Ok(Client {
        region,
        core: map::open_core(core.as_fd())?,
        doorbell,
        spin: Duration::from_nanos(welcome.spin_ns),
        _socket: stream,
    })
}

impl Client {
    /// One launch that finishes at once; the time until its answer, ns.
    fn launch(&self, completion: u32) -> Result<u64> {
        let request = Request {
            kernel: 0,
            flags: 0,
            grid: [64, 1, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            stream: 0,
            completion,
            demand: Default::default(),
            limited_sms: 0,
        };
        let started = Instant::now();
        let ticket = ring::take_ticket(&self.region);
        ring::publish(&self.region, ticket, &request);
        if ring::core_needs_wake(&self.core) {
            rustix::io::write(&self.doorbell, &1u64.to_ne_bytes())?;
        }
        let answer = || ring::answer(&self.core, ticket);
        let deadline = Duration::from_secs(10);
        while wait::wait(&self.region, &self.core, self.spin, wait::CLIENT_NAP, answer).is_none() {
            if started.elapsed() > deadline {
                bail!("no decision for launch {completion} in {deadline:?}");
            }
        }
        let took = started.elapsed().as_nanos() as u64;
        self.region.completions[0].done.store(completion, Release);
        Ok(took)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let socket = options.socket.unwrap_or_else(wire::default_socket);
    let _high = register(&socket, true)?;
    let client = register(&socket, false)?;
    client.region.kernels[0].publish(b"roundtrip", 0);
    client.region.kernel_count.store(1, Relaxed);
    let mut taken = Vec::with_capacity(options.launches);
    for i in 0..options.warm_up + options.launches {
        let ns = client.launch(i as u32 + 1)?;
        if i >= options.warm_up {
            taken.push(ns);
        }
        let until = Instant::now() + Duration::from_micros(options.gap_us);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
    taken.sort_unstable();
    let at = |q: f64| taken[((taken.len() - 1) as f64 * q) as usize];
    println!(
        "{{\"launches\": {}, \"gap_us\": {}, \"p50_ns\": {}, \"p90_ns\": {}, \"p99_ns\": {}, \"p999_ns\": {}, \"max_ns\": {}}}",
        taken.len(),
        options.gap_us,
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999),
        at(1.0)
    );
    Ok(())
}
