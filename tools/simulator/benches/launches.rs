//! Launches simulated a second of wall time, with the built-in rule, on one core.

use criterion::{Criterion, Throughput};
use tally_engine::BuiltInRule;
use tally_simulator::{Arrivals, Service, Setup, SharingMode, Trace, simulate};

fn main() {
    let open = |name| Trace::open(name).expect("a built-in trace");
    let (high, low) = (open("resnet50_infer_b1"), open("gpt2_large_train_b4_s512"));
    let load = Arrivals::Poisson { load: 0.5 };
    let mut criterion = Criterion::default().configure_from_args();
    for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
        let setup = Setup { seconds: 2.0, sharing, ..Setup::default() };
        let service = Service { graph: false, ..Service::new(&high, &load) };
        let run = || {
            let policy = Box::new(BuiltInRule { idle_ns: 100_000 });
            simulate(&setup, &service, Some(&low), Some(policy))
        };
        let mut group = criterion.benchmark_group("launches");
        group.sample_size(10).throughput(Throughput::Elements(run().launches));
        group.bench_function(format!("{sharing:?}"), |b| b.iter(run));
        group.finish();
    }
    criterion.final_summary();
}
