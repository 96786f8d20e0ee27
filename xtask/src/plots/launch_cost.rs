//! Host time that Tally adds to a launch.

use super::{array, made, number, text};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tally_plot::{Axis, Colour, Figure, Key, Legend, Marks, Panel, Point, Series};

const BAR: f64 = 0.36;
const GATED: Colour = Colour::Vermillion;
const UNGATED: Colour = Colour::Blue;

fn bars(colour: Colour, shift: f64, points: Vec<Point>) -> Series {
    Series { colour, marks: Marks::Bars { width: BAR, shift }, points }
}

fn panel(title: &str, unit: &str, names: &[String], series: Vec<Series>) -> Panel {
    let tops = series.iter().flat_map(|s| &s.points).map(|p| p.high.unwrap_or(p.y).max(p.y));
    let top = tops.filter(|v| v.is_finite()).fold(1e-3, f64::max);
    Panel {
        title: title.into(),
        x: Axis::names("", names),
        // Room for the labels.
        y: Axis::linear(unit, (0.0, top * 1.15)),
        series,
        rules: Vec::new(),
    }
}

/// How a program came by `cuLaunchKernel`.
fn entry_point(name: &str) -> &str {
    match name {
        "link" => "linked",
        "dlopen" => "dlsym",
        "getproc" => "cuGetProcAddress",
        other => other,
    }
}

/// `overhead.json`: the program is alone, one launch at a time.
fn alone(overhead: &Value) -> Result<Panel> {
    let rows = array(overhead, "launches")?;
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        let name = text(row, "entry_point")?;
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let of = |kind: &str| -> Result<Vec<Point>> {
        let mut points = Vec::new();
        for (at, name) in names.iter().enumerate() {
            let row = rows.iter().find(|r| r["entry_point"] == *name && r["kind"] == kind);
            let row = row.with_context(|| format!("no {kind} launch by way of {name}"))?;
            let added = &row["added_ns"];
            let p50 = number(added, "p50")?;
            let point = Point::new(at as f64, p50).labelled(format!("{p50:.0}"));
            points.push(point.between(number(added, "min")?, number(added, "max")?));
        }
        Ok(points)
    };
    let half = BAR / 2.0 + 0.01;
    let series = vec![bars(UNGATED, -half, of("high")?), bars(GATED, half, of("best-effort")?)];
    let names: Vec<String> = names.iter().map(|name| entry_point(name).to_owned()).collect();
    Ok(panel("one launch, by entry point: median", "added host time, ns", &names, series))
}

/// `latency.json`: gated launches, by policy and launches between two synchronisations.
fn decided(latency: &Value) -> Result<Panel> {
    let (mut names, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new());
    for (at, row) in array(latency, "rows")?.iter().enumerate() {
        names.push(format!("{}, {}", short(text(row, "policy")?), row["burst"]));
        let point = |key: &str| -> Result<Point> {
            let value = number(row, key)?;
            Ok(Point::new(at as f64, value).labelled(format!("{value:.1}")))
        };
        p50.push(point("added_p50_us")?);
        let runs = &row["added_p99_us_of_runs"];
        p99.push(point("added_p99_us")?.between(number(runs, "min")?, number(runs, "max")?));
    }
    ensure!(!names.is_empty(), "no rows of gated launches");
    let half = BAR / 2.0 + 0.01;
    let series = vec![bars(GATED, -half, p50), bars(Colour::Purple, half, p99)];
    Ok(panel("gated launches in bursts, by policy", "added host time, us", &names, series))
}

/// So that names fit below the bars.
fn short(policy: &str) -> &str {
    policy.strip_prefix("tally-").unwrap_or(policy)
}

pub fn figure(overhead: &Value, latency: &Value) -> Result<Figure> {
    let marks = Marks::Bars { width: BAR, shift: 0.0 };
    Ok(Figure {
        size: (800, 420),
        title: "Host time added to a launch".into(),
        caption: format!(
            "Left: {}; right: {}. Ungated: a high-priority program; gated: a best-effort program that asks for \
             each launch. Lines: least and greatest of the runs. Right: the policy (priority is tally-priority) and the launches \
             between two synchronisations.",
            made(&[&overhead["machine"]])?,
            made(&[&latency["machine"]])?
        ),
        rows: vec![vec![alone(overhead)?, decided(latency)?]],
        legend: Legend::Top(vec![
            Key::new(UNGATED, marks, "ungated, p50"),
            Key::new(GATED, marks, "gated, p50"),
            Key::new(Colour::Purple, marks, "gated, p99"),
        ]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bars_are_the_measured_medians_and_a_missing_class_is_told() {
        let launch = |kind: &str, p50: f64| {
            json!({"entry_point": "link", "kind": kind,
            "added_ns": {"p50": p50, "min": p50 - 1.0, "max": p50 + 1.0}})
        };
        let drawn =
            alone(&json!({"launches": [launch("high", 30.0), launch("best-effort", 1200.0)]}));
        let drawn = drawn.unwrap();
        let points: Vec<_> = drawn.series.iter().flat_map(|s| &s.points).collect();
        let seen: Vec<_> = points.iter().map(|p| (p.y, p.label.as_deref(), p.high)).collect();
        assert_eq!(seen, [(30.0, Some("30"), Some(31.0)), (1200.0, Some("1200"), Some(1201.0))]);
        let error = alone(&json!({"launches": [launch("high", 30.0)]})).unwrap_err().to_string();
        assert!(error.contains("best-effort") && error.contains("link"), "{error}");
    }
}
