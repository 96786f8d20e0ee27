//! What is signed, and the form of a signature's file.
//!
//! The signature of `FILE.wasm` is `FILE.wasm.sig`, five lines:
//!
//! ```text
//! tally-policy-signature 1
//! algorithm ed25519
//! key 3f2a9c0d1b2e4f56
//! digest sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
//! signature <64 bytes in base64>
//! ```
//!
//! The signature is over the bytes of [`DOMAIN`] followed by the 32 bytes of the file's SHA-256. So a signature
//! that was made with the same key for another purpose is not valid for a policy, and a policy's signature is
//! valid for those bytes only. The file's name is not signed, so a policy may be renamed. `key` and `digest`
//! only help an error message to say what is wrong; they decide nothing.
//!
//! Not minisign's form: its signature is of the file's BLAKE2b hash, and policies are named by SHA-256 everywhere else.
//!
//! The form is exact: a file is read only if writing what was read gives the same bytes.

use crate::digest::{Digest, unhex};
use crate::key::{KeyId, PublicKey, SecretKey, unbase64};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::Signer;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// Goes before the digest in what is signed.
pub const DOMAIN: &[u8] = b"tally policy signature 1\0";
/// No signature file is longer.
pub const SIGNATURE_BYTES_MAX: usize = 512;

/// Where the signature of a file is: its name with `.sig` appended.
pub fn signature_file(file: &Path) -> PathBuf {
    let mut name = OsString::from(file);
    name.push(".sig");
    name.into()
}

/// The content of a signature file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The key that it says it was made with.
    pub key: KeyId,
    /// The bytes that it says it is of.
    pub digest: Digest,
    signature: ed25519_dalek::Signature,
}

/// Why a file is no signature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// Too long, or no text.
    #[error("it is not a signature file at all")]
    NotText,
    /// A line is not as it must be.
    #[error("its line {line} should be `{expected}`")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The form of that line.
        expected: &'static str,
    },
    /// It reads well but was changed since it was written.
    #[error("it is not exactly as `tallyctl policy sign` wrote it (line ends, white space, case)")]
    NotCanonical,
}

fn message(digest: &Digest) -> Vec<u8> {
    [DOMAIN, &digest.0].concat()
}

impl SecretKey {
    pub fn sign(&self, bytes: &[u8]) -> Signature {
        let digest = Digest::of(bytes);
        Signature { key: self.public().id(), digest, signature: self.0.sign(&message(&digest)) }
    }
}

impl PublicKey {
    /// Whether a signature is this key's, of a file of this digest. What the signature
    /// says of itself does not count.
    pub fn verifies(&self, digest: &Digest, signature: &Signature) -> bool {
        self.0.verify_strict(&message(digest), &signature.signature).is_ok()
    }
}

impl Signature {
    /// Read a signature file.
    ///
    /// # Errors
    /// If it is not exactly of the form.
    pub fn parse(bytes: &[u8]) -> Result<Self, SignatureError> {
        let short = Some(bytes).filter(|bytes| bytes.len() <= SIGNATURE_BYTES_MAX);
        let text = short.and_then(|bytes| std::str::from_utf8(bytes).ok());
        let mut lines = text.ok_or(SignatureError::NotText)?.lines();
        let mut line = |line, start: &str, expected| {
            let error = SignatureError::Line { line, expected };
            lines.next().and_then(|text| text.strip_prefix(start)).ok_or(error)
        };
        let expect = |line, expected| SignatureError::Line { line, expected };
        line(1, "tally-policy-signature 1", "tally-policy-signature 1")?;
        line(2, "algorithm ed25519", "algorithm ed25519")?;
        let form = "key <16 hexadecimal digits>";
        let key = unhex(line(3, "key ", form)?).ok_or(expect(3, form))?;
        let form = "digest sha256:<64 hexadecimal digits>";
        let digest = line(4, "digest ", form)?.parse().map_err(|_| expect(4, form))?;
        let form = "signature <64 bytes in base64>";
        let signature: [u8; 64] = unbase64(line(5, "signature ", form)?).ok_or(expect(5, form))?;
        let signature = ed25519_dalek::Signature::from_bytes(&signature);
        let read = Signature { key: KeyId(key), digest, signature };
        if read.to_string().as_bytes() == bytes {
            Ok(read)
        } else {
            Err(SignatureError::NotCanonical)
        }
    }
}

/// The content of its file.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tally-policy-signature 1\nalgorithm ed25519")?;
        writeln!(f, "key {}\ndigest {}", self.key, self.digest)?;
        writeln!(f, "signature {}", BASE64_STANDARD.encode(self.signature.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_survives_its_file() {
        let key = SecretKey::generate().unwrap();
        let signature = key.sign(b"bytes");
        let text = signature.to_string();
        assert_eq!(text.lines().count(), 5);
        assert!(text.len() <= SIGNATURE_BYTES_MAX);
        assert_eq!(Signature::parse(text.as_bytes()), Ok(signature.clone()));
        assert!(key.public().verifies(&Digest::of(b"bytes"), &signature));
        assert_eq!(signature_file("a/b.wasm".as_ref()), Path::new("a/b.wasm.sig"));
    }

    #[test]
    fn a_signature_is_of_one_key_one_domain_and_one_content() {
        let key = SecretKey::generate().unwrap();
        let digest = Digest::of(b"bytes");
        let signature = key.sign(b"bytes");
        assert!(!key.public().verifies(&Digest::of(b"other"), &signature));
        assert!(!SecretKey::generate().unwrap().public().verifies(&digest, &signature));
        // The same key, over the bare digest or over the file, for another purpose.
        for message in [&digest.0[..], b"bytes"] {
            let signature = Signature { signature: key.0.sign(message), ..signature.clone() };
            assert!(!key.public().verifies(&digest, &signature));
        }
    }

    #[test]
    fn what_is_no_signature_says_which_line() {
        let text = SecretKey::generate().unwrap().sign(b"bytes").to_string();
        assert_eq!(Signature::parse(&[0xff; 100]), Err(SignatureError::NotText));
        assert_eq!(Signature::parse(&[b'x'; 1 << 20]), Err(SignatureError::NotText));
        for line in 1..=5 {
            let lines = text.lines().take(line - 1).map(|line| format!("{line}\n"));
            let cut: String = lines.collect();
            let error = Signature::parse(cut.as_bytes()).unwrap_err();
            let SignatureError::Line { line: named, expected } = error else { panic!("{error}") };
            assert_eq!(named, line);
            assert!(text.contains(expected) || line > 2, "{expected}");
        }
        for changed in [
            text.replace('\n', "\r\n"),
            text.trim_end().into(),
            format!("{text}\n"),
            text.replace("digest sha256", "digest  sha256"),
            text.replace("ed25519\n", "ed25519 \n"),
            text.replace("signature 1", "signature 10"),
        ] {
            assert!(Signature::parse(changed.as_bytes()).is_err(), "{changed:?}");
        }
    }
}
