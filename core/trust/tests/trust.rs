//! Who is let in and who is not, and whether a refusal says why.

use proptest::prelude::*;
use tally_trust::{Digest, SecretKey, Trust, TrustError, TrustSettings};

const POLICY: &[u8] = b"\0asm\x0d\0\x01\0 the bytes of a policy";

struct Case {
    key: SecretKey,
    trust: Trust,
    signature: String,
}

/// One trusted key, a signature required, and that of [`POLICY`].
fn case() -> Case {
    let key = SecretKey::generate().unwrap();
    let settings = TrustSettings {
        keys: vec![key.public().to_string()],
        require_signature: true,
        ..TrustSettings::default()
    };
    let trust = Trust::open(&settings).unwrap();
    let signature = key.sign(POLICY).to_string();
    Case { key, trust, signature }
}

/// The message of a refusal, which must have these parts.
fn says(error: &TrustError, parts: &[&str]) {
    let message = error.to_string();
    for part in ["mine.wasm"].iter().chain(parts) {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn by_default_anything_is_loaded_signed_or_not() {
    let trust = Trust::default();
    assert!(!trust.wants_signatures());
    for signature in [None, Some(&b"nonsense"[..])] {
        let verified = trust.check("mine.wasm", POLICY, signature).unwrap();
        assert_eq!((verified.digest, verified.signed_by), (Digest::of(POLICY), None));
    }
}

#[test]
fn a_pin_lets_in_that_file_and_no_other_whoever_signed_it() {
    let case = case();
    let settings = TrustSettings {
        digests: vec![Digest::of(POLICY).to_string(), Digest::of(b"another").to_string()],
        keys: vec![case.key.public().to_string()],
        require_signature: false,
    };
    let trust = Trust::open(&settings).unwrap();
    assert!(trust.check("mine.wasm", POLICY, None).is_ok());
    assert!(trust.check("mine.wasm", POLICY, Some(case.signature.as_bytes())).is_ok());
    let other = b"not that one";
    let signature = case.key.sign(other).to_string();
    let error = trust.check("mine.wasm", other, Some(signature.as_bytes())).unwrap_err();
    says(&error, &[&Digest::of(other).to_string(), "the 2 of `policy.trust.digests`", "restore"]);
}

#[test]
fn a_good_signature_names_its_signer() {
    let case = case();
    let verified = case.trust.check("mine.wasm", POLICY, Some(case.signature.as_bytes())).unwrap();
    assert_eq!(verified.signed_by, Some(case.key.public().id()));
}

#[test]
fn a_missing_signature_is_refused_if_one_is_required() {
    let case = case();
    let error = case.trust.check("mine.wasm", POLICY, None).unwrap_err();
    let id = case.key.public().id().to_string();
    says(&error, &["is not signed", "mine.wasm.sig", "tallyctl policy sign", &id]);
    let settings =
        TrustSettings { keys: vec![case.key.public().to_string()], ..TrustSettings::default() };
    let trust = Trust::open(&settings).unwrap();
    assert_eq!(trust.check("mine.wasm", POLICY, None).unwrap().signed_by, None);
}

/// Whether or not one is required: it was put there for a reason.
#[test]
fn a_bad_signature_is_refused_though_none_is_required() {
    let case = case();
    let settings =
        TrustSettings { keys: vec![case.key.public().to_string()], ..TrustSettings::default() };
    let trust = Trust::open(&settings).unwrap();
    let stranger = SecretKey::generate().unwrap().sign(POLICY).to_string();
    for bad in [&b""[..], stranger.as_bytes()] {
        assert!(trust.check("mine.wasm", POLICY, Some(bad)).is_err());
    }
}

#[test]
fn a_strangers_signature_names_both_keys() {
    let case = case();
    let stranger = SecretKey::generate().unwrap();
    let signature = stranger.sign(POLICY).to_string();
    let error = case.trust.check("mine.wasm", POLICY, Some(signature.as_bytes())).unwrap_err();
    assert!(matches!(error, TrustError::UnknownKey { .. }), "{error}");
    let (theirs, ours) = (stranger.public().id().to_string(), case.key.public().id().to_string());
    says(&error, &[&theirs, &ours, "policy.trust.keys"]);
    // Naming our key does not make it ours.
    let posing = signature.replace(&theirs, &ours);
    let error = case.trust.check("mine.wasm", POLICY, Some(posing.as_bytes())).unwrap_err();
    assert!(matches!(error, TrustError::Forged { .. }), "{error}");
    says(&error, &["damaged or forged", &ours]);
}

#[test]
fn a_signature_of_other_bytes_says_of_which() {
    let case = case();
    let other = case.key.sign(b"another policy of ours").to_string();
    let error = case.trust.check("mine.wasm", POLICY, Some(other.as_bytes())).unwrap_err();
    assert!(matches!(error, TrustError::OtherBytes { .. }), "{error}");
    let signed = Digest::of(b"another policy of ours").to_string();
    says(&error, &[&signed, &Digest::of(POLICY).to_string(), "changed or cut off"]);
    // Claiming the right digest does not help.
    let posing = other.replace(&signed, &Digest::of(POLICY).to_string());
    let error = case.trust.check("mine.wasm", POLICY, Some(posing.as_bytes())).unwrap_err();
    assert!(matches!(error, TrustError::Forged { .. }), "{error}");
}

#[test]
fn a_file_or_signature_cut_off_anywhere_is_refused() {
    let case = case();
    for length in 0..POLICY.len() {
        let error =
            case.trust.check("mine.wasm", &POLICY[..length], Some(case.signature.as_bytes()));
        assert!(matches!(error, Err(TrustError::OtherBytes { .. })), "{length} bytes");
    }
    for length in 0..case.signature.len() {
        let cut = &case.signature.as_bytes()[..length];
        let error = case.trust.check("mine.wasm", POLICY, Some(cut));
        assert!(matches!(error, Err(TrustError::Damaged { .. })), "{length} bytes: {error:?}");
    }
}

#[test]
fn keys_are_read_from_files_and_from_the_configuration_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (inline, filed) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
    let file = dir.path().join("release.pub");
    std::fs::write(&file, format!("{}\n", filed.public())).unwrap();
    let text = format!("keys = [\"{}\", {file:?}]\nrequire_signature = true", inline.public());
    let trust = Trust::open(&toml::from_str(&text).unwrap()).unwrap();
    for key in [&inline, &filed] {
        let signature = key.sign(POLICY).to_string();
        let verified = trust.check("mine.wasm", POLICY, Some(signature.as_bytes())).unwrap();
        assert_eq!(verified.signed_by, Some(key.public().id()));
    }
}

#[test]
fn settings_that_make_no_sense_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let private = dir.path().join("key");
    let secret = SecretKey::generate().unwrap().to_file_text();
    std::fs::write(&private, &secret).unwrap();
    for (text, parts) in [
        ("digests = [\"abc\"]", &["policy.trust.digests", "\"abc\"", "64"][..]),
        ("keys = [\"ed25519:abc\"]", &["policy.trust.keys", "ed25519:abc", "keygen"]),
        ("keys = [\"/nowhere/k.pub\"]", &["policy.trust.keys", "/nowhere/k.pub", "No such file"]),
        ("require_signature = true", &["policy.trust.keys is empty", "keygen"]),
        (&format!("keys = [{private:?}]"), &["policy.trust.keys", "is a private key", ".pub"]),
    ] {
        let error = Trust::open(&toml::from_str(text).unwrap()).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
        assert!(!error.contains(secret.lines().nth(1).unwrap()), "shows the key: {error}");
    }
    let error = toml::from_str::<TrustSettings>("key = []").unwrap_err().to_string();
    assert!(error.contains("unknown field `key`"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// One bit anywhere, in the file or in its signature.
    #[test]
    fn any_flipped_bit_is_refused(
        content in proptest::collection::vec(any::<u8>(), 1..300),
        at in any::<proptest::sample::Index>(),
        bit in 0..8_u8,
        in_signature in any::<bool>(),
    ) {
        let Case { key, trust, .. } = case();
        let (mut bytes, mut signature) = (content.clone(), key.sign(&content).to_string().into_bytes());
        prop_assert!(trust.check("mine.wasm", &bytes, Some(&signature)).is_ok());
        let changed = if in_signature { &mut signature } else { &mut bytes };
        let at = at.index(changed.len());
        changed[at] ^= 1 << bit;
        prop_assert!(trust.check("mine.wasm", &bytes, Some(&signature)).is_err());
    }

    /// Whatever stands in a signature file: refused, without a panic.
    #[test]
    fn any_other_signature_file_is_refused(text in proptest::collection::vec(any::<u8>(), 0..700)) {
        prop_assert!(case().trust.check("mine.wasm", POLICY, Some(&text)).is_err());
    }
}

/// Every single bit of one signature file, none left out.
#[test]
fn every_bit_of_a_signature_file_counts() {
    let case = case();
    let good = case.signature.as_bytes();
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.to_vec();
            bad[at] ^= 1 << bit;
            let outcome = case.trust.check("mine.wasm", POLICY, Some(&bad));
            assert!(outcome.is_err(), "bit {bit} of byte {at} does not count");
        }
    }
}
