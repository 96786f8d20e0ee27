//! What the compiler process may still do when it looks at a component: compute, within limits.

use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal, getppid, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::io::{Error, Result};

/// Address space beyond the memory limit: the executable, the threads' stacks and what the allocator reserves for each.
const SPARE_ADDRESS_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The program that started this process.
    pub parent: i32,
    pub memory_bytes: u64,
    pub cpu_s: u64,
    pub output_bytes: u64,
}

/// Close every descriptor but the standard ones. Before anything else opens one.
pub fn close_others() {
    // SAFETY: Called first thing in `main`, so nothing in this process owns a descriptor from 3 on.
    // A failure leaves inherited ones open, and nothing else.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32)
    };
}

/// Limits and privileges. Threads may still be started.
pub fn limit(limits: Limits) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(limits.parent) {
        return Err(Error::other("the program that asked is gone"));
    }
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::set_no_new_privs(true)?;
    let address_bytes = limits.memory_bytes.saturating_add(SPARE_ADDRESS_BYTES);
    for (resource, current, maximum) in [
        (Resource::Core, 0, 0),
        (Resource::Data, limits.memory_bytes, limits.memory_bytes),
        (Resource::As, address_bytes, address_bytes),
        // SIGXCPU, which tells the parent why, and SIGKILL a second later.
        (Resource::Cpu, limits.cpu_s, limits.cpu_s.saturating_add(1)),
        (Resource::Fsize, limits.output_bytes, limits.output_bytes),
    ] {
        // A limit that the program itself was given stays.
        let own = rustix::process::getrlimit(resource).maximum;
        let least = |most: u64| Some(own.map_or(most, |own| own.min(most)));
        setrlimit(resource, Rlimit { current: least(current), maximum: least(maximum) })?;
    }
    Ok(())
}

/// No further descriptors, and no system calls but those of computing. In all threads; none can be started after.
pub fn filter() -> Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Nofile, none)?;
    let filter = program().map_err(Error::other)?;
    seccompiler::apply_filter_all_threads(&filter).map_err(Error::other)
}

/// Other calls fail with EPERM: a library that tries one goes on without.
fn program() -> std::result::Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = [
        libc::SYS_brk,
        libc::SYS_clock_gettime,
        libc::SYS_close,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_fstat,
        libc::SYS_futex,
        libc::SYS_getpid,
        libc::SYS_getrandom,
        libc::SYS_gettid,
        libc::SYS_lseek,
        libc::SYS_madvise,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_mremap,
        libc::SYS_munmap,
        libc::SYS_read,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sched_yield,
        libc::SYS_sigaltstack,
        libc::SYS_write,
    ]
    .map(|call| (call, Vec::new()))
    .into();
    // `abort`, of this process alone.
    let own = u64::from(std::process::id());
    let own = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, own)?;
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![own])?]);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, denied, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Set in a process that is to confine itself and try what it must not be able to do.
    const PROBE: &str = "TALLY_CONFINED_PROBE";
    const MEMORY_BYTES: u64 = 256 << 20;

    /// What is possible, by name.
    fn possible() -> Vec<&'static str> {
        let signal = || rustix::process::kill_process(getppid().unwrap(), Signal::CONT);
        let tried = [
            ("read a file", std::fs::File::open("/etc/passwd").is_ok()),
            ("make a file", std::fs::write("/tmp/tally-confined", "x").is_ok()),
            ("open a socket", std::os::unix::net::UnixDatagram::unbound().is_ok()),
            ("start a process", Command::new("/bin/true").spawn().is_ok()),
            // Joined: a thread that ends when the filter is in force already may abort the process.
            (
                "start a thread",
                std::thread::Builder::new().spawn(|| ()).is_ok_and(|thread| thread.join().is_ok()),
            ),
            ("signal its parent", signal().is_ok()),
            (
                "raise a limit",
                setrlimit(Resource::Core, Rlimit { current: None, maximum: None }).is_ok(),
            ),
            ("take memory", Vec::<u8>::new().try_reserve_exact(512 << 20).is_ok()),
            ("compute", Vec::<u8>::new().try_reserve_exact(64 << 20).is_ok()),
        ];
        tried.into_iter().filter(|(_, done)| *done).map(|(what, _)| what).collect()
    }

    #[test]
    fn a_confined_process_can_compute_and_nothing_else() {
        const TEST: &str = "confine::tests::a_confined_process_can_compute_and_nothing_else";
        if std::env::var_os(PROBE).is_some() {
            let before = possible().len();
            let parent = std::os::unix::process::parent_id() as i32;
            limit(Limits { parent, memory_bytes: MEMORY_BYTES, cpu_s: 60, output_bytes: 1 << 20 })
                .unwrap();
            filter().unwrap();
            eprintln!("before {before}, after {:?}", possible());
            std::process::exit(0);
        }
        let own = std::env::current_exe().unwrap();
        let mut probe = Command::new(own);
        let output = probe.args(["--exact", TEST, "--nocapture"]).env(PROBE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(r#"before 9, after ["compute"]"#), "{said} ({})", output.status);
    }

    #[test]
    fn a_process_whose_parent_is_another_is_not_confined_but_ends() {
        let limits = Limits { parent: 1, memory_bytes: MEMORY_BYTES, cpu_s: 1, output_bytes: 0 };
        // Nothing has changed but the signal at the parent's death: this process goes on.
        let error = limit(limits).unwrap_err().to_string();
        rustix::process::set_parent_process_death_signal(None).unwrap();
        assert!(error.contains("gone"), "{error}");
    }
}
