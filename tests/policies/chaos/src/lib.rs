//! A policy that does on command whatever a policy must not.
//!
//! The kernel id of a launch (or the token of a timer) says what; the
//! configuration does for `init`, as `snapshot-N` or `restore-N` for these, and as
//! `always N` for every decision, `completed N` for every completion, or `joined N` to think so long of every client
//! that joins. The numbers are known to
//! `core/wasm-host/tests/common/mod.rs` and `tools/conformance/tests/guests.rs`.

use std::hint::black_box;
use tally_sdk::host::{self, Counter, Gauge};
use tally_sdk::{
    Activity, Answer, Client, ClientId, Completion, Completions, Decision, Launch, Level,
    Membership, Policy, Saved, SharingMode, Stateful, Timer, Tokens, Units,
};

/// What it remembers, to tell an old instance from a new one.
struct Chaos {
    /// What every launch is taken for, whatever its kernel.
    always: Option<u32>,
    /// What it does whenever a launch has ended.
    at_completion: Option<u64>,
    /// Steps that it takes for each client that joins.
    at_join: Option<u64>,
    decides: u64,
    joined: Vec<ClientId>,
    left: u64,
    done_ns: u64,
    high_ns: u64,
    units_ns: u64,
    /// What `snapshot` and `restore` do besides.
    in_snapshot: u64,
    in_restore: u64,
}

impl Policy for Chaos {
    fn init(config: &str) -> Result<Self, String> {
        let always = config.strip_prefix("always ").and_then(|number| number.parse().ok());
        let at_completion = config.strip_prefix("completed ").and_then(|how| how.parse().ok());
        let at_join = config.strip_prefix("joined ").and_then(|steps| steps.parse().ok());
        let (mut in_snapshot, mut in_restore) = (0, 0);
        let number = |text: &str| text.parse().map_err(|_| format!("what is {text:?}?"));
        match config {
            _ if always.is_some() || at_completion.is_some() || at_join.is_some() => {}
            "" => {}
            how if how.starts_with("snapshot-") => in_snapshot = number(&how[9..])?,
            how if how.starts_with("restore-") => in_restore = number(&how[8..])?,
            "refuse" => return Err("no, thank you".into()),
            "ask" => commands(),
            "reasons" => host::define_reason(9, "because it can"),
            "clients" => {
                assert!(host::clients().is_empty(), "no client is known during `init`");
            }
            "think" => think(1_000_000),
            how => misbehave(number(how)?),
        }
        Ok(Chaos {
            always,
            at_completion,
            at_join,
            decides: 0,
            joined: Vec::new(),
            left: 0,
            done_ns: 0,
            high_ns: 0,
            units_ns: 0,
            in_snapshot,
            in_restore,
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        self.decides += 1;
        let decision = match self.always.unwrap_or(launch.kernel) {
            10 => Decision::Hold(u64::MAX),
            11 => Decision::Sliced(0),
            12 => Decision::SmLimited(0),
            13 => Decision::Sliced(7),
            14 => Decision::SmLimited(8),
            16 => Decision::HoldUntilCompletion(9),
            17 => return Decision::Hold(5).because(9),
            15 => Decision::Preemptible,
            20 => Decision::Hold(self.decides),
            21 => Decision::Hold(self.joined.iter().fold(0, |all, &id| all * 10 + u64::from(id))),
            22 => Decision::Hold(host::kernel_mean_ns(0)),
            23 => Decision::Hold(described()),
            24 => Decision::Hold(self.done_ns + self.left + self.high_ns),
            25 => Decision::Hold(echo(launch)),
            26 => Decision::Hold(match host::sharing_mode() {
                SharingMode::Concurrent => 1,
                SharingMode::TimeSliced => 2,
            }),
            27 => Decision::Hold(used()),
            28 => Decision::Hold(served()),
            34 => Decision::Hold(profiled()),
            29 => Decision::Hold(host::slack_ns(launch.now_ns).max(0) as u64 + self.units_ns),
            30 => {
                commands();
                Decision::Run(9)
            }
            31 => {
                for _ in 0..2_000 {
                    host::set_timer(1, 1);
                }
                Decision::Run(0)
            }
            32 => {
                metrics();
                Decision::Run(0)
            }
            33 => {
                // More than may be written in a second, less than the fuel allows.
                for _ in 0..100 {
                    host::log(Level::Debug, "spam");
                }
                Decision::Run(0)
            }
            35 => {
                commands();
                trap();
                Decision::Run(0)
            }
            // Leaks a little.
            40 => {
                std::mem::forget(black_box(Box::new([self.decides; 8])));
                Decision::Run(0)
            }
            // About a client that was never there.
            41 => {
                host::set_window(ClientId::MAX, 1);
                Decision::Run(0)
            }
            // Timers without an end, and of no consequence.
            43 => {
                for _ in 0..2_000 {
                    host::set_timer(1, 100);
                }
                Decision::Run(0)
            }
            // Thinks for longer than half of what it may.
            42 => {
                think(25_000);
                Decision::Run(0)
            }
            kernel => {
                misbehave(kernel.into());
                Decision::Run(0)
            }
        };
        decision.into()
    }
}

impl Activity for Chaos {
    fn high_started(&mut self, now_ns: u64) {
        self.high_ns += now_ns;
    }

    fn high_ended(&mut self, now_ns: u64) {
        self.high_ns += 10 * now_ns;
    }
}

impl Units for Chaos {
    fn began(&mut self, _now_ns: u64, client: ClientId, since_ns: u64, deadline_ns: u64) {
        self.units_ns += u64::from(client) + since_ns + deadline_ns;
    }

    fn ended(&mut self, _now_ns: u64, _client: ClientId, units: u32, took_ns: u64) {
        self.units_ns += u64::from(units) * took_ns;
    }
}

impl Completions for Chaos {
    fn completed(&mut self, _now_ns: u64, done: &Completion) {
        self.done_ns += done.measured_ns + 10 * done.charged_ns + done.form as u64;
        self.at_completion.into_iter().for_each(misbehave);
    }
}

impl Membership for Chaos {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        think(self.at_join.unwrap_or(0));
        self.joined.push(client.id);
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.left += 1;
        if self.always.is_some() {
            // Of one misbehaviour at a time: no leak of another.
            self.joined.retain(|joined| *joined != client);
        }
    }
}

impl Timer for Chaos {
    fn fired(&mut self, _now_ns: u64, token: u64) {
        misbehave(token);
    }
}

impl Stateful for Chaos {
    fn snapshot(&self) -> Saved {
        let data = match self.in_snapshot {
            100 => vec![7; tally_sdk::SAVED_BYTES_MAX],
            101 => vec![7; tally_sdk::SAVED_BYTES_MAX + 1],
            102 => vec![7; 1 << 20],
            103 | 104 => Vec::new(),
            how => {
                misbehave(how);
                self.decides.to_le_bytes().into()
            }
        };
        // Nobody is left to do it for.
        host::set_timer(1, 1);
        // Of the longest name that a format may have, and of one byte more.
        let format = match self.in_snapshot {
            103 => "f".repeat(256),
            104 => "f".repeat(257),
            _ => "chaos".into(),
        };
        Saved { format, version: 1, data }
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        from.expect("chaos", 1)?;
        misbehave(self.in_restore);
        let data = from.data.as_slice();
        self.decides = u64::from_le_bytes(data.try_into().map_err(|_| "expected 8 bytes")?);
        host::set_timer(1_000, 43);
        Ok(())
    }
}

tally_sdk::export!(Chaos: activity, units, completions, membership, timer, state);

/// Takes the core longer to look at than it takes to pass.
const LONG: &str = match std::str::from_utf8(&[b'x'; 16_000]) {
    Ok(text) => text,
    Err(_) => "",
};

fn misbehave(how: u64) {
    match how {
        1 => trap(),
        2 => loop {
            black_box(how);
        },
        3 => {
            let mut hoard: Vec<Vec<u8>> = Vec::new();
            loop {
                hoard.push(vec![1; 1 << 20]);
                black_box(&hoard);
            }
        }
        4 => panic!("out of ideas"),
        5 => {
            black_box(dive(0));
        }
        6 => {
            black_box(None::<u64>).unwrap();
        }
        7 => wild(),
        8 => loop {
            host::log(Level::Warn, "spam");
        },
        9 => host::log(Level::Warn, &"x".repeat(1 << 20)),
        50 => loop {
            host::log(Level::Trace, LONG);
        },
        51 => loop {
            black_box(host::clients());
        },
        52 => think(5_000_000),
        _ => {}
    }
}

#[cfg(target_family = "wasm")]
fn trap() {
    std::arch::wasm32::unreachable()
}

#[cfg(not(target_family = "wasm"))]
fn trap() {
    std::process::abort()
}

#[inline(never)]
#[allow(unconditional_recursion, reason = "that is the point")]
fn dive(depth: u64) -> u64 {
    let ballast = [depth; 64];
    black_box(&ballast);
    dive(depth + 1) + ballast[(depth % 64) as usize]
}

fn wild() {
    let nowhere = black_box(0xffff_0000_usize) as *const u32;
    // SAFETY: none. Reading where there is no memory is what this guest is for;
    // the sandbox has to turn it into a trap.
    black_box(unsafe { nowhere.read_volatile() });
}

fn think(steps: u64) {
    for step in 0..steps {
        black_box(step);
    }
}

/// Asks for one command of each kind.
fn commands() {
    host::set_timer(1_000, 42);
    host::set_window(1, 2_000);
    host::revoke_lease(2);
    host::set_yield(3, true);
    host::set_auto_yield(3, true, 4_000);
    host::set_width(2, 96);
}

fn metrics() {
    let counter = Counter::new("turns");
    counter.add(2);
    Counter::new("turns").add(1);
    Gauge::new("level").set(-5);
    for excess in 0..100 {
        Counter::new(&format!("excess-{excess}")).add(1);
    }
}

/// A sum over what the core tells of clients and kernels.
fn described() -> u64 {
    let clients: u64 =
        host::clients().iter().map(|c| u64::from(c.weight) + 100 * u64::from(c.id)).sum();
    let kernel = host::kernel_profile(0).map_or(0, |kernel| {
        kernel.count * 10_000
            + u64::from(kernel.grid.0) * 100_000
            + kernel.p50_ns
            + kernel.p99_ns
            + kernel.latest_ns
            + 10_000_000 * u64::from(kernel.blocks_per_sm)
            + 100_000_000 * u64::from(kernel.registers)
            + 1_000_000_000 * kernel.waves_permille
    });
    clients + kernel
}

/// All figures of client 1's service, each in decimal digits of its own; 0 if it has none. Those of tokens are added
/// up, each a different number of times.
fn served() -> u64 {
    let Some(it) = host::service(1) else { return 0 };
    let (slo_ns, percentile) = it.objective.map_or((0, 0.0), |o| (o.slo_ns, o.percentile));
    let times =
        slo_ns + 10 * (percentile as u64) + 1_000 * it.open_deadline_ns + 10_000 * it.open_since_ns;
    times
        + 1_000_000 * it.units
        + 10_000_000 * it.units_within
        + 100_000_000 * u64::from(it.recent)
        + 1_000_000_000 * u64::from(it.recent_within)
        + 10_000_000_000 * it.p50_ns
        + 100_000_000_000 * it.p99_ns
        + 1_000_000_000_000 * it.tokens.map_or(0, tokens)
}

/// All figures of the latest profiled unit of client 1, each in decimal digits of its own; 0 if there is none.
fn profiled() -> u64 {
    let Some(it) = host::service(1).and_then(|service| service.profile) else { return 0 };
    it.profiled
        + 10 * u64::from(it.launches)
        + 100 * it.gpu_busy_ns
        + 1_000 * u64::from(it.gaps)
        + 10_000 * it.gaps_ns
        + 100_000 * it.gap_median_ns
        + 1_000_000 * it.gap_longest_ns
        + 10_000_000 * u64::from(it.sms_max)
        + 100_000_000 * u64::from(it.sms_mean)
}

fn tokens(it: Tokens) -> u64 {
    let recent = 1_000 * u64::from(it.recent) + 10_000 * u64::from(it.recent_within);
    it.tpot_ns
        + 10 * it.count
        + 100 * it.within
        + recent
        + 100_000 * it.p50_ns
        + 1_000_000 * it.p99_ns
}

/// A sum over what client 1 has used.
fn used() -> u64 {
    host::client(1).map_or(0, |c| {
        c.measured_ns
            + 10 * c.charged_ns
            + 100 * c.in_flight_ns
            + u64::from(c.in_flight)
            + c.waiting_since_ns
            + 1_000 * u64::from(c.min_share_permille)
            + 2 * c.backlogged_ns
            + 3 * c.backlogged_since_ns
            + 7 * host::width_cost_ns(1)
    })
}

/// A number that differs if any field of the launch arrives as another.
fn echo(launch: &Launch) -> u64 {
    let fields = [
        launch.now_ns,
        launch.client.into(),
        launch.kernel.into(),
        launch.state.bits().into(),
        launch.offered.bits().into(),
        launch.grid_blocks,
        launch.block_threads.into(),
        launch.shared_bytes.into(),
        launch.predicted_ns,
        launch.waited_ns,
        launch.in_flight_ns,
        launch.high_idle_ns,
        launch.high_clients.into(),
        launch.waiting_clients.into(),
        launch.stream.into(),
        launch.sm_count.into(),
    ];
    fields.iter().fold(0u64, |all, field| all.wrapping_mul(31).wrapping_add(*field)) % 1_000_000_000
}
