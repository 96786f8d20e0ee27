//! What comes out is XML, the same each time, and shows what went in.

use proptest::prelude::*;
use roxmltree::Document;
use tally_plot::{
    Axis, Colour, Figure, Key, Legend, Marker, Marks, Panel, Point, Rule, Series, Shape, Theme,
};

fn series(colour: Colour, marks: Marks, points: Vec<Point>) -> Series {
    Series { colour, marks, points }
}

/// A scatter on logarithmic axes, and bars, with everything that can be in them.
fn figure(text: &str, values: &[(f64, f64)]) -> Figure {
    let points = || -> Vec<Point> {
        let point = |&(x, y): &(f64, f64)| Point::new(x, y).between(y * 0.9, y * 1.1);
        values.iter().map(point).map(|p| p.labelled(text)).collect()
    };
    let markers = Shape::ALL.map(|shape| {
        series(
            Colour::Green,
            Marks::Points(Marker { radius: 4, ..Marker::hollow(shape) }),
            points(),
        )
    });
    let scatter = Panel {
        title: text.into(),
        x: Axis::log(text, (0.5, 100.0)),
        y: Axis::log(text, (0.5, 100.0)),
        series: markers.into(),
        rules: vec![
            Rule::X(1.0, text.into()),
            Rule::Y(2.0, text.into()),
            Rule::Diagonal(text.into()),
        ],
    };
    let lines = [
        series(Colour::Purple, Marks::Band, points()),
        series(Colour::Vermillion, Marks::Line { width: 2 }, points()),
        series(Colour::Blue, Marks::Bars { width: 0.4, shift: 0.2 }, points()),
    ];
    let bars = Panel {
        title: text.into(),
        x: Axis::names("", &[text, "second", "third"]),
        y: Axis::linear(text, (0.0, 10.0)),
        series: lines.into(),
        rules: Vec::new(),
    };
    let key = |shape| Key::new(Colour::Ink, Marks::Points(Marker::filled(shape)), text);
    Figure {
        size: (800, 420),
        title: text.into(),
        caption: text.into(),
        rows: vec![vec![scatter, bars]],
        legend: Legend::Right(150, vec![(text.into(), Shape::ALL.map(key).into())]),
    }
}

fn texts(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).unwrap_or_else(|e| panic!("{e}\n{svg}"));
    let texts = document.descendants().filter(|n| n.has_tag_name("text"));
    texts.filter_map(|n| n.text()).map(|t| t.trim().to_owned()).collect()
}

#[test]
fn the_same_figure_gives_the_same_bytes_and_the_themes_differ() {
    let figure = figure("label", &[(1.0, 2.0), (2.0, 3.0)]);
    let [light, dark] = Theme::ALL.map(|theme| figure.svg(theme).unwrap());
    assert_eq!(light, figure.clone().svg(Theme::Light).unwrap());
    assert_ne!(light, dark);
    assert_eq!(texts(&light), texts(&dark));
}

#[test]
fn points_that_are_no_numbers_are_left_out_and_those_beyond_the_axis_stay_inside() {
    let values = [(1.0, 2.0), (f64::NAN, 1.0), (2.0, f64::INFINITY), (1e99, -1e99)];
    let svg = figure("label", &values).svg(Theme::Light).unwrap();
    let document = Document::parse(&svg).unwrap();
    let circles = document.descendants().filter(|n| n.has_tag_name("circle"));
    let circles: Vec<_> = circles.filter(|n| n.attribute("fill") == Some("none")).collect();
    assert_eq!(circles.len(), 2, "{svg}");
    for circle in circles {
        let at = |name| circle.attribute(name).unwrap().parse::<f64>().unwrap();
        assert!((0.0..650.0).contains(&at("cx")) && (0.0..420.0).contains(&at("cy")));
    }
}

#[test]
fn labels_are_shown_as_they_are() {
    let hostile = "<script>alert(1)</script> & \"quotes\" ]]>";
    let svg = figure(hostile, &[(1.0, 2.0)]).svg(Theme::Dark).unwrap();
    assert!(texts(&svg).iter().any(|text| text == hostile), "{svg}");
    let document = Document::parse(&svg).unwrap();
    for node in document.descendants().filter(|n| n.is_element()) {
        assert_ne!(node.tag_name().name(), "script");
        for attribute in node.attributes() {
            assert!(!attribute.name().starts_with("on") && !attribute.name().contains("href"));
        }
    }
}

#[test]
fn a_figure_without_room_is_refused() {
    let small = Figure { size: (200, 60), ..figure("label", &[]) };
    assert!(small.svg(Theme::Light).unwrap_err().to_string().contains("(200, 60)"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whatever_is_drawn_is_xml(
        text in any::<String>(),
        values in proptest::collection::vec((any::<f64>(), any::<f64>()), 0..20),
        low in any::<f64>(), high in any::<f64>(),
    ) {
        let mut figure = figure(&text, &values);
        figure.rows[0][0].x = Axis::linear(&text, (low, high));
        figure.rows[0][0].y = Axis::log(&text, (low, high));
        let svg = figure.svg(Theme::Light).unwrap();
        prop_assert!(Document::parse(&svg).is_ok(), "{svg}");
        prop_assert!(!svg.contains("NaN"), "{svg}");
    }
}
