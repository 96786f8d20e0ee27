//! What it costs when a policy fails, is guarded against, or is watched: times, which no
//! test asserts. On the software device, each fault in a core of its own.

use crate::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use crate::process::wait_until;
use crate::reload::Admin;
use crate::{Artefacts, Class, Device, Scene};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What the guest `chaos` does on `always N`, as it is called here, and as status may.
const FAULTS: [(&str, u32, &[&str]); 5] = [
    ("trap", 1, &["trap"]),
    ("loop", 2, &["overrun"]),
    // Filling memory takes fuel; whichever runs out first.
    ("memory", 3, &["memory", "overrun"]),
    ("nonsense", 11, &["nonsense"]),
    ("stall", 10, &["stall"]),
];
/// How often status is asked.
const POLL: Duration = Duration::from_millis(2);
/// Launches timed before a fault.
const LAUNCHES: usize = 2_000;
/// How long the shadow is looked at.
const SHADOW: Duration = Duration::from_secs(4);
/// Requests at 60 a second, and steps, for longer than a test or the shadow takes.
const REQUESTS: u64 = 600;
const STEPS: u64 = 600;

/// Everything, each part so many times.
///
/// # Errors
/// If something does not come about at all.
pub fn run(artefacts: &Artefacts, rounds: u32) -> Result<Value> {
    let mut faults = Vec::new();
    for (name, number, kinds) in FAULTS {
        let mut all = Vec::new();
        for _ in 0..rounds {
            all.push(fault(artefacts, number, kinds).with_context(|| format!("fault {name}"))?);
        }
        faults.push(json!({"fault": name, "rounds": all}));
    }
    let mut guards = Vec::new();
    for _ in 0..rounds {
        guards.push(guard(artefacts).context("the guard")?);
    }
    let shadow = shadow(artefacts).context("the shadow")?;
    Ok(json!({"schema": 1, "faults": faults, "guard": guards, "shadow": shadow}))
}

fn ms(from: Instant, to: Instant) -> f64 {
    to.duration_since(from).as_secs_f64() * 1e3
}

/// Quantile of a sorted sample, by nearest rank.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Some launches, each until its end, as the program sees it, us.
fn launches(probe: &mut Probe, count: usize) -> Result<Vec<f64>> {
    let answer = probe.ask(&format!("time {count} 10 1"))?;
    let us = answer["us"].as_array().with_context(|| format!("no times in {answer}"))?;
    Ok(us.iter().filter_map(Value::as_f64).collect())
}

/// When the status first showed each change.
#[derive(Default)]
struct Seen {
    counted: Option<Instant>,
    named: Option<Instant>,
    back: Option<Instant>,
}

/// Asks until the good policy is back.
fn watch(mut admin: Admin, kinds: &[&str], bad: u64, back: &AtomicBool) -> Result<Seen> {
    let mut seen = Seen::default();
    let seen = wait_until("waiting for the good policy", JOB_MAX, || {
        let status = admin.ask(&json!({"cmd": "status", "kernels": 0}))?;
        let (policy, now) = (&status["policy"], Instant::now());
        if kinds.iter().any(|kind| policy["faults"][kind].as_u64() > Some(0)) {
            seen.counted.get_or_insert(now);
        }
        let disabled = &policy["last_disabled"];
        if disabled["generation"] == bad && kinds.iter().any(|kind| disabled["kind"] == *kind) {
            seen.named.get_or_insert(now);
        }
        if policy["generation"].as_u64() > Some(bad) {
            seen.back = Some(now);
            return Ok(Some(std::mem::take(&mut seen)));
        }
        std::thread::sleep(POLL);
        Ok(None)
    });
    back.store(true, Relaxed);
    seen
}

/// A policy that fails takes over while a program launches.
fn fault(artefacts: &Artefacts, number: u32, kinds: &[&str]) -> Result<Value> {
    let scene = Scene::new(artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    // Somebody to be protected: every launch of the other is decided.
    let high = Probe::start(&scene, Class::High, "high")?;
    let mut before = launches(&mut probe, LAUNCHES)?;
    before.sort_by(f64::total_cmp);
    let config = scene.dir().join("chaos.conf");
    std::fs::write(&config, format!("always {number}"))?;
    let mut admin = Admin::connect(&scene.admin_socket())?;
    let chaos = artefacts.test_policy("chaos")?;
    let loaded = admin.ask(&json!({"cmd": "policy_load", "path": chaos, "config": config}))?;
    let bad = loaded["generation"].as_u64().context("a generation")?;
    let back = AtomicBool::new(false);
    let (began, seen, mut during) = std::thread::scope(|scope| -> Result<_> {
        let watching = scope.spawn(|| watch(admin, kinds, bad, &back));
        let (began, mut during) = (Instant::now(), Vec::new());
        while !back.load(Relaxed) {
            during.extend(launches(&mut probe, 8)?);
        }
        let seen = watching.join().expect("the watching thread panicked")?;
        Ok((began, seen, during))
    })?;
    during.sort_by(f64::total_cmp);
    probe.check()?;
    let status = scene.status()?;
    ensure!(status.policy_name() == "tally-priority", "{:#}", status.0["policy"]);
    let (counted, named) = (seen.counted.context("not counted")?, seen.named.context("not named")?);
    let row = json!({
        "counted_ms": ms(began, counted),
        "named_ms": ms(began, named),
        "back_ms": ms(began, seen.back.context("not back")?),
        "fault_cost_us": status.0["policy"]["fault_cost_us"]["max"],
        "launch_before_p50_us": quantile(&before, 0.5),
        "launch_before_p99_us": quantile(&before, 0.99),
        "launch_before_max_us": quantile(&before, 1.0),
        "launch_during_p50_us": quantile(&during, 0.5),
        "launch_during_p99_us": quantile(&during, 0.99),
        "launch_during_max_us": quantile(&during, 1.0),
    });
    probe.quit()?;
    high.quit()?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok(row)
}

fn ended(mut both: [crate::Process; 2]) -> Result<()> {
    both.iter_mut().try_for_each(crate::Process::kill)
}

/// A guard that nobody can keep, in an A/B test that begins with B.
fn guard(artefacts: &Artefacts) -> Result<Value> {
    let scene = Scene::new(artefacts, Device::software())?;
    let (a, b) = (artefacts.policy("tally-priority")?, artefacts.policy("fifo")?);
    let mut core = scene.core(&a, &[])?;
    let both = jobs::both_launching(&scene, STEPS, REQUESTS)?;
    let (a, b) = (a.to_string_lossy().into_owned(), b.to_string_lossy().into_owned());
    let plan = ["--metric=hp_p99", "--block=1s", "--max-time=60s", "--guard=hp_p99<1ns"];
    let mut start = vec!["ab", "start", &a, &b];
    start.extend(plan);
    let output = scene.ctl(&start)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut admin = Admin::connect(&scene.admin_socket())?;
    let report = wait_until("waiting for the guard", ANSWER_MAX, || {
        std::thread::sleep(POLL);
        let report = admin.ask(&json!({"cmd": "ab_report"}))?;
        Ok((!report["ended"].is_null() && !report["a_back_after_ns"].is_null()).then_some(report))
    })?;
    ensure!(report["ended"]["reason"] == "guard", "{:#}", report["ended"]);
    let number = |at: &str| report.pointer(at).and_then(Value::as_f64).context(at.to_owned());
    // A's block came before, if the coin said so.
    let before = report["blocks"].as_array().and_then(|blocks| blocks.last());
    let b_began_s = before.map_or(0.0, |block| {
        let at = |key: &str| block[key].as_f64().unwrap_or(0.0);
        at("began_s") + at("measured_s")
    });
    let row = json!({
        "b_active_ms": number("/ended/after_ns")? / 1e6 - b_began_s * 1e3,
        "a_back_after_ms": number("/a_back_after_ns")? / 1e6,
    });
    ended(both)?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok(row)
}

/// `fifo` beside `tally-priority` for a while.
fn shadow(artefacts: &Artefacts) -> Result<Value> {
    let scene = Scene::new(artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    let both = jobs::both_launching(&scene, STEPS, REQUESTS)?;
    let fifo = artefacts.policy("fifo")?.to_string_lossy().into_owned();
    let output = scene.ctl(&["shadow", "start", &fifo])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut admin = Admin::connect(&scene.admin_socket())?;
    let mut look = || anyhow::Ok((admin.ask(&json!({"cmd": "shadow_status"}))?, Instant::now()));
    let (first, began) = look()?;
    std::thread::sleep(SHADOW);
    let (last, over) = look()?;
    let more = |at: &str| {
        let number = |v: &Value| v.pointer(at).and_then(Value::as_f64).unwrap_or(0.0);
        number(&last) - number(&first)
    };
    let wall_ms = ms(began, over);
    ensure!(more("/comparison/decisions") > 0.0, "nothing was compared: {last:#}");
    let row = json!({
        "seconds": wall_ms / 1e3,
        "cpu_percent": more("/cpu_ms") / wall_ms * 100.0,
        "cpu_percent_max": last["cpu_percent"],
        "decisions_per_s": more("/comparison/decisions") / wall_ms * 1e3,
        "skipped": more("/parts/skipped"),
        "dropped": last["dropped"],
        "agreement_percent": last["agreement_percent"],
    });
    ended(both)?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok(row)
}
