//! The code images that a best-effort program loads: what identifies them, and their bytes for as long as
//! a kernel of theirs may be transformed.
//!
//! An image is identified by a digest of all of its bytes, taken when it is loaded, and of the options of the
//! load that change the code. Its bytes are copied where they may change or go away; of what lies in a
//! library's read-only data only the place is kept, and what is found there later is taken only if it has
//! the same digest.
//!
//! Must never read memory that may be gone, and never let the program wait for the loader's lock while
//! it holds one of ours.

use crate::cut::guarded::Guarded;
use crate::cut::{takes_vendor, vendor};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tally_kernels::Refusal;

/// Bytes copied, in all.
pub const COPIED_BYTES_MAX: usize = 64 << 20;
/// Images noted; kernels of others run whole.
const IMAGES_MAX: usize = 65_536;
/// The longest image that is kept.
pub const IMAGE_BYTES_MAX: usize = 1 << 30;
/// Options of a load that are looked at.
const OPTIONS_MAX: usize = 64;
/// `CUjit_option`s that leave the code as it is: times and logs, the target, line information, caching.
const HARMLESS_OPTIONS: [c_int; 9] = [2, 3, 4, 5, 6, 8, 12, 13, 14];

/// Where an image's bytes are.
#[derive(Debug)]
enum Place {
    Copied(Arc<[u8]>),
    InLibrary {
        start: usize,
        bytes: usize,
    },
    /// There was no room for a copy, or it was loaded in a way that a second load would not repeat.
    Nowhere,
}

#[derive(Debug)]
struct Image {
    place: Place,
    /// File name of the library that holds the image, or whose code loaded it.
    library: Option<String>,
    /// Modules and libraries that were loaded from it and not unloaded.
    users: u32,
}

struct Images {
    by_digest: BTreeMap<u128, Image>,
    copied_bytes: usize,
}

static IMAGES: Guarded<Images> =
    Guarded::new(Images { by_digest: BTreeMap::new(), copied_bytes: 0 });

/// The options of a load, as the program passed them.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many.
    pub count: u32,
    /// `CUjit_option`s.
    pub names: *const c_int,
    /// Their values.
    pub values: *const *mut c_void,
}

impl Options {
    /// Of a load that has none.
    pub const NONE: Options =
        Options { count: 0, names: std::ptr::null(), values: std::ptr::null() };

    /// Those that change the code, as bytes.
    ///
    /// # Safety
    /// The driver has read them.
    unsafe fn that_matter(self) -> Vec<u8> {
        let count = (self.count as usize).min(OPTIONS_MAX);
        let mut all = Vec::new();
        if self.names.is_null() {
            return all;
        }
        for at in 0..count {
            // SAFETY: arrays of this length, by this function's contract.
            let (name, value) = unsafe {
                let value = if self.values.is_null() { 0 } else { *self.values.add(at) as usize };
                (*self.names.add(at), value)
            };
            if !HARMLESS_OPTIONS.contains(&name) {
                all.extend(name.to_le_bytes());
                all.extend(value.to_le_bytes());
            }
        }
        all
    }
}

/// The digest of an image and what changes its code; never 0.
fn digest_of(bytes: &[u8], options: &[u8]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes).update(options);
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(half).max(1)
}

/// The identity of a kernel: of its image, whose digest is not 0, and its whole name.
pub fn identity_of(digest: u128, name: &[u8]) -> u128 {
    digest_of(name, &digest.to_le_bytes())
}

/// The program loaded an image from memory. Returns its digest, 0 if it is of no known kind.
///
/// # Safety
/// An image, and options, that the driver has just accepted.
pub unsafe fn loaded(image: *const u8, options: Options) -> u128 {
    // SAFETY: by this function's contract.
    let Some(Span { start, bytes, is_plain }) = (unsafe { span(image) }) else { return 0 };
    // SAFETY: its own tables give the length, or the NUL behind it.
    let all = unsafe { std::slice::from_raw_parts(start, bytes) };
    // SAFETY: by this function's contract.
    let options = unsafe { options.that_matter() };
    let digest = digest_of(all, &options);
    if is_known(digest) {
        return digest;
    }
    // Outside the lock: these may wait for the loader's, and whoever holds that one may run a library's
    // constructors, which load images.
    let holder = library_of(start as usize);
    let stays = holder.is_some() && is_read_only(start as usize, bytes);
    let library = holder.or_else(caller);
    let place = if !is_plain || !options.is_empty() {
        Place::Nowhere
    } else if stays {
        Place::InLibrary { start: start as usize, bytes }
    } else {
        copy(all, library.as_deref())
    };
    add(digest, place, library);
    digest
}

/// The program is loading a file, of which these are the bytes. Returns the digest.
pub fn loaded_file(bytes: &[u8], name: Option<String>, options: Options) -> u128 {
    // SAFETY: the caller's options, which the driver has read.
    let options = unsafe { options.that_matter() };
    let digest = digest_of(bytes, &options);
    if !is_known(digest) {
        let place = if options.is_empty() { copy(bytes, name.as_deref()) } else { Place::Nowhere };
        add(digest, place, name);
    }
    digest
}

/// Whether an image is noted; if so, it has one more user.
fn is_known(digest: u128) -> bool {
    IMAGES.with(|images| match images.by_digest.get_mut(&digest) {
        Some(image) => {
            image.users = image.users.saturating_add(1);
            // One that had no room may have it now.
            !matches!(image.place, Place::Nowhere)
        }
        None => false,
    })
}

fn copy(bytes: &[u8], library: Option<&str>) -> Place {
    // Never needed: see `kernels::verdict`.
    let is_left_alone = !takes_vendor() && library.is_some_and(|l| vendor::is_vendor("", Some(l)));
    let room = IMAGES.with(|images| COPIED_BYTES_MAX.saturating_sub(images.copied_bytes));
    if is_left_alone || bytes.len() > room {
        return Place::Nowhere;
    }
    Place::Copied(bytes.into())
}

fn add(digest: u128, place: Place, library: Option<String>) {
    let copied = if let Place::Copied(bytes) = &place { bytes.len() } else { 0 };
    IMAGES.with(|images| {
        // Another thread may have been faster, here and with the room.
        let has_room = copied <= COPIED_BYTES_MAX.saturating_sub(images.copied_bytes);
        if let Some(image) = images.by_digest.get_mut(&digest) {
            if matches!(image.place, Place::Nowhere) && has_room {
                image.place = place;
                images.copied_bytes += copied;
            }
        } else if images.by_digest.len() < IMAGES_MAX {
            let place = if has_room { place } else { Place::Nowhere };
            images.copied_bytes += if has_room { copied } else { 0 };
            images.by_digest.insert(digest, Image { place, library, users: 1 });
        }
    });
}

/// A module that was loaded from an image was unloaded. Returns whether it was the last.
pub fn unloaded(digest: u128) -> bool {
    IMAGES.with(|images| {
        let Some(image) = images.by_digest.get_mut(&digest) else { return false };
        image.users = image.users.saturating_sub(1);
        if image.users > 0 {
            return false;
        }
        if let Some(Image { place: Place::Copied(bytes), .. }) = images.by_digest.remove(&digest) {
            images.copied_bytes -= bytes.len();
        }
        true
    })
}

/// File name of the library that holds an image, or whose code loaded it, if that is known.
///
/// # Errors
/// [`Refusal::ImageGone`] if its bytes are not at hand.
pub fn library(digest: u128) -> Result<Option<String>, Refusal> {
    IMAGES.with(|images| match images.by_digest.get(&digest) {
        None | Some(Image { place: Place::Nowhere, .. }) => Err(Refusal::ImageGone),
        Some(image) => Ok(image.library.clone()),
    })
}

/// The very bytes that were loaded.
///
/// # Errors
/// [`Refusal::ImageGone`] if they are not at hand any more.
pub fn bytes(digest: u128) -> Result<Arc<[u8]>, Refusal> {
    let (start, length) = match IMAGES.with(|images| {
        Some(match &images.by_digest.get(&digest)?.place {
            Place::Copied(bytes) => Ok(bytes.clone()),
            Place::InLibrary { start, bytes } => Err((*start, *bytes)),
            Place::Nowhere => return None,
        })
    }) {
        Some(Ok(copied)) => return Ok(copied),
        Some(Err(place)) => place,
        None => return Err(Refusal::ImageGone),
    };
    // The library may be gone, and another be there: a read through the system fails where memory is
    // missing, and the digest tells the rest.
    let mut found = vec![0; length];
    let memory = File::open("/proc/self/mem").map_err(|_| Refusal::ImageGone)?;
    memory.read_exact_at(&mut found, start as u64).map_err(|_| Refusal::ImageGone)?;
    if digest_of(&found, &[]) != digest {
        return Err(Refusal::ImageGone);
    }
    Ok(found.into())
}

/// Bytes of the images that are copied.
pub fn copied_bytes() -> usize {
    IMAGES.with(|images| images.copied_bytes)
}

fn file_name(path: &CStr) -> String {
    let path = path.to_string_lossy();
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

/// File name of the library that an address belongs to.
fn library_of(address: usize) -> Option<String> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: only looks the address up; the structure is filled on success.
    unsafe {
        if libc::dladdr(address as *const c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        let info = info.assume_init();
        (!info.dli_fname.is_null()).then(|| file_name(CStr::from_ptr(info.dli_fname)))
    }
}

/// Whether memory lies in a segment of a library, or of the program, that was mapped without write permission.
fn is_read_only(start: usize, bytes: usize) -> bool {
    struct Wanted {
        start: usize,
        end: usize,
        is_read_only: bool,
    }
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        wanted: *mut c_void,
    ) -> c_int {
        // SAFETY: as passed below; the loader's own tables.
        let (wanted, info) = unsafe { (&mut *wanted.cast::<Wanted>(), &*info) };
        for at in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: as above.
            let segment = unsafe { &*info.dlpi_phdr.add(at) };
            let from = (info.dlpi_addr as usize).wrapping_add(segment.p_vaddr as usize);
            let to = from.saturating_add(segment.p_filesz as usize);
            if segment.p_type == libc::PT_LOAD && from <= wanted.start && wanted.end <= to {
                wanted.is_read_only = segment.p_flags & libc::PF_W == 0;
                return 1;
            }
        }
        0
    }
    let end = start.saturating_add(bytes);
    let mut wanted = Wanted { start, end, is_read_only: false };
    // SAFETY: a function that only reads, and its argument.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut wanted).cast()) };
    wanted.is_read_only
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
    let mut names = frames[..count].iter().filter_map(|f| library_of(*f as usize));
    names.find(|name| *name != own && !name.starts_with("libcuda."))
}

/// `fatbinData`'s wrapper: what `cuModuleLoadFatBinary` and cudart pass.
const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();
/// A fat binary.
const FATBIN_MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
const ELF_MAGIC: &[u8; 5] = b"\x7fELF\x02";

/// Where an image lies, whatever wraps it.
struct Span {
    start: *const u8,
    bytes: usize,
    /// A load of just these bytes is the same load.
    is_plain: bool,
}

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

/// # Safety
/// An image that the driver has just accepted.
unsafe fn span(image: *const u8) -> Option<Span> {
    if image.is_null() {
        return None;
    }
    // SAFETY: all reads are of a header of the kind that the magic says, in an
    // image that the driver accepted.
    unsafe {
        let (start, is_plain) = if starts_with(image, &WRAPPER_MAGIC) {
            // magic, version, data, what it was linked with. A later version brings other images.
            (word::<8>(image, 8) as *const u8, word::<4>(image, 4) == 1)
        } else {
            (image, true)
        };
        if start.is_null() {
            return None;
        }
        let bytes = if starts_with(start, &FATBIN_MAGIC) {
            // magic, version u16, header size u16, size of the rest u64.
            word::<2>(start, 6).saturating_add(word::<8>(start, 8))
        } else if starts_with(start, ELF_MAGIC) {
            elf_length(start)
        } else if starts_with(start, &WRAPPER_MAGIC) {
            return None;
        } else {
            // A text ends with a NUL.
            CStr::from_ptr(start.cast()).to_bytes().len() as u64
        };
        let bytes = usize::try_from(bytes).ok().filter(|n| *n <= IMAGE_BYTES_MAX)?;
        Some(Span { start, bytes, is_plain })
    }
}

/// Only in a forked child.
pub fn reset() {
    IMAGES.reset(Images { by_digest: BTreeMap::new(), copied_bytes: 0 });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(fill: u8) -> Vec<u8> {
        let mut image = vec![fill; 4096];
        image[..5].copy_from_slice(ELF_MAGIC);
        image[40..48].copy_from_slice(&3968_u64.to_le_bytes());
        image[58..60].copy_from_slice(&64_u16.to_le_bytes());
        image[60..62].copy_from_slice(&2_u16.to_le_bytes());
        // No segments, and sections without bytes.
        image[56..58].copy_from_slice(&0_u16.to_le_bytes());
        image[3968..].fill(0);
        image
    }

    fn fatbin(rest: &[u8]) -> Vec<u8> {
        let mut image = FATBIN_MAGIC.to_vec();
        image.extend(1_u16.to_le_bytes());
        image.extend(16_u16.to_le_bytes());
        image.extend((rest.len() as u64).to_le_bytes());
        image.extend(rest);
        image
    }

    fn load(image: &[u8]) -> u128 {
        // SAFETY: well-formed headers over buffers of the length they give, or a text with its NUL.
        unsafe { loaded(image.as_ptr(), Options::NONE) }
    }

    #[test]
    fn every_byte_of_an_image_is_in_its_digest() {
        let images: [(Vec<u8>, std::ops::Range<usize>); 3] = [
            (elf(1), 64..3968),
            (fatbin(&[7; 5000]), 16..5016),
            (format!(".version 8.0\n//{}\0", "x".repeat(70_000)).into_bytes(), 14..70_015),
        ];
        for (image, may_change) in images {
            let before = load(&image);
            for at in may_change.step_by(257) {
                let mut other = image.clone();
                other[at] ^= 1;
                assert_ne!(load(&other), before, "byte {at}");
            }
            assert_eq!(load(&image), before);
        }
    }

    #[test]
    fn a_wrapper_is_seen_through_and_options_that_change_code_count() {
        let image = fatbin(&[9; 100]);
        let mut wrapper = vec![0_u8; 24];
        wrapper[..4].copy_from_slice(&WRAPPER_MAGIC);
        wrapper[4..8].copy_from_slice(&1_u32.to_le_bytes());
        wrapper[8..16].copy_from_slice(&(image.as_ptr() as u64).to_le_bytes());
        let plain = load(&image);
        assert_eq!(load(&wrapper), plain);
        let with = |name: c_int, value: usize| {
            let values = [value as *mut c_void];
            let options = Options { count: 1, names: &raw const name, values: values.as_ptr() };
            // SAFETY: as in `load`; arrays of one.
            unsafe { loaded(image.as_ptr(), options) }
        };
        // CU_JIT_WALL_TIME, then CU_JIT_OPTIMIZATION_LEVEL.
        assert_eq!(with(2, 7), plain);
        assert_ne!(with(7, 1), plain);
        assert_ne!(with(7, 1), with(7, 2));
        assert_eq!(
            bytes(with(7, 1)),
            Err(Refusal::ImageGone),
            "it could not be loaded the same way"
        );
    }

    #[test]
    fn copies_are_the_bytes_that_were_loaded_and_go_with_their_last_user() {
        let mut text = b".version 8.3\n// a buffer that is used again\0".to_vec();
        let first = load(&text);
        let loaded = text.clone();
        text[15] = b'A';
        let second = load(&text);
        assert_ne!(first, second);
        assert_eq!(bytes(first).unwrap()[..], loaded[..loaded.len() - 1]);
        assert_eq!(load(&loaded), first);
        assert!(!unloaded(first), "loaded twice");
        assert!(unloaded(first) && unloaded(second));
        assert_eq!(bytes(first), Err(Refusal::ImageGone));
        assert!(!unloaded(first));
    }

    #[test]
    fn what_changed_in_a_library_s_place_is_not_taken() {
        static TEXT: [u8; 40] = *b".version 8.4\n// in read-only data      \0";
        let digest = load(&TEXT);
        assert_eq!(bytes(digest).unwrap()[..], TEXT[..39]);
        let place = |start: usize| {
            add(digest ^ 2, Place::InLibrary { start, bytes: 39 }, None);
            bytes(digest ^ 2)
        };
        assert_eq!(place(TEXT.as_ptr() as usize), Err(Refusal::ImageGone), "other bytes");
        add(digest ^ 4, Place::InLibrary { start: 4096, bytes: 39 }, None);
        assert_eq!(bytes(digest ^ 4), Err(Refusal::ImageGone), "nothing is mapped there");
    }

    #[test]
    fn a_kernel_is_told_by_image_and_whole_name() {
        let all = [(1, "a"), (2, "a"), (1, "b"), (1, &*"n".repeat(300)), (1, &*"n".repeat(301))];
        let found = all.map(|(digest, name)| identity_of(digest, name.as_bytes()));
        for (i, a) in found.iter().enumerate() {
            assert!(*a != 0 && found[i + 1..].iter().all(|b| a != b));
        }
    }
}
