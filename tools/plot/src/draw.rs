//! Drawing a figure. Panels and axes are plotters' charts; marks, legend and texts are placed
//! by the pixel.

use crate::axis::{Axis, Scale};
use crate::figure::{Figure, Key, Legend, Panel, Rule};
use crate::marks::{Marker, Marks, Point, Series, Shape};
use crate::text::{fitted, width, wrapped};
use crate::theme::{Colour, Theme};
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Polygon, Rectangle, Text};
use plotters::prelude::{Cartesian2d, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Pixel = (i32, i32);

const MARGIN: i32 = 12;
const TITLE_SIZE: u32 = 16;
const SIZE: u32 = 12;
const CAPTION_SIZE: u32 = 11;
const CAPTION_LINES_MAX: usize = 4;
const LEGEND_LINE: i32 = 19;
/// A dash and the gap after it, pixels.
const DASH: f64 = 9.0;
const Y_LABELS: u32 = 58;
const X_LABELS: u32 = 42;
/// Ratio of plotters' font size, which is a line's, to a letter's.
const SIZE_OF_FONT: f64 = 1.24;

/// Why a figure could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("the figure {title:?} cannot be drawn: {why}")]
pub struct PlotError {
    title: String,
    why: String,
}

impl Figure {
    /// Draws the figure as an SVG document.
    ///
    /// # Errors
    /// If the figure's size leaves no room for its panels.
    pub fn svg(&self, theme: Theme) -> Result<String, PlotError> {
        let mut out = String::new();
        let wrong = |why: String| PlotError { title: self.title.clone(), why };
        let (top, bottom, right) = self.around();
        let (wide, high) = (self.size.0 as i32 - right, self.size.1 as i32 - top - bottom);
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(1).max(1) as i32;
        if wide / columns < 160 || high / (self.rows.len().max(1) as i32) < 120 {
            return Err(wrong(format!("{:?} pixels leave no room", self.size)));
        }
        {
            let root = SVGBackend::with_string(&mut out, self.size).into_drawing_area();
            let pen = Pen { root, theme };
            self.draw(&pen, top, bottom, right).map_err(|e| wrong(e.to_string()))?;
            pen.root.present().map_err(|e| wrong(e.to_string()))?;
        }
        Ok(out)
    }

    /// Pixels taken above, below and to the right of the panels.
    fn around(&self) -> (i32, i32, i32) {
        let caption = self.caption_lines().len() as i32 * (CAPTION_SIZE as i32 + 4);
        let top = MARGIN + TITLE_SIZE as i32 + 12;
        match &self.legend {
            Legend::Top(keys) if keys.is_empty() => (top, caption + MARGIN, MARGIN),
            Legend::Top(_) => (top + LEGEND_LINE, caption + MARGIN, MARGIN),
            Legend::Right(room, _) => (top, caption + MARGIN, *room as i32),
        }
    }

    fn caption_lines(&self) -> Vec<String> {
        let room = self.size.0 as i32 - 2 * MARGIN;
        wrapped(&self.caption, CAPTION_SIZE, room, CAPTION_LINES_MAX)
    }

    fn draw(&self, pen: &Pen, top: i32, bottom: i32, right: i32) -> Result<(), Fault> {
        let (wide, high) = (self.size.0 as i32, self.size.1 as i32);
        pen.root.fill(&pen.theme.background())?;
        let ink = pen.theme.colour(Colour::Ink);
        let title = fitted(&self.title, TITLE_SIZE, wide - 2 * MARGIN);
        let title_at = (MARGIN, MARGIN + TITLE_SIZE as i32 / 2);
        pen.text(&title, title_at, TITLE_SIZE, ink, HPos::Left)?;
        let muted = pen.theme.colour(Colour::Muted);
        for (n, line) in self.caption_lines().iter().enumerate() {
            let line_high = CAPTION_SIZE as i32 + 4;
            let y = high - bottom + 4 + line_high / 2 + n as i32 * line_high;
            pen.text(line, (MARGIN, y), CAPTION_SIZE, muted, HPos::Left)?;
        }
        let row_high = (high - top - bottom) / self.rows.len().max(1) as i32;
        for (r, row) in self.rows.iter().enumerate() {
            let panel_wide = (wide - right) / row.len().max(1) as i32;
            for (c, panel) in row.iter().enumerate() {
                let (x, y) = (c as i32 * panel_wide, top + r as i32 * row_high);
                pen.panel(panel, (x, y), (panel_wide, row_high))?;
            }
        }
        match &self.legend {
            Legend::Top(keys) => {
                let (mut x, y) = (MARGIN, top - LEGEND_LINE / 2 - 2);
                for key in keys {
                    let name = fitted(&key.name, SIZE, wide - MARGIN - x - 22);
                    if x + 30 > wide {
                        break;
                    }
                    pen.key(key, &name, (x, y))?;
                    x += 22 + width(&name, SIZE) + 22;
                }
            }
            Legend::Right(room, groups) => {
                let (x, mut y) = (wide - *room as i32 + 10, top + 10);
                for (heading, keys) in groups {
                    let heading = fitted(heading, SIZE, *room as i32 - 14);
                    pen.text(&heading, (x, y), SIZE, muted, HPos::Left)?;
                    y += LEGEND_LINE;
                    for key in keys {
                        let name = fitted(&key.name, SIZE, *room as i32 - 36);
                        pen.key(key, &name, (x, y))?;
                        y += LEGEND_LINE;
                    }
                    y += LEGEND_LINE / 2;
                }
            }
        }
        Ok(())
    }
}

type Fault = plotters::drawing::DrawingAreaErrorKind<std::io::Error>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>;

struct Pen<'a> {
    root: Area<'a>,
    theme: Theme,
}

fn line(colour: RGBColor, width: u32) -> ShapeStyle {
    ShapeStyle { color: colour.to_rgba(), filled: false, stroke_width: width }
}

fn font(size: u32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", f64::from(size) * SIZE_OF_FONT).into_font().color(&colour)
}

impl Pen<'_> {
    fn text(
        &self,
        text: &str,
        at: Pixel,
        size: u32,
        colour: RGBColor,
        h: HPos,
    ) -> Result<(), Fault> {
        let style = font(size, colour).pos(Pos::new(h, VPos::Center));
        self.root.draw(&Text::new(text.to_owned(), at, style))
    }

    fn key(&self, key: &Key, name: &str, (x, y): Pixel) -> Result<(), Fault> {
        let colour = self.theme.colour(key.colour);
        match key.marks {
            Marks::Points(marker) => self.marker(marker, (x + 8, y), colour)?,
            Marks::Line { width } => {
                let path = vec![(x, y), (x + 16, y)];
                self.root.draw(&PathElement::new(path, line(colour, width)))?;
            }
            Marks::Band => {
                let style = colour.mix(0.25).filled();
                self.root.draw(&Rectangle::new([(x, y - 6), (x + 16, y + 6)], style))?;
            }
            Marks::Bars { .. } => {
                self.root
                    .draw(&Rectangle::new([(x + 2, y - 6), (x + 14, y + 6)], colour.filled()))?;
            }
        }
        self.text(name, (x + 22, y), SIZE, self.theme.colour(Colour::Ink), HPos::Left)
    }

    fn marker(&self, marker: Marker, (x, y): Pixel, colour: RGBColor) -> Result<(), Fault> {
        let r = marker.radius as i32;
        let corners: Vec<Pixel> = match marker.shape {
            Shape::Circle => {
                // What is below shines through the middle of a hollow one, so that two at one
                // place are seen as two.
                let style = if marker.filled { colour.filled() } else { line(colour, 2) };
                return self.root.draw(&Circle::new((x, y), r, style));
            }
            Shape::Square => vec![(-r, -r), (r, -r), (r, r), (-r, r)],
            Shape::Triangle => vec![(0, -r - 1), (r + 1, r), (-r - 1, r)],
            Shape::TriangleDown => vec![(0, r + 1), (r + 1, -r), (-r - 1, -r)],
            Shape::Diamond => vec![(0, -r - 2), (r + 2, 0), (0, r + 2), (-r - 2, 0)],
        };
        let mut corners: Vec<Pixel> = corners.into_iter().map(|(a, b)| (x + a, y + b)).collect();
        if marker.filled {
            return self.root.draw(&Polygon::new(corners, colour.filled()));
        }
        // Closed, and with a second edge begun, so that the first corner is one.
        corners.extend_from_within(..2);
        self.root.draw(&PathElement::new(corners, line(colour, 2)))
    }

    fn panel(&self, panel: &Panel, at: Pixel, (wide, high): Pixel) -> Result<(), Fault> {
        let area = self.root.clone().shrink(at, (wide, high));
        let ink = self.theme.colour(Colour::Ink);
        let title_high = if panel.title.is_empty() { 0 } else { SIZE as i32 + 10 };
        if title_high > 0 {
            let title = fitted(&panel.title, SIZE, wide - 2 * MARGIN);
            let middle = at.0 + Y_LABELS as i32 + (wide - Y_LABELS as i32) / 2;
            self.text(&title, (middle, at.1 + title_high / 2), SIZE, ink, HPos::Center)?;
        }
        // A name is as wide as its share of the axis; a tick's label is short anyway.
        let mut x = panel.x.clone();
        if let Scale::Names(names) = &mut x.scale {
            let room = (wide - Y_LABELS as i32 - MARGIN) / names.len().max(1) as i32 - 6;
            names.iter_mut().for_each(|name| *name = fitted(name, SIZE - 1, room));
        }
        let is_named = matches!(x.scale, Scale::Names(_));
        let mut chart = ChartBuilder::on(&area)
            .margin_top(8 + title_high)
            .margin_right(MARGIN)
            .margin_left(4)
            .x_label_area_size(if panel.x.label.is_empty() { X_LABELS - 16 } else { X_LABELS })
            .y_label_area_size(Y_LABELS)
            .build_cartesian_2d(x, panel.y.clone())?;
        let grid = self.theme.grid();
        let mut mesh = chart.configure_mesh();
        if is_named {
            mesh.disable_x_mesh();
        }
        let x_room = wide - Y_LABELS as i32;
        mesh.bold_line_style(line(grid, 1))
            .light_line_style(grid.mix(0.0))
            .axis_style(line(self.theme.colour(Colour::Muted), 1))
            .x_labels(if x_room < 300 { 5 } else { 8 })
            .y_labels(if high < 200 { 5 } else { 7 })
            .label_style(font(SIZE - 1, ink))
            .axis_desc_style(font(SIZE, ink))
            .x_desc(fitted(&panel.x.label, SIZE, x_room))
            .y_desc(fitted(&panel.y.label, SIZE, high - X_LABELS as i32))
            .draw()?;
        for rule in &panel.rules {
            self.rule(&chart, rule)?;
        }
        for series in &panel.series {
            self.series(&chart, series)?;
        }
        Ok(())
    }

    fn rule(&self, chart: &Chart, rule: &Rule) -> Result<(), Fault> {
        let (x, y) = (chart.x_range(), chart.y_range());
        let at = |x: f64, y: f64| chart.backend_coord(&(x, y));
        let (from, to, label) = match rule {
            Rule::X(value, label) => (at(*value, y.start), at(*value, y.end), label),
            Rule::Y(value, label) => (at(x.start, *value), at(x.end, *value), label),
            Rule::Diagonal(label) => {
                let (low, high) = (x.start.max(y.start), x.end.min(y.end));
                (at(low, low), at(high, high), label)
            }
        };
        let muted = self.theme.colour(Colour::Muted);
        for dash in dashes(from, to) {
            self.root.draw(&PathElement::new(dash, line(muted, 1)))?;
        }
        let (at, h) = match rule {
            Rule::X(..) => ((from.0 + 5, from.1 - 9), HPos::Left),
            Rule::Y(..) => ((to.0 - 4, to.1 - 8), HPos::Right),
            Rule::Diagonal(_) => {
                let along = |a: i32, b: i32| a + (b - a) * 3 / 5;
                ((along(from.0, to.0) + 12, along(from.1, to.1) + 8), HPos::Left)
            }
        };
        self.text(&fitted(label, SIZE - 1, 260), at, SIZE - 1, muted, h)
    }

    fn series(&self, chart: &Chart, series: &Series) -> Result<(), Fault> {
        let colour = self.theme.colour(series.colour);
        let ink = self.theme.colour(Colour::Ink);
        let at = |x: f64, y: f64| chart.backend_coord(&(x, y));
        let points = || series.points.iter().filter(|p| p.x.is_finite() && p.y.is_finite());
        let label = |p: &Point| p.label.as_ref().map(|label| fitted(label, SIZE - 1, 160));
        match series.marks {
            Marks::Points(marker) => {
                for p in points() {
                    self.whisker(chart, p, p.x, line(colour, 1))?;
                    let (x, y) = at(p.x, p.y);
                    self.marker(marker, (x, y), colour)?;
                    if let Some(text) = label(p) {
                        let beside = (x + marker.radius as i32 + 4, y);
                        self.text(&text, beside, SIZE - 1, ink, HPos::Left)?;
                    }
                }
            }
            Marks::Line { width } => {
                let path: Vec<Pixel> = points().map(|p| at(p.x, p.y)).collect();
                if !path.is_empty() {
                    self.root.draw(&PathElement::new(path, line(colour, width)))?;
                }
            }
            Marks::Band => {
                let edges = || points().filter_map(|p| Some((p.x, p.low?, p.high?)));
                let edges = || edges().filter(|(_, low, high)| low.is_finite() && high.is_finite());
                let mut around: Vec<Pixel> = edges().map(|(x, _, high)| at(x, high)).collect();
                around.extend(edges().map(|(x, low, _)| at(x, low)).rev());
                if !around.is_empty() {
                    self.root.draw(&Polygon::new(around, colour.mix(0.2).filled()))?;
                }
            }
            Marks::Bars { width, shift } => {
                for p in points() {
                    let x = p.x + shift;
                    let corner = at(x - width / 2.0, p.y);
                    let foot = at(x + width / 2.0, 0.0);
                    self.root.draw(&Rectangle::new([corner, foot], colour.filled()))?;
                    self.whisker(chart, p, x, line(ink, 1))?;
                    if let Some(text) = label(p) {
                        let top = p.high.filter(|high| *high > p.y).unwrap_or(p.y);
                        let (x, y) = at(x, top);
                        self.text(&text, (x, y - 9), SIZE - 1, ink, HPos::Center)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// From a point's low to its high value, with a stroke across each end.
    fn whisker(&self, chart: &Chart, p: &Point, x: f64, style: ShapeStyle) -> Result<(), Fault> {
        let (Some(low), Some(high)) = (p.low, p.high) else { return Ok(()) };
        if !(low.is_finite() && high.is_finite()) {
            return Ok(());
        }
        let (a, b) = (chart.backend_coord(&(x, low)), chart.backend_coord(&(x, high)));
        for path in [vec![a, b], across(a), across(b)] {
            self.root.draw(&PathElement::new(path, style))?;
        }
        Ok(())
    }
}

fn across((x, y): Pixel) -> Vec<Pixel> {
    vec![(x - 3, y), (x + 3, y)]
}

/// Each placed from the line's start, so that rounding to pixels does not bend it.
fn dashes(from: Pixel, to: Pixel) -> Vec<Vec<Pixel>> {
    let (dx, dy) = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
    let length = dx.hypot(dy);
    let at = |way: f64| {
        let share = (way / length).min(1.0);
        (
            (f64::from(from.0) + dx * share).round() as i32,
            (f64::from(from.1) + dy * share).round() as i32,
        )
    };
    let count = (length / DASH).ceil() as usize;
    (0..count).map(|n| n as f64 * DASH).map(|way| vec![at(way), at(way + DASH * 0.6)]).collect()
}
