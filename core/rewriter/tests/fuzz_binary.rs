//! The fuzz targets `fatbin` and `cubin` on stable Rust: the kept corpus, then seeded
//! mutations of it, for 2 s each. A failure
//! writes its input to the temporary folder and says where.

#[path = "../fuzz/bodies/binary.rs"]
mod binary;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time of one execution: far more than any takes, far less than a hang.
const EXECUTION_MAX: Duration = Duration::from_secs(10);

/// How long changed inputs are tried; `cargo xtask fuzz` does it for longer.
const MUTATED_FOR: Duration = Duration::from_secs(2);

/// Marsaglia's xorshift, so that a run can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

fn files(folder: &str, into: &mut Vec<Vec<u8>>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths.retain(|p| p.extension().is_none_or(|e| e != "ptx" && e != "py" && e != "golden"));
    into.extend(paths.iter().map(|p| fs::read(p).unwrap()));
}

/// One to eight small changes, most often of the kind that headers and lengths notice.
fn mutate(data: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    const VALUES: [u64; 12] =
        [0, 1, 2, 4, 8, 16, 0x7f, 0xff, 0xffff, u32::MAX as u64, u64::MAX, i64::MAX as u64];
    for _ in 0..=random.below(8) {
        if data.is_empty() {
            return;
        }
        // Headers of sections and segments lie last: half of the changes go there.
        let tail = data.len().min(4096);
        let at = match random.below(2) {
            0 => data.len() - tail + random.below(tail),
            _ => random.below(data.len()),
        };
        match random.below(8) {
            0 | 1 => data[at] ^= 1 << random.below(8),
            2 => data[at] = random.next() as u8,
            3 | 4 => {
                let bytes = [1, 2, 4, 8][random.below(4)];
                let value = VALUES[random.below(VALUES.len())].wrapping_add(random.below(3) as u64);
                let at = at & !(bytes - 1);
                let end = data.len().min(at + bytes);
                data[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            5 => {
                let from = random.below(data.len());
                let count = random.below(64).min(data.len() - at.max(from));
                data.copy_within(from..from + count, at);
            }
            6 if !other.is_empty() => {
                let from = random.below(other.len());
                let count = random.below(256).min(other.len() - from).min(data.len() - at);
                data[at..at + count].copy_from_slice(&other[from..from + count]);
            }
            7 if random.below(16) == 0 => data.truncate(at),
            _ => {}
        }
    }
}

fn run(name: &str, seeds: &[Vec<u8>], target: fn(&[u8])) {
    let execute = |data: &[u8], what: &str| {
        let begin = Instant::now();
        let failed = catch_unwind(AssertUnwindSafe(|| target(data))).is_err();
        if failed || begin.elapsed() > EXECUTION_MAX {
            let path = std::env::temp_dir().join(format!("fuzz-{name}-{}", std::process::id()));
            fs::write(&path, data).unwrap();
            panic!("{name}: {what} failed or hung; input in {}", path.display());
        }
    };
    assert!(!seeds.is_empty());
    for seed in seeds {
        execute(seed, "a seed");
    }
    let (mut random, mut executions) = (Random(0x9e37_79b9_7f4a_7c15), 0u64);
    let end = Instant::now() + MUTATED_FOR;
    while Instant::now() < end {
        let mut data = seeds[random.below(seeds.len())].clone();
        let other = &seeds[random.below(seeds.len())];
        mutate(&mut data, other, &mut random);
        execute(&data, "a mutation");
        executions += 1;
    }
    println!("fuzz {name}: {executions} inputs in {MUTATED_FOR:?}");
}

#[test]
fn cubin() {
    let mut seeds = Vec::new();
    files("tests/cubins", &mut seeds);
    files("fuzz/corpus/cubin", &mut seeds);
    run("cubin", &seeds, binary::cubin);
}

#[test]
fn fatbin() {
    let mut seeds = Vec::new();
    files("fuzz/corpus/fatbin", &mut seeds);
    run("fatbin", &seeds, binary::fatbin);
}
