//! `tallyctl policy keygen`, `sign` and `verify`. They need no core.

use crate::error::CtlError;
use clap::Args;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tally_trust::{SIGNATURE_BYTES_MAX, SecretKey, Trust, TrustSettings, signature_file};

/// No policy is longer: the highest that `component_bytes_max` may be.
pub(super) const POLICY_BYTES_MAX: u64 = 1 << 30;
/// No key file is longer.
const KEY_BYTES_MAX: u64 = 4096;

#[derive(Debug, Args)]
pub struct KeygenArgs {
    /// File of the private key, made with mode 0600; the public one goes to FILE.pub.
    /// Neither may exist.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub struct SignArgs {
    /// The component; its signature goes to FILE.sig.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The private key, of `tallyctl policy keygen`.
    #[arg(long, value_name = "KEY")]
    pub key: PathBuf,
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The component; its signature is FILE.sig.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The public key: a file, or `ed25519:...` itself.
    #[arg(long, value_name = "PUB")]
    pub key: String,
}

fn failed(file: &Path, error: impl std::fmt::Display) -> CtlError {
    CtlError::Failed(format!("{}: {error}", file.display()))
}

/// A whole file, if it is not longer than it may be.
pub(super) fn read(file: &Path, bytes_max: u64) -> Result<Vec<u8>, CtlError> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|open| open.take(bytes_max + 1).read_to_end(&mut bytes))
        .map_err(|error| failed(file, error))?;
    if bytes.len() as u64 > bytes_max {
        return Err(failed(file, format!("is longer than {bytes_max} bytes: not what is meant")));
    }
    Ok(bytes)
}

/// Make a file that must not be there yet.
fn create(file: &Path, mode: u32, text: &str) -> Result<(), CtlError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(file);
    let mut made = made.map_err(|error| failed(file, error))?;
    let written = made.write_all(text.as_bytes()).and_then(|()| made.sync_all());
    written.map_err(|error| {
        // Half a file would stand in the way of the next try.
        let _ = std::fs::remove_file(file);
        failed(file, error)
    })
}

/// Replace a file at once: whoever watches it sees the old one or the new one.
fn replace(file: &Path, text: &str) -> Result<(), CtlError> {
    let mut aside = file.as_os_str().to_owned();
    aside.push(format!(".{}.tmp", std::process::id()));
    let aside = PathBuf::from(aside);
    create(&aside, 0o644, text)?;
    std::fs::rename(&aside, file).map_err(|error| {
        let _ = std::fs::remove_file(&aside);
        failed(file, error)
    })
}

fn public_file(private: &Path) -> PathBuf {
    let mut name = private.as_os_str().to_owned();
    name.push(".pub");
    name.into()
}

pub fn keygen(args: &KeygenArgs) -> Result<(), CtlError> {
    let public_file = public_file(&args.out);
    // Before the private one is made: a pair is whole or not there.
    if public_file.exists() {
        return Err(failed(&public_file, "exists already: name another file with --out"));
    }
    let key = SecretKey::generate().map_err(|error| failed(&args.out, error))?;
    let public = key.public();
    create(&args.out, 0o600, &key.to_file_text())?;
    create(&public_file, 0o644, &format!("{public}\n")).inspect_err(|_| {
        let _ = std::fs::remove_file(&args.out);
    })?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{public}")?;
    writeln!(
        out,
        "key {}: private in {}, public in {}; a core trusts it with\n\
         [policy.trust]\nkeys = [\"{public}\"]\nrequire_signature = true",
        public.id(),
        args.out.display(),
        public_file.display()
    )?;
    Ok(())
}

/// Writes the signature of a policy beside it, as `FILE.sig`. Warns if others can read the private key.
pub fn sign(args: &SignArgs) -> Result<(), CtlError> {
    let mode = std::fs::metadata(&args.key).map(|it| it.permissions().mode());
    let text = String::from_utf8(read(&args.key, KEY_BYTES_MAX)?)
        .map_err(|_| failed(&args.key, "is not a private key file of `tallyctl policy keygen`"))?;
    let key = SecretKey::from_file_text(&text).map_err(|error| failed(&args.key, error))?;
    if mode.is_ok_and(|mode| mode & 0o077 != 0) {
        let key = args.key.display();
        eprintln!("tallyctl: {key}: others may read this private key: chmod 600 {key}");
    }
    let bytes = read(&args.file, POLICY_BYTES_MAX)?;
    let signature = key.sign(&bytes);
    let to = signature_file(&args.file);
    replace(&to, &signature.to_string())?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}: {} signed with the key {}", to.display(), signature.digest, signature.key)?;
    Ok(())
}

/// Check a policy's signature, as a core would that trusts this key only.
pub fn verify(args: &VerifyArgs) -> Result<(), CtlError> {
    let settings = TrustSettings {
        keys: vec![args.key.clone()],
        require_signature: true,
        ..TrustSettings::default()
    };
    let trust = Trust::open(&settings).map_err(|error| CtlError::Failed(error.to_string()))?;
    let bytes = read(&args.file, POLICY_BYTES_MAX)?;
    let from = signature_file(&args.file);
    let signature = match from.try_exists() {
        Ok(false) => None,
        _ => Some(read(&from, SIGNATURE_BYTES_MAX as u64)?),
    };
    let file = args.file.display().to_string();
    let verified = trust
        .check(&file, &bytes, signature.as_deref())
        .map_err(|error| CtlError::Failed(error.to_string()))?;
    let signer = verified.signed_by.map(|key| key.to_string()).unwrap_or_default();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{file}: {} signed by {signer}", verified.digest)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Desk {
        dir: tempfile::TempDir,
        key: PathBuf,
        policy: PathBuf,
    }

    fn desk() -> Desk {
        let dir = tempfile::tempdir().unwrap();
        let (key, policy) = (dir.path().join("release"), dir.path().join("mine.wasm"));
        std::fs::write(&policy, b"\0asm a policy").unwrap();
        keygen(&KeygenArgs { out: key.clone() }).unwrap();
        Desk { dir, key, policy }
    }

    impl Desk {
        fn sign(&self) -> Result<(), CtlError> {
            sign(&SignArgs { file: self.policy.clone(), key: self.key.clone() })
        }

        fn verify(&self, key: &str) -> Result<(), String> {
            let args = VerifyArgs { file: self.policy.clone(), key: key.into() };
            verify(&args).map_err(|error| error.to_string())
        }

        fn public(&self) -> String {
            public_file(&self.key).display().to_string()
        }
    }

    #[test]
    fn what_is_signed_verifies_with_the_public_key_as_file_and_as_text() {
        let desk = desk();
        assert!(desk.verify(&desk.public()).unwrap_err().contains("is not signed"));
        desk.sign().unwrap();
        desk.verify(&desk.public()).unwrap();
        desk.verify(std::fs::read_to_string(desk.public()).unwrap().trim()).unwrap();
        // Signing again, after a change, replaces the signature and leaves nothing else.
        std::fs::write(&desk.policy, b"\0asm another").unwrap();
        assert!(desk.verify(&desk.public()).unwrap_err().contains("changed or cut off"));
        desk.sign().unwrap();
        desk.verify(&desk.public()).unwrap();
        assert_eq!(std::fs::read_dir(desk.dir.path()).unwrap().count(), 4);
    }

    #[test]
    fn the_private_key_is_for_its_owner_and_is_never_overwritten() {
        let desk = desk();
        let mode = std::fs::metadata(&desk.key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let before = std::fs::read(&desk.key).unwrap();
        let again = || keygen(&KeygenArgs { out: desk.key.clone() }).unwrap_err().to_string();
        assert!(again().contains("release.pub: exists already"), "{}", again());
        std::fs::remove_file(desk.public()).unwrap();
        assert!(again().contains("exists"), "{}", again());
        assert_eq!(std::fs::read(&desk.key).unwrap(), before);
        assert!(!PathBuf::from(desk.public()).exists());
    }

    #[test]
    fn keys_taken_for_each_other_are_named() {
        let desk = desk();
        let swapped = SignArgs { file: desk.policy.clone(), key: desk.public().into() };
        let error = sign(&swapped).unwrap_err().to_string();
        assert!(error.contains("release.pub") && error.contains("is a public key"), "{error}");
        desk.sign().unwrap();
        let error = desk.verify(&desk.key.display().to_string()).unwrap_err();
        assert!(error.contains("is a private key"), "{error}");
        let missing = SignArgs { file: "/nowhere/x.wasm".into(), key: desk.key.clone() };
        assert!(sign(&missing).unwrap_err().to_string().contains("/nowhere/x.wasm"));
    }

    #[test]
    fn a_signature_file_that_is_endless_or_nonsense_is_refused() {
        let desk = desk();
        let to = signature_file(&desk.policy);
        std::fs::write(&to, [b'x'; 4096]).unwrap();
        assert!(desk.verify(&desk.public()).unwrap_err().contains("mine.wasm.sig"));
        std::fs::write(&to, "hello").unwrap();
        assert!(desk.verify(&desk.public()).unwrap_err().contains("its line 1 should be"));
    }
}
