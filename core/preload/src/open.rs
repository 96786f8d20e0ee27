//! `dlopen`, which tells the shim, and notes whether a library asked for `RTLD_DEEPBIND`: such a library finds the
//! driver's functions, and the C library's `dlsym`, before those of this library.
//!
//! The call then *jumps* to the real one with the caller's return address in place: the caller's search path
//! and namespace apply.

use crate::abi::DeepBind;
use crate::{load, objects};
use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Written before the library is opened.
pub static DEEP_BIND: DeepBind =
    DeepBind { objects: AtomicU64::new(0), unloaded: AtomicU64::new(u64::MAX) };

/// The real `dlopen`; 0: not found yet.
static REAL: AtomicUsize = AtomicUsize::new(0);

const DEEP: c_int = 8;

/// Replaces `dlopen` for the whole process.
///
/// # Safety
/// As the real one.
#[cfg_attr(preload, unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2:",
        "ret",
        route = sym route,
    )
}

/// What to jump to; 0 if there is nothing.
unsafe extern "C" fn route(file: *const c_char, flags: c_int) -> usize {
    if flags & DEEP != 0 && DEEP_BIND.objects.load(Relaxed) == 0 {
        let (objects, unloaded) = objects::counts();
        // Of threads that come here at once the first stores, before any of them goes on.
        let _ = DEEP_BIND.unloaded.compare_exchange(u64::MAX, unloaded, AcqRel, Relaxed);
        let _ = DEEP_BIND.objects.compare_exchange(0, objects + 1, AcqRel, Relaxed);
    }
    if let Some(shim) = load::loaded() {
        // SAFETY: the caller's arguments.
        unsafe { (shim.opens)(file, flags) };
    }
    real()
}

/// The real `dlopen`'s address; 0 if the process has none.
pub fn real() -> usize {
    match REAL.load(Acquire) {
        0 => {
            let at = objects::next(c"dlopen").unwrap_or(0);
            REAL.store(at, Release);
            at
        }
        at => at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_deep_binding_is_noted() {
        // SAFETY: NUL-terminated; `RTLD_LAZY`. The handles stay open.
        let open = |flags| unsafe { dlopen(c"libc.so.6".as_ptr(), flags) };
        let handle = open(1);
        assert!(!handle.is_null());
        assert_eq!(DEEP_BIND.objects.load(Relaxed), 0);
        assert_eq!(open(1 | DEEP), handle, "the real one's answer");
        assert_eq!(DEEP_BIND.objects.load(Relaxed), objects::counts().0 + 1);
    }
}
