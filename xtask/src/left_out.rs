//! What `cargo xtask test` leaves out on this machine.

use crate::test::{CUDA_HEADER, Group, PTXAS};
use std::process::{Command, Stdio};

/// What of a group does not run, and what it would need.
pub fn of(group: Group) -> Vec<String> {
    why(group, |variable| std::env::var_os(variable).is_some())
}

fn why(group: Group, is_set: impl Fn(&str) -> bool) -> Vec<String> {
    match group {
        Group::Cuda => {
            let ptxas = format!("core/rewriter/tests/ptxas.rs ({PTXAS} names no assembler)");
            let headers = format!("core/shim/tests/headers.rs ({CUDA_HEADER} names no `cuda.h`)");
            let all = [(PTXAS, ptxas), (CUDA_HEADER, headers)];
            all.into_iter()
                .filter(|(variable, _)| !is_set(variable))
                .map(|(_, what)| what)
                .collect()
        }
        Group::Languages => crate::languages::left_out(),
        Group::E2e => crate::preload::left_out(),
        Group::Unit => unit_left_out(has_systemd(), is_root()),
        Group::Words => crate::words::left_out(),
        _ => Vec::new(),
    }
}

/// A test of the unit file asks `systemd-analyze`.
pub fn has_systemd() -> bool {
    let mut asked = Command::new("systemd-analyze");
    asked.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|done| done.success())
}

/// Tests of floods act as other users.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn unit_left_out(has_systemd: bool, is_root: bool) -> Vec<String> {
    let unit =
        "core/daemon/tests/systemd.rs systemd_understands_the_unit (there is no `systemd-analyze`)";
    let floods = "core/daemon/tests/floods.rs (needs root to act as other users)";
    let all = [(has_systemd, unit), (is_root, floods)];
    all.into_iter().filter(|(is_run, _)| !is_run).map(|(_, what)| what.into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_named() {
        let without_headers = why(Group::Cuda, |variable| variable == PTXAS);
        assert!(matches!(&without_headers[..], [one] if one.contains("TALLY_CUDA_HEADER")));
        assert_eq!(why(Group::Cuda, |_| false).len(), 2);
        assert_eq!(why(Group::Cuda, |_| true), [""; 0]);
        assert_eq!(unit_left_out(true, true), [""; 0]);
        let named = unit_left_out(false, false).join("\n");
        assert!(
            named.contains("systemd-analyze") && named.contains("floods.rs (needs root"),
            "{named}"
        );
    }
}
