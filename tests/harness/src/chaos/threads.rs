//! What the threads of a process are doing, for a report of a hang.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// End of gdb's answer that is quoted.
const BACKTRACE_BYTES_MAX: usize = 20_000;

/// Every thread's name, state, what it waits for in the kernel, and its context switches; where there is gdb, also
/// the backtraces.
pub fn describe(party: &str, pid: u32) -> String {
    let mut text = format!("threads of {party} (pid {pid}):\n");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or("?").trim().to_owned()
        };
        let _ = writeln!(
            text,
            "  {} {:16} {:14} in {} (call {}), {} voluntary switches",
            task.file_name().to_string_lossy(),
            field("Name:"),
            field("State:"),
            read("wchan"),
            read("syscall").trim(),
            field("voluntary_ctxt_switches:"),
        );
    }
    text + &backtraces(pid)
}

fn backtraces(pid: u32) -> String {
    if !Path::new("/usr/bin/gdb").exists() {
        return String::new();
    }
    let mut gdb = Command::new("timeout");
    gdb.args(["20", "gdb", "-p", &pid.to_string(), "-batch", "-ex", "thread apply all bt 24"]);
    let output = gdb.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    let mut from = text.len().saturating_sub(BACKTRACE_BYTES_MAX);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn threads_are_named_with_their_states() {
        let text = super::describe("this test", std::process::id());
        assert!(text.contains("threads of this test") && text.contains("voluntary"), "{text}");
    }
}
