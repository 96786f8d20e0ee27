//! The fuzz targets of the daemon over their committed corpora, without a fuzzer.

#[path = "../../../tests/fuzz/bodies/admin.rs"]
mod admin;
#[path = "../../../tests/fuzz/bodies/config.rs"]
mod config;
#[path = "../../../tests/fuzz/bodies/dispatch.rs"]
mod dispatch;
#[path = "../../../tests/fuzz/bodies/peer.rs"]
mod peer;
#[path = "../../../tests/fuzz/bodies/profiles.rs"]
mod profiles;
#[path = "../../../tests/fuzz/bodies/registration.rs"]
mod registration;

fn all(target: &str, body: fn(&[u8])) {
    let folder = format!("{}/../../tests/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut inputs = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        body(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 1, "{inputs} inputs in {folder}");
}

#[test]
fn the_committed_corpora_pass() {
    all("admin", admin::admin);
    all("config", config::config);
    all("dispatch", dispatch::dispatch);
    all("profiles", profiles::profiles);
    all("registration", registration::registration);
}
