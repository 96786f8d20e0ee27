//! Where the core, `tallyctl` and governed programs look for one another and keep files unless they are told: never in
//! a folder that everybody can write to, also without `XDG_RUNTIME_DIR` and `HOME`.

use anyhow::{Context, Result, ensure};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tally_harness::Artefacts;

/// A user of whom there is nothing on this machine: whom programs run as if the test is root.
const USER: u32 = 64_321;
/// Folders that everybody can write to.
const SHARED: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// A folder with copies of programs, and one in which everybody may make anything.
struct Place {
    dir: tempfile::TempDir,
    uid: u32,
}

impl Place {
    fn new(files: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let artefacts = Artefacts::locate()?;
        for name in files {
            std::fs::copy(artefacts.file(name)?, dir.path().join(name))?;
        }
        for (folder, mode) in [("", 0o755), ("open", 0o777), ("home", 0o755), ("run", 0o755)] {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder)?;
            std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode))?;
        }
        let own = rustix::process::geteuid();
        Ok(Place { dir, uid: if own.is_root() { USER } else { own.as_raw() } })
    }

    fn open(&self) -> PathBuf {
        self.dir.path().join("open")
    }

    /// A program without any environment but the folder for temporary files, in that folder.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.dir.path().join(program));
        command.env_clear().env("TMPDIR", self.open()).current_dir(self.open());
        command.stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            command.uid(self.uid).gid(self.uid);
        }
        command
    }

    /// The folder that is this user's without any environment: only root, or the system for the user, can make it.
    fn folder(&self) -> String {
        format!("/run/user/{}/tally", self.uid)
    }

    /// That nothing was made where everybody can.
    fn left_nothing(&self) -> Result<()> {
        let of = |folder: &Path| -> Result<Vec<PathBuf>> {
            let entries = std::fs::read_dir(folder)?.flatten();
            // What another process removes meanwhile is not of this user, who runs one program.
            let own = entries.filter(|e| e.metadata().is_ok_and(|about| about.uid() == self.uid));
            Ok(own.map(|entry| entry.path()).collect())
        };
        let made = of(&self.open())?;
        ensure!(made.is_empty(), "{made:?}");
        // Other tests of the same user use these, too.
        for folder in SHARED.map(Path::new).into_iter().filter(|f| self.uid == USER && f.exists()) {
            let made = of(folder)?;
            ensure!(made.is_empty(), "{made:?}");
        }
        Ok(())
    }
}

/// That whoever may make this path's folders is root or its user.
fn is_nobodys(path: &str) -> Result<()> {
    for folder in Path::new(path).ancestors().filter(|folder| folder.exists()) {
        let mode = std::fs::metadata(folder)?.mode();
        ensure!(mode & 0o002 == 0, "everybody can write to {}: {mode:o}", folder.display());
    }
    Ok(())
}

fn said(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

/// That it says that there is nothing at this path.
fn names(output: &Output, path: &str) -> Result<()> {
    let said = said(output);
    ensure!(said.contains(path), "{path}: {}\n{said}", output.status);
    Ok(())
}

#[test]
fn tallyctl_looks_for_the_core_where_nobody_else_can_be() -> Result<()> {
    let place = Place::new(&["tallyctl", "libtally_preload.so", "libtally_shim.so"])?;
    is_nobodys(&place.folder())?;
    let [home, run] = ["home", "run"].map(|name| place.dir.path().join(name).display().to_string());
    for (environment, folder) in [
        (vec![], place.folder()),
        (vec![("XDG_RUNTIME_DIR", ""), ("HOME", ""), ("TALLY_SOCKET", "")], place.folder()),
        (vec![("HOME", &*home)], format!("{home}/.local/state/tally")),
        (vec![("HOME", &*home), ("XDG_RUNTIME_DIR", &*run)], format!("{run}/tally")),
    ] {
        for arguments in [&["status"][..], &["ab", "status"], &["run", "--", "true"]] {
            let output =
                place.command("tallyctl").args(arguments).envs(environment.clone()).output()?;
            names(&output, &folder).with_context(|| format!("{environment:?} {arguments:?}"))?;
        }
    }
    place.left_nothing()
}

#[test]
fn a_core_listens_where_nobody_else_can() -> Result<()> {
    let place = Place::new(&["tally-core"])?;
    let config = place.dir.path().join("core.toml");
    std::fs::write(&config, "[policy]\nrequired = false\nfile = \"/nonexistent/policy.wasm\"\n")?;
    std::fs::set_permissions(&config, PermissionsExt::from_mode(0o644))?;
    let output = place.command("tally-core").arg("--config").arg(&config).output()?;
    ensure!(!output.status.success(), "it serves: {}", said(&output));
    names(&output, &place.folder())?;
    place.left_nothing()
}

/// Neither for the core nor for rewritten images: the program runs as without Tally.
#[test]
fn a_governed_program_looks_for_the_core_where_nobody_else_can_be() -> Result<()> {
    let libraries = ["libtally_preload.so", "libtally_shim.so", "libtally_softcuda.so"];
    let place = Place::new(&libraries)?;
    let at = |name: &str| place.dir.path().join(name);
    std::fs::rename(at("libtally_softcuda.so"), at("libcuda.so.1"))?;
    let source = format!("{}/e2e/preload/program.c", env!("CARGO_MANIFEST_DIR"));
    let done = Command::new("cc").arg("-o").arg(at("program")).arg(source).arg("-ldl").output();
    let done = done.context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(done.status.success(), "cc: {}", said(&done));
    let (log, device) = (at("log"), at("device"));
    std::fs::write(&log, "")?;
    std::fs::set_permissions(&log, PermissionsExt::from_mode(0o666))?;
    std::fs::create_dir(&device)?;
    std::os::unix::fs::chown(&device, Some(place.uid), Some(place.uid))?;
    let mut program = place.command("program");
    program.arg("cuda").env("LD_PRELOAD", at("libtally_preload.so"));
    program
        .env("LD_LIBRARY_PATH", place.dir.path())
        .env("TALLY_SOFTCUDA_DEVICE", device.join("device"));
    program.env("TALLY_PRIORITY", "best-effort").env("TALLY_SHIM_LOG", &log);
    let output = program.output()?;
    ensure!(output.status.success(), "{}\n{}", output.status, said(&output));
    let log = std::fs::read_to_string(log)?;
    let socket = format!("{}/clients/core.sock", place.folder());
    ensure!(log.contains("no core") && log.contains(&socket), "{log}");
    ensure!(SHARED.iter().all(|folder| !log.contains(&format!(" {folder}/tally"))), "{log}");
    place.left_nothing()
}
