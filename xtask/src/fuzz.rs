//! `cargo xtask fuzz TARGET --seconds N`: a fuzz target under libFuzzer, with coverage but no sanitizer. The
//! targets and what they need have a target folder of their own, `target/fuzz`.

use crate::{repository, target_dir};
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Fuzz target to build and run
    #[arg(value_parser = names())]
    target: String,
    /// How long, s; 0 only runs the committed corpus.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// A target, the package that it is in, the feature that it needs, and its committed corpora.
struct Target {
    name: &'static str,
    package: &'static str,
    feature: Option<&'static str>,
    corpora: &'static [&'static str],
}

const OWN: &str = "tests/fuzz";
const KERNELS: &str = "core/rewriter/fuzz";
const TARGETS: [Target; 8] = [
    Target {
        name: "component",
        package: OWN,
        feature: None,
        corpora: &["tests/fuzz/corpus/component"],
    },
    Target {
        name: "config",
        package: OWN,
        feature: Some("daemon"),
        corpora: &["tests/fuzz/corpus/config"],
    },
    Target {
        name: "cubin",
        package: KERNELS,
        feature: None,
        corpora: &["core/rewriter/fuzz/corpus/cubin", "core/rewriter/tests/cubins"],
    },
    Target { name: "declog", package: OWN, feature: None, corpora: &["tests/fuzz/corpus/declog"] },
    Target {
        name: "fatbin",
        package: KERNELS,
        feature: None,
        corpora: &["core/rewriter/fuzz/corpus/fatbin"],
    },
    Target {
        name: "profiles",
        package: OWN,
        feature: Some("daemon"),
        corpora: &["tests/fuzz/corpus/profiles"],
    },
    Target {
        name: "ptx",
        package: KERNELS,
        feature: None,
        corpora: &["core/rewriter/fuzz/corpus/ptx", "core/rewriter/tests/corpus"],
    },
    Target {
        name: "signature",
        package: OWN,
        feature: None,
        corpora: &["tests/fuzz/corpus/signature"],
    },
];

/// What libFuzzer needs of the compiler. A target triple is named, so that build scripts go without.
const FLAGS: [&str; 7] = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
];
/// One execution takes less than a second.
const EXECUTION_S_MAX: u64 = 20;
const MEMORY_MIB_MAX: u64 = 2048;

fn names() -> clap::builder::PossibleValuesParser {
    TARGETS.map(|target| target.name).into()
}

/// Build it, copy its corpus, run it and say what came of it.
pub fn run(args: &Args) -> Result<()> {
    let target = TARGETS.iter().find(|target| target.name == args.target).context("a target")?;
    let root = repository();
    let folder = target_dir().join("fuzz");
    let program = build(target, &root, &folder)?;
    let corpus = folder.join("corpus").join(target.name);
    let artifacts = folder.join("artifacts").join(target.name);
    for folder in [&corpus, &artifacts] {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let mut copied = 0;
    for from in target.corpora {
        for entry in std::fs::read_dir(root.join(from)).with_context(|| (*from).to_owned())? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                std::fs::copy(entry.path(), corpus.join(entry.file_name()))?;
                copied += 1;
            }
        }
    }
    ensure!(copied > 0, "{}: its committed corpus is empty", target.name);
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-timeout={EXECUTION_S_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg("-print_final_stats=1")
        .arg(match args.seconds {
            0 => "-runs=0".to_owned(),
            seconds => format!("-max_total_time={seconds}"),
        })
        .arg(&corpus)
        .stderr(Stdio::piped());
    let mut running = fuzzer.spawn().context("starting the fuzzer")?;
    let said = running.stderr.take().context("its messages")?;
    let mut found = Found::default();
    for line in BufReader::new(said).split(b'\n') {
        let line = line?;
        found.look(&String::from_utf8_lossy(&line));
    }
    let status = running.wait()?;
    println!(
        "{}: {} executions, {} edges covered, {} findings",
        target.name,
        found.executions,
        found.edges,
        u32::from(!status.success())
    );
    if !status.success() {
        bail!("{status}; the input is in {}:\n{}", artifacts.display(), found.words.join("\n"));
    }
    Ok(())
}

fn build(target: &Target, root: &Path, folder: &Path) -> Result<PathBuf> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = crate::build::cargo();
    cargo
        .current_dir(root.join(target.package))
        .args(["build", "--quiet", "--release", "--target", &triple, "--bin", target.name])
        .args(target.feature.iter().flat_map(|feature| ["--features", feature]))
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS.join(" "))
        .env("CARGO_TARGET_DIR", folder);
    crate::build::succeed(&mut cargo)?;
    Ok(folder.join(triple).join("release").join(target.name))
}

/// What libFuzzer says, as far as it is wanted.
#[derive(Default)]
struct Found {
    executions: u64,
    edges: u64,
    /// The last lines, for a finding.
    words: Vec<String>,
}

impl Found {
    fn look(&mut self, line: &str) {
        const WORDS_MAX: usize = 40;
        let number = |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok());
        if let Some(rest) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = number(rest).unwrap_or(self.executions);
        }
        if let Some((_, rest)) = line.split_once(" cov: ") {
            self.edges = number(rest).unwrap_or(self.edges);
        }
        if self.words.len() == WORDS_MAX {
            self.words.remove(0);
        }
        self.words.push(line.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_says_is_read() {
        let mut found = Found::default();
        for line in [
            "#2\tINITED cov: 11 ft: 12 corp: 1/1b exec/s: 0 rss: 26Mb",
            "#1024\tpulse  cov: 1307 ft: 2503 corp: 233/9Kb lim: 68 exec/s: 512 rss: 39Mb",
            "stat::number_of_executed_units: 184267",
            "stat::peak_rss_mb:              402",
        ] {
            found.look(line);
        }
        assert_eq!((found.executions, found.edges, found.words.len()), (184_267, 1_307, 4));
    }

    #[test]
    fn every_target_has_a_committed_corpus_and_they_are_small() {
        let mut bytes = 0;
        for target in &TARGETS {
            assert!(
                repository().join(target.package).join("Cargo.toml").is_file(),
                "{}",
                target.name
            );
            let files = target
                .corpora
                .iter()
                .flat_map(|from| std::fs::read_dir(repository().join(from)).unwrap());
            let sizes: Vec<u64> =
                files.map(|file| file.unwrap().metadata().unwrap().len()).collect();
            assert!(!sizes.is_empty(), "{}", target.name);
            if target.package == OWN {
                bytes += sizes.iter().sum::<u64>();
            }
        }
        assert!(bytes < 200 << 10, "{bytes} bytes");
    }
}
