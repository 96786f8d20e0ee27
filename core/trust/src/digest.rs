//! SHA-256 of a file's bytes, as people and configuration write it.

use sha2::Digest as _;
use std::fmt;
use std::str::FromStr;

/// What a digest is written with: `sha256:` and 64 hexadecimal digits.
const PREFIX: &str = "sha256:";

/// SHA-256 of a file's bytes. Written as `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Computes the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(sha2::Sha256::digest(bytes).into())
    }

    /// The 64 hexadecimal digits, without `sha256:`.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.strip_prefix(PREFIX).and_then(unhex).map(Digest).ok_or_else(|| {
            format!("{text:?} is no digest: expected `{PREFIX}` and 64 hexadecimal digits")
        })
    }
}

/// Two lower-case digits a byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `N` bytes from exactly `2 * N` digits of either case.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    // Also excludes the sign that number parsing would accept.
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_digest_is_written_and_read() {
        let text = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Digest::of(b"abc");
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        assert_eq!(text.to_uppercase().replace("SHA", "sha").parse(), Ok(digest));
    }

    #[test]
    fn what_is_no_digest_is_quoted() {
        let long = format!("sha256:{}", "0".repeat(66));
        let signed = format!("sha256:{}", "+1".repeat(32));
        for text in ["", "sha256:", "abc", "md5:00", &long, &long[..70], &signed, "sha256:é"] {
            let error = text.parse::<Digest>().unwrap_err();
            assert!(error.contains(&format!("{text:?}")) && error.contains("64"), "{error}");
        }
    }
}
