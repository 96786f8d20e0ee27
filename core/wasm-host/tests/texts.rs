//! What a component says reaches people in bounded length and without what acts on a terminal or passes for a line of
//! the core's log.

mod common;

use common::{Bench, bare_host, limits};
use tally_wasm_host::LoadError;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

const CONTRACT: &str = include_str!("../../../wit/policy.wit");
/// A title for the terminal, and a line that looks like the core's.
const FORGED: &str = "\u{1b}]0;owned\u{7}\nINFO tally_core: client registered";

/// A component whose `init` says `refusal` if that is not empty, and which names a metric and a reason `text`.
/// Each decision traps in a function of this name.
fn component(text: &str, refusal: &str, function: &str) -> Vec<u8> {
    let data = |text: &str| text.bytes().map(|byte| format!("\\{byte:02x}")).collect::<String>();
    let (length, refuses) = (text.len(), u8::from(!refusal.is_empty()));
    let module = format!(
        "(module
            (import \"tally:policy/metrics@0.1.0\" \"gauge\" (func $gauge (param i32 i32) (result i32)))
            (import \"tally:policy/reasons@0.1.0\" \"define\" (func $define (param i32 i32 i32)))
            (memory (export \"memory\") 1)
            (data (i32.const 4096) \"{}\")
            (data (i32.const 8192) \"{}\")
            (data (i32.const 64) \"\\{refuses:02x}\\00\\00\\00\\00\\20\\00\\00\\{:02x}\\00\\00\\00\")
            (func (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32) (i32.const 1024))
            (func (export \"tally:policy/scheduler@0.1.0#init\") (param i32 i32) (result i32)
                (drop (call $gauge (i32.const 4096) (i32.const {length})))
                (call $define (i32.const 9) (i32.const 4096) (i32.const {length}))
                (i32.const 64))
            (func $trap (@name \"{function}\") (unreachable))
            (func (export \"tally:policy/scheduler@0.1.0#decide\")
                (param i64 i32 i32 i32 i32 i64 i32 i32 i64 i64 i64 i64 i32 i32 i32 i32) (result i32)
                (call $trap)
                (i32.const 128)))",
        data(text),
        data(refusal),
        refusal.len(),
    );
    let mut module = wat::parse_str(module).unwrap();
    let mut resolve = Resolve::default();
    let package = resolve.push_str("policy.wit", CONTRACT).unwrap();
    let world = resolve.select_world(&[package], Some("policy")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
    ComponentEncoder::default().module(&module).unwrap().validate(true).encode().unwrap()
}

/// A mangled name of C++ in which each part stands for sixteen of the one before: whole, some 10^12 bytes.
fn bomb() -> String {
    let id = |n: usize| match n {
        0 => "S_".into(),
        n => format!("S{}_", n - 1),
    };
    let parts: String = (1..10).map(|n| format!("S_I{}E", id(n).repeat(16))).collect();
    format!("_Z1f1AIiiE{parts}")
}

#[test]
fn a_functions_name_is_not_expanded() {
    let bytes = component("x", "", &bomb());
    let policy = bare_host(limits()).load_bytes("bomb.wasm", &bytes, "").unwrap();
    let fault = Bench::new(policy).decide(1).unwrap_err();
    assert!(fault.message.contains("_Z1f1AIiiE"), "{}", fault.message);
    assert!(fault.message.len() <= 4096, "{} bytes", fault.message.len());
}

#[test]
fn texts_of_a_policy_do_not_act_on_a_terminal() {
    let bytes = component(FORGED, "", "trap");
    let policy = bare_host(limits()).load_bytes("forger.wasm", &bytes, "").unwrap();
    let status = format!("{:?}", policy.status());
    assert_eq!(status.matches("?]0;owned??INFO").count(), 2, "{status}");
}

#[test]
fn a_refusal_does_not_pass_for_a_line_of_the_log() {
    let bytes = component("x", FORGED, "trap");
    let error = bare_host(limits()).load_bytes("forger.wasm", &bytes, "").err().unwrap();
    assert!(matches!(error, LoadError::InitRefused { .. }), "{error}");
    let shown = error.to_string();
    assert!(shown.contains("?]0;owned?\n  | INFO"), "{shown:?}");
}

#[test]
fn a_files_name_does_not_act_on_a_terminal() {
    let error = bare_host(limits()).load_bytes("\u{1b}[2J.wasm", b"", "").err().unwrap();
    assert!(error.to_string().starts_with("?[2J.wasm: is empty"), "{error}");
}
