//! Signatures, keys and digests, as files and configurations have them.

use tally_trust::{Digest, PublicKey, SecretKey, Signature};

/// No panic; what is read is written alike, and nobody's signature is good for other bytes.
pub fn signature(data: &[u8]) {
    let signature = Signature::parse(data);
    if let Ok(signature) = &signature {
        let again = Signature::parse(signature.to_string().as_bytes()).expect("what it wrote");
        assert_eq!(again.to_string(), signature.to_string());
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = text.parse::<Digest>();
    let _ = SecretKey::from_file_text(text);
    for line in text.lines() {
        if let (Ok(key), Ok(signature)) = (line.parse::<PublicKey>(), &signature) {
            assert!(!key.verifies(&Digest::of(b"bytes that nobody signed"), signature));
        }
    }
}
