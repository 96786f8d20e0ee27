//! How soon a kernel leaves the GPU when it is asked to, by the time that one block takes.

use super::{array, made, number, text};
use anyhow::{Result, ensure};
use serde_json::Value;
use tally_plot::{
    Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Rule, Series, Shape, range,
};

/// The shim's flag has four words, raised by one batch of writes
/// (`core/preempt/src/gate.rs`).
const FLAG_MASK: u64 = 3;

/// A form's name in the file, and in the figure.
const FORMS: [(&str, Colour, Shape, bool, &str); 4] = [
    ("sass prelude", Colour::Vermillion, Shape::Circle, true, "preemptible, SASS"),
    ("ptx prelude", Colour::Vermillion, Shape::Circle, false, "preemptible, PTX"),
    ("sass sub-grid", Colour::Blue, Shape::Square, true, "sliced, SASS"),
    ("ptx sub-grid", Colour::Blue, Shape::Square, false, "sliced, PTX"),
];

/// Median and 99th percentile: of the preemption, or of slices, in as many as the shim makes
/// where that was measured.
fn turnaround(form: &Value) -> Result<(f64, f64)> {
    let all = || form["preempted"].as_array().into_iter().flatten();
    let as_used = all().find(|p| p["flag_mask"] == FLAG_MASK && p["raised_by"] == "writes");
    let (of, prefix) = match as_used.or_else(|| all().next()) {
        Some(preempted) => (preempted, ""),
        None if form["slices_in_use"].is_null() => (form, "held_"),
        None => (form, "in_use_"),
    };
    let of_all = |q: &str| number(of, &format!("{prefix}turnaround_{q}_us"));
    Ok((of_all("p50")?, of_all("p99")?))
}

pub fn figure(forms: &Value) -> Result<Figure> {
    let kernels = array(forms, "kernels")?;
    let mut series = Vec::new();
    let mut made_of: Vec<Value> = Vec::new();
    for (name, colour, shape, filled, _) in FORMS {
        let marker = Marker { shape, filled, radius: 5 };
        let mut points = Vec::new();
        for kernel in kernels {
            for form in array(kernel, "forms")? {
                if text(form, "form")? != name || form["load"] != "CUDA_SUCCESS" {
                    continue;
                }
                let (p50, p99) = turnaround(form)?;
                points.push(Point::new(number(kernel, "block_us")?, p50).between(p50, p99));
                // A kernel measured before the others says so; the driver is the file's.
                let mut machine = forms["machine"].clone();
                for key in ["device", "date"] {
                    if let Some(own) = kernel["made"].get(key) {
                        machine[key] = own.clone();
                    }
                }
                made_of.push(machine);
            }
        }
        series.push(Series { colour, marks: Marks::Points(marker), points });
    }
    let points = || series.iter().flat_map(|s| &s.points);
    ensure!(points().next().is_some(), "no kernel in any form");
    let x = range(points().map(|p| p.x), (1.0, 10.0));
    let y = range(points().flat_map(|p| [p.y, p.high.unwrap_or(p.y)]), (1.0, 10.0));
    let panel = Panel {
        title: String::new(),
        x: Axis::log("time that one block takes, us (log)", (x.0 * 0.8, x.1 * 1.25)),
        y: Axis::log("turnaround, us (log)", (y.0 * 0.8, y.1 * 1.25)),
        series,
        rules: vec![Rule::Diagonal("time of one block".into())],
    };
    let keys = FORMS.map(|(_, colour, shape, filled, name)| {
        Key::new(colour, Marks::Points(Marker { shape, filled, radius: 5 }), name)
    });
    let made = made(&made_of.iter().collect::<Vec<_>>())?;
    Ok(Figure {
        size: (800, 420),
        title: "Time until a kernel has left the GPU, by block length and form".into(),
        caption: format!(
            "{made}. {} kernels in the forms they have. Marker: median; line: to the 99th percentile. From before \
             the flag is raised (preemptible) or the gate is closed (sliced) until the stream is seen idle.",
            kernels.len()
        ),
        rows: vec![vec![panel]],
        legend: Legend::Right(160, vec![("form".into(), keys.into())]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn turnaround_is_that_of_the_form_as_the_shim_uses_it() {
        let series = |mask: u64, by: &str, p50: f64| {
            json!({"flag_mask": mask, "raised_by": by,
            "turnaround_p50_us": p50, "turnaround_p99_us": p50 * 2.0})
        };
        let all = [series(0, "writes", 1.0), series(3, "copy", 2.0), series(3, "writes", 3.0)];
        assert_eq!(turnaround(&json!({"preempted": all})).unwrap(), (3.0, 6.0));
        assert_eq!(turnaround(&json!({"preempted": [all[0]]})).unwrap(), (1.0, 2.0));
        let mut sliced = json!({"held_turnaround_p50_us": 4.0, "held_turnaround_p99_us": 5.0});
        assert_eq!(turnaround(&sliced).unwrap(), (4.0, 5.0));
        sliced["slices_in_use"] = 3.into();
        let error = turnaround(&sliced).unwrap_err().to_string();
        assert!(error.contains("in_use_turnaround_p50_us"), "{error}");
    }
}
