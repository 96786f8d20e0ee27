//! A core process to test against, and clients made of `tally-ipc` alone: no
//! shim, no GPU.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod users;

use rustix::fd::{AsFd, OwnedFd};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};
use tally_harness::admin::{files_of, send_with};
use tally_ipc::layout::{Completion, RING_SLOTS, submission_flags};
use tally_ipc::map::{self, Mapped};
use tally_ipc::ring::{self, Answer, Request};
use tally_ipc::wait::{self, now_ns};
use tally_ipc::wire::{self, Hello, Welcome, WireError};
use tally_ipc::{ClientRegion, CoreRegion};

/// How long anything may take that should happen at once: generous, because the
/// machine may be busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Wait until `what` is true.
pub fn eventually(why: &str, mut what: impl FnMut() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {why}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A policy that `cargo xtask policies` built.
pub fn policy(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_tally-core"));
    let path = program.parent().unwrap().join("policies").join(name).with_extension("wasm");
    assert!(path.exists(), "{} is missing: run `cargo xtask policies` first", path.display());
    path
}

/// The rest of the configuration of a core that serves by the built-in rule.
pub const BUILT_IN: &str = "[policy]\nrequired = false\nfile = \"/nonexistent/policy.wasm\"\n";

/// A running `tally-core`, with the folder of its sockets.
pub struct Core {
    pub dir: tempfile::TempDir,
    /// Path of the socket where clients register.
    pub socket: PathBuf,
    /// Path of the socket that takes admin requests.
    pub admin: PathBuf,
    child: Child,
}

impl Core {
    pub fn command(dir: &Path, config: &str, args: &[&str]) -> Command {
        let file = dir.join("core.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tally-core"));
        command
            .arg("--config")
            .arg(file)
            .arg("--socket")
            .arg(dir.join("run/clients/core.sock"))
            .args(args)
            .env("RUST_LOG", "info")
            .env("XDG_STATE_HOME", dir.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.join("log")).unwrap());
        command
    }

    /// Start one and wait until it serves.
    pub fn start(config: &str, args: &[&str]) -> Core {
        Self::start_in(tempfile::tempdir().unwrap(), config, args)
    }

    pub fn start_in(dir: tempfile::TempDir, config: &str, args: &[&str]) -> Core {
        let command = Self::command(dir.path(), config, args);
        Self::run(dir, command)
    }

    /// One whose files cannot have more than 64 KiB.
    pub fn start_with_small_files(dir: tempfile::TempDir, config: &str) -> Core {
        let core = Self::command(dir.path(), config, &[]);
        let mut command = Command::new("sh");
        // In blocks of 512 bytes; without the signal writing is an error.
        command.args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$@\"", "sh"]);
        command.arg(core.get_program()).args(core.get_args());
        command.envs(core.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self::run(dir, command)
    }

    pub fn run(dir: tempfile::TempDir, mut command: Command) -> Core {
        let socket = dir.path().join("run/clients/core.sock");
        let admin = wire::admin_socket_of(&socket).unwrap();
        let child = command.spawn().unwrap();
        let mut core = Core { dir, socket, admin, child };
        eventually("the core serves", || {
            if let Some(status) = core.child.try_wait().unwrap() {
                panic!("the core ended ({status}): {}", core.log());
            }
            core.try_admin(&json!({"cmd": "status"})).is_some()
        });
        core
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        eventually("the core ends", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// SIGKILL. The folder, with the socket, stays.
    pub fn kill(mut self) -> tempfile::TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::mem::replace(&mut self.dir, dir)
    }

    fn try_admin(&self, request: &Value) -> Option<Value> {
        admin(&self.admin, request)
    }

    /// Ask; panics unless the answer is `ok`.
    pub fn ask(&self, request: Value) -> Value {
        let answer = self.try_admin(&request).expect("the core answers");
        answer.get("ok").unwrap_or_else(|| panic!("{request} -> {answer}")).clone()
    }

    /// Makes a request that must fail; returns the error's code and message.
    pub fn refused(&self, request: Value) -> (String, String) {
        let answer = self.try_admin(&request).expect("the core answers");
        let word = |at: &str| answer.pointer(at).and_then(Value::as_str).map(str::to_owned);
        (
            word("/error/code").unwrap_or_else(|| panic!("{request} -> {answer}")),
            word("/error/message").unwrap(),
        )
    }

    pub fn status(&self) -> Value {
        self.ask(json!({"cmd": "status"}))
    }

    /// What status says of a client.
    pub fn client(&self, id: u32) -> Option<Value> {
        let status = self.status();
        status["clients"].as_array().unwrap().iter().find(|c| c["id"] == id).cloned()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the core's log ---\n{}", self.log());
        }
    }
}

/// One request on a connection of its own, with the files that it names.
pub fn admin(socket: &Path, request: &Value) -> Option<Value> {
    admin_with(socket, request, &files_of(request))
}

/// Sends an admin request with these files.
pub fn admin_with(
    socket: &Path,
    request: &Value,
    files: &[tally_ipc::admin::File],
) -> Option<Value> {
    let stream = UnixStream::connect(socket).ok()?;
    send_with(&stream, request, files).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

pub fn hello(name: &str, high_priority: bool) -> Hello {
    Hello {
        high_priority,
        name: name.into(),
        labels: vec![("test".into(), "1".into())],
        first_ticket: 0,
        initialised: false,
    }
}

/// A client as the shim would be one.
pub struct Client {
    pub socket: UnixStream,
    pub region_fd: OwnedFd,
    pub region: Mapped<ClientRegion>,
    pub core: Mapped<CoreRegion>,
    pub doorbell: OwnedFd,
    probes: std::cell::Cell<u32>,
    pub welcome: Welcome,
    completion: u32,
    submitted_ns: u64,
    /// The last submission started under a lease.
    pub leased: bool,
}

impl Client {
    pub fn register(socket: &Path, hello: &Hello) -> Result<Client, WireError> {
        let (region_fd, region) = map::create_client().unwrap();
        Self::register_with(socket, hello, region_fd, region)
    }

    /// With a region that exists already: a re-attach.
    pub fn register_with(
        socket: &Path,
        hello: &Hello,
        region_fd: OwnedFd,
        region: Mapped<ClientRegion>,
    ) -> Result<Client, WireError> {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        wire::send(stream.as_fd(), &hello.encode(), &[region_fd.as_fd()])?;
        let (payload, fds) = wire::receive(stream.as_fd())?;
        let welcome = Welcome::decode(&payload)?;
        let [core, doorbell]: [OwnedFd; 2] = fds.try_into().unwrap();
        let core = map::open_core(core.as_fd()).unwrap();
        assert_eq!(core.serving.load(SeqCst), 1, "welcomed before it is served");
        Ok(Client {
            socket: stream,
            region_fd,
            region,
            core,
            doorbell,
            probes: std::cell::Cell::new(0),
            welcome,
            completion: 0,
            submitted_ns: 0,
            leased: false,
        })
    }

    pub fn best_effort(core: &Core, name: &str) -> Client {
        Client::register(&core.socket, &hello(name, false)).unwrap()
    }

    pub fn high(core: &Core, name: &str) -> Client {
        let client = Client::register(&core.socket, &hello(name, true)).unwrap();
        assert!(client.welcome.high_priority, "{}", client.welcome.class_reason);
        client
    }

    pub fn id(&self) -> u32 {
        self.welcome.client_id
    }

    /// Whether the core wanted something of the helper thread since last asked.
    pub fn probed(&self) -> bool {
        let probes = self.core.probes.load(SeqCst);
        self.probes.replace(probes) != probes
    }

    pub fn ring(&self) {
        rustix::io::write(&self.doorbell, &1u64.to_ne_bytes()).unwrap();
    }

    /// Submit a launch on stream 0 and return its ticket and completion value.
    pub fn submit(&mut self) -> (u64, u32) {
        self.submit_kernel(0)
    }

    /// The same of another kernel of its table.
    pub fn submit_kernel(&mut self, kernel: u32) -> (u64, u32) {
        self.submit_grid(kernel, 1_024)
    }

    /// Launch kernel 0 with a grid of so many blocks, and say that it ended but not how long it took.
    pub fn launch_unmeasured(&mut self, blocks: u32) {
        let (ticket, completion) = self.submit_grid(0, blocks);
        if !self.leased {
            self.wait(ticket);
        }
        self.region.completions[0].done.store(completion, SeqCst);
    }

    fn submit_grid(&mut self, kernel: u32, blocks: u32) -> (u64, u32) {
        let ticket = ring::take_ticket(&self.region);
        let start = Instant::now();
        self.submitted_ns = now_ns();
        while !ring::has_room(&self.core, ticket) {
            assert!(start.elapsed() < PATIENCE, "no room in the ring for {ticket}");
            std::thread::sleep(Duration::from_micros(50));
        }
        self.completion = self.completion.wrapping_add(1);
        self.leased = self.publish_grid(ticket, kernel, blocks);
        (ticket, self.completion)
    }

    /// A launch of kernel 0 with a ticket that has room; it is not told when it has ended.
    pub fn publish(&self, ticket: u64) {
        self.publish_grid(ticket, 0, 1_024);
    }

    /// Whether it is leased.
    fn publish_grid(&self, ticket: u64, kernel: u32, blocks: u32) -> bool {
        let mut request = Request {
            kernel,
            flags: 0,
            grid: [blocks, 1, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            stream: 0,
            completion: self.completion,
            demand: Default::default(),
            limited_sms: 0,
        };
        let leased = self.core.granted.ticket.load(SeqCst) > ticket;
        if leased {
            request.flags |= submission_flags::LEASED;
        }
        ring::publish(&self.region, ticket, &request);
        if ring::core_needs_wake(&self.core) {
            self.ring();
        }
        leased
    }

    pub fn answer(&self, ticket: u64) -> Option<Answer> {
        ring::answer(&self.core, ticket)
    }

    /// Wait for an answer as the shim does.
    pub fn wait(&self, ticket: u64) -> Answer {
        let start = Instant::now();
        loop {
            let ready = || self.answer(ticket);
            let spin = Duration::from_nanos(self.welcome.spin_ns);
            if let Some(answer) =
                wait::wait(&self.region, &self.core, spin, wait::CLIENT_NAP, ready)
            {
                return answer;
            }
            assert!(start.elapsed() < PATIENCE, "ticket {ticket} is not answered");
        }
    }

    /// Whether `ticket` stays unanswered over several of the core's heartbeats.
    pub fn stays_held(&self, ticket: u64) -> bool {
        let beat = self.core.heartbeat.load(SeqCst);
        eventually("the core beats", || self.core.heartbeat.load(SeqCst) >= beat + 2);
        self.answer(ticket).is_none()
    }

    /// The GPU finished everything up to this completion value.
    pub fn complete(&self, completion: u32) {
        let slot = &self.region.completions[0];
        let took_ns = now_ns() - self.submitted_ns;
        slot.measured.store(Completion::pack_measured(completion, took_ns), Relaxed);
        slot.done.store(completion, SeqCst);
    }

    /// Submits a launch, waits for its answer and completes it.
    pub fn launch(&mut self) -> Answer {
        let (ticket, completion) = self.submit();
        // One started under a lease has no answer to wait for: the lease may be
        // taken back as soon as it was used.
        let answer = if self.leased { Answer::Whole } else { self.wait(ticket) };
        self.complete(completion);
        answer
    }

    pub fn set_busy(&self, busy: bool) {
        let a = &self.region.activity;
        if busy {
            a.busy_since_ns.store(now_ns(), Relaxed);
            a.busy_periods.fetch_add(1, Relaxed);
            self.region.counters.by_entry_point.kernel.fetch_add(1, Relaxed);
        } else {
            a.idle_since_ns.store(now_ns(), Relaxed);
        }
        a.busy_streams.store(busy.into(), SeqCst);
        if self.core.notify.load(SeqCst) != 0 {
            self.ring();
        }
    }

    /// Whether the core has dropped the connection.
    pub fn is_dropped(&self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        matches!(std::io::Read::read(&mut &self.socket, &mut [0u8; 1]), Ok(0))
    }
}

/// Fill every byte that a client may write with garbage that depends on `seed`.
pub fn scribble(region: &ClientRegion, seed: u64) {
    let mut x = seed | 1;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let a = &region.activity;
    a.busy_streams.store(next(), Relaxed);
    a.busy_periods.store(next(), Relaxed);
    a.idle_since_ns.store(next(), Relaxed);
    a.busy_total_ns.store(next(), Relaxed);
    a.next_ticket.store(next(), Relaxed);
    a.waiters.store(next() as u32, Relaxed);
    region.counters.by_entry_point.kernel.store(next(), Relaxed);
    region.report.governed.store(next() as u32, Relaxed);
    region.report.sm_count.store(next() as u32, Relaxed);
    region.kernel_count.store(next() as u32, Relaxed);
    for c in &region.completions {
        c.done.store(next() as u32, Relaxed);
        c.measured.store(next(), Relaxed);
    }
    for k in region.kernels.iter().take(64) {
        k.ready.store(next() as u32, Relaxed);
        k.identity[0].store(next(), Relaxed);
        k.identity[1].store(next(), Relaxed);
    }
    for (i, s) in region.submissions.iter().enumerate() {
        s.kernel.store(next() as u32, Relaxed);
        s.flags.store(next() as u32, Relaxed);
        for n in s.grid.iter().chain(&s.block) {
            n.store(next() as u32, Relaxed);
        }
        s.shared_bytes.store(next() as u32, Relaxed);
        s.stream.store(next() as u32, Relaxed);
        s.completion.store(next() as u32, Relaxed);
        let sequence = match next() % 4 {
            0 => next(),
            // Plausible, so that all of the core's path is walked.
            _ => (next() % 64) * RING_SLOTS as u64 + i as u64 + 1,
        };
        s.sequence.store(sequence, SeqCst);
    }
}
