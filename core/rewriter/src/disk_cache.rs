//! A [`Rewritten`] image as bytes, to be kept and found again.
//!
//! [`Key`] stands for all that the rewriting depends on: the image, the device's architecture,
//! the form, and this crate's version and sources. The bytes carry their key and end with a digest
//! of themselves: what is cut short, changed or of another key is not read. Little endian:
//!
//! ```text
//! "TALLY-RW" | key, 32 | is PTX, 1 | kernels, 4 | each: name, parameters 4, control offset 4,
//! cluster (0 or 1, then 3 x 4), may wait 1, reads SM 1 | refused, 4 | each: name, code 1
//! | image: 8 and bytes | SHA-256 of all before          (a name: its length, 4, and UTF-8)
//! ```

use crate::{KernelForm, Rewritten, TransformRefusal, TransformedKernel};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"TALLY-RW";
const DIGEST_BYTES: usize = 32;

/// What a rewriting depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; DIGEST_BYTES]);

impl Key {
    /// Of `image`, for a device of architecture `arch`.
    pub fn new(image: &[u8], arch: u32, form: KernelForm) -> Self {
        let mut all = Sha256::new();
        all.update(MAGIC);
        all.update(env!("CARGO_PKG_VERSION"));
        all.update(env!("TALLY_KERNELS_SOURCES"));
        all.update(arch.to_le_bytes());
        all.update([u8::from(form == KernelForm::ByOffset)]);
        all.update(image);
        Key(all.finalize().into())
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

pub fn to_bytes(key: &Key, rewritten: &Rewritten) -> Vec<u8> {
    let mut out = Vec::with_capacity(rewritten.image.len() + 4096);
    out.extend(MAGIC);
    out.extend(key.0);
    out.push(rewritten.is_ptx.into());
    let number = |out: &mut Vec<u8>, n: u32| out.extend(n.to_le_bytes());
    let name = |out: &mut Vec<u8>, name: &str| {
        number(out, name.len() as u32);
        out.extend(name.as_bytes());
    };
    number(&mut out, rewritten.kernels.len() as u32);
    for kernel in &rewritten.kernels {
        name(&mut out, &kernel.name);
        number(&mut out, kernel.parameter_count);
        number(&mut out, kernel.control_offset);
        out.push(kernel.cluster.is_some().into());
        kernel.cluster.unwrap_or_default().into_iter().for_each(|n| number(&mut out, n));
        out.push(kernel.may_wait.into());
        out.push(kernel.reads_sm.into());
    }
    number(&mut out, rewritten.refused.len() as u32);
    for (refused, why) in &rewritten.refused {
        name(&mut out, refused);
        out.push(why.code());
    }
    out.extend((rewritten.image.len() as u64).to_le_bytes());
    out.extend(&rewritten.image);
    let digest = Sha256::digest(&out);
    out.extend(digest);
    out
}

/// Out of such bytes; `None` if they are not whole, or of another key.
pub fn from_bytes(key: &Key, bytes: &[u8]) -> Option<Rewritten> {
    let (body, digest) = bytes.split_at_checked(bytes.len().checked_sub(DIGEST_BYTES)?)?;
    if Sha256::digest(body).as_slice() != digest {
        return None;
    }
    let mut from = Reader(body);
    if from.take(MAGIC.len())? != MAGIC || from.take(DIGEST_BYTES)? != key.0 {
        return None;
    }
    let is_ptx = from.flag()?;
    let kernels = from.list(|from| {
        let name = from.name()?;
        let (parameter_count, control_offset) = (from.number()?, from.number()?);
        let fixed = from.flag()?;
        let cluster = [from.number()?, from.number()?, from.number()?];
        // Nothing else is written.
        (fixed || cluster == [0; 3]).then_some(())?;
        let cluster = fixed.then_some(cluster);
        let (may_wait, reads_sm) = (from.flag()?, from.flag()?);
        Some(TransformedKernel {
            name,
            parameter_count,
            control_offset,
            cluster,
            may_wait,
            reads_sm,
        })
    })?;
    let refused =
        from.list(|from| Some((from.name()?, TransformRefusal::from_code(from.take(1)?[0])?)))?;
    let length = u64::from_le_bytes(from.take(8)?.try_into().ok()?);
    let image = from.take(length.try_into().ok()?)?.to_vec();
    from.0.is_empty().then_some(Rewritten { image, is_ptx, kernels, refused })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn flag(&mut self) -> Option<bool> {
        match self.take(1)?[0] {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn name(&mut self) -> Option<String> {
        let length = self.number()? as usize;
        String::from_utf8(self.take(length)?.to_vec()).ok()
    }

    /// Nothing is reserved for a number that was only read: each entry takes bytes.
    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = self.number()?;
        let mut all = Vec::new();
        for _ in 0..n {
            all.push(one(self)?);
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(image: &[u8]) -> Key {
        Key::new(image, 90, KernelForm::ByClaims)
    }

    fn any_kernel() -> impl Strategy<Value = TransformedKernel> {
        (".{0,40}", any::<(u32, u32, Option<[u32; 3]>, (bool, bool))>()).prop_map(|(name, rest)| {
            let (parameter_count, control_offset, cluster, (may_wait, reads_sm)) = rest;
            TransformedKernel { name, parameter_count, control_offset, cluster, may_wait, reads_sm }
        })
    }

    fn any_rewritten() -> impl Strategy<Value = Rewritten> {
        let refused = (".{0,40}", proptest::sample::select(TransformRefusal::ALL.to_vec()));
        (
            any::<(Vec<u8>, bool)>(),
            proptest::collection::vec(any_kernel(), 0..5),
            proptest::collection::vec(refused, 0..5),
        )
            .prop_map(|((image, is_ptx), kernels, refused)| Rewritten {
                image,
                is_ptx,
                kernels,
                refused,
            })
    }

    /// Bytes with a digest that is right, whatever they are.
    fn sealed(mut body: Vec<u8>) -> Vec<u8> {
        let digest = Sha256::digest(&body);
        body.extend(digest);
        body
    }

    proptest! {
        #[test]
        fn it_comes_back_as_it_was(rewritten in any_rewritten()) {
            let bytes = to_bytes(&key(b"a"), &rewritten);
            prop_assert_eq!(from_bytes(&key(b"b"), &bytes), None, "another image's");
            prop_assert_eq!(from_bytes(&key(b"a"), &bytes), Some(rewritten));
        }

        #[test]
        fn nothing_that_was_changed_or_cut_short_is_read(
            rewritten in any_rewritten(), at: prop::sample::Index, by in 1_u8..,
        ) {
            let bytes = to_bytes(&key(b"a"), &rewritten);
            let at = at.index(bytes.len());
            let mut changed = bytes.clone();
            changed[at] ^= by;
            prop_assert_eq!(from_bytes(&key(b"a"), &changed), None);
            prop_assert_eq!(from_bytes(&key(b"a"), &bytes[..at]), None);
        }

        #[test]
        fn bytes_with_a_right_digest_are_read_or_refused(
            rewritten in any_rewritten(), at: prop::sample::Index, new: u32,
        ) {
            let mut body = to_bytes(&key(b"a"), &rewritten);
            body.truncate(body.len() - DIGEST_BYTES);
            let at = at.index(body.len());
            let end = (at + 4).min(body.len());
            body[at..end].copy_from_slice(&new.to_le_bytes()[..end - at]);
            // Neither a panic nor an allocation of what a length claims.
            let _ = from_bytes(&key(b"a"), &sealed(body));
        }
    }

    #[test]
    fn a_key_is_of_all_that_it_depends_on() {
        let one = Key::new(b"image", 90, KernelForm::ByClaims);
        assert_eq!(one, Key::new(b"image", 90, KernelForm::ByClaims));
        assert_ne!(one, Key::new(b"imagf", 90, KernelForm::ByClaims));
        assert_ne!(one, Key::new(b"image", 89, KernelForm::ByClaims));
        assert_ne!(one, Key::new(b"image", 90, KernelForm::ByOffset));
        assert_eq!(one.to_string().len(), 64);
    }
}
