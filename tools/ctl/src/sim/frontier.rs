//! `sim --frontier`: what several policies leave for best effort under tighter and looser objectives.

use super::plot::MODEL;
use super::policies::Policies;
use super::{Scene, SimArgs, mode, objective};
use crate::error::CtlError;
use crate::table::{Align, table};
use serde::Serialize;
use std::io::Write;
use tally_plot::{Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Series, Shape};

/// Version of the JSON of [`Frontier`].
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Frontier {
    schema: u32,
    seconds: f64,
    seed: u64,
    /// 99th percentile of a request alone, ms.
    solo_p99_ms: f64,
    /// Share of requests that must keep the objective, percent.
    percentile: f64,
    policies: Vec<Curve>,
}

#[derive(Serialize)]
struct Curve {
    policy: String,
    points: Vec<Outcome>,
}

/// One policy under one objective.
#[derive(Serialize)]
struct Outcome {
    /// The objective over `solo_p99_ms`.
    multiple: f64,
    slo_ms: f64,
    /// Sum of the best-effort programs' rates over their rates alone.
    share: f64,
    /// Share of the requests that kept the objective.
    within: f64,
    /// As many did as must.
    kept: bool,
    service_p99_ms: f64,
}

pub fn run(args: &SimArgs, scene: &Scene, policies: &[Policies]) -> Result<(), CtlError> {
    let mut multiples = args.frontier.clone();
    multiples.sort_by(f64::total_cmp);
    let solo_p99_ms = scene.alone_p99_ms();
    let percentile = objective(args, solo_p99_ms)?.percentile;
    let mut curves = Vec::new();
    for policy in policies {
        let mut points = Vec::new();
        for &multiple in &multiples {
            let slo_ms = solo_p99_ms * multiple;
            let report = scene.simulate(Some(objective(args, slo_ms)?), policy.load()?);
            let within = report.high_priority.within.unwrap_or(0.0);
            points.push(Outcome {
                multiple,
                slo_ms,
                share: report.best_effort.map_or(0.0, |best_effort| best_effort.share),
                within,
                kept: within * 100.0 >= percentile,
                service_p99_ms: report.high_priority.service_p99_ms,
            });
        }
        curves.push(Curve { policy: policy.name.clone(), points });
    }
    let (seconds, seed) = (args.seconds, args.seed);
    let frontier =
        Frontier { schema: SCHEMA, seconds, seed, solo_p99_ms, percentile, policies: curves };
    if let Some(file) = &args.svg {
        crate::picture::write(file, &figure(args, &frontier), args.dark)?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let text =
            serde_json::to_string_pretty(&frontier).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    text(&mut out, &frontier)
}

fn text(out: &mut impl Write, frontier: &Frontier) -> Result<(), CtlError> {
    let header = [
        ("POLICY", Align::Left),
        ("OBJECTIVE", Align::Right),
        ("MS", Align::Right),
        ("SHARE", Align::Right),
        ("KEPT BY", Align::Right),
        ("P99 MS", Align::Right),
    ];
    let mut rows = Vec::new();
    for curve in &frontier.policies {
        for point in &curve.points {
            rows.push(vec![
                short(&curve.policy).into(),
                format!("{:.2}x", point.multiple),
                format!("{:.3}", point.slo_ms),
                format!("{:.3}", point.share),
                format!("{:.2} %{}", point.within * 100.0, if point.kept { "" } else { " !" }),
                format!("{:.3}", point.service_p99_ms),
            ]);
        }
    }
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    let (percentile, p99_ms) = (frontier.percentile, frontier.solo_p99_ms);
    writeln!(
        out,
        "Objectives are multiples of {p99_ms:.3} ms, for {percentile} % of requests; `!`: fewer kept it."
    )?;
    writeln!(out, "A model, not a measurement: docs/results-simulator.md says how far off it is.")?;
    Ok(())
}

/// The last part of a path, without `.wasm`.
fn short(policy: &str) -> &str {
    let name = policy.rsplit('/').next().unwrap_or(policy);
    name.strip_suffix(".wasm").unwrap_or(name)
}

fn figure(args: &SimArgs, frontier: &Frontier) -> Figure {
    let (mut series, mut keys) = (Vec::new(), Vec::new());
    for (at, curve) in frontier.policies.iter().enumerate() {
        let colour = Colour::SERIES[at % Colour::SERIES.len()];
        let shape = Shape::ALL[at % Shape::ALL.len()];
        let of = |marks, points: Vec<Point>| Series { colour, marks, points };
        let point = |p: &Outcome| Point::new(p.multiple, p.share);
        let those = |kept: bool| -> Vec<Point> {
            curve.points.iter().filter(|p| p.kept == kept).map(point).collect()
        };
        series.push(of(Marks::Line { width: 2 }, curve.points.iter().map(point).collect()));
        series.push(of(Marks::Points(Marker::filled(shape)), those(true)));
        let missed = |p: &Outcome| point(p).labelled(format!("{:.1} %", p.within * 100.0));
        let missed = curve.points.iter().filter(|p| !p.kept).map(missed).collect();
        series.push(of(Marks::Points(Marker::hollow(shape)), missed));
        keys.push(Key::new(colour, Marks::Points(Marker::filled(shape)), short(&curve.policy)));
    }
    let hollow = Marks::Points(Marker::hollow(Shape::Circle));
    keys.push(Key::new(Colour::Muted, hollow, "objective missed"));
    let all = || frontier.policies.iter().flat_map(|curve| &curve.points);
    let most = all().map(|p| p.share).fold(0.1, f64::max);
    let (low, high) = tally_plot::range(all().map(|p| p.multiple), (1.0, 2.0));
    let margin = (high - low).max(0.1) * 0.05;
    let programs: Vec<String> =
        args.be.iter().map(|be| short(&be.trace).trim_end_matches(".csv.gz").into()).collect();
    Figure {
        size: (800, 480),
        title: format!(
            "{} beside {}",
            short(args.hp.as_deref().unwrap_or_default()).trim_end_matches(".csv.gz"),
            programs.join(" and ")
        ),
        caption: format!(
            "Objective for {} % of requests, as a multiple of {:.3} ms, the 99th percentile alone; {}, load {}, {} s, \
             seed {}. {MODEL}",
            frontier.percentile,
            frontier.solo_p99_ms,
            mode(args),
            args.load,
            frontier.seconds,
            frontier.seed
        ),
        rows: vec![vec![Panel {
            title: String::new(),
            x: Axis::linear("objective over p99 alone", (low - margin, high + margin)),
            y: Axis::linear("best-effort share of its rate alone", (0.0, most * 1.1)),
            series,
            rules: Vec::new(),
        }]],
        legend: Legend::Top(keys),
    }
}
