//! `cargo xtask languages`: policies in every language, as an author would make them.
//!
//! For each language: a new project by `tallyctl policy new`, built by `make`, checked by
//! `tallyctl policy check`; then the SDK's examples in its place, built, checked and run.
//! Then the examples against each other (`tools/conformance/tests/languages.rs`), active of
//! a core (`tests/e2e/interpreted.rs`), and the tutorial (`crate::walkthrough`). A language
//! whose tools are not there is left out and named; it never counts as passed.

use crate::build::{cargo, release_dir, succeed};
use crate::guest::{self, Toolchain};
use crate::{repository, target_dir, walkthrough};
use anyhow::{Context, Result, ensure};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Where the tools of Python and JavaScript are; `.ci/run` sets these.
const COMPONENTIZE_PY: &str = "TALLY_COMPONENTIZE_PY";
const COMPONENTIZE_QJS: &str = "TALLY_COMPONENTIZE_QJS";
/// Where the example's test finds the components.
const COMPONENTS: &str = "TALLY_LANGUAGE_COMPONENTS";
/// The SDKs' examples, each the same policy in every language. The second keeps what it
/// learned, the third asks about services and sets widths.
const EXAMPLES: [&str; 3] = ["idle-gap", "patient", "slack"];
/// What the examples are simulated on.
const TRACES: [&str; 6] =
    ["--hp", "bert_large_infer_b1_s128", "--be", "resnet50_train_b128", "--seconds", "1"];

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Test or measure this language only
    #[arg(long, value_enum)]
    lang: Option<Lang>,
    /// Measure the examples and print a table, instead of testing.
    #[arg(long)]
    bench: bool,
}

/// A language that there is an SDK for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Lang {
    /// Rust policies, with `sdk/rust`
    Rust,
    /// C policies, with `sdk/c`
    C,
    /// JavaScript policies, with `sdk/js`
    Js,
    /// Python policies, with `sdk/python`
    Python,
}

/// Languages in rising order of what their policies cost.
const ALL: [Lang; 4] = [Lang::Rust, Lang::C, Lang::Js, Lang::Python];

impl Lang {
    fn name(self) -> &'static str {
        match self {
            Lang::Rust => "rust",
            Lang::C => "c",
            Lang::Js => "js",
            Lang::Python => "python",
        }
    }

    /// The policy's file, in a project and in an example.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Lang::Rust => ("src/lib.rs", "lib.rs"),
            Lang::C => ("policy.c", "policy.c"),
            Lang::Js => ("policy.js", "policy.js"),
            Lang::Python => ("app.py", "app.py"),
        }
    }

    /// Whether its components contain an interpreter, of megabytes.
    fn is_interpreted(self) -> bool {
        matches!(self, Lang::Js | Lang::Python)
    }

    fn limits(self) -> &'static [&'static str] {
        if self.is_interpreted() { &["--limits", "interpreted"] } else { &[] }
    }

    /// Arguments of `make` that name its tools; or why there are none.
    fn tools(self) -> Result<Vec<String>, String> {
        if !runs("make", &["--version"]) {
            return Err("`make` is missing".into());
        }
        let named = |variable: &str, command: &str, argument: &str| {
            let tool = std::env::var_os(variable).unwrap_or_else(|| command.into());
            let tool = tool.to_string_lossy().into_owned();
            match runs(&tool, &["--help"]) {
                true => Ok(vec![format!("{argument}={tool}")]),
                false => Err(format!("`{tool}` does not run; {variable} may name another")),
            }
        };
        match self {
            Lang::Rust => Ok(Vec::new()),
            Lang::C => {
                let linker = said("clang", &["--print-prog-name=wasm-ld"]);
                let targets = said("clang", &["--print-targets"]);
                match (linker, targets) {
                    (Some(linker), Some(targets))
                        if targets.contains("wasm32") && runs(&linker, &["--version"]) =>
                    {
                        Ok(Vec::new())
                    }
                    _ => Err("no clang that makes WebAssembly, with wasm-ld".into()),
                }
            }
            Lang::Js => named(COMPONENTIZE_QJS, "componentize-qjs", "COMPONENTIZE_QJS"),
            Lang::Python => named(COMPONENTIZE_PY, "componentize-py", "COMPONENTIZE_PY"),
        }
    }
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let done = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&done.stdout).trim().to_owned();
    done.status.success().then_some(text)
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    said(program, arguments).is_some()
}

/// Whether the tools of any language are there.
pub fn any() -> bool {
    ALL.iter().any(|lang| lang.tools().is_ok())
}

/// The languages that are left out on this machine, each with the reason.
pub fn left_out() -> Vec<String> {
    let missing = |lang: &Lang| lang.tools().err().map(|why| (lang.name(), why));
    ALL.iter()
        .filter_map(missing)
        .map(|(name, why)| match name {
            "rust" => format!("policies in rust and the tutorial of docs/policies.md ({why})"),
            _ => format!("policies in {name} ({why})"),
        })
        .collect()
}

/// Tests the policies of each language, or measures the examples.
pub fn run(args: &Args) -> Result<()> {
    let chosen = ALL.into_iter().filter(|lang| args.lang.is_none_or(|only| only == *lang));
    let suite = Suite::new()?;
    let mut had = Vec::new();
    for lang in chosen {
        match lang.tools() {
            Ok(tools) => had.push((lang, tools)),
            Err(why) => eprintln!("left out: policies in {}: {why}", lang.name()),
        }
    }
    ensure!(!had.is_empty(), "the tools of no language are there");
    if args.bench {
        return suite.bench(&had);
    }
    let mut steps = Steps::new();
    // Each of their compilers uses one CPU for most of its time.
    std::thread::scope(|scope| {
        let of = |(lang, tools): &(Lang, Vec<String>)| suite.language(*lang, tools);
        let all: Vec<_> = had.iter().map(|one| scope.spawn(move || of(one))).collect();
        for one in all {
            steps.add(&one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    if had.len() > 1 {
        let examples = suite.out.join("examples");
        let what = "the examples are one policy each in all of them, and run a core";
        steps.step(what, || compare(&examples));
    }
    if had.iter().any(|(lang, _)| *lang == Lang::Rust) {
        steps.step("docs/policies.md, its tutorial followed", || {
            walkthrough::follow(&suite.out, &suite.environment)
        });
    }
    // As Cargo says it: `cargo xtask test` counts by that.
    println!("test result: {} passed; {} failed; 0 ignored", steps.passed, steps.failed);
    ensure!(steps.failed == 0, "{} of the languages' checks failed (why: above)", steps.failed);
    Ok(())
}

/// Environment in which a project of a user builds here.
pub type Environment = Vec<(OsString, OsString)>;

struct Suite {
    out: PathBuf,
    tallyctl: PathBuf,
    environment: Environment,
}

/// What was checked, one after the other.
struct Steps {
    /// When the last one ended.
    since: Instant,
    passed: u32,
    failed: u32,
}

impl Steps {
    fn new() -> Self {
        Steps { since: Instant::now(), passed: 0, failed: 0 }
    }

    /// Adds the counts of steps that have ended.
    fn add(&mut self, others: &Steps) {
        self.since = Instant::now();
        self.passed += others.passed;
        self.failed += others.failed;
    }

    fn step(&mut self, what: &str, run: impl FnOnce() -> Result<()>) {
        let outcome = run();
        let took_s = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("ok      {what} ({took_s:.0} s)\n");
            }
            Err(error) => {
                self.failed += 1;
                println!("FAILED  {what} ({took_s:.0} s): {error:#}\n");
            }
        }
    }
}

impl Suite {
    fn new() -> Result<Self> {
        let out = target_dir().join("languages");
        let _ = fs::remove_dir_all(&out);
        fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
        let tallyctl = release_dir().join("tallyctl");
        ensure!(tallyctl.is_file(), "{} is missing: build first", tallyctl.display());
        let toolchain = guest::find(false)?;
        toolchain.forget_other_toolchain(&rust_target_dir())?;
        let environment = toolchain.as_environment(&out.join("toolchain"))?;
        Ok(Suite { out, tallyctl, environment })
    }

    /// A program in a folder, in the environment of the projects.
    fn ran(&self, folder: &Path, program: &Path, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.current_dir(folder).args(arguments).stdin(Stdio::null());
        let done = in_environment(&mut command, &self.environment)
            .stdout(std::io::stderr())
            .status()
            .with_context(|| format!("starting {}", program.display()))?;
        ensure!(done.success(), "{} {}: {done}", program.display(), arguments.join(" "));
        Ok(())
    }

    /// A new project; with the SDK's example of its name in it if there is one.
    fn project(&self, lang: Lang, name: &str, tools: &[String]) -> Result<PathBuf> {
        let folder = self.out.join(format!("{}-{name}", lang.name()));
        let path = folder.to_string_lossy().into_owned();
        let arguments = ["policy", "new", "--lang", lang.name(), "--path", &path, name];
        self.ran(&self.out, &self.tallyctl, &arguments)?;
        if EXAMPLES.contains(&name) {
            let (to, from) = lang.source();
            let sdk = repository().join("sdk").join(lang.name()).join("examples").join(name);
            fs::copy(sdk.join(from), folder.join(to))?;
            if sdk.join("world.wit").is_file() {
                fs::copy(sdk.join("world.wit"), folder.join("wit/world.wit"))?;
            }
        }
        let mut make: Vec<&str> = tools.iter().map(String::as_str).collect();
        let tallyctl = format!("TALLYCTL={}", self.tallyctl.display());
        make.push(&tallyctl);
        self.ran(&folder, Path::new("make"), &make)?;
        let component = folder.join(name).with_extension("wasm");
        ensure!(component.is_file(), "`make` went well and made no {}", component.display());
        Ok(component)
    }

    /// The new project once more, as one does whose compiler lacks the target.
    fn project_by_xtask(&self) -> Result<()> {
        let folder = self.out.join("rust-starter");
        let component = folder.join("starter.wasm");
        let _ = fs::remove_file(&component);
        let mut xtask = Command::new(std::env::current_exe()?);
        xtask.args(["policies", "--project"]).arg(&folder);
        succeed(&mut xtask)?;
        ensure!(component.is_file(), "there is no {}", component.display());
        Ok(())
    }

    fn check(&self, lang: Lang, component: &Path, config: Option<&str>) -> Result<()> {
        let file = component.to_string_lossy().into_owned();
        let mut arguments = vec!["policy", "check", &file];
        arguments.extend(lang.limits());
        let path = self.out.join(format!("{}-policy.toml", lang.name()));
        let path_text = path.to_string_lossy().into_owned();
        if let Some(config) = config {
            fs::write(&path, config)?;
            arguments.extend(["--config", &path_text]);
        }
        self.ran(&self.out, &self.tallyctl, &arguments)
    }

    fn language(&self, lang: Lang, tools: &[String]) -> Steps {
        let name = lang.name();
        let mut steps = Steps::new();
        let mut starter = None;
        steps.step(&format!("{name}: a new project builds"), || {
            starter = Some(self.project(lang, "starter", tools)?);
            Ok(())
        });
        if let Some(starter) = starter {
            steps.step(&format!("{name}: a new project passes the check"), || {
                self.check(lang, &starter, None)
            });
        }
        if lang == Lang::Rust {
            steps.step("rust: `cargo xtask policies --project` builds it", || {
                self.project_by_xtask()
            });
        }
        let Some(example) = self.example(&mut steps, lang, "idle-gap", tools) else { return steps };
        if !lang.is_interpreted() {
            // An interpreter's compilation takes up to 15 s each time, and the comparison below runs it.
            steps.step(&format!("{name}: `idle-gap` passes the check"), || {
                self.check(lang, &example, Some("lease = 50"))
            });
        }
        if let Some(example) = self.example(&mut steps, lang, "patient", tools) {
            steps.step(&format!("{name}: `patient` passes the check, its state's too"), || {
                self.check_of_state(lang, &example)
            });
        }
        if let Some(example) = self.example(&mut steps, lang, "slack", tools)
            && !lang.is_interpreted()
        {
            steps.step(&format!("{name}: `slack` passes the check"), || {
                self.check(lang, &example, Some("width_percent = 50"))
            });
        }
        if !lang.is_interpreted() {
            let file = example.to_string_lossy().into_owned();
            let mut arguments = vec!["sim", "--policy", &file];
            arguments.extend(TRACES);
            arguments.extend(lang.limits());
            steps.step(&format!("{name}: `idle-gap` schedules in the simulator"), || {
                self.ran(&self.out, &self.tallyctl, &arguments)
            });
        }
        steps
    }

    /// The example of that name, built and put where the tests find it.
    fn example(
        &self,
        steps: &mut Steps,
        lang: Lang,
        example: &str,
        tools: &[String],
    ) -> Option<PathBuf> {
        let mut made = None;
        steps.step(&format!("{}: `{example}` builds", lang.name()), || {
            let file = self.project(lang, example, tools)?;
            fs::create_dir_all(self.examples(example))?;
            let place = self.examples(example).join(lang.name()).with_extension("wasm");
            fs::copy(&file, place)?;
            made = Some(file);
            Ok(())
        });
        made
    }

    /// Where the components of an example are, by language.
    fn examples(&self, example: &str) -> PathBuf {
        self.out.join("examples").join(example)
    }

    /// The check, which must have looked at its state.
    fn check_of_state(&self, lang: Lang, component: &Path) -> Result<()> {
        let mut command = Command::new(&self.tallyctl);
        command.args(["policy", "check", "--json"]).args(lang.limits()).arg(component);
        let done = command.output()?;
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        ensure!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
        let report: serde_json::Value = serde_json::from_str(&said)?;
        let checks = report["checks"].as_array().context("the report has no checks")?;
        let state = checks.iter().find(|check| check["name"] == "state");
        let state = state.context("the component does not keep what it learned")?;
        ensure!(state["outcome"] == "pass", "{state:#}");
        Ok(())
    }

    /// Prints the table of `docs/languages.md`.
    fn bench(&self, had: &[(Lang, Vec<String>)]) -> Result<()> {
        let mut machine = String::new();
        let mut rows = Vec::new();
        for (lang, tools) in had {
            let component = self.project(*lang, "idle-gap", tools)?;
            let mut command = Command::new(&self.tallyctl);
            command.args(["policy", "bench", "--json"]).args(lang.limits()).arg(&component);
            let done = command.output()?;
            ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let figures: serde_json::Value = serde_json::from_slice(&done.stdout)?;
            let number = |at: &str| figures.pointer(at).and_then(|v| v.as_f64()).unwrap_or(0.0);
            machine = format!(
                "{}, {} CPUs",
                figures.pointer("/machine/cpu").and_then(|v| v.as_str()).unwrap_or("?"),
                number("/machine/cpus")
            );
            rows.push(format!(
                "| {} | {:.0} | {:.0} | {:.1} | {:.0} | {:.2} | {:.2} | {:.2} | {:.0} |",
                lang.name(),
                number("/bytes") / 1024.0,
                number("/memory_bytes") / 1024.0,
                number("/compile_ms"),
                number("/instantiate_us"),
                number("/decide/bulk_ns") / 1e3,
                number("/decide/p50_ns") / 1e3,
                number("/decide/p99_ns") / 1e3,
                number("/decide/fuel"),
            ));
        }
        println!("{machine}\n");
        println!(
            "| language | size, KiB | memory, KiB | compile, ms | instantiate, us | decide in bulk, us | p50, us | p99, us | fuel |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        rows.iter().for_each(|row| println!("{row}"));
        Ok(())
    }
}

/// Target folder of the Rust projects.
fn rust_target_dir() -> PathBuf {
    target_dir().join("languages-rust")
}

/// Set what a project needs, and clear what is about this build.
pub fn in_environment<'c>(command: &'c mut Command, all: &Environment) -> &'c mut Command {
    for name in ["CARGO", "MAKEFLAGS", "MAKELEVEL"].iter().chain(guest::CLEARED) {
        command.env_remove(name);
    }
    // Dependencies of the Rust SDK are compiled once for all projects.
    command.env("TARGET_DIR", rust_target_dir());
    command.envs(all.iter().map(|(name, value)| (name, value)))
}

fn compare(examples: &Path) -> Result<()> {
    let mut test = cargo();
    test.args([
        "test",
        "--release",
        "--workspace",
        "--no-fail-fast",
        "--test",
        "languages",
        "--test",
        "interpreted",
    ]);
    // The figures are shown; interpreters are large, and compiled with all CPUs.
    test.args(["--", "--ignored", "--nocapture", "--test-threads=1"]);
    let done = test
        .env(COMPONENTS, examples)
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .context("starting cargo")?;
    ensure!(done.success(), "{done} (why: above)");
    Ok(())
}

impl Toolchain {
    /// What `make` in somebody else's project needs to use this compiler: programs that set
    /// up what it wants for themselves, so that nothing else is touched by that.
    fn as_environment(&self, folder: &Path) -> Result<Environment> {
        let mut all: Environment = Vec::new();
        if self.environment.is_empty() {
            return Ok(all);
        }
        fs::create_dir_all(folder)?;
        let mut setting = format!("export PATH={}\n", quoted(&self.path_with(&guest::linker()?)?));
        let mut rustc = None;
        for (name, value) in self.environment.iter().filter(|(name, _)| *name != "PATH") {
            setting += &format!("export {name}={}\n", quoted(value));
            if *name == "RUSTC" {
                rustc = Some(PathBuf::from(value));
            }
        }
        let rustc = rustc.context("the toolchain names no rustc")?;
        let mut flags = Vec::new();
        for (variable, name, program) in
            [("CARGO", "cargo", self.cargo.clone()), ("RUSTC", "rustc", rustc)]
        {
            let file = folder.join(name);
            let script =
                format!("#!/bin/sh\n{setting}exec {} \"$@\"\n", quoted(program.as_os_str()));
            fs::write(&file, script)?;
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
            flags.push(format!("{variable}={}", file.display()));
        }
        all.push(("MAKEFLAGS".into(), flags.join(" ").into()));
        Ok(all)
    }
}

/// The text quoted as one word of a shell.
fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_would_help() {
        assert!(!runs("no-such-program-at-all", &["--version"]));
        // Whatever this machine has: a language is either left out by name or not at all.
        for lang in ALL {
            let start = format!("policies in {} (", lang.name());
            let named = left_out().iter().any(|line| line.starts_with(&start));
            assert_eq!(named, lang.tools().is_err(), "{lang:?}");
        }
    }

    /// In Rust they are tested with the SDK.
    #[test]
    fn helpers_of_the_sdks_pass_their_tests() {
        let sdk = repository().join("sdk");
        let tests = sdk.join("tests");
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("helpers");
        let mut compile = Command::new("cc");
        compile.args(["-std=c17", "-w", "-o"]).arg(&program).arg(tests.join("helpers.c"));
        compile.arg("-I").arg(sdk.join("c/sdk")).arg("-I").arg(sdk.join("c/bindings"));
        succeed(&mut compile).unwrap();
        succeed(&mut Command::new(&program)).unwrap();
        succeed(Command::new("python3").arg(tests.join("helpers.py"))).unwrap();
        // Those of JavaScript, too, run in `cargo xtask languages`: in the examples.
        if runs("node", &["--version"]) {
            succeed(Command::new("node").arg(tests.join("helpers.mjs"))).unwrap();
        }
    }

    #[test]
    fn every_language_has_the_examples() {
        for (lang, example) in ALL.iter().flat_map(|lang| EXAMPLES.map(|name| (lang, name))) {
            let sdk = repository().join("sdk").join(lang.name()).join("examples").join(example);
            assert!(sdk.join(lang.source().1).is_file(), "{lang:?}: {example}");
        }
    }
}
