//! What is no policy is refused, with a message that says what to do; nothing that
//! a file can hold crashes the host.

mod common;

use common::{Bench, guest, host, kernel};
use std::path::Path;
use tally_wasm_host::{Limits, LoadError, PolicyHost};

fn refused(bytes: &[u8]) -> String {
    refusal(bytes).to_string()
}

fn refusal(bytes: &[u8]) -> LoadError {
    host(Limits::default()).load_bytes("it.wasm", bytes, "").err().expect("a refusal")
}

fn refused_wat(text: &str) -> String {
    refused(&wat::parse_str(text).unwrap())
}

/// The parts of a message that matter.
fn says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in: {message}");
    }
}

/// Exports `scheduler` with functions of no parameters, and imports what is given.
fn scheduler(imports: &str, functions: &[&str]) -> String {
    let exports: String =
        functions.iter().map(|name| format!("(export \"{name}\" (func $f))")).collect();
    format!(
        "(component {imports}
            (core module $m (func (export \"f\")))
            (core instance $i (instantiate $m))
            (func $f (canon lift (core func $i \"f\")))
            (instance $s {exports})
            (export \"tally:policy/scheduler@0.1.0\" (instance $s)))"
    )
}

#[test]
fn what_is_not_webassembly() {
    says(&refused(b""), &["it.wasm: is empty", "cargo xtask policies"]);
    says(&refused(b"hello"), &["is text"]);
    says(&refused(&std::fs::read("/proc/self/exe").unwrap()[..64]), &["ELF"]);
    says(&refused(b"(component)"), &["WAT"]);
    says(&refused(b"\0asm\x09"), &["not a valid component"]);
}

#[test]
fn a_missing_file() {
    let error = host(Limits::default()).load_file(Path::new("/nowhere/x.wasm"), "").err().unwrap();
    says(&error.to_string(), &["/nowhere/x.wasm: cannot be read", "No such file"]);
    // A folder, and a file without end.
    assert!(host(Limits::default()).load_file(Path::new("/"), "").is_err());
    assert!(host(Limits::default()).load_file(Path::new("/dev/zero"), "").is_err());
}

#[test]
fn a_core_module_says_how_to_make_a_component() {
    let module = wat::parse_str("(module)").unwrap();
    assert!(matches!(refusal(&module), LoadError::CoreModule { .. }));
    says(&refused(&module), &["it.wasm", "wasm-component-ld", "tallyctl policy wrap it.wasm"]);
}

#[test]
fn a_component_of_another_world_names_what_is_missing() {
    let text = refused_wat("(component)");
    says(&text, &["does not export `tally:policy/scheduler@0.1.0`", "exports nothing"]);
    let text = refused_wat(&scheduler("", &["decide", "other"]));
    says(&text, &["scheduler@0.1.0#init", "it exports decide, other"]);
    let text = refused_wat(&scheduler("", &["init", "decide"]));
    says(&text, &["exports `tally:policy/scheduler@0.1.0#init` with another type"]);
    says(&text, &["Expected `init: func(config: string) -> result<_, string>;`"]);
}

#[test]
fn imports_that_nobody_provides_are_named() {
    let text = refused_wat("(component (import \"acme:gpu/clock@1.0.0\" (instance)))");
    says(
        &text,
        &["imports `acme:gpu/clock@1.0.0`", "it provides tally:policy/*@0.1.0 with types, log"],
    );
    let text = refused_wat("(component (import \"tally:policy/log@0.2.0\" (instance)))");
    says(&text, &["imports `tally:policy/log@0.2.0`", "wit/policy.wit"]);
    let text = refused_wat(
        "(component (import \"tally:policy/log@0.1.0\" (instance (export \"reboot\" (func)))))",
    );
    says(&text, &["imports `tally:policy/log@0.1.0#reboot`"]);
    let import = "(import \"tally:policy/control@0.1.0\" (instance
        (export \"revoke-lease\" (func (param \"client\" string)))))";
    let text = refused_wat(&scheduler(import, &["init", "decide"]));
    says(&text, &["imports `tally:policy/control@0.1.0#revoke-lease` with another type"]);
    says(&text, &["Expected `revoke-lease: func(client: client-id);`"]);
}

#[test]
fn wasi_is_refused_by_name() {
    let component = wat::parse_str(
        "(component (import \"wasi:cli/environment@0.2.6\" (instance
            (export \"get-arguments\" (func (result (list string)))))))",
    )
    .unwrap();
    assert!(matches!(refusal(&component), LoadError::Wasi { .. }));
    says(
        &refused(&component),
        &["wasi:cli/environment@0.2.6", "no WASI", "wasm32-unknown-unknown"],
    );
}

#[test]
fn too_large() {
    let limits = Limits { component_bytes_max: 100, ..Limits::default() };
    let file = guest("policies", "fifo");
    for error in [
        host(limits.clone()).load_file(&file, "").err().unwrap(),
        host(limits).load_bytes("fifo.wasm", &std::fs::read(&file).unwrap(), "").err().unwrap(),
    ] {
        says(
            &error.to_string(),
            &["fifo.wasm: ", "the 100 bytes that a policy may have", "component_bytes_max"],
        );
    }
}

#[test]
fn features_and_sizes_that_policies_do_not_get() {
    let simd = "(component (core module (func (drop (v128.const i64x2 0 0)))))";
    says(&refused_wat(simd), &["not a valid component", "SIMD"]);
    let text = refused_wat("(component (core module (memory 1000)))");
    says(&text, &["memory", "memory_bytes"]);
}

#[test]
fn a_policy_refuses_its_configuration_in_its_own_words() {
    let host = host(Limits::default());
    let error = host.load_file(&guest("policies", "tally-priority"), "idle_gap_us = -1");
    let error = error.err().unwrap();
    let said = ["tally-priority.wasm: refuses its configuration", "idle_gap_us = -1", "0 to"];
    says(&error.to_string(), &said);
    let of_file = error.with_config_file(Some(Path::new("/etc/priority.toml")));
    assert!(of_file.starts_with("/etc/priority.toml: "), "{of_file}");
    says(&of_file, &["tally-priority.wasm refuses this configuration: ", "idle_gap_us = -1"]);
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let bytes = std::fs::read(guest("policies", "fifo")).unwrap();
    let host = host(Limits::default());
    for length in (0..bytes.len()).step_by(bytes.len() / 40) {
        assert!(host.load_bytes("cut", &bytes[..length], "").is_err(), "{length} bytes");
    }
}

/// Flipped bits may leave a valid component (the digest is what vouches for a
/// file), which then may do anything; none may hurt the host.
#[test]
fn flipped_bits_never_hurt_the_host() {
    let good = std::fs::read(guest("test-policies", "chaos")).unwrap();
    let host = host(Limits { init_cpu_ms_max: 200, ..Limits::default() });
    let mut random = 88_172_645_463_325_252_u64;
    let (mut refused, mut accepted) = (0, 0);
    for _ in 0..50 {
        let mut bytes = good.clone();
        for _ in 0..3 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = (random >> 8) as usize % bytes.len();
            bytes[at] ^= 1 << (random & 7);
        }
        match host.load_bytes("flipped", &bytes, "") {
            Err(_) => refused += 1,
            Ok(policy) => {
                accepted += 1;
                let mut bench = Bench::new(policy);
                for kernel in [kernel::GOOD, kernel::METRICS, kernel::DESCRIBED, kernel::PANIC] {
                    let _ = bench.decide(kernel);
                }
            }
        }
    }
    assert!(refused > 15, "refused {refused}, accepted {accepted}");
    // And it still works.
    assert!(host.load_bytes("good", &good, "").is_ok());
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let limits = Limits { memory_bytes: 1, ..Limits::default() };
    let error = PolicyHost::compiling_by(common::compiler(), limits).err().unwrap();
    says(&error.to_string(), &["memory_bytes", "expected 65536 to"]);
}

#[test]
fn types_in_types_in_types_end_somewhere() {
    // An instance type of one declaration, a type: so many in each other.
    let nested = |levels: usize| {
        let mut types = vec![1];
        types.extend([0x42, 1, 1].repeat(levels));
        types.push(0x7f);
        let mut size = types.len();
        let mut bytes = b"\0asm\x0d\0\x01\0\x07".to_vec();
        while size > 0x7f {
            bytes.push(size as u8 | 0x80);
            size >>= 7;
        }
        bytes.push(size as u8);
        bytes.extend(types);
        bytes
    };
    for levels in [1_000, 1_000_000] {
        let said = refused(&nested(levels));
        assert!(said.contains("nesting") || said.contains("depth"), "{said}");
    }
    // What is no policy for another reason is told so.
    assert!(refused(&nested(3)).contains("scheduler"));
}
