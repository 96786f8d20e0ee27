//! The loads of code that a best-effort program makes.
//!
//! Identity must be that of the bytes that the driver read. Images that may change meanwhile, and files, are
//! copied first and loaded from the copy. If the driver does not take it, the program's own call is made as it came.

use crate::bypass;
use crate::images::{self, Options, Snapshot};
use crate::{link, names, quiesce, span, state};
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS, driver};

/// Options of a load that is tried with a copy first, at most: their values are kept meanwhile.
const OPTIONS_MAX: usize = 32;

/// Loads an image from memory by `load`, which takes the image.
///
/// # Safety
/// The program's arguments; `load` is the driver's function.
unsafe fn from_memory(
    handle: *mut Ptr,
    is_library: bool,
    image: *const u8,
    options: Options,
    load: impl Fn(*const u8) -> CuResult,
) -> CuResult {
    let load = |image| match is_library {
        true => quiesce::while_open(|| load(image)),
        false => quiesce::waiting(|| load(image)),
    };
    if !state::is_best_effort() {
        return load(image);
    }
    if !may_read() {
        let result = load(image);
        if result == SUCCESS {
            names::loaded(handle, is_library, 0);
        }
        return result;
    }
    if let Some(values) = Values::of(options)
        && let Some(copy) = Snapshot::of(image)
    {
        let result = load(copy.image());
        if result == SUCCESS {
            // SAFETY: the driver took them.
            names::loaded(handle, is_library, unsafe { copy.loaded(options) });
            return result;
        }
        values.restore();
    }
    let stays = images::is_in_library(image);
    let result = load(image);
    if result == SUCCESS {
        // SAFETY: the driver took them.
        let digest = if stays { unsafe { images::loaded(image, options) } } else { 0 };
        names::loaded(handle, is_library, digest);
    }
    result
}

/// Whether the shim may look at what is loaded: it makes system calls that a filter of the program's may forbid.
fn may_read() -> bool {
    !bypass::is_found() && !link::have_filters_changed()
}

/// The values of a load's options, some of which the driver writes.
struct Values {
    at: *mut usize,
    kept: [usize; OPTIONS_MAX],
    count: usize,
}

impl Values {
    fn of(options: Options) -> Option<Self> {
        let at = options.values.cast_mut().cast::<usize>();
        let count = if at.is_null() { 0 } else { options.count as usize };
        let mut kept = [0; OPTIONS_MAX];
        if count > kept.len() {
            return None;
        }
        // SAFETY: the program's array, of this length.
        kept.iter_mut().take(count).enumerate().for_each(|(i, kept)| *kept = unsafe { *at.add(i) });
        Some(Self { at, kept, count })
    }

    /// Writes back the values that the program passed.
    fn restore(&self) {
        for (i, value) in self.kept[..self.count].iter().enumerate() {
            // SAFETY: the program's array, which the driver has written, too.
            unsafe { self.at.add(i).write(*value) };
        }
    }
}

/// `cuModuleLoad`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn module_load(
    real: unsafe extern "C" fn(*mut Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    path: *const c_char,
) -> CuResult {
    // SAFETY: the caller's path.
    if let (Some((bytes, name)), Some(load)) = (unsafe { read_file(path) }, driver().module_load) {
        // SAFETY: a whole image with a NUL behind it, the caller's out-pointer.
        let result = quiesce::waiting(|| unsafe { load(module, bytes.as_ptr()) });
        if result == SUCCESS {
            // SAFETY: none.
            let digest = unsafe { images::loaded_bytes(bytes, name, Options::NONE) };
            names::loaded(module, false, digest);
            return result;
        }
    }
    // SAFETY: the caller's arguments.
    quiesce::waiting(|| unsafe { real(module, path) })
}

/// `cuModuleLoadData`, `cuModuleLoadFatBinary`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn module_load_data(
    real: unsafe extern "C" fn(*mut Ptr, *const u8) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    image: *const u8,
) -> CuResult {
    // SAFETY: the caller's arguments.
    unsafe { from_memory(module, false, image, Options::NONE, |image| real(module, image)) }
}

/// `cuModuleLoadDataEx`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn module_load_data_ex(
    real: unsafe extern "C" fn(*mut Ptr, *const u8, c_uint, *mut c_int, *mut Ptr) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    image: *const u8,
    count: c_uint,
    names: *mut c_int,
    values: *mut Ptr,
) -> CuResult {
    let options = Options { count, names, values };
    // SAFETY: the caller's arguments.
    unsafe {
        from_memory(module, false, image, options, |image| {
            real(module, image, count, names, values)
        })
    }
}

/// `cuLibraryLoadData`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn library_load_data(
    real: unsafe extern "C" fn(
        *mut Ptr,
        *const u8,
        *mut c_int,
        *mut Ptr,
        c_uint,
        Ptr,
        Ptr,
        c_uint,
    ) -> CuResult,
    _per_thread: bool,
    library: *mut Ptr,
    image: *const u8,
    names: *mut c_int,
    values: *mut Ptr,
    count: c_uint,
    library_options: Ptr,
    library_values: Ptr,
    library_count: c_uint,
) -> CuResult {
    let options = Options { count, names, values };
    // SAFETY: the caller's arguments.
    let is_copy_alike = unsafe { only_preserves(library_options, library_count) };
    // SAFETY: the caller's arguments; without the one option, the driver keeps a copy.
    let load = |given: *const u8| unsafe {
        let left = if is_copy_alike && given != image { 0 } else { library_count };
        real(library, given, names, values, count, library_options, library_values, left)
    };
    let is_read = || state::is_best_effort() && may_read();
    if !is_copy_alike && is_read() && !images::is_in_library(image) {
        let result = quiesce::while_open(|| load(image));
        if result == SUCCESS {
            crate::names::loaded(library, true, 0);
        }
        return result;
    }
    // SAFETY: the caller's arguments.
    unsafe { from_memory(library, true, image, options, load) }
}

/// Whether a library's options say no more than whether the program keeps the image until it unloads the library,
/// which is a hint. cuBLAS gives it.
///
/// # Safety
/// `count` options, or null.
unsafe fn only_preserves(options: Ptr, count: c_uint) -> bool {
    const CU_LIBRARY_BINARY_IS_PRESERVED: c_int = 1;
    // SAFETY: the first of them, by this function's contract.
    let first = || unsafe { *options.cast::<c_int>() };
    count == 0 || count == 1 && !options.is_null() && first() == CU_LIBRARY_BINARY_IS_PRESERVED
}

/// `cuLibraryLoadFromFile`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn library_load_file(
    real: unsafe extern "C" fn(
        *mut Ptr,
        *const c_char,
        *mut c_int,
        *mut Ptr,
        c_uint,
        Ptr,
        Ptr,
        c_uint,
    ) -> CuResult,
    _per_thread: bool,
    library: *mut Ptr,
    path: *const c_char,
    names: *mut c_int,
    values: *mut Ptr,
    count: c_uint,
    library_options: Ptr,
    library_values: Ptr,
    library_count: c_uint,
) -> CuResult {
    let options = Options { count, names, values };
    if library_count == 0
        && let Some(kept) = Values::of(options)
        // SAFETY: the caller's path.
        && let (Some((bytes, name)), Some(load)) = (unsafe { read_file(path) }, driver().library_load)
    {
        let null = std::ptr::null_mut();
        // SAFETY: a whole image with a NUL behind it, which the driver copies; the caller's other arguments.
        let result = quiesce::while_open(|| unsafe {
            load(library, bytes.as_ptr(), names, values, count, null, null, 0)
        });
        if result == SUCCESS {
            // SAFETY: the driver took them.
            let digest = unsafe { images::loaded_bytes(bytes, name, options) };
            crate::names::loaded(library, true, digest);
            return result;
        }
        kept.restore();
    }
    // SAFETY: the caller's arguments.
    quiesce::while_open(|| unsafe {
        real(library, path, names, values, count, library_options, library_values, library_count)
    })
}

/// A file's bytes with a NUL behind them, and its name. `None` if it is not to be looked at, or no whole image: the
/// driver, which is told no length, would read past them.
///
/// # Safety
/// A NUL-terminated path or null.
unsafe fn read_file(path: *const c_char) -> Option<(Vec<u8>, Option<String>)> {
    if path.is_null() || !state::is_best_effort() || !may_read() {
        return None;
    }
    // SAFETY: by this function's contract.
    let path = std::path::Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
    // Only looked at first: to open a pipe would be seen at its other end.
    let seen = File::options().read(true).custom_flags(libc::O_PATH).open(path).ok()?;
    let meta = seen.metadata().ok()?;
    if !meta.is_file() || meta.len() > span::IMAGE_BYTES_MAX as u64 {
        return None;
    }
    // The thread may have descriptors of its own.
    let file = File::open(format!("/proc/thread-self/fd/{}", seen.as_raw_fd())).ok()?;
    let opened = file.metadata().ok()?;
    if (opened.dev(), opened.ino()) != (meta.dev(), meta.ino()) {
        return None;
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(meta.len() as usize + 1).ok()?;
    file.take(meta.len()).read_to_end(&mut bytes).ok()?;
    // A text may end with a NUL, or have more behind it.
    if !bytes.starts_with(&span::FATBIN_MAGIC) && !bytes.starts_with(&span::ELF_MAGIC) {
        let text = bytes.iter().position(|byte| *byte == 0);
        text.into_iter().for_each(|end| bytes.truncate(end));
    }
    if !span::is_whole(&bytes) {
        return None;
    }
    bytes.push(0);
    Some((bytes, path.file_name().map(|name| name.to_string_lossy().into_owned())))
}
