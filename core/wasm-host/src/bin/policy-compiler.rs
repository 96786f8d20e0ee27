//! Compiles components for the tests of this crate, whose `main` is not ours.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    tally_wasm_host::serve_if_child();
    eprintln!("policy-compiler: it is started by the tests of tally-wasm-host");
    std::process::ExitCode::from(2)
}
