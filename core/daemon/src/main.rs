//! `tally-core`: see the library of the same package.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    tally_core::cli::main()
}
