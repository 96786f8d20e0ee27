//! The rule: pins first, then signatures. Every refusal names the file, what was found
//! and what to do.

use crate::digest::Digest;
use crate::key::{KeyError, KeyId, PublicKey, SecretKey};
use crate::signature::{Signature, SignatureError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Longest key file read.
const KEY_FILE_BYTES_MAX: u64 = 4096;

/// `[policy.trust]`: which policies may be loaded. By default any file that the core is
/// told to load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrustSettings {
    /// Digests of the only files that may be loaded, each `sha256:` and 64 hexadecimal digits. Empty:
    /// any digest.
    pub digests: Vec<String>,
    /// Keys whose signatures are accepted: `ed25519:...`, or key files of `tallyctl policy keygen`
    /// (`KEY.pub`). With keys, a signature that is present must be valid.
    pub keys: Vec<String>,
    /// Load only files that are signed with one of `keys`.
    pub require_signature: bool,
}

/// A setting that makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum TrustSettingsError {
    /// An entry of `digests` is not a SHA-256 digest.
    #[error("policy.trust.digests: {0}")]
    Digest(String),
    /// An entry of `keys` is not a public key.
    #[error("policy.trust.keys: {0}")]
    Key(#[from] KeyError),
    /// A key file that cannot be used.
    #[error("policy.trust.keys: {file}: {why}")]
    KeyFile { file: PathBuf, why: String },
    #[error(
        "policy.trust.require_signature is set and policy.trust.keys is empty: name the keys \
         whose signatures count (`tallyctl policy keygen --out KEY` makes one)"
    )]
    NoKeys,
}

/// Why a file is not trusted. Nothing has looked into it yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// The digest is not among the pinned ones.
    #[error(
        "{file}: is {digest}, which is not among the {pinned} of `policy.trust.digests`: restore \
         the file that was meant, or add its digest there"
    )]
    NotPinned {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        /// Number of digests in `policy.trust.digests`.
        pinned: usize,
    },
    /// There is no signature and there must be one.
    #[error(
        "{file} ({digest}): is not signed, and `policy.trust.require_signature` is set: put its \
         signature beside it ({file}.sig), or sign it with one of the keys {known} \
         (`tallyctl policy sign {file} --key KEY`)"
    )]
    Unsigned {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        /// Ids of the keys that would do.
        known: String,
    },
    /// The signature's file is damaged.
    #[error(
        "{file} ({digest}): its signature {file}.sig cannot be read: {why}. Restore it, or sign \
         again (`tallyctl policy sign`)"
    )]
    Damaged {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        why: SignatureError,
    },
    /// Signed by somebody else.
    #[error(
        "{file} ({digest}): is signed with the key {key}, which is not in `policy.trust.keys` \
         ({known}): get it signed with one of those, or add the public key if you trust its owner"
    )]
    UnknownKey {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        /// The key that the signature names.
        key: KeyId,
        /// Ids of the keys that would do.
        known: String,
    },
    /// The signature is of other bytes.
    #[error(
        "{file} ({digest}): its signature with the key {key} is of {signed}: the file was changed \
         or cut off after it was signed, or {file}.sig belongs to another one. Restore both, or \
         sign again (`tallyctl policy sign`)"
    )]
    OtherBytes {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        /// The key that the signature names.
        key: KeyId,
        /// Digest of the bytes that were signed.
        signed: Digest,
    },
    /// It names the right file and key, and is not that key's.
    #[error(
        "{file} ({digest}): its signature is not of the key {key} that it names: {file}.sig is \
         damaged or forged. Restore it, or sign again (`tallyctl policy sign`)"
    )]
    Forged {
        file: String,
        /// Digest of the component's bytes.
        digest: Digest,
        /// The key that the signature names.
        key: KeyId,
    },
}

/// What is known of a file that may be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Digest of the bytes that were checked.
    pub digest: Digest,
    /// The trusted key that signed them; `None` if they are not signed, or no keys are
    /// configured to tell.
    pub signed_by: Option<KeyId>,
}

/// Which policies may be loaded; [`TrustSettings`] understood. The default trusts any.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    digests: BTreeSet<Digest>,
    keys: Vec<PublicKey>,
    require_signature: bool,
}

impl Trust {
    /// Understand the settings; reads the key files that they name.
    ///
    /// # Errors
    /// The setting that makes no sense.
    pub fn open(settings: &TrustSettings) -> Result<Self, TrustSettingsError> {
        let digests = settings.digests.iter().map(|text| text.parse());
        let digests = digests.collect::<Result<_, _>>().map_err(TrustSettingsError::Digest)?;
        let keys = settings.keys.iter().map(|text| key(text)).collect::<Result<Vec<_>, _>>()?;
        if settings.require_signature && keys.is_empty() {
            return Err(TrustSettingsError::NoKeys);
        }
        Ok(Trust { digests, keys, require_signature: settings.require_signature })
    }

    /// Signatures are of no use without a key: whether to read them.
    pub fn wants_signatures(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Check a file's bytes, with the content of its signature file if there is one. The
    /// caller must go on with these very bytes.
    ///
    /// # Errors
    /// Why the file is not to be loaded; `file` names it in the message.
    pub fn check(
        &self,
        file: &str,
        bytes: &[u8],
        signature: Option<&[u8]>,
    ) -> Result<Verified, TrustError> {
        let digest = Digest::of(bytes);
        if !self.digests.is_empty() && !self.digests.contains(&digest) {
            let pinned = self.digests.len();
            return Err(TrustError::NotPinned { file: file.into(), digest, pinned });
        }
        let signed_by = match signature {
            Some(signature) if self.wants_signatures() => {
                Some(self.signer(file, digest, signature)?)
            }
            _ if self.require_signature => {
                return Err(TrustError::Unsigned {
                    file: file.into(),
                    digest,
                    known: self.known(),
                });
            }
            _ => None,
        };
        Ok(Verified { digest, signed_by })
    }

    fn signer(&self, file: &str, digest: Digest, text: &[u8]) -> Result<KeyId, TrustError> {
        let file = || file.to_owned();
        let signature = Signature::parse(text).map_err(|why| TrustError::Damaged {
            file: file(),
            digest,
            why,
        })?;
        let key = signature.key;
        let mut named = self.keys.iter().filter(|known| known.id() == key).peekable();
        if named.peek().is_none() {
            return Err(TrustError::UnknownKey { file: file(), digest, key, known: self.known() });
        }
        if signature.digest != digest {
            let signed = signature.digest;
            return Err(TrustError::OtherBytes { file: file(), digest, key, signed });
        }
        if named.any(|known| known.verifies(&digest, &signature)) {
            Ok(key)
        } else {
            Err(TrustError::Forged { file: file(), digest, key })
        }
    }

    fn known(&self) -> String {
        self.keys.iter().map(|key| key.id().to_string()).collect::<Vec<_>>().join(", ")
    }
}

/// A key as the configuration names it: itself, or a file.
fn key(text: &str) -> Result<PublicKey, TrustSettingsError> {
    use std::io::Read;
    if PublicKey::is_inline(text) {
        return Ok(text.parse()?);
    }
    let wrong = |why: String| TrustSettingsError::KeyFile { file: text.into(), why };
    let mut content = String::new();
    std::fs::File::open(text)
        .and_then(|file| file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut content))
        .map_err(|error| {
            wrong(format!("is neither `ed25519:...` nor a key file that can be read: {error}"))
        })?;
    // Not quoted: it may be the private key.
    content.parse().map_err(|error| match error {
        KeyError::Point(..) => wrong(error.to_string()),
        _ if SecretKey::from_file_text(&content).is_ok() => {
            wrong("is a private key: name its public one, the file that ends in `.pub`".into())
        }
        _ => wrong("is not a public key file of `tallyctl policy keygen`".into()),
    })
}
