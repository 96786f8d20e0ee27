//! What recording costs a decision: without a recorder, with one that nobody reads along,
//! and with a ring that another thread empties.
//!
//! `cargo xtask policies && cargo xtask bench -p tally-decision-log`. The policy is a rule in
//! this process, so that the difference is the recorder's; `wasm` is the default policy.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tally_decision_log::recorder::Described;
use tally_decision_log::{About, Recorded, Recorder, Tap, TapOptions};
use tally_engine::BuiltInRule;
use tally_engine::policy::{Answer, Class, Context, Event, Fault, Launch, Policy, Subscriptions};
use tally_wasm_host::{Compiler, Limits, PolicyHost};

struct Named(Box<dyn Policy + Send>);

impl Described for Named {
    fn about(&self) -> About {
        About::default()
    }
}

impl Policy for Named {
    fn subscriptions(&self) -> Subscriptions {
        self.0.subscriptions()
    }
    fn start(&mut self, context: &mut Context) {
        self.0.start(context);
    }
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        self.0.decide(launch, context)
    }
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.0.on_event(now_ns, event, context)
    }
}

fn policy(name: &str) -> Box<dyn Policy + Send> {
    if name == "native" {
        return Box::new(BuiltInRule { idle_ns: 100_000 });
    }
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release/policies/tally-priority.wasm");
    let host = PolicyHost::compiling_by(Compiler::in_process(), Limits::default()).expect("a host");
    Box::new(host.load_file(&file, "").expect("run `cargo xtask policies` first"))
}

fn launch() -> Launch {
    Launch {
        now_ns: 0,
        client: 1,
        class: Class::BestEffort,
        kernel: 0,
        state: 0,
        offered: 0,
        grid_blocks: 1024,
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 20_000,
        waited_ns: 0,
        in_flight_ns: 0,
        high_idle_ns: 500_000,
        high_clients: 1,
        waiting_clients: 1,
        stream: 0,
        sm_count: 132,
    }
}

fn decisions(c: &mut Criterion) {
    let mut group = c.benchmark_group("decide");
    for name in ["native", "wasm"] {
        let mut measure = |what: &str, policy: &mut dyn Policy| {
            let (mut context, mut launch) = (Context::default(), launch());
            policy.start(&mut context);
            group.bench_function(BenchmarkId::new(name, what), |b| {
                b.iter(|| {
                    launch.now_ns += 1_000;
                    let decision = policy.decide(black_box(&launch), &mut context);
                    context.commands.drain();
                    decision
                });
            });
        };
        measure("alone", &mut Named(policy(name)));
        let recorder = Recorder::default();
        measure("recording off", &mut Recorded::new(Named(policy(name)), 1, recorder.clone()));
        let options =
            TapOptions { ring_bytes: 64 << 20, completions: false, from_start: true, state: false };
        let (tap, mut reader) = Tap::new(1, options);
        recorder.insert(tap, &Default::default(), About::default(), Subscriptions::NONE);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let reading = std::thread::spawn(move || {
            let (mut record, mut records) = (Vec::new(), 0u64);
            while !stopped.load(Relaxed) {
                while reader.next(&mut record) {
                    records += 1;
                }
                std::thread::yield_now();
            }
            (records, reader.dropped())
        });
        measure("recording on", &mut Recorded::new(Named(policy(name)), 1, recorder));
        stop.store(true, Relaxed);
        let (records, dropped) = reading.join().expect("the reader");
        println!("{name}: {records} records read, {dropped} dropped");
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default();
    targets = decisions
}
criterion_main!(benches);
