//! `cargo xtask fuzz TARGET --seconds N`: a fuzz target under libFuzzer, with coverage but no sanitizer. The
//! targets and what they need have a target folder of their own, `target/fuzz`.

use crate::{repository, target_dir};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// The target to run.
    #[arg(
        value_parser = names(),
        required_unless_present_any = ["all", "bundle"],
        conflicts_with_all = ["all", "bundle"],
    )]
    target: Option<String>,
    /// Run all targets, one after the other; fails at the end if any failed.
    #[arg(long, conflicts_with = "bundle")]
    all: bool,
    /// Time for each target, s; 0 only runs the committed corpus.
    #[arg(long, default_value_t = 60, conflicts_with = "bundle")]
    seconds: u64,
    /// Build all targets and put their programs, their corpora and run.sh into this folder, to be run on a machine
    /// without Rust. Replaced if it is there.
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
}

/// The package that a fuzz target is built in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Package {
    Own,
    /// `tests/fuzz` with the daemon, and so wasmtime, whose build takes minutes.
    Daemon,
    Kernels,
}

impl Package {
    fn folder(self) -> &'static str {
        match self {
            Package::Own | Package::Daemon => "tests/fuzz",
            Package::Kernels => "core/rewriter/fuzz",
        }
    }

    fn features(self) -> &'static [&'static str] {
        match self {
            Package::Daemon => &["--features", "daemon"],
            Package::Own | Package::Kernels => &[],
        }
    }
}

/// A target, and committed inputs beside those of its own folder.
struct Target {
    name: &'static str,
    package: Package,
    more_inputs: Option<&'static str>,
}

const fn target(name: &'static str, package: Package) -> Target {
    Target { name, package, more_inputs: None }
}

const TARGETS: [Target; 13] = [
    target("admin", Package::Daemon),
    target("component", Package::Own),
    target("config", Package::Daemon),
    Target { more_inputs: Some("core/rewriter/tests/cubins"), ..target("cubin", Package::Kernels) },
    target("decision-log", Package::Own),
    target("disk-cache", Package::Own),
    target("dispatch", Package::Daemon),
    target("fatbin", Package::Kernels),
    target("marks", Package::Daemon),
    target("profiles", Package::Daemon),
    Target { more_inputs: Some("core/rewriter/tests/corpus"), ..target("ptx", Package::Kernels) },
    target("registration", Package::Daemon),
    target("signature", Package::Own),
];

impl Target {
    /// Folders with committed inputs.
    fn corpora(&self) -> Vec<PathBuf> {
        let own = Path::new(self.package.folder()).join("corpus").join(self.name);
        let all = std::iter::once(own).chain(self.more_inputs.map(PathBuf::from));
        all.map(|folder| repository().join(folder)).collect()
    }

    /// Copy the committed inputs to a folder.
    fn copy_corpus(&self, to: &Path) -> Result<()> {
        fs::create_dir_all(to).with_context(|| to.display().to_string())?;
        let mut copied = 0;
        for from in self.corpora() {
            for entry in fs::read_dir(&from).with_context(|| from.display().to_string())? {
                let entry = entry?;
                if entry.file_type()?.is_file() {
                    fs::copy(entry.path(), to.join(entry.file_name()))?;
                    copied += 1;
                }
            }
        }
        ensure!(copied > 0, "{}: its committed corpus is empty", self.name);
        Ok(())
    }

    /// Builds the target; returns the path of its program.
    fn build(&self) -> Result<PathBuf> {
        let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut cargo = crate::build::cargo();
        cargo
            .current_dir(repository().join(self.package.folder()))
            .args(["build", "-q", "--release", "--target", &triple, "--bin", self.name])
            .args(self.package.features())
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", FLAGS.join(" "))
            .env("CARGO_TARGET_DIR", folder());
        crate::build::succeed(&mut cargo)?;
        Ok(folder().join(triple).join("release").join(self.name))
    }
}

/// Targets whose build takes three minutes on 2 CPUs: without the daemon.
pub fn light() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().filter(|t| t.package != Package::Daemon).map(|t| t.name)
}

/// Where all of it is built and run.
fn folder() -> PathBuf {
    target_dir().join("fuzz")
}

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

/// Run one target or all, or collect them.
pub fn run(args: &Args) -> Result<()> {
    if let Some(out) = &args.bundle {
        return bundle(out);
    }
    let asked = |target: &&Target| args.all || args.target.as_deref() == Some(target.name);
    let mut failed = Vec::new();
    for target in TARGETS.iter().filter(asked) {
        if let Err(error) = run_one(target, args.seconds) {
            eprintln!("{}: {error:#}", target.name);
            failed.push(target.name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Build it, copy its corpus, run it and say what came of it.
fn run_one(target: &Target, seconds: u64) -> Result<()> {
    let program = target.build()?;
    let corpus = folder().join("corpus").join(target.name);
    target.copy_corpus(&corpus)?;
    let artifacts = folder().join("artifacts").join(target.name);
    fs::create_dir_all(&artifacts).with_context(|| artifacts.display().to_string())?;
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-timeout={EXECUTION_S_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg("-print_final_stats=1")
        .arg(match seconds {
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

/// All of them, for a machine without Rust.
fn bundle(out: &Path) -> Result<()> {
    // What may be carried at once, with some room for other things.
    const BYTES_MAX: u64 = 55 << 20;
    let is_bundle = out.join("run.sh").is_file();
    let is_empty = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    ensure!(
        is_bundle || is_empty || !out.exists(),
        "{} is there and no bundle: name a folder that is not there",
        out.display()
    );
    if is_bundle {
        fs::remove_dir_all(out).with_context(|| out.display().to_string())?;
    }
    fs::create_dir_all(out.join("bin")).with_context(|| out.display().to_string())?;
    let mut bytes = 0;
    for target in &TARGETS {
        let program = target.build()?;
        let carried = out.join("bin").join(target.name);
        let mut strip = Command::new("strip");
        crate::build::succeed(strip.arg("-o").arg(&carried).arg(&program))?;
        crate::build::succeed(Command::new("gzip").arg(&carried))?;
        target.copy_corpus(&out.join("corpus").join(target.name))?;
        bytes += fs::metadata(carried.with_extension("gz"))?.len();
    }
    fs::copy(repository().join("tests/fuzz/run.sh"), out.join("run.sh"))?;
    ensure!(bytes <= BYTES_MAX, "its programs have {bytes} bytes, more than {BYTES_MAX}");
    println!("{}: {} targets, {:.1} MiB", out.display(), TARGETS.len(), bytes as f64 / 1048576.0);
    Ok(())
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
            let manifest = repository().join(target.package.folder()).join("Cargo.toml");
            let manifest = fs::read_to_string(manifest).unwrap();
            assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{}", target.name);
            let corpora = target.corpora();
            let files = corpora.iter().flat_map(|from| fs::read_dir(from).unwrap());
            let sizes: Vec<u64> =
                files.map(|file| file.unwrap().metadata().unwrap().len()).collect();
            assert!(!sizes.is_empty(), "{}", target.name);
            if target.package != Package::Kernels {
                bytes += sizes.iter().sum::<u64>();
            }
        }
        assert!(bytes < 200 << 10, "{bytes} bytes");
    }
}
