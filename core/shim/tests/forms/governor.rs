//! The core's side: answers launches as the test says, asks to yield, dies.

use crate::ENV_PROGRAM;
use crate::common::{Client, Core, PATIENCE, eventually, shim};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tally_ipc::ClientRegion;
use tally_ipc::layout::submission_flags::{CAN_LIMIT, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE, LEASED};
use tally_ipc::layout::{Counters, transform_state};
use tally_ipc::ring::{self, Answer, Polled, Request};
use tally_ipc::wait::{change, now_ns, wake};
use tally_ipc::wire::Welcome;
use tally_rewriter::TransformRefusal;

/// The SMs of the software device.
pub const SMS: u32 = 4;

type Policy = Box<dyn FnMut(&Request, &str) -> Answer + Send>;

/// What its thread and the test share.
struct Shared {
    client: Client,
    stop: AtomicBool,
    /// The heart beats; without, requests are not answered either.
    alive: AtomicBool,
    policy: Mutex<Policy>,
    /// Requests so far, with the kernels' names.
    seen: Mutex<Vec<(String, Request, Answer)>>,
    /// The ticket that is read next.
    read: AtomicU64,
}

pub struct Governor {
    shared: Arc<Shared>,
    server: Option<std::thread::JoinHandle<()>>,
    child: Child,
    stdin: Option<ChildStdin>,
    said: Receiver<String>,
    _files: tempfile::TempDir,
}

/// Asks the program to yield.
pub struct Line(Arc<Shared>);

impl Line {
    /// Asks the program to yield, or withdraws that.
    pub fn ask(&self, asked: bool) {
        let line = &self.0.client.core.yielding;
        let word = line.word.load(SeqCst);
        if (word & 1 == 1) != asked {
            line.at_ns.store(now_ns(), SeqCst);
            change(&line.word, word.wrapping_add(1));
        }
    }
}

/// Names another driver to test with, by its path: a GPU's own.
const ENV_DRIVER: &str = "TALLY_TEST_DRIVER";

/// Where the software device is, or what takes its place.
fn driver() -> PathBuf {
    if let Some(path) = std::env::var_os(ENV_DRIVER) {
        return path.into();
    }
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let places = [deps.join("libtally_softcuda.so"), deps.join("../libtally_softcuda.so")];
    let newest = places.iter().filter_map(|p| Some((p.metadata().ok()?.modified().ok()?, p))).max();
    newest.expect("no libtally_softcuda.so: build tally-softcuda as well").1.canonicalize().unwrap()
}

impl Governor {
    pub fn start(
        core: &Core,
        test: &str,
        environment: &[(&str, &str)],
        welcome: &Welcome,
    ) -> Governor {
        let files = tempfile::tempdir_in("/dev/shm").unwrap();
        std::os::unix::fs::symlink(driver(), files.path().join("libcuda.so.1")).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(ENV_PROGRAM, test)
            .env("LD_PRELOAD", shim())
            .env("LD_LIBRARY_PATH", files.path())
            .env("TALLY_SOFTCUDA_DEVICE", files.path().join("device"))
            .env("TALLY_SOFTCUDA_SMS", SMS.to_string())
            .env("TALLY_SOFTCUDA_MEMORY_MIB", "256")
            .env("TALLY_SOCKET", core.socket())
            .env("TALLY_PRIORITY", "best-effort")
            .env_remove("TALLY_FAIL")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let (heard, said) = std::sync::mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // What the test harness says is not for us.
                if let Some((_, said)) = line.split_once('@')
                    && heard.send(said.trim_end().to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let client = core.accept(welcome, |_, _| {});
        let (shared, server) = serve(client);
        Governor { shared, server: Some(server), child, stdin, said, _files: files }
    }

    pub fn region(&self) -> &ClientRegion {
        &self.shared.client.region
    }

    /// Tells the client that this many best-effort clients are connected.
    pub fn set_neighbours(&self, count: u32) {
        self.shared.client.core.neighbours.store(count, SeqCst);
    }

    /// Ask what is still running.
    pub fn probe(&self) {
        self.shared.client.probe();
    }

    /// Grants all launches: the client is ungated.
    pub fn grant_all(&self) {
        self.shared.client.ungated();
    }

    /// Lets so many further launches start unasked, on at most `sms` SMs unless that is 0. The program launches nothing
    /// now.
    pub fn lease(&self, launches: u64, sms: u32) {
        let Client { region, core, .. } = &self.shared.client;
        core.granted.width_sms.store(sms, SeqCst);
        ring::grant(core, region.activity.next_ticket.load(SeqCst) + launches);
    }

    /// Whether the client's streams are all idle, as far as the core is told.
    pub fn is_idle(&self) -> bool {
        !self.shared.client.busy()
    }

    pub fn counters(&self) -> &Counters {
        &self.region().counters
    }

    /// Answer launches like this from now on.
    pub fn policy(&self, policy: impl FnMut(&Request, &str) -> Answer + Send + 'static) {
        *self.shared.policy.lock().unwrap() = Box::new(policy);
    }

    /// Answer with this form wherever it is offered.
    pub fn answer(&self, answer: Answer) {
        self.policy(move |request, _| if offers(request, answer) { answer } else { Answer::Whole });
    }

    /// What was asked so far, by kernel. The program does not wait until a leased launch is read.
    pub fn requests(&self, kernel: &str) -> Vec<(Request, Answer)> {
        let asked = self.region().activity.next_ticket.load(SeqCst);
        let is_read = || self.shared.read.load(SeqCst) >= asked;
        eventually("all requests are read", || is_read() || !self.shared.alive.load(SeqCst));
        let seen = self.shared.seen.lock().unwrap();
        seen.iter().filter(|(name, ..)| name == kernel).map(|(_, r, a)| (*r, *a)).collect()
    }

    /// State and detail of a kernel.
    pub fn state(&self, kernel: &str) -> (u8, u8) {
        let region = self.region();
        let count = region.kernel_count.load(SeqCst) as usize;
        let all = region.kernels[..count].iter();
        let mut named = all.filter(|k| k.read().is_some_and(|(name, _)| name == kernel));
        named.next().map_or((0, 0), |k| transform_state::unpack(k.transform.load(SeqCst)))
    }

    pub fn is_refused(&self, kernel: &str, why: TransformRefusal) -> bool {
        self.state(kernel) == (transform_state::WHOLE_ONLY, why.code())
    }

    /// Ask to yield, or not any more.
    pub fn ask_to_yield(&self, asked: bool) {
        self.line().ask(asked);
    }

    /// The line on which another thread can ask.
    pub fn line(&self) -> Line {
        Line(self.shared.clone())
    }

    /// The gate is closed: its thread has heard.
    pub fn is_closed(&self) -> bool {
        self.region().gates.gate.host.load(SeqCst) != 0
    }

    /// Until the gate is closed, and the flag had time to be raised as well.
    pub fn closed(&self) {
        self.ask_to_yield(true);
        eventually("the gate is closed", || self.is_closed());
        std::thread::sleep(Duration::from_millis(100));
    }

    /// Once the program says "go": all it launches is preemptible, and stands at the gate.
    pub fn hold_all_at_the_gate(&mut self) {
        self.expect("go");
        self.policy(|_, _| Answer::Preemptible(0));
        self.closed();
        self.say("on");
    }

    /// No heartbeats and no answers, or again.
    pub fn go_silent(&self, silent: bool) {
        self.shared.alive.store(!silent, SeqCst);
    }

    /// Closes the connection, as a core that ends.
    pub fn die(&self) {
        self.shared.client.die();
    }

    /// The next thing that the program says.
    pub fn hear(&mut self) -> String {
        self.hear_within(PATIENCE).expect("the program says nothing")
    }

    /// The same, if it says anything by then.
    pub fn hear_within(&mut self, time: Duration) -> Option<String> {
        match self.said.recv_timeout(time) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("the program ended"),
        }
    }

    pub fn expect(&mut self, what: &str) {
        assert_eq!(self.hear(), what);
    }

    pub fn say(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        writeln!(stdin, "{line}").unwrap();
        stdin.flush().unwrap();
    }

    /// Serve [`Device::warm_up`](crate::program::Device::warm_up): the kernel becomes ready.
    pub fn warm_up(&mut self, kernel: &str) {
        self.policy(|request, _| match request.flags & CAN_PREPARE {
            0 => Answer::Whole,
            _ => Answer::Preemptible(0),
        });
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "{kernel} is not ready: {:?}", self.state(kernel));
            self.expect("ready?");
            let ready = self.state(kernel).0 == transform_state::READY;
            self.say(if ready { "yes" } else { "no" });
            if ready {
                break;
            }
        }
        self.policy(|_, _| Answer::Whole);
    }

    fn stop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }

    /// The program ends by itself, with success.
    pub fn ends_well(mut self) {
        if self.server.is_some() {
            self.ends(0);
        }
    }

    pub fn ends(&mut self, code: i32) {
        drop(self.stdin.take());
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < PATIENCE, "the program does not end");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(status.code(), Some(code), "{status}");
        self.stop();
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn offers(request: &Request, answer: Answer) -> bool {
    let bit = match answer {
        Answer::Whole => return true,
        Answer::Slice(_) => CAN_SLICE,
        Answer::Preemptible(_) => CAN_PREEMPT,
        Answer::SmLimited(_) => CAN_LIMIT,
    };
    request.flags & bit != 0
}

fn serve(client: Client) -> (Arc<Shared>, std::thread::JoinHandle<()>) {
    let next = client.next;
    client.core.neighbours.store(1, SeqCst);
    let shared = Arc::new(Shared {
        client,
        stop: AtomicBool::new(false),
        alive: AtomicBool::new(true),
        policy: Mutex::new(Box::new(|_, _| Answer::Whole)),
        seen: Mutex::default(),
        read: AtomicU64::new(next),
    });
    let all = shared.clone();
    (shared, std::thread::spawn(move || run(&all, next)))
}

fn run(shared: &Shared, mut next: u64) {
    let Client { region, core, .. } = &shared.client;
    while !shared.stop.load(SeqCst) {
        shared.read.store(next, SeqCst);
        if !shared.alive.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        core.heartbeat.fetch_add(1, SeqCst);
        let request = match ring::poll(region, next) {
            Polled::Empty => {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            Polled::Abandoned => {
                next += 1;
                continue;
            }
            Polled::Request(request) => request,
        };
        let entry = region.kernels.get(request.kernel as usize);
        let name = entry.and_then(|k| k.read()).map_or(String::new(), |(name, _)| name);
        let answer = (shared.policy.lock().unwrap())(&request, &name);
        shared.seen.lock().unwrap().push((name, request, answer));
        ring::consume(core, next);
        next += 1;
        if request.flags & LEASED != 0 {
            continue;
        }
        if answer == Answer::Whole {
            ring::grant(core, next);
        } else {
            ring::decide(core, next - 1, answer);
        }
        let _ = wake(region, core);
    }
    // The last one may have been read in the last round.
    shared.read.store(next, SeqCst);
}
