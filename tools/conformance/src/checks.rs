//! The checks, one after the other.

use crate::Options;
use crate::fairness::by_weight;
use crate::floor::floor;
use crate::harness::{Harness, Seen, Turn};
use crate::objectives::objectives;
use crate::report::{Check, Fuel, Outcome, Report};
use crate::state::state;
use crate::steady::{self, Stopped};
use crate::stream::{self, Step};
use crate::subject::{Subject, Wasm};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use std::cell::RefCell;
use std::collections::BTreeMap;
use tally_contract::limits::COMMANDS_MAX;
use tally_engine::policy::{Fault, FaultKind};
use tally_wasm_host::LoadError;

/// Version of the JSON of [`Report`].
const SCHEMA: u32 = 1;
/// Streams that are run twice and compared.
const COMPARED: u32 = 12;
/// Steps of a failing stream that are shown.
const STEPS_SHOWN: usize = 6;
/// Lines of a trap's backtrace that are shown.
const BACKTRACE_LINES: usize = 12;
/// Attempts at a shorter failing stream.
const SHRINKS_MAX: u32 = 2_000;

/// A component that may turn out to be no policy; then that is all there is to report.
pub fn check_loaded(subject: &Result<Wasm, LoadError>, options: &Options) -> Report {
    match subject {
        Ok(subject) => check(subject, options),
        Err(error) => not_loaded(blank(0, options), error),
    }
}

fn blank(call_fuel_max: u64, options: &Options) -> Report {
    Report {
        schema: SCHEMA,
        seed: options.seed,
        checks: Vec::new(),
        call_fuel_max,
        decide_fuel: Fuel::default(),
        event_fuel: Fuel::default(),
        memory_bytes: 0,
    }
}

fn not_loaded(mut report: Report, error: &LoadError) -> Report {
    report.checks.push(Check {
        name: "loads",
        outcome: Outcome::Fail,
        detail: error.to_string(),
        advice: "a core would refuse it with the same words; nothing else was looked at",
    });
    report
}

/// Put a policy through all checks.
pub fn check(subject: &dyn Subject, options: &Options) -> Report {
    let mut report = blank(subject.call_fuel_max(), options);
    if let Err(error) = subject.start(None) {
        return not_loaded(report, &error);
    }
    report
        .checks
        .push(pass("loads", "a component of the contract; `init` takes the configuration"));
    let found = random(subject, options);
    let (mut decide, mut event) = (Vec::new(), Vec::new());
    let seen = found.seen.into_inner();
    let mut sum = Seen::default();
    for one in seen {
        decide.extend(one.decide_fuel);
        event.extend(one.event_fuel);
        sum.high_held += one.high_held;
        sum.degraded += one.degraded;
        sum.strays += one.strays;
        sum.timers_dropped += one.timers_dropped;
        sum.commands_dropped += one.commands_dropped;
    }
    let decides = decide.len();
    report.decide_fuel = Fuel::of(decide);
    report.event_fuel = Fuel::of(event);
    let faults = &found.faults;
    report.checks.push(trap(faults, decides, options));
    report.checks.push(fuel(faults, &report));
    let memory = memory(faults, subject, options, &mut report.memory_bytes);
    report.checks.push(memory);
    report.checks.push(sane(faults, &sum));
    report.checks.push(high(&sum));
    report.checks.push(starvation(subject));
    report.checks.push(determinism(subject, options));
    report.checks.push(by_weight(subject, options));
    report.checks.push(floor(subject, options));
    // With a policy that traps or works without end the simulator takes minutes.
    let has_failed = report.checks.iter().any(|check| check.outcome == Outcome::Fail);
    report.checks.push(match has_failed {
        true => not_run("objectives", Stopped::Starved("another check failed".into())),
        false => objectives(subject, options),
    });
    if subject.keeps_state() {
        report.checks.push(state(subject, options));
    }
    report
}

pub(crate) fn pass(name: &'static str, detail: impl Into<String>) -> Check {
    Check { name, outcome: Outcome::Pass, detail: detail.into(), advice: "" }
}

/// The shortest stream found for each kind of fault.
struct Found {
    faults: BTreeMap<FaultKind, String>,
    seen: RefCell<Vec<Seen>>,
}

pub(crate) fn runner(seed: u64, cases: u32) -> TestRunner {
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: SHRINKS_MAX,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// Random streams, once more for every kind of fault found: one must not hide the next.
fn random(subject: &dyn Subject, options: &Options) -> Found {
    let mut found = Found { faults: BTreeMap::new(), seen: RefCell::default() };
    // One more than there are kinds.
    for _ in 0..6 {
        found.seen.borrow_mut().clear();
        let outcome =
            runner(options.seed, options.streams).run(&stream::stream(), |steps| {
                match run(subject, &steps, &found) {
                    Some(fault) => Err(TestCaseError::fail(format!("{:?}", fault.kind))),
                    None => Ok(()),
                }
            });
        let Err(TestError::Fail(_, steps)) = outcome else { break };
        let Some(fault) = run(subject, &steps, &found) else { break };
        let words = format!(
            "{} (after {}){}",
            first_line(&fault.message),
            shown(&steps),
            backtrace(&fault.message)
        );
        found.faults.insert(fault.kind, words);
    }
    found
}

/// Run a stream; the first fault of a kind that is not known yet. Of what is known the
/// core would say it too and go on with a fresh instance.
fn run(subject: &dyn Subject, steps: &[Step], found: &Found) -> Option<Fault> {
    let mut harness = match subject.start(None) {
        Ok(policy) => Harness::new(policy).asking_about_high(subject.has_say_over_high()),
        Err(error) => {
            return Some(Fault {
                kind: FaultKind::Trap,
                message: format!("second start: {error}"),
            });
        }
    };
    for step in steps {
        match harness.step(step) {
            Err(fault) if !found.faults.contains_key(&fault.kind) => return Some(fault),
            _ => {}
        }
    }
    found.seen.borrow_mut().push(std::mem::take(&mut harness.seen));
    None
}

pub(crate) fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// What follows the first line, as far as it helps.
fn backtrace(message: &str) -> String {
    message.lines().skip(1).take(BACKTRACE_LINES).map(|line| format!("\n{line}")).collect()
}

/// The end of a stream, for people.
fn shown(steps: &[Step]) -> String {
    let left_out = steps.len().saturating_sub(STEPS_SHOWN);
    let last: Vec<String> = steps[left_out..].iter().map(|step| format!("{step:?}")).collect();
    let before = if left_out > 0 { format!("{left_out} steps, then ") } else { String::new() };
    format!("{before}{}", last.join("; "))
}

fn trap(faults: &BTreeMap<FaultKind, String>, decides: usize, options: &Options) -> Check {
    let name = "no-trap";
    match faults.get(&FaultKind::Trap) {
        Some(fault) => Check {
            name,
            outcome: Outcome::Fail,
            detail: fault.clone(),
            advice: "every figure of a launch may be 0 or the largest there is, a kernel or client \
                     unknown, a completion of a launch it never saw: saturate sums, guard \
                     divisions, expect `none`",
        },
        None => pass(name, format!("{decides} decisions in {} random streams", options.streams)),
    }
}

fn fuel(faults: &BTreeMap<FaultKind, String>, report: &Report) -> Check {
    let name = "fuel";
    let (decide, event) = (report.decide_fuel, report.event_fuel);
    let max = decide.max.max(event.max);
    let limit = report.call_fuel_max;
    let detail = format!(
        "decide p50 {}, p99 {}, max {}; events p50 {}, max {}; a call may use {limit}",
        decide.p50, decide.p99, decide.max, event.p50, event.max
    );
    match faults.get(&FaultKind::Overrun) {
        Some(fault) => Check {
            name,
            outcome: Outcome::Fail,
            detail: fault.clone(),
            advice: "bound every loop by a constant, keep what a decision needs ready from events, \
                     log rarely; of an interpreted language: let leases decide, or raise the \
                     limits (--limits interpreted, `[policy.limits] preset`)",
        },
        None if max > limit / 2 => Check {
            name,
            outcome: Outcome::Warn,
            detail,
            advice: "more than half of what a call may use: another input may use all of it",
        },
        None => pass(name, detail),
    }
}

fn memory(
    faults: &BTreeMap<FaultKind, String>,
    subject: &dyn Subject,
    options: &Options,
    memory_bytes: &mut usize,
) -> Check {
    let name = "memory";
    let advice =
        "bound every table, forget a client at `membership.left`; kernels are at most 65 536";
    let fail = |detail| Check { name, outcome: Outcome::Fail, detail, advice };
    if let Some(fault) = faults.get(&FaultKind::Memory) {
        return fail(fault.clone());
    }
    let calls = u64::from(options.steady_calls);
    match steady::memory(subject, options) {
        Ok(after) => {
            *memory_bytes = after[4];
            let kib = after.map(|bytes| (bytes >> 10).to_string()).join(", ");
            let detail = format!("{kib} KiB after each of 5 times {calls} like calls");
            // A table that fills up has done so by the second phase.
            if after[4] > after[1] { fail(detail) } else { pass(name, detail) }
        }
        Err(Stopped::Fault(fault)) if fault.kind == FaultKind::Memory => {
            fail(format!("within {} like calls: {}", 5 * calls, first_line(&fault.message)))
        }
        Err(stopped) => not_run(name, stopped),
    }
}

pub(crate) fn not_run(name: &'static str, stopped: Stopped) -> Check {
    let detail = match stopped {
        Stopped::Load(error) => error.to_string(),
        Stopped::Fault(fault) => format!("{:?}: {}", fault.kind, first_line(&fault.message)),
        Stopped::Starved(why) => why,
    };
    let advice = "it failed on the way, and this could not be looked at: mend the other first";
    Check { name, outcome: Outcome::NotRun, detail, advice }
}

fn sane(faults: &BTreeMap<FaultKind, String>, seen: &Seen) -> Check {
    let name = "sane-answers";
    if let Some(fault) = faults.get(&FaultKind::Nonsense) {
        let advice = "a slice has at least 1 block, an SM-limited launch at least 1 SM";
        return Check { name, outcome: Outcome::Fail, detail: fault.clone(), advice };
    }
    if seen.commands_dropped > 0 {
        let detail =
            format!("{} commands beyond {COMMANDS_MAX} in one call", seen.commands_dropped);
        let advice = "one call may ask for so many things; the rest is not done";
        return Check { name, outcome: Outcome::Fail, detail, advice };
    }
    let mut odd = Vec::new();
    for (n, what) in [
        (seen.degraded, "decisions for a form that is not on offer (run whole instead)"),
        (seen.strays, "commands about clients that are not connected (not done)"),
        (seen.timers_dropped, "timers beyond the 64 that may be pending (not set)"),
    ] {
        if n > 0 {
            odd.push(format!("{n} {what}"));
        }
    }
    if odd.is_empty() {
        return pass(name, "every answer can be carried out");
    }
    let advice = "look at `forms-offered` before \
                  deciding for a form; forget clients that left; give timers the same token again";
    Check { name, outcome: Outcome::Warn, detail: odd.join("; "), advice }
}

fn high(seen: &Seen) -> Check {
    let name = "high-priority";
    if seen.high_held == 0 {
        return pass(name, "never held");
    }
    Check {
        name,
        outcome: Outcome::Warn,
        detail: format!("{} launches of high-priority clients held", seen.high_held),
        advice: "they are only asked about if their clients were gated: answer \
                 `run` to `high-priority` launches unless this policy means to limit them",
    }
}

fn starvation(subject: &dyn Subject) -> Check {
    let name = "no-starvation";
    match steady::starvation(subject) {
        Ok(waits) => pass(
            name,
            format!(
                "with an idle high-priority side a launch is granted after {:.3} ms and {} offers \
                 at most",
                waits.waited_ns_max as f64 / 1e6,
                waits.offers_max
            ),
        ),
        Err(Stopped::Starved(detail)) => Check {
            name,
            outcome: Outcome::Fail,
            detail,
            advice: "hold for as long as the reason lasts, and no longer: `high-idle-ns` and \
                     `waited-ns` say how long that is",
        },
        Err(stopped) => not_run(name, stopped),
    }
}

fn determinism(subject: &dyn Subject, options: &Options) -> Check {
    let name = "determinism";
    let mut runner = runner(options.seed ^ 0x5eed, COMPARED);
    let mut calls = 0;
    for n in 0..COMPARED {
        let Ok(tree) = stream::stream().new_tree(&mut runner) else { continue };
        let steps = tree.current();
        let (first, second) = match (turns(subject, &steps), turns(subject, &steps)) {
            (Ok(first), Ok(second)) => (first, second),
            (Err(stopped), _) | (_, Err(stopped)) => return not_run(name, stopped),
        };
        calls += first.len();
        let differs = first.iter().zip(&second).position(|(one, other)| one != other);
        let at = differs.or((first.len() != second.len()).then_some(first.len()));
        if let Some(at) = at {
            let of = |turns: &[Turn]| turns.get(at).map_or("nothing".into(), |t| format!("{t:?}"));
            return Check {
                name,
                outcome: Outcome::Fail,
                detail: format!(
                    "stream {n}, call {at}: {} from one fresh instance, {} from another",
                    of(&first),
                    of(&second)
                ),
                advice: "decide by what is passed in only: no order of a hash map, no addresses, \
                         nothing kept outside of the instance",
            };
        }
    }
    pass(name, format!("{COMPARED} streams of {calls} calls, the same twice"))
}

/// Every call of a stream and its answer; a fault counts as one, and the core goes on.
fn turns(subject: &dyn Subject, steps: &[Step]) -> Result<Vec<Turn>, Stopped> {
    let harness = Harness::new(subject.start(None)?);
    Ok(harness.asking_about_high(subject.has_say_over_high()).record(steps))
}
