//! What the inference pays and what the training gets, for each pair and way of sharing.

use super::{made, number, text};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tally_plot::{
    Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Rule, Series, Shape, range,
};

/// A way of sharing: its `mode` and `policy` in the rows, how it is drawn, and its name.
struct Way {
    mode: &'static str,
    policy: &'static str,
    colour: Colour,
    filled: bool,
    name: &'static str,
}

const WAYS: [Way; 7] = [
    way("time-slicing", "none", Colour::Vermillion, false, "none, time-slicing"),
    way("mps", "none", Colour::Vermillion, true, "none, MPS"),
    way("mps-client-priority", "none", Colour::Purple, true, "none, MPS client priority"),
    way("tally-timeslice", "fifo", Colour::Green, false, "fifo, time-sliced"),
    way("tally-mps", "fifo", Colour::Green, true, "fifo, MPS"),
    way("tally-timeslice", "tally-priority", Colour::Blue, false, "tally-priority, time-sliced"),
    way("tally-mps", "tally-priority", Colour::Blue, true, "tally-priority, MPS"),
];

const fn way(
    mode: &'static str,
    policy: &'static str,
    colour: Colour,
    filled: bool,
    name: &'static str,
) -> Way {
    Way { mode, policy, colour, filled, name }
}

/// The row counts: of the core as it is configured by default.
fn is_default(row: &Value) -> bool {
    row["policy_config"].as_str().is_none_or(str::is_empty) && row["vendor_rewrite"] == false
}

fn has_solo(rows: &[Value], hp: &str) -> bool {
    rows.iter().any(|row| row["mode"] == "solo" && row["hp"] == hp)
}

/// Rows of pairs whose inference has a solo row, of the machine of the first; loads are not mixed.
fn pair_rows(rows: &[Value]) -> Result<Vec<&Value>> {
    let shared = rows.iter().filter(|row| row["be"] != "-" && is_default(row));
    let mut of: Vec<&Value> =
        shared.filter(|r| r["hp"].as_str().is_some_and(|hp| has_solo(rows, hp))).collect();
    let Some(first) = of.first().copied() else { return Ok(of) };
    of.retain(|row| row["device"] == first["device"]);
    for row in &of {
        let (one, other) = (&first["load"], &row["load"]);
        ensure!(one == other, "rows of several loads: {one} and {other}; say which are drawn");
    }
    Ok(of)
}

/// `bert-large-graph` and `gpt2-train`: `bert-large + gpt2`.
fn pair_name(hp: &str, be: &str) -> String {
    format!("{} + {}", hp.trim_end_matches("-graph"), be.trim_end_matches("-train"))
}

pub fn figure(pairs: &Value) -> Result<Figure> {
    let rows = pairs.as_array().context("expected an array of rows")?;
    let rows = pair_rows(rows)?;
    ensure!(!rows.is_empty(), "no rows of pairs with a solo row");
    let mut names: Vec<(&str, &str)> = Vec::new();
    for row in &rows {
        let pair = (text(row, "hp")?, text(row, "be")?);
        if !names.contains(&pair) {
            names.push(pair);
        }
    }
    ensure!(
        names.len() <= Shape::ALL.len(),
        "{} pairs, but markers of {} shapes",
        names.len(),
        Shape::ALL.len()
    );
    let mut series = Vec::new();
    let mut drawn: Vec<&Value> = Vec::new();
    for way in &WAYS {
        for (&(hp, be), shape) in names.iter().zip(Shape::ALL) {
            let marker = Marker { shape, filled: way.filled, radius: 5 };
            let of = rows.iter().filter(|row| {
                row["mode"] == way.mode
                    && row["policy"] == way.policy
                    && row["hp"] == hp
                    && row["be"] == be
            });
            let mut points = Vec::new();
            for row in of {
                points.push(Point::new(number(row, "p99_over_solo")?, number(row, "be_share")?));
                drawn.push(row);
            }
            series.push(Series { colour: way.colour, marks: Marks::Points(marker), points });
        }
    }
    ensure!(
        drawn.len() == rows.len(),
        "{} of {} rows are of no known mode and policy",
        rows.len() - drawn.len(),
        rows.len()
    );
    let points = || series.iter().flat_map(|s| &s.points);
    let x = range(points().map(|p| p.x), (1.0, 2.0));
    let y = range(points().map(|p| p.y), (0.0, 1.0));
    let panel = Panel {
        title: String::new(),
        x: Axis::log(
            "inference: p99 service time over solo (log; left is better)",
            (x.0 * 0.9, x.1 * 1.12),
        ),
        y: Axis::linear("training: share of its rate alone", (0.0, y.1.max(1.0) * 1.05)),
        series,
        rules: vec![Rule::X(1.0, "solo".into())],
    };
    let key = |colour, filled, shape, name: String| {
        Key::new(colour, Marks::Points(Marker { shape, filled, radius: 5 }), name)
    };
    let ways = WAYS.iter().map(|w| key(w.colour, w.filled, Shape::Circle, w.name.into()));
    let shapes = names.iter().zip(Shape::ALL);
    let shapes = shapes.map(|(&(hp, be), shape)| key(Colour::Ink, true, shape, pair_name(hp, be)));
    Ok(Figure {
        size: (800, 420),
        title: "Inference latency against training throughput on one GPU".into(),
        caption: caption(&drawn)?,
        rows: vec![vec![panel]],
        legend: Legend::Right(
            228,
            vec![
                ("scheduler, sharing".into(), ways.collect()),
                ("inference + training".into(), shapes.collect()),
            ],
        ),
    })
}

fn caption(drawn: &[&Value]) -> Result<String> {
    let unserved = drawn.iter().filter(|row| row["unserved"].as_f64().is_some_and(|n| n > 0.0));
    let slow = drawn.iter().filter(|row| {
        let notes = row["notes"].as_array().into_iter().flatten().filter_map(Value::as_str);
        notes.into_iter().any(|note| note.contains("its host was slower"))
    });
    let mut caption = format!(
        "{}. Load {} of the inference's capacity; service time without queueing, over solo of the same run; \
         default settings, vendor kernels untouched.",
        made(drawn)?,
        drawn[0]["load"]
    );
    let (unserved, slow) = (unserved.count(), slow.count());
    if unserved > 0 {
        caption += &format!(
            " {unserved} of {} points left requests unserved within twice the window: p99 is of those served.",
            drawn.len()
        );
    }
    if slow > 0 {
        caption += &format!(" For {slow} points the host had become slower, in the solo run too.");
    }
    Ok(caption)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(hp: &str, be: &str, mode: &str, policy: &str, over: f64) -> Value {
        json!({"hp": hp, "be": be, "mode": mode, "policy": policy, "policy_config": null,
            "vendor_rewrite": false, "load": 0.5, "p99_over_solo": over, "be_share": 0.5,
            "device": "NVIDIA H200", "driver": "1", "date": "2026-01-02", "unserved": 3})
    }

    fn points(figure: &Figure) -> Vec<f64> {
        figure.rows[0][0].series.iter().flat_map(|s| &s.points).map(|p| p.x).collect()
    }

    #[test]
    fn all_default_rows_of_pairs_with_a_solo_row_are_drawn_and_no_others() {
        let mut tuned = row("a", "t", "tally-mps", "tally-priority", 9.0);
        tuned["policy_config"] = "window_us = 400".into();
        let mut vendor = row("a", "t", "tally-mps", "tally-priority", 8.0);
        vendor["vendor_rewrite"] = true.into();
        let rows = json!([
            row("a", "-", "solo", "none", 1.0),
            row("a", "t", "mps", "none", 7.0),
            row("a", "t", "tally-mps", "tally-priority", 1.5),
            row("b", "t", "mps", "none", 6.0),
            tuned,
            vendor
        ]);
        let figure = figure(&rows).unwrap();
        assert_eq!(points(&figure), [7.0, 1.5]);
        assert!(figure.caption.contains("NVIDIA H200") && figure.caption.contains("2 of 2 points"));
    }

    #[test]
    fn rows_that_cannot_be_drawn_are_told() {
        let solo = row("a", "-", "solo", "none", 1.0);
        let wrong = |rows: Value, words: &str| {
            let error = figure(&rows).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        wrong(json!([solo, row("a", "t", "tally-mps", "lottery", 1.5)]), "1 of 1 rows");
        let mut other = row("a", "t", "mps", "none", 7.0);
        other["load"] = 0.7.into();
        wrong(json!([solo, row("a", "t", "mps", "none", 7.0), other]), "several loads");
        let mut empty = row("a", "t", "mps", "none", 7.0);
        empty["p99_over_solo"] = Value::Null;
        wrong(json!([solo, empty]), "p99_over_solo");
        wrong(json!([solo]), "no rows of pairs");
    }
}
