//! `tallyctl status`: the core's status for people.
//!
//! Reads the JSON by name and shows `?` for what is missing, so that it works
//! with a core that is a little older or newer.

use crate::admin::{AdminSocket, Core};
use crate::cli::StatusArgs;
use crate::error::CtlError;
use crate::table::{Align, table};
use tally_admin::ab::AbStatus;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::time::Duration;
use tally_admin::Request;

/// Longest name shown in a table.
const NAME_CHARS_MAX: usize = 48;

/// Show it once, or again and again: also while the core is started anew.
pub fn run(socket: &AdminSocket, args: &StatusArgs) -> Result<(), CtlError> {
    let mut core = Some(Core::connect(socket)?);
    let mut out = std::io::stdout().lock();
    let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let request = Request::Status { kernels: Some(args.kernels) };
    let mut has_answered = false;
    loop {
        let answer = match &mut core {
            Some(core) => core.ask(&request),
            None => Core::connect(socket).and_then(|new| core.insert(new).ask(&request)),
        };
        let mut text = Vec::new();
        match answer {
            Ok(status) => {
                has_answered = true;
                match (args.json, args.watch) {
                    (true, true) => writeln!(text, "{status}")?,
                    (true, false) => writeln!(text, "{status:#}")?,
                    (false, _) => whole(&mut text, &status, Paint(colour))?,
                }
            }
            Err(CtlError::NoCore { socket, why }) if args.watch && has_answered => {
                core = None;
                let line = format!("no core answers at {} ({why}); trying again", socket.display());
                match args.json {
                    true => writeln!(text, "{}", json!({"core": null, "no_core": line}))?,
                    false => writeln!(text, "{}", Paint(colour).bad(&line))?,
                }
            }
            Err(error) => return Err(error),
        }
        if args.watch && colour {
            // Home and clear, in one write with the text: no flicker.
            out.write_all(b"\x1b[H\x1b[2J")?;
        }
        out.write_all(&text)?;
        out.flush()?;
        if !args.watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Colours, or none.
#[derive(Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }
    /// For what somebody should look at.
    pub fn bad(self, text: &str) -> String {
        self.with("31", text)
    }
}

/// A text of the answer.
pub fn text<'a>(v: &'a Value, at: &str) -> &'a str {
    v.pointer(at).and_then(Value::as_str).unwrap_or("?")
}

/// A whole number of it.
pub fn count(v: &Value, at: &str) -> String {
    v.pointer(at).and_then(Value::as_u64).map_or_else(|| "?".into(), |n| n.to_string())
}

/// A number of it.
pub fn number(v: &Value, at: &str) -> f64 {
    v.pointer(at).and_then(Value::as_f64).unwrap_or(0.0)
}

/// A list of it.
pub fn list<'a>(v: &'a Value, at: &str) -> &'a [Value] {
    v.pointer(at).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A duration in the unit that suits it.
fn duration(s: f64) -> String {
    if s < 60.0 {
        format!("{s:.0} s")
    } else if s < 7_200.0 {
        format!("{:.0} min", s / 60.0)
    } else if s < 172_800.0 {
        format!("{:.1} h", s / 3_600.0)
    } else {
        format!("{:.1} d", s / 86_400.0)
    }
}

/// A name that fits a table.
pub fn short(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS_MAX {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS_MAX - 3).chain("...".chars()).collect()
}

fn quantiles(v: &Value, at: &str) -> String {
    match v.pointer(at) {
        Some(q) if number(q, "/count") > 0.0 => format!(
            "p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us ({} launches)",
            number(q, "/p50_us"),
            number(q, "/p99_us"),
            number(q, "/p999_us"),
            count(q, "/count")
        ),
        _ => "none yet".into(),
    }
}

fn whole(out: &mut impl Write, s: &Value, paint: Paint) -> std::io::Result<()> {
    let pinned = match s.pointer("/core/pinned_cpu").and_then(Value::as_u64) {
        Some(cpu) => format!("on CPU {cpu}"),
        None => "not pinned".into(),
    };
    writeln!(
        out,
        "{}  {}, process {}, up {}, spins {} us, {pinned}",
        paint.bold("core     "),
        text(s, "/core/version"),
        count(s, "/core/pid"),
        duration(number(s, "/core/uptime_s")),
        count(s, "/core/spin_us"),
    )?;
    writeln!(
        out,
        "{}  {} (asked: {}): {}",
        paint.bold("sharing"),
        text(s, "/sharing/in_force"),
        text(s, "/sharing/asked"),
        text(s, "/sharing/reason")
    )?;
    if let Some(state) = s.pointer("/sharing/mps/state").and_then(Value::as_str) {
        writeln!(
            out,
            "           MPS daemon at {}: {state}",
            text(s, "/sharing/mps/pipe_directory")
        )?;
    }
    policy_lines(out, &s["policy"], paint)?;
    if let Ok(test) = serde_json::from_value::<AbStatus>(s["experiment"].clone()) {
        crate::ab::write_status(out, Some(&test))?;
    }
    writeln!(out, "{}  {}", paint.bold("decisions"), quantiles(s, "/decision_latency"))?;
    writeln!(out, "{}  {}", paint.bold("held     "), quantiles(s, "/held_latency"))?;
    crate::log::status_lines(out, s, paint)?;
    clients(out, s, paint)?;
    ungoverned(out, s, paint)?;
    departed(out, s, paint)?;
    kernels(out, s, paint)
}

/// The policy alone, for `tallyctl policy show`.
pub fn policy(out: &mut impl Write, p: &Value) -> Result<(), CtlError> {
    Ok(policy_lines(out, p, Paint(std::io::stdout().is_terminal()))?)
}

fn policy_lines(out: &mut impl Write, p: &Value, paint: Paint) -> std::io::Result<()> {
    writeln!(
        out,
        "{}  {}, generation {}, sha256 {}",
        paint.bold("policy   "),
        text(p, "/name"),
        count(p, "/generation"),
        text(p, "/digest").get(..16).unwrap_or("none"),
    )?;
    if let Some(file) = p.pointer("/source/file").and_then(Value::as_str) {
        writeln!(out, "           {file}")?;
    } else {
        writeln!(out, "           {}", paint.bad("no policy is loaded: the built-in rule serves"))?;
    }
    if let Some(key) = p["signed_by"].as_str() {
        writeln!(out, "           signed by {key}")?;
    }
    let names = |at: &str| list(p, at).iter().filter_map(Value::as_str).collect::<Vec<_>>();
    let granted = names("/granted");
    if !granted.is_empty() {
        writeln!(out, "           granted: {}", granted.join(", "))?;
    }
    writeln!(
        out,
        "           {} decisions, {} events, {} by the built-in rule",
        count(p, "/decides"),
        count(p, "/events"),
        count(p, "/fallbacks")
    )?;
    for reason in list(p, "/reasons") {
        let (decisions, why) = (reason["decisions"].as_u64().unwrap_or(0), text(reason, "/text"));
        if decisions == 0 {
            continue;
        }
        writeln!(out, "           {decisions:>10} decisions: {why}")?;
    }
    let faults: Vec<String> = p["faults"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, n)| n.as_u64() != Some(0))
        .map(|(kind, n)| format!("{n} {kind}"))
        .collect();
    if !faults.is_empty() {
        let line = format!("faults: {}; last: {}", faults.join(", "), text(p, "/last_fault"));
        writeln!(out, "           {}", paint.bad(&line))?;
    }
    let pauses = number(p, "/swap_pause_us/count");
    if pauses > 0.0 {
        let (last, max) = (number(p, "/swap_pause_us/last"), number(p, "/swap_pause_us/max"));
        let state = text(p, "/restored/outcome");
        writeln!(
            out,
            "           loaded_because: {} (state: {state}); pause {last:.0} us, at most {max:.0} us",
            text(p, "/loaded_because")
        )?;
    }
    if let Some(struck) = p.get("last_disabled").filter(|s| !s.is_null()) {
        let message = text(struck, "/message").lines().next().unwrap_or_default();
        let line = format!(
            "generation {} was disabled: {}: {message}",
            count(struck, "/generation"),
            text(struck, "/kind")
        );
        writeln!(out, "           {}", paint.bad(&line))?;
    }
    if p["disabled"].as_bool() == Some(true) {
        writeln!(out, "           {}", paint.bad("switched off: the built-in rule serves"))?;
    }
    if let Some(message) = p.pointer("/last_load_error/message").and_then(Value::as_str) {
        writeln!(out, "           {}", paint.bad(&format!("last load failed: {message}")))?;
    }
    for kind in ["counters", "gauges"] {
        for (name, value) in p[kind].as_object().into_iter().flatten() {
            writeln!(out, "           {name} = {value}")?;
        }
    }
    Ok(())
}

/// A table with its header in bold.
pub fn print(out: &mut impl Write, lines: &[String], paint: Paint) -> std::io::Result<()> {
    for (i, line) in lines.iter().enumerate() {
        let line = if i == 0 { paint.bold(line) } else { line.clone() };
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Launches made in any form but whole; `?` of a core that does not say.
fn launches_in_parts(client: &Value) -> String {
    if client.get("transformed").is_none() {
        return "?".into();
    }
    let forms = ["sliced", "preemptible", "sm_limited", "graph_chained"]
        .map(|form| format!("/transformed/{form}"));
    format!("{:.0}", forms.iter().map(|at| number(client, at)).sum::<f64>())
}

/// Why a client's work does not go on now.
fn why(client: &Value) -> String {
    let Some(reason) = client.pointer("/why/reason").and_then(Value::as_str) else {
        return String::new();
    };
    let time = match client.pointer("/why/for_ms").and_then(Value::as_f64) {
        Some(ms) => format!(" (asked again in {ms:.1} ms)"),
        None => String::new(),
    };
    match reason {
        "high_priority" => format!("high priority busy{time}"),
        "policy" => format!("held by the policy{time}"),
        "window" => "window full".into(),
        "yielding" => "yielding".into(),
        "decision" => "no decision yet".into(),
        other => other.into(),
    }
}

fn clients(out: &mut impl Write, s: &Value, paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    let all = list(s, "/clients");
    writeln!(out)?;
    if all.is_empty() {
        return writeln!(out, "no clients");
    }
    let row = |c: &Value| {
        vec![
            count(c, "/id"),
            count(c, "/pid"),
            short(text(c, "/name")),
            text(c, "/class").to_owned(),
            count(c, "/launches"),
            count(c, "/decisions/run"),
            count(c, "/decisions/leased"),
            launches_in_parts(c),
            count(c, "/decisions/launches_held"),
            count(c, "/waiting"),
            format!("{:.0}", number(c, "/waited_ms")),
            format!("{:.0}", number(c, "/charged_ms")),
            if c["governed"].as_bool() == Some(true) { "yes" } else { "no" }.to_owned(),
            why(c),
        ]
    };
    let header = [
        ("ID", Right),
        ("PID", Right),
        ("NAME", Left),
        ("CLASS", Left),
        ("LAUNCHES", Right),
        ("RUN", Right),
        ("LEASED", Right),
        ("FORMS", Right),
        ("HELD", Right),
        ("WAITING", Right),
        ("WAITED ms", Right),
        ("GPU ms", Right),
        ("GOVERNED", Left),
        ("WHY", Left),
    ];
    print(out, &table(&header, &all.iter().map(row).collect::<Vec<_>>()), paint)?;
    for c in all {
        let id = count(c, "/id");
        for (reason, what) in [("/not_governed_reason", "not governed"), ("/class_reason", "class")]
        {
            let why = text(c, reason);
            if !why.is_empty() {
                writeln!(out, "  {id}: {what}: {why}")?;
            }
        }
        if text(c, "/report/time_slice") == "failed" {
            let code = count(c, "/report/time_slice_error");
            let line = format!("  {id}: its time slice could not be set: status {code}");
            writeln!(out, "{}", paint.bad(&line))?;
        }
        if text(c, "/report/linger") == "failed" {
            let code = count(c, "/report/linger_error");
            let line = format!("  {id}: it does not linger on the GPU: CUDA error {code}");
            writeln!(out, "{}", paint.bad(&line))?;
        }
        if text(c, "/report/mps").contains("MPS client") {
            writeln!(out, "{}", paint.bad(&format!("  {id}: {}", text(c, "/report/mps"))))?;
        }
    }
    Ok(())
}

/// Programs that run and are not governed; of those that ended, the last five.
fn ungoverned(out: &mut impl Write, s: &Value, paint: Paint) -> std::io::Result<()> {
    let all = list(s, "/ungoverned");
    let runs = |p: &&Value| p["running"].as_bool() == Some(true);
    let ended = all.iter().filter(|p| !runs(p)).take(5);
    let shown: Vec<&Value> = all.iter().filter(runs).chain(ended).collect();
    if shown.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", paint.bad("not governed"))?;
    for p in shown {
        let end = if runs(&p) { "" } else { " (ended)" };
        let (pid, name) = (count(p, "/pid"), short(text(p, "/name")));
        writeln!(out, "  process {pid}, {name}{end}: {}", text(p, "/reason"))?;
    }
    Ok(())
}

fn departed(out: &mut impl Write, s: &Value, paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    let all = list(s, "/departed");
    if all.is_empty() {
        return Ok(());
    }
    let row = |c: &Value| {
        vec![
            count(c, "/id"),
            count(c, "/pid"),
            short(text(c, "/name")),
            text(c, "/class").to_owned(),
            count(c, "/launches"),
            format!("{:.0}", number(c, "/charged_ms")),
            duration(number(c, "/connected_s")),
            text(c, "/reason").to_owned(),
        ]
    };
    let header = [
        ("LEFT", Right),
        ("PID", Right),
        ("NAME", Left),
        ("CLASS", Left),
        ("LAUNCHES", Right),
        ("GPU ms", Right),
        ("STAYED", Right),
        ("HOW", Left),
    ];
    writeln!(out)?;
    print(out, &table(&header, &all.iter().take(5).map(row).collect::<Vec<_>>()), paint)
}

pub fn three(v: &Value) -> String {
    let n = |i: usize| v[i].as_u64().unwrap_or(0);
    format!("{}x{}x{}", n(0), n(1), n(2))
}

/// A kernel's time; an upper bound if it never ran alone.
pub fn kernel_us(kernel: &Value, at: &str) -> String {
    let bound = if kernel["contended"] == true { "<= " } else { "" };
    format!("{bound}{:.1}", number(kernel, at))
}

fn kernels(out: &mut impl Write, s: &Value, paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    let all = list(s, "/kernels");
    if all.is_empty() {
        return Ok(());
    }
    let row = |k: &Value| {
        vec![
            count(k, "/measured"),
            kernel_us(k, "/mean_us"),
            kernel_us(k, "/p99_us"),
            three(&k["grid"]),
            three(&k["block"]),
            text(k, "/transformed").split(':').next().unwrap_or("?").to_owned(),
            k["image"].as_str().unwrap_or_default().to_owned(),
            short(text(k, "/name")),
        ]
    };
    let header = [
        ("MEASURED", Right),
        ("MEAN us", Right),
        ("P99 us", Right),
        ("GRID", Left),
        ("BLOCK", Left),
        ("FORMS", Left),
        ("IMAGE", Left),
        ("KERNEL", Left),
    ];
    writeln!(out)?;
    print(out, &table(&header, &all.iter().map(row).collect::<Vec<_>>()), paint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_answer_is_shown_and_not_a_panic() {
        let mut out = Vec::new();
        whole(&mut out, &json!({}), Paint(false)).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.contains("no clients") && !shown.contains('\x1b'), "{shown}");
    }

    #[test]
    fn waiting_clients_say_why_and_kernels_of_one_name_are_told_apart() {
        let client = |id: u32, why: Value| json!({"id": id, "name": format!("c{id}"), "why": why});
        let kernel = |image: &str, contended: bool| json!({"name": "E_32_32_4", "image": image, "contended": contended, "mean_us": 5.0});
        let status = json!({
            "clients": [
                client(1, json!({"reason": "high_priority", "for_ms": 12.25})),
                client(2, json!({"reason": "policy", "for_ms": 1.0})),
                client(3, json!({"reason": "window", "for_ms": null})),
                client(4, json!({"reason": "yielding"})),
                client(5, json!({"reason": "decision"})),
                client(6, Value::Null),
            ],
            "kernels": [kernel("00c0ffee", false), kernel("deadbeef", true)],
        });
        let mut out = Vec::new();
        whole(&mut out, &status, Paint(false)).unwrap();
        let shown = String::from_utf8(out).unwrap();
        for (name, end) in [
            ("c1", "high priority busy (asked again in 12.2 ms)"),
            ("c2", "held by the policy (asked again in 1.0 ms)"),
            ("c3", "window full"),
            ("c4", "yielding"),
            ("c5", "no decision yet"),
            ("c6", "no"),
        ] {
            let line = shown.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.ends_with(end), "{line:?} does not end with {end:?}");
        }
        let kernels: Vec<_> = shown.lines().filter(|line| line.contains("E_32_32_4")).collect();
        assert!(kernels[0].contains(" 5.0") && kernels[0].contains("00c0ffee"), "{kernels:?}");
        assert!(kernels[1].contains("<= 5.0") && kernels[1].contains("deadbeef"), "{kernels:?}");
    }

    #[test]
    fn programs_that_are_not_governed_are_shown() {
        let status = json!({"ungoverned": [
            {"pid": 9, "name": "train", "reason": "because", "running": true},
            {"pid": 8, "name": "old", "reason": "likewise", "running": false},
        ]});
        let mut out = Vec::new();
        whole(&mut out, &status, Paint(false)).unwrap();
        let shown = String::from_utf8(out).unwrap();
        for line in ["process 9, train: because", "process 8, old (ended): likewise"] {
            assert!(shown.contains(line), "{line:?} not in {shown}");
        }
    }

    #[test]
    fn clients_and_reasons_are_shown() {
        let status = json!({"clients": [{
            "id": 3, "pid": 9, "name": "train", "class": "best-effort", "governed": false,
            "not_governed_reason": "because", "class_reason": "",
            "report": {"time_slice": "failed", "time_slice_error": 27},
        }]});
        let mut out = Vec::new();
        whole(&mut out, &status, Paint(true)).unwrap();
        let shown = String::from_utf8(out).unwrap();
        for word in ["train", "3: not governed: because", "status 27", "\x1b[31m"] {
            assert!(shown.contains(word), "{word:?} not in {shown}");
        }
    }
}
