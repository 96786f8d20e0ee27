//! `tally-rewrite`: what is in a CUDA image, and its kernels in a transformed form.

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use tally_rewriter::fatbin::{Fatbin, Kind};
use tally_rewriter::image::{ImageKind, rewrite};
use tally_rewriter::{KernelForm, cubin};

/// Look into CUDA images (fatbins, cubins, PTX), and give their kernels a transformed form.
#[derive(Parser)]
#[command(version)]
enum Command {
    /// What an image holds.
    Inspect {
        /// A fatbin, a cubin or PTX.
        file: PathBuf,
    },
    /// Write the transformed form of an image's kernels. Prints a line for each kernel:
    /// `transformed NAME PARAMETERS OFFSET CLUSTER`, `may-wait` behind it if its blocks may wait for one another, or
    /// `refused NAME: WHY`.
    Rewrite {
        /// A fatbin, a cubin or PTX.
        file: PathBuf,
        /// Where to write the cubin or PTX that comes out.
        #[arg(short, long)]
        output: PathBuf,
        /// Form to make of the kernels
        #[arg(long, default_value = "by-claims")]
        form: Form,
        /// The device's architecture, 90 for compute capability 9.0: which entry of a fatbin.
        #[arg(long, default_value_t = 90)]
        arch: u32,
        /// Only this kernel; may be given several times.
        #[arg(long)]
        only: Vec<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// Make the form with the claim-table prelude, which runs any range of blocks and can be preempted
    ByClaims,
    /// Make a form with offset block indices; in machine code for grids of one dimension
    ByOffset,
}

impl From<Form> for KernelForm {
    fn from(form: Form) -> Self {
        match form {
            Form::ByClaims => KernelForm::ByClaims,
            Form::ByOffset => KernelForm::ByOffset,
        }
    }
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Inspect { file } => inspect(&read(&file)?),
        Command::Rewrite { file, output, form, arch, only } => {
            let only: Vec<&str> = only.iter().map(String::as_str).collect();
            let only = (!only.is_empty()).then_some(only.as_slice());
            write(&file, &output, form.into(), arch, only)
        }
    }
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("reading {}", file.display()))
}

fn inspect(image: &[u8]) -> Result<()> {
    match ImageKind::of(image) {
        Some(ImageKind::Fatbin) => {
            for (index, entry) in Fatbin::parse(image)?.entries().iter().enumerate() {
                let (arch, how) = (entry.arch, entry.compression);
                let bytes = entry.unpacked_bytes();
                println!("entry {index}: {:?} for {arch}, {bytes} bytes, {how}", entry.kind);
                if entry.kind == Kind::Elf {
                    inspect_cubin(&entry.payload()?)?;
                }
            }
            Ok(())
        }
        Some(ImageKind::Cubin) => inspect_cubin(image),
        Some(ImageKind::Ptx) => {
            println!("PTX, {} bytes", image.len());
            Ok(())
        }
        None => bail!("neither a fatbin, nor a cubin, nor PTX"),
    }
}

fn inspect_cubin(image: &[u8]) -> Result<()> {
    let cubin = match cubin::Cubin::parse(image) {
        Ok(cubin) => cubin,
        Err(why) => {
            println!("  not looked into: {why}");
            return Ok(());
        }
    };
    println!("  cubin for sm_{}, {} sections", cubin.arch, cubin.sections.len());
    let rewritten = cubin::rewrite(image, KernelForm::ByClaims, None);
    for symbol in cubin.symbols.iter().filter(|s| s.is_kernel()) {
        let form = match &rewritten {
            Err(why) => format!("not by claims: {why}"),
            Ok(rewritten) => match rewritten.kernel(symbol.name) {
                Ok(kernel) => format!("{} parameters", kernel.parameter_count),
                Err(why) => format!("not by claims: {why}"),
            },
        };
        println!("  kernel {}, {} bytes, {form}", symbol.name, symbol.size);
    }
    Ok(())
}

fn write(
    file: &Path,
    output: &Path,
    form: KernelForm,
    arch: u32,
    only: Option<&[&str]>,
) -> Result<()> {
    let image = read(file)?;
    let rewritten = match rewrite(&image, arch, form, only) {
        Ok(rewritten) => rewritten,
        Err(why) => bail!("{}: no transformed form: {why}", file.display()),
    };
    if !rewritten.is_ptx && ImageKind::of(&image) == Some(ImageKind::Cubin) {
        cubin::check(&image, &rewritten.image).context("the patch changed what it must not")?;
    }
    for kernel in &rewritten.kernels {
        let [x, y, z] = kernel.cluster.unwrap_or([0; 3]);
        let (count, offset) = (kernel.parameter_count, kernel.control_offset);
        let waits = if kernel.may_wait { " may-wait" } else { "" };
        let reads_sm = if kernel.reads_sm { " reads-sm" } else { "" };
        println!("transformed {} {count} {offset} {x},{y},{z}{waits}{reads_sm}", kernel.name);
    }
    for (name, why) in &rewritten.refused {
        println!("refused {name}: {why}");
    }
    ensure!(!rewritten.kernels.is_empty(), "{}: no kernel was transformed", file.display());
    fs::write(output, &rewritten.image).with_context(|| format!("writing {}", output.display()))
}
