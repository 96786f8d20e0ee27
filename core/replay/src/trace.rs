//! Kernel traces: one row a kernel, as a profiler recorded them.
//!
//! A recording holds one or more iterations (requests, training steps). What is
//! replayed is its last one: the first may have been cold.

use std::io::Read;
use std::path::Path;

/// Largest file read, unpacked: a trace is a few thousand rows.
pub const TRACE_BYTES_MAX: u64 = 256 << 20;

/// From a launch on the host to the kernel's start on an idle GPU. About half of launch
/// plus synchronise of an empty kernel (7.4 to 8.1 us on an H200).
pub const LAUNCH_LATENCY_NS: u64 = 4_000;
/// A launch on the host: `cuLaunchKernel` takes 2.5 to 3.3 us on an H200.
pub const LAUNCH_HOST_NS: u64 = 3_000;

/// Why a trace was refused.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Not readable, or not the compression that its name says.
    #[error("trace {file}: {source}")]
    Read {
        /// Which.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// Neither a file nor a name.
    #[error("trace {name}: there is no such file, and no built-in trace of that name; built-in are {}", .known.join(", "))]
    Unknown {
        /// As given.
        name: String,
        /// What could have been given.
        known: Vec<&'static str>,
    },
    /// A larger file than any trace.
    #[error("trace {file}: more than {TRACE_BYTES_MAX} bytes unpacked")]
    TooLarge {
        /// Which.
        file: String,
    },
    /// A column that is needed is not there.
    #[error(
        "trace {file}: no column `{column}`; expected a header line with ts_us,dur_us,name,grid,block,regs,smem"
    )]
    Column {
        /// Which file.
        file: String,
        /// Which column.
        column: &'static str,
    },
    /// A field that does not make sense.
    #[error("trace {file}, line {line}: `{column}` is `{found}`, expected {expected}")]
    Field {
        /// Which file.
        file: String,
        /// Counted from 1, the header included.
        line: usize,
        /// Which column.
        column: &'static str,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// A header and nothing else.
    #[error("trace {file}: no kernels; expected at least one row below the header")]
    Empty {
        /// Which.
        file: String,
    },
}

/// When the program launches a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// So long after its launch before, whatever the GPU does.
    AfterLaunch(u64),
    /// So long after the end of the kernel before: the program waited for it.
    AfterEnd(u64),
}

/// One kernel of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Symbol name.
    pub name: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Registers of a thread.
    pub regs: u32,
    /// Shared memory of a block, bytes.
    pub smem: u32,
    /// Start, from that of the iteration.
    pub start_ns: u64,
    /// GPU time until its end, or until the next one starts if that is sooner.
    pub dur_ns: u64,
    /// Least pause between the end of the kernel before and this one's start, for a
    /// kernel that had been launched long before.
    pub gap_ns: u64,
    /// When it is launched.
    pub pace: Pace,
}

impl Kernel {
    /// Blocks in the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// Threads in a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().fold(1u32, |all, &n| all.saturating_mul(n))
    }
}

/// One iteration of a program.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Where it is from.
    pub name: String,
    /// Its kernels, in order. Never empty.
    pub kernels: Vec<Kernel>,
    /// From the start of one iteration to the start of the next, alone.
    pub period_ns: u64,
    /// Iterations in the recording.
    pub recorded: usize,
}

impl Trace {
    /// A built-in trace by its name, else a file (`.csv` or `.csv.gz`).
    ///
    /// # Errors
    /// [`TraceError`] says what is wrong with it.
    pub fn open(name: &str) -> Result<Self, TraceError> {
        if let Some(bytes) = crate::builtin::bytes(name) {
            return Self::read(name, true, bytes);
        }
        let path = Path::new(name);
        if !path.exists() {
            let known = crate::builtin::names().collect();
            return Err(TraceError::Unknown { name: name.into(), known });
        }
        let file = std::fs::File::open(path)
            .map_err(|source| TraceError::Read { file: name.into(), source })?;
        Self::read(name, path.extension().is_some_and(|e| e == "gz"), file)
    }

    fn read(name: &str, packed: bool, from: impl Read) -> Result<Self, TraceError> {
        let mut bytes = Vec::new();
        let read = if packed {
            let unpacked = flate2::read::GzDecoder::new(from);
            unpacked.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes)
        } else {
            from.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes)
        };
        let failed = |source| TraceError::Read { file: name.into(), source };
        read.map_err(failed)?;
        if bytes.len() as u64 > TRACE_BYTES_MAX {
            return Err(TraceError::TooLarge { file: name.into() });
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            failed(std::io::Error::new(std::io::ErrorKind::InvalidData, error.utf8_error()))
        })?;
        Self::parse(name, &text)
    }

    /// From the text of a CSV file; `name` stands for it in messages.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn parse(name: &str, text: &str) -> Result<Self, TraceError> {
        let mut lines = text.lines().enumerate();
        let header = fields(lines.next().map_or("", |(_, line)| line));
        let at = |column| {
            let found = header.iter().position(|h| h.trim() == column);
            found.ok_or(TraceError::Column { file: name.into(), column })
        };
        let columns = Columns {
            start: at("ts_us")?,
            duration: at("dur_us")?,
            name: at("name")?,
            grid: at("grid")?,
            block: at("block")?,
            regs: at("regs")?,
            smem: at("smem")?,
        };
        let mut rows = Vec::new();
        for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            rows.push(row(name, index + 1, &fields(line), &columns)?);
        }
        if rows.is_empty() {
            return Err(TraceError::Empty { file: name.into() });
        }
        Ok(last_iteration(name, rows))
    }

    /// The same kernels without pauses, as a CUDA graph runs them.
    pub fn back_to_back(&self) -> Trace {
        let mut trace = self.clone();
        let mut start_ns = 0;
        for k in &mut trace.kernels {
            (k.start_ns, k.gap_ns, k.pace) = (start_ns, 0, Pace::AfterLaunch(0));
            start_ns += k.dur_ns;
        }
        trace.period_ns = start_ns;
        trace
    }

    /// From the first kernel's start to the last one's end.
    pub fn span_ns(&self) -> u64 {
        self.kernels.last().map_or(0, |k| k.start_ns + k.dur_ns)
    }
}

struct Columns {
    start: usize,
    duration: usize,
    name: usize,
    grid: usize,
    block: usize,
    regs: usize,
    smem: usize,
}

struct Row {
    name: String,
    grid: [u32; 3],
    block: [u32; 3],
    regs: u32,
    smem: u32,
    start_ns: u64,
    end_ns: u64,
}

/// Fields of one line; quoted ones may hold commas, and quotes as `""`.
fn fields(line: &str) -> Vec<String> {
    let (mut all, mut field, mut quoted) = (Vec::new(), String::new(), false);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => all.push(std::mem::take(&mut field)),
            c => field.push(c),
        }
    }
    all.push(field);
    all
}

fn row(file: &str, line: usize, fields: &[String], columns: &Columns) -> Result<Row, TraceError> {
    let wrong = |column, found: &str, expected| TraceError::Field {
        file: file.into(),
        line,
        column,
        found: found.into(),
        expected,
    };
    let get = |index: usize| fields.get(index).map_or("", String::as_str).trim();
    let us = |column, index| {
        let text = get(index);
        let value = text.parse::<f64>().ok().filter(|v| (0.0..1e12).contains(v));
        let expected = "microseconds, 0 or more";
        value.map(|v| (v * 1e3).round() as u64).ok_or_else(|| wrong(column, text, expected))
    };
    // Copies and fills have no shape: they are taken as one small block.
    let count = |column, index, default| match get(index) {
        "" => Ok(default),
        text => text.parse::<u32>().map_err(|_| wrong(column, text, "a whole number")),
    };
    let dims = |column, index| match get(index) {
        "" => Ok([1; 3]),
        text => {
            let mut all = text.split('x').map(|n| n.parse::<u32>().ok().filter(|&n| n > 0));
            match (all.next().flatten(), all.next().flatten(), all.next().flatten(), all.next()) {
                (Some(x), Some(y), Some(z), None) => Ok([x, y, z]),
                _ => Err(wrong(column, text, "three sizes of at least 1, as in 128x1x1")),
            }
        }
    };
    let start_ns = us("ts_us", columns.start)?;
    Ok(Row {
        name: get(columns.name).to_owned(),
        grid: dims("grid", columns.grid)?,
        block: dims("block", columns.block)?,
        regs: count("regs", columns.regs, 16)?,
        smem: count("smem", columns.smem, 0)?,
        start_ns,
        end_ns: start_ns + us("dur_us", columns.duration)?.max(1),
    })
}

/// Rows of the last iteration: the shortest run of kernels that the recording repeats up
/// to its end, its first quarter apart (an iteration that was cold runs other kernels).
fn period(rows: &[Row]) -> usize {
    // Grids may grow from one to the next, as those of a decoder do.
    let same = |a: &Row, b: &Row| a.name == b.name;
    let count = rows.len();
    let back = |i: usize| &rows[count - 1 - i];
    // Knuth, Morris and Pratt's table of borders, from the end.
    let mut border = vec![0; count + 1];
    let mut k = 0;
    for i in 1..count {
        while k > 0 && !same(back(i), back(k)) {
            k = border[k];
        }
        k += usize::from(same(back(i), back(k)));
        border[i + 1] = k;
    }
    let looked_at = (count - count / 4).max(1)..=count;
    let periods = looked_at.map(|length| (length, length - border[length]));
    periods.filter(|(length, period)| *length >= 2 * period).map(|p| p.1).next().unwrap_or(count)
}

fn last_iteration(name: &str, mut rows: Vec<Row>) -> Trace {
    rows.sort_by_key(|r| r.start_ns);
    for i in 1..rows.len() {
        // Kernels that overlap their successors count once.
        rows[i - 1].end_ns = rows[i - 1].end_ns.min(rows[i].start_ns).max(rows[i - 1].start_ns);
    }
    let rows_each = period(&rows);
    let first = rows.len() - rows_each;
    let gap = |i: usize| if i == 0 { 0 } else { rows[i].start_ns - rows[i - 1].end_ns };
    let late = |i: usize| gap(i) > LAUNCH_LATENCY_NS;
    let origin = rows[first].start_ns;
    let mut kernels = Vec::with_capacity(rows_each);
    for i in first..rows.len() {
        let since_last = if i == 0 { 0 } else { rows[i].start_ns - rows[i - 1].start_ns };
        let (gap_ns, pace) = match (late(i), i > 0 && late(i - 1)) {
            // The GPU was waiting: this launch came so long after the last one, or,
            // if the program had been ahead, so long after it saw the GPU done.
            (true, true) => (0, Pace::AfterLaunch(since_last)),
            (true, false) => (0, Pace::AfterEnd(gap(i) - LAUNCH_LATENCY_NS)),
            (false, _) => (gap(i), Pace::AfterLaunch(since_last.min(LAUNCH_HOST_NS))),
        };
        let r = &rows[i];
        kernels.push(Kernel {
            name: r.name.clone(),
            grid: r.grid,
            block: r.block,
            regs: r.regs,
            smem: r.smem,
            start_ns: r.start_ns - origin,
            dur_ns: (r.end_ns - r.start_ns).max(1),
            gap_ns,
            pace,
        });
    }
    let last = &rows[rows.len() - 1];
    let period_ns = last.end_ns - origin + gap(first);
    let recorded = rows.len() / rows_each;
    Trace { name: name.into(), kernels, period_ns: period_ns.max(1), recorded }
}
