//! Is a process still there? A pid alone does not say: pids are reused, and a
//! killed process whose parent has not waited for it looks alive to `kill`.

use std::fs;

/// Start time of a process in clock ticks since boot, `None` if it is gone or
/// only a zombie is left of it.
pub(super) fn started(pid: u32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let (state, started) = parse_stat(&stat)?;
    match state {
        // The main thread may have ended before the others.
        b'Z' if fs::read_dir(format!("/proc/{pid}/task")).ok()?.count() > 1 => Some(started),
        b'Z' | b'X' | b'x' => None,
        _ => Some(started),
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
        assert!(started(std::process::id()).is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while started(pid).is_some() {
            assert!(std::time::Instant::now() < deadline, "still counted as alive");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(started(pid).is_none());
    }

    #[test]
    fn stat_with_brackets_in_the_name() {
        let line = b"7 (a) Z (b) R 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        assert_eq!(parse_stat(line), Some((b'R', 4242)));
        assert_eq!(parse_stat(b"nonsense"), None);
    }
}
