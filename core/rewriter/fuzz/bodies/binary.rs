//! What must hold for any bytes: no panic, no endless loop, and that a rewrite passes
//! its own check. Shared by the fuzz targets and `tests/fuzz_binary.rs`.

use tally_rewriter::fatbin::Fatbin;
use tally_rewriter::{KernelForm, TransformRefusal, cubin};

/// What is unpacked of an entry at most, so that an execution stays short.
const UNPACKED_BYTES_MAX: u64 = 16 << 20;
/// A patched kernel is larger by at most this.
const PATCH_BYTES_MAX: usize = 8 << 10;

/// Every entry of a container, its payload unpacked and looked into.
pub fn fatbin(data: &[u8]) {
    let Ok(container) = Fatbin::parse(data) else { return };
    for arch in [75, 80, 90, 103] {
        let _ = container.choose(arch);
    }
    for entry in container.entries() {
        if entry.unpacked_bytes() > UNPACKED_BYTES_MAX {
            continue;
        }
        if let Ok(payload) = entry.payload()
            && payload.starts_with(b"\x7fELF")
        {
            cubin(&payload);
        }
    }
}

/// A cubin: read, patched, compared, and not given a second prelude.
pub fn cubin(data: &[u8]) {
    for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
        let Ok(rewritten) = cubin::rewrite(data, form, None) else { continue };
        // Alignments between sections count too.
        let aligned: usize = cubin::Cubin::parse(data).map_or(0, |c| c.sections.len() << 16);
        let most = 2 * data.len() + rewritten.kernels.len() * PATCH_BYTES_MAX + aligned + (1 << 12);
        let bytes = rewritten.image.len();
        assert!(bytes <= most, "{form:?}: {bytes} bytes from {}", data.len());
        cubin::check(data, &rewritten.image).expect("a patch passes its check");
        for kernel in &rewritten.kernels {
            assert!(kernel.cluster.is_none_or(|dims| dims.iter().all(|d| d.is_power_of_two())));
        }
        if form == KernelForm::ByClaims {
            let again = cubin::rewrite(&rewritten.image, form, None).expect("it can be read");
            for kernel in &rewritten.kernels {
                assert_eq!(again.kernel(&kernel.name), Err(TransformRefusal::FirstInstruction));
            }
        }
    }
}
