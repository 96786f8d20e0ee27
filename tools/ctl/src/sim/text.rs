//! The figures of a simulation for people.

use crate::error::CtlError;
use crate::table::{Align, table};
use std::io::Write;
use tally_simulator::Report;
use tally_simulator::report::{Fairness, Floor, High, Shared};

pub fn show(out: &mut impl Write, policy: &str, r: &Report, took_s: f64) -> Result<(), CtlError> {
    writeln!(out, "policy         {policy}, {:?}, {} s, seed {}", r.sharing, r.seconds, r.seed)?;
    for service in r.each_service() {
        high_priority(out, service)?;
    }
    if let Some(b) = &r.best_effort {
        writeln!(out, "best effort    {}: share {:.3}, {} launches", b.trace, b.share, b.done)?;
    }
    for Floor { trace, min_share, had } in &r.floors {
        let (least, had) = (min_share * 100.0, had * 100.0);
        writeln!(
            out,
            "floor          {trace}: {least:.1} % of GPU time, {had:.1} % had while it had work"
        )?;
    }
    if let Some(fairness) = &r.fairness {
        shares(out, fairness)?;
    }
    if let Some(d) = &r.decisions {
        writeln!(
            out,
            "decisions      {} asked: {} whole, {} sliced, {} preemptible, {} SM-limited, {} holds; {} leased, {} degraded, {} by the built-in rule",
            d.asked,
            d.whole,
            d.sliced,
            d.preemptible,
            d.sm_limited,
            d.held,
            d.leased,
            d.degraded,
            d.built_in_rule
        )?;
        writeln!(
            out,
            "yields         asked for {} times, {} launches did",
            d.yields, d.launches_yielded
        )?;
    }
    writeln!(
        out,
        "simulated      {} launches, {} kernels, {} changes of context in {took_s:.2} s: {:.0} launches a second",
        r.launches,
        r.kernels,
        r.context_changes,
        r.launches as f64 / took_s
    )?;
    writeln!(out, "A model, not a measurement: docs/results-simulator.md says how far off it is.")?;
    Ok(())
}

fn high_priority(out: &mut impl Write, h: &High) -> Result<(), CtlError> {
    writeln!(out, "high priority  {}: {} of {} requests served", h.trace, h.served, h.arrived)?;
    // Of one that decodes, a step.
    let (service, what) = match h.decode {
        Some(_) => ("step ms   ", "steps"),
        None => ("service ms", "requests"),
    };
    writeln!(
        out,
        "  {service}   solo {:.3}  p50 {:.3} ({:.2}x)  p99 {:.3} ({:.2}x)",
        h.solo_ms,
        h.service_p50_ms,
        h.service_p50_over_solo,
        h.service_p99_ms,
        h.service_p99_over_solo
    )?;
    if let Some(d) = &h.decode {
        writeln!(
            out,
            "  tokens       {:.0} a second (solo {:.0}), {:.1} a step  between two p50 {:.3} ms, p99 {:.3} ms",
            d.tokens_per_s, d.solo_tokens_per_s, d.batch_mean, d.gap_p50_ms, d.gap_p99_ms
        )?;
        writeln!(out, "  prefills     {} chunks, p50 {:.3} ms", d.prefills, d.prefill_p50_ms)?;
    }
    // A backlog has no arrivals.
    if h.queued_p99_ms > 0.0 {
        writeln!(
            out,
            "  queued ms    solo p99 {:.3}  p50 {:.3}  p99 {:.3} ({:.2}x)",
            h.solo_queued_p99_ms, h.queued_p50_ms, h.queued_p99_ms, h.queued_p99_over_solo
        )?;
    }
    if let (Some(slo_ms), Some(within)) = (h.slo_ms.or(h.tpot_ms), h.within) {
        writeln!(out, "  objective    {slo_ms:.3} ms: kept by {:.2} % of {what}", within * 100.0)?;
    }
    Ok(())
}

/// What each of several best-effort programs got.
fn shares(out: &mut impl Write, fairness: &Fairness) -> Result<(), CtlError> {
    let header = [
        ("  PROGRAM", Align::Left),
        ("WEIGHT", Align::Right),
        ("SHARE", Align::Right),
        ("GPU MS", Align::Right),
        ("CHARGED MS", Align::Right),
        ("OF ALL", Align::Right),
        ("FAIR", Align::Right),
    ];
    let row = |client: &Shared| {
        vec![
            format!("  {}", client.trace),
            client.weight.to_string(),
            format!("{:.3}", client.share),
            format!("{:.1}", client.gpu_ms),
            format!("{:.1}", client.charged_ms),
            format!("{:.3}", client.gpu_share),
            format!("{:.3}", client.fair_share),
        ]
    };
    let rows: Vec<Vec<String>> = fairness.clients.iter().map(row).collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(
        out,
        "fairness       {:.4} (Jain's index of GPU time over fair GPU time)",
        fairness.jain
    )?;
    Ok(())
}
