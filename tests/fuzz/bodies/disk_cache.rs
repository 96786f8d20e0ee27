//! Files of the cache of rewritten kernels. A digest would keep a fuzzer from what is behind it, so it is put right.

use sha2::{Digest, Sha256};
use tally_rewriter::disk_cache::{Key, from_bytes, to_bytes};
use tally_rewriter::{KernelForm, Rewritten};

fn read(key: &Key, file: &[u8]) -> Option<Rewritten> {
    let read = from_bytes(key, file);
    if let Some(read) = &read {
        assert!(to_bytes(key, read) == file, "what is read is written alike");
    }
    read
}

/// No panic; what is read is written alike, and is of its key alone.
pub fn disk_cache(data: &[u8]) {
    let (key, other) =
        (Key::new(b"a", 90, KernelForm::ByClaims), Key::new(b"b", 90, KernelForm::ByClaims));
    let nothing =
        Rewritten { image: Vec::new(), is_ptx: false, kernels: Vec::new(), refused: Vec::new() };
    let digest = Sha256::new().finalize().len();
    // Up to where the rewritten image begins: magic and key.
    let written = to_bytes(&key, &nothing);
    let head = &written[..written.len() - digest - (1 + 4 + 4 + 8)];
    assert_eq!(read(&key, data), None, "nobody made its digest");
    let mut file = [head, data].concat();
    file.extend(Sha256::digest(&file));
    if let Some(rewritten) = read(&key, &file) {
        assert!(rewritten.kernels.len() + rewritten.refused.len() <= data.len());
        assert_eq!(read(&other, &file), None, "of another image");
        let at = data.len() % file.len();
        file[at] ^= 1;
        assert_eq!(read(&key, &file), None, "changed");
    }
}
