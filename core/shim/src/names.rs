//! Kernel names: which kernel a function handle is.
//!
//! Handles are noted when the program looks them up; a launch only reads. The
//! table in the shared region is appended to and never changes, so the same
//! kernel loaded twice keeps its entry. Must never read more than a sample of an
//! image: some have hundreds of megabytes.

use crate::cu::{CuResult, Ptr, SUCCESS, driver};
use crate::cut::quiet;
use crate::handles::Handles;
use crate::lock::Lock;
use crate::{cut, state};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Relaxed, Release};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{KERNEL_SLOTS, KERNEL_UNKNOWN, fnv1a};

/// Function handles remembered.
const FUNCTIONS_MAX: usize = 16 * 1024;
/// Module and library handles remembered.
const MODULES_MAX: usize = 4096;
/// Pieces of an image that are hashed, and their size.
const SAMPLES: usize = 16;
const SAMPLE_BYTES: usize = 1024;
/// A text image (PTX) is read this far.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// Function or kernel handle to `owner tag << 32 | LOADED | index + 1`.
static FUNCTIONS: Handles<FUNCTIONS_MAX> = Handles::new();
/// Module or library handle to its image's hash (never 0).
static MODULES: Handles<MODULES_MAX> = Handles::new();
/// Hash of name and image to the entry's index + 1.
static ENTRIES: Handles<{ 2 * KERNEL_SLOTS }> = Handles::new();
/// Held by whoever writes to any of them.
static LOCK: Lock = Lock::new();

/// `KERNEL_UNKNOWN + 1` does not fit 32 bits: unknown is stored as 0 there, with
/// a tag that is never 0.
fn pack(owner: usize, index: u32) -> u64 {
    u64::from(tag(owner)) << 32 | u64::from(index.wrapping_add(1))
}

fn unpack(value: u64) -> u32 {
    ((value & (LOADED - 1)) as u32).wrapping_sub(1)
}

/// A handle with which something was done that loads its kernel into the context, if it was not.
const LOADED: u64 = 1 << 31;
const _: () = assert!((KERNEL_SLOTS as u64) < LOADED);

/// Quiet, if what is to be done with a handle may load its kernel.
fn quiet_to_load(function: Ptr) -> Option<quiet::Quiet> {
    let is_new = |value| value & LOADED == 0;
    FUNCTIONS.get(function as usize).is_some_and(is_new).then(quiet::of_call).flatten()
}

/// It was done.
fn loaded_now(function: Ptr) {
    let _held = LOCK.lock();
    if let Some(value) = FUNCTIONS.get(function as usize) {
        FUNCTIONS.insert(function as usize, value | LOADED);
    }
}

/// A short stand-in for an owner's handle.
fn tag(owner: usize) -> u32 {
    ((owner as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 | 1
}

/// The index of a function that is being launched.
#[inline]
pub fn index(function: Ptr) -> u32 {
    match FUNCTIONS.get(function as usize) {
        Some(value) => unpack(value),
        None => unseen(function),
    }
}

/// The index of a function, if it was noted.
pub fn known(function: usize) -> Option<u32> {
    FUNCTIONS.get(function).map(unpack)
}

/// It was found through a door that we do not watch: ask the driver, once.
#[cold]
fn unseen(function: Ptr) -> u32 {
    let Some(client) = state::client() else { return KERNEL_UNKNOWN };
    match driver().name_of(function as usize) {
        Some(name) => note(client, function as usize, 0, name.to_bytes(), 0),
        None => note(client, function as usize, 0, b"unknown", 0),
    }
}

/// Remember that `function`, of `owner`, is kernel `name` of `image`.
fn note(client: &ClientRegion, function: usize, owner: usize, name: &[u8], image: u64) -> u32 {
    let _held = LOCK.lock();
    let index = entry(client, name, image);
    let value = pack(owner, index);
    // Programs look the same one up again and again.
    if FUNCTIONS.get(function) != Some(value | LOADED) {
        FUNCTIONS.insert(function, value);
    }
    index
}

/// The table's entry for a kernel, new if need be. The caller holds the lock.
fn entry(client: &ClientRegion, name: &[u8], image: u64) -> u32 {
    let identity = (fnv1a(name) ^ image.rotate_left(17)).max(1) as usize;
    if let Some(known) = ENTRIES.get(identity) {
        return (known - 1) as u32;
    }
    let next = client.kernel_count.load(Relaxed);
    let Some(entry) = client.kernels.get(next as usize) else { return KERNEL_UNKNOWN };
    entry.publish(name, image);
    client.kernel_count.store(next + 1, Release);
    ENTRIES.insert(identity, u64::from(next) + 1);
    next
}

/// Remember an image loaded from memory.
///
/// # Safety
/// The driver has taken the image, if `result` is success.
unsafe fn loaded_data(result: CuResult, module: *mut Ptr, image: *const u8) -> CuResult {
    loaded(result, module, || {
        // SAFETY: by this function's contract.
        let hash = unsafe { hash_image(image) };
        if cut::is_enabled() {
            // SAFETY: as above.
            unsafe { cut::images::loaded(hash.max(1), image) };
        }
        hash
    })
}

/// Remember an image loaded from a file.
///
/// # Safety
/// A NUL-terminated path or null.
unsafe fn loaded_file(result: CuResult, module: *mut Ptr, path: *const c_char) -> CuResult {
    loaded(result, module, || {
        // SAFETY: by this function's contract.
        let hash = unsafe { hash_file(path) };
        if cut::is_enabled() && !path.is_null() {
            // SAFETY: as above.
            cut::images::loaded_file(hash.max(1), unsafe { CStr::from_ptr(path) });
        }
        hash
    })
}

/// Remember a loaded image.
fn loaded(result: CuResult, module: *mut Ptr, hash: impl FnOnce() -> u64) -> CuResult {
    if result == SUCCESS && !module.is_null() && state::client().is_some() {
        let hash = hash().max(1);
        let _held = LOCK.lock();
        // SAFETY: the driver has just written it.
        MODULES.insert(unsafe { *module } as usize, hash);
    }
    result
}

fn hash_pieces(length: u64, read: impl Fn(u64, &mut [u8]) -> usize) -> u64 {
    let mut hash = fnv1a(&length.to_le_bytes());
    let mut piece = [0_u8; SAMPLE_BYTES];
    let step = (length / SAMPLES as u64).max(SAMPLE_BYTES as u64);
    let mut at = 0;
    while at < length {
        let wanted = (length - at).min(SAMPLE_BYTES as u64) as usize;
        let got = read(at, &mut piece[..wanted]).min(wanted);
        hash = hash.rotate_left(5) ^ fnv1a(&piece[..got]);
        at += step;
    }
    hash
}

/// Hash an image in memory, whose length its own header says. 0 if it is nothing known.
///
/// # Safety
/// An image that the driver has just accepted.
unsafe fn hash_image(image: *const u8) -> u64 {
    if image.is_null() {
        return 0;
    }
    // SAFETY: every kind of image has at least these bytes, or a NUL within them
    // at which reading stops.
    let Some(length) = (unsafe { image_length(image, 0) }) else { return 0 };
    // SAFETY: as above.
    let start = unsafe { image_start(image) };
    hash_pieces(length, |at, piece| {
        // SAFETY: within the length that the image's header gives.
        unsafe { start.add(at as usize).copy_to_nonoverlapping(piece.as_mut_ptr(), piece.len()) };
        piece.len()
    })
}

/// `fatbinData`'s wrapper: what `cuModuleLoadFatBinary` and cudart pass.
const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();
/// A fat binary.
const FATBIN_MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();

unsafe fn starts_with(image: *const u8, bytes: &[u8]) -> bool {
    // SAFETY: stops at the first difference, so never past a text's NUL.
    bytes.iter().enumerate().all(|(i, b)| unsafe { *image.add(i) } == *b)
}

unsafe fn word<const N: usize>(image: *const u8, at: usize) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the caller knows that the header is at least this long.
    unsafe { image.add(at).copy_to_nonoverlapping(bytes.as_mut_ptr(), N) };
    u64::from_le_bytes(bytes)
}

unsafe fn image_start(image: *const u8) -> *const u8 {
    // SAFETY: the wrapper's third field points to the fat binary.
    if unsafe { starts_with(image, &WRAPPER_MAGIC) } {
        // SAFETY: as above.
        return unsafe { word::<8>(image, 8) } as *const u8;
    }
    image
}

/// The end of what an ELF file's header tables and sections reach.
unsafe fn elf_length(image: *const u8) -> u64 {
    // SAFETY: the tables of a file that the driver accepted.
    unsafe {
        let table = |offset: usize, size: usize, count: usize| {
            (word::<8>(image, offset), word::<2>(image, size), word::<2>(image, count))
        };
        // e_phoff, e_phentsize, e_phnum; e_shoff, e_shentsize, e_shnum.
        let (segments, segment_bytes, segment_count) = table(32, 54, 56);
        let (sections, section_bytes, section_count) = table(40, 58, 60);
        let mut end = sections + section_bytes * section_count;
        if segment_count > 0 {
            end = end.max(segments + segment_bytes * segment_count);
        }
        for index in 0..if section_bytes == 64 { section_count } else { 0 } {
            let header = image.add((sections + index * section_bytes) as usize);
            // SHT_NOBITS has no bytes: sh_type, sh_offset, sh_size.
            if word::<4>(header, 4) != 8 {
                end = end.max(word::<8>(header, 24).saturating_add(word::<8>(header, 32)));
            }
        }
        end
    }
}

unsafe fn image_length(image: *const u8, depth: u32) -> Option<u64> {
    // SAFETY: all reads are of a header of the kind that the magic says, in an
    // image that the driver accepted.
    unsafe {
        if starts_with(image, &WRAPPER_MAGIC) {
            let inner = image_start(image);
            return if inner.is_null() || depth > 0 { None } else { image_length(inner, 1) };
        }
        if starts_with(image, &FATBIN_MAGIC) {
            // magic, version u16, header size u16, size of the rest u64.
            return Some(word::<2>(image, 6) + word::<8>(image, 8));
        }
        if starts_with(image, b"\x7fELF\x02") {
            return Some(elf_length(image));
        }
        Some((0..TEXT_BYTES_MAX).take_while(|i| *image.add(*i) != 0).count() as u64)
    }
}

/// Where an image begins and how long it is, whatever wraps it.
///
/// # Safety
/// An image that the driver has just accepted.
pub unsafe fn whole_image(image: *const u8) -> Option<(*const u8, u64)> {
    if image.is_null() {
        return None;
    }
    // SAFETY: as in `hash_image`.
    unsafe {
        let start = image_start(image);
        let binary = starts_with(start, &FATBIN_MAGIC) || starts_with(start, b"\x7fELF\x02");
        if binary {
            return Some((start, image_length(image, 0)?));
        }
        // A text ends with a NUL.
        Some((start, CStr::from_ptr(start.cast()).to_bytes().len() as u64))
    }
}

/// Hash a file; 0 if it cannot be read.
///
/// # Safety
/// A NUL-terminated path or null.
unsafe fn hash_file(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: by this function's contract.
    let path = unsafe { CStr::from_ptr(path) };
    let Ok(file) = std::fs::File::open(std::ffi::OsStr::from_bytes(path.to_bytes())) else {
        return 0;
    };
    let Ok(length) = file.metadata().map(|m| m.len()) else { return 0 };
    hash_pieces(length, |at, piece| file.read_at(piece, at).unwrap_or(0))
}

/// `cuModuleLoad`.
///
/// # Safety
/// As the driver's.
pub unsafe fn module_load(
    real: unsafe extern "C" fn(*mut Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    path: *const c_char,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    unsafe { loaded_file(real(module, path), module, path) }
}

/// `cuModuleLoadData`, `cuModuleLoadFatBinary`.
///
/// # Safety
/// As the driver's.
pub unsafe fn module_load_data(
    real: unsafe extern "C" fn(*mut Ptr, *const u8) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    image: *const u8,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    unsafe { loaded_data(real(module, image), module, image) }
}

/// `cuModuleLoadDataEx`.
///
/// # Safety
/// As the driver's.
pub unsafe fn module_load_data_ex(
    real: unsafe extern "C" fn(*mut Ptr, *const u8, c_uint, Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    image: *const u8,
    count: c_uint,
    options: Ptr,
    values: Ptr,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(module, image, count, options, values) };
    // SAFETY: the driver took it.
    unsafe { loaded_data(result, module, image) }
}

/// `cuLibraryLoadData`.
///
/// # Safety
/// As the driver's.
#[allow(clippy::too_many_arguments)]
pub unsafe fn library_load_data(
    real: unsafe extern "C" fn(*mut Ptr, *const u8, Ptr, Ptr, c_uint, Ptr, Ptr, c_uint) -> CuResult,
    _per_thread: bool,
    library: *mut Ptr,
    image: *const u8,
    a: Ptr,
    b: Ptr,
    c: c_uint,
    d: Ptr,
    e: Ptr,
    f: c_uint,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(library, image, a, b, c, d, e, f) };
    // SAFETY: the driver took it.
    unsafe { loaded_data(result, library, image) }
}

/// `cuLibraryLoadFromFile`.
///
/// # Safety
/// As the driver's.
#[allow(clippy::too_many_arguments)]
pub unsafe fn library_load_file(
    real: unsafe extern "C" fn(
        *mut Ptr,
        *const c_char,
        Ptr,
        Ptr,
        c_uint,
        Ptr,
        Ptr,
        c_uint,
    ) -> CuResult,
    _per_thread: bool,
    library: *mut Ptr,
    path: *const c_char,
    a: Ptr,
    b: Ptr,
    c: c_uint,
    d: Ptr,
    e: Ptr,
    f: c_uint,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(library, path, a, b, c, d, e, f) };
    // SAFETY: the driver took it.
    unsafe { loaded_file(result, library, path) }
}

/// `cuModuleUnload`, `cuLibraryUnload`.
///
/// # Safety
/// As the driver's.
pub unsafe fn unload(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    module: Ptr,
) -> CuResult {
    // First: afterwards another thread may get the same handles.
    if state::client().is_some() {
        let mine = tag(module as usize);
        if cut::is_enabled() {
            let is_mine = |f| FUNCTIONS.get(f).is_some_and(|value| (value >> 32) as u32 == mine);
            cut::kernels::forget_functions(is_mine);
        }
        let _held = LOCK.lock();
        MODULES.remove(module as usize);
        FUNCTIONS.retain(|value| (value >> 32) as u32 != mine);
    }
    // SAFETY: the caller's arguments.
    unsafe { real(module) }
}

/// `cuModuleGetFunction`, `cuLibraryGetKernel`.
///
/// # Safety
/// As the driver's.
pub unsafe fn get_function(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    function: *mut Ptr,
    module: Ptr,
    name: *const c_char,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(function, module, name) };
    if result == SUCCESS
        && !function.is_null()
        && !name.is_null()
        && let Some(client) = state::client()
    {
        let image = MODULES.get(module as usize).unwrap_or(0);
        // SAFETY: the driver has read the one and written the other.
        let (name, handle) = unsafe { (CStr::from_ptr(name), *function) };
        note(client, handle as usize, module as usize, name.to_bytes(), image);
    }
    result
}

/// `cuLibraryGetModule`: the module has its library's image.
///
/// # Safety
/// As the driver's.
pub unsafe fn library_get_module(
    real: unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    library: Ptr,
) -> CuResult {
    let _quiet = quiet::of_call();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(module, library) };
    match MODULES.get(library as usize) {
        Some(hash) => loaded(result, module, || hash),
        None => result,
    }
}

/// `cuKernelGetFunction`: another handle of the same kernel.
///
/// # Safety
/// As the driver's.
pub unsafe fn kernel_get_function(
    real: unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    function: *mut Ptr,
    kernel: Ptr,
) -> CuResult {
    let _quiet = quiet_to_load(kernel);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(function, kernel) };
    if result == SUCCESS
        && !function.is_null()
        && let Some(value) = FUNCTIONS.get(kernel as usize)
    {
        loaded_now(kernel);
        let _held = LOCK.lock();
        // SAFETY: the driver has just written it.
        FUNCTIONS.insert(unsafe { *function } as usize, value | LOADED);
    }
    result
}

/// `cuFuncSetAttribute`: the kernel's cut form gets it, too.
///
/// # Safety
/// As the driver's.
pub unsafe fn func_set_attribute(
    real: unsafe extern "C" fn(Ptr, c_int, c_int) -> CuResult,
    _per_thread: bool,
    function: Ptr,
    attribute: c_int,
    value: c_int,
) -> CuResult {
    let quiet = quiet_to_load(function);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(function, attribute, value) };
    set(result, function, quiet)
}

/// `cuKernelSetAttribute`: likewise.
///
/// # Safety
/// As the driver's.
pub unsafe fn kernel_set_attribute(
    real: unsafe extern "C" fn(c_int, c_int, Ptr, c_int) -> CuResult,
    _per_thread: bool,
    attribute: c_int,
    value: c_int,
    kernel: Ptr,
    device: c_int,
) -> CuResult {
    let quiet = quiet_to_load(kernel);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(attribute, value, kernel, device) };
    set(result, kernel, quiet)
}

/// An attribute was set: the cut form gets it, too. That asks for the function of a kernel, which loads it.
fn set(result: CuResult, function: Ptr, _quiet: Option<quiet::Quiet>) -> CuResult {
    if result == SUCCESS && cut::is_enabled() {
        cut::kernels::attribute_set(function);
        loaded_now(function);
    }
    result
}

/// Only in a forked child, whose region has a table of its own.
pub fn reset() {
    LOCK.reset();
    FUNCTIONS.retain(|_| false);
    MODULES.retain(|_| false);
    ENTRIES.retain(|_| false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_told_apart_and_measured_by_their_headers() {
        let elf = |fill: u8| {
            let mut image = vec![fill; 4096];
            image[..5].copy_from_slice(b"\x7fELF\x02");
            image[40..48].copy_from_slice(&3968_u64.to_le_bytes());
            image[58..60].copy_from_slice(&64_u16.to_le_bytes());
            image[60..62].copy_from_slice(&2_u16.to_le_bytes());
            // No segments, and sections without bytes.
            image[56..58].copy_from_slice(&0_u16.to_le_bytes());
            image[3968..].fill(0);
            image
        };
        // SAFETY: well-formed headers over buffers of the length they give.
        let hash = |image: &[u8]| unsafe { hash_image(image.as_ptr()) };
        // SAFETY: as above.
        assert_eq!(unsafe { image_length(elf(1).as_ptr(), 0) }, Some(4096));
        assert_eq!(hash(&elf(1)), hash(&elf(1)));
        assert_ne!(hash(&elf(1)), hash(&elf(2)));
        assert_ne!(hash(b".version 8.0\n\0"), hash(b".version 8.1\n\0"));
        let mut fatbin = vec![7_u8; 16 + 100];
        fatbin[..4].copy_from_slice(&FATBIN_MAGIC);
        fatbin[6..8].copy_from_slice(&16_u16.to_le_bytes());
        fatbin[8..16].copy_from_slice(&100_u64.to_le_bytes());
        let mut wrapper = vec![0_u8; 24];
        wrapper[..4].copy_from_slice(&WRAPPER_MAGIC);
        wrapper[8..16].copy_from_slice(&(fatbin.as_ptr() as u64).to_le_bytes());
        assert_eq!(hash(&wrapper), hash(&fatbin), "the wrapper is seen through");
        assert_ne!(hash(&fatbin), 0);
    }

    #[test]
    fn unknown_survives_packing() {
        assert_eq!((pack(0, KERNEL_UNKNOWN) as u32).wrapping_sub(1), KERNEL_UNKNOWN);
        assert_ne!(pack(0, KERNEL_UNKNOWN), 0);
        assert_eq!((pack(5, 17) as u32).wrapping_sub(1), 17);
    }
}
