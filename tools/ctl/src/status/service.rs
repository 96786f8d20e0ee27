//! What the status says of a high-priority client's requests, tokens and objectives.

use super::Paint;
use std::io::Write;
use tally_admin::Service;

/// Recent requests of a high-priority client, and whether they keep its objective.
pub(super) fn requests(
    out: &mut impl Write,
    id: u32,
    service: Option<&Service>,
    paint: Paint,
) -> std::io::Result<()> {
    let Some(s) = service.filter(|s| s.recent > 0 || s.objective.is_some()) else { return Ok(()) };
    write!(out, "  {id}: {} recent requests", s.recent)?;
    if s.recent > 0 {
        write!(out, ", p50 {:.3} ms, p99 {:.3} ms", s.p50_ms, s.p99_ms)?;
    }
    if let Some(o) = s.objective {
        write!(out, "; objective: {} ms for {} %", o.slo_ms, o.percentile)?;
        if let Some(attained) = s.attainment_percent {
            let text = format!("kept by {attained:.2} %");
            let text = if attained < o.percentile { paint.bad(&text) } else { text };
            write!(out, ", {text}")?;
        }
    }
    writeln!(out)
}

/// What the latest profiled unit of a high-priority client did on the GPU.
pub(super) fn profile(
    out: &mut impl Write,
    id: u32,
    service: Option<&Service>,
) -> std::io::Result<()> {
    let Some(p) = service.and_then(|s| s.profile) else { return Ok(()) };
    write!(
        out,
        "  {id}: a profiled unit of work had {} launches, {:.3} ms on the GPU, {} gaps ({:.3} ms)",
        p.launches, p.gpu_busy_ms, p.gaps, p.gaps_ms
    )?;
    if p.gaps > 0 {
        write!(out, ", median {:.1} us, longest {:.1} us", p.gap_median_us, p.gap_longest_us)?;
    }
    if p.sms_max > 0 {
        write!(out, "; it filled {} SMs at most, {} on average", p.sms_max, p.sms_mean)?;
    }
    writeln!(out)
}

/// Tokens and prefills of a high-priority client, and where its requests come from.
pub(super) fn marks(
    out: &mut impl Write,
    id: u32,
    service: Option<&Service>,
    paint: Paint,
) -> std::io::Result<()> {
    let Some((s, m)) = service.and_then(|s| Some((s, s.marks?))) else { return Ok(()) };
    let what = if m.requests { "its own marks" } else { "launches and waits: it marks none" };
    writeln!(out, "  {id}: requests by {what}; {} under way", m.open)?;
    for (units, name) in [(&m.tokens, "tokens"), (&m.prefills, "prefills")] {
        if units.recent > 0 {
            let (p50, p99) = (units.p50_ms, units.p99_ms);
            writeln!(
                out,
                "  {id}: {} recent {name}, p50 {p50:.3} ms, p99 {p99:.3} ms",
                units.recent
            )?;
        }
    }
    if let Some(tpot) = s.tpot {
        write!(out, "  {id}: objective: {} ms a token", tpot.tpot_ms)?;
        match tpot.attainment_percent {
            Some(attained) => writeln!(out, ", kept by {attained:.2} %")?,
            None => writeln!(out)?,
        }
    }
    if m.dropped + m.wrong > 0 {
        let line = format!("  {id}: marks not counted: {} dropped, {} wrong", m.dropped, m.wrong);
        writeln!(out, "{}", paint.bad(&line))?;
    }
    Ok(())
}
