//! `sim --svg`: the figures that are printed, as bars beside those of the inference alone.

use tally_plot::{Axis, Colour, Figure, Key, Legend, Marks, Panel, Point, Series};
use tally_simulator::Report;
use tally_simulator::report::Shared;

const BAR: f64 = 0.36;
/// What every caption ends with.
pub const MODEL: &str = "Simulated on a model of an H200, not measured: docs/results-simulator.md says how far off it is.";

/// Bars of one colour; each has its place, value and label.
fn bars(colour: Colour, shift: f64, values: &[(f64, f64, String)]) -> Series {
    let point = |(x, y, label): &(f64, f64, String)| Point::new(*x, *y).labelled(label);
    Series {
        colour,
        marks: Marks::Bars { width: BAR, shift },
        points: values.iter().map(point).collect(),
    }
}

fn ms(at: usize, value: f64) -> (f64, f64, String) {
    (at as f64, value, format!("{value:.3}"))
}

fn panel(title: &str, y: &str, names: &[&str], series: Vec<Series>, least: f64) -> Panel {
    let values = series.iter().flat_map(|s| &s.points).map(|p| p.y);
    let high = values.filter(|v| v.is_finite()).fold(least, f64::max);
    Panel {
        title: title.into(),
        x: Axis::names("", names),
        // Room for the labels.
        y: Axis::linear(y, (0.0, high * 1.12)),
        series,
        rules: Vec::new(),
    }
}

/// `mode` says how the two share the GPU.
pub fn figure(policy: &str, mode: &str, r: &Report) -> Figure {
    let h = &r.high_priority;
    let (alone, beside) = (Colour::Muted, Colour::Blue);
    let half = BAR / 2.0 + 0.01;
    let service = vec![
        bars(alone, -half, &[ms(0, h.solo_ms), ms(1, h.solo_p99_ms)]),
        bars(beside, half, &[ms(0, h.service_p50_ms), ms(1, h.service_p99_ms)]),
    ];
    let queued = vec![
        bars(alone, -half, &[ms(1, h.solo_queued_p99_ms)]),
        bars(beside, half, &[ms(0, h.queued_p50_ms), ms(1, h.queued_p99_ms)]),
    ];
    let (mut row, mut keys) = (Vec::new(), Vec::new());
    let key = |colour, name: &str| Key::new(colour, Marks::Bars { width: BAR, shift: 0.0 }, name);
    if !h.is_nobody() {
        row.push(panel("service time", "ms", &["p50", "p99"], service, 1e-3));
        row.push(panel("with queueing", "ms", &["p50", "p99"], queued, 1e-3));
        keys.push(key(alone, "inference alone"));
        keys.push(key(beside, "inference beside the training"));
    }
    if let Some(fairness) = &r.fairness {
        row.push(shares(&fairness.clients));
        keys.push(key(Colour::Green, "share of best-effort GPU time"));
        keys.push(key(alone, "fair by weight"));
    } else if let Some(b) = &r.best_effort {
        let share = bars(Colour::Green, 0.0, &[(0.0, b.share, format!("{:.3}", b.share))]);
        row.push(panel("training", "share of its rate alone", &[&b.trace], vec![share], 1.0));
        keys.push(key(Colour::Green, "training"));
    }
    let name = if h.is_nobody() { "best effort" } else { &h.trace };
    Figure {
        size: (800, 400),
        title: format!("{name} under {policy}"),
        caption: format!(
            "{} of {} requests served in {} s of arrivals and as long after, {mode}, seed {}. {MODEL}",
            h.served, h.arrived, r.seconds, r.seed
        ),
        rows: vec![row],
        legend: Legend::Top(keys),
    }
}

/// What each of several best-effort programs got beside what would be fair.
fn shares(clients: &[Shared]) -> Panel {
    let half = BAR / 2.0 + 0.01;
    let bar = |at: usize, share: f64| (at as f64, share, format!("{share:.3}"));
    let values = |of: fn(&Shared) -> f64| -> Vec<_> {
        clients.iter().enumerate().map(|(at, client)| bar(at, of(client))).collect()
    };
    let names: Vec<String> =
        clients.iter().map(|client| format!("{} ({})", client.trace, client.weight)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let series = vec![
        bars(Colour::Green, -half, &values(|client| client.gpu_share)),
        bars(Colour::Muted, half, &values(|client| client.fair_share)),
    ];
    panel("best effort (weight)", "share of its GPU time", &names, series, 1e-3)
}
