//! Which policies may be loaded: those pinned by digest, those signed with a key that
//! the operator named.
//!
//! A policy decides what runs on the GPU, so its bytes are checked before anything looks
//! into them: [`Trust::check`] takes the very bytes that are compiled afterwards. It knows
//! nothing of WebAssembly.
//!
//! ```
//! use tally_trust::{SecretKey, Trust, TrustSettings};
//!
//! let key = SecretKey::generate()?;
//! let settings = TrustSettings {
//!     keys: vec![key.public().to_string()],
//!     require_signature: true,
//!     ..TrustSettings::default()
//! };
//! let trust = Trust::open(&settings)?;
//! let (policy, other) = (b"the bytes of a component", b"those of another one");
//! let signature = key.sign(policy).to_string();
//! let verified = trust.check("mine.wasm", policy, Some(signature.as_bytes()))?;
//! assert_eq!(verified.signed_by, Some(key.public().id()));
//! assert!(trust.check("mine.wasm", other, Some(signature.as_bytes())).is_err());
//! assert!(trust.check("mine.wasm", policy, None).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | [`digest`] | SHA-256 of a file's bytes |
//! | [`key`] | the forms of Ed25519 keys as text |
//! | [`signature`] | what is signed, and the form of `FILE.wasm.sig` |
//! | [`check`] | the rule: pins, then signatures; what is refused and why |
//!
//! No cryptography of its own: Ed25519 is `ed25519-dalek` (strict verification), SHA-256
//! is `sha2`, randomness is the operating system's.
#![forbid(unsafe_code)]

pub mod check;
pub mod digest;
pub mod key;
pub mod signature;

pub use check::{Trust, TrustError, TrustSettings, TrustSettingsError, Verified};
pub use digest::Digest;
pub use key::{KeyError, KeyId, PublicKey, SecretKey};
pub use signature::{SIGNATURE_BYTES_MAX, Signature, SignatureError, signature_file};
