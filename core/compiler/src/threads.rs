//! The threads that compile. An interpreter's component takes seconds on one CPU.

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// More would take CPUs from the services that the core is there for.
const THREADS_MAX: usize = 4;
/// Added to the program's own niceness, for the same reason.
const NICE: i32 = 10;

/// Started, so that none of them has a system call left to make for it.
pub fn pool() -> Result<ThreadPool, ThreadPoolBuildError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("policy-compile-{i}"))
        .start_handler(|_| {
            // Of this thread alone, on Linux. Refused: then it competes like any other.
            if let Ok(own) = rustix::process::getpriority_process(None) {
                let _ = rustix::process::setpriority_process(None, own + NICE);
            }
        })
        .build()?;
    pool.broadcast(|_| ());
    Ok(pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiling_threads_have_lower_priority_than_the_caller() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let pool = pool().unwrap();
        let (name, there) =
            pool.install(|| (std::thread::current().name().map(str::to_owned), nice()));
        assert!(name.is_some_and(|n| n.starts_with("policy-compile-")));
        assert_eq!(there, (before + NICE).min(19));
        assert_eq!(nice(), before);
    }
}
