//! The report as a picture: each block's figure over time, and what is known of the
//! effect pair by pair. Plain SVG 1.1, no scripts, no fonts of its own.

use crate::design::Arm;
use crate::report::Report;
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const PANEL: f64 = 240.0;
const TOP: f64 = 70.0;
const GAP: f64 = 70.0;
const HEIGHT: f64 = TOP + 2.0 * PANEL + GAP + 60.0;
/// Told apart by colour-blind people, too (Okabe and Ito).
const COLOUR_A: &str = "#0072b2";
const COLOUR_B: &str = "#d55e00";
const GREY: &str = "#999999";
/// Least and greatest effect drawn.
const RATIO_MIN: f64 = 0.05;
const RATIO_MAX: f64 = 20.0;

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML has no way to write these.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A panel: from data to the picture.
struct Panel {
    top: f64,
    x: (f64, f64),
    y: (f64, f64),
    /// The vertical axis is logarithmic.
    log: bool,
}

impl Panel {
    fn px(&self, x: f64) -> f64 {
        let share = (x - self.x.0) / (self.x.1 - self.x.0).max(1e-12);
        LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn py(&self, y: f64) -> f64 {
        let scale = |v: f64| if self.log { v.max(1e-12).ln() } else { v };
        let (low, high) = (scale(self.y.0), scale(self.y.1));
        let share = (scale(y) - low) / (high - low).max(1e-12);
        self.top + PANEL * (1.0 - share.clamp(0.0, 1.0))
    }

    fn frame(&self, out: &mut String, x_label: &str, y_label: &str) -> std::fmt::Result {
        let (bottom, right) = (self.top + PANEL, WIDTH - RIGHT);
        writeln!(
            out,
            r##"<rect x="{LEFT}" y="{}" width="{}" height="{PANEL}" fill="none" stroke="#333333"/>"##,
            self.top,
            right - LEFT
        )?;
        for tick in ticks(self.x, false) {
            let at = self.px(tick);
            writeln!(
                out,
                r#"<line x1="{at:.1}" y1="{bottom}" x2="{at:.1}" y2="{}" stroke="{GREY}"/><text x="{at:.1}" y="{}" text-anchor="middle">{}</text>"#,
                bottom + 5.0,
                bottom + 19.0,
                label(tick)
            )?;
        }
        for tick in ticks(self.y, self.log) {
            let at = self.py(tick);
            writeln!(
                out,
                r##"<line x1="{LEFT}" y1="{at:.1}" x2="{right}" y2="{at:.1}" stroke="#e4e4e4"/><text x="{}" y="{:.1}" text-anchor="end">{}</text>"##,
                LEFT - 6.0,
                at + 4.0,
                label(tick)
            )?;
        }
        writeln!(
            out,
            r#"<text x="{}" y="{}" text-anchor="middle">{}</text>"#,
            f64::midpoint(LEFT, right),
            bottom + 38.0,
            escape(x_label)
        )?;
        let middle = self.top + PANEL / 2.0;
        writeln!(
            out,
            r#"<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{}</text>"#,
            escape(y_label)
        )
    }
}

fn label(value: f64) -> String {
    let text = match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Some round numbers within a range.
fn ticks((low, high): (f64, f64), log: bool) -> Vec<f64> {
    if log {
        let all =
            (-12..=12).flat_map(|e| [1.0, 1.5, 2.0, 3.0, 5.0, 7.0].map(|m| m * 10f64.powi(e)));
        let mut within: Vec<f64> = all.filter(|t| *t >= low && *t <= high).collect();
        while within.len() > 8 {
            within = within.iter().step_by(2).copied().collect();
        }
        if within.len() >= 2 {
            return within;
        }
    }
    let span = (high - low).max(1e-9);
    let raw = span / 5.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= raw);
    let step = step.unwrap_or(raw);
    let first = (low / step).ceil() as i64;
    (first..first + 12).map(|n| n as f64 * step).take_while(|t| *t <= high + step * 1e-9).collect()
}

fn range(values: impl Iterator<Item = f64>, least: f64) -> (f64, f64) {
    let (low, high) = values
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (least, least * 2.0 + 1.0);
    }
    let margin = 1.08;
    ((low / margin).max(least), (high * margin).max(low * margin + least))
}

impl Report {
    pub fn svg(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.draw(&mut out);
        out
    }

    fn draw(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">"#
        )?;
        writeln!(out, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#)?;
        let (a, b) = (&self.a.source.name, &self.b.source.name);
        let title = format!("{}: A = {a}, B = {b}", self.plan.metric);
        writeln!(out, r#"<text x="{LEFT}" y="26" font-size="16">{}</text>"#, escape(&title))?;
        for (at, colour, name) in [(LEFT, COLOUR_A, a), (LEFT + 220.0, COLOUR_B, b)] {
            let arm = if colour == COLOUR_A { "A" } else { "B" };
            writeln!(
                out,
                r#"<circle cx="{}" cy="46" r="4" fill="{colour}"/><text x="{}" y="50">{arm}: {}</text>"#,
                at + 5.0,
                at + 14.0,
                escape(name)
            )?;
        }
        self.draw_blocks(out)?;
        self.draw_effect(out)?;
        writeln!(out, "</svg>")
    }

    fn draw_blocks(&self, out: &mut String) -> std::fmt::Result {
        let (axis, unit) = self.plan.metric.axis();
        let values = self.blocks.iter().filter_map(|b| b.value).map(|v| v / unit);
        let y = range(values, 1e-6);
        let panel = Panel {
            top: TOP,
            x: (0.0, self.elapsed_s.max(1e-3)),
            y,
            log: y.1 / y.0.max(1e-12) > 4.0,
        };
        panel.frame(out, "time, s", axis)?;
        for block in &self.blocks {
            let Some(value) = block.value.filter(|v| v.is_finite()) else { continue };
            let colour = if block.arm == Arm::A { COLOUR_A } else { COLOUR_B };
            writeln!(
                out,
                r#"<circle class="block" cx="{:.1}" cy="{:.1}" r="3" fill="{colour}" fill-opacity="0.75"/>"#,
                panel.px(block.began_s + block.measured_s / 2.0),
                panel.py(value / unit)
            )?;
        }
        Ok(())
    }

    fn draw_effect(&self, out: &mut String) -> std::fmt::Result {
        let inside = |ratio: f64| ratio.clamp(RATIO_MIN, RATIO_MAX);
        let all = self.history.iter().map(|p| &p.effect);
        let seen = all.flat_map(|e| [Some(e.ratio), e.low, e.high].into_iter().flatten());
        let y = range(seen.map(inside).chain([0.9, 1.0, 1.1]), RATIO_MIN);
        let pairs = self.history.last().map_or(1, |p| p.pairs).max(2);
        let panel = Panel { top: TOP + PANEL + GAP, x: (0.0, pairs as f64), y, log: true };
        let percent = (1.0 - self.plan.alpha) * 100.0;
        panel.frame(out, "pairs of blocks", &format!("B / A, with {percent:.4} % interval"))?;
        let one = panel.py(1.0);
        writeln!(
            out,
            r#"<line x1="{LEFT}" y1="{one:.1}" x2="{}" y2="{one:.1}" stroke="black" stroke-dasharray="5 4"/>"#,
            WIDTH - RIGHT
        )?;
        let at = |pairs: usize, ratio: f64| {
            format!("{:.1},{:.1}", panel.px(pairs as f64), panel.py(inside(ratio)))
        };
        let bounded =
            || self.history.iter().filter(|p| p.effect.low.is_some() || p.effect.high.is_some());
        let upper = bounded().map(|p| at(p.pairs, p.effect.high.unwrap_or(RATIO_MAX)));
        let lower = bounded().map(|p| at(p.pairs, p.effect.low.unwrap_or(RATIO_MIN)));
        let mut band: Vec<String> = upper.collect();
        band.extend(lower.collect::<Vec<_>>().into_iter().rev());
        if !band.is_empty() {
            writeln!(
                out,
                r#"<polygon class="interval" points="{}" fill="{COLOUR_B}" fill-opacity="0.18"/>"#,
                band.join(" ")
            )?;
        }
        let line: Vec<String> = self.history.iter().map(|p| at(p.pairs, p.effect.ratio)).collect();
        if !line.is_empty() {
            writeln!(
                out,
                r#"<polyline class="effect" points="{}" fill="none" stroke="{COLOUR_B}" stroke-width="2"/>"#,
                line.join(" ")
            )?;
        }
        Ok(())
    }
}
