//! The fuzz targets of the daemon over their committed corpora, without a fuzzer.

#[path = "../../../tests/fuzz/bodies/admin.rs"]
mod admin;
#[path = "../../../tests/fuzz/bodies/config.rs"]
mod config;
#[path = "../../../tests/fuzz/bodies/dispatch.rs"]
mod dispatch;
#[path = "../../../tests/fuzz/bodies/hostile.rs"]
mod hostile;
#[path = "../../../tests/fuzz/bodies/marks.rs"]
mod marks;
#[path = "../../../tests/fuzz/bodies/peer.rs"]
mod peer;
#[path = "../../../tests/fuzz/bodies/profiles.rs"]
mod profiles;
#[path = "../../../tests/fuzz/bodies/registration.rs"]
mod registration;
#[path = "../../../tests/fuzz/bodies/scripted.rs"]
mod scripted;

fn all(target: &str, body: fn(&[u8])) {
    let folder = format!("{}/../../tests/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut inputs = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        body(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 1, "{inputs} inputs in {folder}");
}

/// In a process of its own: the targets count its descriptors, and other tests open and close theirs meanwhile.
#[test]
fn the_committed_corpora_pass() {
    const NAME: &str = "fuzz_corpus::the_committed_corpora_pass";
    const ALONE: &str = "TALLY_FUZZ_CORPUS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let out = alone.args(["--exact", NAME, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        let why = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("1 passed"), "{said}{why}");
        return;
    }
    all("admin", admin::admin);
    all("config", config::config);
    all("dispatch", dispatch::dispatch);
    all("marks", marks::marks);
    all("profiles", profiles::profiles);
    all("registration", registration::registration);
}
