//! `tallyctl`: runs programs under a core and talks to it. See [`cli`].
#![forbid(unsafe_code)]

mod ab;
mod admin;
mod cli;
mod client;
mod error;
mod inspect;
mod log;
mod metrics;
mod output;
mod picture;
mod policy;
mod profiles;
mod run;
mod shadow;
mod sim;
mod status;
mod table;

fn main() -> std::process::ExitCode {
    cli::main()
}
