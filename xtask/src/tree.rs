//! Tests of the tree's shape: no large import cycles in the code that lives in programs, and no package below `core`
//! that depends on a policy.
//!
//! A module is a source file. Its imports are the paths in it that begin with `crate`, `super`, `self`, a child's name
//! or an imported name; what is for tests only does not count. The crate's root is a module, too.

mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Modules that may import one another in a circle.
const CYCLE_MAX: usize = 5;
/// Crates that are looked at.
const CRATES: [&str; 2] = ["core/shim", "core/preempt"];
/// Policies, and what is one compiled natively.
const POLICIES: [&str; 2] = ["policies", "tools/native-policy"];
/// Name of a crate's root among its modules.
const ROOT: &str = "lib";

/// Modules, and those that each imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The text without comments, and with string and character literals emptied.
fn without_literals(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let (mut plain, mut i) = (String::new(), 0);
    while i < chars.len() {
        match (at(i), at(i + 1)) {
            ('/', '/') => i += chars[i..].iter().take_while(|c| **c != '\n').count(),
            ('/', '*') => {
                let (mut depth, mut end) = (1, i + 2);
                while depth > 0 && end < chars.len() {
                    match (at(end), at(end + 1)) {
                        ('/', '*') => (depth, end) = (depth + 1, end + 2),
                        ('*', '/') => (depth, end) = (depth - 1, end + 2),
                        _ => end += 1,
                    }
                }
                i = end;
            }
            ('r', '"' | '#') if !plain.ends_with(|c: char| c.is_alphanumeric() || c == '_') => {
                let hashes = chars[i + 1..].iter().take_while(|c| **c == '#').count();
                if at(i + 1 + hashes) != '"' {
                    plain.push('r');
                    i += 1;
                    continue;
                }
                let closing: Vec<char> =
                    std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
                let from = i + 2 + hashes;
                let end = chars[from.min(chars.len())..]
                    .windows(closing.len())
                    .position(|window| window == closing);
                i = end.map_or(chars.len(), |end| from + end + closing.len());
                plain.push_str("\"\"");
            }
            ('"', _) => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                i += 1;
                plain.push_str("\"\"");
            }
            // A lifetime has no quote behind it.
            ('\'', '\\') => {
                i += 3;
                i += chars[i.min(chars.len())..].iter().take_while(|c| **c != '\'').count() + 1;
                plain.push_str("''");
            }
            ('\'', _) if at(i + 2) == '\'' => {
                i += 3;
                plain.push_str("''");
            }
            (other, _) => {
                plain.push(other);
                i += 1;
            }
        }
    }
    plain
}

/// Identifiers, `::`, and other characters by themselves.
fn tokens(text: &str) -> Vec<String> {
    let plain = without_literals(text);
    let mut all = Vec::new();
    let mut rest = plain.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let length = match rest.find(|c| !is_word(c)).unwrap_or(rest.len()) {
            0 if rest.starts_with("::") => 2,
            0 => first.len_utf8(),
            length => length,
        };
        all.push(rest[..length].to_owned());
        rest = rest[length..].trim_start();
    }
    without_tests(&all)
}

/// Without the items that are compiled for tests only.
fn without_tests(tokens: &[String]) -> Vec<String> {
    const CFG_TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut i) = (Vec::new(), 0);
    while i < tokens.len() {
        if !tokens[i..].iter().map(String::as_str).take(7).eq(CFG_TEST) {
            kept.push(tokens[i].clone());
            i += 1;
            continue;
        }
        i += CFG_TEST.len();
        let mut depth = 0;
        while let Some(token) = tokens.get(i) {
            i += 1;
            match token.as_str() {
                "{" => depth += 1,
                "}" if depth <= 1 => break,
                "}" => depth -= 1,
                ";" if depth == 0 => break,
                _ => {}
            }
        }
    }
    kept
}

/// Reads the path, or the tree of paths, that begins at `at` with the segments `before`. Gives each as its segments
/// and the name that it gets. Returns where it ends.
fn paths(
    tokens: &[String],
    mut at: usize,
    mut before: Vec<String>,
    all: &mut Vec<(Vec<String>, String)>,
) -> usize {
    loop {
        match tokens.get(at).map(String::as_str) {
            Some("{") => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    let start = at;
                    at = paths(tokens, at, before.clone(), all);
                    if tokens.get(at).is_some_and(|token| token == ",") || at == start {
                        at += 1;
                    }
                }
                return at + 1;
            }
            Some(word) if word.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                // In a tree it stands for what the tree is of.
                if word != "self" || before.is_empty() {
                    before.push(word.to_owned());
                }
                at += 1;
            }
            _ => {}
        }
        if tokens.get(at).is_some_and(|token| token == "::") {
            at += 1;
            continue;
        }
        let mut name = before.last().cloned().unwrap_or_default();
        if tokens.get(at).is_some_and(|token| token == "as") {
            name = tokens.get(at + 1).cloned().unwrap_or_default();
            at += 2;
        }
        all.push((before, name));
        return at;
    }
}

/// Where a path leads, from the crate's root. `None`: into another crate, or to what is not known.
fn absolute(module: &[String], path: &[String]) -> Option<Vec<String>> {
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([module, &path[1..]].concat()),
        "super" => {
            let ups = path.iter().take_while(|segment| *segment == "super").count();
            let kept = module.len().checked_sub(ups)?;
            Some([&module[..kept], &path[ups..]].concat())
        }
        _ => None,
    }
}

/// The paths within its crate that a module names.
fn named(module: &[String], tokens: &[String]) -> Vec<Vec<String>> {
    let is_word = |token: &str| token.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut aliases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // Children are in reach by their names.
    for window in tokens.windows(3) {
        if window[0] == "mod" && window[2] == ";" {
            aliases.insert(window[1].clone(), [module, &window[1..2]].concat());
        }
    }
    let lead = |path: &[String], aliases: &BTreeMap<String, Vec<String>>| {
        absolute(module, path).or_else(|| {
            aliases.get(path.first()?).map(|there| [there.as_slice(), &path[1..]].concat())
        })
    };
    let mut found = Vec::new();
    for is_use in [true, false] {
        let mut at = 0;
        while at < tokens.len() {
            let starts = match is_use {
                true => tokens[at] == "use",
                false => {
                    is_word(&tokens[at])
                        && (at == 0 || !["::", "."].contains(&tokens[at - 1].as_str()))
                        && tokens.get(at + 1).is_some_and(|next| next == "::")
                }
            };
            if !starts {
                at += 1;
                continue;
            }
            let mut all = Vec::new();
            let end = paths(tokens, at + usize::from(is_use), Vec::new(), &mut all);
            for (path, name) in all {
                let Some(there) = lead(&path, &aliases) else { continue };
                if is_use {
                    aliases.insert(name, there.clone());
                }
                found.push(there);
            }
            at = end.max(at + 1);
        }
    }
    found
}

/// What each module imports, by the sources of a crate: paths below its `src`, and texts.
fn imports(sources: &BTreeMap<PathBuf, String>) -> Imports {
    let mut modules: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    for (path, text) in sources {
        let mut segments: Vec<String> = path
            .with_extension("")
            .components()
            .map(|part| part.as_os_str().to_string_lossy().into_owned())
            .collect();
        if segments.last().is_some_and(|last| last == "tests") {
            continue;
        }
        if segments == [ROOT] || segments.last().is_some_and(|last| last == "mod") {
            segments.pop();
        }
        modules.insert(segments, tokens(text));
    }
    let name = |segments: &[String]| {
        if segments.is_empty() { ROOT.to_owned() } else { segments.join("::") }
    };
    let of = |(module, tokens): (&Vec<String>, &Vec<String>)| {
        let owner = |path: Vec<String>| {
            let prefixes = (0..=path.len()).rev().map(|length| &path[..length]);
            prefixes.into_iter().find(|prefix| modules.contains_key(*prefix)).map(name)
        };
        let mut all: BTreeSet<String> =
            named(module, tokens).into_iter().filter_map(owner).collect();
        all.remove(&name(module));
        (name(module), all)
    };
    modules.iter().map(of).collect()
}

/// Modules that import one another in a circle, each circle once.
fn cycles(imports: &Imports) -> Vec<BTreeSet<&str>> {
    let reached = |from: &str| {
        let (mut reached, mut left) = (BTreeSet::new(), vec![from]);
        while let Some(module) = left.pop() {
            for next in imports.get(module).into_iter().flatten() {
                if reached.insert(next.as_str()) {
                    left.push(next);
                }
            }
        }
        reached
    };
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|module| (module.as_str(), reached(module))).collect();
    let circle = |module: &str| -> BTreeSet<&str> {
        reach[module].iter().copied().filter(|other| reach[other].contains(module)).collect()
    };
    let all: BTreeSet<_> = reach.keys().map(|module| circle(module)).collect();
    all.into_iter().filter(|circle| circle.len() > 1).collect()
}

/// Circles of more than [`CYCLE_MAX`] modules.
fn large_cycles(imports: &Imports) -> Vec<String> {
    let all = cycles(imports).into_iter().filter(|circle| circle.len() > CYCLE_MAX);
    all.map(|circle| circle.into_iter().collect::<Vec<_>>().join(", ")).collect()
}

/// Sources below a folder, by their paths there.
fn sources(folder: &Path) -> BTreeMap<PathBuf, String> {
    let (mut all, mut left) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(&next).unwrap_or_else(|e| panic!("{}: {e}", next.display()))
        {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                all.insert(path.strip_prefix(folder).unwrap().to_owned(), text);
            }
        }
    }
    all
}

/// The folders, below the workspace's, of the packages that a manifest names. `workspace`: the packages that the
/// workspace gives names to.
fn dependencies(
    folder: &Path,
    manifest: &toml::Table,
    workspace: &BTreeMap<String, PathBuf>,
    with_tests: bool,
) -> Vec<PathBuf> {
    let kinds = ["dependencies", "build-dependencies", "dev-dependencies"];
    let kinds = &kinds[..if with_tests { 3 } else { 2 }];
    let tables = |table: &toml::Table| -> Vec<toml::Table> {
        kinds.iter().filter_map(|kind| table.get(*kind)?.as_table().cloned()).collect()
    };
    let mut all = tables(manifest);
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    for target in targets.into_iter().flat_map(toml::Table::values) {
        all.extend(target.as_table().into_iter().flat_map(tables));
    }
    let of_one = |(name, value): (String, toml::Value)| match value.get("path") {
        Some(path) => {
            let mut there = folder.to_owned();
            for part in Path::new(path.as_str()?).components() {
                match part.as_os_str().to_str()? {
                    ".." => drop(there.pop()),
                    part => there.push(part),
                }
            }
            Some(there)
        }
        None => value.get("workspace").and_then(|_| workspace.get(&name).cloned()),
    };
    all.into_iter().flatten().filter_map(of_one).collect()
}

/// Packages below `core` that depend on a policy, and on which, by the manifests of all packages by their folders.
fn depend_on_policies(manifests: &BTreeMap<PathBuf, toml::Table>) -> Vec<String> {
    let named = manifests.get(Path::new("")).and_then(|root| {
        let all = root.get("workspace")?.get("dependencies")?.as_table()?;
        let with_path = |(name, value): (&String, &toml::Value)| {
            Some((name.clone(), PathBuf::from(value.get("path")?.as_str()?)))
        };
        Some(all.iter().filter_map(with_path).collect::<BTreeMap<_, _>>())
    });
    let named = named.unwrap_or_default();
    let mut found = Vec::new();
    for package in manifests.keys().filter(|folder| folder.starts_with("core")) {
        let (mut seen, mut left) = (BTreeSet::new(), vec![package.clone()]);
        while let Some(folder) = left.pop() {
            let Some(manifest) = manifests.get(&folder) else { continue };
            for next in dependencies(&folder, manifest, &named, folder == *package) {
                if seen.insert(next.clone()) {
                    left.push(next);
                }
            }
        }
        let is_policy = |folder: &&PathBuf| POLICIES.iter().any(|of| folder.starts_with(of));
        let policies = seen.iter().filter(is_policy);
        found.extend(policies.map(|policy| format!("{}: {}", package.display(), policy.display())));
    }
    found
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Manifests of all packages of the workspace.
fn manifests() -> BTreeMap<PathBuf, toml::Table> {
    let read = |folder: &Path| {
        let path = repository().join(folder).join("Cargo.toml");
        let text = std::fs::read_to_string(&path);
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        toml::from_str::<toml::Table>(&text).unwrap()
    };
    let root = read(Path::new(""));
    let members = root["workspace"]["members"].as_array().unwrap().iter();
    let members: Vec<PathBuf> = members.map(|member| member.as_str().unwrap().into()).collect();
    let all = members.into_iter().map(|member| (member.clone(), read(&member)));
    all.chain([(PathBuf::new(), root)]).collect()
}

fn imports_of(sources: &[(&str, &str)]) -> Imports {
    imports(&sources.iter().map(|(path, text)| (path.into(), (*text).to_owned())).collect())
}

#[test]
fn no_crate_in_programs_has_a_large_import_cycle() {
    for of in CRATES {
        let sources = sources(&repository().join(of).join("src"));
        let imports = imports(&sources);
        assert!(imports.len() > 10, "{of}: {} modules", imports.len());
        let found = large_cycles(&imports);
        assert!(
            found.is_empty(),
            "{of}: more than {CYCLE_MAX} modules import one another: {found:#?}"
        );
    }
}

#[test]
fn every_way_to_name_a_module_is_an_import() {
    let all = imports_of(&[
        ("lib.rs", "pub mod a; pub mod b; pub mod c; pub mod d; pub mod e; pub mod f;"),
        ("a.rs", "use crate::{b::{self, B as Other}, c};\nfn f() { c::below::g(); d!(); }"),
        ("b.rs", "//! crate::e\nfn f() -> &'static str { crate::d::g('\"'); \"crate::e::f\" }"),
        ("c.rs", "mod below;\nfn f() { below::g(); super::e::g() }"),
        ("c/below.rs", "use super::Type; use super::super::f::*; /* use crate::a; */"),
        ("d.rs", "fn g() { crate::Item::new(); std::f::g(); x.f::<u8>() }"),
        ("e.rs", "#[cfg(test)]\nmod tests { use crate::a; fn f() { {} } }\nuse crate::f as g;"),
        ("f.rs", "fn f() { let a = r#\"use crate::a;\"#; g::h() }\n#[cfg(test)]\nuse crate::a;"),
        ("f/tests.rs", "use crate::a;"),
    ]);
    let of = |module: &str| all[module].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(of("a"), ["b", "c", "c::below"]);
    assert_eq!(of("b"), ["d"]);
    assert_eq!(of("c"), ["c::below", "e"]);
    assert_eq!(of("c::below"), ["c", "f"]);
    assert_eq!(of("d"), [ROOT]);
    assert_eq!(of("e"), ["f"]);
    assert!(of("f").is_empty() && of(ROOT).is_empty());
    assert_eq!(all.len(), 8);
}

#[test]
fn a_planted_cycle_of_six_modules_is_found_and_one_of_five_is_allowed() {
    let ring = |length: usize| {
        let module = |i: usize| {
            let text = format!("use crate::m{}::T;", (i + 1) % length);
            (PathBuf::from(format!("m{i}.rs")), text)
        };
        // Beside it one that nobody imports.
        let other = (PathBuf::from("other.rs"), "use crate::m0;".to_owned());
        large_cycles(&imports(&(0..length).map(module).chain([other]).collect()))
    };
    assert_eq!(ring(6), ["m0, m1, m2, m3, m4, m5"]);
    assert!(ring(5).is_empty());
    // Two circles that share a module are one.
    let both = imports_of(&[
        ("a.rs", "use crate::b;"),
        ("b.rs", "use crate::c;"),
        ("c.rs", "use crate::a; use crate::d;"),
        ("d.rs", "use crate::e;"),
        ("e.rs", "use crate::f;"),
        ("f.rs", "use crate::c;"),
    ]);
    assert_eq!(large_cycles(&both).len(), 1);
}

#[test]
fn no_package_below_core_depends_on_a_policy() {
    let all = manifests();
    assert!(all.keys().filter(|folder| folder.starts_with("core")).count() > 5);
    let found = depend_on_policies(&all);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_planted_dependency_on_a_policy_is_found() {
    let with = |folder: &str, more: &str| {
        let mut all = manifests();
        let manifest = all.get_mut(Path::new(folder)).unwrap();
        manifest.extend(toml::from_str::<toml::Table>(more).unwrap());
        depend_on_policies(&all)
    };
    let native = "tally-native-policy.workspace = true";
    for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let found = with("core/engine", &format!("[{kind}]\n{native}"));
        assert!(
            found.contains(&"core/engine: tools/native-policy".to_owned()),
            "{kind}: {found:?}"
        );
    }
    let direct = with("core/ipc", "[dependencies]\nfifo = { path = \"../../policies/fifo\" }");
    assert!(direct.contains(&"core/ipc: policies/fifo".to_owned()), "{direct:?}");
    // The daemon has tools of its own among its dependencies.
    let behind = with("tools/ab", &format!("[dependencies]\n{native}"));
    assert!(behind.contains(&"core/daemon: tools/native-policy".to_owned()), "{behind:?}");
    let target = format!("[target.'cfg(unix)'.dependencies]\n{native}");
    assert!(!with("core/engine", &target).is_empty());
}
