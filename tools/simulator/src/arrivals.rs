//! When the requests of a simulation arrive: at random, or as a file says.

use std::path::Path;

/// Arrivals in one file at most.
pub const ARRIVALS_MAX: usize = 10_000_000;

#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// At random, at such a rate that the service alone would serve this share of
    /// the time.
    Poisson {
        /// Share of the time, more than 0.
        load: f64,
    },
    /// At these times from the start, ns, in rising order.
    At(Vec<u64>),
}

/// Why a file of arrivals was refused.
#[derive(Debug, thiserror::Error)]
pub enum ArrivalsError {
    #[error("arrivals {file}: {source}")]
    Read { file: String, source: std::io::Error },
    /// A line that is no time.
    #[error(
        "arrivals {file}, line {line}: `{found}`, expected seconds from the start, 0 or more and not less than the line before"
    )]
    Line {
        file: String,
        /// Number of the line, from 1.
        line: usize,
        found: String,
    },
    /// Nothing, or far too much.
    #[error("arrivals {file}: {count} times, expected 1 to {ARRIVALS_MAX}, one a line")]
    Count { file: String, count: usize },
}

impl Arrivals {
    /// From a file with one time in seconds a line.
    ///
    /// # Errors
    /// [`ArrivalsError`] names the line and what was expected.
    pub fn open(path: &Path) -> Result<Self, ArrivalsError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ArrivalsError::Read { file: file.clone(), source })?;
        Self::parse(&file, &text)
    }

    /// From its text; `file` stands for it in messages.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn parse(file: &str, text: &str) -> Result<Self, ArrivalsError> {
        let mut all: Vec<u64> = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let seconds = line.trim().parse::<f64>().ok().filter(|s| (0.0..1e9).contains(s));
            let at_ns = seconds.map(|s| (s * 1e9).round() as u64);
            match at_ns.filter(|&ns| all.last().is_none_or(|&last| ns >= last)) {
                Some(ns) => all.push(ns),
                None => {
                    let found = line.trim().to_owned();
                    return Err(ArrivalsError::Line { file: file.into(), line: index + 1, found });
                }
            }
        }
        if all.is_empty() || all.len() > ARRIVALS_MAX {
            return Err(ArrivalsError::Count { file: file.into(), count: all.len() });
        }
        Ok(Arrivals::At(all))
    }

    /// Arrivals before `end_ns`, ns from the start. `solo_ns` is the time of one request alone.
    pub fn times(&self, solo_ns: u64, end_ns: u64, seed: u64) -> Vec<u64> {
        match self {
            Arrivals::At(all) => all.iter().copied().take_while(|&at| at < end_ns).collect(),
            Arrivals::Poisson { load } => {
                let mut random = Random::new(seed);
                let mean_ns = solo_ns as f64 / load;
                let (mut at, mut all) = (0.0, Vec::new());
                loop {
                    at += mean_ns * random.exponential();
                    if at.is_nan() || at >= end_ns as f64 || all.len() >= ARRIVALS_MAX {
                        return all;
                    }
                    all.push(at as u64);
                }
            }
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Exponentially distributed, of mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A uniform random number, from 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
