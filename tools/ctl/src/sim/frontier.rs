//! `sim --frontier`: what several policies leave for best effort under tighter and looser objectives.

use super::plot::MODEL;
use super::policies::Policies;
use super::programs::Served;
use super::{Scene, SimArgs, mode, objective};
use crate::error::CtlError;
use crate::table::{Align, table};
use serde::Serialize;
use std::io::Write;
use tally_contract::objective::SLO_PERCENTILE_DEFAULT;
use tally_plot::{Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Series, Shape};
use tally_simulator::Report;
use tally_simulator::report::High;

/// Version of the JSON of [`Frontier`].
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Frontier {
    schema: u32,
    seconds: f64,
    seed: u64,
    /// 99th percentile of a request alone, ms; of several services in `services`.
    #[serde(skip_serializing_if = "Option::is_none")]
    solo_p99_ms: Option<f64>,
    /// The services, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    services: Vec<Alone>,
    /// Share of requests that must keep the objective, percent.
    percentile: f64,
    policies: Vec<Curve>,
}

/// One of several services alone.
#[derive(Serialize)]
struct Alone {
    trace: String,
    solo_p99_ms: f64,
}

#[derive(Serialize)]
struct Curve {
    policy: String,
    points: Vec<Outcome>,
}

/// One policy under one objective.
#[derive(Serialize)]
struct Outcome {
    /// The objective of each service over its `solo_p99_ms`.
    multiple: f64,
    /// The objective; of several services in `services`.
    #[serde(skip_serializing_if = "Option::is_none")]
    slo_ms: Option<f64>,
    /// Sum of the best-effort programs' rates over their rates alone.
    share: f64,
    /// Share of the requests that kept the objective; of several services the least.
    within: f64,
    /// As many did as must, of each service.
    kept: bool,
    /// 99th percentile of the service's requests; of several services in `services`.
    #[serde(skip_serializing_if = "Option::is_none")]
    service_p99_ms: Option<f64>,
    /// How each service kept its objective, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    services: Vec<Kept>,
}

/// How one of several services kept its objective.
#[derive(Serialize)]
struct Kept {
    slo_ms: f64,
    /// Share of its requests that kept it.
    within: f64,
    service_p99_ms: f64,
}

impl Outcome {
    /// `percentile`: share of requests that must keep the objective, percent.
    fn new(multiple: f64, percentile: f64, slos_ms: &[f64], report: &Report) -> Self {
        let kept = |(service, slo_ms): (&High, &f64)| Kept {
            slo_ms: *slo_ms,
            within: service.within.unwrap_or(1.0),
            service_p99_ms: service.service_p99_ms,
        };
        let mut services: Vec<Kept> = report.each_service().iter().zip(slos_ms).map(kept).collect();
        let within = services.iter().map(|one| one.within).reduce(f64::min).unwrap_or(0.0);
        let only = if services.len() == 1 { services.pop() } else { None };
        Outcome {
            multiple,
            slo_ms: only.as_ref().map(|one| one.slo_ms),
            share: report.best_effort.as_ref().map_or(0.0, |best_effort| best_effort.share),
            within,
            kept: within * 100.0 >= percentile,
            service_p99_ms: only.map(|one| one.service_p99_ms),
            services,
        }
    }

    /// A figure of each service, for a cell of the table.
    fn each_ms(&self, only: Option<f64>, of: fn(&Kept) -> f64) -> String {
        let several = self.services.iter().map(of);
        joined(only.into_iter().chain(several).map(|ms| format!("{ms:.3}")))
    }
}

/// What is the same of all services once, else that of each.
fn joined(each: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = each.collect();
    if all.iter().all(|one| *one == all[0]) {
        all.truncate(1);
    }
    all.join(" / ")
}

impl Frontier {
    /// The 99th percentile of each service alone, ms.
    fn p99_ms(&self) -> String {
        let several = self.services.iter().map(|one| one.solo_p99_ms);
        joined(self.solo_p99_ms.into_iter().chain(several).map(|ms| format!("{ms:.3}")))
    }
}

pub fn run(args: &SimArgs, scene: &Scene, policies: &[Policies]) -> Result<(), CtlError> {
    let mut multiples = args.frontier.clone();
    multiples.sort_by(f64::total_cmp);
    let solo_p99_ms = scene.alone_p99_ms();
    let percentile = args.percentile.unwrap_or(SLO_PERCENTILE_DEFAULT);
    let mut curves = Vec::new();
    for policy in policies {
        let mut points = Vec::new();
        for &multiple in &multiples {
            let slos_ms: Vec<f64> = solo_p99_ms.iter().map(|p99_ms| p99_ms * multiple).collect();
            let slos = slos_ms.iter().map(|slo_ms| objective(args, *slo_ms));
            let slos = slos.collect::<Result<Vec<_>, _>>()?;
            let report = scene.simulate(&slos, policy.load()?);
            points.push(Outcome::new(multiple, percentile, &slos_ms, &report));
        }
        curves.push(Curve { policy: policy.name.clone(), points });
    }
    let (seconds, seed) = (args.seconds, args.seed);
    let alone =
        |(one, solo_p99_ms): (&Served, f64)| Alone { trace: one.trace.name.clone(), solo_p99_ms };
    let mut services: Vec<Alone> = scene.services.iter().zip(solo_p99_ms).map(alone).collect();
    let only = if services.len() == 1 { services.pop() } else { None };
    let frontier = Frontier {
        schema: SCHEMA,
        seconds,
        seed,
        solo_p99_ms: only.map(|one| one.solo_p99_ms),
        services,
        percentile,
        policies: curves,
    };
    if let Some(file) = &args.svg {
        crate::picture::write(file, &figure(args, scene, &frontier), args.dark)?;
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
                point.each_ms(point.slo_ms, |one| one.slo_ms),
                format!("{:.3}", point.share),
                format!("{:.2} %{}", point.within * 100.0, if point.kept { "" } else { " !" }),
                point.each_ms(point.service_p99_ms, |one| one.service_p99_ms),
            ]);
        }
    }
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    let (percentile, p99_ms) = (frontier.percentile, frontier.p99_ms());
    writeln!(
        out,
        "Objectives are multiples of {p99_ms} ms, for {percentile} % of requests; `!`: fewer kept it."
    )?;
    if !frontier.services.is_empty() {
        writeln!(out, "KEPT BY is of the service whose requests kept their objective least.")?;
    }
    writeln!(out, "A model, not a measurement: docs/results-simulator.md says how far off it is.")?;
    Ok(())
}

/// The last part of a path, without `.wasm`.
fn short(policy: &str) -> &str {
    let name = policy.rsplit('/').next().unwrap_or(policy);
    name.strip_suffix(".wasm").unwrap_or(name)
}

fn figure(args: &SimArgs, scene: &Scene, frontier: &Frontier) -> Figure {
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
    let name = |trace: &str| short(trace).trim_end_matches(".csv.gz").to_owned();
    let services: Vec<String> = args.hp.iter().map(|hp| name(&hp.trace)).collect();
    let programs: Vec<String> = args.be.iter().map(|be| name(&be.trace)).collect();
    let traffic = joined(scene.services.iter().map(|one| one.traffic.clone()));
    Figure {
        size: (800, 480),
        title: format!("{} beside {}", services.join(" and "), programs.join(" and ")),
        caption: format!(
            "Objective for {} % of requests, as a multiple of {} ms, the 99th percentile alone; {}, {traffic}, {} s, \
             seed {}. {MODEL}",
            frontier.percentile,
            frontier.p99_ms(),
            mode(args),
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
