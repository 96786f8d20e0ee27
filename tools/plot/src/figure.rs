//! A figure as data.

use crate::axis::Axis;
use crate::marks::{Marks, Series};
use crate::theme::Colour;

#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Width and height, pixels.
    pub size: (u32, u32),
    pub title: String,
    /// Below everything: where the figures are from, and what to keep in mind.
    pub caption: String,
    /// Rows from the top, each from the left. Panels of a row are equally wide.
    pub rows: Vec<Vec<Panel>>,
    pub legend: Legend,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    /// Drawn in this order, so that the last is on top.
    pub series: Vec<Series>,
    /// Drawn before the series, and so behind them.
    pub rules: Vec<Rule>,
}

/// A dashed line to compare with.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    X(f64, String),
    Y(f64, String),
    /// The line on which both values are equal.
    Diagonal(String),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Legend {
    /// In one line under the title, as far as there is room.
    Top(Vec<Key>),
    /// In a column of so many pixels, groups below each other with a heading each.
    Right(u32, Vec<(String, Vec<Key>)>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub colour: Colour,
    pub marks: Marks,
    pub name: String,
}

impl Key {
    pub fn new(colour: Colour, marks: Marks, name: impl Into<String>) -> Self {
        Key { colour, marks, name: name.into() }
    }
}
