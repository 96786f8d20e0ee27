//! Kernel traces: one row a kernel, as a profiler recorded them.
//!
//! A recording holds one or more iterations (requests, training steps). What is
//! replayed is its last one: the first may have been cold. A profiler makes launches
//! longer; where the file says what the program takes without one, [`Trace::timed`]
//! makes it so.

mod alone;
mod csv;
mod iteration;

pub use alone::Alone;

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
    Read { file: String, source: std::io::Error },
    /// Neither a file nor a name.
    #[error("trace {name}: there is no such file, and no built-in trace of that name; built-in are {}", .known.join(", "))]
    Unknown {
        name: String,
        /// What could have been given.
        known: Vec<&'static str>,
    },
    /// A larger file than any trace.
    #[error("trace {file}: more than {TRACE_BYTES_MAX} bytes unpacked")]
    TooLarge { file: String },
    /// A column that is needed is not there.
    #[error(
        "trace {file}: no column `{column}`; expected a header line with ts_us,dur_us,name,grid,block,regs,smem"
    )]
    Column { file: String, column: &'static str },
    /// A field that does not make sense.
    #[error("trace {file}, line {line}: `{column}` is `{found}`, expected {expected}")]
    Field {
        file: String,
        /// Counted from 1, the header included.
        line: usize,
        column: &'static str,
        found: String,
        expected: &'static str,
    },
    /// A header and nothing else.
    #[error("trace {file}: no kernels; expected at least one row below the header")]
    Empty { file: String },
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
    pub name: String,
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
    /// When it is launched; of a launch of several kernels, the first one's counts.
    pub pace: Pace,
    /// Of which launch of the iteration it is: a CUDA graph launches many at once.
    pub launch: u32,
}

impl Kernel {
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    pub fn threads(&self) -> u32 {
        self.block.iter().fold(1u32, |all, &n| all.saturating_mul(n))
    }

    /// Blocks that an SM of compute capability 9.0 holds at once, at least one.
    pub fn blocks_per_sm(&self) -> u32 {
        let threads = self.threads().max(1).next_multiple_of(32);
        let by_registers = 65_536 / threads.saturating_mul(self.regs.next_multiple_of(8)).max(1);
        let by_shared = 227 * 1024 / self.smem.saturating_add(1024);
        (2048 / threads).min(by_registers).min(by_shared).clamp(1, 32)
    }
}

/// One iteration of a program.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Name of the built-in trace or of the file.
    pub name: String,
    /// Kernels in the order of their launches; never empty.
    pub kernels: Vec<Kernel>,
    /// From the start of one iteration to the start of the next, alone.
    pub period_ns: u64,
    /// Iterations in the recording.
    pub recorded: usize,
    /// From the begin of an iteration to its first launch.
    pub lead_ns: u64,
    /// What it takes alone without a profiler, `[plain, under MPS]`.
    pub alone: [Option<Alone>; 2],
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
        let text = csv::read(name, text)?;
        Ok(iteration::last(name, text.rows, text.alone))
    }

    /// Whether the iteration was recorded as one launch.
    pub fn is_graph(&self) -> bool {
        self.kernels.len() > 1 && self.kernels.iter().all(|k| k.launch == 0)
    }

    /// The same kernels in one launch, without pauses, as a CUDA graph runs them; one that
    /// was recorded so keeps its own.
    pub fn as_graph(&self) -> Trace {
        let mut trace = self.clone();
        if self.is_graph() {
            return trace;
        }
        let mut start_ns = 0;
        for k in &mut trace.kernels {
            (k.start_ns, k.gap_ns, k.pace, k.launch) = (start_ns, 0, Pace::AfterLaunch(0), 0);
            start_ns += k.dur_ns;
        }
        // What was timed was not this.
        (trace.period_ns, trace.lead_ns, trace.alone) = (start_ns, 0, [None; 2]);
        trace
    }

    /// From the first kernel's start to the last one's end.
    pub fn span_ns(&self) -> u64 {
        self.kernels.last().map_or(0, |k| k.start_ns + k.dur_ns)
    }
}
