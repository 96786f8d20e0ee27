//! What the tests share: a fake driver and programs in C, compiled once, and a
//! core that does what the test says.

#![allow(dead_code)]

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use tally_ipc::map::{self, Mapped};
use tally_ipc::ring::{self, Polled, Request};
use tally_ipc::wait::{now_ns, wake};
use tally_ipc::wire::{self, Hello, SharingMode, Welcome};
use tally_ipc::{ClientRegion, CoreRegion};

/// Tests that wait for something give up after this long; nothing is measured.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Where the C programs are.
pub struct Built {
    dir: tempfile::TempDir,
}

fn gcc(dir: &Path, arguments: &[&str]) {
    let status = Command::new("gcc").current_dir(dir).args(arguments).status().expect("gcc runs");
    assert!(status.success(), "gcc {arguments:?}");
}

/// The ways a program finds its driver: see `program.c`.
pub const WAYS: [u32; 4] = [1, 2, 3, 4];

impl Built {
    pub fn get() -> &'static Built {
        static BUILT: OnceLock<Built> = OnceLock::new();
        BUILT.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let c = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
            let source = |name: &str| c.join(name).to_str().unwrap().to_owned();
            let flags = ["-O1", "-Wall", "-Wno-unused-function", "-fPIC"];
            let compile = |more: &[&str]| gcc(dir.path(), &[&flags[..], more].concat());
            compile(&[
                "-shared",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                "libcuda.so.1",
                &source("libcuda.c"),
            ]);
            compile(&["-shared", "-o", "libthird.so", &source("third.c")]);
            compile(&["-shared", "-o", "libother.so", &source("other.c")]);
            for way in WAYS {
                let (define, output) = (format!("-DWAY={way}"), format!("program{way}"));
                let program = source("program.c");
                let mut arguments =
                    vec![define.as_str(), "-o", &output, &program, "-lpthread", "-ldl"];
                if way == 1 {
                    arguments.push("./libcuda.so.1");
                }
                compile(&arguments);
            }
            Built { dir }
        })
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// What `LD_PRELOAD` names, in a folder with the shim that was built along with this test.
pub fn shim() -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        for name in ["libtally_preload.so", "libtally_shim.so"] {
            let candidates = [deps.join(name), deps.join("..").join(name)];
            let newest = candidates
                .iter()
                .filter_map(|p| Some((p.metadata().ok()?.modified().ok()?, p)))
                .max()
                .expect("cargo built both libraries");
            let file = newest.1.canonicalize().unwrap();
            std::os::unix::fs::symlink(file, folder.path().join(name)).unwrap();
        }
        folder
    });
    folder.path().join("libtally_preload.so")
}

/// A running program under the shim.
pub struct Program {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    pub fn start(way: u32, environment: &[(&str, &str)]) -> Program {
        Program::start_with(way, &[], environment)
    }

    /// With more libraries preloaded behind the shim.
    pub fn start_with(way: u32, behind: &[&str], environment: &[(&str, &str)]) -> Program {
        let built = Built::get();
        let mut preload = shim().to_str().unwrap().to_owned();
        for library in behind {
            preload.push(':');
            preload.push_str(built.dir().join(library).to_str().unwrap());
        }
        let mut command = Command::new(built.dir().join(format!("program{way}")));
        command
            .current_dir(built.dir())
            .env("LD_LIBRARY_PATH", built.dir())
            .env("LD_PRELOAD", preload)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for name in ["TALLY_SOCKET", "TALLY_PRIORITY", "TALLY_FAIL", "TALLY_SHIM_LOG"] {
            command.env_remove(name);
        }
        command.envs(environment.iter().copied());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Program { child, stdin, stdout }
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
        self.stdin.flush().unwrap();
    }

    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Sends a command and reads the one line that answers it.
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// Commands that must answer 0.
    pub fn ok(&mut self, lines: &[&str]) {
        for line in lines {
            assert_eq!(self.ask(line), "0", "answer to {line:?}");
        }
    }

    /// What the fake driver says.
    pub fn driver(&mut self, question: &str) -> i64 {
        self.ask(&format!("control {question}")).parse().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// End of input; returns exit code and whatever else it printed.
    pub fn finish(mut self) -> (Option<i32>, String, String) {
        drop(self.stdin);
        let (mut out, mut err) = (String::new(), String::new());
        self.stdout.read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (self.child.wait().unwrap().code(), out, err)
    }

    /// It ends by itself and prints nothing more.
    pub fn ends_well(self) {
        assert_eq!(self.finish(), (Some(0), String::new(), String::new()));
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A core's listening socket.
pub struct Core {
    dir: tempfile::TempDir,
    listener: Option<UnixListener>,
}

/// One client as the core sees it.
pub struct Client {
    pub hello: Hello,
    pub region: Mapped<ClientRegion>,
    pub core: Mapped<CoreRegion>,
    pub doorbell: OwnedFd,
    socket: UnixStream,
    pub next: u64,
}

pub fn welcome() -> Welcome {
    Welcome {
        client_id: 7,
        high_priority: false,
        class_reason: String::new(),
        sharing: SharingMode::Unmanaged,
        spin_ns: 20_000,
        fail_hold: false,
        profiles_units: true,
        rewrite: Default::default(),
    }
}

impl Core {
    pub fn new() -> Core {
        let dir = tempfile::tempdir().unwrap();
        let listener = Some(UnixListener::bind(dir.path().join("core.sock")).unwrap());
        Core { dir, listener }
    }

    pub fn socket(&self) -> String {
        self.dir.path().join("core.sock").to_str().unwrap().to_owned()
    }

    /// Take the next client on. `prepare` sees the region before the client does.
    pub fn accept(&self, welcome: &Welcome, prepare: impl FnOnce(&Hello, &CoreRegion)) -> Client {
        let (socket, _) = self.listener.as_ref().unwrap().accept().unwrap();
        let (payload, fds) = wire::receive(socket.as_fd()).unwrap();
        let hello = Hello::decode(&payload).unwrap();
        let region = map::open_client(fds[0].as_fd()).unwrap();
        let (fd, core) = map::create_core().unwrap();
        core.consumed.store(hello.first_ticket, SeqCst);
        core.heartbeat.store(1, SeqCst);
        core.serving.store(1, SeqCst);
        prepare(&hello, &core);
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let doorbell = new();
        let fds = [fd.as_fd(), doorbell.as_fd()];
        wire::send(socket.as_fd(), &welcome.encode(), &fds).unwrap();
        let next = hello.first_ticket;
        Client { hello, region, core, doorbell, socket, next }
    }

    /// Stops listening and removes the socket.
    pub fn stop(&mut self) {
        self.listener = None;
        std::fs::remove_file(self.dir.path().join("core.sock")).unwrap();
    }

    pub fn listen_again(&mut self) {
        self.listener = Some(UnixListener::bind(self.dir.path().join("core.sock")).unwrap());
    }
}

/// Wait for a condition; a failure names it.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "never came true: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Client {
    /// The next request, if it is there.
    pub fn poll(&mut self) -> Option<Request> {
        loop {
            match ring::poll(&self.region, self.next) {
                Polled::Empty => return None,
                Polled::Abandoned => self.next += 1,
                Polled::Request(request) => {
                    ring::consume(&self.core, self.next);
                    self.next += 1;
                    return Some(request);
                }
            }
        }
    }

    /// The next request, waited for.
    pub fn take(&mut self) -> Request {
        let start = Instant::now();
        loop {
            if let Some(request) = self.poll() {
                return request;
            }
            assert!(start.elapsed() < PATIENCE, "no request came");
            self.core.heartbeat.fetch_add(1, SeqCst);
            std::thread::yield_now();
        }
    }

    /// Everything taken so far may run.
    pub fn grant(&self) {
        ring::grant(&self.core, self.next);
        let _ = wake(&self.region, &self.core);
    }

    pub fn ungated(&self) {
        ring::grant(&self.core, u64::MAX);
        let _ = wake(&self.region, &self.core);
    }

    pub fn revoke(&self) {
        ring::grant(&self.core, self.next);
    }

    /// Serve `n` requests, one at a time; returns them.
    pub fn serve(&mut self, n: usize) -> Vec<Request> {
        (0..n)
            .map(|_| {
                let request = self.take();
                self.grant();
                request
            })
            .collect()
    }

    /// Ask what is still running.
    pub fn probe(&self) {
        let word = &self.core.probes;
        tally_ipc::wait::change(word, word.load(SeqCst) + 1);
    }

    /// How often the doorbell rang since last asked.
    pub fn rang(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.doorbell, &mut count[..]) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    pub fn busy(&self) -> bool {
        self.region.activity.busy_streams.load(SeqCst) != 0
    }

    pub fn done(&self, request: &Request) -> bool {
        let word = &self.region.completions[request.stream as usize];
        ring::is_done(word.done.load(SeqCst), request.completion)
    }

    /// Wait until the shim says so.
    pub fn ends(&self, request: &Request) {
        eventually("the launch is done", || self.done(request));
    }

    /// The connection ends, the region stays mapped here.
    pub fn die(&self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Keep the heart beating for a while.
    pub fn beat_for(&self, time: Duration) {
        let end = now_ns() + time.as_nanos() as u64;
        while now_ns() < end {
            self.core.heartbeat.fetch_add(1, SeqCst);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Core {
    /// Take the next connection and answer by hand.
    pub fn reply_raw(&self, answer: impl FnOnce(&mut UnixStream)) {
        let (mut socket, _) = self.listener.as_ref().unwrap().accept().unwrap();
        answer(&mut socket);
    }
}

impl Client {
    /// The client's end of the connection is closed.
    pub fn is_gone(&self) -> bool {
        self.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        (&self.socket).read(&mut [0; 16]).unwrap() == 0
    }
}

/// Start a best-effort program and take it on.
pub fn attached(core: &Core, welcome: &Welcome, more: &[(&str, &str)]) -> (Program, Client) {
    attached_way(2, core, welcome, more)
}

pub fn attached_way(
    way: u32,
    core: &Core,
    welcome: &Welcome,
    more: &[(&str, &str)],
) -> (Program, Client) {
    let socket = core.socket();
    let mut environment =
        vec![("TALLY_SOCKET", socket.as_str()), ("TALLY_PRIORITY", "best-effort")];
    environment.extend(more);
    let mut p = Program::start(way, &environment);
    p.ok(&["find"]);
    p.tell("init 0");
    let client = core.accept(welcome, |_, _| {});
    assert_eq!(p.answer(), "0");
    p.ok(&["module"]);
    (p, client)
}
