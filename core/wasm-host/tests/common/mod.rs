//! What the tests share: the built guests, launches, and what `chaos` does on
//! which number (`tests/policies/chaos`).
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::PathBuf;
use tally_engine::policy::{
    Class, ClientInfo, Command, Context, Decision, Event, Fault, Launch, Policy,
};
use tally_wasm_host::{Capabilities, Compiler, Limits, LoadError, PolicyHost, WasmPolicy};

/// Kernel ids (and timer tokens) at which `chaos` misbehaves.
pub mod kernel {
    pub const GOOD: u32 = 0;
    pub const UNREACHABLE: u32 = 1;
    pub const LOOP: u32 = 2;
    pub const HOARD: u32 = 3;
    pub const PANIC: u32 = 4;
    pub const DIVE: u32 = 5;
    pub const UNWRAP: u32 = 6;
    pub const WILD: u32 = 7;
    pub const LOG_FOREVER: u32 = 8;
    pub const LONG_LINE: u32 = 9;
    pub const HOLD_MAX: u32 = 10;
    pub const SLICED_0: u32 = 11;
    pub const SM_LIMITED_0: u32 = 12;
    pub const SLICED_7: u32 = 13;
    pub const SM_LIMITED_8: u32 = 14;
    pub const PREEMPTIBLE: u32 = 15;
    pub const HOLD_UNTIL_COMPLETION_9: u32 = 16;
    /// Answers `Hold(5)` with reason 9.
    pub const REASON_9: u32 = 17;
    /// Answers `Hold` of the number of decisions that this instance made.
    pub const DECIDES: u32 = 20;
    /// Answers `Hold` of the decimal digits of the clients that it knows.
    pub const JOINED: u32 = 21;
    pub const MEAN_NS: u32 = 22;
    pub const DESCRIBED: u32 = 23;
    pub const DONE: u32 = 24;
    pub const ECHO: u32 = 25;
    /// Answers `Hold(2)` where contexts take turns, else `Hold(1)`.
    pub const SHARING: u32 = 26;
    pub const USED: u32 = 27;
    /// Answers `Hold` of all figures of client 1's service, each in digits of its own.
    pub const SERVED: u32 = 28;
    /// Answers `Hold` of all figures of the latest profiled unit of client 1.
    pub const PROFILED: u32 = 34;
    /// Answers `Hold` of the slack and all figures of the units that it was told of.
    pub const UNITS: u32 = 29;
    pub const COMMANDS: u32 = 30;
    pub const TIMERS: u32 = 31;
    pub const METRICS: u32 = 32;
    pub const LOG: u32 = 33;
    /// Asks for `COMMANDS`, then traps.
    pub const COMMANDS_AND_TRAP: u32 = 35;
    pub const LOG_LONG: u32 = 50;
    pub const CLIENTS_FOREVER: u32 = 51;
    /// Takes some milliseconds, and far more fuel than is usual.
    pub const THINK: u32 = 52;
}

/// What `chaos` asks for on `COMMANDS`, and in `init` configured with `ask`.
pub const COMMANDS: [Command; 6] = [
    Command::SetTimer { delay_ns: 1_000, token: 42 },
    Command::SetWindow { client: 1, window_ns: 2_000 },
    Command::RevokeLease(2),
    Command::SetYield { client: 3, yielded: true },
    Command::SetAutoYield { client: 3, enabled: true, idle_ns: 4_000 },
    Command::SetWidth { client: 2, sms: 96 },
];

/// A guest built by `cargo xtask policies`. Never skips: a test that does not run
/// must not look like one that passed.
pub fn guest(folder: &str, name: &str) -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release").join(folder).join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file
}

/// The defaults, without the bound on CPU time: on a virtual machine it may count
/// what others did, and these tests are about the policy's own doing.
pub fn limits() -> Limits {
    Limits { call_cpu_ms_max: 30_000, ..Limits::default() }
}

/// Compiles in a child, as the core does.
pub fn compiler() -> Compiler {
    Compiler::program(env!("CARGO_BIN_EXE_policy-compiler"))
}

pub fn bare_host(limits: Limits) -> PolicyHost {
    PolicyHost::compiling_by(compiler(), limits).unwrap()
}

pub fn host(limits: Limits) -> PolicyHost {
    bare_host(limits).granting(Capabilities::all())
}

pub fn chaos_with(limits: Limits, config: &str) -> Result<WasmPolicy, LoadError> {
    host(limits).load_file(&guest("test-policies", "chaos"), config)
}

pub fn chaos() -> WasmPolicy {
    chaos_with(limits(), "").unwrap()
}

pub fn policy(name: &str, config: &str) -> WasmPolicy {
    host(limits()).load_file(&guest("policies", name), config).unwrap()
}

pub fn launch(kernel: u32) -> Launch {
    Launch {
        now_ns: 5_000_000_000,
        client: 1,
        class: Class::BestEffort,
        kernel,
        state: 0,
        offered: 0,
        grid_blocks: 1024,
        block_threads: 256,
        shared_bytes: 0,
        predicted_ns: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        high_idle_ns: u64::MAX,
        high_clients: 0,
        waiting_clients: 1,
        stream: 0,
        sm_count: 132,
    }
}

pub fn client(id: u32, class: Class) -> ClientInfo {
    ClientInfo { id, class, name: format!("client-{id}"), labels: Vec::new() }
}

/// A policy and what the engine would keep beside it.
pub struct Bench {
    pub policy: WasmPolicy,
    pub context: Context,
}

impl Bench {
    pub fn new(mut policy: WasmPolicy) -> Self {
        let mut context = Context::default();
        policy.start(&mut context);
        Bench { policy, context }
    }

    pub fn decide(&mut self, kernel: u32) -> Result<Decision, Fault> {
        self.ask(&launch(kernel))
    }

    pub fn ask(&mut self, launch: &Launch) -> Result<Decision, Fault> {
        self.policy.decide(launch, &mut self.context).map(|answer| answer.decision)
    }

    pub fn tell(&mut self, event: Event) -> Result<(), Fault> {
        self.policy.on_event(1, &event, &mut self.context)
    }

    /// As the engine does it: known to the world first, then told of.
    pub fn join(&mut self, id: u32, class: Class) -> Result<(), Fault> {
        self.context.world.clients.insert(id, client(id, class).into());
        self.tell(Event::Joined(client(id, class)))
    }

    pub fn commands(&mut self) -> Vec<Command> {
        self.context.commands.drain().collect()
    }
}
