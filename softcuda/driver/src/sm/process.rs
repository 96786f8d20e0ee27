//! Is a process still there? A pid alone does not say: pids are reused, and a
//! killed process whose parent has not waited for it looks alive to `kill`.

use std::fs;

/// Start time of a process in clock ticks since boot; `None` if it is gone or
/// only a zombie is left of it, `Some(None)` if that cannot be found out.
fn look(pid: u32) -> Option<Option<u64>> {
    let stat = match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(e) if is_gone(&e) => return exists(pid).then_some(None),
        // Out of files, say: that is no reason to take somebody's SMs.
        Err(_) => return Some(None),
    };
    let Some((state, started)) = parse_stat(&stat) else { return Some(None) };
    match state {
        // The main thread may have ended before the others.
        b'Z' if fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|d| d.count() > 1) => {
            Some(Some(started))
        }
        b'Z' | b'X' | b'x' => None,
        _ => Some(Some(started)),
    }
}

fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// For where `/proc` hides other users' processes or is not mounted.
fn exists(pid: u32) -> bool {
    // SAFETY: signal 0 only asks whether there is such a process.
    let rc = unsafe { libc::kill(pid as libc::pid_t, 0) };
    rc == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

/// This process's start time, 0 if unknown.
pub(super) fn own_start() -> u64 {
    look(std::process::id()).flatten().unwrap_or(0)
}

/// Whether the process that started at `started` lives. In doubt it does.
pub(super) fn is_alive(pid: u64, started: u64) -> bool {
    let Some(pid) = u32::try_from(pid).ok().filter(|&p| i32::try_from(p).is_ok()) else {
        return false;
    };
    match look(pid) {
        Some(Some(found)) => found == started || started == 0,
        Some(None) => true,
        None => false,
    }
}

/// State and start time out of `/proc/<pid>/stat`. The command in brackets
/// may hold anything, brackets too, so fields count from the last one.
fn parse_stat(stat: &[u8]) -> Option<(u8, u64)> {
    let after = stat.iter().rposition(|&b| b == b')')? + 1;
    let text = std::str::from_utf8(&stat[after..]).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    // Field 22 of the line; the state is field 3.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_a_zombie_does_not() {
        let own = u64::from(std::process::id());
        assert!(is_alive(own, own_start()));
        assert!(!is_alive(own, own_start() + 1), "the pid of somebody else, reused");
        assert!(!is_alive(u64::MAX, 0));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = u64::from(child.id());
        let started = look(child.id()).flatten().unwrap_or(0);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while is_alive(pid, started) {
            assert!(std::time::Instant::now() < deadline, "still counted as alive");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!is_alive(pid, started));
    }

    #[test]
    fn stat_with_brackets_in_the_name() {
        let line = b"7 (a) Z (b) R 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        assert_eq!(parse_stat(line), Some((b'R', 4242)));
        assert_eq!(parse_stat(b"nonsense"), None);
    }
}
