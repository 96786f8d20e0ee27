//! What an honest client's decisions cost while others attack the core, against the same run in which these are
//! connected and do nothing: `cargo xtask bench -p tally-core stalls`, as root, on two CPUs or more.
//!
//! Attackers that never pause take CPU time from everything on their CPU. To measure what they cost the core
//! without that, the dispatch thread and the honest client have the first CPU to themselves (`SCHED_FIFO`, the
//! client with the higher priority), and the attackers and the core's other threads have the second. With
//! `shared`, threads are not placed.
//!
//! Runs with and without the attack alternate within one core's life. `--out FILE` writes the rows as JSON.

#[path = "../../tests/common/mod.rs"]
mod common;

mod attack;

use attack::Attack;
use common::{Client, Core, policy};
use rustix::process::Pid;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;
use tally_ipc::wait::{self, now_ns};

/// Launches of a run, and what goes before them.
const LAUNCHES: usize = 1_000;
const WARM_UP: usize = 100;
/// Runs with the attack, and as many without.
const RUNS: usize = 7;
/// Pause between two launches of the honest client.
const PAUSE: Duration = Duration::from_micros(200);
const STRANGER: u32 = 12_345;
const CPU_OF_CORE: usize = 0;
const CPU_OF_ATTACKERS: usize = 1;

fn pin(thread: Option<i32>, cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let thread = thread.and_then(Pid::from_raw);
    match rustix::thread::sched_setaffinity(thread, &set) {
        // A thread of the core that has ended meanwhile.
        Err(rustix::io::Errno::SRCH) => {}
        placed => placed.expect("two CPUs"),
    }
}

/// Put threads where they are measured.
fn set_apart(core: &Core) {
    for task in std::fs::read_dir(format!("/proc/{}/task", core.pid())).unwrap().flatten() {
        let tid: i32 = task.file_name().to_str().unwrap().parse().unwrap();
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        match name.trim() {
            "tally-dispatch" => {
                pin(Some(tid), CPU_OF_CORE);
                go_before(tid, 10);
            }
            _ => pin(Some(tid), CPU_OF_ATTACKERS),
        }
    }
}

/// A thread is run before all that have a lower priority, and before all that have none.
fn go_before(tid: i32, priority: u32) {
    let arguments = ["--fifo", "-p", &priority.to_string(), &tid.to_string()];
    let set = Command::new("chrt").args(arguments).status();
    assert!(set.is_ok_and(|set| set.success()), "chrt: this needs root");
}

/// The calling thread has the core's CPU whenever it wants it.
fn set_before_all() {
    pin(None, CPU_OF_CORE);
    go_before(rustix::thread::gettid().as_raw_nonzero().get(), 20);
}

/// The process that attacks, on a CPU of its own.
struct Attackers {
    process: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Attackers {
    fn start(attack: Attack, core: &Core, connections: usize, is_apart: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("--attack").arg(format!("{attack:?}")).arg(&core.socket);
        command.args([connections.to_string(), u8::from(is_apart).to_string()]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program");
        let said = BufReader::new(process.stdout.take().unwrap());
        let mut attackers = Attackers { process, said };
        assert_eq!(attackers.hear(), "ready");
        attackers
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().into()
    }

    fn tell(&mut self, word: &str) -> String {
        writeln!(self.process.stdin.as_mut().unwrap(), "{word}").unwrap();
        self.hear()
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Default)]
struct Honest {
    samples: Vec<u64>,
    /// Launches that a program would have started without a decision, because the core stood still.
    ungated: usize,
    /// Longest that the core's heartbeat stood still while a launch waited, ns.
    longest_still: u64,
}

impl Honest {
    /// Submits a launch and waits as the shim does; returns how long it took, ns.
    fn decide(&mut self, client: &mut Client, spin: Duration) -> u64 {
        let start = now_ns();
        let (ticket, completion) = client.submit();
        let beats = || client.core.heartbeat.load(SeqCst);
        let (mut beat, mut since) = (beats(), start);
        loop {
            let ready = || client.answer(ticket);
            if wait::wait(&client.region, &client.core, spin, wait::CLIENT_NAP, ready).is_some() {
                break;
            }
            let now = now_ns();
            if beats() != beat {
                (beat, since) = (beats(), now);
            }
            self.longest_still = self.longest_still.max(now - since);
            if now - since > wait::CORE_STUCK_NS {
                self.ungated += 1;
                break;
            }
        }
        let took = now_ns() - start;
        client.complete(completion);
        took
    }

    fn run(&mut self, client: &mut Client, spin: Duration) -> [f64; 2] {
        let mut samples = Vec::with_capacity(LAUNCHES);
        for i in 0..WARM_UP + LAUNCHES {
            let took = self.decide(client, spin);
            if i >= WARM_UP {
                samples.push(took);
            }
            std::thread::sleep(PAUSE);
        }
        samples.sort_unstable();
        let at = |q: f64| samples[((samples.len() - 1) as f64 * q) as usize] as f64 / 1_000.0;
        let quantiles = [at(0.5), at(0.99)];
        self.samples.extend(samples);
        quantiles
    }
}

/// Busy for a moment, then idle for longer, until told to end.
fn toggle(client: &Client, over: &AtomicBool) {
    while !over.load(Relaxed) {
        client.set_busy(true);
        client.set_busy(false);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(attack: Attack, connections: usize, is_apart: bool) -> Value {
    let wasm = policy("tally-priority");
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let settings = dir.path().join("policy.toml");
    // Each launch is decided, and none waits for its client's turn: that would be the policy's doing, not the core's.
    std::fs::write(&settings, "lease_launches = 0\nturn_us = 0\n").unwrap();
    let config = format!(
        "[policy]\nfile = {wasm:?}\nconfig_file = {settings:?}\n[socket]\nmode = \"0666\"\n\
         [admin]\nmode = \"0666\"\n[admission]\nuser_clients_max = 128\n"
    );
    let core = Core::start_in(dir, &config, &[]);
    if is_apart {
        set_apart(&core);
    }
    let mut attackers = Attackers::start(attack, &core, connections, is_apart);
    let over = AtomicBool::new(false);
    let high = (attack == Attack::Toggles).then(|| Client::high(&core, "toggles"));
    let (mut honest, mut with, mut without) = (Honest::default(), Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        if let Some(high) = high {
            let over = &over;
            scope.spawn(move || {
                if is_apart {
                    set_before_all();
                }
                toggle(&high, over);
            });
        }
        let measuring = scope.spawn(|| {
            if is_apart {
                set_before_all();
            }
            let mut client = Client::best_effort(&core, "honest");
            client.region.kernels[0].publish(b"honest", 7);
            // Spinning would take the core's CPU.
            let spin = Duration::from_nanos(if is_apart { 0 } else { client.welcome.spin_ns });
            for _ in 0..RUNS {
                without.push(honest.run(&mut client, spin));
                assert_eq!(attackers.tell("on"), "on");
                with.push(honest.run(&mut client, spin));
                assert_eq!(attackers.tell("off"), "off");
            }
        });
        let outcome = measuring.join();
        over.store(true, SeqCst);
        outcome.expect("the honest client's run");
    });
    let counts = attackers.tell("end");
    let (rounds, dropped) = counts.split_once(' ').unwrap();
    let of = |runs: &[[f64; 2]], at: usize| median(runs.iter().map(|run| run[at]));
    let ratio = |at: usize| of(&with, at) / of(&without, at);
    json!({
        "attack": format!("{attack:?}"), "connections": connections,
        "placement": if is_apart { "apart" } else { "shared" },
        "without_us": { "p50": of(&without, 0), "p99": of(&without, 1) },
        "with_us": { "p50": of(&with, 0), "p99": of(&with, 1) },
        "ratio": { "p50": ratio(0), "p99": ratio(1) },
        "runs": RUNS, "launches_each": LAUNCHES, "ungated": honest.ungated,
        "longest_still_ms": honest.longest_still as f64 / 1e6,
        "attack_rounds": rounds.parse::<u64>().unwrap(),
        "dropped_by_core": dropped.parse::<u64>().unwrap(),
        "core_log_bytes": core.log().len(),
    })
}

fn attack_named(name: &str) -> Option<Attack> {
    Attack::ALL.into_iter().find(|attack| format!("{attack:?}").eq_ignore_ascii_case(name))
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, name, socket, connections, is_apart] = &arguments[..]
        && first == "--attack"
    {
        if is_apart == "1" {
            pin(None, CPU_OF_ATTACKERS);
        }
        let attack = attack_named(name).expect("an attack");
        return attack::run(attack, socket.into(), connections.parse().unwrap(), STRANGER);
    }
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let out = arguments.iter().position(|a| a == "--out").map(|at| arguments[at + 1].clone());
    let named: Vec<_> = arguments.iter().filter_map(|name| attack_named(name)).collect();
    let attacks = if named.is_empty() { Attack::ALL.to_vec() } else { named };
    let placements: &[bool] = match arguments.iter().any(|a| a == "shared") {
        true => &[false],
        false => &[true],
    };
    let mut rows = Vec::new();
    println!(
        "connections  attack       without p50    p99 us  with p50    p99 us  ratio p50   p99  ungated"
    );
    for &is_apart in placements {
        for connections in [1, 100] {
            for &attack in &attacks {
                let row = measure(attack, connections, is_apart);
                let number = |at: &str| row.pointer(at).unwrap().as_f64().unwrap();
                println!(
                    "{connections:>11}  {:<12} {:>11.1} {:>9.1} {:>9.1} {:>9.1} {:>10.2} {:>5.2} {:>8}",
                    format!("{attack:?}"),
                    number("/without_us/p50"),
                    number("/without_us/p99"),
                    number("/with_us/p50"),
                    number("/with_us/p99"),
                    number("/ratio/p50"),
                    number("/ratio/p99"),
                    row["ungated"],
                );
                rows.push(row);
            }
        }
    }
    if let Some(out) = out {
        let cpus = std::thread::available_parallelism().map_or(0, |cpus| cpus.get());
        let date = Command::new("date").arg("+%F").output().expect("date").stdout;
        let machine = json!({ "cpus": cpus, "date": String::from_utf8_lossy(&date).trim() });
        let text =
            serde_json::to_string_pretty(&json!({ "machine": machine, "rows": rows })).unwrap();
        std::fs::write(out, text + "\n").expect("the file of --out");
    }
}
