//! What the programs share: random numbers, checksums and a start at a common moment.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the file that starts everybody is looked for.
const START_POLL: Duration = Duration::from_millis(2);
/// How long to wait for it.
const START_WAIT_MAX: Duration = Duration::from_secs(300);

/// A small generator (splitmix64): the same numbers for the same seed everywhere.
pub struct Random(u64);

impl Random {
    /// A generator of the sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 53 random bits as a number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `count` numbers in [-`limit`, `limit`).
    pub fn fill(&mut self, count: usize, limit: f32) -> Vec<f32> {
        (0..count).map(|_| (self.uniform() * 2.0 - 1.0) as f32 * limit).collect()
    }
}

/// FNV-1a over the bits of numbers, as hexadecimal digits.
pub fn checksum(values: &[f32]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in values.iter().flat_map(|v| v.to_bits().to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

/// When and how a job begins.
#[derive(clap::Args, Debug)]
pub struct Start {
    /// Write this file when ready to begin.
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Begin when this file is there.
    #[arg(long, value_name = "FILE")]
    go_file: Option<PathBuf>,
}

impl Start {
    /// Tells that all is ready and waits for the start.
    ///
    /// # Errors
    /// The ready file cannot be written, or the go file never came.
    pub fn wait(&self) -> Result<()> {
        if let Some(path) = &self.ready_file {
            write(path)?;
        }
        let Some(path) = &self.go_file else { return Ok(()) };
        let began = Instant::now();
        while !path.exists() {
            ensure!(began.elapsed() < START_WAIT_MAX, "{} never came", path.display());
            std::thread::sleep(START_POLL);
        }
        Ok(())
    }
}

fn write(path: &Path) -> Result<()> {
    std::fs::write(path, "ready\n").with_context(|| format!("writing {}", path.display()))
}
