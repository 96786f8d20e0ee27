use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// What a host function is to do.
pub struct Call {
    pub word: &'static AtomicU32,
    pub value: u32,
    /// Fold `value` into the word, rather than set it.
    pub fold: bool,
}

/// The function, with a [`Call`].
pub extern "C" fn call(data: *mut c_void) {
    // SAFETY: the pointer that came with the function, to something that lives until all work
    // of the program has ended.
    let call = unsafe { &*data.cast::<Call>() };
    let value = if call.fold {
        call.word.load(SeqCst).wrapping_mul(31).wrapping_add(call.value)
    } else {
        call.value
    };
    call.word.store(value, SeqCst);
}
