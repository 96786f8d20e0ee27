//! The requests of a decode service: when each arrives, tokens of its prompt and of its answer.

use super::{ANSWER_TOKENS_MAX, SEQUENCE_TOKENS_MAX};
use crate::arrivals::ARRIVALS_MAX;
use std::io::Read;
use std::path::Path;

/// Largest file read.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// No request arrives later: a billion seconds, as for [`crate::Arrivals`].
const ARRIVAL_MS_END: u64 = 1_000_000_000_000;
/// Characters of a line that a message shows.
const SHOWN_MAX: usize = 80;
const COLUMNS: &str = "arrival_ms,context,generated";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// From the start.
    pub arrives_ns: u64,
    /// Tokens of the prompt.
    pub context: u32,
    /// Tokens of the answer.
    pub generated: u32,
}

/// Requests in the order of their arrival; never none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests {
    all: Vec<Request>,
    is_backlog: bool,
}

/// Why a file of requests was refused.
#[derive(Debug, thiserror::Error)]
pub enum RequestsError {
    #[error("requests {file}: {source}")]
    Read { file: String, source: std::io::Error },
    #[error("requests {file}: the first line is `{found}`, expected `{COLUMNS}`")]
    Header { file: String, found: String },
    #[error(
        "requests {file}, line {line}: `{found}`, expected `{COLUMNS}`: whole numbers, times not less than the line before"
    )]
    Line {
        file: String,
        /// Counted from 1, the header included.
        line: usize,
        found: String,
    },
    #[error("requests {file}: {count} requests, expected 1 to {ARRIVALS_MAX}")]
    Count { file: String, count: usize },
}

impl Requests {
    /// From a file (.csv) with the columns `arrival_ms,context,generated`. Lengths are cut to what the service takes.
    ///
    /// # Errors
    /// [`RequestsError`] names the line and what was expected.
    pub fn open(path: &Path) -> Result<Self, RequestsError> {
        let file = path.display().to_string();
        let failed = |source| RequestsError::Read { file: file.clone(), source };
        let mut text = String::new();
        let opened = std::fs::File::open(path).map_err(failed)?;
        let read = opened.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
        if read as u64 > FILE_BYTES_MAX {
            let why = format!("more than {FILE_BYTES_MAX} bytes");
            return Err(failed(std::io::Error::other(why)));
        }
        Self::parse(&file, text.strip_prefix('\u{feff}').unwrap_or(&text))
    }

    /// From its text; `file` stands for it in messages.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn parse(file: &str, text: &str) -> Result<Self, RequestsError> {
        let mut lines = text.lines();
        let header = lines.next().unwrap_or("").trim();
        if header != COLUMNS {
            return Err(RequestsError::Header { file: file.into(), found: shown(header) });
        }
        let mut all: Vec<Request> = Vec::new();
        for (index, line) in lines.enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let last_ns = all.last().map_or(0, |last| last.arrives_ns);
            let wrong = || RequestsError::Line {
                file: file.into(),
                line: index + 2,
                found: shown(line.trim()),
            };
            let request = Request::parse(line).filter(|request| request.arrives_ns >= last_ns);
            all.push(request.ok_or_else(wrong)?);
        }
        if all.is_empty() || all.len() > ARRIVALS_MAX {
            return Err(RequestsError::Count { file: file.into(), count: all.len() });
        }
        Ok(Requests { all, is_backlog: false })
    }

    /// The same, all there from the start and again and again: the service never pauses.
    #[must_use]
    pub fn backlog(self) -> Self {
        Requests { is_backlog: true, ..self }
    }

    /// The first ones at this mean rate over `seconds`, with their own gaps, scaled. Past the end they begin again.
    #[must_use]
    pub fn at_rate(&self, rate_per_s: f64, seconds: f64) -> Self {
        let wanted = ((rate_per_s * seconds).round() as usize).clamp(1, ARRIVALS_MAX);
        let count = self.all.len();
        let last_ns = self.all[count - 1].arrives_ns as f64;
        let length_ns = last_ns + last_ns / count as f64;
        let arrives_ns = |number: usize| {
            (number / count) as f64 * length_ns + self.all[number % count].arrives_ns as f64
        };
        // The first request that is not wanted arrives at the end.
        let scale = seconds * 1e9 / arrives_ns(wanted).max(1.0);
        let one = |number: usize| Request {
            arrives_ns: (arrives_ns(number) * scale) as u64,
            ..self.all[number % count]
        };
        Requests { all: (0..wanted).map(one).collect(), is_backlog: false }
    }

    /// The same, and these from then on.
    #[must_use]
    pub fn then(self, next: &Requests, at_ns: u64) -> Self {
        let later = |r: &Request| Request { arrives_ns: r.arrives_ns + at_ns, ..*r };
        let all = self.all.iter().filter(|request| request.arrives_ns < at_ns).copied();
        Requests { all: all.chain(next.all.iter().map(later)).collect(), ..self }
    }

    /// Tokens that a request generates, on average.
    pub fn generated_mean(&self) -> f64 {
        let sum: u64 = self.all.iter().map(|request| u64::from(request.generated)).sum();
        sum as f64 / self.all.len() as f64
    }

    /// The request of this number, if there are so many.
    pub(super) fn get(&self, number: usize) -> Option<Request> {
        match self.is_backlog {
            true => Some(Request { arrives_ns: 0, ..self.all[number % self.all.len()] }),
            false => self.all.get(number).copied(),
        }
    }

    pub(super) fn is_backlog(&self) -> bool {
        self.is_backlog
    }
}

/// A line as a message shows it.
fn shown(line: &str) -> String {
    line.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect()
}

impl Request {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(',').map(|field| field.trim().parse::<u64>().ok());
        let (Some(Some(ms)), Some(Some(context)), Some(Some(generated)), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return None;
        };
        let generated = generated.clamp(1, ANSWER_TOKENS_MAX.into()) as u32;
        let context = context.clamp(1, (SEQUENCE_TOKENS_MAX - generated).into()) as u32;
        (ms < ARRIVAL_MS_END).then_some(Request { arrives_ns: ms * 1_000_000, context, generated })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "arrival_ms,context,generated\n0,374,44\n4315,0,109\n\n4542,9000,5000\n";

    fn at(arrives_ms: u64, context: u32, generated: u32) -> Request {
        Request { arrives_ns: arrives_ms * 1_000_000, context, generated }
    }

    #[test]
    fn lengths_are_cut_to_what_a_service_takes() {
        let requests = Requests::parse("r.csv", TEXT).unwrap();
        assert_eq!(requests.all, [at(0, 374, 44), at(4_315, 1, 109), at(4_542, 1_024, 1_024)]);
        assert_eq!(requests.generated_mean(), (44.0 + 109.0 + 1_024.0) / 3.0);
    }

    #[test]
    fn a_backlog_begins_again_and_has_no_times() {
        let requests = Requests::parse("r.csv", TEXT).unwrap();
        assert_eq!((requests.get(2), requests.get(3)), (Some(at(4_542, 1_024, 1_024)), None));
        let backlog = requests.backlog();
        assert_eq!(
            (backlog.get(2), backlog.get(3)),
            (Some(at(0, 1_024, 1_024)), Some(at(0, 374, 44)))
        );
    }

    #[test]
    fn a_rate_scales_the_gaps_and_begins_again() {
        // python3 -c 'import decode_batch as d; print(d.at_rate([(0, 1, 1), (1, 2, 2), (4, 3, 3)], 2, 3))'
        let text = "arrival_ms,context,generated\n0,1,1\n1000,2,2\n4000,3,3\n";
        let requests = Requests::parse("r.csv", text).unwrap().at_rate(2.0, 3.0);
        let seconds: Vec<f64> = requests.all.iter().map(|r| r.arrives_ns as f64 / 1e9).collect();
        let length = 4.0 + 4.0 / 3.0;
        let scale = 3.0 / (2.0 * length);
        let expected = [0.0, 1.0, 4.0, length, length + 1.0, length + 4.0].map(|s| s * scale);
        assert_eq!(seconds.len(), expected.len());
        assert!(seconds.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{seconds:?}");
        assert_eq!(requests.all[4].context, 2);
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_line() {
        let said = |text: &str| Requests::parse("r.csv", text).unwrap_err().to_string();
        for (text, why) in [
            ("", "r.csv: the first line is ``"),
            ("ms,tokens\n1,2", "`ms,tokens`, expected `arrival_ms,context,generated`"),
            ("arrival_ms,context,generated\n", "0 requests, expected 1 to"),
            ("arrival_ms,context,generated\n5,1,1\n4,1,1\n", "line 3: `4,1,1`"),
            ("arrival_ms,context,generated\n5,1\n", "line 2: `5,1`"),
            ("arrival_ms,context,generated\n5,1,1,1\n", "line 2: `5,1,1,1`"),
            ("arrival_ms,context,generated\n-5,1,1\n", "line 2: `-5,1,1`"),
            ("arrival_ms,context,generated\n1000000000000,1,1\n", "line 2"),
            ("\u{1b}[31m\n", "the first line is `\\u{1b}[31m`"),
        ] {
            assert!(said(text).contains(why), "{text:?}: {}", said(text));
        }
    }
}
