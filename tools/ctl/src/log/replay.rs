//! `tallyctl log replay`: a log's calls again, on its own policy or on another.

use super::{next, open};
use crate::error::CtlError;
use crate::table::{Align, table};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use tally_decision_log::compare::{KINDS, Share};
use tally_decision_log::player::Parts;
use tally_decision_log::{About, Comparison, Player};
use tally_engine::policy::Policy;

/// Most kernels and clients that are shown.
const TOP: usize = 10;

/// Shown at the end of `--help`.
pub const AFTER_HELP: &str = "\
Exit codes, besides those of `tallyctl --help`:
  0  the log's own policy gave every answer again; or another policy was compared
  1  the log's own policy answered otherwise, although the log holds all that it knew
  3  no proof: answers differ in a part of the log that begins while the policy was running, whose memory is not in
     the log; or answers differ under limits lower than the log's; or records are missing";

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The decision log to read
    pub file: PathBuf,
    /// The policy component to replay. Default: the file that the log names, if it has not changed and only you or
    /// root can write to it and to its folder.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Configuration file for the policy. Default: the configuration in the log.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print JSON (schema 1).
    #[arg(long)]
    pub json: bool,
}

/// CPU time of a policy's call in a replay: how busy this machine is must not change what comes out. Fuel bounds a call
/// as it did in the core.
#[cfg(feature = "wasm")]
const REPLAY_CPU_MS: u64 = 60_000;

/// The limits under which a log is replayed, and the names of those that are lower than in the log. Whoever wrote the
/// log chose its limits, so none of them exceeds that of the largest preset.
#[cfg(feature = "wasm")]
fn within_presets(
    logged: &tally_wasm_host::Limits,
) -> (tally_wasm_host::Limits, Vec<&'static str>) {
    use tally_wasm_host::{Limits, Preset};
    let [a, b] = [Preset::Default, Preset::Interpreted].map(Preset::limits);
    let mut lowered = Vec::new();
    // A literal without `..`, so that no limit is forgotten.
    macro_rules! within {
        ($($key:ident),*) => {
            Limits {
                call_cpu_ms_max: REPLAY_CPU_MS,
                init_cpu_ms_max: REPLAY_CPU_MS,
                $($key: {
                    let most = a.$key.max(b.$key);
                    if logged.$key > most {
                        lowered.push(stringify!($key));
                    }
                    logged.$key.min(most)
                },)*
            }
        };
    }
    let limits = within!(
        memory_bytes,
        decide_fuel,
        init_fuel,
        snapshot_fuel,
        component_bytes_max,
        compile_memory_bytes,
        compile_cpu_s,
        host_call_bytes_max,
        faults_max,
        faults_forgotten_after_s,
        log_lines_per_s_max,
        metrics_max
    );
    (limits, lowered)
}

/// Why a user other than this one and root can write to a file or folder.
#[cfg(feature = "wasm")]
fn written_by_others(about: &std::fs::Metadata) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let (own, mode) = (rustix::process::geteuid().as_raw(), about.mode() & 0o7777);
    if about.uid() != own && about.uid() != 0 {
        return Some(format!("belongs to user {}", about.uid()));
    }
    // In a sticky folder, such as /tmp, nobody can replace another user's file.
    let sticky = about.is_dir() && mode & 0o1000 != 0;
    (mode & 0o022 != 0 && !sticky).then(|| format!("can be written by others (mode {mode:04o})"))
}

/// The bytes of the file that a log names, if they are those of the log and no other user can have put them there.
/// Whoever wrote the log chose the file and the digest: a digest alone would let that user run any code.
#[cfg(feature = "wasm")]
fn component_of_log(path: &Path, digest: &str, bytes_max: usize) -> Result<Vec<u8>, String> {
    use std::io::Read;
    let wrong = |why: String| {
        let path = path.display();
        format!(
            "{path}: {why}: name the log's policy, or another to compare with, with --policy FILE"
        )
    };
    let expected = "expected a file that only you or root can write to, in such a folder";
    // The file that symbolic links lead to, and its folder.
    let target = std::fs::canonicalize(path).map_err(|e| wrong(e.to_string()))?;
    // Looked at before it is opened as well, because opening a device may have effects.
    if !target.is_file() {
        return Err(wrong("is no regular file".into()));
    }
    // Does not wait at a FIFO.
    let opened = tally_ipc::admin::open_to_read("component", &target);
    let file = std::fs::File::from(opened.map_err(|e| wrong(e.to_string()))?.fd);
    let about = file.metadata().map_err(|e| wrong(e.to_string()))?;
    if !about.is_file() {
        return Err(wrong("is no regular file".into()));
    }
    if let Some(why) = written_by_others(&about) {
        return Err(wrong(format!("{why}, {expected}")));
    }
    let folder = target.parent().unwrap_or(Path::new("/"));
    let about_folder = folder.metadata().map_err(|e| wrong(e.to_string()))?;
    if let Some(why) = written_by_others(&about_folder) {
        return Err(wrong(format!("its folder {} {why}, {expected}", folder.display())));
    }
    if about.len() > bytes_max as u64 {
        return Err(wrong(format!("has more than {bytes_max} bytes")));
    }
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(bytes_max as u64).read_to_end(&mut bytes).map_err(|e| wrong(e.to_string()))?;
    let found = tally_trust::Digest::of(&bytes).hex();
    if found != digest {
        return Err(wrong(format!(
            "is no longer the component of the log (sha256 {found}, then {digest})"
        )));
    }
    Ok(bytes)
}

/// What makes instances of the policy, and whether all were the log's own.
struct Source {
    policy: Option<PathBuf>,
    config: Option<String>,
    #[cfg(feature = "wasm")]
    host: tally_wasm_host::PolicyHost,
    #[cfg(feature = "wasm")]
    component_bytes_max: usize,
    same: bool,
    digest: String,
    /// Limits that are lower than in the log.
    lowered: Vec<&'static str>,
}

impl Source {
    #[cfg(feature = "wasm")]
    fn open(args: &ReplayArgs, header: &tally_decision_log::Header) -> Result<Self, CtlError> {
        use tally_wasm_host::{Capabilities, Capability, Limits, PolicyHost};
        let failed = |why: String| CtlError::Failed(why);
        let logged: Limits = serde_json::from_value(header.limits.clone()).map_err(|e| {
            failed(format!("{}: its limits are not understood: {e}", args.file.display()))
        })?;
        let (limits, lowered) = within_presets(&logged);
        if !lowered.is_empty() {
            eprintln!(
                "tallyctl: {}: its limits {} exceed those of the preset `interpreted`, which apply instead",
                args.file.display(),
                lowered.join(", ")
            );
        }
        let granted = header.capabilities.iter().map(|name| name.parse::<Capability>());
        let granted = granted.collect::<Result<Capabilities, _>>().map_err(failed)?;
        let component_bytes_max = limits.component_bytes_max;
        let host = PolicyHost::new(limits).map_err(|e| failed(e.to_string()))?;
        let host = host.granting(granted);
        let config = match &args.config {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .map_err(|e| failed(format!("--config {}: {e}", path.display())))?,
            ),
            None => None,
        };
        let policy = args.policy.clone();
        let digest = String::new();
        Ok(Source { policy, config, host, component_bytes_max, same: true, digest, lowered })
    }

    #[cfg(not(feature = "wasm"))]
    fn open(_: &ReplayArgs, _: &tally_decision_log::Header) -> Result<Self, CtlError> {
        let why = "log replay: this tallyctl was built without WebAssembly (feature `wasm`)";
        Err(CtlError::Failed(why.into()))
    }

    #[cfg(feature = "wasm")]
    fn instance(&mut self, about: &About) -> Result<Box<dyn Policy + Send>, String> {
        let compiled = match &self.policy {
            Some(path) => self.host.compile_file(path),
            None if about.path.is_empty() => {
                return Err(format!(
                    "{} was active, which is no component: name one with --policy FILE",
                    about.name
                ));
            }
            None => {
                let path = Path::new(&about.path);
                let bytes = component_of_log(path, &about.digest, self.component_bytes_max)?;
                let file = tally_wasm_host::ComponentFile::new(path, bytes, None);
                self.host.compile(&file, &tally_wasm_host::Cancel::never())
            }
        };
        let compiled = compiled.map_err(|e| e.to_string())?;
        let config = self.config.as_deref().unwrap_or(&about.config);
        let saved = about.saved.as_ref().map(|s| tally_wasm_host::Saved {
            format: s.format.clone(),
            version: s.version,
            data: s.data.clone(),
        });
        let loaded = compiled.start(config, saved.as_ref()).map_err(|e| e.to_string())?;
        self.digest = loaded.digest().to_owned();
        self.same &= loaded.digest() == about.digest && config == about.config;
        Ok(Box::new(loaded))
    }

    #[cfg(not(feature = "wasm"))]
    fn instance(&mut self, _: &About) -> Result<Box<dyn Policy + Send>, String> {
        let _ = (&self.policy, &self.config, &mut self.same, &mut self.digest);
        Err("built without WebAssembly".into())
    }
}

pub fn run(out: &mut impl Write, args: &ReplayArgs) -> Result<(), CtlError> {
    let file = &args.file;
    let mut log = open(file)?;
    let mut source = Source::open(args, log.header())?;
    let mut player = Player::new(|about| source.instance(about));
    if args.policy.is_some() {
        player = player.of_another();
    }
    let rest = loop {
        match next(&mut log, file) {
            (Some(record), _) => {
                let fed = player.feed(&record, true);
                fed.map_err(|e| CtlError::Failed(format!("{}: {e}", file.display())))?;
            }
            (None, rest) => break rest,
        }
    };
    let (comparison, parts) = (player.comparison().clone(), player.parts());
    let missing = player.events_missing();
    let named = |top: Vec<(u32, Share)>, name: &dyn Fn(u32) -> String| -> Vec<_> {
        top.into_iter().map(|(id, share)| (name(id), id, share)).collect()
    };
    let kernels = named(comparison.top_kernels(TOP), &|id| {
        player.world().profiles.get(id).map_or("?".into(), |p| p.key.name.clone())
    });
    let clients = named(comparison.top_clients(TOP), &|id| {
        player.world().clients.get(&id).map_or(format!("client {id}"), |c| c.info.name.clone())
    });
    drop(player);
    let same = source.same;
    if let Some(why) = &rest {
        eprintln!("tallyctl: {why}");
    }
    if args.json {
        let shares = |list: &[(String, u32, Share)]| -> Vec<_> {
            list.iter()
                .map(|(name, id, s)| json!({"name": name, "id": id, "decisions": s.decisions, "parted": s.parted}))
                .collect()
        };
        let report = json!({
            "schema": 1, "records": log.records(), "same_policy": same,
            "equal": comparison.is_equal(), "agreement_percent": comparison.agreement_percent(),
            "kinds": KINDS, "comparison": comparison.summary(), "parts": parts,
            "kernels": shares(&kernels), "clients": shares(&clients),
            "events_missing": missing, "digest": source.digest, "incomplete": rest,
        });
        writeln!(out, "{report:#}")?;
    } else {
        show(out, file, log.records(), same, &comparison, &parts)?;
        if !comparison.is_equal() {
            places(out, "KERNEL", &kernels)?;
            places(out, "CLIENT", &clients)?;
        }
        if !missing.is_empty() {
            writeln!(
                out,
                "it asked for {} and got none: the log's policy did not",
                missing.join(", ")
            )?;
        }
    }
    if same { verdict(&comparison, &parts, &source.lowered) } else { Ok(()) }
}

/// Whether the log's own policy answered as it had; `lowered` are the limits that are lower than in the log.
fn verdict(comparison: &Comparison, parts: &Parts, lowered: &[&str]) -> Result<(), CtlError> {
    if !comparison.is_equal() && !lowered.is_empty() {
        return Err(CtlError::NoProof(format!(
            "{} answers differ, under lower limits than the log's ({}): this says nothing against the policy",
            parts.differ_known + parts.differ_unknown,
            lowered.join(", ")
        )));
    }
    if parts.differ_known > 0 {
        return Err(CtlError::Failed(format!(
            "the log's own policy answered {} calls otherwise than it had, although the log holds all that it knew",
            parts.differ_known
        )));
    }
    if !comparison.is_equal() {
        return Err(CtlError::NoProof(format!(
            "{} answers differ, all of them in parts of the log that begin while the policy was running: what it \
             remembered from before is not in the log, so this says nothing against the policy. To have a log that \
             can be proved, start recording before the policy is loaded (`tally-core --log FILE`, or load the policy \
             again while recording), or have the policy implement the contract's `state` interface",
            parts.differ_unknown
        )));
    }
    if parts.lost + parts.not_compared > 0 {
        return Err(CtlError::NoProof(format!(
            "every answer that was compared is equal, but {} records were lost and {} calls not compared: this is no \
             proof",
            parts.lost, parts.not_compared
        )));
    }
    Ok(())
}

fn show(
    out: &mut impl Write,
    file: &Path,
    records: u64,
    same: bool,
    c: &Comparison,
    p: &Parts,
) -> std::io::Result<()> {
    writeln!(out, "log        {}: {records} records", file.display())?;
    let parts = [
        (p.from_start, "with the policy's start"),
        (p.from_saved, "while the policy ran, with what it knew then"),
        (p.mid_run, "while the policy ran: what it knew then is not in the log"),
        (p.after_gap, "after a gap: what the policy knew then is not in the log"),
    ];
    for (count, how) in parts.into_iter().filter(|(count, _)| *count > 0) {
        let what = if count == 1 { "part begins" } else { "parts begin" };
        writeln!(out, "begins     {count} {what} {how}")?;
    }
    if p.lost > 0 {
        writeln!(out, "gaps       {} records were lost", p.lost)?;
    }
    writeln!(out, "policy     {}", if same { "the log's own" } else { "another" })?;
    writeln!(
        out,
        "decisions  {} of {} equal ({:.2} %), {} of the same kind; {} before the first difference",
        c.equal,
        c.decisions,
        c.agreement_percent(),
        c.same_kind,
        c.before_first_parting
    )?;
    writeln!(
        out,
        "events     {} given; after {} calls commands or outcome differ; {} calls not compared",
        c.events, c.calls_differ, p.not_compared
    )?;
    if p.timed_faults > 0 {
        writeln!(
            out,
            "clock      {} calls were stopped by the clock, which no replay repeats",
            p.timed_faults
        )?;
    }
    if let Some(last) = &c.last_fault {
        writeln!(out, "faults     {:?}; the last: {last}", c.faults)?;
    }
    if c.is_equal() {
        return Ok(());
    }
    writeln!(out, "\nrows: as recorded; columns: as replayed")?;
    let header: Vec<_> = std::iter::once(("", Align::Left))
        .chain(KINDS.iter().map(|k| (*k, Align::Right)))
        .collect();
    let rows: Vec<Vec<String>> = c
        .matrix
        .iter()
        .zip(KINDS)
        .filter(|(row, _)| row.iter().any(|n| *n > 0))
        .map(|(row, kind)| {
            std::iter::once(kind.to_owned()).chain(row.iter().map(u64::to_string)).collect()
        })
        .collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    for (i, parting) in c.first.iter().enumerate() {
        let what = if i == 0 { "first difference" } else { "also" };
        writeln!(out, "{what}, record {}: {}", parting.record, parting.call)?;
        writeln!(out, "  recorded  {}", parting.recorded)?;
        writeln!(out, "  replayed  {}", parting.other)?;
    }
    if c.parted_after_hold > 0 {
        writeln!(
            out,
            "{} of the differences are about launches that had been held before",
            c.parted_after_hold
        )?;
    }
    Ok(())
}

fn places(out: &mut impl Write, what: &str, all: &[(String, u32, Share)]) -> std::io::Result<()> {
    let rows: Vec<_> = all
        .iter()
        .filter(|(_, _, share)| share.parted > 0)
        .map(|(name, _, share)| {
            vec![share.parted.to_string(), share.decisions.to_string(), crate::status::short(name)]
        })
        .collect();
    let header = [("DIFFER", Align::Right), ("OF", Align::Right), (what, Align::Left)];
    writeln!(out)?;
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "wasm")]
    #[test]
    fn only_the_bytes_of_the_log_are_taken_of_the_file_that_it_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("p.wasm"), b"component").unwrap();
        let digest = tally_trust::Digest::of(b"component").hex();
        let fifo = at("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        mode(&at("p.wasm"), 0o644);
        mode(dir.path(), 0o755);
        let refused = |path: &Path, digest: &str, bytes_max, why: &str| {
            let said = component_of_log(path, digest, bytes_max).unwrap_err();
            assert!(said.contains(why) && said.contains("--policy FILE"), "{said}");
        };
        assert_eq!(component_of_log(&at("p.wasm"), &digest, 9).unwrap(), b"component");
        refused(&at("p.wasm"), &digest, 8, "more than 8 bytes");
        refused(&at("p.wasm"), "", 9, "is no longer the component of the log");
        refused(&fifo, &digest, 9, "no regular file");
        refused(dir.path(), &digest, 9, "no regular file");
        refused(Path::new("/dev/zero"), &digest, 9, "no regular file");
        refused(&at("none"), &digest, 9, "none");
    }

    #[cfg(feature = "wasm")]
    #[test]
    fn a_component_that_other_users_can_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, links) = (dir.path().join("policies"), dir.path().join("links"));
        let (file, link) = (folder.join("p.wasm"), links.join("p.wasm"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::create_dir(&links).unwrap();
        std::fs::write(&file, b"component").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        mode(&links, 0o755);
        let digest = tally_trust::Digest::of(b"component").hex();
        for (of_folder, of_file, why) in [
            (0o755, 0o644, None),
            (0o1777, 0o600, None),
            (0o755, 0o664, Some("can be written by others (mode 0664)")),
            (0o755, 0o646, Some("can be written by others (mode 0646)")),
            (0o775, 0o644, Some("policies can be written by others (mode 0775)")),
            (0o757, 0o644, Some("policies can be written by others (mode 0757)")),
        ] {
            mode(&folder, of_folder);
            mode(&file, of_file);
            // It is the folder of the file that counts, not that of a link to it.
            for path in [&file, &link] {
                let (read, name) = (component_of_log(path, &digest, 9), path.to_str().unwrap());
                match (read, why) {
                    (Ok(bytes), None) => assert_eq!(bytes, b"component"),
                    (Err(said), Some(why)) => {
                        for part in [name, why, "only you or root", "--policy FILE"] {
                            assert!(said.contains(part), "{part:?} not in {said}");
                        }
                    }
                    (read, _) => panic!("{of_folder:o} {of_file:o}: {read:?}"),
                }
            }
        }
        mode(&folder, 0o755);
        mode(&file, 0o644);
        // Only root can give files away.
        for path in [&file, &folder] {
            if std::os::unix::fs::chown(path, Some(65_533), None).is_ok() {
                let said = component_of_log(&file, &digest, 9).unwrap_err();
                assert!(said.contains("belongs to user 65533"), "{said}");
                std::os::unix::fs::chown(path, Some(0), None).unwrap();
            }
        }
    }

    #[cfg(feature = "wasm")]
    fn mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[cfg(feature = "wasm")]
    #[test]
    fn limits_of_a_log_are_at_most_those_of_the_largest_preset() {
        use tally_wasm_host::Limits;
        let timed = |limits: Limits| Limits {
            call_cpu_ms_max: REPLAY_CPU_MS,
            init_cpu_ms_max: REPLAY_CPU_MS,
            ..limits
        };
        for known in [Limits::default(), Limits::interpreted()] {
            assert_eq!(within_presets(&known), (timed(known), Vec::new()));
        }
        let forged = Limits {
            memory_bytes: usize::MAX,
            decide_fuel: u64::MAX,
            call_cpu_ms_max: u64::MAX,
            compile_cpu_s: u64::MAX,
            ..Limits::default()
        };
        let most = Limits::interpreted();
        let expected = Limits {
            memory_bytes: most.memory_bytes,
            decide_fuel: most.decide_fuel,
            compile_cpu_s: most.compile_cpu_s,
            ..timed(Limits::default())
        };
        let lowered = vec!["memory_bytes", "decide_fuel", "compile_cpu_s"];
        assert_eq!(within_presets(&forged), (expected, lowered));
    }

    fn code(decisions: u64, parts: Parts) -> (u8, String) {
        code_under(&[], decisions, parts)
    }

    fn code_under(lowered: &[&str], decisions: u64, parts: Parts) -> (u8, String) {
        let comparison = Comparison { decisions, equal: decisions, ..Comparison::default() };
        let differ = parts.differ_known + parts.differ_unknown;
        let comparison = Comparison { equal: decisions - differ, ..comparison };
        match verdict(&comparison, &parts, lowered) {
            Ok(()) => (0, String::new()),
            Err(CtlError::NoProof(why)) => (3, why),
            Err(CtlError::Failed(why)) => (1, why),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn only_what_a_policy_cannot_have_known_otherwise_counts_against_it() {
        assert_eq!(code(9, Parts { mid_run: 1, ..Parts::default() }).0, 0);
        let (exit, why) = code(9, Parts { mid_run: 1, differ_unknown: 2, ..Parts::default() });
        assert_eq!(exit, 3);
        assert!(
            why.contains("2 answers differ") && why.contains("while the policy was running"),
            "{why}"
        );
        let known = Parts { differ_known: 1, differ_unknown: 2, ..Parts::default() };
        assert!(matches!(code(9, known), (1, why) if why.contains("1 calls otherwise")));
        assert_eq!(code(9, Parts { lost: 4, ..Parts::default() }).0, 3);
        // Under lower limits it need not answer as it had.
        let known = Parts { differ_known: 1, ..Parts::default() };
        let (exit, why) = code_under(&["decide_fuel"], 9, known);
        assert!(exit == 3 && why.contains("1 answers differ") && why.contains("decide_fuel"));
        assert_eq!(code_under(&["decide_fuel"], 9, Parts::default()).0, 0);
    }
}
