//! What must hold for any text that is given to the PTX rewriter.

use tally_rewriter::ptx;
use tally_rewriter::{KernelForm, control};

/// Bytes that one transformed kernel may add, apart from its own text: the longest prelude
/// and some names.
const ADDED_BYTES_MAX: usize = 8192;

/// Rewriting neither panics nor loses anything, its result is refused when it is given
/// again, and text that the interpreter could read it can still read.
pub fn ptx(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let module = tally_softcuda_vm::Module::parse(source).ok();
    for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
        let Ok(plan) = ptx::plan(source, form, None) else { continue };
        let edits = plan.edits.clone();
        let transformed = plan.apply(source);
        let text = std::str::from_utf8(&transformed.image).expect("UTF-8 stays UTF-8");
        assert_eq!(ptx::undo(source, text, &edits).as_deref(), Some(source));
        if transformed.kernels.is_empty() {
            assert_eq!(text, source);
            continue;
        }
        let names: usize = transformed.kernels.iter().map(|k| 64 * k.name.len()).sum();
        let reads = 64 * source.len() / "%ctaid".len();
        let most = 2 * source.len() + reads + names + transformed.kernels.len() * ADDED_BYTES_MAX;
        assert!(text.len() <= most, "{} bytes of {}", text.len(), source.len());
        for kernel in &transformed.kernels {
            assert!(kernel.control_offset.is_multiple_of(8));
            let end = kernel.control_offset + control::CONTROL_BYTES;
            assert!(end <= ptx::PARAM_BYTES_MAX);
        }
        let again: Vec<&str> = transformed.kernels.iter().map(|k| k.name.as_str()).collect();
        let again = ptx::plan(text, form, Some(&again)).expect("it was readable");
        assert!(again.kernels.is_empty() && again.edits.is_empty());
        assert_eq!(again.refused.len(), transformed.kernels.len());
        if let Some(module) = &module {
            let seen: Vec<&str> = module.entry_names().collect();
            assert!(transformed.kernels.iter().all(|k| seen.contains(&k.name.as_str())));
            let parsed = tally_softcuda_vm::Module::parse(text);
            assert!(parsed.is_ok(), "{:?}\n{text}", parsed.err());
        }
    }
}
