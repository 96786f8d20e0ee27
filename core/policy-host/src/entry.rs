//! A shorter way into the two functions that are called all the time.
//!
//! At each call wasmtime looks the lifted core function up. Of a function that a module defines
//! it makes a reference anew, which takes two searches for code, a quarter of a whole call; of one
//! that a module imports it has the reference. So before a component is compiled its `decide` and
//! `on-event` are led through a module that imports the function and exports it again: no code is
//! added or changed, no call is made more, and fuel is the same.
//!
//! ```text
//! (canon lift (core func $decide) ..)     ->   (core module $again (import "" "f" (func ..)) (export "f" (func 0)))
//!                                              (core instance $with (export "f" (func $decide)))
//!                                              (core instance $i (instantiate $again (with "" (instance $with))))
//!                                              (alias core export $i "f" (core func $again-decide))
//!                                              (canon lift (core func $again-decide) ..)
//! ```
//!
//! What stands behind counts its core modules, instances and functions from then on, so
//! those numbers are changed. A component in which anything else could refer to them is left as it is, as are
//! those that are not valid (but for their code, which the compiler looks at), and those whose functions are lifted in
//! a component within, as some tools for interpreted languages have it.

use wasm_encoder as enc;
use wasmparser::{
    BinaryReaderError, CanonicalFunction, CanonicalOption, ComponentAlias, ComponentExternalKind,
    ComponentInstance, ComponentOuterAliasKind, ComponentType, ComponentTypeRef,
    CompositeInnerType, Encoding, ExternalKind, Instance, Parser, Payload, ValType, Validator,
    WasmFeatures,
};

/// What the core functions behind them are called, as the component tools have it.
const LED: [&str; 2] = ["#decide", "#on-event"];
/// Of two versions of the contract at once. Each is another module, so nobody may have any number of them.
const LED_MAX: u32 = 4;
/// Components that instantiate more core modules are left as they are: there is a limit to that.
const INSTANTIATED_MAX: u32 = 48;

/// The same component with the shorter way; `None` if there is none, or it cannot be told.
pub fn shortened(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut rewriter = Rewriter::default();
    // Not the code: that is the compiler's to do.
    let mut validator = Validator::new_with_features(WasmFeatures::default());
    let mut depth = 0_u32;
    for payload in Parser::new(0).parse_all(bytes) {
        let payload = payload.ok()?;
        // First, so that nothing is rewritten that is not valid.
        validator.payload(&payload).ok()?;
        match &payload {
            _ if depth == 0 => rewriter.section(bytes, &payload, &validator)?,
            // A module of ours by its number, from within a component of its own.
            Payload::ComponentAliasSection(aliases) => none_of(aliases.clone(), |alias| {
                matches!(
                    alias,
                    ComponentAlias::Outer { kind: ComponentOuterAliasKind::CoreModule, .. }
                )
            })?,
            _ => {}
        }
        match &payload {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    let fits = rewriter.instantiated <= INSTANTIATED_MAX;
    (rewriter.led > 0 && fits).then(|| rewriter.out.finish())
}

/// Where core items of one kind have gone: by their old numbers, their new ones.
#[derive(Default)]
struct Moved {
    to: Vec<u32>,
    /// Items so far, with those that were added.
    count: u32,
}

impl Moved {
    /// The next one of the component's own.
    fn own(&mut self) {
        self.to.push(self.count);
        self.count += 1;
    }

    /// One that is added: its number.
    fn added(&mut self) -> u32 {
        self.count += 1;
        self.count - 1
    }

    fn get(&self, old: u32) -> Option<u32> {
        self.to.get(old as usize).copied()
    }
}

#[derive(Default)]
struct Rewriter {
    out: enc::Component,
    modules: Moved,
    instances: Moved,
    funcs: Moved,
    /// By its old number: whether the function is one to be led.
    wanted: Vec<bool>,
    led: u32,
    /// Core modules that it instantiates itself.
    instantiated: u32,
}

impl Rewriter {
    /// One section of the component itself. `None`: leave the component as it is.
    fn section(
        &mut self,
        bytes: &[u8],
        payload: &Payload<'_>,
        validator: &Validator,
    ) -> Option<()> {
        match payload {
            Payload::Version { encoding: Encoding::Component, .. } | Payload::End(_) => {
                return Some(());
            }
            Payload::ModuleSection { .. } => self.modules.own(),
            Payload::InstanceSection(section) => return self.instances(section.clone()),
            Payload::ComponentAliasSection(section) => return self.aliases(section.clone()),
            Payload::ComponentCanonicalSection(section) => {
                return self.canonicals(section.clone(), validator);
            }
            // Copied, unless something in them is, or counts, a core module or function.
            Payload::ComponentInstanceSection(section) => {
                none_of(section.clone(), |instance| match instance {
                    ComponentInstance::Instantiate { args, .. } => {
                        args.iter().any(|arg| arg.kind == ComponentExternalKind::Module)
                    }
                    ComponentInstance::FromExports(exports) => {
                        exports.iter().any(|export| export.kind == ComponentExternalKind::Module)
                    }
                })?;
            }
            Payload::ComponentTypeSection(section) => {
                none_of(section.clone(), |ty| matches!(ty, ComponentType::Resource { .. }))?
            }
            Payload::ComponentImportSection(section) => {
                none_of(section.clone(), |import| matches!(import.ty, ComponentTypeRef::Module(_)))?
            }
            Payload::ComponentExportSection(section) => {
                none_of(section.clone(), |export| export.kind == ComponentExternalKind::Module)?
            }
            Payload::CoreTypeSection(_)
            | Payload::ComponentSection { .. }
            | Payload::CustomSection(_) => {}
            _ => return None,
        }
        let (id, range) = payload.as_section()?;
        self.out.section(&enc::RawSection { id, data: bytes.get(range)? });
        Some(())
    }

    fn instances(&mut self, section: wasmparser::InstanceSectionReader<'_>) -> Option<()> {
        let mut out = enc::InstanceSection::new();
        for instance in section {
            match instance.ok()? {
                Instance::Instantiate { module_index, args } => {
                    let with = |arg: &wasmparser::InstantiationArg<'_>| {
                        Some(enc::ModuleArg::Instance(self.instances.get(arg.index)?))
                    };
                    let args = args.iter().map(|arg| Some((arg.name, with(arg)?)));
                    let args = args.collect::<Option<Vec<_>>>()?;
                    out.instantiate(self.modules.get(module_index)?, args);
                    self.instantiated += 1;
                }
                Instance::FromExports(exports) => {
                    let index = |export: &wasmparser::Export<'_>| match export.kind {
                        ExternalKind::Func => self.funcs.get(export.index),
                        // None of these is added.
                        _ => Some(export.index),
                    };
                    let exports = exports.iter().map(|export| {
                        Some((export.name, export_kind(export.kind)?, index(export)?))
                    });
                    out.export_items(exports.collect::<Option<Vec<_>>>()?);
                }
            }
            self.instances.own();
        }
        self.out.section(&out);
        Some(())
    }

    fn aliases(&mut self, section: wasmparser::ComponentAliasSectionReader<'_>) -> Option<()> {
        let mut out = enc::ComponentAliasSection::new();
        for alias in section {
            out.alias(match alias.ok()? {
                ComponentAlias::InstanceExport { kind, instance_index, name } => {
                    enc::Alias::InstanceExport {
                        instance: instance_index,
                        kind: match kind {
                            ComponentExternalKind::Module => return None,
                            ComponentExternalKind::Func => enc::ComponentExportKind::Func,
                            ComponentExternalKind::Value => enc::ComponentExportKind::Value,
                            ComponentExternalKind::Type => enc::ComponentExportKind::Type,
                            ComponentExternalKind::Instance => enc::ComponentExportKind::Instance,
                            ComponentExternalKind::Component => enc::ComponentExportKind::Component,
                        },
                        name,
                    }
                }
                ComponentAlias::CoreInstanceExport { kind, instance_index, name } => {
                    if kind == ExternalKind::Func {
                        self.own_func(LED.iter().any(|ending| name.ends_with(ending)));
                    }
                    let (kind, instance) =
                        (export_kind(kind)?, self.instances.get(instance_index)?);
                    enc::Alias::CoreInstanceExport { instance, kind, name }
                }
                ComponentAlias::Outer { kind, count, index } => {
                    let kind = match kind {
                        ComponentOuterAliasKind::CoreModule => return None,
                        ComponentOuterAliasKind::CoreType => enc::ComponentOuterAliasKind::CoreType,
                        ComponentOuterAliasKind::Type => enc::ComponentOuterAliasKind::Type,
                        ComponentOuterAliasKind::Component => {
                            enc::ComponentOuterAliasKind::Component
                        }
                    };
                    enc::Alias::Outer { kind, count, index }
                }
            });
        }
        self.out.section(&out);
        Some(())
    }

    fn canonicals(
        &mut self,
        section: wasmparser::ComponentCanonicalSectionReader<'_>,
        validator: &Validator,
    ) -> Option<()> {
        let mut out = enc::CanonicalFunctionSection::new();
        for canonical in section {
            match canonical.ok()? {
                CanonicalFunction::Lift { core_func_index, type_index, options } => {
                    let mut func = self.funcs.get(core_func_index)?;
                    if *self.wanted.get(core_func_index as usize)? {
                        if !out.is_empty() {
                            self.out.section(&out);
                            out = enc::CanonicalFunctionSection::new();
                        }
                        let types = validator.types(0)?;
                        let ty = types.get(types.core_function_at(core_func_index))?;
                        let CompositeInnerType::Func(ty) = &ty.composite_type.inner else {
                            return None;
                        };
                        func = self.lead(func, ty)?;
                    }
                    out.lift(func, type_index, self.options(&options)?);
                }
                CanonicalFunction::Lower { func_index, options } => {
                    out.lower(func_index, self.options(&options)?);
                    self.own_func(false);
                }
                _ => return None,
            }
        }
        if !out.is_empty() {
            self.out.section(&out);
        }
        Some(())
    }

    fn own_func(&mut self, wanted: bool) {
        self.funcs.own();
        self.wanted.push(wanted);
    }

    /// Lead a function (its new number) through a module of its own: the number that it has then.
    fn lead(&mut self, func: u32, ty: &wasmparser::FuncType) -> Option<u32> {
        const NAME: &str = "f";
        if self.led == LED_MAX {
            return None;
        }
        let values = |all: &[ValType]| all.iter().map(|v| val_type(*v)).collect::<Option<Vec<_>>>();
        let mut types = enc::TypeSection::new();
        types.ty().function(values(ty.params())?, values(ty.results())?);
        let mut imports = enc::ImportSection::new();
        imports.import("", NAME, enc::EntityType::Function(0));
        let mut exports = enc::ExportSection::new();
        exports.export(NAME, enc::ExportKind::Func, 0);
        let mut module = enc::Module::new();
        module.section(&types).section(&imports).section(&exports);
        self.out.section(&enc::ModuleSection(&module));
        let module = self.modules.added();
        let (with, instance) = (self.instances.added(), self.instances.added());
        let mut instances = enc::InstanceSection::new();
        instances.export_items([(NAME, enc::ExportKind::Func, func)]);
        instances.instantiate(module, [("", enc::ModuleArg::Instance(with))]);
        self.out.section(&instances);
        let mut aliases = enc::ComponentAliasSection::new();
        let kind = enc::ExportKind::Func;
        aliases.alias(enc::Alias::CoreInstanceExport { instance, kind, name: NAME });
        self.out.section(&aliases);
        self.led += 1;
        Some(self.funcs.added())
    }

    fn options(&self, options: &[CanonicalOption]) -> Option<Vec<enc::CanonicalOption>> {
        let moved = |option: &CanonicalOption| {
            Some(match option {
                CanonicalOption::UTF8 => enc::CanonicalOption::UTF8,
                CanonicalOption::UTF16 => enc::CanonicalOption::UTF16,
                CanonicalOption::CompactUTF16 => enc::CanonicalOption::CompactUTF16,
                CanonicalOption::Memory(index) => enc::CanonicalOption::Memory(*index),
                CanonicalOption::Realloc(f) => enc::CanonicalOption::Realloc(self.funcs.get(*f)?),
                CanonicalOption::PostReturn(f) => {
                    enc::CanonicalOption::PostReturn(self.funcs.get(*f)?)
                }
                _ => return None,
            })
        };
        options.iter().map(moved).collect()
    }
}

/// `None` if there is one, or one is not valid.
fn none_of<T>(
    items: impl IntoIterator<Item = Result<T, BinaryReaderError>>,
    what: impl Fn(&T) -> bool,
) -> Option<()> {
    items.into_iter().all(|item| item.is_ok_and(|item| !what(&item))).then_some(())
}

fn export_kind(kind: ExternalKind) -> Option<enc::ExportKind> {
    Some(match kind {
        ExternalKind::Func => enc::ExportKind::Func,
        ExternalKind::Table => enc::ExportKind::Table,
        ExternalKind::Memory => enc::ExportKind::Memory,
        ExternalKind::Global => enc::ExportKind::Global,
        _ => return None,
    })
}

fn val_type(ty: ValType) -> Option<enc::ValType> {
    Some(match ty {
        ValType::I32 => enc::ValType::I32,
        ValType::I64 => enc::ValType::I64,
        ValType::F32 => enc::ValType::F32,
        ValType::F64 => enc::ValType::F64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::PathBuf;
    use wasmtime::component::{Component, Linker};
    use wasmtime::{Config, Engine, Store};

    /// Four functions of one module, two of them to be led, in the order in which the component
    /// tools have them: each alias beside its lift. `$more` stands last.
    fn component(more: &str) -> Vec<u8> {
        let lift = |name: &str, is: &str| {
            format!(
                r#"(alias core export $main "{name}" (core func ${is}))
                (func $lifted-{is} (param "a" u32) (param "b" u64) (result string)
                    (canon lift (core func ${is}) (memory $memory) (realloc $realloc) (post-return $post)))
                (export "{is}" (func $lifted-{is}))"#
            )
        };
        let func = |name: &str, n: u32| {
            format!(
                r#"(func (export "{name}") (param i32 i64) (result i32)
                    (i32.store8 (i32.const 64) (i32.add (local.get 0) (i32.const {n})))
                    (i32.store8 (i32.const 65) (i32.add (i32.wrap_i64 (local.get 1)) (global.get $posts)))
                    (i32.store (i32.const 0) (i32.const 64))
                    (i32.store (i32.const 4) (i32.const 2))
                    (i32.const 0))"#
            )
        };
        let names = ["x#init", "x#decide", "x#on-event", "x#last"];
        let is = ["init", "decide", "event", "last"];
        let funcs: String = (10..).zip(names).map(|(n, name)| func(name, n)).collect();
        let lifts: String = names.into_iter().zip(is).map(|(name, is)| lift(name, is)).collect();
        let text = format!(
            r#"(component
                (core module $code
                    (memory (export "memory") 1)
                    (global $posts (mut i32) (i32.const 48))
                    (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 128))
                    (func (export "post") (param i32)
                        (global.set $posts (i32.add (global.get $posts) (i32.const 1))))
                    {funcs})
                (core instance $main (instantiate $code))
                (alias core export $main "memory" (core memory $memory))
                (alias core export $main "realloc" (core func $realloc))
                (alias core export $main "post" (core func $post))
                {lifts}
                {more})"#
        );
        wat::parse_str(text).unwrap()
    }

    fn is_valid(bytes: &[u8]) -> bool {
        Validator::new_with_features(WasmFeatures::all()).validate_all(bytes).is_ok()
    }

    /// What its four functions answer, called in turns, and the fuel that they have used.
    fn answers(bytes: &[u8]) -> (Vec<String>, u64) {
        const FUEL: u64 = 1_000_000;
        let engine = Engine::new(Config::new().consume_fuel(true)).unwrap();
        let component = Component::new(&engine, bytes).unwrap();
        let mut store = Store::new(&engine, ());
        store.set_fuel(FUEL).unwrap();
        let instance = Linker::new(&engine).instantiate(&mut store, &component).unwrap();
        let mut said = Vec::new();
        for i in 0..8_u32 {
            let name = ["decide", "last", "init", "event"][i as usize % 4];
            let func = instance.get_typed_func::<(u32, u64), (String,)>(&mut store, name).unwrap();
            said.push(func.call(&mut store, (48 + i, 5)).unwrap().0);
        }
        (said, FUEL - store.get_fuel().unwrap())
    }

    #[test]
    fn what_is_led_does_the_same_for_the_same_fuel() {
        let whole = component("");
        let short = shortened(&whole).unwrap();
        // One module more for each of the two.
        let modules = |bytes| {
            let payloads = Parser::new(0).parse_all(bytes);
            payloads.filter(|p| matches!(p, Ok(Payload::ModuleSection { .. }))).count()
        };
        assert_eq!((modules(&whole), modules(&short)), (1, 3));
        assert_eq!(answers(&short), answers(&whole));
        // Four functions tell themselves apart, and each call was followed by one of `post`.
        assert_eq!(answers(&whole).0[..4], ["\u{3b}5", "\u{3e}6", "\u{3c}7", "\u{3f}8"]);
    }

    #[test]
    fn old_components_are_led() {
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus");
        let mut seen = 0;
        for version in ["0.1.0", "0.1.1", "0.1.2"] {
            for file in std::fs::read_dir(corpus.join(version)).unwrap() {
                let path = file.unwrap().path();
                let short = shortened(&std::fs::read(&path).unwrap());
                assert!(is_valid(&short.expect("led")), "{}", path.display());
                seen += 1;
            }
        }
        assert!(seen >= 9, "{seen} components");
    }

    /// Everything that counts what is moved, behind what moves it: options of lifts, an instance of
    /// exports, an argument, an alias of an instance, and one section with a lift that is led and one that is not.
    #[test]
    fn what_stands_behind_is_counted_anew() {
        let whole = wat::parse_str(
            r#"(component
                (core module $code
                    (memory (export "memory") 1)
                    (global $posts (mut i32) (i32.const 0))
                    (func (export "x#decide") (param i32) (result i32)
                        (i32.add (local.get 0) (global.get $posts)))
                    (func (export "inner") (param i32) (result i32) (i32.add (local.get 0) (i32.const 1000)))
                    (func (export "other") (param i32) (result i32) (i32.const 7))
                    (func (export "realloc-0") (param i32 i32 i32 i32) (result i32) (i32.const 256))
                    (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 128))
                    (func (export "post-0") (param i32) (global.set $posts (i32.const -1)))
                    (func (export "post") (param i32)
                        (global.set $posts (i32.add (global.get $posts) (i32.const 10))))
                    (func (export "echo") (param i32 i32) (result i32)
                        (i32.store (i32.const 0) (local.get 0))
                        (i32.store (i32.const 4) (local.get 1))
                        (i32.store8 (local.get 0) (i32.add (i32.const 65) (i32.div_u (local.get 0) (i32.const 100))))
                        (i32.const 0)))
                (core instance $main (instantiate $code))
                (func $lifted-decide (param "a" u32) (result u32) (canon lift (core func $main "x#decide")))
                (core module $second
                    (import "e" "k" (func $k (param i32) (result i32)))
                    (func (export "x#on-event") (param i32) (result i32)
                        (i32.add (i32.const 5) (call $k (local.get 0)))))
                (alias core export $main "other" (core func $other))
                (alias core export $main "inner" (core func $inner))
                (core instance $env (export "k" (func $inner)))
                (core instance $not-env (export "k" (func $other)))
                (core instance $behind (instantiate $second (with "e" (instance $env))))
                (alias core export $main "memory" (core memory $memory))
                (alias core export $main "realloc-0" (core func $realloc-0))
                (alias core export $main "realloc" (core func $realloc))
                (alias core export $main "post-0" (core func $post-0))
                (alias core export $main "post" (core func $post))
                (alias core export $main "echo" (core func $echo))
                (alias core export $behind "x#on-event" (core func $event))
                (type $text (func (param "a" string) (result string)))
                (type $number (func (param "a" u32) (result u32)))
                (func $lifted-echo (type $text)
                    (canon lift (core func $echo) (memory $memory) (realloc $realloc) (post-return $post)))
                (func $lifted-event (type $number) (canon lift (core func $event)))
                (export "decide" (func $lifted-decide))
                (export "echo" (func $lifted-echo))
                (export "event" (func $lifted-event)))"#,
        )
        .unwrap();
        let answers = |bytes: &[u8]| {
            let engine = Engine::default();
            let component = Component::new(&engine, bytes).unwrap();
            let mut store = Store::new(&engine, ());
            let instance = Linker::new(&engine).instantiate(&mut store, &component).unwrap();
            let echo = instance.get_typed_func::<(&str,), (String,)>(&mut store, "echo").unwrap();
            let said = echo.call(&mut store, ("abc",)).unwrap().0;
            let numbers = ["decide", "event"].map(|name| {
                let f = instance.get_typed_func::<(u32,), (u32,)>(&mut store, name).unwrap();
                f.call(&mut store, (1,)).unwrap().0
            });
            (said, numbers)
        };
        assert_eq!(answers(&whole), ("Bbc".into(), [11, 1006]));
        assert_eq!(answers(&shortened(&whole).unwrap()), ("Bbc".into(), [11, 1006]));
    }

    #[test]
    fn nobody_gets_any_number_of_modules() {
        let lift = |i: u32| {
            format!(
                r#"(func $f{i} (param "a" u32) (param "b" u64) (result string)
                    (canon lift (core func $decide) (memory $memory) (realloc $realloc)))"#
            )
        };
        // `component` has two of its own.
        let lifts = |n: u32| component(&(0..n).map(lift).collect::<String>());
        assert!(shortened(&lifts(LED_MAX - 2)).is_some());
        assert_eq!(shortened(&lifts(LED_MAX - 1)), None);
        let instances = |n: u32| {
            component(&format!(
                "(core module $e) {}",
                "(core instance (instantiate $e))".repeat(n as usize)
            ))
        };
        assert!(shortened(&instances(INSTANTIATED_MAX - 1)).is_some());
        assert_eq!(shortened(&instances(INSTANTIATED_MAX)), None);
    }

    /// One that has as many instances as there may be, most of them in a component within: the two that the shorter way adds are too many.
    #[test]
    fn what_does_not_fit_with_the_shorter_way_is_loaded_without() {
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus");
        let fifo = std::fs::read(corpus.join("0.1.2/fifo.wasm")).unwrap();
        let own = Parser::new(0).parse_all(&fifo).filter_map(Result::ok);
        let own = own.map(|payload| match payload {
            Payload::InstanceSection(all) => {
                all.into_iter().filter(|i| matches!(i, Ok(Instance::Instantiate { .. }))).count()
            }
            _ => 0,
        });
        let own: usize = own.sum();
        let with = |within: usize| {
            let inner = wat::parse_str(format!(
                "(component (core module $e) {})",
                "(core instance (instantiate $e))".repeat(within)
            ));
            let mut bytes = fifo.clone();
            let mut append = |id: u8, data: &[u8]| {
                let section = enc::RawSection { id, data };
                bytes.push(id);
                enc::Encode::encode(&section, &mut bytes);
            };
            append(4, &inner.unwrap());
            // One instance, of the component that was put behind the others.
            let components = Parser::new(0).parse_all(&fifo);
            let (mut depth, mut index) = (0_u32, 0_u8);
            for payload in components.map(Result::unwrap) {
                match payload {
                    Payload::ComponentSection { .. } => {
                        index += u8::from(depth == 0);
                        depth += 1;
                    }
                    Payload::ModuleSection { .. } => depth += 1,
                    Payload::End(_) => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            append(5, &[1, 0, index, 0]);
            bytes
        };
        let host = crate::PolicyHost::new(crate::Limits::default()).unwrap();
        let most = 64 - own;
        assert!(shortened(&with(most)).is_some(), "it is tried");
        host.load_bytes("full", &with(most), "").unwrap();
        let refused = host.load_bytes("fuller", &with(most + 1), "").map(drop).unwrap_err();
        assert!(matches!(refused, crate::LoadError::TooDemanding { .. }), "{refused}");
    }

    #[test]
    fn what_could_refer_to_what_is_moved_is_left_as_it_is() {
        for more in [
            // Core items by their numbers, from places that are not rewritten.
            r#"(component (alias outer 1 $code (core module $m)) (core instance (instantiate $m)))"#,
            r#"(export "code" (core module $code))"#,
            r#"(import "other" (core module))"#,
            r#"(type (resource (rep i32) (dtor (core func $post))))"#,
            r#"(instance (export "code" (core module $code)))"#,
        ] {
            let whole = component(more);
            assert!(is_valid(&whole), "{more}");
            assert_eq!(shortened(&whole), None, "{more}");
        }
        // And these are none of those.
        let more = r#"(component $c (core module)) (instance (instantiate $c))
            (core module $late) (core instance $late (instantiate $late))
            (core instance (export "f" (func $last)))
            (alias core export $main "x#last" (core func $again))
            (func (export "again") (param "a" u32) (param "b" u64) (result string)
                (canon lift (core func $again) (memory $memory) (realloc $realloc)))"#;
        assert!(is_valid(&shortened(&component(more)).unwrap()));
    }

    #[test]
    fn what_is_no_component_is_left_as_it_is() {
        for bytes in [b"".as_slice(), b"\0asm", b"\0asm\x01\0\0\0", &component("")[..200]] {
            assert_eq!(shortened(bytes), None);
        }
        // Nothing to lead.
        assert_eq!(shortened(&wat::parse_str("(component)").unwrap()), None);
    }

    proptest! {
        /// Whatever the bytes: no panic, and nothing valid becomes invalid.
        #[test]
        fn changed_bytes_are_left_or_stay_valid(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
        ) {
            let mut bytes = component("");
            for (at, to) in changes {
                let at = at.index(bytes.len());
                bytes[at] = to;
            }
            if let Some(short) = shortened(&bytes) {
                prop_assert!(is_valid(&short) || !is_valid(&bytes));
            }
        }
    }
}
