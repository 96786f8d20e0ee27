//! `sim --svg`: the figures that are printed, as bars beside those of the inference alone.

use tally_plot::{Axis, Colour, Figure, Key, Legend, Marks, Panel, Point, Series};
use tally_simulator::Report;

const BAR: f64 = 0.36;

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
    let mut row = vec![
        panel("service time", "ms", &["p50", "p99"], service, 1e-3),
        panel("with queueing", "ms", &["p50", "p99"], queued, 1e-3),
    ];
    let mut keys = vec![
        Key::new(alone, Marks::Bars { width: BAR, shift: 0.0 }, "inference alone"),
        Key::new(beside, Marks::Bars { width: BAR, shift: 0.0 }, "inference beside the training"),
    ];
    if let Some(b) = &r.best_effort {
        let share = bars(Colour::Green, 0.0, &[(0.0, b.share, format!("{:.3}", b.share))]);
        row.push(panel("training", "share of its rate alone", &[&b.trace], vec![share], 1.0));
        keys.push(Key::new(Colour::Green, Marks::Bars { width: BAR, shift: 0.0 }, "training"));
    }
    Figure {
        size: (800, 400),
        title: format!("{} under {policy}", h.trace),
        caption: format!(
            "{} of {} requests served in {} s of arrivals and as long after, {mode}, seed {}. \
             Simulated on a model of an H200, not measured: docs/simulate.md says how far off it is.",
            h.served, h.arrived, r.seconds, r.seed
        ),
        rows: vec![row],
        legend: Legend::Top(keys),
    }
}
