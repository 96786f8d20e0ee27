//! `cargo xtask test`: everything that can be checked without a GPU.
//!
//! Builds first, because the tests across processes run the real programs. Each
//! group's own output is passed on; what was left out is named, and the last line is
//! the sum of all.
//!
//! With `--all` also what takes long and seldom fails: the rings under loom, other languages. Lints compile every
//! dependency once more, and `differential`, `ab`, `traps`, `fuzz` and `reload` look longer at what other groups run
//! shortly already: they must be asked for, as the workflows do. `litmus` does more when it is named.

use crate::build::{self, cargo, line};
use crate::left_out::{self, has_systemd, is_root};
use crate::test_count::Count;
use crate::{repository, target_dir};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// The package of the tests across processes.
const E2E_PACKAGE: &str = "tally-tests";

/// What [`Group::Cuda`] needs of NVIDIA: the assembler, and `cuda.h` beside its other headers. `.ci/run` sets both.
pub const PTXAS: &str = "TALLY_PTXAS";
pub const CUDA_HEADER: &str = "TALLY_CUDA_HEADER";

/// Time for each target of [`Group::Fuzz`] by default, s.
const FUZZ_S: u32 = 20;

/// What runs with `--all`. Each test of the workspace is in one of these.
const ALL: [Group; 11] = [
    Group::Fmt,
    Group::Words,
    Group::References,
    Group::Unit,
    Group::Policies,
    Group::Python,
    Group::Loom,
    Group::Cuda,
    Group::Languages,
    Group::E2e,
    Group::Litmus,
];
/// What takes long and seldom fails: not without it.
const LONG: [Group; 2] = [Group::Loom, Group::Languages];

/// Kinds of checks, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// Formatting of all three workspaces.
    Fmt,
    /// Clippy over all three workspaces, warnings denied (only when named).
    Clippy,
    /// The language of code and documents: doc comments, glossary, lengths, links, commands.
    Words,
    /// The documents in docs/reference are what the code says.
    References,
    /// Unit and integration tests of the crates, and their documentation's examples.
    Unit,
    /// The policies' own tests, on the host.
    Policies,
    /// The GPU suite's own tests: its arithmetic and parsing, without a GPU.
    Python,
    /// The shared-memory rings under loom: every interleaving (with `--all`).
    Loom,
    /// NVIDIA's assembler takes what the PTX rewriter makes, left out without `TALLY_PTXAS`; no function of NVIDIA's
    /// headers that uses a stream is missing in the shim, left out without `TALLY_CUDA_HEADER`.
    Cuda,
    /// Policies in every language whose tools are here, and the tutorial (with `--all`).
    Languages,
    /// Across processes, on the software device.
    E2e,
    /// Small programs made from seeds, bare and under Tally: same values, no hangs. Fewer of them, and the named ones
    /// under some setups only, unless it is named.
    Litmus,
    /// Transformed kernels against themselves in the interpreter, in more ways (only when named).
    Differential,
    /// The statistics of A/B tests against simulated experiments (only when named).
    Ab,
    /// A/B tests of policies that harm programs, each a hundred times, across processes (only when named).
    Traps,
    /// The fuzz targets that do without the daemon, 20 s each under libFuzzer (only when named).
    Fuzz,
    /// Ten thousand changes of policy while programs launch (only when named).
    Reload,
}

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Only this group (by default those that say nothing else) ...
    #[arg(value_enum)]
    group: Option<Group>,
    /// ... and of it only the tests whose name contains this (`litmus`: setups, `fuzz`: targets). None is an error.
    #[arg(value_name = "NAME")]
    filter: Option<String>,
    /// All groups but those that must be named: what CI runs.
    #[arg(long, conflicts_with = "group")]
    all: bool,
    /// Use what is built already.
    #[arg(long)]
    no_build: bool,
    /// `differential`: ways to transform each kernel (24 by default).
    #[arg(long, value_name = "N")]
    schedules: Option<u32>,
    /// `ab`: simulated experiments without an effect, of each kind of noise (1000 by default).
    #[arg(long, value_name = "N")]
    experiments: Option<u32>,
    /// `fuzz`: time for each target, s (20 by default).
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// `reload`: changes of policy (10000 by default); `traps`: tests of each trap (100 by default).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// `ab`, `traps`: file that gets the figures (docs/results/ab.json by default, if nothing failed).
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl Args {
    /// An option of one group means nothing to the others.
    fn check(&self) -> Result<()> {
        use Group::{Ab, Clippy, Fmt, Languages, Reload, Traps};
        if let (Some(group @ (Fmt | Clippy | Languages | Ab | Traps | Reload)), Some(name)) =
            (self.group, &self.filter)
        {
            anyhow::bail!("`test {}` runs as a whole and takes no NAME ({name:?})", group.name());
        }
        let only = |given: bool, option: &str, groups: &[Group]| {
            let names: Vec<String> =
                groups.iter().map(|g| format!("`test {}`", g.name())).collect();
            let is_right = self.group.is_some_and(|group| groups.contains(&group));
            ensure!(!given || is_right, "{option} goes with {} only", names.join(" and "));
            Ok(())
        };
        only(self.experiments.is_some(), "--experiments", &[Ab])?;
        only(self.schedules.is_some(), "--schedules", &[Group::Differential])?;
        only(self.seconds.is_some(), "--seconds", &[Group::Fuzz])?;
        only(self.count.is_some(), "--count", &[Traps, Reload])?;
        only(self.out.is_some(), "--out", &[Ab, Traps])
    }

    /// Runners succeed if a filter matches nothing: that is an error here.
    fn ensure_any(&self, ran: Count) -> Result<()> {
        let group = self.group.map_or_else(String::new, |group| format!(" of `{}`", group.name()));
        let why = self.filter.as_ref().map_or_else(String::new, |name| {
            format!(": none has {name:?} in its name (NAME is part of a test's name, not a file's)")
        });
        ensure!(ran.passed + ran.failed > 0, "no test{group} ran{why}");
        Ok(())
    }
}

impl Group {
    /// As it is written on the command line.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Run them and sum up.
pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    if args.group == Some(Group::Ab) {
        return crate::ab::validate(args.experiments, args.out.as_deref());
    }
    let groups: Vec<Group> = match args.group {
        Some(group) => vec![group],
        None => ALL.into_iter().filter(|group| args.all || !LONG.contains(group)).collect(),
    };
    let builds = groups.iter().any(|g| {
        use Group::{E2e, Languages, Litmus, References, Reload, Traps, Unit};
        matches!(g, References | Unit | Languages | E2e | Litmus | Traps | Reload)
    });
    if builds && !args.no_build {
        build::everything()?;
    }
    if args.group == Some(Group::Traps) {
        return crate::ab::trapped_across_processes(args.count, args.out.as_deref());
    }
    if args.group == Some(Group::Reload) {
        return crate::reload::run(args.count);
    }
    let mut sum = Count::default();
    let (mut times, mut failed, mut not_run) = (Vec::new(), Vec::new(), Vec::new());
    for group in groups {
        let began = Instant::now();
        not_run.extend(left_out::of(group));
        let own: Option<(Count, &str)> = match group {
            Group::Words => Some((crate::words::run(args.filter.as_deref())?, "words")),
            Group::References => {
                Some((crate::references::check(args.filter.as_deref())?, "references"))
            }
            _ => None,
        };
        if let Some((count, name)) = own {
            if count.failed > 0 {
                failed.push(format!("failed: cargo xtask test {name}"));
            }
            sum += count;
        }
        for mut command in commands(group, args)? {
            let count = counted(&mut command)?;
            if count.failed > 0 {
                failed.push(format!("failed, in {:?}: {}", command_dir(&command), line(&command)));
            }
            sum += count;
        }
        times.push(format!("{group:?} {:.0} s", began.elapsed().as_secs_f64()).to_lowercase());
    }
    eprintln!("\n{}", times.join(", "));
    not_run.iter().for_each(|what| eprintln!("not run: {what}"));
    failed.iter().for_each(|command| eprintln!("{command}"));
    println!("{} passed, {} failed", sum.passed, sum.failed);
    build::flush();
    if sum.failed > 0 {
        std::process::exit(1);
    }
    args.ensure_any(sum)
}

fn commands(group: Group, args: &Args) -> Result<Vec<Command>> {
    let filter = args.filter.as_deref();
    let root = repository();
    let guests = [root.join("policies"), root.join("tests/policies")];
    let guest_target = target_dir().join("guests");
    let mut commands = Vec::new();
    match group {
        Group::Fmt => {
            commands.push(with(cargo(), &["fmt", "--all", "--check"]));
            for workspace in &guests {
                commands.push(with(cargo_in(workspace), &["fmt", "--all", "--check"]));
            }
        }
        Group::Clippy => {
            let all = ["clippy", "--workspace", "--all-targets", "--release", "-q"];
            let deny = ["--", "-Dwarnings"];
            commands.push(with(with(cargo(), &all), &deny));
            for workspace in &guests {
                let mut clippy = with(with(cargo_in(workspace), &all), &deny);
                clippy.env("CARGO_TARGET_DIR", &guest_target);
                commands.push(clippy);
            }
        }
        Group::Unit => {
            commands.push(runner(false, filter)?);
            if has_systemd()
                && filter.is_none_or(|filter| "systemd_understands_the_unit".contains(filter))
            {
                let test = [
                    "test",
                    "--release",
                    // Of one package alone everything would be built again, with its features.
                    "--workspace",
                    "--test",
                    "systemd",
                    "--",
                    "--ignored",
                ];
                commands.push(with(cargo(), &test));
            }
            // cargo-nextest leaves these out.
            if filter.is_none() {
                commands.push(with(cargo(), &["test", "--release", "--workspace", "--doc"]));
            }
        }
        Group::Policies => {
            let mut test = with(cargo_in(&guests[0]), &["test", "--workspace"]);
            test.env("CARGO_TARGET_DIR", &guest_target).args(filter);
            commands.push(test);
        }
        Group::Python => commands.extend(python(&root.join("bench/gpu"), filter)),
        Group::Loom => {
            let mut loom =
                with(cargo(), &["test", "--release", "-p", "tally-ipc", "--test", "loom"]);
            // Its own folder: the flag is part of every crate's identity.
            loom.env("CARGO_TARGET_DIR", target_dir().join("loom"))
                .env("RUSTFLAGS", "--cfg loom")
                .args(filter);
            if root.join("core/ipc/tests/loom.rs").is_file() {
                commands.push(loom);
            }
        }
        Group::Cuda => {
            for (variable, test) in [(PTXAS, "ptxas"), (CUDA_HEADER, "headers")] {
                if let Some(path) = std::env::var_os(variable) {
                    let mut test = kernels_tests(&[test], filter);
                    // Tests run in their crate's folder.
                    test.arg("--ignored").env(variable, std::path::absolute(path)?);
                    commands.push(test);
                }
            }
        }
        // All of them are named as left out then.
        Group::Languages if !crate::languages::any() => {}
        Group::Languages => {
            let mut languages = Command::new(build::release_dir().join("xtask"));
            languages.current_dir(&root).env("CARGO_TARGET_DIR", target_dir());
            commands.push(with(languages, &["languages"]));
        }
        Group::E2e => {
            commands.push(runner(true, filter)?);
            commands.extend(crate::preload::commands(filter)?);
        }
        Group::Litmus => {
            let is_named = args.group.is_some();
            let options = if is_named { crate::litmus::TEST } else { crate::litmus::SHORT };
            let mut campaign = with(crate::litmus::campaign(), options);
            // Only setups with that in their names.
            campaign.args(filter.iter().flat_map(|name| ["--setup", name]));
            commands.push(campaign);
        }
        Group::Differential => {
            let mut test = kernels_tests(&["differential"], filter);
            let schedules = args.schedules.map(|n| n.to_string());
            test.envs(schedules.map(|n| ("TALLY_DIFFERENTIAL_SCHEDULES", n)));
            commands.push(test);
        }
        // No test programs: see `run`.
        Group::Words | Group::References | Group::Ab | Group::Traps | Group::Reload => {}
        Group::Fuzz => {
            let seconds = args.seconds.unwrap_or(FUZZ_S).to_string();
            let asked = |name: &&str| filter.is_none_or(|filter| name.contains(filter));
            for target in crate::fuzz::light().filter(asked) {
                let mut fuzzer = Command::new(build::release_dir().join("xtask"));
                fuzzer.current_dir(&root).env("CARGO_TARGET_DIR", target_dir());
                commands.push(with(fuzzer, &["fuzz", target, "--seconds", &seconds]));
            }
        }
    }
    Ok(commands)
}

/// Integration tests of `tally-rewriter`, whose figures are shown: found by their names in
/// the whole workspace, so that what is built already serves (see [`build`]).
fn kernels_tests(names: &[&str], filter: Option<&str>) -> Command {
    let mut test = with(cargo(), &["test", "--release", "--workspace"]);
    for name in names {
        test.arg("--test").arg(name);
    }
    // With one thread a test's name would stand in front of its figures.
    test.args(filter).args(["--", "--nocapture", "--test-threads=2"]);
    test
}

/// Folder that a command runs in, for messages.
fn command_dir(command: &Command) -> &Path {
    let dir = command.get_current_dir().unwrap_or(Path::new("."));
    dir.strip_prefix(repository()).ok().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(dir)
}

/// The tests across processes, or all others, by cargo-nextest if it is there,
/// else by Cargo. Always of the whole workspace: see [`build`].
fn runner(across_processes: bool, filter: Option<&str>) -> Result<Command> {
    let nextest = cargo()
        .args(["nextest", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|done| done.success());
    let mut command = cargo();
    if nextest {
        let not = if across_processes { "" } else { "not " };
        command.args(["nextest", "run", "--release", "--workspace", "--no-fail-fast"]);
        command.arg("--no-tests=pass").arg("--config-file");
        command.arg(repository().join("tests/nextest.toml"));
        if !across_processes {
            // Many wait for a clock.
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            command.arg("--test-threads").arg((cpus + 1).to_string());
        }
        let floods = if across_processes || is_root() { "" } else { " and not binary(floods)" };
        command.arg("-E").arg(format!("{not}package({E2E_PACKAGE}){floods}")).args(filter);
        return Ok(command);
    }
    command.args(["test", "--release", "--workspace", "--no-fail-fast"]);
    if !across_processes {
        command.args(["--lib", "--bins"]);
    }
    for target in test_targets(across_processes)? {
        command.arg("--test").arg(target);
    }
    // The tests across processes need a CPU each.
    command.args(filter).args(["--", "--test-threads=2"]);
    Ok(command)
}

/// The names of the integration tests of the package of tests across processes,
/// or of all others.
fn test_targets(across_processes: bool) -> Result<Vec<String>> {
    let listed = cargo().args(["metadata", "--no-deps", "--format-version=1"]).output()?;
    ensure!(listed.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&listed.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&listed.stdout)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages
        .filter(|package| (package["name"] == E2E_PACKAGE) == across_processes)
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter(|target| {
            target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"test".into()))
        })
        .filter_map(|target| target["name"].as_str().map(str::to_owned));
    let mut targets: Vec<String> = targets.collect();
    targets.sort();
    targets.dedup();
    Ok(targets)
}

/// Python's own tests of the GPU suite: standard library only.
fn python(dir: &Path, filter: Option<&str>) -> Option<Command> {
    let has_tests = |dir: &Path| {
        std::fs::read_dir(dir).is_ok_and(|files| {
            files.flatten().any(|f| {
                let name = f.file_name().to_string_lossy().into_owned();
                name.starts_with("test_") && name.ends_with(".py")
            })
        })
    };
    let tests = [dir.to_path_buf(), dir.join("tests")].into_iter().find(|dir| has_tests(dir))?;
    let mut command = Command::new("python3");
    command.current_dir(dir).env("PYTHONDONTWRITEBYTECODE", "1");
    command.args(["-m", "unittest", "discover", "--start-directory"]).arg(tests);
    command.args(["--top-level-directory", "."]);
    if let Some(filter) = filter {
        command.args(["-k", filter]);
    }
    Some(command)
}

fn cargo_in(workspace: &Path) -> Command {
    let mut command = cargo();
    command.current_dir(workspace);
    command
}

fn with(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments);
    command
}

/// Runs a command, passes its output on, and counts what it reports. A command
/// that reports no tests is one check, and so is one that fails without a
/// failed test (it did not compile, say).
fn counted(command: &mut Command) -> Result<Count> {
    eprintln!("\n$ {}", line(command));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("starting {}", line(command)))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let count = Mutex::new(Count::default());
    std::thread::scope(|scope| {
        scope.spawn(|| stdout.map(|pipe| pass_on(pipe, &mut std::io::stdout(), &count)));
        if let Some(pipe) = stderr {
            pass_on(pipe, &mut std::io::stderr(), &count);
        }
    });
    let mut count = count.into_inner().unwrap_or_default();
    let done = child.wait()?;
    if done.success() && !count.reported {
        count.passed = 1;
    }
    if !done.success() && count.failed == 0 {
        eprintln!("{}: {done}", line(command));
        count.failed = 1;
    }
    Ok(count)
}

fn pass_on(from: impl Read, to: &mut dyn Write, count: &Mutex<Count>) {
    let mut from = BufReader::new(from);
    let mut bytes = Vec::new();
    while from.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
        let _ = to.write_all(&bytes);
        let _ = to.flush();
        if let Ok(mut count) = count.lock() {
            count.take(&String::from_utf8_lossy(&bytes));
        }
        bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(group: Group, schedules: Option<u32>, seconds: Option<u32>) -> Args {
        Args {
            group: Some(group),
            all: false,
            filter: None,
            no_build: true,
            schedules,
            experiments: None,
            seconds,
            count: None,
            out: None,
        }
    }

    #[test]
    fn every_group_runs_unless_it_repeats_another() {
        let missing: Vec<_> = Group::value_variants().iter().filter(|g| !ALL.contains(g)).collect();
        use Group::{Ab, Clippy, Differential, Fuzz, Reload, Traps};
        let named = [Clippy, Differential, Ab, Traps, Fuzz, Reload];
        assert_eq!(missing, named.each_ref());
    }

    #[test]
    fn options_go_with_their_groups_and_reach_the_tests() {
        assert!(args(Group::Unit, Some(3), None).check().is_err());
        assert!(args(Group::Differential, None, Some(3)).check().is_err());
        let longer = args(Group::Differential, Some(96), None);
        longer.check().unwrap();
        let commands = commands(Group::Differential, &longer).unwrap();
        let set = commands[0].get_envs().any(|(name, value)| {
            name == "TALLY_DIFFERENTIAL_SCHEDULES" && value.is_some_and(|v| v == "96")
        });
        assert!(set && commands.len() == 1);
    }

    #[test]
    fn a_name_that_matches_no_test_is_an_error() {
        let named = |group| Args { filter: Some("nosuch".into()), ..args(group, None, None) };
        let mut none = Count::default();
        // As cargo-nextest, Cargo and Python's unittest end when nothing matches.
        none.take("     Summary [   0.005s] 0 tests run: 0 passed, 1243 skipped");
        let error = named(Group::Unit).ensure_any(none).unwrap_err().to_string();
        assert!(error.contains("`unit`") && error.contains("\"nosuch\""), "{error}");
        for lines in ["test result: ok. 0 passed; 0 failed; 0 ignored", "Ran 0 tests in 0.1s\n\nOK"]
        {
            let mut none = Count::default();
            lines.lines().for_each(|line| none.take(line));
            named(Group::Python).ensure_any(none).unwrap_err();
        }
        let mut one = Count::default();
        one.take("test result: ok. 1 passed; 0 failed; 0 ignored");
        named(Group::E2e).ensure_any(one).unwrap();
        use Group::{Ab, Clippy, Fmt, Languages, Reload, Traps};
        for group in [Fmt, Clippy, Languages, Ab, Traps, Reload] {
            let error = named(group).check().unwrap_err().to_string();
            assert!(error.contains(&group.name()) && error.contains("NAME"), "{error}");
        }
        named(Group::Words).check().unwrap();
    }

    #[test]
    fn fuzz_runs_each_target_that_does_without_the_daemon() {
        let commands = commands(Group::Fuzz, &args(Group::Fuzz, None, Some(7))).unwrap();
        let lines: Vec<String> = commands.iter().map(line).collect();
        assert_eq!(lines.len(), crate::fuzz::light().count());
        assert!(lines.iter().any(|line| line.ends_with("xtask fuzz ptx --seconds 7")), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains("dispatch")), "{lines:?}");
    }
}
