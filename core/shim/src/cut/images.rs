//! The code images that a program loads, kept until a kernel of theirs is to be cut.
//!
//! Most lie in a library's read-only data, where they stay: only their place is
//! noted. Others (compiled at run time) are copied, up to a bound in all. Must never
//! read an image that may be gone: a library is pinned and looked up again first.

use super::guarded::Guarded;
use crate::names;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use tally_kernels::Refusal;

/// Bytes copied, in all.
const COPIED_BYTES_MAX: usize = 512 << 20;
/// Images noted.
const IMAGES_MAX: usize = 65_536;
/// The longest image looked at.
const IMAGE_BYTES_MAX: u64 = 1 << 30;

enum Place {
    /// The bytes, and the library that loaded them.
    Copied(Arc<[u8]>, Option<String>),
    InLibrary {
        library: CString,
        base: usize,
        start: usize,
        bytes: usize,
    },
    File(PathBuf),
}

struct Images {
    by_hash: BTreeMap<u64, Place>,
    copied_bytes: usize,
}

static IMAGES: Guarded<Images> = Guarded::new(Images { by_hash: BTreeMap::new(), copied_bytes: 0 });

/// The library that an address belongs to, and where it is loaded.
fn library_of(address: usize) -> Option<(CString, usize)> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: only looks the address up; the structure is filled on success.
    unsafe {
        if libc::dladdr(address as *const c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        let info = info.assume_init();
        if info.dli_fname.is_null() {
            return None;
        }
        Some((CStr::from_ptr(info.dli_fname).to_owned(), info.dli_fbase as usize))
    }
}

/// The program loaded an image, of this hash, from memory.
///
/// # Safety
/// An image that the driver has just accepted.
pub unsafe fn loaded(hash: u64, image: *const u8) {
    // SAFETY: by this function's contract.
    let Some((start, bytes)) = (unsafe { names::whole_image(image) }) else { return };
    if bytes > IMAGE_BYTES_MAX {
        return;
    }
    let bytes = bytes as usize;
    let wanted = IMAGES
        .with(|images| images.by_hash.len() < IMAGES_MAX && !images.by_hash.contains_key(&hash));
    if !wanted {
        return;
    }
    // Outside the lock: all of these may wait for the loader's, and whoever holds that one
    // may run a library's constructors, which load images.
    let in_library = library_of(start as usize);
    let copied_bytes = if in_library.is_some() { 0 } else { bytes };
    let fits = IMAGES.with(|images| {
        let fits = images.copied_bytes + copied_bytes <= COPIED_BYTES_MAX;
        images.copied_bytes += if fits { copied_bytes } else { 0 };
        fits
    });
    if !fits {
        return;
    }
    let place = match in_library {
        Some((library, base)) => Place::InLibrary { library, base, start: start as usize, bytes },
        None => {
            // SAFETY: its own tables give the length.
            let copy = unsafe { std::slice::from_raw_parts(start, bytes) }.to_vec();
            Place::Copied(copy.into(), caller())
        }
    };
    IMAGES.with(|images| {
        if let Entry::Vacant(free) = images.by_hash.entry(hash) {
            free.insert(place);
        } else {
            // Another thread was faster.
            images.copied_bytes -= copied_bytes;
        }
    });
}

/// The program loaded an image from a file.
pub fn loaded_file(hash: u64, path: &CStr) {
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()));
    IMAGES.with(|images| {
        if images.by_hash.len() < IMAGES_MAX {
            images.by_hash.entry(hash).or_insert(Place::File(path));
        }
    });
}

/// File name of the library whose code called us: the nearest that is neither this one
/// nor the driver.
fn caller() -> Option<String> {
    let mut frames = [std::ptr::null_mut(); 24];
    // SAFETY: fills at most as many as there is room for. Only where an image is loaded,
    // a call that compiles or copies code.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), frames.len() as c_int) };
    let own = library_of(caller as *const () as usize)?;
    let count = usize::try_from(count).unwrap_or(0).min(frames.len());
    let libraries = frames[..count].iter().filter_map(|f| library_of(*f as usize));
    let mut names = libraries.filter(|l| *l != own).map(|(path, _)| {
        let path = path.to_string_lossy();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    });
    names.find(|name| !name.starts_with("libcuda."))
}

/// Whether an image is at hand, and the file name of the library that holds or loaded
/// it, if that is known.
pub fn library(hash: u64) -> Result<Option<String>, Refusal> {
    IMAGES.with(|images| match images.by_hash.get(&hash) {
        Some(Place::InLibrary { library, .. }) => {
            let path = library.to_string_lossy();
            Ok(Some(path.rsplit('/').next().unwrap_or_default().to_owned()))
        }
        Some(Place::File(path)) => Ok(path.file_name().map(|n| n.to_string_lossy().into_owned())),
        Some(Place::Copied(_, caller)) => Ok(caller.clone()),
        None => Err(Refusal::ImageGone),
    })
}

/// Use an image's bytes.
///
/// # Errors
/// [`Refusal::ImageGone`] if it is not there any more.
pub fn with<R>(hash: u64, use_it: impl FnOnce(&[u8]) -> R) -> Result<R, Refusal> {
    // The lock is held over nothing that takes time, or another lock: see `loaded`.
    let found = IMAGES.with(|images| match images.by_hash.get(&hash) {
        Some(Place::Copied(bytes, _)) => Some(Place::Copied(bytes.clone(), None)),
        Some(Place::File(path)) => Some(Place::File(path.clone())),
        Some(Place::InLibrary { library, base, start, bytes }) => Some(Place::InLibrary {
            library: library.clone(),
            base: *base,
            start: *start,
            bytes: *bytes,
        }),
        None => None,
    });
    match found.ok_or(Refusal::ImageGone)? {
        Place::Copied(bytes, _) => Ok(use_it(&bytes)),
        Place::File(path) => {
            let bytes = std::fs::read(path).map_err(|_| Refusal::ImageGone)?;
            Ok(use_it(&bytes))
        }
        Place::InLibrary { library, base, start, bytes } => {
            pin(&library);
            if library_of(start).is_none_or(|(l, b)| l != library || b != base) {
                return Err(Refusal::ImageGone);
            }
            // SAFETY: in a library that was pinned and then found where it was.
            let image = unsafe { std::slice::from_raw_parts(start as *const u8, bytes) };
            Ok(use_it(image))
        }
    }
}

/// Keep a library loaded for good.
fn pin(library: &CStr) {
    const FLAGS: c_int = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: it is loaded already: nothing of it runs. Never closed.
    let _ = unsafe { libc::dlopen(library.as_ptr(), FLAGS) };
}

/// Only in a forked child.
pub fn reset() {
    IMAGES.reset(Images { by_hash: BTreeMap::new(), copied_bytes: 0 });
}
