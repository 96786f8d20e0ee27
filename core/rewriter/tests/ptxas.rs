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
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use tally_rewriter::{KernelForm, TransformRefusal, cubin, proof, ptx};

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
    assemble_with(&[], ptxas, arch, text, output)
}

fn assemble_with(
    options: &[&str],
    ptxas: &str,
    arch: &str,
    text: &[u8],
    output: &str,
) -> Result<(), String> {
    let mut child = Command::new(ptxas)
        .args(options)
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

/// What the assembler makes of a text.
fn machine_code(options: &[&str], arch: &str, text: &str) -> Vec<u8> {
    let ptxas = std::env::var("TALLY_PTXAS").expect("TALLY_PTXAS is the path of ptxas");
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("tally-{}-{}.cubin", std::process::id(), COUNT.fetch_add(1, Relaxed));
    let output = std::env::temp_dir().join(name);
    assemble_with(options, &ptxas, arch, text.as_bytes(), output.to_str().unwrap()).unwrap();
    let image = std::fs::read(&output).unwrap();
    std::fs::remove_file(&output).unwrap();
    image
}

/// Else nothing would be sliced by offset on that architecture, and only the shim's log would say so.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn the_proof_of_a_machine_can_be_given_both_forms_of_machine_code() {
    for arch in [80, 86, 89, 90] {
        let target = format!("sm_{arch}");
        let image = machine_code(&[], &target, proof::PTX);
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let rewritten = cubin::rewrite(&image, form, None).unwrap();
            assert_eq!(rewritten.refused, [], "{target} {form:?}");
            cubin::check(&image, &rewritten.image).unwrap();
        }
    }
}

/// Machine code tells what PTX does, or forms would be offered for one that are not for the other.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn machine_code_may_wait_and_reads_its_sm_where_its_ptx_does() {
    for arch in [80, 86, 89, 90] {
        let target = format!("sm_{arch}");
        for (statements, may_wait) in common::WAITS {
            let text = format!(
                ".version 8.0\n.target {target}\n.address_size 64\n{}",
                common::waits(statements)
            );
            let image = machine_code(&[], &target, &text);
            let rewritten = cubin::rewrite(&image, KernelForm::ByClaims, None).unwrap();
            let kernel = rewritten.kernel("k").unwrap();
            assert_eq!(kernel.may_wait, may_wait, "{target}: {statements}");
        }
        for (statements, reads_sm) in common::READS_SM {
            let text = format!(
                ".version 8.0\n.target {target}\n.address_size 64\n{}",
                common::waits(statements)
            );
            let image = machine_code(&[], &target, &text);
            let rewritten = cubin::rewrite(&image, KernelForm::ByClaims, None).unwrap();
            let kernel = rewritten.kernel("k").unwrap();
            assert_eq!(kernel.reads_sm, reads_sm, "{target}: {statements}");
        }
    }
}

/// In relocatable code. Otherwise an address is the function's number among those of its kernel, in any module.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn machine_code_that_takes_a_functions_address_is_refused() {
    let call = |what: &str| {
        format!(
            "{{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r1; call (q), {what}, (p); ld.param.b32 %r2, [q]; }}"
        )
    };
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .func (.param .b32 r) f(.param .b32 a) {{\n\
         .reg .b32 %r<4>; .reg .pred %p; ld.param.b32 %r3, [a]; sub.s32 %r1, %r3, 1; setp.lt.s32 %p, %r1, 1;\n\
         @%p bra done; {} mul.lo.s32 %r3, %r3, %r2; done: st.param.b32 [r], %r3; ret; }}\n\
         .visible .func (.param .b32 r) g(.param .b32 a) {{\n\
         .reg .b32 %r<4>; .reg .b64 %rd; ld.param.b32 %r1, [a]; mov.u64 %rd, f; cvt.u32.u64 %r2, %rd;\n\
         add.s32 %r2, %r2, %r1; st.param.b32 [r], %r2; ret; }}\n\
         .visible .entry calls(.param .u64 out) {{\n\
         .reg .b64 %rd; .reg .b32 %r<3>; ld.param.u64 %rd, [out]; ld.global.u32 %r1, [%rd]; {}\n\
         st.global.u32 [%rd], %r2; ret; }}\n\
         .visible .entry stores(.param .u64 out) {{\n\
         .reg .b64 %rd<3>; ld.param.u64 %rd1, [out]; mov.u64 %rd2, f; st.global.u64 [%rd1], %rd2; ret; }}\n\
         .visible .entry through(.param .u64 out) {{\n\
         .reg .b64 %rd; .reg .b32 %r<3>; ld.param.u64 %rd, [out]; ld.global.u32 %r1, [%rd]; {}\n\
         st.global.u32 [%rd], %r2; ret; }}\n",
        call("f"),
        call("f"),
        call("g"),
    );
    for arch in [80, 86, 89, 90] {
        let target = format!("sm_{arch}");
        let mut image = machine_code(&["-c"], &target, &text);
        // As if linked: an executable, no object to be linked.
        image[16] = 2;
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let mut refused = cubin::rewrite(&image, form, None).unwrap().refused;
            refused.sort_by(|a, b| a.0.cmp(&b.0));
            let taken = |name: &str| (name.to_owned(), TransformRefusal::AddressTaken);
            assert_eq!(refused, [taken("stores"), taken("through")], "{target} {form:?}");
        }
    }
}

/// Each part of a launch would be told another one.
#[test]
#[ignore = "needs TALLY_PTXAS"]
fn machine_code_that_asks_for_its_grid_or_graph_is_refused() {
    for (register, is_refused) in
        [("%gridid", true), ("%current_graph_exec", true), ("%clock64", false)]
    {
        let text = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out) {{\n\
             .reg .b64 %rd<3>; ld.param.u64 %rd1, [out]; mov.u64 %rd2, {register}; st.global.u64 [%rd1], %rd2; ret; }}\n"
        );
        for arch in [80, 86, 89, 90] {
            let target = format!("sm_{arch}");
            let image = machine_code(&[], &target, &text);
            for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
                let refused = cubin::rewrite(&image, form, None).unwrap().refused;
                let wanted = is_refused.then(|| ("k".to_owned(), TransformRefusal::LaunchForm));
                assert_eq!(refused, Vec::from_iter(wanted), "{register} {target} {form:?}");
            }
        }
    }
}
