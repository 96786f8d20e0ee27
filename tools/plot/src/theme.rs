//! Colours. All series colours are Okabe and Ito's, which colour-blind people tell apart,
//! and only those that stand out from both backgrounds.

use plotters::style::RGBColor;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Theme {
    #[default]
    Light,
    Dark,
}

/// What a series is drawn in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Blue,
    Vermillion,
    Green,
    Purple,
    /// The colour of text.
    Ink,
    /// Colour of what stands behind the data.
    Muted,
}

impl Colour {
    /// Colours of series, in the order in which a figure should take them.
    pub const SERIES: [Colour; 5] =
        [Colour::Blue, Colour::Vermillion, Colour::Green, Colour::Purple, Colour::Ink];
}

impl Theme {
    pub const ALL: [Theme; 2] = [Theme::Light, Theme::Dark];

    /// Name of the theme in file names.
    pub fn name(self) -> &'static str {
        match self {
            Theme::Light => "light",
            Theme::Dark => "dark",
        }
    }

    pub(crate) fn background(self) -> RGBColor {
        match self {
            Theme::Light => RGBColor(0xff, 0xff, 0xff),
            Theme::Dark => RGBColor(0x0d, 0x11, 0x17),
        }
    }

    pub(crate) fn grid(self) -> RGBColor {
        match self {
            Theme::Light => RGBColor(0xe2, 0xe4, 0xe8),
            Theme::Dark => RGBColor(0x2b, 0x31, 0x3a),
        }
    }

    pub(crate) fn colour(self, colour: Colour) -> RGBColor {
        match (colour, self) {
            (Colour::Blue, Theme::Light) => RGBColor(0x00, 0x72, 0xb2),
            // On a dark background Okabe and Ito's other blue.
            (Colour::Blue, Theme::Dark) => RGBColor(0x56, 0xb4, 0xe9),
            (Colour::Vermillion, _) => RGBColor(0xd5, 0x5e, 0x00),
            (Colour::Green, _) => RGBColor(0x00, 0x9e, 0x73),
            (Colour::Purple, _) => RGBColor(0xcc, 0x79, 0xa7),
            (Colour::Ink, Theme::Light) => RGBColor(0x1f, 0x23, 0x28),
            (Colour::Ink, Theme::Dark) => RGBColor(0xe6, 0xed, 0xf3),
            (Colour::Muted, Theme::Light) => RGBColor(0x59, 0x63, 0x6e),
            (Colour::Muted, Theme::Dark) => RGBColor(0x91, 0x98, 0xa1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn luminance(RGBColor(r, g, b): RGBColor) -> f64 {
        let linear = |c: u8| {
            let c = f64::from(c) / 255.0;
            if c <= 0.040_45 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
    }

    fn contrast(a: RGBColor, b: RGBColor) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    /// WCAG 2.1: 3 for graphics (1.4.11), 4.5 for text (1.4.3).
    #[test]
    fn colours_stand_out_from_both_backgrounds() {
        for theme in Theme::ALL {
            for colour in Colour::SERIES {
                let found = contrast(theme.colour(colour), theme.background());
                assert!(found >= 3.0, "{colour:?} on {theme:?}: {found}");
            }
            for text in [Colour::Ink, Colour::Muted] {
                let found = contrast(theme.colour(text), theme.background());
                assert!(found >= 4.5, "{text:?} on {theme:?}: {found}");
            }
        }
    }
}
