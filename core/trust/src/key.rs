//! Ed25519 keys (RFC 8032) as text: what a configuration names, what a key file holds.
//!
//! | what | form |
//! | --- | --- |
//! | public key | `ed25519:` and 32 bytes in base64 or hexadecimal, one line |
//! | key id | first 16 hexadecimal digits of the SHA-256 of those 32 bytes |
//! | private key file | the line `tally-policy-private-key 1`, then `ed25519 ` and the 32 bytes of its seed in base64 |

use crate::digest::{Digest, hex, unhex};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::{SigningKey, VerifyingKey};
use std::fmt;
use std::str::FromStr;

/// What a public key is written with.
const PREFIX: &str = "ed25519:";
/// First line of a private key file.
const PRIVATE_HEADER: &str = "tally-policy-private-key 1";

/// Why a text is no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text has not the form of a public key.
    #[error(
        "{0:?} is no public key: expected `ed25519:` and 32 bytes in base64 (44 characters) or \
         hexadecimal (64 digits), as `tallyctl policy keygen` prints it"
    )]
    Form(String),
    /// Bytes that no private key belongs to, or that verify signatures of anything.
    #[error("`{0}` is no Ed25519 public key that can be trusted: {1}")]
    Point(String, &'static str),
    /// Not a private key file.
    #[error("is not a private key file of `tallyctl policy keygen` ({0})")]
    Private(&'static str),
    /// The operating system gave no random bytes.
    #[error("the operating system gives no random bytes: {0}")]
    Random(String),
}

/// Tells keys apart for people. Not what trust rests on: two keys of one id are told apart
/// by their signatures.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub(crate) [u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A key to verify signatures with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(pub(crate) VerifyingKey);

impl PublicKey {
    pub fn id(&self) -> KeyId {
        let digest = Digest::of(self.0.as_bytes());
        let mut id = [0; 8];
        id.copy_from_slice(&digest.0[..8]);
        KeyId(id)
    }

    /// Whether a text means a key and not the name of a file that holds one.
    pub fn is_inline(text: &str) -> bool {
        text.starts_with(PREFIX)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", BASE64_STANDARD.encode(self.0.as_bytes()))
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    /// Surrounding white space (the end of a key file's line) does not count.
    fn from_str(text: &str) -> Result<Self, KeyError> {
        let text = text.trim();
        let form = || KeyError::Form(text.chars().take(100).collect());
        let encoded = text.strip_prefix(PREFIX).ok_or_else(form)?;
        let bytes = unhex(encoded).or_else(|| unbase64(encoded)).ok_or_else(form)?;
        let point = |why| KeyError::Point(text.to_owned(), why);
        let key = VerifyingKey::from_bytes(&bytes).map_err(|_| point("it is not on the curve"))?;
        if key.is_weak() {
            return Err(point("it is of small order, so anybody can sign for it"));
        }
        Ok(PublicKey(key))
    }
}

/// A key to sign with. Its bytes are wiped from memory when it is dropped.
pub struct SecretKey(pub(crate) SigningKey);

impl SecretKey {
    /// A new one, from the operating system's randomness.
    ///
    /// # Errors
    /// If there is none.
    pub fn generate() -> Result<Self, KeyError> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| KeyError::Random(error.to_string()))?;
        Ok(SecretKey(SigningKey::from_bytes(&seed)))
    }

    /// The key that its signatures are verified with.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    /// The content of its file. Keep it from others.
    pub fn to_file_text(&self) -> String {
        format!("{PRIVATE_HEADER}\ned25519 {}\n", BASE64_STANDARD.encode(self.0.as_bytes()))
    }

    /// Read the content of its file.
    ///
    /// # Errors
    /// If it is something else; the message quotes nothing of it.
    pub fn from_file_text(text: &str) -> Result<Self, KeyError> {
        if text.trim_start().starts_with(PREFIX) {
            return Err(KeyError::Private("it is a public key; the private one has no `.pub`"));
        }
        let (header, rest) = text.split_once('\n').unwrap_or((text, ""));
        if header.trim_end() != PRIVATE_HEADER {
            return Err(KeyError::Private("its first line is another"));
        }
        let encoded = rest.trim().strip_prefix("ed25519 ");
        let seed =
            encoded.and_then(unbase64).ok_or(KeyError::Private("its second line is damaged"))?;
        Ok(SecretKey(SigningKey::from_bytes(&seed)))
    }
}

/// Says which it is without giving it away.
impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({})", self.public().id())
    }
}

/// Exactly `N` bytes from base64 in its one canonical form.
pub(crate) fn unbase64<const N: usize>(text: &str) -> Option<[u8; N]> {
    BASE64_STANDARD.decode(text).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_key_is_read_as_it_is_written_and_in_hexadecimal() {
        let key = SecretKey::generate().unwrap().public();
        let text = key.to_string();
        assert_eq!(text.parse::<PublicKey>().unwrap(), key);
        assert_eq!(format!(" {text}\n").parse::<PublicKey>().unwrap(), key);
        let digits = format!("ed25519:{}", hex(key.0.as_bytes()));
        assert_eq!(digits.parse::<PublicKey>().unwrap(), key);
        assert!(PublicKey::is_inline(&text) && !PublicKey::is_inline("/etc/tally/ed25519.pub"));
    }

    /// The first test vector of RFC 8032, section 7.1.
    #[test]
    fn a_known_seed_has_the_public_key_of_the_standard() {
        let seed = unhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
        let key = SecretKey(SigningKey::from_bytes(&seed.unwrap()));
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        assert_eq!(hex(key.public().0.as_bytes()), public);
    }

    #[test]
    fn what_is_no_public_key_is_refused_by_name() {
        for text in ["", "ed25519:", "ed25519:AAAA", "rsa:1234", "ed25519:%%%"] {
            let error = text.parse::<PublicKey>().unwrap_err();
            assert_eq!(error, KeyError::Form(text.into()));
            assert!(error.to_string().contains("keygen"));
        }
        // Not a point; the neutral element, for which everybody can sign.
        let text = format!("ed25519:{}", "02".to_owned() + &"00".repeat(31));
        assert!(matches!(text.parse::<PublicKey>(), Err(KeyError::Point(_, _))));
        let text = format!("ed25519:{}", "01".to_owned() + &"00".repeat(31));
        let error = text.parse::<PublicKey>().unwrap_err().to_string();
        assert!(error.contains("small order"), "{error}");
    }

    #[test]
    fn a_private_key_survives_its_file_and_shows_itself_nowhere() {
        let key = SecretKey::generate().unwrap();
        let text = key.to_file_text();
        let again = SecretKey::from_file_text(&text).unwrap();
        assert_eq!(again.public(), key.public());
        let secret = text.lines().nth(1).unwrap().trim_start_matches("ed25519 ");
        assert!(!format!("{key:?}").contains(secret));
        for wrong in ["", "x", PRIVATE_HEADER, &text[..60], &key.public().to_string()] {
            let error = SecretKey::from_file_text(wrong).unwrap_err();
            assert!(matches!(error, KeyError::Private(_)), "{error}");
        }
        assert_ne!(SecretKey::generate().unwrap().public(), key.public());
    }
}
