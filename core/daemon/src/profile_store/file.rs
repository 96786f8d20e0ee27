//! The file of one GPU: JSON lines, replaced whole.
//!
//! ```text
//! {"tally_profiles":1,"device":"GPU-...","sm_count":132,"driver_version":12080,"verdicts":1,"kernels":1}
//! {"name":"all_reduce","image":"000000000000000000000000000000ab","whole_only":18}
//! {"name":"gemm","image":"000000000000000000000000000000ab","grid":[8,1,1],"block":[32,1,1],"count":64,
//!  "mean_ns":9,"predicted_ns":9,"p99_ns":12,"blocks_per_sm":4,"registers":32,
//!  "forms":[{"form":"sliced","argument":2,...}]}
//! ```
//!
//! First the verdicts, then the kernels, those with the most measured time first. The
//! header's numbers of both say whether the file is whole.

use super::profiled::{Device, Figures, FormFigures, Profiled};
use crate::owned_file::{self, OwnedError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tally_contract::limits::{FORMS_MAX, PROFILE_FILE_BYTES_MAX};
use tally_engine::policy::Form;
use tally_engine::profile::{Demand, KernelKey};
use tally_ipc::layout::KERNEL_NAME_BYTES;
use tally_rewriter::TransformRefusal;

pub const VERSION: u64 = 1;
/// Files of a folder that are read: a host has at most so many GPUs, or parts of them.
pub const FILES_MAX: usize = 64;
/// How files of this kind end.
const EXTENSION: &str = ".jsonl";
/// A name as the core reads it: each byte replaced at worst, and the hash of a long one.
const NAME_BYTES_MAX: usize = 3 * KERNEL_NAME_BYTES + 17;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read, or is not what the core would have written.
    #[error(transparent)]
    Owned(#[from] OwnedError),
    #[error("it has version {0} of the format and this release reads {VERSION}")]
    Version(u64),
    /// A line that the core would not have written.
    #[error("line {line} is damaged ({message})")]
    Corrupt { line: usize, message: String },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    tally_profiles: u64,
    device: String,
    sm_count: u32,
    driver_version: u32,
    verdicts: usize,
    kernels: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VerdictLine {
    name: String,
    #[serde(with = "hex")]
    image: u128,
    whole_only: u8,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KernelLine {
    name: String,
    #[serde(with = "hex")]
    image: u128,
    grid: [u32; 3],
    block: [u32; 3],
    count: u64,
    mean_ns: u64,
    predicted_ns: u64,
    p99_ns: u64,
    blocks_per_sm: u16,
    registers: u16,
    forms: Vec<FormLine>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormLine {
    form: FormName,
    argument: u32,
    count: u64,
    mean_ns: u64,
    turnaround_ns: u64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FormName {
    Whole,
    Sliced,
    Preemptible,
    SmLimited,
}

/// Numbers that JSON readers would round.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &u128, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{value:032x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u128, D::Error> {
        let text = String::deserialize(d)?;
        u128::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
    }
}

fn form_name(form: Form) -> FormName {
    match form {
        Form::Whole => FormName::Whole,
        Form::Sliced => FormName::Sliced,
        Form::Preemptible => FormName::Preemptible,
        Form::SmLimited => FormName::SmLimited,
    }
}

fn form_of(name: FormName) -> Form {
    match name {
        FormName::Whole => Form::Whole,
        FormName::Sliced => Form::Sliced,
        FormName::Preemptible => Form::Preemptible,
        FormName::SmLimited => Form::SmLimited,
    }
}

/// The words of `GPU-00010203-...`.
fn uuid_words(text: &str) -> Option<[u64; 2]> {
    let digits: String = text.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
    let whole = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    let bytes = whole.to_be_bytes();
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[i * 8 + at]));
    Some([word(0), word(1)])
}

/// A device's file in a folder. Not by driver version: one written under another
/// driver is replaced.
pub fn path(folder: &Path, device: &Device) -> PathBuf {
    folder.join(format!("{}-{}sms{EXTENSION}", crate::status::uuid(device.uuid), device.sm_count))
}

/// The files of a folder, latest first, and how many there are beyond [`FILES_MAX`].
/// Takes away what a core that was killed while it wrote left.
///
/// # Errors
/// If the folder cannot be read.
pub fn list(folder: &Path) -> std::io::Result<(Vec<PathBuf>, usize)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(rest) = name.strip_suffix(".tmp").filter(|_| name.starts_with('.')) {
            let pid = rest.rsplit('.').next().and_then(|pid| pid.parse().ok());
            let pid = pid.and_then(rustix::process::Pid::from_raw);
            if pid.is_some_and(|p| {
                rustix::process::test_kill_process(p) == Err(rustix::io::Errno::SRCH)
            }) {
                let _ = std::fs::remove_file(entry.path());
            }
        } else if name.starts_with("GPU-") && name.ends_with(EXTENSION) {
            let changed = entry.metadata().and_then(|m| m.modified());
            files.push((changed.ok(), entry.path()));
        }
    }
    files.sort_by(|a, b| b.cmp(a));
    let beyond = files.len().saturating_sub(FILES_MAX);
    files.truncate(FILES_MAX);
    Ok((files.into_iter().map(|(_, path)| path).collect(), beyond))
}

/// Read a file; at most `kernels_max` kernels and as many verdicts of it.
///
/// # Errors
/// Why it cannot be used.
pub fn read(path: &Path, kernels_max: usize) -> Result<(Device, Profiled), FileError> {
    let text = owned_file::read(path, PROFILE_FILE_BYTES_MAX)?;
    decode(&text, kernels_max)
}

fn corrupt(line: usize, message: impl std::fmt::Display) -> FileError {
    FileError::Corrupt { line, message: message.to_string() }
}

/// What [`read`] makes of the bytes of a file.
///
/// # Errors
/// What is wrong with them.
pub fn decode(text: &[u8], kernels_max: usize) -> Result<(Device, Profiled), FileError> {
    let mut lines = text.split(|b| *b == b'\n').enumerate().map(|(i, line)| (i + 1, line));
    let (_, first) = lines.next().unwrap_or_default();
    // The version first: another's header may look otherwise.
    let any: serde_json::Value = serde_json::from_slice(first).map_err(|e| corrupt(1, e))?;
    match any.get("tally_profiles").and_then(serde_json::Value::as_u64) {
        Some(VERSION) => {}
        Some(other) => return Err(FileError::Version(other)),
        None => return Err(corrupt(1, "it is no header of profiles")),
    }
    let header: Header = serde_json::from_value(any).map_err(|e| corrupt(1, e))?;
    let uuid = uuid_words(&header.device).ok_or_else(|| corrupt(1, "the device is no UUID"))?;
    let device = Device { uuid, sm_count: header.sm_count, driver_version: header.driver_version };
    let mut profiled = Profiled::default();
    let (mut at, mut verdicts, mut kernels) = (1, 0, 0);
    for (number, line) in lines.filter(|(_, line)| !line.is_empty()) {
        at = number;
        if verdicts < header.verdicts {
            verdicts += 1;
            let v: VerdictLine = serde_json::from_slice(line).map_err(|e| corrupt(at, e))?;
            check_name(at, &v.name)?;
            // One that this release does not know is none.
            if let Some(why) =
                TransformRefusal::from_code(v.whole_only).filter(|_| verdicts <= kernels_max)
            {
                profiled.set_verdict(v.image, v.name, why);
            }
        } else {
            kernels += 1;
            let k: KernelLine = serde_json::from_slice(line).map_err(|e| corrupt(at, e))?;
            check_name(at, &k.name)?;
            if k.forms.len() > FORMS_MAX {
                return Err(corrupt(at, "too many forms"));
            }
            if kernels <= kernels_max {
                let (key, figures) = figures_of(k);
                profiled.set_figures(key, figures.aged());
            }
        }
    }
    if (verdicts, kernels) != (header.verdicts, header.kernels) {
        let message =
            format!("{verdicts} verdicts and {kernels} kernels: not what the header says");
        return Err(corrupt(at, message));
    }
    Ok((device, profiled))
}

fn check_name(line: usize, name: &str) -> Result<(), FileError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(corrupt(line, "a name is too long"));
    }
    Ok(())
}

fn figures_of(k: KernelLine) -> (KernelKey, Figures) {
    let form = |f: &FormLine| FormFigures {
        form: form_of(f.form),
        argument: f.argument,
        count: f.count,
        mean_ns: f.mean_ns,
        turnaround_ns: f.turnaround_ns,
    };
    let figures = Figures {
        count: k.count,
        mean_ns: k.mean_ns,
        predicted_ns: k.predicted_ns,
        p99_ns: k.p99_ns,
        demand: Demand { blocks_per_sm: k.blocks_per_sm, registers: k.registers },
        forms: k.forms.iter().map(form).collect(),
    };
    (KernelKey { name: k.name, image: k.image, grid: k.grid, block: k.block }, figures)
}

fn kernel_line(key: &KernelKey, f: &Figures) -> KernelLine {
    let form = |f: &FormFigures| FormLine {
        form: form_name(f.form),
        argument: f.argument,
        count: f.count,
        mean_ns: f.mean_ns,
        turnaround_ns: f.turnaround_ns,
    };
    KernelLine {
        name: key.name.clone(),
        image: key.image,
        grid: key.grid,
        block: key.block,
        count: f.count,
        mean_ns: f.mean_ns,
        predicted_ns: f.predicted_ns,
        p99_ns: f.p99_ns,
        blocks_per_sm: f.demand.blocks_per_sm,
        registers: f.demand.registers,
        forms: f.forms.iter().map(form).collect(),
    }
}

/// The file's content, at most `bytes_max` bytes: beyond it the kernels with the least measured time are left
/// out.
fn encode(device: &Device, profiled: &Profiled, bytes_max: usize) -> std::io::Result<Vec<u8>> {
    const HEADER_BYTES_MAX: usize = 512;
    let room = bytes_max.saturating_sub(HEADER_BYTES_MAX);
    let mut body = Vec::new();
    let mut add = |line: Vec<u8>| {
        let fits = body.len() + line.len() < room;
        if fits {
            body.extend(line);
            body.push(b'\n');
        }
        fits
    };
    let verdicts = profiled
        .verdicts()
        .map(|(image, name, why)| VerdictLine { name: name.into(), image, whole_only: why.code() })
        .map(|line| serde_json::to_vec(&line).map(&mut add))
        .take_while(|added| !matches!(added, Ok(false)))
        .try_fold(0, |n, added| added.map(|_| n + 1))?;
    let mut all: Vec<_> = profiled.kernels().collect();
    all.sort_by_cached_key(|(_, figures)| std::cmp::Reverse(figures.total_ns()));
    let kernels = all
        .into_iter()
        .map(|(key, figures)| serde_json::to_vec(&kernel_line(key, figures)).map(&mut add))
        .take_while(|added| !matches!(added, Ok(false)))
        .try_fold(0, |n, added| added.map(|_| n + 1))?;
    let header = Header {
        tally_profiles: VERSION,
        device: crate::status::uuid(device.uuid),
        sm_count: device.sm_count,
        driver_version: device.driver_version,
        verdicts,
        kernels,
    };
    let mut text = serde_json::to_vec(&header)?;
    text.push(b'\n');
    text.append(&mut body);
    Ok(text)
}

/// Write a file so that at any moment, after a loss of power too, it is the old one or
/// the new one.
///
/// # Errors
/// The error of the system call that failed; the old file is as it was.
pub fn write(path: &Path, device: &Device, profiled: &Profiled) -> std::io::Result<()> {
    owned_file::replace(path, &encode(device, profiled, PROFILE_FILE_BYTES_MAX)?)
}

/// Move a file that cannot be used out of the way. Where to.
///
/// # Errors
/// The error of the system call that failed.
pub fn move_aside(path: &Path) -> std::io::Result<PathBuf> {
    let aside = path.with_added_extension("bad");
    std::fs::rename(path, &aside)?;
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::super::profiled::tests::{figures, key};
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    const DEVICE: Device =
        Device { uuid: [0x0706_0504_0302_0100, 9], sm_count: 132, driver_version: 12_080 };

    fn some() -> Profiled {
        let mut profiled = Profiled::default();
        let form = |form, argument| FormFigures {
            form,
            argument,
            count: 5,
            mean_ns: 70,
            turnaround_ns: 9,
        };
        let forms = vec![form(Form::Sliced, 2), form(Form::Preemptible, 0)];
        let demand = Demand { blocks_per_sm: 4, registers: 255 };
        profiled
            .set_figures(key("gemm", u128::MAX, 4), Figures { demand, forms, ..figures(60, 70) });
        profiled.set_figures(key("quote\"\\\n\u{1F600}", 2, 4), figures(1, 3));
        profiled.set_verdict(u128::MAX, "all_reduce".into(), TransformRefusal::BlocksWaited);
        profiled
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), &DEVICE);
        write(&path, &DEVICE, &some()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read(&path, 100).unwrap(), (DEVICE, some()));
        assert_eq!(list(dir.path()).unwrap(), (vec![path.clone()], 0));
        // Fewer are wanted: those with the most time.
        let (_, fewer) = read(&path, 1).unwrap();
        assert_eq!(fewer.kernels().map(|(k, _)| k.name.as_str()).collect::<Vec<_>>(), ["gemm"]);
        // Launches of an earlier run count as few.
        let mut many = Profiled::default();
        many.set_figures(key("k", 1, 1), figures(1 << 40, 5));
        write(&path, &DEVICE, &many).unwrap();
        let (_, aged) = read(&path, 100).unwrap();
        assert_eq!(aged.kernels().next().unwrap().1.count, 64);
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), &DEVICE);
        write(&path, &DEVICE, &some()).unwrap();
        let old = File::open(&path).unwrap();
        write(&path, &DEVICE, &Profiled::default()).unwrap();
        // Who has the old one open still reads all of it: a new file took its name.
        let text = std::io::read_to_string(old).unwrap();
        assert_eq!(decode(text.as_bytes(), 100).unwrap().1, some());
        assert_eq!(read(&path, 100).unwrap().1, Profiled::default());
        // What cannot be put in its place leaves nothing behind.
        let taken = dir.path().join("folder");
        std::fs::create_dir_all(taken.join("x")).unwrap();
        assert!(write(&taken, &DEVICE, &some()).is_err());
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        // Nor does a core that was killed, once another starts.
        let stale = dir.path().join(format!(".GPU-x.jsonl.{}.tmp", i32::MAX));
        let live = dir.path().join(format!(".GPU-x.jsonl.{}.tmp", std::process::id()));
        std::fs::write(&stale, "").unwrap();
        std::fs::write(&live, "").unwrap();
        list(dir.path()).unwrap();
        assert!(!stale.exists() && live.exists());
    }

    #[test]
    fn damaged_foreign_and_oversized_files_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), &DEVICE);
        write(&path, &DEVICE, &some()).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        let why = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            read(&path, 100).unwrap_err().to_string()
        };
        for at in 0..good.len() - 1 {
            why(&good.as_bytes()[..at]);
        }
        assert!(why(b"").contains("line 1 is damaged"));
        assert!(why(b"{}\n").contains("no header"));
        assert!(why(good.replace("sliced", "diced").as_bytes()).contains("line 3"));
        assert!(why(good.replace("\"kernels\":2", "\"kernels\":3").as_bytes()).contains("header"));
        assert!(why(good.replace("GPU-", "TPU-").as_bytes()).contains("UUID"));
        assert!(why(&[0xFF, 0xFE, 0]).contains("line 1"));
        let foreign = "{\"tally_profiles\":99,\"all\":\"new\"}\n";
        assert!(why(foreign.as_bytes()).contains("version 99"));
        let long = good.replace("all_reduce", &"x".repeat(NAME_BYTES_MAX + 1));
        assert!(why(long.as_bytes()).contains("too long"));
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(read(&path, 100), Err(FileError::Owned(OwnedError::Oversized(_)))));
        let link = dir.path().join("GPU-link.jsonl");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert!(matches!(read(&link, 100), Err(FileError::Owned(OwnedError::Io(_)))));
        let aside = move_aside(&path).unwrap();
        assert!(aside.exists() && !path.exists());
    }

    #[test]
    fn what_is_written_is_never_too_large_to_be_read() {
        let mut profiled = some();
        for x in 0..200 {
            profiled.set_figures(key(&"n".repeat(200), 3, x), figures(1, x.into()));
        }
        let text = encode(&DEVICE, &profiled, 20_000).unwrap();
        assert!(text.len() <= 20_000);
        let (_, read) = decode(&text, 1_000).unwrap();
        assert!((10..200).contains(&read.kernels().len()));
        assert!(read.kernels().any(|(k, _)| k.name == "gemm"), "the most time goes first");
        assert_eq!(read.verdicts().count(), 1);
    }

    #[test]
    fn a_uuid_leads_back() {
        assert_eq!(uuid_words(&crate::status::uuid(DEVICE.uuid)), Some(DEVICE.uuid));
        for wrong in ["", "GPU-", "GPU-1", "GPU-0001020304050607080910111213141x"] {
            assert_eq!(uuid_words(wrong), None, "{wrong}");
        }
    }
}
