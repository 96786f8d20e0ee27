//! A shorter way into the functions that are called all the time.
//!
//! On each call wasmtime looks the lifted core function up. It rebuilds the reference to a function that a module
//! defines (two code look-ups, a quarter of the call) but caches the reference to one that a module imports. So before
//! a component is compiled, its frequent functions are re-exported through a forwarding module that imports and
//! exports them. No code is added or changed, no call is added, and fuel is the same.
//!
//! ```text
//! (canon lift (core func $decide) ..)     ->   (core module $again (import "" "f" (func ..)) (export "f" (func 0)))
//!                                              (core instance $with (export "f" (func $decide)))
//!                                              (core instance $i (instantiate $again (with "" (instance $with))))
//!                                              (alias core export $i "f" (core func $again-decide))
//!                                              (canon lift (core func $again-decide) ..)
//! ```
//!
//! Inserting the module shifts the indices of core modules, instances and functions that follow, so those are
//! renumbered. A component is left as it is if anything else could refer to these indices, if it is not valid
//! (its code aside, which the compiler checks), or if its functions are lifted in a nested component, as some
//! tools for interpreted languages do.

use wasm_encoder as enc;
use wasmparser::{
    BinaryReaderError, CanonicalFunction, CanonicalOption, ComponentAlias, ComponentExternalKind,
    ComponentInstance, ComponentOuterAliasKind, ComponentType, ComponentTypeRef,
    CompositeInnerType, Encoding, ExternalKind, Instance, Parser, Payload, ValType, Validator,
    WasmFeatures,
};

/// What the core functions behind them are called, as the component tools have it.
const FORWARDED: [&str; 4] = ["#decide", "#completed", "#high-started", "#high-ended"];
/// Of two versions of the contract at once. Each is another module, so nobody may have any number of them.
const FORWARDED_MAX: u32 = 8;
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
    (rewriter.forwarded > 0 && fits).then(|| rewriter.out.finish())
}

/// Where core items of one kind have gone: by their old numbers, their new ones.
#[derive(Default)]
struct Moved {
    to: Vec<u32>,
    /// Items so far, with those that were added.
    count: u32,
}

impl Moved {
    /// Counts the next item of the component's own.
    fn own(&mut self) {
        self.to.push(self.count);
        self.count += 1;
    }

    /// Counts an added item, and returns its number.
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
    /// By its old number: whether the function is one to be forwarded.
    wanted: Vec<bool>,
    forwarded: u32,
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
                        self.own_func(FORWARDED.iter().any(|ending| name.ends_with(ending)));
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
                        func = self.forward(func, ty)?;
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

    /// Forward a function (its new number) through a module of its own: the number that it has then.
    fn forward(&mut self, func: u32, ty: &wasmparser::FuncType) -> Option<u32> {
        const NAME: &str = "f";
        if self.forwarded == FORWARDED_MAX {
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
        self.forwarded += 1;
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
mod tests;
