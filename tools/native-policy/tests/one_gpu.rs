//! Programs that run ahead share a GPU that runs one launch after another, under the engine and the shipped policies.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use tally_engine::policy::{Class, ClientInfo, Policy, SharingMode};
use tally_engine::profile::KernelKey;
use tally_engine::{Action, Engine, EngineConfig, Measured, Submission};
use tally_wasm_host::{Capabilities, Compiler, Limits, PolicyHost};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
const SERVICE: u32 = 1;
/// Those that hold launches for services.
const POLICIES: [&str; 3] = ["tally-priority", "slo-herald", "tpot-first"];

/// A best-effort program that keeps so many launches of one kernel submitted.
#[derive(Clone, Copy)]
struct Program {
    weight: u32,
    kernel_ns: u64,
    ahead: usize,
    from_ns: u64,
    min_share_permille: u32,
    /// From its first second on it has a launch in another stream that never ends.
    never_ends: bool,
}

fn program(weight: u32, kernel_ns: u64) -> Program {
    let (ahead, from_ns, min_share_permille, never_ends) = (8, 0, 0, false);
    Program { weight, kernel_ns, ahead, from_ns, min_share_permille, never_ends }
}

#[derive(Default)]
struct State {
    /// Tickets of launches that wait to start, and whether each never ends.
    waiting: VecDeque<(u64, bool)>,
    submitted: u64,
    out: usize,
    sent: u32,
    ended: u32,
    never_ends: bool,
    /// When each launch ended.
    ends_ns: Vec<u64>,
    longest_wait_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends,
    Begins,
}

struct Gpu {
    engine: Engine<Box<dyn Policy + Send>>,
    programs: Vec<Program>,
    states: Vec<State>,
    events: BinaryHeap<Reverse<(u64, Event, usize)>>,
    now_ns: u64,
    free_ns: u64,
    actions: Vec<Action>,
}

fn client(at: usize) -> u32 {
    at as u32 + 2
}

impl Gpu {
    /// Beside a service that is connected and idle, if there is to be one.
    fn new(
        policy: Box<dyn Policy + Send>,
        sharing: SharingMode,
        service: bool,
        programs: &[Program],
    ) -> Self {
        let config = EngineConfig { sharing, sm_count: 132, ..EngineConfig::default() };
        let mut gpu = Gpu {
            engine: Engine::new(config, policy),
            programs: programs.to_vec(),
            states: programs.iter().map(|_| State::default()).collect(),
            events: BinaryHeap::new(),
            now_ns: 0,
            free_ns: 0,
            actions: Vec::new(),
        };
        let info = |id, class, weight: u32| {
            let labels = vec![("weight".into(), weight.to_string())];
            ClientInfo { id, class, name: String::new(), labels }
        };
        if service {
            gpu.engine.client_joined(0, info(SERVICE, Class::High, 1), 0, &mut gpu.actions);
        }
        for (at, program) in programs.iter().enumerate() {
            let id = client(at);
            gpu.engine.client_joined(
                0,
                info(id, Class::BestEffort, program.weight),
                0,
                &mut gpu.actions,
            );
            gpu.engine.set_min_share(0, id, program.min_share_permille, &mut gpu.actions);
            gpu.states[at].never_ends = program.never_ends;
            gpu.events.push(Reverse((program.from_ns, Event::Begins, at)));
        }
        gpu
    }

    fn start(&mut self, at: usize) {
        if let Some((_, false)) = self.states[at].waiting.pop_front() {
            self.free_ns = self.free_ns.max(self.now_ns) + self.programs[at].kernel_ns;
            self.events.push(Reverse((self.free_ns, Event::Ends, at)));
        }
    }

    fn act(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            let (id, until) = match action {
                Action::Grant { client, until } => (client, until),
                Action::Decide { client, ticket, .. } => (client, ticket + 1),
                _ => continue,
            };
            let Some(at) = (id as usize).checked_sub(2) else { continue };
            while self.states[at].waiting.front().is_some_and(|(ticket, _)| *ticket < until) {
                self.start(at);
            }
        }
    }

    fn submit(&mut self, at: usize) {
        let Program { kernel_ns, ahead, from_ns, .. } = self.programs[at];
        let key = KernelKey {
            name: format!("{at} {kernel_ns}"),
            image: 0,
            grid: [5_000, 1, 1],
            block: [256, 1, 1],
        };
        let kernel = self.engine.intern(&key);
        while self.now_ns >= from_ns && self.states[at].out < ahead {
            let state = &mut self.states[at];
            let never_ends = state.never_ends && self.now_ns >= SECOND;
            if never_ends {
                state.never_ends = false;
            } else {
                state.sent += 1;
                state.out += 1;
            }
            let ticket = state.submitted;
            state.submitted += 1;
            state.waiting.push_back((ticket, never_ends));
            let submission = Submission {
                ticket,
                kernel,
                state: 0,
                offered: 0,
                grid_blocks: 5_000,
                block_threads: 256,
                shared_bytes: 0,
                stream: never_ends.into(),
                completion: if never_ends { 1 } else { state.sent },
                started: false,
                limited_sms: 0,
            };
            let is_granted =
                self.engine.submitted(self.now_ns, client(at), submission, &mut self.actions);
            if is_granted && self.states[at].waiting.front().is_some_and(|first| first.0 == ticket)
            {
                self.start(at);
            }
            self.act();
        }
    }

    fn run_until(&mut self, end_ns: u64) {
        loop {
            let event_ns = self.events.peek().map(|Reverse((ns, ..))| *ns);
            let tick_ns = self.engine.next_deadline_ns().map(|ns| ns.max(self.now_ns + 1));
            let next_ns = event_ns.into_iter().chain(tick_ns).min().unwrap_or(u64::MAX);
            if next_ns > end_ns {
                self.now_ns = end_ns;
                return;
            }
            self.now_ns = next_ns;
            if event_ns != Some(next_ns) {
                self.engine.tick(next_ns, &mut self.actions);
                self.act();
                continue;
            }
            let Some(Reverse((_, event, at))) = self.events.pop() else { return };
            if event == Event::Ends {
                let longest_wait_ns = self.longest_wait_ns(at);
                let state = &mut self.states[at];
                (state.ended, state.out) = (state.ended + 1, state.out - 1);
                state.longest_wait_ns = longest_wait_ns;
                state.ends_ns.push(next_ns);
                let ended = state.ended;
                let measured =
                    Some(Measured { completion: ended, ns: self.programs[at].kernel_ns });
                self.engine.progress(next_ns, client(at), 0, ended, measured, &mut self.actions);
                self.act();
            }
            self.submit(at);
        }
    }

    /// The longest time in which no launch of a program ended.
    fn longest_wait_ns(&self, at: usize) -> u64 {
        let since_ns = self.states[at].ends_ns.last().copied().unwrap_or(self.programs[at].from_ns);
        self.states[at].longest_wait_ns.max(self.now_ns.saturating_sub(since_ns))
    }

    /// What a program had of the time.
    fn part(&self, at: usize, from_ns: u64, to_ns: u64) -> f64 {
        let ends = self.states[at].ends_ns.iter().filter(|ns| (from_ns..to_ns).contains(*ns));
        (ends.count() as u64 * self.programs[at].kernel_ns) as f64 / (to_ns - from_ns) as f64
    }
}

fn native(name: &str, config: &str) -> Box<dyn Policy + Send> {
    tally_native_policy::by_name(name, config).unwrap()
}

#[test]
fn long_launches_go_by_weight_beside_a_service() {
    for policy in POLICIES {
        for weight in [1, 10] {
            let programs = [program(1, 3 * MS), program(weight, 3 * MS)];
            let mut gpu = Gpu::new(native(policy, ""), SharingMode::Concurrent, true, &programs);
            gpu.run_until(10 * SECOND);
            let fair = 1.0 / f64::from(weight + 1);
            let part = gpu.part(0, 0, 10 * SECOND);
            assert!((0.9 * fair..1.1 * fair).contains(&part), "{policy}, 1:{weight}: {part}");
        }
    }
}

/// The engine offers launches of who had less GPU time first, also if that is long past.
#[test]
fn one_that_comes_back_with_long_launches_keeps_nobody_waiting() {
    let configured =
        POLICIES.map(|policy| (policy, "")).into_iter().chain([("tally-priority", "turn_us = 0")]);
    for (policy, config) in configured {
        let programs = [Program { from_ns: 20 * SECOND, ..program(1, 3 * MS) }, program(1, 3 * MS)];
        let mut gpu = Gpu::new(native(policy, config), SharingMode::Concurrent, true, &programs);
        gpu.run_until(40 * SECOND);
        let part = gpu.part(1, 20 * SECOND, 40 * SECOND);
        assert!((0.45..0.55).contains(&part), "{policy} {config}: {part}");
        assert!(gpu.longest_wait_ns(1) < 100 * MS, "{policy}: {}", gpu.longest_wait_ns(1));
    }
}

#[test]
fn a_launch_that_never_ends_beside_long_ones_of_its_client_keeps_nobody_waiting() {
    for policy in POLICIES {
        let programs = [Program { never_ends: true, ..program(1, 3 * MS) }, program(1, 3 * MS)];
        let mut gpu = Gpu::new(native(policy, ""), SharingMode::Concurrent, true, &programs);
        gpu.run_until(61 * SECOND);
        let part = gpu.part(1, SECOND, 61 * SECOND);
        assert!((0.4..0.6).contains(&part), "{policy}: {part}");
        assert!(gpu.longest_wait_ns(1) < 500 * MS, "{policy}: {}", gpu.longest_wait_ns(1));
    }
}

#[test]
fn in_turns_each_of_many_has_one_within_seconds() {
    let programs = [Program { ahead: 4, ..program(1, MS / 5) }; 100];
    let mut gpu = Gpu::new(native("tally-priority", ""), SharingMode::TimeSliced, false, &programs);
    gpu.run_until(60 * SECOND);
    let waits_ns = (0..programs.len()).map(|at| gpu.longest_wait_ns(at));
    // A turn is 20 ms, and at most half of the 64 places are given up after a round.
    assert!(waits_ns.max().unwrap() < 8 * SECOND);
}

/// Who gives up its place owes as much when it has one again.
#[test]
fn in_turns_among_many_long_launches_are_paid_for() {
    let mut programs = [Program { ahead: 4, ..program(1, MS / 5) }; 100];
    programs[0].kernel_ns = 200 * MS;
    let mut gpu = Gpu::new(native("tally-priority", ""), SharingMode::TimeSliced, false, &programs);
    gpu.run_until(120 * SECOND);
    let part = gpu.part(0, 0, 120 * SECOND);
    assert!((0.003..0.03).contains(&part), "{part}");
}

/// `wait_ms_max` is 1 000 ms.
#[test]
fn a_program_that_runs_ahead_has_one_launch_at_a_time_run_because_it_waited_for_long() {
    for ahead in [1, 256] {
        let programs = [Program { ahead, ..program(1, MS) }];
        let mut gpu = Gpu::new(native("tpot-first", ""), SharingMode::Concurrent, true, &programs);
        gpu.run_until(2 * SECOND);
        gpu.engine.high_activity(2 * SECOND, SERVICE, true, 2 * SECOND, &mut gpu.actions);
        gpu.act();
        gpu.run_until(32 * SECOND);
        let part = gpu.part(0, 4 * SECOND, 32 * SECOND);
        assert!((0.0005..0.002).contains(&part), "{ahead} ahead: {part}");
    }
}

/// Each call has enough fuel, however many clients and floors there are.
#[test]
fn floors_of_many_clients_cost_no_call_more_than_its_fuel() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let limits = Limits { call_cpu_ms_max: 30_000, ..Limits::default() };
    let host = PolicyHost::compiling_by(Compiler::in_process(), limits).unwrap();
    let host = host.granting(Capabilities::all());
    for policy in ["tally-priority", "tpot-first"] {
        let file = target.join("release/policies").join(policy).with_extension("wasm");
        assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
        for (clients, floors) in [(110, 90), (256, 90)] {
            let floor = |at| if at < floors { 10 } else { 0 };
            let programs: Vec<Program> = (0..clients)
                .map(|at| Program { ahead: 2, min_share_permille: floor(at), ..program(1, MS / 3) })
                .collect();
            let component = Box::new(host.load_file(&file, "").unwrap());
            let mut gpu = Gpu::new(component, SharingMode::Concurrent, true, &programs);
            gpu.run_until(3 * SECOND);
            let stats = gpu.engine.policy_stats();
            assert_eq!(
                stats.faults,
                BTreeMap::new(),
                "{policy}, {clients}: {:?}",
                stats.last_fault
            );
            assert!(gpu.states.iter().all(|state| state.ended > 10), "{policy}, {clients}");
        }
    }
}
