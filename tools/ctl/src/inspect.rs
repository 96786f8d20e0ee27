//! Whether a program can be governed at all, from its file: what the dynamic loader would not preload into.

use rustix::fs::{StatVfsMountFlags, statvfs};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Scripts whose interpreters are scripts: as many as the kernel follows.
const SCRIPTS_MAX: usize = 4;
/// Read of a file: ELF headers, or the first line of a script.
const HEAD_BYTES: u64 = 64 * 1024;

const ELF_CLASS_64: u8 = 2;
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
const PT_INTERP: u32 = 3;
const ET_DYN: u16 = 3;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

/// Why a program cannot be governed.
#[derive(Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// A phrase for people.
    pub reason: String,
    /// The loader would print an error for the preloaded library: leave it out.
    pub leave_out_preload: bool,
}

/// Looks at the program that `command` would start; `None` if nothing speaks against it, or if it cannot be
/// read (starting it then says why).
pub fn obstacle(command: &OsStr) -> Option<Obstacle> {
    let mut file = find(command)?;
    for _ in 0..=SCRIPTS_MAX {
        let head = head(&file)?;
        match interpreter(&head) {
            Some(next) => file = next,
            None => return by_elf(&head).or_else(|| by_privileges(&file)),
        }
    }
    None
}

/// The file that `execvp` would run for this command.
fn find(command: &OsStr) -> Option<PathBuf> {
    if command.as_bytes().contains(&b'/') {
        return Some(command.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(command)).find(|file| file.is_file())
}

fn head(file: &Path) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    let file = std::fs::File::open(file).ok()?;
    // A pipe or a device would not end.
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    file.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    Some(head)
}

/// The program that runs a script; behind `env` the one that it starts.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let mut words = line.split(blank).filter(|word| !word.is_empty());
    let program = PathBuf::from(OsString::from_vec(words.next()?.to_vec()));
    if program.file_name() != Some(OsStr::new("env")) {
        return Some(program);
    }
    let started = words.next().filter(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    Some(started.and_then(|word| find(OsStr::from_bytes(word))).unwrap_or(program))
}

/// Why a file cannot be preloaded into programs of this machine; `None` if nothing speaks against it.
pub fn not_a_library(file: &Path) -> Option<Obstacle> {
    let head = head(file).unwrap_or_default();
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let is_elf_64 = head.starts_with(b"\x7fELF") && head.get(4) == Some(&ELF_CLASS_64);
    if is_elf_64 && half(16) == Some(ET_DYN) && half(18) == Some(MACHINE) {
        return None;
    }
    let reason = format!("{} is not a shared library for this machine", file.display());
    Some(Obstacle { reason, leave_out_preload: true })
}

fn by_elf(head: &[u8]) -> Option<Obstacle> {
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    let obstacle = |reason: &str, leave_out_preload| {
        Some(Obstacle { reason: reason.into(), leave_out_preload })
    };
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    if *head.get(4)? != ELF_CLASS_64 {
        return obstacle("it is a 32-bit program", true);
    }
    if half(18)? != MACHINE {
        return obstacle("it is built for another kind of machine", true);
    }
    let (first, size, count) = (long(32)? as usize, half(54)? as usize, half(56)? as usize);
    let headers = (0..count).map(|i| first.saturating_add(i * size));
    let Some(header) = headers.into_iter().find(|at| word(*at) == Some(PT_INTERP)) else {
        return obstacle(
            "it is statically linked, and nothing can be preloaded into such a program",
            false,
        );
    };
    let (at, bytes) = (long(header + 8)? as usize, long(header + 32)? as usize);
    let loader = head.get(at..at.checked_add(bytes)?)?;
    let name = b"ld-musl";
    if loader.windows(name.len()).any(|part| part == name) {
        return obstacle("its C library is musl, and the CUDA driver needs glibc", false);
    }
    None
}

/// The loader preloads nothing into a program that runs with more privileges than its caller has.
fn by_privileges(file: &Path) -> Option<Obstacle> {
    let metadata = std::fs::metadata(file).ok()?;
    let gains_none = rustix::thread::no_new_privs().unwrap_or(false)
        || statvfs(file).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID));
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mode = metadata.mode();
    let what = if gains_none {
        return None;
    } else if mode & SET_USER_ID != 0 && metadata.uid() != user {
        "set-user-ID"
    } else if mode & SET_GROUP_ID != 0 && mode & GROUP_EXECUTE != 0 && metadata.gid() != group {
        "set-group-ID"
    } else if user != 0 && has_capabilities(file) {
        "file capabilities"
    } else {
        return None;
    };
    let reason = format!(
        "it runs with privileges of its own ({what}), and nothing is preloaded into such a program"
    );
    Some(Obstacle { reason, leave_out_preload: false })
}

fn has_capabilities(file: &Path) -> bool {
    rustix::fs::getxattr(file, "security.capability", &mut [0_u8; 64][..]).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    /// An ELF file of 64 bits with at most one program header.
    fn elf(machine: u16, loader: Option<&[u8]>) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(64, 0);
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[32..40].copy_from_slice(&64_u64.to_le_bytes());
        file[54..56].copy_from_slice(&56_u16.to_le_bytes());
        if let Some(loader) = loader {
            file[56..58].copy_from_slice(&1_u16.to_le_bytes());
            file.extend(PT_INTERP.to_le_bytes());
            file.resize(64 + 56, 0);
            file[72..80].copy_from_slice(&120_u64.to_le_bytes());
            file[96..104].copy_from_slice(&(loader.len() as u64).to_le_bytes());
            file.extend(loader);
        }
        file
    }

    fn reason(bytes: &[u8]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        obstacle(file.path().as_os_str()).map(|o| o.reason).unwrap_or_default()
    }

    #[test]
    fn programs_that_cannot_be_preloaded_are_told_apart() {
        assert_eq!(reason(&elf(MACHINE, Some(b"/lib64/ld-linux-x86-64.so.2\0"))), "");
        assert!(reason(&elf(MACHINE, None)).contains("statically linked"));
        assert!(reason(&elf(MACHINE, Some(b"/lib/ld-musl-x86_64.so.1\0"))).contains("musl"));
        assert!(reason(&elf(3, None)).contains("another kind of machine"));
        let mut small = elf(MACHINE, None);
        small[4] = 1;
        assert!(reason(&small).contains("32-bit"));
        for end in 0..elf(MACHINE, None).len() {
            reason(&elf(MACHINE, Some(b"/lib/ld\0"))[..end]);
        }
        assert_eq!(reason(b"not a program"), "");
    }

    #[test]
    fn scripts_are_what_runs_them() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("static");
        std::fs::write(&program, elf(MACHINE, None)).unwrap();
        let script = format!("#! {} -x\necho\n", program.display());
        assert!(reason(script.as_bytes()).contains("statically linked"));
        assert_eq!(reason(b"#!/bin/sh\n"), "");
        assert_eq!(interpreter(b"#!/usr/bin/env sh\n"), find("sh".as_ref()));
        assert_eq!(interpreter(b"#!/usr/bin/env -S sh\n"), Some("/usr/bin/env".into()));
    }

    #[test]
    fn a_program_of_another_user_that_sets_its_user_id_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program");
        std::fs::write(&file, elf(MACHINE, Some(b"/lib64/ld-linux-x86-64.so.2\0"))).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o4755)).unwrap();
        // Its owner runs it with what they have anyway.
        assert_eq!(obstacle(file.as_os_str()), None);
    }
}
