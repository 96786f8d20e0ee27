//! Bar, scatter and line charts as SVG 1.1: no scripts, no links, no fonts of their own.
//!
//! A [`Figure`] is data; [`Figure::svg`] draws it in a [`Theme`]. The same figure gives the
//! same bytes. Labels may hold anything: what XML cannot say becomes a space, what is too
//! long is shortened. Values that are not finite are left out, values outside an axis are
//! drawn at its end.
//!
//! Text sizes are estimated, since nothing here knows the font that a viewer will use.
#![forbid(unsafe_code)]
// Nobody outside the repository depends on this crate.
#![allow(missing_docs)]

mod axis;
mod draw;
mod figure;
mod marks;
mod text;
mod theme;

pub use axis::{Axis, Scale, range};
pub use draw::PlotError;
pub use figure::{Figure, Key, Legend, Panel, Rule};
pub use marks::{Marker, Marks, Point, Series, Shape};
pub use theme::{Colour, Theme};
