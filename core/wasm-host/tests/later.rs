//! A later 0.1 may have one more interface. What it takes for components and cores of the two to meet: a component
//! that exports it loads into this core, one that imports it is refused by name.

mod common;

use common::{Bench, bare_host, limits};
use tally_engine::policy::{Decision, Subscriptions};
use tally_wasm_host::LoadError;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

const CONTRACT: &str = include_str!("../../../wit/policy.wit");

/// The contract with another version, one more event and one more interface to call.
fn later_contract() -> String {
    let later = CONTRACT.replace("package tally:policy@0.1.0;", "package tally:policy@0.1.1;");
    assert_ne!(later, CONTRACT);
    later
        + "
interface assignments {
  /// A launch was assigned to a unit of the GPU.
  assigned: func(now-ns: u64, unit: u32);
}

interface placement {
  place: func(client: u32, unit: u32);
}

world told-of-assignments {
  include policy;
  export assignments;
}

world placing {
  include policy;
  import placement;
}
"
}

/// A component built against that contract: it runs everything, and logs from `init` on.
fn component(world: &str, import: &str, export: &str) -> Vec<u8> {
    let module = format!(
        "(module
            {import}
            (import \"tally:policy/log@0.1.1\" \"write\" (func $log (param i32 i32 i32)))
            (memory (export \"memory\") 1)
            (func (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32) (i32.const 1024))
            (func (export \"tally:policy/scheduler@0.1.1#init\") (param i32 i32) (result i32)
                (call $log (i32.const 2) (i32.const 0) (i32.const 0))
                (i32.const 64))
            (func (export \"tally:policy/scheduler@0.1.1#decide\")
                (param i64 i32 i32 i32 i32 i64 i32 i32 i64 i64 i64 i64 i32 i32 i32 i32) (result i32)
                (i32.const 128))
            {export})"
    );
    let mut module = wat::parse_str(module).unwrap();
    let mut resolve = Resolve::default();
    let package = resolve.push_str("later.wit", &later_contract()).unwrap();
    let world = resolve.select_world(&[package], Some(world)).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
    ComponentEncoder::default().module(&module).unwrap().validate(true).encode().unwrap()
}

#[test]
fn a_component_that_exports_a_later_interface_loads_without_it() {
    let export = "(func (export \"tally:policy/assignments@0.1.1#assigned\") (param i64 i32))";
    let bytes = component("told-of-assignments", "", export);
    let compiled = bare_host(limits()).compile_bytes("later.wasm", &bytes).unwrap();
    assert_eq!(compiled.unknown_exports(), ["tally:policy/assignments@0.1.1"]);
    assert_eq!(compiled.subscriptions(), Subscriptions::NONE);
    let mut bench = Bench::new(compiled.start("", None).unwrap());
    assert_eq!(bench.decide(1), Ok(Decision::Run(0)));
}

#[test]
fn a_component_that_imports_a_later_interface_is_refused_by_name() {
    let import =
        "(import \"tally:policy/placement@0.1.1\" \"place\" (func $place (param i32 i32)))";
    let export = "(func (export \"never\") (call $place (i32.const 0) (i32.const 0)))";
    let bytes = component("placing", import, export);
    let error = bare_host(limits()).compile_bytes("later.wasm", &bytes).err().unwrap();
    assert!(matches!(error, LoadError::UnknownImport { .. }), "{error}");
    let message = error.to_string();
    for part in [
        "later.wasm: imports `tally:policy/placement@0.1.1`",
        "which this core does not provide",
        "or use a newer core",
    ] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
