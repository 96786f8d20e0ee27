//! What of others' code is in what ships, as CycloneDX 1.6 JSON. From `cargo metadata` and the lock files; without a
//! time and a serial number, so that the same sources give the same bytes.

use crate::build::cargo;
use crate::repository;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A workspace, what of it ships, and what it is compiled for.
struct Shipped<'a> {
    folder: &'static str,
    target: &'static str,
    packages: Vec<&'a str>,
}

/// `policies`: those that are in the archive.
fn shipped<'a>(policies: &[&'a str]) -> [Shipped<'a>; 2] {
    [
        Shipped {
            folder: "",
            target: "x86_64-unknown-linux-gnu",
            packages: vec![
                "tally-core",
                "tallyctl",
                "tally-refresh",
                "tally-preload",
                "tally-shim",
            ],
        },
        Shipped { folder: "policies", target: crate::guest::TARGET, packages: policies.to_vec() },
    ]
}

/// A crate that ships: its component, and the references of what it depends on.
struct Crate {
    component: Value,
    needs: BTreeSet<String>,
}

/// All of it, with the `policies` that are in the archive, by their packages' names.
///
/// # Errors
/// If `cargo metadata` fails, a policy is no package of `policies/`, or a crate tells no licence or has no checksum.
pub fn make(policies: &[&str]) -> Result<Value> {
    let all_shipped = shipped(policies);
    let mut crates: BTreeMap<String, Crate> = BTreeMap::new();
    for shipped in &all_shipped {
        let folder = repository().join(shipped.folder);
        let checksums = checksums(&folder)?;
        let all = metadata(&folder, shipped.target)?;
        collect(&all, &shipped.packages, &compiled(shipped)?, &checksums, &mut crates)?;
    }
    let own = "tally";
    let version = env!("CARGO_PKG_VERSION");
    let mut dependencies: Vec<Value> = crates
        .iter()
        .map(|(reference, found)| json!({"ref": reference, "dependsOn": found.needs}))
        .collect();
    let roots: Vec<&String> = crates
        .iter()
        .filter(|(_, found)| {
            let name = found.component["name"].as_str().unwrap_or_default();
            all_shipped.iter().any(|shipped| shipped.packages.contains(&name))
        })
        .map(|(reference, _)| reference)
        .collect();
    dependencies.push(json!({"ref": own, "dependsOn": roots}));
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": own, "name": own, "version": version,
            "licenses": [{"expression": "Apache-2.0"}],
        }},
        "components": crates.values().map(|found| &found.component).collect::<Vec<_>>(),
        "dependencies": dependencies,
    }))
}

fn metadata(folder: &Path, target: &str) -> Result<Value> {
    let mut command = cargo();
    command.current_dir(folder);
    command.args(["metadata", "--locked", "--format-version=1", "--filter-platform", target]);
    let output = command.output().context("starting cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("reading cargo's metadata")
}

/// Name and version of every crate that Cargo compiles for what ships. `cargo metadata` knows them with the features
/// that the whole workspace and its tests need, which are a few crates more.
fn compiled(shipped: &Shipped<'_>) -> Result<BTreeSet<(String, String)>> {
    let mut tree = cargo();
    tree.current_dir(repository().join(shipped.folder));
    tree.args(["tree", "--locked", "--edges=normal", "--prefix=none", "--format={p}"]);
    tree.args(["--target", shipped.target]);
    tree.args(shipped.packages.iter().flat_map(|name| ["--package", name]));
    let output = tree.output().context("starting cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let crates = lines.lines().filter_map(|line| {
        let (name, rest) = line.split_once(" v")?;
        Some((name.to_owned(), rest.split(' ').next()?.to_owned()))
    });
    Ok(crates.collect())
}

/// SHA-256 of each crate's archive, by name and version.
fn checksums(folder: &Path) -> Result<BTreeMap<(String, String), String>> {
    let file: PathBuf = folder.join("Cargo.lock");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let lock: toml::Table = text.parse().with_context(|| file.display().to_string())?;
    let packages = lock.get("package").and_then(toml::Value::as_array).context("no packages")?;
    let word = |package: &toml::Value, key: &str| package.get(key)?.as_str().map(str::to_owned);
    let all = packages.iter().filter_map(|package| {
        let identity = (word(package, "name")?, word(package, "version")?);
        Some((identity, word(package, "checksum")?))
    });
    Ok(all.collect())
}

/// Adds what `packages` consist of.
fn collect(
    metadata: &Value,
    packages: &[&str],
    compiled: &BTreeSet<(String, String)>,
    checksums: &BTreeMap<(String, String), String>,
    crates: &mut BTreeMap<String, Crate>,
) -> Result<()> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let all: BTreeMap<String, Value> = list(&metadata["packages"])
        .into_iter()
        .map(|package| (package["id"].as_str().unwrap_or_default().to_owned(), package))
        .collect();
    let nodes: BTreeMap<String, Value> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| (node["id"].as_str().unwrap_or_default().to_owned(), node))
        .collect();
    let mut left: Vec<String> = Vec::new();
    for name in packages {
        let found = all.iter().find(|(_, p)| p["name"] == **name && p["source"].is_null());
        left.push(found.with_context(|| format!("no package {name}"))?.0.clone());
    }
    let mut seen = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        let package = all.get(&id).with_context(|| format!("no package {id}"))?;
        let mut needs = BTreeSet::new();
        for dependency in list(&nodes.get(&id).with_context(|| format!("no node {id}"))?["deps"]) {
            // What only tests and build scripts need does not ship.
            let ships = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            let Some(id) = dependency["pkg"].as_str().filter(|_| ships) else { continue };
            let other = all.get(id).with_context(|| format!("no package {id}"))?;
            if compiled.contains(&identity(other)) {
                needs.insert(reference(other));
                left.push(id.to_owned());
            }
        }
        let component = component(package, checksums)?;
        let known = crates.entry(reference(package));
        let known = known.or_insert(Crate { component, needs: BTreeSet::new() });
        known.needs.extend(needs);
    }
    Ok(())
}

fn identity(package: &Value) -> (String, String) {
    let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    (word("name"), word("version"))
}

/// The package URL, which names a crate here as well.
fn reference(package: &Value) -> String {
    let (name, version) = identity(package);
    format!("pkg:cargo/{name}@{version}")
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Result<Value> {
    let (name, version) = identity(package);
    let licence = package["license"].as_str();
    let licence = licence.with_context(|| format!("{name} {version} tells no licence"))?;
    let mut component = json!({
        "type": "library",
        "bom-ref": reference(package),
        "name": name,
        "version": version,
        // An old way to say the same.
        "licenses": [{"expression": licence.replace('/', " OR ").replace("  ", " ")}],
        "purl": reference(package),
    });
    if !package["source"].is_null() {
        let checksum = checksums.get(&(name.clone(), version.clone()));
        let checksum = checksum.with_context(|| format!("{name} {version} has no checksum"))?;
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    Ok(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Folders of `policies/` that `cargo xtask policies` makes components of.
    fn policies() -> Vec<String> {
        let folders = std::fs::read_dir(repository().join("policies")).unwrap();
        let is_component = |folder: &PathBuf| {
            let manifest = std::fs::read_to_string(folder.join("Cargo.toml"));
            manifest.is_ok_and(|manifest| manifest.contains("\"cdylib\""))
        };
        let folders = folders.map(|folder| folder.unwrap().path()).filter(is_component);
        folders.map(|folder| folder.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn policies_are_listed_if_they_ship_and_unknown_ones_are_refused() {
        // `tallyctl` has the other policies built in, so they are listed without their components.
        let has_fifo = |policies: &[&str]| {
            let sbom = make(policies).unwrap();
            sbom["components"].as_array().unwrap().iter().any(|listed| listed["name"] == "fifo")
        };
        assert!(has_fifo(&["fifo", "throughput"]) && !has_fifo(&["throughput"]));
        assert!(make(&["fifo", "of-nobody"]).is_err());
    }

    #[test]
    fn every_crate_that_ships_is_listed_once_with_licence_and_checksum() {
        let policies = policies();
        let policies: Vec<&str> = policies.iter().map(String::as_str).collect();
        assert!(policies.contains(&"tally-priority"), "{policies:?}");
        let is_own = |name: &str| name.starts_with("tally") || policies.contains(&name);
        let sbom = make(&policies).unwrap();
        let components = sbom["components"].as_array().unwrap();
        let mut listed = BTreeSet::new();
        let mut references = BTreeSet::from(["tally".to_owned()]);
        for component in components {
            let word = |key: &str| component[key].as_str().unwrap().to_owned();
            assert!(listed.insert((word("name"), word("version"))), "twice: {component}");
            assert_eq!(word("purl"), format!("pkg:cargo/{}@{}", word("name"), word("version")));
            references.insert(word("bom-ref"));
            let licence = component["licenses"][0]["expression"].as_str().unwrap();
            assert!(!licence.is_empty() && !licence.contains('/'), "{component}");
            let own = is_own(&word("name"));
            let hash = component["hashes"][0]["content"].as_str();
            assert!(own || hash.is_some_and(|hash| hash.len() == 64), "{component}");
        }
        let mut expected = BTreeSet::new();
        for shipped in &shipped(&policies) {
            let crates = compiled(shipped).unwrap();
            assert!(crates.len() > shipped.packages.len());
            let checksums = checksums(&repository().join(shipped.folder)).unwrap();
            for (name, version) in &crates {
                let is_own = is_own(name);
                let locked = checksums.contains_key(&(name.clone(), version.clone()));
                assert!(is_own || locked, "{name} {version} is in no lock file");
            }
            expected.extend(crates);
        }
        assert_eq!(listed, expected);
        for name in ["cranelift-codegen", "ed25519-dalek", "tally-shim", "tally-sdk", "wasmtime"] {
            assert!(listed.iter().any(|(listed, _)| listed == name), "{name} ships");
        }
        for not in ["criterion", "loom", "tally-softcuda", "tally-tests"] {
            assert!(!listed.iter().any(|(name, _)| name == not), "{not} does not ship");
        }
        for dependency in sbom["dependencies"].as_array().unwrap() {
            assert!(references.contains(dependency["ref"].as_str().unwrap()));
            for other in dependency["dependsOn"].as_array().unwrap() {
                assert!(references.contains(other.as_str().unwrap()), "{other}");
            }
        }
        assert_eq!(sbom["dependencies"].as_array().unwrap().len(), components.len() + 1);
    }
}
