//! Says what is wrong with a file that is no policy, before wasmtime would say
//! it in its own words: what kind of file it is, which import nobody provides,
//! which export is missing.

use crate::bindings::CONTRACT;
use crate::bindings::types::{Decision, Event, Launch};
use crate::state::{Exports, Saved};
use crate::{Limits, LoadError};
use std::collections::BTreeSet;
use tally_compiler::CompileError;
use wasmtime::Engine;
use wasmtime::component::Component;
use wasmtime::component::types::ComponentItem;

const HOST: &str = "tally:policy/host@0.1.2";
const TYPES: &str = "tally:policy/types@0.1.2";
const SCHEDULER: &str = "tally:policy/scheduler@0.1.2";
/// Optional.
const STATE: &str = "tally:policy/state@0.1.2";

/// How wasmtime says that a component does not fit into the pool; it has no type
/// for this error.
const POOL_LIMIT: &str = "exceeds the";

/// Refuse what is no component, by its first bytes.
pub fn preamble(file: &str, bytes: &[u8]) -> Result<(), LoadError> {
    let file = || file.to_owned();
    match bytes {
        [0, b'a', b's', b'm', 0x0d, 0, 1, 0, ..] => Ok(()),
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => Err(LoadError::CoreModule { file: file() }),
        [0, b'a', b's', b'm', ..] => {
            let why = "it is cut off, or of another version of the format".into();
            Err(LoadError::Invalid { file: file(), why })
        }
        _ => Err(LoadError::NotWasm { file: file(), found: kind(bytes).into() }),
    }
}

fn kind(bytes: &[u8]) -> &'static str {
    match bytes {
        [] => "empty",
        [0x7f, b'E', b'L', b'F', ..] => {
            "a native ELF file (or a component that wasmtime compiled ahead of time)"
        }
        [b'#', b'!', ..] => "a script",
        [0x1f, 0x8b, ..] => "a gzip archive",
        _ if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'(') => {
            "WebAssembly text (WAT)"
        }
        _ if std::str::from_utf8(&bytes[..bytes.len().min(512)]).is_ok() => "text",
        _ => "some other binary file",
    }
}

/// Refuse a component that imports what there is not. Names only: the types are
/// the linker's, see [`wrong_import`]. Returns the functions of `host` that it imports.
pub fn imports(
    file: &str,
    component: &Component,
    engine: &Engine,
) -> Result<BTreeSet<String>, LoadError> {
    let ty = component.component_type();
    let mut functions = BTreeSet::new();
    for (name, import) in ty.imports(engine) {
        if name.starts_with("wasi:") || name.starts_with("wasi_") {
            return Err(LoadError::Wasi { file: file.into(), import: name.into() });
        }
        let unknown = |import: String| LoadError::UnknownImport {
            file: file.into(),
            import,
            provided: format!("{HOST} and {TYPES}"),
        };
        let ComponentItem::ComponentInstance(interface) = import.ty else {
            return Err(unknown(name.into()));
        };
        if !compatible(name, HOST) && !compatible(name, TYPES) {
            return Err(unknown(name.into()));
        }
        for (function, item) in interface.exports(engine) {
            let is_function = matches!(item.ty, ComponentItem::ComponentFunc(_));
            if is_function && signature(function).is_none() {
                return Err(unknown(format!("{name}#{function}")));
            }
            if is_function {
                functions.insert(function.to_owned());
            }
        }
    }
    Ok(functions)
}

/// Refuse a component that does not export what a policy must, or with other types.
pub fn exports(file: &str, component: &Component, engine: &Engine) -> Result<(), LoadError> {
    let ty = component.component_type();
    let missing = |export: &str, expected: String, found: Vec<&str>| LoadError::MissingExport {
        file: file.into(),
        export: export.into(),
        expected,
        found: if found.is_empty() { "nothing".into() } else { found.join(", ") },
    };
    let found = ty.exports(engine).find(|(name, _)| compatible(name, SCHEDULER));
    let Some((_, ComponentItem::ComponentInstance(scheduler))) =
        found.map(|(name, export)| (name, export.ty))
    else {
        let found = ty.exports(engine).map(|(name, _)| name).collect();
        return Err(missing(SCHEDULER, format!("export {SCHEDULER}"), found));
    };
    let functions = |name| match scheduler.get_export(engine, name).map(|export| export.ty) {
        Some(ComponentItem::ComponentFunc(function)) => Ok(function),
        _ => {
            let found = scheduler.exports(engine).map(|(name, _)| name).collect();
            let expected = signature(name).unwrap_or_default().into();
            Err(missing(&format!("{SCHEDULER}#{name}"), expected, found))
        }
    };
    let (init, decide, on_event) =
        (functions("init")?, functions("decide")?, functions("on-event")?);
    // The bindings would find this too, but not say which function.
    let types = ty.instance_type();
    let wrong = |name: &str, error: wasmtime::Error| LoadError::WrongExport {
        file: file.into(),
        export: format!("{SCHEDULER}#{name}"),
        expected: signature(name).unwrap_or_default().into(),
        why: format!("{error:#}"),
    };
    init.typecheck::<(&str,), (Result<(), String>,)>(&types).map_err(|e| wrong("init", e))?;
    decide.typecheck::<(Launch,), (Decision,)>(&types).map_err(|e| wrong("decide", e))?;
    on_event.typecheck::<(u64, &Event), ()>(&types).map_err(|e| wrong("on-event", e))
}

/// The functions of the optional interface `state`, if it is exported: both of them,
/// with the contract's types.
pub fn state(
    file: &str,
    component: &Component,
    engine: &Engine,
) -> Result<Option<Exports>, LoadError> {
    let ty = component.component_type();
    let Some((exported, found)) = ty.exports(engine).find(|(name, _)| compatible(name, STATE))
    else {
        return Ok(None);
    };
    let missing = |name: &str, found: String| LoadError::MissingExport {
        file: file.into(),
        export: format!("{STATE}#{name}"),
        expected: signature(name).unwrap_or_default().into(),
        found,
    };
    let ComponentItem::ComponentInstance(interface) = found.ty else {
        return Err(missing("snapshot", format!("{exported}, which is no interface")));
    };
    let functions = |name| match interface.get_export(engine, name).map(|export| export.ty) {
        Some(ComponentItem::ComponentFunc(function)) => Ok(function),
        _ => {
            let found: Vec<&str> = interface.exports(engine).map(|(name, _)| name).collect();
            let found = if found.is_empty() { "nothing".into() } else { found.join(", ") };
            Err(missing(name, found))
        }
    };
    let (snapshot, restore) = (functions("snapshot")?, functions("restore")?);
    let types = ty.instance_type();
    let wrong = |name: &str, error: wasmtime::Error| LoadError::WrongExport {
        file: file.into(),
        export: format!("{STATE}#{name}"),
        expected: signature(name).unwrap_or_default().into(),
        why: format!("{error:#}"),
    };
    snapshot.typecheck::<(), (Saved,)>(&types).map_err(|e| wrong("snapshot", e))?;
    restore
        .typecheck::<(Saved,), (Result<(), String>,)>(&types)
        .map_err(|e| wrong("restore", e))?;
    Ok(Exports::find(component, exported))
}

/// The linker found an import of another type.
pub fn wrong_import(file: &str, error: &wasmtime::Error) -> LoadError {
    let why = format!("{error:#}");
    let (name, expected) = quoted_function(&why);
    LoadError::WrongImport { file: file.into(), import: format!("{HOST}#{name}"), expected, why }
}

/// The first function of the contract that a message of wasmtime quotes, with the
/// contract's signature.
fn quoted_function(message: &str) -> (String, String) {
    let quoted = message.split('`').skip(1).step_by(2);
    let mut known = quoted.filter_map(|name| Some((name, signature(name)?)));
    match known.next() {
        Some((name, signature)) => (name.into(), signature.into()),
        None => ("?".into(), "the contract's types".into()),
    }
}

/// The bindings found fault with the exports, though [`exports`] found none.
pub fn wrong_export(file: &str, error: &wasmtime::Error) -> LoadError {
    LoadError::WrongExport {
        file: file.into(),
        export: SCHEDULER.into(),
        expected: "the contract's functions".into(),
        why: format!("{error:#}"),
    }
}

/// Why it was not compiled; what does not fit into the pool wants too much.
pub fn not_compiled(file: &str, limits: &Limits, error: CompileError) -> LoadError {
    let file = file.to_owned();
    match error {
        CompileError::Invalid(why) => LoadError::Invalid { file, why },
        CompileError::Unfit(error) => {
            let why = format!("{error:#}");
            if why.contains(POOL_LIMIT) {
                LoadError::TooDemanding { file, why }
            } else {
                LoadError::Invalid { file, why }
            }
        }
        CompileError::TooMany(many) => LoadError::TooMany { file, many },
        CompileError::Memory(_) => {
            let (key, now) = ("compile_memory_bytes", limits.compile_memory_bytes as u64);
            LoadError::TooDear { file, error, key, now }
        }
        CompileError::CpuTime(_) | CompileError::WallTime(_) => {
            let (key, now) = ("compile_cpu_s", limits.compile_cpu_s);
            LoadError::TooDear { file, error, key, now }
        }
        CompileError::Output(_) => {
            let (key, now) = ("component_bytes_max", limits.component_bytes_max as u64);
            LoadError::TooDear { file, error, key, now }
        }
        CompileError::Cancelled => LoadError::Cancelled { file },
        CompileError::Crashed { .. } | CompileError::Process { .. } | CompileError::NotServed => {
            LoadError::NotCompiled { file, error }
        }
    }
}

/// The line of the contract that declares a function.
fn signature(function: &str) -> Option<&'static str> {
    CONTRACT
        .lines()
        .map(str::trim)
        .find(|line| line.strip_prefix(function).is_some_and(|rest| rest.starts_with(": func(")))
}

/// Same interface, and a version that only adds to ours: 0.1 for 0.1.2.
fn compatible(name: &str, ours: &str) -> bool {
    let minor = ours.rfind('.').map_or(ours, |patch| &ours[..=patch]);
    name.starts_with(minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_come_from_the_contract() {
        assert_eq!(signature("decide"), Some("decide: func(launch: launch) -> decision;"));
        assert_eq!(signature("revoke-lease"), Some("revoke-lease: func(client: client-id);"));
        assert_eq!(signature("lease"), None);
        assert!(CONTRACT.contains("package tally:policy@0.1.2;"));
    }

    #[test]
    fn only_the_patch_number_may_differ() {
        assert!(compatible("tally:policy/host@0.1.7", HOST));
        assert!(!compatible("tally:policy/host@0.2.0", HOST));
        assert!(!compatible("tally:policy/hostess@0.1.2", HOST));
    }

    /// What is said about a component that exports `state` with these functions.
    fn refused_state(version: &str, functions: &[&str]) -> Result<bool, String> {
        let exports: String =
            functions.iter().map(|name| format!("(export \"{name}\" (func $f))")).collect();
        let text = format!(
            "(component
                (core module $m (func (export \"f\")))
                (core instance $i (instantiate $m))
                (func $f (canon lift (core func $i \"f\")))
                (instance $s {exports})
                (export \"tally:policy/state@{version}\" (instance $s)))"
        );
        let engine = Engine::default();
        let component = Component::new(&engine, wat::parse_str(text).unwrap()).unwrap();
        let found = state("it.wasm", &component, &engine);
        found.map(|exports| exports.is_some()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_state_interface_is_whole_or_absent() {
        assert_eq!(refused_state("0.2.0", &[]), Ok(false), "another contract's is not ours");
        for (functions, parts) in [
            (&[][..], ["state@0.1.2#snapshot", "exports nothing", "snapshot: func() -> saved;"]),
            (
                &["snapshot"],
                ["state@0.1.2#restore", "exports snapshot", "restore: func(%from: saved)"],
            ),
            (
                &["restore", "snapshot"],
                ["`tally:policy/state@0.1.2#snapshot` with another type", "it.wasm", "-> saved;"],
            ),
        ] {
            let error = refused_state("0.1.7", functions).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn files_are_recognised() {
        for (bytes, found) in [
            (&b""[..], "empty"),
            (b"hello", "text"),
            (
                b"\x7fELF\x02",
                "a native ELF file (or a component that wasmtime compiled ahead of time)",
            ),
            (b"#!/bin/sh", "a script"),
            (b"\n (component)", "WebAssembly text (WAT)"),
            (b"\xff\xfe\x00", "some other binary file"),
        ] {
            assert_eq!(kind(bytes), found);
        }
    }
}
