//! What C callers hand in, as types: out-pointers, in-pointers and strings
//! that check for null, and the boundary that no panic crosses.
//!
//! Values of these types only ever come from a C caller through an exported
//! function's argument list. The driver API obliges the caller to pass null or
//! a valid pointer; that obligation is what every `unsafe` here rests on.

use crate::error::{CuError, CuResult};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an exported function's body: success is 0, a panic is
/// `CUDA_ERROR_UNKNOWN`.
pub(crate) fn boundary(body: impl FnOnce() -> CuResult) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(CuError(code))) => code,
        Err(_) => {
            crate::config::log(format_args!("a call panicked"));
            CuError::UNKNOWN.0
        }
    }
}

/// A pointer that the caller wants something written to.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Writes `value`.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the pointer is null.
    pub(crate) fn set(&self, value: T) -> CuResult {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        self.set_if(value);
        Ok(())
    }

    /// Writes `value` unless the pointer is null.
    pub(crate) fn set_if(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid for a write by the API's contract.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Fails with `INVALID_VALUE` if the pointer is null.
    pub(crate) fn check(&self) -> CuResult {
        if self.0.is_null() { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }

    /// Whether the caller passed null.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// What the pointer holds now (in-out arguments).
    pub(crate) fn get(&self) -> CuResult<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// Writes as many of `values` as `capacity` holds.
    pub(crate) fn set_slice(&self, values: impl IntoIterator<Item = T>, capacity: usize) {
        if self.0.is_null() {
            return;
        }
        for (i, value) in values.into_iter().take(capacity).enumerate() {
            // SAFETY: the caller promises room for `capacity` values.
            unsafe { self.0.add(i).write_unaligned(value) };
        }
    }

    /// The same pointer as another type, for attributes whose type depends on
    /// their number.
    pub(crate) fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes `text` cut to `capacity` bytes, its terminating zero included.
    pub(crate) fn set_text(&self, text: &str, capacity: usize) -> CuResult {
        self.check()?;
        let room = capacity.checked_sub(1).ok_or(CuError::INVALID_VALUE)?;
        let bytes = text.bytes().take(room).chain(std::iter::once(0));
        self.set_slice(bytes.map(|b| b as c_char), capacity);
        Ok(())
    }
}

/// A pointer to something the caller passes in.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> In<T> {
    pub(crate) fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// The value pointed to.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the pointer is null.
    pub(crate) fn get(&self) -> CuResult<T>
    where
        T: Copy,
    {
        self.at(0)
    }

    /// The `index`-th of an array.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the pointer is null.
    pub(crate) fn at(&self, index: usize) -> CuResult<T>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promises at least `index + 1` values.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// A copy of `count` values; empty if `count` is 0.
    pub(crate) fn to_vec(&self, count: usize) -> CuResult<Vec<T>>
    where
        T: Copy,
    {
        (0..count).map(|i| self.at(i)).collect()
    }

    pub(crate) fn cast<U>(&self) -> In<U> {
        In(self.0.cast())
    }
}

impl In<u8> {
    /// The bytes before the first zero, without it.
    pub(crate) fn zero_terminated(&self) -> CuResult<&[u8]> {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the caller promises a zero-terminated image that outlives
        // the call.
        Ok(unsafe { CStr::from_ptr(self.0.cast()) }.to_bytes())
    }

    /// The first `count` bytes.
    pub(crate) fn bytes(&self, count: usize) -> CuResult<&[u8]> {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the caller promises that many bytes that outlive the call.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

impl In<c_char> {
    /// A C string.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is null or not UTF-8.
    pub(crate) fn text(&self) -> CuResult<&str> {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the caller promises a C string that outlives the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| CuError::INVALID_VALUE)
    }
}

/// Declares exported functions: C ABI, unmangled, and guarded by [`boundary`].
/// Bodies return `CuResult`.
macro_rules! exports {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> u32 {
            $crate::ffi::boundary(|| $body)
        }
    )*};
}
pub(crate) use exports;

/// Declares functions that exist twice: under the plain name, where a null
/// stream is the legacy one, and under the name with a suffix, where it is the
/// calling thread's. The body sees the difference as `$default`.
macro_rules! exports_per_thread {
    ($($(#[$meta:meta])* fn $name:ident / $suffixed:ident |$default:ident| ($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> u32 {
            let $default = $crate::stream::NullStream::Legacy;
            $crate::ffi::boundary(|| $body)
        }
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $suffixed($($arg: $ty),*) -> u32 {
            let $default = $crate::stream::NullStream::PerThread;
            $crate::ffi::boundary(|| $body)
        }
    )*};
}
pub(crate) use exports_per_thread;
