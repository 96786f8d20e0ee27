//! `ab report --svg`: each block's figure over time, and what is known of the effect pair by
//! pair.

use tally_ab::{Arm, Report};
use tally_plot::{
    Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Rule, Series, Shape, range,
};

/// Least and greatest effect drawn.
const RATIO: (f64, f64) = (0.05, 20.0);
/// A logarithmic axis beyond this ratio of the greatest to the least value.
const LOG_FROM: f64 = 4.0;

const ARMS: [(Arm, Colour, Shape); 2] =
    [(Arm::A, Colour::Blue, Shape::Circle), (Arm::B, Colour::Vermillion, Shape::Triangle)];

fn marks(shape: Shape) -> Marks {
    Marks::Points(Marker { radius: 4, ..Marker::filled(shape) })
}

pub fn figure(report: &Report) -> Figure {
    let (a, b) = (&report.a.source.name, &report.b.source.name);
    let ended = if report.ended.is_some() { "ended" } else { "still running" };
    let percent = level(report);
    let mut keys: Vec<Key> = ARMS
        .iter()
        .zip([a, b])
        .map(|(&(arm, colour, shape), name)| {
            Key::new(colour, marks(shape), format!("{arm}: {}", short(name)))
        })
        .collect();
    keys.push(Key::new(Colour::Vermillion, Marks::Line { width: 2 }, "effect"));
    keys.push(Key::new(Colour::Vermillion, Marks::Band, format!("{percent} % interval")));
    Figure {
        size: (900, 640),
        title: format!(
            "{}: {} (A) and {} (B) on {}",
            report.verdict.as_str(),
            short(a),
            short(b),
            report.plan.metric
        ),
        caption: format!(
            "{} blocks in {:.0} s; the test {ended}. The effect is B's figure over A's; drawn \
             between {} and {}.",
            report.blocks.len(),
            report.elapsed_s,
            RATIO.0,
            RATIO.1
        ),
        rows: vec![vec![blocks(report)], vec![effect(report)]],
        legend: Legend::Top(keys),
    }
}

/// A legend has one line: a long name must not push the others out of it.
fn short(name: &str) -> String {
    match name.char_indices().nth(30) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.into(),
    }
}

fn level(report: &Report) -> String {
    let text = format!("{:.4}", (1.0 - report.plan.alpha) * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn blocks(report: &Report) -> Panel {
    let (label, unit) = report.plan.metric.axis();
    let values = || report.blocks.iter().filter_map(|b| b.value).map(|v| v / unit);
    let (low, high) = range(values(), (0.0, 1.0));
    let y = if low > 0.0 && high / low > LOG_FROM {
        Axis::log(label, (low / 1.1, high * 1.1))
    } else {
        let margin = (high - low).max(high.abs() * 0.02) * 0.1;
        Axis::linear(label, (low - margin, high + margin))
    };
    let series = ARMS.map(|(arm, colour, shape)| Series {
        colour,
        marks: marks(shape),
        points: report
            .blocks
            .iter()
            .filter(|block| block.arm == arm)
            .filter_map(|b| Some(Point::new(b.began_s + b.measured_s / 2.0, b.value? / unit)))
            .collect(),
    });
    Panel {
        title: String::new(),
        x: Axis::linear("time, s", (0.0, report.elapsed_s.max(1e-3))),
        y,
        series: series.into(),
        rules: Vec::new(),
    }
}

fn effect(report: &Report) -> Panel {
    let inside = |ratio: f64| ratio.clamp(RATIO.0, RATIO.1);
    let all = report.history.iter().map(|p| &p.effect);
    let seen = all.flat_map(|e| [Some(e.ratio), e.low, e.high].into_iter().flatten());
    let finite = seen.filter(|ratio| ratio.is_finite()).map(inside);
    let (low, high) = range(finite.chain([0.9, 1.1]), (0.9, 1.1));
    let bounded = report.history.iter().filter(|p| p.effect.low.or(p.effect.high).is_some());
    let band = bounded.map(|p| {
        let low = inside(p.effect.low.unwrap_or(RATIO.0));
        let high = inside(p.effect.high.unwrap_or(RATIO.1));
        Point::new(p.pairs as f64, inside(p.effect.ratio)).between(low, high)
    });
    let line = report.history.iter().map(|p| Point::new(p.pairs as f64, inside(p.effect.ratio)));
    let pairs = report.history.last().map_or(1, |p| p.pairs).max(2);
    let series = |marks, points| Series { colour: Colour::Vermillion, marks, points };
    Panel {
        title: String::new(),
        x: Axis::linear("pairs of blocks", (0.0, pairs as f64)),
        y: Axis::log("B / A", (low / 1.05, high * 1.05)),
        series: vec![
            series(Marks::Band, band.collect()),
            series(Marks::Line { width: 2 }, line.collect()),
        ],
        rules: vec![Rule::Y(1.0, "no difference".into())],
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use roxmltree::Document;
    use tally_ab::report::ArmSource;
    use tally_ab::{Action, Experiment, Metric, Plan, Sample};
    use tally_plot::Theme;

    /// In virtual time: requests of about 10 ms under A, times `ratio` under B.
    pub(crate) fn report(ratio: f64, blocks: usize) -> Report {
        let plan = Plan { to_end: true, ..Plan::of(Metric::HpP99) };
        let mut experiment = Experiment::new(plan, 0).unwrap();
        let mut now_ns = 0;
        while experiment.blocks().len() < blocks {
            let mut sample = Sample::new();
            match experiment.next_action() {
                Action::Switch(_) => experiment.switched(now_ns, &sample),
                Action::Take { at_ns, cut } => {
                    (sample.from_ns, sample.to_ns) = (now_ns, at_ns);
                    now_ns = at_ns;
                    let factor = if experiment.arm() == Arm::B { ratio } else { 1.0 };
                    for n in 0..5 {
                        let jitter =
                            f64::from((n * 7 + experiment.blocks().len() as u32 * 3) % 10) / 100.0;
                        sample.request((10e6 * factor * (1.0 + jitter)) as u64);
                    }
                    experiment.took(now_ns, cut, &sample);
                }
                Action::End => break,
            }
        }
        let arm = |name: &str| ArmSource { name: name.into(), ..ArmSource::default() };
        Report::new(&experiment, &[arm("fifo"), arm("<b & \"q\">")], now_ns, true)
    }

    fn count(document: &Document, tag: &str, fill: &str) -> usize {
        let wanted = |n: &roxmltree::Node| n.has_tag_name(tag) && n.attribute("fill") == Some(fill);
        document.descendants().filter(wanted).count()
    }

    #[test]
    fn every_block_the_effect_and_its_interval_are_drawn_in_both_themes() {
        let report = report(0.7, 40);
        let of = |arm| report.blocks.iter().filter(|b| b.arm == arm).count();
        assert_eq!((of(Arm::A), of(Arm::B)), (20, 20));
        for theme in Theme::ALL {
            let svg = figure(&report).svg(theme).unwrap();
            let document = Document::parse(&svg).unwrap_or_else(|e| panic!("{e}\n{svg}"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
            let blue = if theme == Theme::Light { "#0072B2" } else { "#56B4E9" };
            // A block each and one in the legend; B's interval is a polygon as well.
            assert_eq!(count(&document, "circle", blue), 20 + 1);
            assert_eq!(count(&document, "polygon", "#D55E00"), 20 + 1 + 1);
            let lines = document.descendants().filter(|n| {
                n.has_tag_name("polyline")
                    && n.attribute("stroke") == Some("#D55E00")
                    && n.attribute("points").unwrap().split_whitespace().count() == 20
            });
            assert_eq!(lines.count(), 1, "one effect for each of 20 pairs");
            let named =
                document.descendants().any(|n| n.text().is_some_and(|t| t.contains("<b & \"q\">")));
            assert!(named, "{svg}");
        }
        assert_ne!(
            figure(&report).svg(Theme::Light).unwrap(),
            figure(&report).svg(Theme::Dark).unwrap()
        );
    }

    #[test]
    fn an_experiment_that_has_just_begun_is_drawn() {
        let report = report(1.0, 0);
        assert!(report.blocks.is_empty());
        Document::parse(&figure(&report).svg(Theme::Light).unwrap()).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Names come from files and figures from clients: whatever they are, it is XML.
        #[test]
        fn any_report_makes_a_well_formed_picture(
            name in ".{0,40}", values in proptest::collection::vec(any::<f64>(), 1..40),
        ) {
            let mut report = report(0.9, 8);
            report.a.source.name = name;
            report.elapsed_s = values[0];
            for (block, value) in report.blocks.iter_mut().zip(&values) {
                block.value = Some(*value);
            }
            for (point, value) in report.history.iter_mut().zip(&values) {
                point.effect.low = Some(*value);
                point.effect.ratio = *value;
            }
            let svg = figure(&report).svg(Theme::Light).unwrap();
            prop_assert!(Document::parse(&svg).is_ok(), "{svg}");
        }
    }
}
