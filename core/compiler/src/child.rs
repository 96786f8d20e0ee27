//! The compiler process: confines itself, then compiles the component on its standard input.

use crate::confine::{self, Limits};
use crate::{entry, settings, threads};
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use wasmtime::Engine;

/// What the program is called when it is to be a compiler.
pub const NAME: &str = "tally-policy-compiler";
/// The component is not valid; why is on standard error.
pub const EXIT_INVALID: i32 = 3;
/// Standard error says what this process could not do to itself.
pub const EXIT_NOT_CONFINED: i32 = 4;

/// Set once `main` has begun with [`serve_if_child`].
static IS_SERVED: AtomicBool = AtomicBool::new(false);

/// Whether this program can be started again as a compiler.
pub fn is_served() -> bool {
    IS_SERVED.load(Relaxed)
}

/// First thing in `main` of a program that loads components: if it was started as a compiler, it is one, and
/// this does not return.
pub fn serve_if_child() {
    let mut arguments = std::env::args_os();
    if arguments.next().as_deref() == Some(OsStr::new(NAME)) {
        std::process::exit(serve(arguments));
    }
    IS_SERVED.store(true, Relaxed);
}

fn serve(arguments: impl Iterator<Item = OsString>) -> i32 {
    confine::close_others();
    match compile(arguments) {
        Ok(()) => 0,
        Err((code, why)) => {
            let _ = std::io::stderr().write_all(why.as_bytes());
            code
        }
    }
}

fn compile(arguments: impl Iterator<Item = OsString>) -> Result<(), (i32, String)> {
    let unconfined = |why: &dyn std::fmt::Display| (EXIT_NOT_CONFINED, why.to_string());
    let limits = arguments.map(|text| text.to_str()?.parse::<u64>().ok());
    let (limits, as_it_is) = match limits.collect::<Option<Vec<u64>>>().as_deref() {
        Some(&[parent, memory_bytes, cpu_s, output_bytes, as_it_is]) => {
            let limits = Limits { parent: parent as i32, memory_bytes, cpu_s, output_bytes };
            (limits, as_it_is != 0)
        }
        _ => return Err(unconfined(&"it is started by tally-core and tallyctl only")),
    };
    confine::limit(limits).map_err(|error| unconfined(&error))?;
    let pool = threads::pool().map_err(|error| unconfined(&error))?;
    confine::filter().map_err(|error| unconfined(&error))?;

    let failed = |error: std::io::Error| (1, error.to_string());
    let mut component = Vec::new();
    std::io::stdin().read_to_end(&mut component).map_err(failed)?;
    let code = pool.install(|| {
        let engine = Engine::new(&settings())?;
        native(&engine, &component, as_it_is)
    });
    let code = code.map_err(|error| (EXIT_INVALID, format!("{error:#}")))?;
    std::io::stdout().write_all(&code).and_then(|()| std::io::stdout().flush()).map_err(failed)
}

/// A component's native code, in wasmtime's own form; with the shorter way into its functions unless `as_it_is`.
pub fn native(engine: &Engine, component: &[u8], as_it_is: bool) -> wasmtime::Result<Vec<u8>> {
    // If the shortened component does not compile, compile the file as it is, so that the error is about the file.
    let shortened = if as_it_is { None } else { entry::shortened(component) };
    match shortened.map(|bytes| engine.precompile_component(&bytes)) {
        Some(Ok(code)) => Ok(code),
        Some(Err(_)) | None => engine.precompile_component(component),
    }
}
