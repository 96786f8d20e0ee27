//! What a decision, a release from a hold and an idle core cost, with a real core and
//! clients in this process. For an idle machine: `cargo xtask bench -p tally-core`.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{BUILT_IN, Client, Core, hello, policy};
use std::time::{Duration, Instant};
use tally_ipc::wait::now_ns;

fn quantile(sorted: &[u64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q) as usize] as f64 / 1_000.0
}

fn cpu_s(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: f64 = fields[11..13].iter().map(|f| f.parse::<f64>().unwrap()).sum();
    ticks / 100.0
}

fn round_trips(core: &Core, what: &str, pause: Duration) {
    let mut client = Client::best_effort(core, "latency");
    client.region.kernels[0].publish(b"gemm", 7);
    // A client that spins, as on a machine with CPUs to spare.
    client.welcome.spin_ns = 200_000;
    let mut samples = Vec::new();
    for i in 0..20_000 {
        let start = now_ns();
        let (ticket, completion) = client.submit();
        client.wait(ticket);
        let took = now_ns() - start;
        client.complete(completion);
        if i >= 1_000 {
            samples.push(took);
        }
        let until = Instant::now() + pause;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
    samples.sort_unstable();
    let status = core.status();
    println!(
        "{what}: client round trip us p50 {:.2} p90 {:.2} p99 {:.2} p99.9 {:.2}; core's share {}",
        quantile(&samples, 0.5),
        quantile(&samples, 0.9),
        quantile(&samples, 0.99),
        quantile(&samples, 0.999),
        status["decision_latency"]
    );
}

fn decision_round_trip() {
    let config = std::env::temp_dir().join("tally-latency-policy.toml");
    std::fs::write(&config, "lease_launches = 0\n").unwrap();
    let wasm = policy("tally-priority");
    let with_policy =
        ["--policy", wasm.to_str().unwrap(), "--policy-config", config.to_str().unwrap()];
    for (spin, what) in [("1000", "core spins"), ("0", "core sleeps")] {
        let core = Core::start(BUILT_IN, &["--spin-us", spin]);
        round_trips(&core, &format!("built-in, {what}"), Duration::from_micros(5));
        let core = Core::start("", &[&["--spin-us", spin][..], &with_policy].concat());
        round_trips(&core, &format!("tally-priority.wasm, {what}"), Duration::from_micros(5));
    }
}

fn idle_cpu() {
    for clients in [0, 8, 256] {
        // All of one user, and none kept for others.
        let config = format!("{BUILT_IN}[admission]\nreserved_clients = 0\n");
        let core = Core::start(&config, &[]);
        let _clients: Vec<Client> = (0..clients)
            .map(|i| Client::register(&core.socket, &hello("idle", i % 2 == 0)).unwrap())
            .collect();
        let before = cpu_s(core.pid());
        std::thread::sleep(Duration::from_secs(10));
        let used = cpu_s(core.pid()) - before;
        println!("{clients} idle clients: {:.2} % of a CPU", used * 10.0);
    }
}

fn hold_and_release() {
    let core = Core::start(BUILT_IN, &[]);
    let high = Client::high(&core, "server");
    let mut low = Client::best_effort(&core, "train");
    low.welcome.spin_ns = 5_000_000;
    let mut samples = Vec::new();
    for _ in 0..300 {
        high.set_busy(true);
        std::thread::sleep(Duration::from_millis(1));
        let (ticket, completion) = low.submit();
        std::thread::sleep(Duration::from_millis(2));
        assert!(low.answer(ticket).is_none());
        let start = now_ns();
        high.set_busy(false);
        low.wait(ticket);
        samples.push(now_ns() - start);
        low.complete(completion);
    }
    samples.sort_unstable();
    println!(
        "high-priority idle to held launch granted (100 us idle gap included): us p50 {:.1} p99 {:.1}",
        quantile(&samples, 0.5),
        quantile(&samples, 0.99)
    );
}

fn main() {
    decision_round_trip();
    hold_and_release();
    idle_cpu();
}
