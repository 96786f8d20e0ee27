//! What a panel shows: series of points as markers, lines, bands or bars.

use crate::theme::Colour;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Circle,
    Square,
    Triangle,
    Diamond,
    TriangleDown,
}

impl Shape {
    pub const ALL: [Shape; 5] =
        [Shape::Circle, Shape::Square, Shape::Triangle, Shape::Diamond, Shape::TriangleDown];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    pub shape: Shape,
    pub filled: bool,
    /// Pixels from its middle to its edge.
    pub radius: u32,
}

impl Marker {
    pub fn filled(shape: Shape) -> Self {
        Marker { shape, filled: true, radius: 5 }
    }

    pub fn hollow(shape: Shape) -> Self {
        Marker { shape, filled: false, radius: 5 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Marks {
    Points(Marker),
    Line {
        width: u32,
    },
    /// The area between the points' `low` and `high`.
    Band,
    /// From 0, or from the low end of the axis. `width` and `shift`, from the point to the
    /// bar's middle, are in units of the horizontal axis.
    Bars {
        width: f64,
        shift: f64,
    },
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// A whisker from here to `high`, or the band's edges.
    pub low: Option<f64>,
    pub high: Option<f64>,
    /// Text beside a marker, or above a bar.
    pub label: Option<String>,
}

impl Point {
    pub fn new(x: f64, y: f64) -> Self {
        Point { x, y, ..Point::default() }
    }

    #[must_use]
    pub fn between(self, low: f64, high: f64) -> Self {
        Point { low: Some(low), high: Some(high), ..self }
    }

    #[must_use]
    pub fn labelled(self, label: impl Into<String>) -> Self {
        Point { label: Some(label.into()), ..self }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub colour: Colour,
    pub marks: Marks,
    pub points: Vec<Point>,
}
