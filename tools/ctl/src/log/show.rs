//! `tallyctl log show`: records for people, or as JSON.

use super::{next, open};
use crate::error::CtlError;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::Path;
use tally_decision_log::compare::{commands, fault, fault_name, shown};
use tally_decision_log::{Answer, Begin, Outcome, Record, world};
use tally_engine::policy::{Class, Completion, Context, Event, Form, Launch, NEVER, SharingMode};

pub fn run(
    out: &mut impl Write,
    file: &Path,
    as_json: bool,
    last: Option<usize>,
) -> Result<(), CtlError> {
    let mut log = open(file)?;
    let header = log.header().clone();
    if as_json {
        writeln!(out, "{}", json!({"schema": 1, "header": header}))?;
    } else {
        let (contract, core) = (&header.contract, &header.core);
        writeln!(
            out,
            "{}: {contract}, tally-core {core}, begun at {} s of the epoch",
            file.display(),
            header.started_unix_s
        )?;
    }
    // Names of kernels are known from what came before, also before the last few.
    let mut context = Context::default();
    let mut reasons = BTreeMap::new();
    let mut kept = VecDeque::new();
    let rest = loop {
        match next(&mut log, file) {
            (Some(record), _) => {
                if let Err(e) = world::apply(&mut context, &record) {
                    break Some(format!("{}: {e}", file.display()));
                }
                if let Record::Policy(policy) = &record {
                    reasons = policy.reasons.iter().cloned().collect();
                }
                let line = match as_json {
                    true => value(&record, &context).to_string(),
                    false => line(&record, &context, &reasons),
                };
                match last {
                    None => writeln!(out, "{line}")?,
                    Some(0) => {}
                    Some(most) => {
                        if kept.len() == most {
                            kept.pop_front();
                        }
                        kept.push_back(line);
                    }
                }
            }
            (None, rest) => break rest,
        }
    };
    for line in kept {
        writeln!(out, "{line}")?;
    }
    match rest {
        Some(why) => Err(CtlError::Failed(why)),
        None => Ok(()),
    }
}

fn name(context: &Context, kernel: u32) -> &str {
    context.world.profiles.get(kernel).map_or("?", |p| &p.key.name)
}

fn class(class: Class) -> &'static str {
    match class {
        Class::High => "high",
        Class::BestEffort => "best-effort",
    }
}

fn begin(how: Begin) -> &'static str {
    match how {
        Begin::PolicyStart => "with the policy's start",
        Begin::MidRun => "while the policy runs: what it remembers is not in the log",
        Begin::Saved => "while the policy runs, with what it knew",
        Begin::AfterGap => "after a gap: what the policy remembers is not in the log",
    }
}

/// `reasons`: of the active policy, by number.
fn line(record: &Record, context: &Context, reasons: &BTreeMap<u8, String>) -> String {
    match record {
        Record::Policy(p) => format!("policy {} generation {} {}", p.name, p.generation, p.digest),
        Record::Base(_) => "a new description of clients and kernels follows".into(),
        Record::Kernel { id, key } => {
            format!("kernel {id}: {} grid {:?} block {:?}", key.name, key.grid, key.block)
        }
        Record::Profile { id, view } => format!(
            "kernel {id} {}: {} measured, mean {} ns, p99 {} ns, {:?}, {} other forms",
            name(context, *id),
            view.count,
            view.mean_ns,
            view.p99_ns,
            view.transformation,
            view.forms.len()
        ),
        Record::Client(c) => format!("client {} {} {}", c.id, c.name, class(c.class)),
        Record::Usage { id, usage: u } => format!(
            "client {id}: {} launches in flight ({} ns), {} ns measured, {} ns charged, floor {} permille",
            u.in_flight, u.in_flight_ns, u.measured_ns, u.charged_ns, u.min_share_permille
        ),
        Record::Service { id, view: v } => {
            let slo =
                v.objective.map_or("no objective".into(), |o| format!("objective {} ns", o.slo_ns));
            let (within, recent) = (v.recent_within, v.recent);
            let tokens = v.tokens.map_or(String::new(), |t| {
                let (tpot_ns, within, recent) = (t.tpot_ns, t.recent_within, t.recent);
                format!(
                    "; {tpot_ns} ns a token, {within} of {recent} within it, p99 {} ns",
                    t.p99_ns
                )
            });
            let p99_ns = v.p99_ns;
            format!(
                "client {id}: {slo}, {within} of {recent} units within it, p99 {p99_ns} ns{tokens}"
            )
        }
        Record::Gone(id) => format!("client {id} gone"),
        Record::Begin { how, lost, .. } => format!("begin, {lost} lost, {}", begin(*how)),
        Record::Start(list) => format!("start: {}", commands(list)),
        Record::Decide { launch: l, answer } => format!(
            "{} decide client {} kernel {} {} waited {} ns: {}{}{}",
            l.now_ns,
            l.client,
            l.kernel,
            name(context, l.kernel),
            l.waited_ns,
            shown(&answer.outcome),
            why(&answer.outcome, reasons),
            also(answer)
        ),
        Record::Event { now_ns, event, answer } => {
            let fault = match &answer.outcome {
                Outcome::Ok(()) => String::new(),
                Outcome::Fault { kind, message, .. } => format!(": {}", fault(*kind, message)),
            };
            format!("{now_ns} event {event:?}{fault}{}", also(answer))
        }
        Record::Completion { now_ns, done } => {
            format!("{now_ns} done (not told) {done:?} {}", name(context, done.kernel))
        }
        Record::Fault { now_ns, kind, message } => {
            format!("{now_ns} fault: {}", fault(*kind, message))
        }
        Record::End { reason, dropped } => format!("end: {reason}, {dropped} dropped"),
    }
}

fn also<T>(answer: &Answer<T>) -> String {
    match answer.commands.is_empty() {
        true => String::new(),
        false => format!("; {}", commands(&answer.commands)),
    }
}

fn launch(l: &Launch, context: &Context) -> Value {
    json!({
        "now_ns": l.now_ns, "client": l.client, "class": class(l.class), "kernel": l.kernel,
        "name": name(context, l.kernel), "state": l.state, "offered": l.offered, "grid_blocks": l.grid_blocks,
        "block_threads": l.block_threads, "shared_bytes": l.shared_bytes,
        "predicted_ns": l.predicted_ns, "waited_ns": l.waited_ns,
        "in_flight_ns": l.in_flight_ns, "high_idle_ns": l.high_idle_ns,
        "high_clients": l.high_clients, "waiting_clients": l.waiting_clients,
        "stream": l.stream, "sm_count": l.sm_count,
    })
}

fn done(d: &Completion, context: &Context) -> Value {
    json!({
        "client": d.client, "kernel": d.kernel, "name": name(context, d.kernel),
        "form": form(d.form), "argument": d.argument,
        "predicted_ns": d.predicted_ns, "measured_ns": d.measured_ns, "charged_ns": d.charged_ns,
    })
}

fn form(form: Form) -> &'static str {
    match form {
        Form::Whole => "whole",
        Form::Sliced => "sliced",
        Form::Preemptible => "preemptible",
        Form::SmLimited => "sm-limited",
    }
}

/// The text of the reason that a decision has.
fn why(outcome: &Outcome<tally_engine::policy::Answer>, reasons: &BTreeMap<u8, String>) -> String {
    let text = match outcome {
        Outcome::Ok(answer) => reasons.get(&answer.reason).filter(|_| answer.reason > 0),
        Outcome::Fault { .. } => None,
    };
    text.map_or(String::new(), |text| format!(" ({text})"))
}

fn reason(outcome: &Outcome<tally_engine::policy::Answer>) -> Value {
    match outcome {
        Outcome::Ok(answer) if answer.reason > 0 => answer.reason.into(),
        _ => Value::Null,
    }
}

fn failed<T>(outcome: &Outcome<T>) -> Value {
    match outcome {
        Outcome::Ok(_) => Value::Null,
        Outcome::Fault { kind, timed, message } => {
            json!({"kind": fault_name(*kind), "timed": timed, "message": message})
        }
    }
}

fn event(e: &Event, context: &Context) -> Value {
    match e {
        Event::Joined(c) => {
            json!({"joined": {"id": c.id, "name": c.name, "class": class(c.class),
                              "labels": c.labels}})
        }
        Event::Left(id) => json!({"left": id}),
        Event::HighStarted => json!("high_started"),
        Event::HighEnded => json!("high_ended"),
        Event::Completed(d) => json!({"completed": done(d, context)}),
        Event::Timer(token) => json!({"timer": token}),
        Event::UnitBegan { client, since_ns, deadline_ns } => {
            let deadline_ns = Some(*deadline_ns).filter(|ns| *ns != NEVER);
            json!({"unit_began": {"client": client, "since_ns": since_ns, "deadline_ns": deadline_ns}})
        }
        Event::UnitsEnded { client, units, took_ns } => {
            json!({"units_ended": {"client": client, "units": units, "took_ns": took_ns}})
        }
    }
}

fn value(record: &Record, context: &Context) -> Value {
    match record {
        Record::Policy(p) => json!({"policy": {
            "generation": p.generation, "name": p.name, "digest": p.digest, "path": p.path,
            "config": p.config, "reasons": p.reasons, "saved": p.saved.as_ref().map(|s| s.data.len()),
        }}),
        Record::Base(base) => json!({"base": {
            "time_sliced": base.sharing == SharingMode::TimeSliced,
            "reserve_sms": base.reserve_sms,
        }}),
        Record::Kernel { id, key } => json!({"kernel": {
            "id": id, "name": key.name, "image": format!("{:032x}", key.image), "grid": key.grid, "block": key.block,
        }}),
        Record::Profile { id, view } => json!({"profile": {
            "id": id, "name": name(context, *id), "count": view.count, "mean_ns": view.mean_ns,
            "p50_ns": view.p50_ns, "p99_ns": view.p99_ns, "latest_ns": view.latest_ns,
            "blocks_per_sm": view.demand.blocks_per_sm, "registers": view.demand.registers,
            "waves_permille": view.waves_permille,
            "transformation": format!("{:?}", view.transformation),
            "forms": view.forms.iter().map(|f| json!({
                "form": form(f.form), "argument": f.argument,
                "count": f.count, "mean_ns": f.mean_ns, "p50_ns": f.p50_ns,
                "p99_ns": f.p99_ns, "latest_ns": f.latest_ns, "turnaround_ns": f.turnaround_ns,
            })).collect::<Vec<_>>(),
        }}),
        Record::Client(c) => json!({"client": {
            "id": c.id, "name": c.name, "class": class(c.class), "labels": c.labels,
        }}),
        Record::Usage { id, usage: u } => json!({"usage": {
            "id": id, "waiting_since_ns": u.waiting_since_ns, "in_flight": u.in_flight,
            "in_flight_ns": u.in_flight_ns, "measured_ns": u.measured_ns, "charged_ns": u.charged_ns,
            "min_share_permille": u.min_share_permille, "backlogged_ns": u.backlogged_ns,
            "backlogged_since_ns": Some(u.backlogged_since_ns).filter(|ns| *ns != NEVER),
            "limit_cost_ns": u.limit_cost_ns,
        }}),
        Record::Service { id, view: v } => json!({"service": {
            "id": id, "slo_ns": v.objective.map(|o| o.slo_ns), "percentile": v.objective.map(|o| o.percentile),
            "open_since_ns": Some(v.open_since_ns).filter(|ns| *ns != NEVER),
            "units": v.units, "units_within": v.units_within,
            "recent": v.recent, "recent_within": v.recent_within, "p50_ns": v.p50_ns, "p99_ns": v.p99_ns,
            "tokens": v.tokens.map(|t| json!({
                "tpot_ns": t.tpot_ns, "count": t.count, "within": t.within,
                "recent": t.recent, "recent_within": t.recent_within, "p50_ns": t.p50_ns, "p99_ns": t.p99_ns,
            })),
            "profile": v.profile.map(|p| json!({
                "units": p.units, "launches": p.launches, "gpu_busy_ns": p.gpu_busy_ns,
                "gaps": p.gaps, "gaps_ns": p.gaps_ns, "gap_median_ns": p.gap_median_ns,
                "gap_longest_ns": p.gap_longest_ns, "sms_max": p.sms_max, "sms_mean": p.sms_mean,
            })),
        }}),
        Record::Gone(id) => json!({"gone": id}),
        Record::Begin { how, lost, subscribed, sm_count } => json!({"begin": {
            "how": begin(*how), "exact": *how == Begin::PolicyStart, "lost": lost,
            "subscribed": subscribed.names(), "sm_count": sm_count,
        }}),
        Record::Start(list) => json!({"start": {"commands": commands(list)}}),
        Record::Decide { launch: l, answer } => json!({"decide": {
            "launch": launch(l, context), "answer": shown(&answer.outcome), "reason": reason(&answer.outcome),
            "fault": failed(&answer.outcome), "commands": commands(&answer.commands),
        }}),
        Record::Event { now_ns, event: e, answer } => json!({"event": {
            "now_ns": now_ns, "event": event(e, context), "fault": failed(&answer.outcome),
            "commands": commands(&answer.commands),
        }}),
        Record::Completion { now_ns, done: d } => {
            json!({"completion": {"now_ns": now_ns, "done": done(d, context)}})
        }
        Record::Fault { now_ns, kind, message } => json!({"fault": {
            "now_ns": now_ns, "kind": fault_name(*kind), "message": message,
        }}),
        Record::End { reason, dropped } => json!({"end": {"reason": reason, "dropped": dropped}}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::policy::{Answer, Decision};

    #[test]
    fn a_decision_has_the_text_of_its_policys_reason() {
        let reasons = BTreeMap::from([(0, "none".to_owned()), (2, "a request is open".to_owned())]);
        let why =
            |reason| why(&Outcome::Ok(Answer { decision: Decision::Run(0), reason }), &reasons);
        assert_eq!([0, 1, 2].map(why), ["", "", " (a request is open)"]);
    }
}
