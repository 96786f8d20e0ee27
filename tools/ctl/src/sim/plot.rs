//! `sim --svg`: the figures that are printed, as bars beside those of each service alone.

use tally_plot::{Axis, Colour, Figure, Key, Legend, Marks, Panel, Point, Series};
use tally_simulator::Report;
use tally_simulator::report::{High, Shared};

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

/// Bars `[alone, beside]` of the values that each name has of them.
fn pairs(alone: &[(usize, f64)], beside: &[(usize, f64)]) -> Vec<Series> {
    let half = BAR / 2.0 + 0.01;
    let values =
        |all: &[(usize, f64)]| -> Vec<_> { all.iter().map(|&(at, value)| ms(at, value)).collect() };
    vec![bars(Colour::Muted, -half, &values(alone)), bars(Colour::Blue, half, &values(beside))]
}

/// Median and 99th percentile of the only service.
fn one_service(h: &High) -> Vec<Panel> {
    let service = pairs(
        &[(0, h.solo_ms), (1, h.solo_p99_ms)],
        &[(0, h.service_p50_ms), (1, h.service_p99_ms)],
    );
    let queued = pairs(&[(1, h.solo_queued_p99_ms)], &[(0, h.queued_p50_ms), (1, h.queued_p99_ms)]);
    let names = ["p50", "p99"];
    vec![
        panel("service time", "ms", &names, service, 1e-3),
        panel("with queueing", "ms", &names, queued, 1e-3),
    ]
}

/// The 99th percentile of each of several services.
fn several_services(all: &[High]) -> Vec<Panel> {
    let values = |of: fn(&High) -> f64| -> Vec<_> { all.iter().map(of).enumerate().collect() };
    let service = pairs(&values(|h| h.solo_p99_ms), &values(|h| h.service_p99_ms));
    let queued = pairs(&values(|h| h.solo_queued_p99_ms), &values(|h| h.queued_p99_ms));
    let names: Vec<&str> = all.iter().map(|h| h.trace.as_str()).collect();
    vec![
        panel("service time, p99", "ms", &names, service, 1e-3),
        panel("with queueing, p99", "ms", &names, queued, 1e-3),
    ]
}

/// `mode` says how the programs share the GPU.
pub fn figure(policy: &str, mode: &str, r: &Report) -> Figure {
    let services = r.each_service();
    let (mut row, mut keys) = (Vec::new(), Vec::new());
    let key = |colour, name: &str| Key::new(colour, Marks::Bars { width: BAR, shift: 0.0 }, name);
    let (panels, names) = match services {
        [] => (Vec::new(), None),
        [one] => (one_service(one), Some(["inference alone", "inference beside the training"])),
        all => (several_services(all), Some(["each service alone", "beside the other programs"])),
    };
    row.extend(panels);
    if let Some([alone, beside]) = names {
        keys.push(key(Colour::Muted, alone));
        keys.push(key(Colour::Blue, beside));
    }
    if let Some(fairness) = &r.fairness {
        row.push(shares(&fairness.clients));
        keys.push(key(Colour::Green, "share of best-effort GPU time"));
        keys.push(key(Colour::Muted, "fair by weight"));
    } else if let Some(b) = &r.best_effort {
        let share = bars(Colour::Green, 0.0, &[(0.0, b.share, format!("{:.3}", b.share))]);
        row.push(panel("training", "share of its rate alone", &[&b.trace], vec![share], 1.0));
        keys.push(key(Colour::Green, "training"));
    }
    let names: Vec<&str> = services.iter().map(|h| h.trace.as_str()).collect();
    let name = if names.is_empty() { "best effort".into() } else { names.join(" + ") };
    let sum = |of: fn(&High) -> u64| services.iter().map(of).sum::<u64>();
    // Each of several services needs room for its name.
    let more = services.len().saturating_sub(1) as u32;
    Figure {
        size: (800 + 180 * more, 400),
        title: format!("{name} under {policy}"),
        caption: format!(
            "{} of {} requests served in {} s of arrivals and as long after, {mode}, seed {}. {MODEL}",
            sum(|h| h.served),
            sum(|h| h.arrived),
            r.seconds,
            r.seed
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
