//! The fuzz targets on the stable compiler: the kept corpus as it is, and changed at
//! random, the same way every time.
#![allow(missing_docs)]

mod common;

#[path = "../../../softcuda/ptx/src/any_text/marks.rs"]
mod marks;
#[path = "../fuzz/bodies/ptx.rs"]
mod ptx;

use common::Random;
use marks::MARKS;
use std::path::Path;
use std::time::{Duration, Instant};

/// Inputs of each target.
const RUNS: usize = 3000;
/// Longer inputs are cut off.
const INPUT_BYTES_MAX: usize = 1 << 16;

/// A target: its name, what it does, where its corpus lies, and words of its inputs besides [`MARKS`].
struct Target {
    name: &'static str,
    body: fn(&[u8]),
    corpora: &'static [&'static str],
    words: &'static [&'static str],
}

const TARGETS: [Target; 1] = [Target {
    name: "ptx",
    body: ptx::ptx,
    corpora: &["fuzz/corpus/ptx", "tests/corpus"],
    words: &[
        ".entry",
        ".func",
        ".param .u64 ",
        ".param .align 16 .b8 x[",
        ".version 5.0",
        ".visible ",
        ".global .b8 $s[2] = {1, 2};",
        ".extern ",
        ".alias a, b;",
        ".reqnctapercluster 2, 2",
        ".explicitcluster",
        ".pragma \"x\";",
        ".loc 1 2 3",
        ".section .x {",
        "@@DWARF",
        "# 1 \"x\"\n",
        "%ctaid.x",
        "%nctaid",
        "%envreg2",
        "%tally_",
        "tally9",
        "griddepcontrol",
        "call f, ();",
        "vprintf",
        "mov.u64 %rd1, $s;",
        "_param_tally",
        "ret;",
        "=",
        "<",
        ">",
    ],
}];

fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let mut paths = Vec::new();
    for corpus in target.corpora {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(corpus);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
        paths.extend(files.map(|file| file.unwrap().path()));
    }
    paths.sort();
    assert!(!paths.is_empty(), "{}: no corpus", target.name);
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Some of the bytes from `at` on: often few, sometimes many.
fn span(input: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let at = random.below(input.len() + 1);
    let length = match random.below(4) {
        0 => random.below(input.len() + 1 - at),
        _ => random.below(24).min(input.len() - at),
    };
    at..at + length
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], words: &[&str], random: &mut Random) {
    for _ in 0..1 + random.below(6) {
        let range = span(input, random);
        let at = range.start;
        match random.below(8) {
            0 => drop(input.drain(range)),
            1 => {
                let copy = input[range].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy);
            }
            2 | 3 => {
                let word = words[random.below(words.len())].bytes();
                input.splice(at..at, word);
            }
            4 => {
                let other = &seeds[random.below(seeds.len())];
                let piece = other[span(other, random)].to_vec();
                input.splice(range, piece);
            }
            5 => input.truncate(at.max(1)),
            6 if at < input.len() => input[at] ^= 1 << random.below(7),
            _ if at < input.len() => {
                let any = b"0123456789abcxyz%$_.;,:(){}[]<>@!#\" \n\\/*+-=";
                input[at] = any[random.below(any.len())];
            }
            _ => {}
        }
    }
    input.truncate(INPUT_BYTES_MAX);
}

fn fuzz(target: &Target) {
    let (seeds, words) = (seeds(target), [target.words, &MARKS].concat());
    seeds.iter().for_each(|seed| (target.body)(seed));
    let (mut runs, mut slowest) = (0, Duration::ZERO);
    while runs < RUNS {
        runs += 1;
        let mut random = Random::new(runs as u64);
        let mut input = seeds[random.below(seeds.len())].clone();
        mutate(&mut input, &seeds, &words, &mut random);
        let start = Instant::now();
        let done = std::panic::catch_unwind(|| (target.body)(&input));
        slowest = slowest.max(start.elapsed());
        if done.is_err() {
            let at = std::env::temp_dir().join(format!("tally-fuzz-{}-{runs}", target.name));
            std::fs::write(&at, &input).unwrap();
            panic!("{}: input {runs}, kept as {}", target.name, at.display());
        }
    }
    println!("fuzz {}: {runs} inputs, slowest {slowest:?}", target.name);
}

#[test]
fn targets_hold_for_changed_inputs() {
    TARGETS.iter().for_each(fuzz);
}
