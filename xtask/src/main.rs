//! `cargo xtask`: everything a developer runs that is more than one command.
//!
//! One module a subcommand. A subcommand never installs or downloads a Rust
//! toolchain through `rustup`: what is missing is named, and the user decides.
#![forbid(unsafe_code)]

mod ab;
mod ab_record;
mod asan;
mod bench;
mod bindings;
mod build;
mod bundle;
mod chaos;
mod containment;
mod debian;
mod demo;
mod demo_ab;
mod demo_report;
mod dist;
mod fuzz;
mod guest;
mod languages;
mod left_out;
mod litmus;
mod plots;
mod policies;
mod preload;
mod references;
mod reload;
mod sbom;
mod shim;
mod test;
mod test_count;
#[cfg(test)]
mod tree;
mod walkthrough;
mod words;
mod wrapper;

use clap::{Parser, Subcommand};
use std::path::PathBuf;

#[derive(Parser)]
#[command(name = "cargo xtask", about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the policies and the misbehaving test guests to WebAssembly components.
    Policies(policies::Args),
    /// Two programs share a device, with and without scheduling: builds, measures, prints a table.
    Demo(demo::Args),
    /// Build everything and run all tests, the ones across processes included.
    Test(test::Args),
    /// Build and run the benchmarks.
    Bench(bench::Args),
    /// Build, check and compare policies in every language whose tools are here.
    Languages(languages::Args),
    /// Generate what the SDK for C needs of the contract.
    Bindings(bindings::Args),
    /// Draw the measured results into docs/plots, in a light and a dark theme.
    Plots(plots::Args),
    /// Write the reference documents into docs/reference: settings, limits, metrics, commands, the contract.
    References(references::Args),
    /// Feed a reader of files with changed inputs under libFuzzer, and say what was found.
    Fuzz(fuzz::Args),
    /// Run tests across processes with the shim and the software device under AddressSanitizer.
    Asan(asan::Args),
    /// Make random faults at the core, programs and a hostile client, and check every launch.
    Chaos(chaos::Args),
    /// Run small programs made from seeds bare and under Tally, and compare.
    Litmus(litmus::Args),
    /// Build the shim for machines with an old glibc, linked by zig.
    Shim(shim::Args),
    /// Pack what a machine needs to run Tally, with a list of every crate in it.
    Dist(dist::Args),
    /// Collect what a machine with a GPU and no compiler needs into one folder.
    GpuBundle(bundle::Args),
}

fn main() -> anyhow::Result<()> {
    wrapper::run_if_called()?;
    match Cli::parse().task {
        Task::Policies(args) => policies::run(&args),
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => test::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::Languages(args) => languages::run(&args),
        Task::Bindings(args) => bindings::run(&args),
        Task::Plots(args) => plots::run(&args),
        Task::References(args) => references::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Asan(args) => asan::run(&args),
        Task::Chaos(args) => chaos::run(&args),
        Task::Litmus(args) => litmus::run(&args),
        Task::Shim(args) => shim::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::GpuBundle(args) => bundle::run(&args),
    }
}

/// The root of the repository.
fn repository() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map_or(xtask.clone(), PathBuf::from)
}

/// Where build outputs go: `$CARGO_TARGET_DIR`, else `target` in the repository.
fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        // Cargo takes a relative one from where it was called.
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        None => repository().join("target"),
    }
}
