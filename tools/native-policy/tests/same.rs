//! A native policy and its component answer alike: the same decisions, commands and
//! figures over long random streams, whatever was measured and whoever comes and goes.

use slo_herald::Herald;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tally_engine::policy::{
    Answer, Class, ClientInfo, Command, Context, Decision, Event, Form, Launch, Policy,
    forms_offered, launch_state,
};
use tally_engine::profile::{KernelKey, Transformation};
use tally_native_policy::NativePolicy;
use tally_priority::Priority;
use tally_sdk::native::Exported;
use tally_wasm_host::{Capabilities, Compiler, Limits, PolicyHost, WasmPolicy};
use throughput::Throughput;
use tpot_first::TpotFirst;

const STEPS: u64 = 60_000;
const KERNELS: u32 = 48;

fn guest(name: &str) -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release/policies").join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file
}

/// The component, bounded by fuel alone: how busy this machine is must not matter.
fn component(name: &str, config: &str) -> WasmPolicy {
    let limits = Limits { call_cpu_ms_max: 30_000, ..Limits::default() };
    let host = PolicyHost::compiling_by(Compiler::in_process(), limits)
        .unwrap()
        .granting(Capabilities::all());
    host.load_file(&guest(name), config).unwrap()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    /// So many nanoseconds or less, small ones as likely as large ones.
    fn ns(&mut self, bits: u64) -> u64 {
        let bits = self.below(bits);
        self.below(2 << bits)
    }
}

/// What the core would know, told to both alike.
#[derive(Clone, Copy, Debug)]
enum Fact {
    Joins(u32, Class),
    Leaves(u32),
    Begins(u32),
    Ends(u32, u64),
    Took(u32, Form, u32, u64),
    Yielded(u32, Form, u32, u64),
    Transformed(u32, Transformation),
}

/// One policy with a world of its own.
struct Side<P> {
    policy: P,
    context: Context,
}

impl<P: Policy> Side<P> {
    fn new(mut policy: P) -> Self {
        let mut context = Context::default();
        for kernel in 0..KERNELS {
            let key = KernelKey {
                name: format!("kernel-{kernel}"),
                image: 1,
                grid: [blocks(kernel) as u32, 1, 1],
                block: [256, 1, 1],
            };
            assert_eq!(context.world.profiles.intern(&key), Some(kernel));
        }
        policy.start(&mut context);
        Side { policy, context }
    }

    fn take_note(&mut self, fact: Fact, now_ns: u64) {
        let world = &mut *self.context.world;
        match fact {
            Fact::Joins(id, class) => {
                let labels = vec![("slo".into(), "5ms".into())];
                let info = ClientInfo { id, class, name: format!("client-{id}"), labels };
                world.clients.insert(id, info.clone().into());
                let told = Event::Joined(info);
                self.policy.on_event(now_ns, &told, &mut self.context).unwrap();
            }
            Fact::Leaves(id) => {
                world.clients.remove(&id);
                let told = Event::Left(id);
                self.policy.on_event(now_ns, &told, &mut self.context).unwrap();
            }
            Fact::Begins(client) => {
                let told =
                    Event::UnitBegan { client, since_ns: now_ns, deadline_ns: now_ns + 5_000_000 };
                self.policy.on_event(now_ns, &told, &mut self.context).unwrap();
            }
            Fact::Ends(client, took_ns) => {
                let told = Event::UnitsEnded { client, units: 1, took_ns };
                self.policy.on_event(now_ns, &told, &mut self.context).unwrap();
            }
            Fact::Took(kernel, Form::Whole, _, ns) => world.profiles.record(kernel, ns),
            Fact::Took(kernel, form, argument, ns) => {
                world.profiles.record_form(kernel, form, argument, ns);
            }
            Fact::Yielded(kernel, form, argument, ns) => {
                world.profiles.record_turnaround(kernel, form, argument, ns);
            }
            Fact::Transformed(kernel, to) => world.profiles.set_transformation(kernel, to),
        }
    }

    fn decide(&mut self, launch: &Launch) -> (Answer, Vec<Command>) {
        let predicted_ns = self.context.world.profiles.predicted_ns(launch.kernel);
        let launch = Launch { predicted_ns, ..*launch };
        let answer = self.policy.decide(&launch, &mut self.context).unwrap();
        (answer, self.context.commands.drain().collect())
    }
}

fn blocks(kernel: u32) -> u64 {
    1 << (kernel % 17)
}

fn launch(random: &mut Random, now_ns: u64, high_clients: u32) -> Launch {
    let kernel = random.below(u64::from(KERNELS)) as u32;
    Launch {
        now_ns,
        client: random.below(4) as u32,
        class: if random.below(16) == 0 { Class::High } else { Class::BestEffort },
        kernel,
        // Few bits at a time, so that every form is on offer often enough.
        state: (random.next() & random.next()) as u32
            & launch_state::ALL
            & !if random.below(3) > 0 { launch_state::HIGH_ACTIVE } else { 0 },
        offered: (random.next() & random.next()) as u32 & forms_offered::ALL,
        grid_blocks: blocks(kernel),
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 0,
        waited_ns: random.ns(30),
        in_flight_ns: random.ns(30),
        high_idle_ns: if random.below(3) == 0 { random.ns(24) } else { u64::MAX },
        high_clients,
        waiting_clients: 1 + random.below(4) as u32,
        stream: random.below(64) as u32,
        sm_count: 132,
    }
}

/// How often each kind of decision was given; and the metrics of both.
fn compare<P: Exported>(name: &str, seed: u64, config: &str) -> [u32; 5] {
    let mut wasm = Side::new(component(name, config));
    let mut native = Side::new(NativePolicy::<P>::new(config).unwrap());
    let mut random = Random(seed);
    let (mut now_ns, mut seen, mut clients) = (1_000_000_000, [0; 5], BTreeMap::new());
    for step in 0..STEPS {
        now_ns += random.ns(22);
        let fact = match random.below(64) {
            0 => {
                let class = if random.below(3) == 0 { Class::High } else { Class::BestEffort };
                let id = step as u32;
                clients.insert(id, class);
                Some(Fact::Joins(id, class))
            }
            1 => clients.pop_first().map(|(id, _)| Fact::Leaves(id)),
            2 => {
                let states = [
                    Transformation::Preparable,
                    Transformation::Preparing,
                    Transformation::Ready { sliced: true, preemptible: random.below(2) == 0 },
                    Transformation::WholeOnly("it spins"),
                ];
                // Rarely for good.
                let kinds = if random.below(50) == 0 { 4 } else { 3 };
                let to = states[random.below(kinds) as usize];
                Some(Fact::Transformed(random.below(KERNELS.into()) as u32, to))
            }
            3..12 => {
                let mut high = clients.iter().filter(|(_, class)| **class == Class::High);
                let client = high.next().map(|(id, _)| *id);
                let begins = random.below(2) == 0;
                // A few are late.
                let took_ns = 1_000_000 + random.ns(23);
                client.map(|id| if begins { Fact::Begins(id) } else { Fact::Ends(id, took_ns) })
            }
            _ => None,
        };
        if let Some(fact) = fact {
            wasm.take_note(fact, now_ns);
            native.take_note(fact, now_ns);
            let asked: [Vec<Command>; 2] =
                [&mut wasm.context, &mut native.context].map(|c| c.commands.drain().collect());
            assert_eq!(asked[0], asked[1], "step {step}, {fact:?}, seed {seed}");
        }
        let high = clients.values().filter(|class| **class == Class::High).count();
        let asked = launch(&mut random, now_ns, high as u32);
        let (ours, theirs) = (native.decide(&asked), wasm.decide(&asked));
        assert_eq!(ours, theirs, "step {step}, {asked:?}, seed {seed}");
        let kind = match ours.0.decision {
            Decision::Run(_) => 0,
            Decision::Hold(_) | Decision::HoldUntilCompletion(_) => 1,
            Decision::Sliced(_) => 2,
            Decision::Preemptible => 3,
            Decision::SmLimited(_) => 4,
        };
        seen[kind] += 1;
        // It runs, takes its time in that form, and may be asked to yield.
        if kind != 1 {
            let (form, argument) = ours.0.decision.form();
            let ns = 1 + u64::from(asked.kernel) * 40_000 + random.ns(20);
            let mut facts = vec![Fact::Took(asked.kernel, form, argument, ns)];
            if form != Form::Whole {
                facts.push(Fact::Yielded(asked.kernel, form, argument, 1 + random.ns(17)));
            }
            for fact in facts {
                wasm.take_note(fact, now_ns);
                native.take_note(fact, now_ns);
            }
        }
    }
    let status = wasm.policy.status();
    assert_eq!(status.faults.total(), 0, "{:?}", status.last_fault);
    let mut figures: BTreeMap<String, i64> = status.gauges;
    figures.extend(status.counters.into_iter().map(|(name, n)| (name, n as i64)));
    assert_eq!(native.policy.metrics(), figures);
    seen
}

#[test]
fn tally_priority_answers_as_its_component_does() {
    let mut seen = [0; 5];
    for (seed, config) in [
        (1, ""),
        (2, "explore_permille = 1000\nsamples = 2\nreview_launches = 16"),
        (3, "turnaround_ns_max = 0\nslowdown_percent_max = 900"),
        (4, "reserve_sms = 16\nsm_limit_turnaround_us = 10\nidle_gap_us = 0"),
        (5, "forms = false\nlease_launches = 3\nwindow_us = 7"),
    ] {
        for (all, n) in seen.iter_mut().zip(compare::<Priority>("tally-priority", seed, config)) {
            *all += n;
        }
    }
    // A comparison of one kind of answer would show little.
    assert!(seen.iter().all(|&n| n > 1_000), "{seen:?}");
}

#[test]
fn slo_herald_answers_as_its_component_does() {
    let mut seen = [0; 5];
    for (seed, config) in
        [(1, ""), (2, "turnaround_ns_max = 0\nreserve_sms = 4"), (3, "light_us = 1000")]
    {
        for (all, n) in seen.iter_mut().zip(compare::<Herald>("slo-herald", seed, config)) {
            *all += n;
        }
    }
    assert!(seen.iter().all(|&n| n > 500), "{seen:?}");
}

#[test]
fn detshares_policies_answer_as_their_components_do() {
    let mut seen = [0; 5];
    for (seed, config) in [
        (1, ""),
        (2, "good_steps = 2\nstart_sms = 120"),
        (3, "turnaround_ns_max = 0\nwhole_late_percent_max = 0"),
        (4, "whole_late_percent_max = 0"),
    ] {
        for (all, n) in seen.iter_mut().zip(compare::<TpotFirst>("tpot-first", seed, config)) {
            *all += n;
        }
    }
    assert!(seen.iter().all(|&n| n > 500), "{seen:?}");
    let [runs, holds, ..] = compare::<Throughput>("throughput", 1, "");
    assert!(runs > 500, "{runs} {holds}");
}

#[test]
fn what_init_asks_for_and_a_wrong_configuration_are_alike() {
    for config in ["idle_gap_us = -1", "window = 3", "idle_gap_us", "samples = 61"] {
        let native = NativePolicy::<Priority>::new(config).err().unwrap();
        let host = PolicyHost::compiling_by(Compiler::in_process(), Limits::default()).unwrap();
        let wasm = host.load_file(&guest("tally-priority"), config).err().unwrap().to_string();
        assert!(wasm.ends_with(&native), "{wasm} does not end with {native}");
    }
}

/// Whole simulations, byte for byte.
#[test]
fn a_simulation_comes_out_the_same() {
    use tally_simulator::{Arrivals, Service, Setup, SharingMode, Trace, Transformable, simulate};
    let open = |name| Trace::open(name).unwrap();
    let (high, low) = (open("resnet50_infer_b1"), open("gpt2_large_train_b4_s512"));
    for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
        let setup =
            Setup { seconds: 0.5, sharing, transformable: Transformable::All, ..Setup::default() };
        let report = |policy: Box<dyn Policy + Send>| {
            let load = Arrivals::Poisson { load: 0.5 };
            let service = Service::new(&high, &load);
            format!("{:?}", simulate(&setup, &service, Some(&low), Some(policy)))
        };
        let native = report(tally_native_policy::by_name("tally-priority", "").unwrap());
        assert_eq!(native, report(Box::new(component("tally-priority", ""))), "{sharing:?}");
    }
}
