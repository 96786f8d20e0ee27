//! Trust in policies: a policy that nobody vouches for, and one that imports what it was not granted, are
//! refused by name, and the active policy stays.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

/// Exit code of a core whose policy cannot be loaded.
const EXIT_POLICY: i32 = 3;
/// Exit code of a core whose configuration makes no sense.
const EXIT_USAGE: i32 = 2;

/// A scene with two keys, of which the core will trust the first.
struct Desk {
    scene: Scene,
    config: String,
}

impl Desk {
    fn new() -> Result<Self> {
        let artefacts = Artefacts::locate()?;
        let scene = Scene::new(&artefacts, Device::software())?;
        for key in ["ours", "theirs"] {
            let out = scene.dir().join(key);
            let made = scene.ctl(&["policy", "keygen", "--out", &out.to_string_lossy()])?;
            ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        }
        let config = scene.dir().join("core.toml");
        let key = scene.dir().join("ours.pub");
        std::fs::write(
            &config,
            format!("[policy.trust]\nkeys = [{key:?}]\nrequire_signature = true\n"),
        )?;
        Ok(Desk { config: config.to_string_lossy().into_owned(), scene })
    }

    /// A copy of a shipped policy under another name, signed with one of the keys or not.
    fn policy(&self, of: &str, name: &str, key: Option<&str>) -> Result<PathBuf> {
        let file = self.scene.dir().join(name);
        std::fs::copy(self.scene.artefacts().policy(of)?, &file)?;
        if let Some(key) = key {
            self.sign(&file, key)?;
        }
        Ok(file)
    }

    fn sign(&self, file: &Path, key: &str) -> Result<()> {
        let key = self.scene.dir().join(key);
        let (file, key) = (file.to_string_lossy(), key.to_string_lossy());
        let signed = self.scene.ctl(&["policy", "sign", &file, "--key", &key])?;
        ensure!(signed.status.success(), "{}", String::from_utf8_lossy(&signed.stderr));
        Ok(())
    }

    /// The id of a key, as its signatures give it.
    fn id(&self, key: &str) -> Result<String> {
        let file = self.policy("fifo", &format!("{key}-id.wasm"), Some(key))?;
        let text = std::fs::read_to_string(file.with_extension("wasm.sig"))?;
        let id = text.lines().find_map(|line| line.strip_prefix("key "));
        id.map(str::to_owned).context("a signature names no key")
    }

    /// Loading it fails with a message that has these parts, status shows the same, and
    /// what is active stays and serves.
    fn refused(&self, file: &Path, parts: &[&str]) -> Result<()> {
        let before = self.scene.status()?;
        let load = self.scene.ctl(&["policy", "load", &file.to_string_lossy()])?;
        ensure!(!load.status.success(), "{} was loaded", file.display());
        let said = String::from_utf8_lossy(&load.stderr).into_owned();
        let after = self.scene.status()?;
        let shown = after.load_failure().context("no refusal in the status")?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        for part in parts.iter().chain(&[&*name]) {
            ensure!(said.contains(part), "{part:?} is not in: {said}");
            ensure!(shown.contains(part), "{part:?} is not in the status: {shown}");
        }
        ensure!(after.policy_digest() == before.policy_digest(), "{:#}", after.0["policy"]);
        ensure!(after.generation() == before.generation(), "{:#}", after.0["policy"]);
        Ok(())
    }
}

#[test]
fn only_what_a_trusted_key_signed_is_loaded_and_the_rest_is_refused_by_name() -> Result<()> {
    let desk = Desk::new()?;
    let (ours, theirs) = (desk.id("ours")?, desk.id("theirs")?);
    let first = desk.policy("fifo", "first.wasm", Some("ours"))?;
    let mut core = desk.scene.core(&first, &["--config", &desk.config])?;
    ensure!(desk.scene.status()?.0["policy"]["signed_by"] == *ours);
    let mut probe = Probe::start(&desk.scene, Class::BestEffort, "probe")?;

    let strange = desk.policy("tally-priority", "strange.wasm", Some("theirs"))?;
    desk.refused(&strange, &["signed with the key", &theirs, &ours])?;
    let unsigned = desk.policy("tally-priority", "unsigned.wasm", None)?;
    desk.refused(&unsigned, &["is not signed", "tallyctl policy sign"])?;
    let signed = desk.policy("tally-priority", "signed.wasm", Some("ours"))?;
    let whole = std::fs::read(&signed)?;
    std::fs::write(&signed, &whole[..whole.len() / 2])?;
    desk.refused(&signed, &["changed or cut off", &ours])?;
    std::fs::write(&signed, &whole)?;
    let signature = signed.with_extension("wasm.sig");
    let good = std::fs::read(&signature)?;
    let mut bad = good.clone();
    bad[5] ^= 1;
    std::fs::write(&signature, bad)?;
    desk.refused(&signed, &["signed.wasm.sig cannot be read", "line 1"])?;
    std::fs::copy(first.with_extension("wasm.sig"), &signature)?;
    desk.refused(&signed, &["belongs to another one", &ours])?;
    probe.ask("launch 10")?;
    probe.check()?;

    std::fs::write(&signature, good)?;
    let load = desk.scene.ctl(&["policy", "load", &signed.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    let status = desk.scene.status()?;
    ensure!(status.policy_name() == "signed" && status.load_failure().is_none());
    ensure!(status.0["policy"]["signed_by"] == *ours, "{:#}", status.0["policy"]);
    let history = ask(&desk.scene, &json!({"cmd": "policy_history"}))?;
    let signers = history["ok"].as_array().context("no history")?;
    ensure!(signers.len() == 2 && signers.iter().all(|one| one["signed_by"] == *ours), "{history}");
    probe.ask("launch 10")?;
    probe.check()?;
    probe.quit()?;
    desk.scene.stop(&mut core, JOB_MAX)
}

/// What comes by the file being replaced is checked as what comes by asking.
#[test]
fn a_file_replaced_under_a_running_core_is_checked_too() -> Result<()> {
    let desk = Desk::new()?;
    let file = desk.policy("fifo", "policy.wasm", Some("ours"))?;
    let mut core = desk.scene.core(&file, &["--config", &desk.config])?;
    let digest = desk.scene.status()?.policy_digest();
    // Another file, beside the signature of the first one.
    std::fs::copy(desk.scene.artefacts().policy("tally-priority")?, &file)?;
    let refusal = wait_until("waiting for the refusal", ANSWER_MAX, || {
        Ok(desk.scene.status()?.load_failure())
    })?;
    ensure!(refusal.contains("changed or cut off"), "{refusal}");
    ensure!(desk.scene.status()?.policy_digest() == digest);
    // Its signature alone changes now, and that is noticed.
    desk.sign(&file, "ours")?;
    wait_until("waiting for the signed one", ANSWER_MAX, || {
        Ok((desk.scene.status()?.policy_digest() != digest).then_some(()))
    })?;
    ensure!(desk.scene.status()?.load_failure().is_none());
    desk.scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_core_does_not_start_with_a_strangers_policy_nor_with_keys_it_cannot_read() -> Result<()> {
    let desk = Desk::new()?;
    let strange = desk.policy("fifo", "strange.wasm", Some("theirs"))?;
    let mut core = desk.scene.core_unready(&strange, &["--config", &desk.config])?;
    let status = core.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(EXIT_POLICY), "{status}\n{}", core.quote());
    ensure!(core.stderr()?.contains("strange.wasm"), "{}", core.quote());
    std::fs::remove_file(desk.scene.dir().join("ours.pub"))?;
    let mut core = desk.scene.core_unready(&strange, &["--config", &desk.config])?;
    let status = core.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(EXIT_USAGE), "{status}\n{}", core.quote());
    ensure!(core.stderr()?.contains("policy.trust.keys"), "{}", core.quote());
    Ok(())
}

/// One request on the admin socket, and its answer.
fn ask(scene: &Scene, request: &Value) -> Result<Value> {
    let stream = UnixStream::connect(scene.admin_socket())?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    tally_harness::admin::send(&stream, request)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}

/// Whoever may ask for a load may choose among what is trusted, and no more: no request
/// turns the check off, gives a file another signature's trust or gives the file another name.
#[test]
fn the_admin_socket_is_no_way_around() -> Result<()> {
    let desk = Desk::new()?;
    let first = desk.policy("fifo", "first.wasm", Some("ours"))?;
    let mut core = desk.scene.core(&first, &["--config", &desk.config])?;
    let strange = desk.policy("tally-priority", "strange.wasm", Some("theirs"))?;
    let posing = desk.scene.dir().join("posing.wasm");
    std::os::unix::fs::symlink(&strange, &posing)?;
    std::fs::copy(first.with_extension("wasm.sig"), posing.with_extension("wasm.sig"))?;
    let up = desk.scene.dir().join("./../").join(desk.scene.dir().file_name().context("name")?);
    let load = |path: &Path| json!({"cmd": "policy_load", "path": path});
    for (request, code) in [
        (load(&strange), "policy_refused"),
        (load(&posing), "policy_refused"),
        (load(&up.join("strange.wasm")), "policy_refused"),
        (json!({"cmd": "policy_load", "path": strange, "trust": false}), "bad_request"),
        (json!({"cmd": "policy_load", "path": strange, "require_signature": false}), "bad_request"),
        (
            json!({"cmd": "policy_load", "path": strange, "signature": first.with_extension("wasm.sig")}),
            "bad_request",
        ),
        (
            json!({"cmd": "policy_load", "path": strange, "capabilities": ["high-priority"]}),
            "bad_request",
        ),
        // A configuration is text for the policy and nothing else.
        (json!({"cmd": "policy_load", "path": strange, "config": desk.config}), "policy_refused"),
    ] {
        let answer = ask(&desk.scene, &request)?;
        ensure!(answer["error"]["code"] == code, "{request}: {answer}");
    }
    let status = desk.scene.status()?;
    ensure!(status.policy_name() == "first" && status.generation() == 1, "{:#}", status.0);
    desk.scene.stop(&mut core, JOB_MAX)
}

/// Has a core of this configuration, under `fifo`, load `nosy`, which imports every capability; what came of it, and
/// what status says then.
fn load_nosy(configuration: &str) -> Result<(Output, Value)> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, configuration)?;
    let config = config.to_string_lossy().into_owned();
    let mut core = scene.core(&artefacts.policy("fifo")?, &["--config", &config])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    let nosy = artefacts.test_policy("nosy")?;
    let load = scene.ctl(&["policy", "load", &nosy.to_string_lossy()])?;
    for _ in 0..3 {
        probe.ask("launch 1 10 1")?;
        probe.ask("sync")?;
    }
    probe.check()?;
    let status = scene.status()?.0["policy"].clone();
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok((load, status))
}

#[test]
fn a_policy_that_imports_what_was_not_granted_is_refused_and_told_what_to_grant() -> Result<()> {
    for granted in ["", "[policy]\ncapabilities = [\"identity\", \"kernel-identity\"]\n"] {
        let (load, policy) = load_nosy(granted)?;
        let error = String::from_utf8_lossy(&load.stderr);
        ensure!(!load.status.success(), "{granted}: loaded");
        for part in ["nosy.wasm", "high-priority", "capabilities = [", "[policy]"] {
            ensure!(error.contains(part), "{part:?} is not in: {error}");
        }
        ensure!(policy["name"] == "fifo" && policy["generation"] == 1, "{policy:#}");
        ensure!(
            policy["load_failures"] == 1 && policy["decides"].as_u64() >= Some(3),
            "{policy:#}"
        );
    }
    Ok(())
}

#[test]
fn a_policy_gets_what_was_granted() -> Result<()> {
    let all = json!(["identity", "kernel-identity", "high-priority"]);
    let (load, policy) = load_nosy(&format!("[policy]\ncapabilities = {all}\n"))?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    ensure!(policy["name"] == "nosy" && policy["built_in_rule_decisions"] == 0, "{policy:#}");
    ensure!(policy["granted"] == all && policy["needs"] == all, "{policy:#}");
    let faults = policy["faults"].as_object().context("no faults")?;
    ensure!(faults.values().all(|count| count == 0), "{policy:#}");
    ensure!(policy["decides"].as_u64() >= Some(3), "{policy:#}");
    Ok(())
}
