//! `tallyctl policy bench`: what a component costs on this machine.

use crate::error::CtlError;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The policy component, a `.wasm` file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration file that is passed to the policy
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print JSON (schema 1).
    #[arg(long)]
    pub json: bool,
    /// The limits of the policy: the core's defaults, or those for components with an interpreter.
    #[arg(long, value_enum, default_value = "default")]
    pub limits: super::LimitsArg,
}

#[cfg(feature = "wasm")]
pub fn run(args: &BenchArgs) -> Result<(), CtlError> {
    use std::io::Write;
    let config = super::config(args.config.as_deref())?;
    let figures = measure::measure(&args.file, &config, &args.limits.limits())?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let text =
            serde_json::to_string_pretty(&figures).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let f = figures;
    writeln!(out, "machine      {}, {} CPUs", f.machine.cpu, f.machine.cpus)?;
    writeln!(out, "size         {:.1} KiB", f.bytes as f64 / 1024.0)?;
    writeln!(out, "memory       {} KiB", f.memory_bytes >> 10)?;
    writeln!(out, "compile      {:.1} ms", f.compile_ms)?;
    writeln!(out, "instantiate  {:.1} us", f.instantiate_us)?;
    for (name, call) in [("decide", &f.decide), ("event", &f.event)] {
        writeln!(
            out,
            "{name:<12} {:.0} ns a call in bulk; one by one p50 {} ns, p99 {} ns; {} units of fuel",
            call.bulk_ns, call.p50_ns, call.p99_ns, call.fuel
        )?;
    }
    writeln!(out, "One by one includes reading the clock twice: {} ns.", f.clock_ns)?;
    Ok(())
}

#[cfg(not(feature = "wasm"))]
pub fn run(args: &BenchArgs) -> Result<(), CtlError> {
    Err(super::without_wasm(&args.file))
}

#[cfg(feature = "wasm")]
mod measure {
    use crate::error::CtlError;
    use serde::Serialize;
    use std::path::Path;
    use std::time::{Duration, Instant};
    use tally_conformance::Wasm;
    use tally_engine::policy::{
        Class, ClientInfo, Context, Event, Fault, Launch, Policy, Subscriptions,
    };
    use tally_wasm_host::{Capabilities, Limits, PolicyHost, WasmPolicy};

    /// Time for each figure, unless a single run takes longer.
    const FOR: Duration = Duration::from_millis(400);
    /// Calls that are timed one by one, for percentiles.
    const SINGLE: usize = 20_000;
    /// Bulk samples, of which the median counts.
    const SAMPLES: usize = 30;

    #[derive(Debug, Serialize)]
    pub struct Figures {
        schema: u32,
        pub machine: Machine,
        pub bytes: u64,
        pub memory_bytes: usize,
        pub compile_ms: f64,
        pub instantiate_us: f64,
        pub decide: Call,
        pub event: Call,
        pub clock_ns: u64,
    }

    #[derive(Debug, Serialize)]
    pub struct Machine {
        pub cpu: String,
        pub cpus: usize,
    }

    /// Figures of one kind of call.
    #[derive(Debug, Serialize)]
    pub struct Call {
        pub bulk_ns: f64,
        pub p50_ns: u64,
        pub p99_ns: u64,
        pub fuel: u64,
    }

    fn machine() -> Machine {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name"));
        let cpu = model.map_or("unknown", |m| m.trim_start_matches([' ', '\t', ':']).trim());
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        Machine { cpu: cpu.to_owned(), cpus }
    }

    fn median(mut values: Vec<f64>) -> f64 {
        values.sort_unstable_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    }

    fn failed(message: String) -> CtlError {
        CtlError::Failed(message)
    }

    /// Time single runs until [`FOR`] is over; the median, s.
    fn repeated(mut run: impl FnMut() -> Result<Duration, CtlError>) -> Result<f64, CtlError> {
        let began = Instant::now();
        let mut took = Vec::new();
        while took.is_empty() || began.elapsed() < FOR {
            took.push(run()?.as_secs_f64());
        }
        Ok(median(took))
    }

    pub fn measure(file: &Path, config: &str, limits: &Limits) -> Result<Figures, CtlError> {
        let limits = Wasm::limits(limits);
        // What it may do is not the question here.
        let host = || {
            let host = PolicyHost::new(limits.clone()).map_err(|e| failed(e.to_string()))?;
            Ok::<_, CtlError>(host.granting(Capabilities::all()))
        };
        let mut keep = None;
        let compile_s = repeated(|| {
            // A fresh one: it would remember what it compiled.
            let host = host()?;
            let began = Instant::now();
            let compiled = host.compile_file(file).map_err(|e| failed(e.to_string()))?;
            let took = began.elapsed();
            keep = Some((host, compiled));
            Ok(took)
        })?;
        let Some((_host, compiled)) = keep else { return Err(failed("no run".into())) };
        let start = || compiled.start(config, None).map_err(|e| failed(e.to_string()));
        let instantiate_s = repeated(|| {
            let began = Instant::now();
            let policy = start()?;
            let took = began.elapsed();
            drop(policy);
            Ok(took)
        })?;
        let mut run = Run::new(start()?)?;
        let decide = run.call(|run, n| run.decide(n))?;
        let event = run.call(|run, n| run.event(n))?;
        let bytes = std::fs::metadata(file).map_or(0, |m| m.len());
        let clock: Vec<f64> = (0..1_000)
            .map(|_| {
                let began = Instant::now();
                began.elapsed().as_nanos() as f64
            })
            .collect();
        Ok(Figures {
            schema: 1,
            machine: machine(),
            bytes,
            memory_bytes: run.policy.memory_bytes(),
            compile_ms: compile_s * 1e3,
            instantiate_us: instantiate_s * 1e6,
            decide,
            event,
            clock_ns: median(clock) as u64,
        })
    }

    /// A policy beside a high-priority client that is silent, and one best-effort client.
    struct Run {
        policy: WasmPolicy,
        context: Context,
        launch: Launch,
    }

    impl Run {
        fn new(mut policy: WasmPolicy) -> Result<Self, CtlError> {
            let mut context = Context::default();
            policy.start(&mut context);
            for (id, class) in [(1, Class::High), (2, Class::BestEffort)] {
                let name = format!("client-{id}");
                let info = ClientInfo { id, class, name, labels: Vec::new() };
                context.world.clients.insert(id, info.clone().into());
                policy
                    .on_event(1, &Event::Joined(info), &mut context)
                    .map_err(|fault| failed(fault.to_string()))?;
            }
            let launch = Launch {
                now_ns: 1_000_000_000,
                client: 2,
                class: Class::BestEffort,
                kernel: 0,
                state: 0,
                offered: 0,
                grid_blocks: 1_024,
                block_threads: 256,
                shared_bytes: 0,
                predicted_ns: 20_000,
                waited_ns: 0,
                in_flight_ns: 0,
                high_idle_ns: 5_000_000_000,
                high_clients: 1,
                waiting_clients: 1,
                stream: 0,
                sm_count: 132,
            };
            Ok(Run { policy, context, launch })
        }

        fn decide(&mut self, _: u64) -> Result<(), Fault> {
            self.launch.now_ns += 20_000;
            let decision = self.policy.decide(&self.launch, &mut self.context);
            self.context.commands.drain();
            decision.map(drop)
        }

        fn event(&mut self, n: u64) -> Result<(), Fault> {
            self.launch.now_ns += 20_000;
            // One that it is told of, if it is told of any.
            let event = match self.policy.subscriptions() {
                told if told.has(Subscriptions::ACTIVITY) && n.is_multiple_of(2) => {
                    Event::HighStarted
                }
                told if told.has(Subscriptions::ACTIVITY) => Event::HighEnded,
                told if told.has(Subscriptions::UNITS) => {
                    Event::UnitsEnded { client: 1, units: 1, took_ns: 1_000_000 }
                }
                told if told.has(Subscriptions::MEMBERSHIP) => Event::Left(u32::MAX),
                _ => Event::Timer(0),
            };
            let told = self.policy.on_event(self.launch.now_ns, &event, &mut self.context);
            self.context.commands.drain();
            told
        }

        fn call(
            &mut self,
            mut call: impl FnMut(&mut Self, u64) -> Result<(), Fault>,
        ) -> Result<Call, CtlError> {
            let faulted = |fault: Fault| failed(format!("a call failed: {fault}"));
            let mut n = 0;
            let mut single = Vec::new();
            let mut began = Instant::now();
            let until = began + 4 * FOR;
            while single.len() < SINGLE && began < until {
                began = Instant::now();
                call(self, n).map_err(faulted)?;
                single.push(began.elapsed().as_nanos() as u64);
                n += 1;
            }
            single.sort_unstable();
            let p50_ns = single[single.len() / 2];
            let batch = (FOR.as_nanos() as u64 / SAMPLES as u64 / p50_ns.max(1)).max(1);
            let mut bulk = Vec::new();
            for _ in 0..SAMPLES {
                let began = Instant::now();
                for _ in 0..batch {
                    call(self, n).map_err(faulted)?;
                    n += 1;
                }
                bulk.push(began.elapsed().as_nanos() as f64 / batch as f64);
            }
            let p99_ns = single[(single.len() * 99 / 100).min(single.len() - 1)];
            let fuel = self.policy.call_fuel().unwrap_or(0);
            Ok(Call { bulk_ns: median(bulk), p50_ns, p99_ns, fuel })
        }
    }
}
