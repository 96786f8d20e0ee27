//! What WebAssembly costs: the same rule natively and as a component. A decision, an event,
//! and launches simulated a second of wall time.
//!
//! `cargo xtask policies && cargo xtask bench -p tally-native-policy`. Criterion's figure
//! is the mean of many calls in a row; a table of percentiles of single calls, measured
//! with the clock's own cost taken off, is printed before.

use criterion::{Criterion, Throughput};
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tally_engine::policy::{
    Class, ClientInfo, Context, Event, Form, Launch, Policy, forms_offered, launch_state,
};
use tally_engine::profile::{KernelKey, Transformation};
use tally_simulator::{Arrivals, Service, Setup, SharingMode, Trace, simulate};
use tally_wasm_host::{Compiler, Limits, PolicyHost};

const SINGLE_CALLS: usize = 400_000;
const KERNELS: u32 = 16;

fn native() -> Box<dyn Policy + Send> {
    tally_native_policy::by_name("tally-priority", "").expect("its own configuration")
}

fn component(host: &PolicyHost) -> Box<dyn Policy + Send> {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release/policies/tally-priority.wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    Box::new(host.load_file(&file, "").expect("a policy of this repository"))
}

/// Best-effort launches beside a high-priority client, of all outcomes; half of the
/// kernels are long and run preemptible.
fn launches() -> Vec<Launch> {
    let launch = |i: u64| {
        let kernel = i as u32 % KERNELS;
        let busy = i.is_multiple_of(5);
        let offered = forms_offered::SLICED | forms_offered::PREEMPTIBLE;
        Launch {
            now_ns: 1_000_000_000 + i * 1_000,
            client: 2,
            class: Class::BestEffort,
            kernel,
            state: if busy { launch_state::HIGH_ACTIVE } else { 0 },
            offered: if busy { 0 } else { offered },
            grid_blocks: 4_096,
            block_threads: 256,
            shared_bytes: 0,
            predicted_ns: took_ns(kernel),
            waited_ns: 0,
            in_flight_ns: 0,
            high_idle_ns: if busy { 0 } else { 25_000 * (i % 9) },
            high_clients: 1,
            waiting_clients: 1,
            stream: 0,
            sm_count: 132,
        }
    };
    (0..720).map(launch).collect()
}

fn took_ns(kernel: u32) -> u64 {
    if kernel.is_multiple_of(2) { 12_000 } else { 400_000 }
}

/// A core that has measured these kernels, with a high-priority client and another.
fn world(policy: &mut dyn Policy) -> Context {
    let mut context = Context::default();
    policy.start(&mut context);
    let profiles = &mut context.world.profiles;
    for kernel in 0..KERNELS {
        let name = format!("kernel-{kernel}");
        let key = KernelKey { name, image: 1, grid: [4_096, 1, 1], block: [256, 1, 1] };
        let id = profiles.intern(&key).expect("room for a kernel");
        profiles.set_transformation(id, Transformation::Ready { sliced: true, preemptible: true });
        for _ in 0..20 {
            profiles.record(id, took_ns(kernel));
            profiles.record_form(id, Form::Preemptible, 0, took_ns(kernel) * 102 / 100);
            profiles.record_turnaround(id, Form::Preemptible, 0, 20_000);
        }
    }
    for (id, class) in [(1, Class::High), (2, Class::BestEffort)] {
        let info = ClientInfo { id, class, name: format!("client-{id}"), labels: Vec::new() };
        context.world.clients.insert(id, info.clone().into());
        policy.on_event(1, &Event::Joined(info), &mut context).expect("an event");
    }
    context.commands.drain();
    context
}

fn percentiles(policies: &mut [(&str, Box<dyn Policy + Send>)]) {
    let launches = launches();
    let clock = (0..10_000).map(|_| Instant::now().elapsed()).min().unwrap_or_default();
    println!("single calls of decide, ns    mean     p50     p99   p99.9");
    for (name, policy) in policies {
        let mut context = world(&mut **policy);
        let mut times: Vec<Duration> = (0..SINGLE_CALLS)
            .map(|i| {
                let launch = &launches[i % launches.len()];
                let started = Instant::now();
                let _ = black_box(policy.decide(black_box(launch), &mut context));
                let took = started.elapsed().saturating_sub(clock);
                context.commands.drain();
                took
            })
            .collect();
        times.sort_unstable();
        let at = |share: f64| times[(times.len() as f64 * share) as usize].as_nanos();
        let mean = times.iter().sum::<Duration>().as_nanos() / times.len() as u128;
        println!("{name:<26}{mean:>8}{:>8}{:>8}{:>8}", at(0.5), at(0.99), at(0.999));
    }
}

fn main() {
    let host = PolicyHost::compiling_by(Compiler::in_process(), Limits::default()).expect("a host");
    let mut policies = [("native", native()), ("component", component(&host))];
    percentiles(&mut policies);
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20)
        .configure_from_args();
    let launches = launches();
    for (name, policy) in &mut policies {
        let mut context = world(&mut **policy);
        let mut turn = 0;
        criterion.bench_function(&format!("decide/{name}"), |b| {
            b.iter(|| {
                turn = (turn + 1) % launches.len();
                let decision = policy.decide(black_box(&launches[turn]), &mut context);
                context.commands.drain();
                decision
            });
        });
        criterion.bench_function(&format!("on_event/{name}"), |b| {
            b.iter(|| policy.on_event(1, black_box(&Event::Timer(1)), &mut context));
        });
    }
    simulated(&mut criterion, &host);
    criterion.final_summary();
}

/// Launches a second of wall time, each of a whole simulation of two seconds.
fn simulated(criterion: &mut Criterion, host: &PolicyHost) {
    let open = |name| Trace::open(name).expect("a built-in trace");
    let (high, low) = (open("resnet50_infer_b1"), open("gpt2_large_train_b4_s512"));
    let load = Arrivals::Poisson { load: 0.5 };
    for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
        let setup = Setup { seconds: 2.0, sharing, ..Setup::default() };
        let service = Service { graph: false, ..Service::new(&high, &load) };
        let run = |policy| simulate(&setup, &service, Some(&low), Some(policy));
        let mut group = criterion.benchmark_group(format!("simulated launches, {sharing:?}"));
        group.sample_size(10).throughput(Throughput::Elements(run(native()).launches));
        group.bench_function("native", |b| b.iter(|| run(native())));
        group.bench_function("component", |b| b.iter(|| run(component(host))));
        group.finish();
    }
}
