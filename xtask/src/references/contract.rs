//! `docs/reference/contract.md`: the interfaces of `wit/policy.wit` with their types and functions.

use anyhow::{Context, Result};
use std::fmt::Write;
use tally_reference::{document, escaped, one_line, table};
use wit_parser::{
    Docs, Function, Interface, InterfaceId, Resolve, Type, TypeDefKind, TypeId, World, WorldItem,
};

pub fn reference(text: &str) -> Result<String> {
    let mut resolve = Resolve::default();
    let package = resolve.push_str("policy.wit", text)?;
    let package = &resolve.packages[package];
    let mut body = String::new();
    for (name, world) in &package.worlds {
        let world = &resolve.worlds[*world];
        write!(
            body,
            "## World `{name}`\n\n{}\n\n{}\n",
            paragraphs(&world.docs),
            items(&resolve, world)
        )?;
    }
    for (name, id) in &package.interfaces {
        write!(body, "## `{name}`\n\n")?;
        interface(&resolve, *id, &mut body).with_context(|| format!("interface {name}"))?;
    }
    let about = format!(
        "The package `{}`, as in [`policy.wit`](../../wit/policy.wit). The [guide](../policies.md) explains its use.",
        package.name
    );
    // Its headings stand below the document's.
    let docs = paragraphs(&package.docs).replace("\n# ", "\n## ");
    Ok(document("The contract", &about, &format!("{docs}\n\n{body}")))
}

/// Lines are kept: the text has tables and headings.
fn paragraphs(docs: &Docs) -> String {
    docs.contents.as_deref().map(escaped).unwrap_or_default().trim().into()
}

fn cell(docs: &Docs) -> String {
    one_line(&paragraphs(docs))
}

fn items(resolve: &Resolve, world: &World) -> String {
    let name = |item: &WorldItem| match item {
        WorldItem::Interface { id, .. } => resolve.interfaces[*id].name.clone(),
        _ => None,
    };
    let names = |items: Vec<&WorldItem>| {
        // `types` comes along with what uses it.
        let names = items.into_iter().filter_map(name).filter(|name| name != "types");
        names.map(|name| format!("[`{name}`](#{name})")).collect::<Vec<_>>().join(", ")
    };
    let imports = names(world.imports.values().collect());
    let exports = names(world.exports.values().collect());
    table(["may import", "exports"], [[imports, exports]])
}

fn interface(resolve: &Resolve, id: InterfaceId, out: &mut String) -> Result<()> {
    let Interface { docs, functions, types, .. } = &resolve.interfaces[id];
    let docs = paragraphs(docs);
    if !docs.is_empty() {
        write!(out, "{docs}\n\n")?;
    }
    if !functions.is_empty() {
        let rows = functions
            .values()
            .map(|function| [format!("`{}`", signature(resolve, function)), cell(&function.docs)]);
        writeln!(out, "{}", table(["function", "meaning"], rows))?;
    }
    for (name, id) in types {
        one_type(resolve, name, *id, out)?;
    }
    Ok(())
}

fn signature(resolve: &Resolve, function: &Function) -> String {
    let params = function.params.iter();
    let params = params.map(|param| format!("{}: {}", param.name, named(resolve, &param.ty)));
    let params = params.collect::<Vec<_>>().join(", ");
    let result = function.result.as_ref().map(|of| format!(" -> {}", named(resolve, of)));
    format!("{}({params}){}", function.name, result.unwrap_or_default())
}

fn one_type(resolve: &Resolve, name: &str, id: TypeId, out: &mut String) -> Result<()> {
    let of = &resolve.types[id];
    let about = paragraphs(&of.docs);
    let code = |name: &str| format!("`{name}`");
    let made = match &of.kind {
        // One of another interface, by `use`.
        TypeDefKind::Type(Type::Id(_)) => return Ok(()),
        TypeDefKind::Record(record) => table(
            ["field", "type", "meaning"],
            record.fields.iter().map(|field| {
                [code(&field.name), code(&named(resolve, &field.ty)), cell(&field.docs)]
            }),
        ),
        TypeDefKind::Variant(variant) => table(
            ["case", "holds", "meaning"],
            variant.cases.iter().map(|case| {
                let holds = case.ty.as_ref().map(|ty| code(&named(resolve, ty)));
                [code(&case.name), holds.unwrap_or_default(), cell(&case.docs)]
            }),
        ),
        TypeDefKind::Enum(all) => table(
            ["case", "meaning"],
            all.cases.iter().map(|case| [code(&case.name), cell(&case.docs)]),
        ),
        TypeDefKind::Flags(all) => table(
            ["flag", "meaning"],
            all.flags.iter().map(|flag| [code(&flag.name), cell(&flag.docs)]),
        ),
        TypeDefKind::Type(ty) => format!("A {}.\n", code(&named(resolve, ty))),
        _ => String::new(),
    };
    write!(out, "### {} `{name}`\n\n", of.kind.as_str())?;
    if !about.is_empty() {
        write!(out, "{about}\n\n")?;
    }
    Ok(writeln!(out, "{made}")?)
}

/// A type as the contract writes it.
fn named(resolve: &Resolve, ty: &Type) -> String {
    let plain = match ty {
        Type::Bool => "bool",
        Type::U8 => "u8",
        Type::U16 => "u16",
        Type::U32 => "u32",
        Type::U64 => "u64",
        Type::S8 => "s8",
        Type::S16 => "s16",
        Type::S32 => "s32",
        Type::S64 => "s64",
        Type::F32 => "f32",
        Type::F64 => "f64",
        Type::Char => "char",
        Type::String => "string",
        Type::ErrorContext => "error-context",
        Type::Id(id) => return named_id(resolve, *id),
    };
    plain.into()
}

fn named_id(resolve: &Resolve, id: TypeId) -> String {
    let of = &resolve.types[id];
    if let Some(name) = &of.name {
        return name.clone();
    }
    let side = |ty: &Option<Type>| ty.as_ref().map_or("_".into(), |ty| named(resolve, ty));
    match &of.kind {
        TypeDefKind::List(ty) => format!("list<{}>", named(resolve, ty)),
        TypeDefKind::Option(ty) => format!("option<{}>", named(resolve, ty)),
        TypeDefKind::Result(of) => format!("result<{}, {}>", side(&of.ok), side(&of.err)),
        TypeDefKind::Tuple(all) => {
            let all: Vec<_> = all.types.iter().map(|ty| named(resolve, ty)).collect();
            format!("tuple<{}>", all.join(", "))
        }
        other => other.as_str().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_functions_and_types_are_there_with_their_docs() {
        let text = reference(tally_contract::TEXT).unwrap();
        for part in [
            "\n## Units and constants\n",
            "\n## World `policy`\n",
            "\n## `scheduler`\n\nDecisions. Every policy exports this.\n",
            "| `decide(launch: launch) -> answer` | Decide one launch. ",
            "| `init(config: string) -> result<_, string>` | ",
            "\n### record `launch`\n\nOne launch to decide.",
            "| `kernel` | `kernel-id` | NO-KERNEL if ",
            "\n### variant `decision`\n",
            "| `hold` | `u64` | Not now, ",
            "| `labels` | `list<tuple<string, string>>` | ",
            "\n### type `client-id`\n\nA connected program.\n\nA `u32`.\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        // A `use` of a type is not the type again.
        assert_eq!(text.matches("### type `client-id`").count(), 1);
    }
}
