//! Every rewritten kernel of the corpus goes through NVIDIA's assembler.
//!
//! `TALLY_PTXAS` is the assembler, for example of the PyPI package
//! `nvidia-cuda-nvcc`; without it there is nothing to test with:
//! `TALLY_PTXAS=... cargo test -p tally-rewriter --test ptxas -- --ignored`.
//! `TALLY_PTX_MORE` may name a folder of further `.ptx` files, as compilers left them.
#![allow(missing_docs)]

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use tally_rewriter::{KernelForm, cubin, proof, ptx};

/// Architectures to assemble for, and what must not be older than that.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

/// `.target sm_90a` can only be assembled for itself.
fn target(source: &str) -> (u32, bool) {
    let at = source.find(".target sm_").expect("a target") + ".target sm_".len();
    let digits: String = source[at..].chars().take_while(char::is_ascii_digit).collect();
    let specific = source[at + digits.len()..].starts_with(|c: char| c.is_ascii_lowercase());
    (digits.parse().unwrap(), specific)
}

fn assemble(ptxas: &str, arch: &str, text: &[u8], output: &str) -> Result<(), String> {
    let mut child = Command::new(ptxas)
        .args([&format!("-arch={arch}"), "-o", output, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{ptxas}: {e}"))?;
    child.stdin.take().unwrap().write_all(text).map_err(|e| e.to_string())?;
    let done = child.wait_with_output().map_err(|e| e.to_string())?;
    if done.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
#[ignore = "needs TALLY_PTXAS"]
fn what_is_rewritten_assembles() {
    let ptxas = std::env::var("TALLY_PTXAS").expect("TALLY_PTXAS is the path of ptxas");
    let (mut texts, mut kernels) = (0, 0);
    let mut files = common::files();
    if let Ok(folder) = std::env::var("TALLY_PTX_MORE") {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            files.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
        }
    }
    for (name, source) in files {
        let (target, specific) = target(&source);
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let transformed = ptx::rewrite(&source, form, None);
            let transformed = transformed.unwrap_or_else(|e| panic!("{name}: {e}"));
            for (kernel, why) in &transformed.refused {
                println!("{name} {form:?}: {kernel}: {why}");
            }
            if transformed.kernels.is_empty() {
                continue;
            }
            for arch in ARCHITECTURES.into_iter().filter(|a| *a >= target) {
                if specific && arch != target {
                    continue;
                }
                let arch = format!("sm_{arch}{}", if specific { "a" } else { "" });
                if let Err(why) = assemble(&ptxas, &arch, &transformed.image, "/dev/null") {
                    let text = String::from_utf8_lossy(&transformed.image);
                    let lines: Vec<_> =
                        text.lines().enumerate().map(|(n, l)| format!("{:4} {l}", n + 1)).collect();
                    panic!("{name} {form:?} {arch}: {why}\n{}", lines.join("\n"));
                }
                texts += 1;
                kernels += transformed.kernels.len();
            }
        }
    }
    assert!(texts > 0);
    println!("ptxas: {texts} texts with {kernels} transformed kernels");
}

/// Else nothing would be sliced by offset on that architecture, and only the shim's log would say so.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn the_proof_of_a_machine_can_be_given_both_forms_of_machine_code() {
    let ptxas = std::env::var("TALLY_PTXAS").expect("TALLY_PTXAS is the path of ptxas");
    let name = format!("tally-proof-{}.cubin", std::process::id());
    let output = std::env::temp_dir().join(name);
    for arch in [80, 86, 89, 90] {
        let target = format!("sm_{arch}");
        assemble(&ptxas, &target, proof::PTX.as_bytes(), output.to_str().unwrap()).unwrap();
        let image = std::fs::read(&output).unwrap();
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let rewritten = cubin::rewrite(&image, form, None).unwrap();
            assert_eq!(rewritten.refused, [], "{target} {form:?}");
            cubin::check(&image, &rewritten.image).unwrap();
        }
    }
    std::fs::remove_file(&output).unwrap();
}

/// Machine code tells what PTX does, or forms would be offered for one that are not for the other.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn machine_code_may_wait_and_reads_its_sm_where_its_ptx_does() {
    let ptxas = std::env::var("TALLY_PTXAS").expect("TALLY_PTXAS is the path of ptxas");
    let name = format!("tally-waits-{}.cubin", std::process::id());
    let output = std::env::temp_dir().join(name);
    for arch in [80, 86, 89, 90] {
        let target = format!("sm_{arch}");
        for (statements, may_wait) in common::WAITS {
            let text = format!(
                ".version 8.0\n.target {target}\n.address_size 64\n{}",
                common::waits(statements)
            );
            assemble(&ptxas, &target, text.as_bytes(), output.to_str().unwrap()).unwrap();
            let image = std::fs::read(&output).unwrap();
            let rewritten = cubin::rewrite(&image, KernelForm::ByClaims, None).unwrap();
            let kernel = rewritten.kernel("k").unwrap();
            assert_eq!(kernel.may_wait, may_wait, "{target}: {statements}");
        }
        for (statements, reads_sm) in common::READS_SM {
            let text = format!(
                ".version 8.0\n.target {target}\n.address_size 64\n{}",
                common::waits(statements)
            );
            assemble(&ptxas, &target, text.as_bytes(), output.to_str().unwrap()).unwrap();
            let image = std::fs::read(&output).unwrap();
            let rewritten = cubin::rewrite(&image, KernelForm::ByClaims, None).unwrap();
            let kernel = rewritten.kernel("k").unwrap();
            assert_eq!(kernel.reads_sm, reads_sm, "{target}: {statements}");
        }
    }
    std::fs::remove_file(&output).unwrap();
}
