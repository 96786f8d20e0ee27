//! Says what is wrong with a file that is no policy, before wasmtime would say
//! it in its own words: what kind of file it is, which import nobody provides,
//! which export is missing.

use crate::bindings::CONTRACT;
use crate::bindings::types::{Answer, Client, Completion, Launch};
use crate::state::{self, Saved};
use crate::{Limits, LoadError, shown};
use std::collections::BTreeSet;
use tally_compiler::CompileError;
use tally_contract::capability::Capabilities;
use wasmtime::Engine;
use wasmtime::component::Component;
use wasmtime::component::types::{self, ComponentItem};

/// The contract's package and version; what its interfaces are called in components begins and ends with these.
const PACKAGE: &str = "tally:policy/";
const VERSION: &str = "0.1.0";
/// Interfaces that policies may import.
const IMPORTS: [&str; 14] = [
    "types",
    "log",
    "metrics",
    "reasons",
    "clients",
    "services",
    "kernels",
    "control",
    "widths",
    "timers",
    "sharing",
    "identity",
    "kernel-identity",
    "high-priority",
];
/// A function of another interface than `clients` that reads what is kept up to date for callers of that.
pub const READS_USAGE: &str = "widths#cost-ns";
/// What every policy exports, and what it may export. `state` is looked at by [`state()`].
const SCHEDULER: &str = "scheduler";
const EVENTS: [&str; 5] = ["activity", "units", "completions", "membership", "timer"];
const STATE: &str = "state";

/// Exported interfaces unknown to this core that are reported, at most.
const UNKNOWN_MAX: usize = 16;

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

/// Refuse a component that imports what there is not, or what it was not granted. Names only: the types are
/// the linker's, see [`wrong_import`]. Returns the interfaces that it imports functions of, and [`READS_USAGE`] if it
/// imports that.
pub fn imports(
    file: &str,
    component: &Component,
    engine: &Engine,
    granted: Capabilities,
) -> Result<BTreeSet<String>, LoadError> {
    let ty = component.component_type();
    let mut interfaces = BTreeSet::new();
    for (name, import) in ty.imports(engine) {
        if name.starts_with("wasi:") || name.starts_with("wasi_") {
            return Err(LoadError::Wasi { file: file.into(), import: shown::name(name) });
        }
        let unknown = |import: String| LoadError::UnknownImport {
            file: file.into(),
            import: shown::name(&import),
            provided: format!("{PACKAGE}*@{VERSION} with {}", IMPORTS.join(", ")),
        };
        let (ComponentItem::ComponentInstance(interface), Some(bare)) = (import.ty, bare(name))
        else {
            return Err(unknown(name.into()));
        };
        if !IMPORTS.contains(&bare) {
            return Err(unknown(name.into()));
        }
        for (function, item) in interface.exports(engine) {
            if matches!(item.ty, ComponentItem::ComponentFunc(_)) {
                if signature(bare, function).is_none() {
                    return Err(unknown(format!("{name}#{function}")));
                }
                interfaces.insert(bare.to_owned());
                let name = format!("{bare}#{function}");
                if name == READS_USAGE {
                    interfaces.insert(name);
                }
            }
        }
    }
    let needed = Capabilities::of_imports(interfaces.iter().map(String::as_str)).without(granted);
    if needed.is_empty() {
        return Ok(interfaces);
    }
    let names = needed.names();
    let each = |quote: char| {
        names.iter().map(|name| format!("{quote}{name}{quote}")).collect::<Vec<_>>().join(", ")
    };
    let what = if names.len() == 1 { "the capability" } else { "the capabilities" };
    let (needed, listed) = (format!("{what} {}", each('`')), each('"'));
    Err(LoadError::NotGranted { file: file.into(), needed, listed })
}

/// Interfaces that a component exports.
#[derive(Debug, Default)]
pub struct Found {
    /// Interfaces of the contract, by their bare names.
    pub known: BTreeSet<String>,
    /// Interfaces of the contract's package that this version of it does not have.
    pub unknown: Vec<String>,
}

/// An exported interface, looked at function by function.
struct Exported<'a> {
    file: &'a str,
    engine: &'a Engine,
    bare: &'a str,
    interface: types::ComponentInstance,
    component: types::Component,
}

impl Exported<'_> {
    fn full(&self) -> String {
        full(self.bare)
    }

    /// Refuse it if it lacks this function or has it with another type.
    fn check<P, R>(&self, name: &str) -> Result<(), LoadError>
    where
        P: wasmtime::component::ComponentNamedList + wasmtime::component::Lower,
        R: wasmtime::component::ComponentNamedList + wasmtime::component::Lift,
    {
        let expected = || signature(self.bare, name).unwrap_or_default().to_owned();
        let found = self.interface.get_export(self.engine, name).map(|export| export.ty);
        let Some(ComponentItem::ComponentFunc(function)) = found else {
            let found = self.interface.exports(self.engine).map(|(name, _)| name).collect();
            return Err(missing(self.file, &format!("{}#{name}", self.full()), expected(), found));
        };
        // The bindings would find this too, but not say which function.
        function.typecheck::<P, R>(&self.component.instance_type()).map_err(|error| {
            LoadError::WrongExport {
                file: self.file.into(),
                export: format!("{}#{name}", self.full()),
                expected: expected(),
                why: shown::why(&format!("{error:#}")),
            }
        })
    }
}

fn missing(file: &str, export: &str, expected: String, found: Vec<&str>) -> LoadError {
    LoadError::MissingExport {
        file: file.into(),
        export: shown::name(export),
        expected,
        found: shown::names(&found),
    }
}

/// An interface that a component exports; `None` if it does not.
fn exported<'a>(
    file: &'a str,
    component: &'a Component,
    engine: &'a Engine,
    wanted: &'a str,
) -> Result<Option<(String, Exported<'a>)>, LoadError> {
    let ty = component.component_type();
    let Some((name, found)) = ty.exports(engine).find(|(name, _)| bare(name) == Some(wanted))
    else {
        return Ok(None);
    };
    let ComponentItem::ComponentInstance(interface) = found.ty else {
        let found = vec!["something else of that name"];
        return Err(missing(file, name, format!("interface {wanted}"), found));
    };
    let exported =
        Exported { file, engine, bare: wanted, interface, component: component.component_type() };
    Ok(Some((name.to_owned(), exported)))
}

/// Refuse a component that does not export what a policy must, or with other types.
pub fn exports(file: &str, component: &Component, engine: &Engine) -> Result<Found, LoadError> {
    let ty = component.component_type();
    let mut found = Found::default();
    for (name, _) in ty.exports(engine) {
        match bare(name) {
            Some(bare) if bare == SCHEDULER || bare == STATE || EVENTS.contains(&bare) => {
                found.known.insert(bare.to_owned());
            }
            _ if name.starts_with(PACKAGE) && found.unknown.len() < UNKNOWN_MAX => {
                found.unknown.push(shown::name(name));
            }
            _ => {}
        }
    }
    let Some((_, scheduler)) = exported(file, component, engine, SCHEDULER)? else {
        let all = ty.exports(engine).map(|(name, _)| name).collect();
        let expected = format!("export {}", full(SCHEDULER));
        return Err(missing(file, &full(SCHEDULER), expected, all));
    };
    scheduler.check::<(&str,), (Result<(), String>,)>("init")?;
    scheduler.check::<(Launch,), (Answer,)>("decide")?;
    if let Some((_, activity)) = exported(file, component, engine, "activity")? {
        activity.check::<(u64,), ()>("high-started")?;
        activity.check::<(u64,), ()>("high-ended")?;
    }
    if let Some((_, completions)) = exported(file, component, engine, "completions")? {
        completions.check::<(u64, Completion), ()>("completed")?;
    }
    if let Some((_, membership)) = exported(file, component, engine, "membership")? {
        membership.check::<(u64, Client), ()>("joined")?;
        membership.check::<(u64, u32), ()>("left")?;
    }
    if let Some((_, units)) = exported(file, component, engine, "units")? {
        units.check::<(u64, u32, u64, u64), ()>("began")?;
        units.check::<(u64, u32, u32, u64), ()>("ended")?;
    }
    if let Some((_, timer)) = exported(file, component, engine, "timer")? {
        timer.check::<(u64, u64), ()>("fired")?;
    }
    Ok(found)
}

/// The functions of the optional interface `state`, if it is exported: both of them,
/// with the contract's types.
pub fn state(
    file: &str,
    component: &Component,
    engine: &Engine,
) -> Result<Option<state::Exports>, LoadError> {
    let Some((name, state)) = exported(file, component, engine, STATE)? else { return Ok(None) };
    state.check::<(), (Saved,)>("snapshot")?;
    state.check::<(Saved,), (Result<(), String>,)>("restore")?;
    Ok(state::Exports::find(component, &name))
}

/// The linker found an import of another type.
pub fn wrong_import(file: &str, error: &wasmtime::Error) -> LoadError {
    let why = format!("{error:#}");
    // It quotes the interface and the function.
    let quoted: Vec<&str> = why.split('`').skip(1).step_by(2).collect();
    let interface = quoted.iter().find_map(|name| bare(name)).unwrap_or("?");
    let known = quoted.iter().find_map(|name| Some((*name, signature(interface, name)?)));
    let (name, expected) = known.unwrap_or(("?", "the contract's types"));
    let (import, expected) = (format!("{}#{name}", full(interface)), expected.to_owned());
    let (import, why) = (shown::name(&import), shown::why(&why));
    LoadError::WrongImport { file: file.into(), import, expected, why }
}

/// The bindings found fault with the exports, though [`exports`] found none.
pub fn wrong_export(file: &str, error: &wasmtime::Error) -> LoadError {
    LoadError::WrongExport {
        file: file.into(),
        export: full(SCHEDULER),
        expected: "the contract's functions".into(),
        why: shown::why(&format!("{error:#}")),
    }
}

/// Why it was not compiled; what does not fit into the pool wants too much.
pub fn not_compiled(file: &str, limits: &Limits, error: CompileError) -> LoadError {
    let file = file.to_owned();
    match error {
        CompileError::Invalid(why) => LoadError::Invalid { file, why: shown::why(&why) },
        CompileError::Unfit(error) => {
            let why = shown::why(&format!("{error:#}"));
            if why.contains(POOL_LIMIT) {
                LoadError::TooDemanding { file, why }
            } else {
                LoadError::Invalid { file, why }
            }
        }
        CompileError::TooMany(many) => LoadError::TooMany { file, many },
        CompileError::Memory(_) => {
            let (key, now) = ("compile_memory_bytes", limits.compile_memory_bytes as u64);
            LoadError::OverBudget { file, error, key, now }
        }
        CompileError::CpuTime(_) | CompileError::WallTime(_) => {
            let (key, now) = ("compile_cpu_s", limits.compile_cpu_s);
            LoadError::OverBudget { file, error, key, now }
        }
        CompileError::Output(_) => {
            let (key, now) = ("component_bytes_max", limits.component_bytes_max as u64);
            LoadError::OverBudget { file, error, key, now }
        }
        CompileError::Cancelled => LoadError::Cancelled { file },
        CompileError::Crashed { .. } | CompileError::Process { .. } | CompileError::NotServed => {
            LoadError::NotCompiled { file, error }
        }
    }
}

/// The line of the contract that declares a function of an interface.
fn signature(interface: &str, function: &str) -> Option<&'static str> {
    let (_, body) = CONTRACT.split_once(&format!("\ninterface {interface} {{\n"))?;
    let (body, _) = body.split_once("\n}\n")?;
    body.lines()
        .map(str::trim)
        .find(|line| line.strip_prefix(function).is_some_and(|rest| rest.starts_with(": func(")))
}

/// What an interface of the contract is called in a component.
fn full(bare: &str) -> String {
    format!("{PACKAGE}{bare}@{VERSION}")
}

/// The name of an interface of the contract without package and version. The version may differ in its patch number.
fn bare(name: &str) -> Option<&str> {
    let (bare, version) = name.strip_prefix(PACKAGE)?.split_once('@')?;
    let minor = VERSION.rfind('.').map_or(VERSION, |patch| &VERSION[..=patch]);
    version.starts_with(minor).then_some(bare)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_come_from_the_contract() {
        let decide = "decide: func(launch: launch) -> answer;";
        assert_eq!(signature("scheduler", "decide"), Some(decide));
        assert_eq!(
            signature("control", "revoke-lease"),
            Some("revoke-lease: func(client: client-id);")
        );
        assert_eq!((signature("control", "lease"), signature("log", "decide")), (None, None));
        assert!(CONTRACT.contains(&format!("package tally:policy@{VERSION};")));
    }

    #[test]
    fn every_interface_of_the_contract_is_an_import_or_an_export() {
        let of_line = |line: &'static str| line.strip_prefix("interface ")?.strip_suffix(" {");
        let mut there: Vec<&str> = CONTRACT.lines().filter_map(of_line).collect();
        let mut known = [&IMPORTS[..], &EVENTS, &[SCHEDULER, STATE]].concat();
        there.sort_unstable();
        known.sort_unstable();
        assert_eq!(there, known);
    }

    #[test]
    fn only_the_patch_number_may_differ() {
        assert_eq!(bare("tally:policy/log@0.1.7"), Some("log"));
        assert_eq!(bare("tally:policy/log@0.2.0"), None);
        assert_eq!(bare("tally:policies/log@0.1.0"), None);
        assert_eq!(bare("log"), None);
    }

    /// A component that exports these functions as an interface, each without parameters and results.
    fn exporting(interface: &str, functions: &[&str]) -> (Engine, Component) {
        let exports: String =
            functions.iter().map(|name| format!("(export \"{name}\" (func $f))")).collect();
        let text = format!(
            "(component
                (core module $m (func (export \"f\")))
                (core instance $i (instantiate $m))
                (func $f (canon lift (core func $i \"f\")))
                (instance $s {exports})
                (export \"tally:policy/{interface}\" (instance $s)))"
        );
        let engine = Engine::default();
        let component = Component::new(&engine, wat::parse_str(text).unwrap()).unwrap();
        (engine, component)
    }

    #[test]
    fn a_state_interface_is_whole_or_absent() {
        let refused = |version: &str, functions: &[&str]| {
            let (engine, component) = exporting(&format!("state@{version}"), functions);
            let found = state("it.wasm", &component, &engine);
            found.map(|exports| exports.is_some()).map_err(|error| error.to_string())
        };
        assert_eq!(refused("0.2.0", &[]), Ok(false), "another contract's is not ours");
        for (functions, parts) in [
            (&[][..], ["state@0.1.0#snapshot", "exports nothing", "snapshot: func() -> saved;"]),
            (&["snapshot"], ["state@0.1.0#snapshot` with another type", "it.wasm", "-> saved;"]),
            (
                &["restore"],
                ["state@0.1.0#snapshot`", "exports restore", "snapshot: func() -> saved;"],
            ),
        ] {
            let error = refused("0.1.7", functions).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn an_event_interface_of_another_type_is_refused_by_name() {
        for (interface, functions, parts) in [
            (
                "scheduler@0.1.0",
                &["init"][..],
                ["scheduler@0.1.0#init", "another type", "init: func("],
            ),
            ("scheduler@0.1.0", &[], ["scheduler@0.1.0#init", "exports nothing", "init: func("]),
            (
                "timer@0.1.0",
                &["fired"],
                ["scheduler@0.1.0", "exports tally:policy/timer@0.1.0", "it.wasm"],
            ),
        ] {
            let (engine, component) = exporting(interface, functions);
            let error = exports("it.wasm", &component, &engine).unwrap_err().to_string();
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
