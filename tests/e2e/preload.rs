//! The preload matrix: under `tallyctl run` programs of all kinds print the same and end the same as without
//! it, and those that are not governed are named.
//!
//! Tests that need what a machine may lack are ignored; `cargo xtask test` runs those whose needs are met
//! and names the others.

use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tally_harness::artefacts::newest_glibc;
use tally_harness::jobs::ANSWER_MAX;
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

/// Names a folder with an old glibc: its loader and libraries.
const ENV_OLD_GLIBC: &str = "TALLY_OLD_GLIBC";
const LIBRARIES: [&str; 2] = ["libtally_preload.so", "libtally_shim.so"];

fn scene() -> Result<Scene> {
    Scene::new(&Artefacts::locate()?, Device::software())
}

fn source(name: &str) -> String {
    format!("{}/e2e/preload/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Compiles `name` from the matrix's sources.
fn compile(scene: &Scene, compiler: &str, name: &str, arguments: &[&str]) -> Result<PathBuf> {
    let to = scene.dir().join(name);
    let from = source(match name {
        "libcuda.so.1" => "driver.c",
        "plugin.so" => "plugin.c",
        "ioctl.so" => "ioctl.c",
        _ => "program.c",
    });
    let mut compile = Command::new(compiler);
    compile.args(["-O1", "-Wall", "-o"]).arg(&to).arg(from).args(arguments);
    let done = compile.output().with_context(|| format!("starting {compiler}"))?;
    ensure!(done.status.success(), "{compiler}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(to)
}

/// A command's output without and with `tallyctl run`; lines of `tallyctl` itself are taken out.
fn both(scene: &Scene, options: &[&str], program: &Command) -> Result<[Output; 2]> {
    let mut bare = scene.command(program.get_program());
    bare.args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => bare.env(name, value),
            None => bare.env_remove(name),
        };
    }
    let mut governed = scene.governed_with(Class::BestEffort, "matrix", options, program)?;
    let run = |command: &mut Command| command.stdin(Stdio::null()).output();
    Ok([run(&mut bare)?, run(&mut governed)?])
}

/// That both are the same. Returns what `tallyctl` said.
fn same(scene: &Scene, options: &[&str], program: &Command) -> Result<String> {
    let [bare, governed] = both(scene, options, program)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        bare.status == governed.status,
        "{} and {}: {}",
        bare.status,
        governed.status,
        text(&governed.stderr)
    );
    ensure!(
        bare.stdout == governed.stdout,
        "{}\nand\n{}",
        text(&bare.stdout),
        text(&governed.stdout)
    );
    let all = text(&governed.stderr);
    let (said, stderr): (Vec<_>, Vec<_>) =
        all.lines().partition(|line| line.starts_with("tallyctl: "));
    ensure!(
        text(&bare.stderr).lines().eq(stderr.iter().copied()),
        "{}\nand\n{all}",
        text(&bare.stderr)
    );
    Ok(said.join("\n"))
}

/// Waits until the status names a program that is not governed, and returns the reason.
fn ungoverned(scene: &Scene, name: &str) -> Result<String> {
    wait_until(&format!("{name} among the programs that are not governed"), ANSWER_MAX, || {
        let status = scene.status()?;
        let all = status.0["ungoverned"].as_array().context("no such list")?;
        let program = all.iter().find(|program| program["name"] == name);
        Ok(program.and_then(|program| Some(program["reason"].as_str()?.to_owned())))
    })
}

fn core(scene: &Scene) -> Result<Process> {
    scene.core(&scene.artefacts().policy("fifo")?, &[])
}

/// The libraries in a folder of their own, the shim with a text replaced by another of the same length.
fn with_shim(scene: &Scene, from: &[u8], to: &[u8]) -> Result<PathBuf> {
    let folder = scene.dir().join("libraries");
    std::fs::create_dir(&folder)?;
    for name in LIBRARIES {
        let mut bytes = std::fs::read(scene.artefacts().file(name)?)?;
        if name == LIBRARIES[1] {
            let at: Vec<_> = bytes
                .windows(from.len())
                .enumerate()
                .filter(|(_, b)| *b == from)
                .map(|(i, _)| i)
                .collect();
            ensure!(!at.is_empty() && from.len() == to.len(), "{name} has no such text");
            for at in at {
                bytes[at..at + to.len()].copy_from_slice(to);
            }
        }
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(folder.join(LIBRARIES[0]))
}

/// A program whose shim cannot be loaded runs as without it, and the log and the status say why.
fn runs_ungoverned(scene: &Scene, preload: &Path, program: &Path, why: &str) -> Result<()> {
    let _core = core(scene)?;
    let preload = preload.to_str().context("a path of this test's")?;
    let log = scene.dir().join("log");
    let mut command = scene.command(program);
    command.arg("cuda").env("TALLY_SHIM_LOG", &log);
    let said = same(scene, &["--preload", preload], &command)?;
    ensure!(said.is_empty(), "tallyctl cannot know: {said}");
    let logged = std::fs::read_to_string(&log)?;
    ensure!(logged.contains("not governed: libtally_shim.so cannot be loaded: "), "{logged}");
    let reason = ungoverned(scene, "matrix")?;
    ensure!(reason.contains(why) && logged.contains(why), "{reason}\n{logged}");
    ensure!(scene.status()?.clients()?.is_empty(), "it is a client all the same");
    Ok(())
}

#[test]
fn a_script_of_200_processes_is_the_same_and_hardly_slower() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let mut script = Command::new("sh");
    script.args(["-c", "i=0; while [ $i -lt 200 ]; do /bin/echo $i; i=$((i+1)); done; exit 41"]);
    ensure!(same(&scene, &[], &script)?.is_empty());
    let mut times = [Duration::MAX; 2];
    for _ in 0..3 {
        let mut bare = scene.command("sh");
        bare.args(script.get_args());
        let governed = scene.governed(Class::BestEffort, "script", &script)?;
        for (command, time) in [bare, governed].iter_mut().zip(&mut times) {
            let began = Instant::now();
            command.stdout(Stdio::null()).status()?;
            *time = began.elapsed().min(*time);
        }
    }
    let [bare, governed] = times.map(|time| time.as_secs_f64() * 1e6 / 200.0);
    println!("a process: {bare:.0} us without, {governed:.0} us with the preloaded library");
    // Loading a library takes 0.1 ms or so; the limit is for machines that do other things meanwhile.
    ensure!(governed - bare < 5_000.0, "{bare:.0} us and {governed:.0} us a process");
    Ok(())
}

#[test]
fn a_program_without_cuda_notices_nothing() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let mut program = Command::new(compile(&scene, "cc", "plain", &["-ldl"])?);
    program.arg("plain");
    ensure!(same(&scene, &[], &program)?.is_empty());
    ensure!(scene.status()?.clients()?.is_empty());
    Ok(())
}

/// Both before the shim is loaded and behind it.
#[test]
fn another_library_that_watches_ioctl_sees_every_call() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let program = compile(&scene, "cc", "program", &["-ldl"])?;
    let watcher = compile(&scene, "cc", "ioctl.so", &["-shared", "-fPIC", "-ldl"])?;
    // (`plain` calls it twice and in a child once more; the probe's loads of the driver are not counted here.)
    let mut plain = Command::new(program);
    plain.arg("plain").env("LD_PRELOAD", &watcher);
    let [bare, governed] = both(&scene, &[], &plain)?;
    let seen = |output: &Output| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let seen = said.lines().find_map(|line| line.strip_prefix("ioctl seen: "));
        seen.and_then(|number| number.parse::<u64>().ok()).with_context(|| said.clone())
    };
    ensure!(seen(&bare)? == 2 && seen(&governed)? == 2, "{bare:?}\n{governed:?}");
    let mut cuda = Command::new(scene.dir().join("program"));
    cuda.arg("asked").env("LD_PRELOAD", &watcher);
    let [bare, governed] = both(&scene, &[], &cuda)?;
    ensure!(String::from_utf8_lossy(&governed.stdout).contains("\"init\": 0"), "{governed:?}");
    ensure!(seen(&bare)? >= 3 && seen(&governed)? >= 3, "{bare:?}\n{governed:?}");
    Ok(())
}

#[test]
fn python_workers_are_the_same_however_they_are_started() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let mut python = Command::new("python3");
    python.arg(source("workers.py"));
    ensure!(same(&scene, &[], &python)?.is_empty());
    ensure!(
        scene.status()?.0["departed"].as_array().is_some_and(Vec::is_empty),
        "nobody used CUDA"
    );
    // With CUDA each worker is a client of its own.
    ensure!(same(&scene, &[], python.arg("cuda"))?.is_empty());
    let status = scene.status()?;
    let departed = status.0["departed"].as_array().context("no such list")?.len();
    ensure!(
        (3..=6).contains(&departed),
        "{departed} workers were clients: {:#}",
        status.0["departed"]
    );
    Ok(())
}

/// It asks `cuGetProcAddress` for every function of the driver.
#[test]
#[ignore = "needs cuda-python: `pip install cuda-python`"]
fn cuda_python_finds_the_whole_driver() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let mut python = Command::new("python3");
    if let Some(folder) = std::env::var_os("TALLY_CUDA_PYTHON") {
        python.env("PYTHONPATH", folder);
    }
    python.args([
        "-c",
        "from cuda.bindings import driver as d; print(d.cuInit(0), d.cuDeviceGetCount())",
    ]);
    let [_, governed] = both(&scene, &[], &python)?;
    let printed = String::from_utf8_lossy(&governed.stdout).into_owned();
    ensure!(printed.trim_end().ends_with(", 1)"), "no device was found: {printed}");
    ensure!(same(&scene, &[], &python)?.is_empty());
    Ok(())
}

#[test]
fn address_sanitizer_starts_behind_the_preloaded_library() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "cc", "asan", &["-fsanitize=address", "-ldl"])?;
    let mut program = Command::new(&file);
    ensure!(same(&scene, &[], program.arg("plain"))?.is_empty());
    // With CUDA it is governed.
    let mut program = Command::new(&file);
    ensure!(same(&scene, &[], program.arg("cuda"))?.is_empty());
    let departed = &scene.status()?.0["departed"];
    ensure!(departed[0]["name"] == "matrix", "{departed:#}");
    Ok(())
}

#[test]
fn a_static_program_is_named() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "cc", "static", &["-static", "-w", "-ldl"])?;
    let said = same(&scene, &[], Command::new(file).arg("plain"))?;
    ensure!(said.contains("static will not be governed: it is statically linked"), "{said}");
    ensure!(ungoverned(&scene, "matrix")?.contains("statically linked"));
    Ok(())
}

#[test]
#[ignore = "needs musl-gcc"]
fn a_program_of_musl_is_named() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "musl-gcc", "musl", &[])?;
    let said = same(&scene, &[], Command::new(&file).arg("plain"))?;
    ensure!(said.contains("its C library is musl"), "{said}");
    ensure!(ungoverned(&scene, "matrix")?.contains("musl"));
    // Started by another program, as `tallyctl` cannot see: it is preloaded and passes through.
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{} plain; {0} plain", file.display())]);
    ensure!(same(&scene, &[], &shell)?.is_empty());
    Ok(())
}

/// Another user's set-user-ID program: only root can make one.
#[test]
#[ignore = "needs root"]
fn a_set_user_id_program_is_named() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65_534;
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "cc", "setuid", &["-ldl"])?;
    std::os::unix::fs::chown(&file, Some(NOBODY), Some(NOBODY))?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o4755))?;
    std::fs::set_permissions(scene.dir(), std::fs::Permissions::from_mode(0o755))?;
    let said = same(&scene, &[], Command::new(file).arg("plain"))?;
    ensure!(said.contains("set-user-ID"), "{said}");
    ensure!(ungoverned(&scene, "matrix")?.contains("set-user-ID"));
    Ok(())
}

/// In place of an image without it: the shim asks for a library of another name.
#[test]
fn without_libgcc_s_a_program_runs_and_is_named() -> Result<()> {
    let scene = scene()?;
    let preload = with_shim(&scene, b"libgcc_s.so.1\0", b"libgcc_x.so.1\0")?;
    let file = compile(&scene, "cc", "nolibgcc", &["-ldl"])?;
    runs_ungoverned(&scene, &preload, &file, "libgcc_x.so.1")
}

/// In place of an old glibc: the shim asks for a version that this one does not have.
#[test]
fn below_its_glibc_a_program_runs_and_is_named() -> Result<()> {
    let scene = scene()?;
    let preload = with_shim(&scene, b"GLIBC_2.34\0", b"GLIBC_9.99\0")?;
    let file = compile(&scene, "cc", "oldglibc", &["-ldl"])?;
    runs_ungoverned(&scene, &preload, &file, "GLIBC_9.99")
}

/// The program with an old glibc, beside a core and a driver that needs no C library.
struct Old {
    scene: Scene,
    folder: PathBuf,
    program: PathBuf,
}

impl Old {
    fn new() -> Result<Old> {
        let folder =
            PathBuf::from(std::env::var_os(ENV_OLD_GLIBC).context("its folder is not named")?);
        let scene = scene()?;
        // Linked with it, too: today's would give the program versions that it does not have.
        let files =
            ["libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"].map(|name| folder.join(name));
        let mut arguments = vec!["-nodefaultlibs"];
        arguments.extend(files.iter().filter_map(|file| file.to_str()));
        arguments.push("-lgcc");
        let program = compile(&scene, "cc", "old", &arguments)?;
        compile(&scene, "cc", "libcuda.so.1", &["-shared", "-fPIC", "-nostdlib"])?;
        Ok(Old { scene, folder, program })
    }

    fn command(&self, preload: Option<&Path>, argument: &str) -> Command {
        let mut command = self.scene.command(self.folder.join("ld-linux-x86-64.so.2"));
        let libraries = format!("{}:{}", self.folder.display(), self.scene.dir().display());
        command.args(["--library-path", &libraries]);
        if let Some(preload) = preload {
            command.arg("--preload").arg(preload);
        }
        command.arg(&self.program).arg(argument).env("TALLY_NAME", "old");
        command.env("TALLY_SHIM_LOG", self.scene.dir().join("log")).stdin(Stdio::null());
        command
    }
}

/// The glibc is older than the shim needs.
#[test]
#[ignore = "needs an old glibc"]
fn with_an_old_glibc_a_program_runs_and_is_named() -> Result<()> {
    let old = Old::new()?;
    let _core = core(&old.scene)?;
    let preload = old.scene.artefacts().file(LIBRARIES[0])?;
    for (argument, code) in [("plain", 3), ("cuda", 0)] {
        let bare = old.command(None, argument).output()?;
        let preloaded = old.command(Some(&preload), argument).output()?;
        ensure!(bare == preloaded, "{bare:?} and {preloaded:?}");
        ensure!(bare.status.code() == Some(code), "{bare:?}");
    }
    let reason = ungoverned(&old.scene, "old")?;
    ensure!(
        reason.contains("version `GLIBC_2.3") && reason.contains("not found (required by"),
        "{reason}"
    );
    let logged = std::fs::read_to_string(old.scene.dir().join("log"))?;
    ensure!(logged.contains(&reason), "{logged}");
    Ok(())
}

/// The shim that `cargo xtask shim` builds.
#[test]
#[ignore = "needs an old glibc and zig"]
fn with_an_old_glibc_the_portable_shim_governs() -> Result<()> {
    let old = Old::new()?;
    let _core = core(&old.scene)?;
    let preload = old.scene.artefacts().file("portable/libtally_preload.so")?;
    let command = old.command(Some(&preload), "cuda");
    let mut program = old.scene.start("old", command)?;
    ensure!(program.hear(ANSWER_MAX)?["init"] == 0, "{}", program.quote());
    ensure!(old.scene.status()?.client("old")?.governed());
    ensure!(program.wait(ANSWER_MAX)?.success(), "{}", program.quote());
    Ok(())
}

/// `docs/operate.md` states the version checked here.
#[test]
fn the_shim_needs_no_newer_glibc_than_stated() -> Result<()> {
    let newest = newest_glibc(&std::fs::read(scene()?.artefacts().file(LIBRARIES[1])?)?);
    ensure!(newest.is_some_and(|newest| newest <= (2, 34)), "{newest:?}");
    Ok(())
}

/// The same of what `cargo xtask shim` builds, and that it needs no `libgcc_s`.
#[test]
#[ignore = "needs zig"]
fn the_portable_shim_needs_an_old_glibc_only_and_governs() -> Result<()> {
    let scene = scene()?;
    let shim = std::fs::read(scene.artefacts().file("portable/libtally_shim.so")?)?;
    let newest = newest_glibc(&shim);
    ensure!(newest.is_some_and(|newest| newest <= (2, 17)), "{newest:?}");
    ensure!(!shim.windows(9).any(|bytes| bytes == b"libgcc_s."), "it needs libgcc_s");
    let _core = core(&scene)?;
    let preload = scene.artefacts().file("portable/libtally_preload.so")?;
    let preload = preload.to_str().context("a path of the build's")?;
    let mut program = scene.command(compile(&scene, "cc", "portable", &["-ldl"])?);
    program.arg("cuda");
    let program =
        scene.governed_with(Class::High, "portable", &["--preload", preload], &program)?;
    let mut program = scene.start("portable", program)?;
    ensure!(program.hear(ANSWER_MAX)?["init"] == 0, "{}", program.quote());
    ensure!(scene.status()?.client("portable")?.governed());
    ensure!(program.wait(ANSWER_MAX)?.success(), "{}", program.quote());
    Ok(())
}

/// Another linker namespace, and a library that prefers its own dependencies: neither reaches the preloaded
/// library, so the core has to say so.
#[test]
fn what_reaches_the_driver_past_the_preloaded_library_is_named() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let driver = format!("-L{}", scene.driver_dir().display());
    let linked = ["-shared", "-fPIC", &driver, "-lcuda", "-Wl,--allow-shlib-undefined"];
    let plugin = compile(&scene, "cc", "plugin.so", &linked)?;
    let file = compile(&scene, "cc", "host", &["-ldl"])?;
    for way in ["deep", "mopen"] {
        let mut program = scene.command(&file);
        program.arg(way).arg(&plugin);
        let mut program = scene.start(way, scene.governed(Class::BestEffort, way, &program)?)?;
        let said = program.hear(ANSWER_MAX).with_context(|| program.quote())?;
        ensure!(said["init"] == 0, "{said}");
        let reason = ungoverned(&scene, "host")?;
        ensure!(reason.contains("dlmopen") && reason.contains("RTLD_DEEPBIND"), "{way}: {reason}");
        ensure!(scene.status()?.clients()?.is_empty(), "{way}: it is a client all the same");
        ensure!(program.wait(ANSWER_MAX)?.success(), "{}", program.quote());
    }
    Ok(())
}

#[test]
fn a_driver_is_found_where_it_would_be_found() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "cc", "scopes", &["-ldl"])?;
    ensure!(same(&scene, &[], Command::new(file).arg("scopes"))?.is_empty());
    Ok(())
}

#[test]
fn a_program_that_shed_the_preload_is_named() -> Result<()> {
    let scene = scene()?;
    let _core = core(&scene)?;
    let file = compile(&scene, "cc", "shed", &["-ldl"])?;
    let mut program = scene.command("env");
    program.args(["-u", "LD_PRELOAD"]).arg(&file).arg("cuda");
    let mut program = scene.start("shed", scene.governed(Class::BestEffort, "shed", &program)?)?;
    ensure!(program.hear(ANSWER_MAX)?["init"] == 0);
    let reason = ungoverned(&scene, "shed")?;
    ensure!(reason.contains("LD_PRELOAD"), "{reason}");
    if !program.wait(ANSWER_MAX)?.success() {
        bail!("{}", program.quote());
    }
    Ok(())
}
