//! Times as people write them: `100us`, `2.5ms`, `2s`, `10m`, `1h`. `humantime` knows no fractions, and months.

/// Units, longest suffix first where one ends another.
const UNITS: [(&str, f64); 6] =
    [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3_600e9)];
/// Longest time understood, h.
const HOURS_MAX: f64 = 24.0 * 366.0;

/// A time in nanoseconds.
///
/// # Errors
/// What was expected instead.
pub fn parse_ns(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let expected =
        || format!("{text:?} is not a time: expected a number and ns, us, ms, s, m or h");
    let number: f64 = number.parse().map_err(|_| expected())?;
    let unit = unit.trim();
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(expected)?;
    let ns = number * factor;
    if !ns.is_finite() || ns > HOURS_MAX * 3_600e9 {
        return Err(format!("{text:?} is longer than {HOURS_MAX} h"));
    }
    Ok(ns as u64)
}

/// A time in the unit that suits it.
pub fn time(ns: f64) -> String {
    let (name, factor) = match ns.abs() {
        n if n < 1e3 => ("ns", 1.0),
        n if n < 1e6 => ("us", 1e3),
        n if n < 1e9 => ("ms", 1e6),
        n if n < 120e9 => ("s", 1e9),
        n if n < 7_200e9 => ("min", 60e9),
        _ => ("h", 3_600e9),
    };
    let value = ns / factor;
    let digits = if value.abs() < 10.0 { 2 } else { usize::from(value.abs() < 100.0) };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_every_unit() {
        for (text, ns) in [
            ("0s", 0),
            ("7ns", 7),
            ("100us", 100_000),
            ("2.5ms", 2_500_000),
            ("2s", 2_000_000_000),
            (" 10m ", 600_000_000_000),
            ("1 h", 3_600_000_000_000),
        ] {
            assert_eq!(parse_ns(text), Ok(ns), "{text}");
        }
        for text in ["", "5", "ms", "-1s", "1.2.3s", "2 sec", "1e3s", "99999999999999h"] {
            let why = parse_ns(text).unwrap_err();
            assert!(why.contains(text.trim()), "{why}");
        }
    }

    #[test]
    fn times_are_written_in_the_unit_that_suits() {
        assert_eq!(time(950.0), "950 ns");
        assert_eq!(time(2_500_000.0), "2.5 ms");
        assert_eq!(time(10e9), "10 s");
        assert_eq!(time(600e9), "10 min");
    }
}
