//! What a decision costs, what an event costs, what loading costs.
//!
//! `cargo xtask policies && cargo bench -p tally-wasm-host`. Criterion's figure
//! is the mean of many calls in a row; a table of percentiles of single calls,
//! measured with the clock's own cost taken off, is printed before.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::cell::RefCell;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tally_engine::policy::{
    Answer, Class, ClientInfo, Context, Decision, Event, Fault, Launch, Policy, forms_offered,
    launch_state,
};
use tally_wasm_host::{Compiler, Limits, PolicyHost, WasmPolicy};

const SINGLE_CALLS: usize = 200_000;

/// A compiler that runs in a child process, as in the core.
fn compiler() -> Compiler {
    Compiler::program(env!("CARGO_BIN_EXE_policy-compiler"))
}

fn guest(folder: &str, name: &str) -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release").join(folder).join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file
}

fn load(host: &PolicyHost, name: &str) -> WasmPolicy {
    host.load_file(&guest("policies", name), "").expect("a policy of this repository")
}

/// Best-effort launches beside a high-priority client, of all outcomes.
fn launches() -> Vec<Launch> {
    let launch = |i: u64| Launch {
        now_ns: i * 1_000,
        client: i as u32 % 4,
        class: Class::BestEffort,
        kernel: i as u32 % 16,
        state: if i.is_multiple_of(3) { launch_state::HIGH_ACTIVE } else { 0 },
        offered: if i.is_multiple_of(3) { 0 } else { forms_offered::SLICED },
        grid_blocks: 1024 + i * 7,
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 20_000 * (i % 9),
        waited_ns: (i % 5) * 600_000,
        in_flight_ns: 0,
        high_idle_ns: if i.is_multiple_of(3) { 0 } else { (i % 7) * 25_000 },
        high_clients: 1,
        waiting_clients: 3,
        stream: 0,
        sm_count: 132,
    };
    (0..64).map(launch).collect()
}

/// The rule of tally-priority, in the core's own language.
struct Native;

impl Policy for Native {
    fn decide(&mut self, launch: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(if launch.class == Class::High {
            Decision::Run(0)
        } else if launch.high_clients == 0 {
            Decision::Run(1_000_000)
        } else if launch.state & launch_state::HIGH_ACTIVE != 0 {
            Decision::Hold(1_000_000_000)
        } else {
            match 100_000_u64.saturating_sub(launch.high_idle_ns) {
                0 => Decision::Run(0),
                rest => Decision::Hold(rest),
            }
        }
        .into())
    }
}

/// slo-herald with a service whose unit is open.
fn herald(host: &PolicyHost) -> WasmPolicy {
    let (mut policy, mut context) = (load(host, "slo-herald"), Context::default());
    let service = ClientInfo { id: 9, class: Class::High, name: "serve.py".into(), labels: vec![] };
    let began = Event::UnitBegan { client: 9, since_ns: 0, deadline_ns: 3_000_000 };
    for event in [Event::Joined(service), began] {
        policy.on_event(1, &event, &mut context).expect("it fails at no event");
    }
    policy
}

fn policies(host: &PolicyHost) -> Vec<(&'static str, Box<dyn Policy>)> {
    vec![
        ("native", Box::new(Native)),
        ("tally-priority", Box::new(load(host, "tally-priority"))),
        ("slo-herald", Box::new(herald(host))),
        ("fifo", Box::new(load(host, "fifo"))),
    ]
}

fn percentiles(host: &PolicyHost) {
    let launches = launches();
    let mut context = Context::default();
    let clock = (0..10_000).map(|_| Instant::now().elapsed()).min().unwrap_or_default();
    println!("single calls of decide, ns     p50     p99   p99.9");
    for (name, mut policy) in policies(host) {
        let mut times: Vec<Duration> = (0..SINGLE_CALLS)
            .map(|i| {
                let launch = &launches[i % launches.len()];
                let started = Instant::now();
                let _ = black_box(policy.decide(black_box(launch), &mut context));
                started.elapsed().saturating_sub(clock)
            })
            .collect();
        times.sort_unstable();
        let at = |share: f64| times[(times.len() as f64 * share) as usize].as_nanos();
        println!("{name:<26}{:>8}{:>8}{:>8}", at(0.5), at(0.99), at(0.999));
    }
}

fn bench(c: &mut Criterion) {
    let host = PolicyHost::compiling_by(compiler(), Limits::default()).expect("a host");
    percentiles(&host);
    let launches = launches();
    let mut context = Context::default();
    for (name, mut policy) in policies(&host) {
        let mut turn = 0;
        c.bench_function(&format!("decide/{name}"), |b| {
            b.iter(|| {
                turn = (turn + 1) % launches.len();
                policy.decide(black_box(&launches[turn]), &mut context)
            });
        });
    }
    let mut policy = load(&host, "tally-priority");
    c.bench_function("on_event/left", |b| {
        b.iter(|| policy.on_event(1, black_box(&Event::Left(7)), &mut context));
    });
    let info = ClientInfo {
        id: 1,
        class: Class::BestEffort,
        name: "train.py".into(),
        labels: vec![("slo".into(), "none".into())],
    };
    let (joined, left) = (Event::Joined(info), Event::Left(1));
    c.bench_function("on_event/joined+left", |b| {
        b.iter(|| {
            let _ = policy.on_event(1, black_box(&joined), &mut context);
            context.commands.drain();
            policy.on_event(1, black_box(&left), &mut context)
        });
    });
    let bytes = std::fs::read(guest("policies", "tally-priority")).expect("a file");
    c.bench_function("load/tally-priority", |b| {
        b.iter(|| host.load_bytes("tally-priority", &bytes, ""));
    });
    // A host remembers what it compiled.
    c.bench_function("compile/tally-priority", |b| {
        let fresh = || PolicyHost::compiling_by(compiler(), Limits::default()).expect("a host");
        b.iter_batched(
            fresh,
            |host| host.compile_bytes("tally-priority", &bytes).map(|compiled| (host, compiled)),
            BatchSize::PerIteration,
        );
    });
    faults(c);
}

/// A trap, and the call after it: a new instance, its `init`, then the decision.
fn faults(c: &mut Criterion) {
    let limits = Limits { faults_max: u32::MAX, ..Limits::default() };
    let host = PolicyHost::compiling_by(compiler(), limits).expect("a host");
    let chaos = host.load_file(&guest("test-policies", "chaos"), "").expect("the test guest");
    let chaos = RefCell::new((chaos, Context::default()));
    let decide = |kernel| {
        let (policy, context) = &mut *chaos.borrow_mut();
        let decision = policy.decide(&Launch { kernel, ..launches()[0] }, context);
        context.commands.drain();
        decision
    };
    // The numbers are those of `tests/policies/chaos`.
    let (good, trap, endless) = (0, 1, 2);
    for (name, kernel) in [("trap", trap), ("endless loop", endless)] {
        c.bench_function(&format!("fault/{name}"), |b| {
            b.iter_batched(|| decide(good), |_| decide(kernel), BatchSize::PerIteration);
        });
    }
    c.bench_function("respawn", |b| {
        b.iter_batched(|| decide(trap), |_| decide(good), BatchSize::PerIteration);
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = bench
}
criterion_main!(benches);
