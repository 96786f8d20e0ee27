//! Only what is trusted is loaded, and nothing looks into the rest.

mod common;

use common::{bare_host, guest, limits};
use std::path::PathBuf;
use tally_trust::{Digest, SecretKey, signature_file};
use tally_wasm_host::{LoadError, PolicyHost, Trust, TrustError, TrustSettings};

struct Desk {
    _dir: tempfile::TempDir,
    key: SecretKey,
    host: PolicyHost,
    /// A copy of `fifo`.
    file: PathBuf,
    bytes: Vec<u8>,
}

fn desk() -> Desk {
    let dir = tempfile::tempdir().unwrap();
    let key = SecretKey::generate().unwrap();
    let settings = TrustSettings {
        keys: vec![key.public().to_string()],
        require_signature: true,
        ..TrustSettings::default()
    };
    let host = bare_host(limits()).trusting(Trust::open(&settings).unwrap());
    let file = dir.path().join("mine.wasm");
    let bytes = std::fs::read(guest("policies", "fifo")).unwrap();
    std::fs::write(&file, &bytes).unwrap();
    Desk { _dir: dir, key, host, file, bytes }
}

impl Desk {
    fn sign(&self) {
        let signature = self.key.sign(&self.bytes).to_string();
        std::fs::write(signature_file(&self.file), signature).unwrap();
    }

    fn refusal(&self) -> TrustError {
        match self.host.compile_file(&self.file) {
            Err(LoadError::Untrusted(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_is_signed_is_loaded_and_says_by_whom() {
    let desk = desk();
    assert!(matches!(desk.refusal(), TrustError::Unsigned { .. }));
    desk.sign();
    let status = desk.host.load_file(&desk.file, "").unwrap().status();
    assert_eq!(status.signed_by, Some(desk.key.public().id().to_string()));
    assert_eq!(status.digest, Digest::of(&desk.bytes).hex());
}

/// That it was compiled before does not vouch for it.
#[test]
fn each_load_is_checked_anew() {
    let desk = desk();
    desk.sign();
    desk.host.compile_file(&desk.file).unwrap();
    std::fs::remove_file(signature_file(&desk.file)).unwrap();
    assert!(matches!(desk.refusal(), TrustError::Unsigned { .. }));
    let error = desk.host.compile_bytes("mine", &desk.bytes).err().unwrap();
    assert!(matches!(error, LoadError::Untrusted(TrustError::Unsigned { .. })), "{error}");
}

#[test]
fn nothing_looks_into_what_is_not_trusted() {
    let desk = desk();
    desk.sign();
    for bytes in [&b"no component at all"[..], &desk.bytes[..desk.bytes.len() / 2], b""] {
        std::fs::write(&desk.file, bytes).unwrap();
        assert!(matches!(desk.refusal(), TrustError::OtherBytes { .. }));
    }
    // Trusted, it is looked into like any other.
    let nonsense = b"no component at all";
    std::fs::write(&desk.file, nonsense).unwrap();
    let signature = desk.key.sign(nonsense).to_string();
    std::fs::write(signature_file(&desk.file), signature).unwrap();
    let error = desk.host.compile_file(&desk.file).err().unwrap();
    assert!(matches!(error, LoadError::NotWasm { .. }), "{error}");
}

#[test]
fn a_signature_file_that_cannot_be_read_is_not_a_missing_one() {
    let mut desk = desk();
    let settings =
        TrustSettings { keys: vec![desk.key.public().to_string()], ..TrustSettings::default() };
    desk.host = desk.host.trusting(Trust::open(&settings).unwrap());
    assert!(desk.host.compile_file(&desk.file).is_ok(), "none is required");
    std::fs::create_dir(signature_file(&desk.file)).unwrap();
    let error = desk.host.compile_file(&desk.file).err().unwrap().to_string();
    assert!(error.contains("mine.wasm.sig: cannot be read"), "{error}");
}

#[test]
fn a_pinned_digest_lets_in_that_file_alone() {
    let mut desk = desk();
    let digest = Digest::of(&desk.bytes).to_string();
    let settings = TrustSettings { digests: vec![digest], ..TrustSettings::default() };
    desk.host = desk.host.trusting(Trust::open(&settings).unwrap());
    assert_eq!(desk.host.load_file(&desk.file, "").unwrap().status().signed_by, None);
    std::fs::copy(guest("policies", "tally-priority"), &desk.file).unwrap();
    assert!(matches!(desk.refusal(), TrustError::NotPinned { .. }));
}
