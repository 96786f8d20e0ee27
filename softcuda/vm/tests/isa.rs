//! Instructions against a real GPU: `isa/h100.txt` holds what an H100 gave
//! for 64 operand triples of each (`isa/record.py` made it).
#![allow(missing_docs)]

mod common;

use common::{Device, Run, params};
use std::collections::HashMap;

const GOLDEN: &str = include_str!("isa/h100.txt");
const N: usize = 64;

struct Case<'a> {
    text: &'a str,
    d: &'a str,
    kinds: Vec<&'a str>,
    tolerance: Option<f64>,
    want: Vec<u64>,
}

fn hex(words: &str) -> Vec<u64> {
    words.split(' ').map(|w| u64::from_str_radix(w, 16).expect("a number")).collect()
}

fn bits(kind: &str) -> u32 {
    match kind {
        "n" => 32,
        k if k.ends_with("x2") => 32,
        k => k.trim_start_matches(['s', 'u', 'f', 'b']).parse().expect("a type"),
    }
}

fn class(kind: &str) -> String {
    match kind {
        "f32" | "f64" => kind.to_string(),
        _ => format!("b{}", bits(kind)),
    }
}

/// The kernel that `record.py` ran.
fn ptx(case: &Case<'_>) -> String {
    let mut s = String::from(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 A, \
         .param .u64 B, .param .u64 C, .param .u64 D, .param .u64 Q)\n{\n\
         .reg .u64 S, at; .reg .u32 tid; .reg .u64 off;\n",
    );
    s += &format!(".reg .{} d;\n", class(case.d));
    for (name, kind) in ["a", "b", "c"].iter().zip(&case.kinds) {
        s += &format!(".reg .{} {name};\n", class(kind));
    }
    s += "mov.u32 tid, %tid.x; mul.wide.u32 off, tid, 8; ld.param.u64 S, [Q];\n";
    for (name, kind) in ["a", "b", "c"].iter().zip(&case.kinds) {
        s += &format!(
            "ld.param.u64 at, [{}]; add.u64 at, at, off; ld.global.b{} {name}, [at];\n",
            name.to_uppercase(),
            bits(kind)
        );
    }
    let end = if case.text.ends_with(['}', ';']) { "" } else { ";" };
    s + &format!(
        "{}{end}\nld.param.u64 at, [D]; add.u64 at, at, off; st.global.b{} [at], d;\nret;\n}}\n",
        case.text,
        bits(case.d)
    )
}

fn close(kind: &str, got: u64, want: u64, tolerance: f64) -> bool {
    let value = |v: u64| match kind {
        "f32" => f64::from(f32::from_bits(v as u32)),
        _ => f64::from_bits(v),
    };
    let (got, want) = (value(got), value(want));
    // Approximations flush subnormal results.
    let tiny = f64::from(f32::MIN_POSITIVE);
    got == want
        || (got.is_nan() && want.is_nan())
        || (got - want).abs() <= tolerance * want.abs()
        || (got.abs() <= tiny && want.abs() <= tiny)
}

/// Values by type and by which operand they are for.
type Operands = HashMap<(&'static str, usize), Vec<u64>>;

fn cases() -> (Operands, Vec<Case<'static>>) {
    let (mut operands, mut cases) = (HashMap::new(), Vec::new());
    for line in GOLDEN.lines() {
        if let Some(rest) = line.strip_prefix("operands ") {
            let mut parts = rest.splitn(3, ' ');
            let kind = parts.next().expect("a type");
            let slot = parts.next().expect("a slot").parse().expect("a number");
            operands.insert((kind, slot), hex(parts.next().expect("words")));
        } else if let Some(rest) = line.strip_prefix("case|") {
            // The text may hold bars itself; the other fields do not.
            let parts: Vec<&str> = rest.rsplitn(5, '|').collect();
            let [words, tolerance, kinds, d, text] = parts[..] else { panic!("{line}") };
            cases.push(Case {
                text,
                d,
                kinds: kinds.split(',').collect(),
                tolerance: tolerance.parse().ok(),
                want: hex(words),
            });
        }
    }
    (operands, cases)
}

#[test]
fn every_instruction_matches_the_gpu() {
    let (operands, cases) = cases();
    assert!(cases.len() > 800, "the golden file lost its cases");
    let mut wrong = Vec::new();
    for case in &cases {
        let mut device = Device::default();
        let mut args = Vec::new();
        for slot in 0..3 {
            let data = match case.kinds.get(slot) {
                Some(kind) => operands[&(*kind, slot)].clone(),
                None => vec![0; N],
            };
            args.push(device.upload(&data));
        }
        let out = device.upload(&[0u64; N]);
        args.extend([out, device.upload(&[0u64; N])]);
        let program = device.link(&ptx(case));
        let run = Run { block: [N as u32, 1, 1], ..Run::default() };
        if let Err(trap) = run.go(&device, &program, &params(&args)) {
            wrong.push(format!("{}: {trap}", case.text));
            continue;
        }
        let got = device.download::<u64>(out, N);
        let bad: Vec<usize> = (0..N)
            .filter(|&i| match case.tolerance {
                Some(t) => !close(case.d, got[i], case.want[i], t),
                None => got[i] != case.want[i],
            })
            .collect();
        if let Some(&i) = bad.first() {
            let inputs: Vec<String> = (0..case.kinds.len())
                .map(|s| format!("{:x}", operands[&(case.kinds[s], s)][i]))
                .collect();
            wrong.push(format!(
                "{} [{}]: {:x}, not {:x} ({} of {N} differ)",
                case.text,
                inputs.join(", "),
                got[i],
                case.want[i],
                bad.len()
            ));
        }
    }
    assert!(wrong.is_empty(), "{} cases differ from the GPU:\n{}", wrong.len(), wrong.join("\n"));
}
