//! Where policies are compiled: on a few threads that give way to whatever else the machine does.
//!
//! An interpreter's component takes seconds on one CPU. wasmtime spreads the work over the
//! pool of threads that it is called in, which by default would be all CPUs, at full priority:
//! those of the services that the core is there for.

use rayon::ThreadPoolBuilder;

/// More would take CPUs from those services for little.
const THREADS_MAX: usize = 4;
/// Added to the core's own niceness.
const NICE: i32 = 10;

/// Run `compile` there, and wait for it.
pub fn apart<T: Send>(compile: impl FnOnce() -> T + Send) -> T {
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
        .build();
    match pool {
        Ok(pool) => pool.install(compile),
        Err(error) => {
            tracing::warn!(target: "policy", "compiling on one thread: {error}");
            compile()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_way_and_the_caller_does_not() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let (name, there) = apart(|| (std::thread::current().name().map(str::to_owned), nice()));
        assert!(name.is_some_and(|n| n.starts_with("policy-compile-")));
        assert_eq!(there, (before + NICE).min(19));
        assert_eq!(nice(), before);
    }
}
