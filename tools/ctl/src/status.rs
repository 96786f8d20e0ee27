//! `tallyctl status`: the core's status for people.

mod service;

use crate::admin::{AdminSocket, Core, read};
use crate::cli::StatusArgs;
use crate::error::CtlError;
use crate::table::{Align, table};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;
use tally_admin::{
    Active, Class, ClientStatus, KernelStatus, MechanismState, MinShare, MpsUse, PolicyReport,
    Quantiles, Request, Status, UngovernedStatus, WaitReason,
};

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
                    (false, _) => whole(&mut text, &read(status)?, Paint(colour))?,
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

/// Whether to colour the output with ANSI escapes. Two styles, for which a crate would be a dependency more.
#[derive(Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }
    /// Text in red, for what somebody should look at.
    pub fn bad(self, text: &str) -> String {
        self.with("31", text)
    }
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

fn quantiles(q: &Quantiles) -> String {
    match q.count {
        0 => "none yet".into(),
        count => format!(
            "p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us ({count} launches)",
            q.p50_us, q.p99_us, q.p999_us
        ),
    }
}

fn whole(out: &mut impl Write, s: &Status, paint: Paint) -> std::io::Result<()> {
    let pinned = match s.core.pinned_cpu {
        Some(cpu) => format!("on CPU {cpu}"),
        None => "not pinned".into(),
    };
    writeln!(
        out,
        "{}  {}, process {}, up {}, spins {} us, {pinned}",
        paint.bold("core     "),
        s.core.version,
        s.core.pid,
        duration(s.core.uptime_s),
        s.core.spin_us,
    )?;
    writeln!(
        out,
        "{}  {} (asked: {}): {}",
        paint.bold("sharing"),
        s.sharing.in_force,
        s.sharing.asked,
        s.sharing.reason
    )?;
    if let Some(mps) = &s.sharing.mps {
        let pipes = mps.pipe_directory.display();
        writeln!(out, "           MPS daemon at {pipes}: {}", mps.state)?;
    }
    policy_lines(out, &s.policy, paint)?;
    if let Some(experiment) = &s.experiment {
        crate::ab::write_status(out, Some(experiment))?;
    }
    writeln!(out, "{}  {}", paint.bold("at once  "), quantiles(&s.decision_latency))?;
    writeln!(out, "{}  {}", paint.bold("later    "), quantiles(&s.held_latency))?;
    crate::log::status_lines(out, s, paint)?;
    clients(out, &s.clients, paint)?;
    ungoverned(out, &s.ungoverned, paint)?;
    departed(out, s, paint)?;
    kernels(out, &s.kernels, paint)
}

/// The policy alone, for `tallyctl policy show`.
pub fn policy(out: &mut impl Write, p: &PolicyReport) -> Result<(), CtlError> {
    Ok(policy_lines(out, p, Paint(std::io::stdout().is_terminal()))?)
}

/// Enough of a digest to tell policies apart.
pub fn short_digest(digest: &str) -> &str {
    digest.get(..16).unwrap_or("none")
}

fn policy_lines(out: &mut impl Write, p: &PolicyReport, paint: Paint) -> std::io::Result<()> {
    let Active { name, generation, digest, .. } = &p.active;
    writeln!(
        out,
        "{}  {name}, generation {generation}, sha256 {}",
        paint.bold("policy   "),
        short_digest(digest),
    )?;
    match &p.active.source {
        Some(source) => writeln!(out, "           {}", source.file.display())?,
        None => writeln!(
            out,
            "           {}",
            paint.bad("no policy is loaded: the built-in rule serves")
        )?,
    }
    if let Some(key) = &p.active.signed_by {
        writeln!(out, "           signed by {key}")?;
    }
    if !p.granted.is_empty() {
        writeln!(out, "           granted: {}", p.granted.join(", "))?;
    }
    writeln!(
        out,
        "           of all policies: {} decisions, {} events, {} by the built-in rule",
        p.decides, p.events, p.built_in_rule_decisions
    )?;
    for reason in p.reasons.iter().filter(|reason| reason.decisions > 0) {
        writeln!(out, "           {:>10} decisions: {}", reason.decisions, reason.text)?;
    }
    let faults = p.faults.by_kind().into_iter().filter(|(_, n)| *n > 0);
    let faults: Vec<String> = faults
        .map(|(kind, n)| match kind {
            "disabled" => format!("{n} calls not made to a disabled one"),
            kind => format!("{n} {kind}"),
        })
        .collect();
    if !faults.is_empty() {
        let last = p.last_fault.as_deref().unwrap_or("?");
        let line = format!("faults of all policies: {}; last: {last}", faults.join(", "));
        writeln!(out, "           {}", paint.bad(&line))?;
    }
    let pauses = &p.swap_pause_us;
    if pauses.count > 0 {
        writeln!(
            out,
            "           loaded because: {} (state: {}); pause {:.0} us, at most {:.0} us",
            p.active.loaded_because,
            p.active.restored.outcome(),
            pauses.last,
            pauses.max
        )?;
    }
    if let Some(last) = &p.last_disabled {
        let message = last.how.message.lines().next().unwrap_or_default();
        let line =
            format!("generation {} was disabled: {}: {message}", last.generation, last.how.kind);
        writeln!(out, "           {}", paint.bad(&line))?;
    }
    if p.disabled {
        writeln!(out, "           {}", paint.bad("disabled: the built-in rule serves"))?;
    }
    if let Some(failure) = &p.last_load_error {
        let line = format!("last load failed: {}", failure.message);
        writeln!(out, "           {}", paint.bad(&line))?;
    }
    for (name, value) in &p.counters {
        writeln!(out, "           {name} = {value}")?;
    }
    for (name, value) in &p.gauges {
        writeln!(out, "           {name} = {value}")?;
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

/// GPU time of those launches that were timed; not all are.
fn measured(ms: f64, launches: u64) -> String {
    if launches == 0 { String::new() } else { format!("{ms:.0}") }
}

/// Why a client's work does not go on now.
fn why(client: &ClientStatus) -> String {
    let Some(why) = &client.why else { return String::new() };
    let time = match why.for_ms {
        Some(ms) => format!(" (asked again in {ms:.1} ms)"),
        None => String::new(),
    };
    match why.reason {
        WaitReason::HighPriority => format!("high priority busy{time}"),
        WaitReason::Policy => format!("held by the policy{time}"),
        WaitReason::Window => "window full".into(),
        WaitReason::Yielding => "yielding".into(),
        WaitReason::Decision => "no decision yet".into(),
        WaitReason::Unknown => "for a reason that only a newer tallyctl knows".into(),
    }
}

/// The floor of a best-effort client, and what it had.
fn floor(out: &mut impl Write, id: u32, min_share: Option<MinShare>) -> std::io::Result<()> {
    let Some(MinShare { asked_percent: asked, granted_percent: granted, had_percent }) = min_share
    else {
        return Ok(());
    };
    write!(out, "  {id}: floor: {asked} % of GPU time asked, {granted} % granted")?;
    match had_percent {
        Some(had) => writeln!(out, ", {had:.1} % had while it had work"),
        None => writeln!(out),
    }
}

fn clients(out: &mut impl Write, all: &[ClientStatus], paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    writeln!(out)?;
    if all.is_empty() {
        return writeln!(out, "no clients");
    }
    let row = |c: &ClientStatus| {
        let t = &c.transformed;
        vec![
            c.identity.id.to_string(),
            c.identity.pid.to_string(),
            short(&c.identity.name),
            c.identity.class.to_string(),
            c.launches.to_string(),
            c.decisions.run.to_string(),
            c.decisions.leased.to_string(),
            (t.sliced + t.preemptible + t.sm_limited + t.graph_chained).to_string(),
            c.decisions.launches_held.to_string(),
            c.waiting.to_string(),
            format!("{:.0}", c.waited_ms),
            format!("{:.0}", c.charged_ms),
            format!("{:.1}", c.charged_percent),
            measured(c.measured_ms, c.launches_measured),
            // High priority does not wait for others.
            if c.identity.class == Class::High { String::new() } else { c.weight.to_string() },
            if c.governed { "yes" } else { "no" }.to_owned(),
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
        ("CHARGED ms", Right),
        ("CHARGED %", Right),
        ("MEASURED ms", Right),
        ("WEIGHT", Right),
        ("GOVERNED", Left),
        ("WHY", Left),
    ];
    print(out, &table(&header, &all.iter().map(row).collect::<Vec<_>>()), paint)?;
    for c in all {
        let id = c.identity.id;
        floor(out, id, c.min_share)?;
        service::requests(out, id, c.service.as_ref(), paint)?;
        service::marks(out, id, c.service.as_ref(), paint)?;
        service::profile(out, id, c.service.as_ref())?;
        for (why, what) in [
            (&*c.not_governed_reason, "not governed"),
            (&*c.identity.class_reason, "class"),
            (&*c.report.whole_because, "all launches run whole"),
        ] {
            if !why.is_empty() {
                writeln!(out, "  {id}: {what}: {why}")?;
            }
        }
        if c.report.time_slice == MechanismState::Failed {
            let code = c.report.time_slice_error;
            let line = format!("  {id}: its time slice could not be set: status {code}");
            writeln!(out, "{}", paint.bad(&line))?;
        }
        if c.report.linger == MechanismState::Failed {
            let code = c.report.linger_error;
            let line = format!("  {id}: it does not linger on the GPU: CUDA error {code}");
            writeln!(out, "{}", paint.bad(&line))?;
        }
        if matches!(c.report.mps, MpsUse::NotAClient | MpsUse::NotAsked) {
            writeln!(out, "{}", paint.bad(&format!("  {id}: {}", c.report.mps)))?;
        }
    }
    Ok(())
}

/// Programs that run and are not governed; of those that ended, the last five.
fn ungoverned(out: &mut impl Write, all: &[UngovernedStatus], paint: Paint) -> std::io::Result<()> {
    let ended = all.iter().filter(|p| !p.running).take(5);
    let shown: Vec<&UngovernedStatus> = all.iter().filter(|p| p.running).chain(ended).collect();
    if shown.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", paint.bad("not governed"))?;
    for p in shown {
        let end = if p.running { "" } else { " (ended)" };
        writeln!(out, "  process {}, {}{end}: {}", p.pid, short(&p.name), p.reason)?;
    }
    Ok(())
}

fn departed(out: &mut impl Write, s: &Status, paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    if s.departed.is_empty() {
        return Ok(());
    }
    let row = |c: &tally_admin::Departed| {
        vec![
            c.identity.id.to_string(),
            c.identity.pid.to_string(),
            short(&c.identity.name),
            c.identity.class.to_string(),
            c.launches.to_string(),
            format!("{:.0}", c.charged_ms),
            measured(c.measured_ms, c.launches_measured),
            duration(c.connected_s),
            c.reason.clone(),
        ]
    };
    let header = [
        ("LEFT", Right),
        ("PID", Right),
        ("NAME", Left),
        ("CLASS", Left),
        ("LAUNCHES", Right),
        ("CHARGED ms", Right),
        ("MEASURED ms", Right),
        ("STAYED", Right),
        ("HOW", Left),
    ];
    writeln!(out)?;
    print(out, &table(&header, &s.departed.iter().take(5).map(row).collect::<Vec<_>>()), paint)
}

pub fn three([x, y, z]: [u32; 3]) -> String {
    format!("{x}x{y}x{z}")
}

/// How often a kernel's blocks fill the GPU.
pub fn waves(kernel: &KernelStatus) -> String {
    if kernel.blocks_per_sm == 0 { String::new() } else { format!("{:.2}", kernel.waves) }
}

/// A kernel's time; an upper bound if it never ran alone.
pub fn kernel_us(kernel: &KernelStatus, us: f64) -> String {
    let bound = if kernel.contended { "<= " } else { "" };
    format!("{bound}{us:.1}")
}

/// What a reason in [`KernelStatus::transformed`] begins with.
const WHOLE_ONLY: &str = "whole only: ";

fn kernels(out: &mut impl Write, all: &[KernelStatus], paint: Paint) -> std::io::Result<()> {
    use Align::{Left, Right};
    if all.is_empty() {
        return Ok(());
    }
    let row = |k: &KernelStatus| {
        vec![
            k.measured.to_string(),
            kernel_us(k, k.mean_us),
            kernel_us(k, k.p99_us),
            three(k.grid),
            three(k.block),
            waves(k),
            k.transformed.split(':').next().unwrap_or_default().to_owned(),
            k.image.clone(),
            short(&k.name),
        ]
    };
    let header = [
        ("MEASURED", Right),
        ("MEAN us", Right),
        ("P99 us", Right),
        ("GRID", Left),
        ("BLOCK", Left),
        ("WAVES", Right),
        ("FORMS", Left),
        ("IMAGE", Left),
        ("KERNEL", Left),
    ];
    writeln!(out)?;
    print(out, &table(&header, &all.iter().map(row).collect::<Vec<_>>()), paint)?;
    let mut reasons = BTreeMap::<&str, usize>::new();
    for why in all.iter().filter_map(|k| k.transformed.strip_prefix(WHOLE_ONLY)) {
        *reasons.entry(why).or_default() += 1;
    }
    for (why, count) in reasons {
        let kernels = if count == 1 { "kernel" } else { "kernels" };
        writeln!(out, "{WHOLE_ONLY}{why} ({count} {kernels})")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
