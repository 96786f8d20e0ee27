//! The code images that a best-effort program loads: what identifies them, and their bytes for as long as
//! a kernel of theirs may be transformed.
//!
//! An image is identified by a digest of all of its bytes and of the load options that change the code. Bytes
//! that may change or disappear are copied first, and the driver loads the copy, so that it cannot have read
//! anything else. Of an image in a library's read-only data only the address is kept; what is found there later
//! is used only if it has the same digest.
//!
//! Must never read memory that may be gone, and never let the program wait for the loader's lock while
//! it holds one of ours.

use crate::objects;
use crate::span::{self, Span};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
pub use tally_contract::limits::COPIED_BYTES_MAX;
use tally_preempt::lock::Locked;
use tally_preempt::settings::takes_vendor;
use tally_preempt::vendor;
use tally_rewriter::TransformRefusal;

/// Images noted; kernels of others run whole.
const IMAGES_MAX: usize = 65_536;
/// Options of a load that are looked at.
const OPTIONS_MAX: usize = 64;
/// `CUjit_option`s that leave the code as it is: times and logs, the target, line information, caching.
const HARMLESS_OPTIONS: [c_int; 9] = [2, 3, 4, 5, 6, 8, 12, 13, 14];

/// Where the bytes of an image can be read from.
#[derive(Debug)]
enum ImagePlace {
    Copied(Arc<Vec<u8>>),
    InLibrary {
        start: usize,
        bytes: usize,
    },
    /// Nowhere: there was no room for a copy, or the program passed JIT options that a second load would not repeat.
    Nowhere,
}

#[derive(Debug)]
struct Image {
    place: ImagePlace,
    /// File name of the library that holds the image, or whose code loaded it.
    library: Option<String>,
    /// Modules and libraries that were loaded from it and not unloaded.
    users: u32,
    /// The program may write constants of one of them.
    is_written: bool,
}

struct Images {
    by_digest: BTreeMap<u128, Image>,
    copied_bytes: usize,
}

static IMAGES: Locked<Images> = Locked::new(Images { by_digest: BTreeMap::new(), copied_bytes: 0 });

/// The options of a load, as the program passed them.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub count: u32,
    pub names: *const c_int,
    pub values: *const *mut c_void,
}

impl Options {
    /// The options of a load that has none.
    pub const NONE: Options =
        Options { count: 0, names: std::ptr::null(), values: std::ptr::null() };

    /// The options that change the code, as bytes.
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

/// The program loaded an image that was not copied. Returns its digest, 0 if it is of no known kind.
///
/// # Safety
/// An image, and options, that the driver has just accepted.
pub unsafe fn loaded(image: *const u8, options: Options) -> u128 {
    let Some(Span { start, bytes, is_plain }) = span::of(image as usize) else { return 0 };
    // SAFETY: its own tables give the length, or the NUL behind it, and the driver has read it.
    let all = unsafe { std::slice::from_raw_parts(start as *const u8, bytes) };
    // SAFETY: by this function's contract.
    let options = unsafe { options.that_matter() };
    let digest = digest_of(all, &options);
    if is_known(digest) {
        return digest;
    }
    // Outside the lock: these may wait for the loader's, and whoever holds that one may run a library's
    // constructors, which load images.
    let stays = is_plain && options.is_empty() && is_read_only(start, bytes);
    let place = if stays { ImagePlace::InLibrary { start, bytes } } else { ImagePlace::Nowhere };
    add(digest, place, library_of(start).or_else(caller));
    digest
}

/// A copy of an image, which the driver is given in its place.
pub struct Snapshot {
    /// The image, with a NUL behind it.
    bytes: Vec<u8>,
    /// In which the driver finds it, if that is how the image came.
    wrapper: Option<[u64; 3]>,
}

impl Snapshot {
    /// Of an image in memory that may change while it is read. `None`: the image itself is to be used, for it stays
    /// as it is, or is too long, or nothing that is known to be an image.
    pub fn of(image: *const u8) -> Option<Self> {
        let Span { start, bytes, is_plain } = span::of(image as usize)?;
        if !is_plain || bytes > COPIED_BYTES_MAX || is_read_only(start, bytes) {
            return None;
        }
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes + 1).ok()?;
        copy.resize(bytes, 0);
        if span::read(start, &mut copy) != bytes || !span::is_whole(&copy) {
            return None;
        }
        copy.push(0);
        let magic = u64::from(u32::from_le_bytes(span::WRAPPER_MAGIC));
        // magic and version 1, data, nothing that it was linked with.
        let wrapper = [magic | 1 << 32, copy.as_ptr() as u64, 0];
        Some(Self { bytes: copy, wrapper: (start != image as usize).then_some(wrapper) })
    }

    /// What the driver is given.
    pub fn image(&self) -> *const u8 {
        match &self.wrapper {
            Some(wrapper) => wrapper.as_ptr().cast(),
            None => self.bytes.as_ptr(),
        }
    }

    /// The driver took it. Returns the digest of the image.
    ///
    /// # Safety
    /// Options that the driver has just accepted.
    pub unsafe fn loaded(self, options: Options) -> u128 {
        // SAFETY: by this function's contract.
        unsafe { loaded_bytes(self.bytes, caller(), options) }
    }
}

/// The program loaded a file, of which the driver was given these bytes, a NUL behind them. Returns the digest.
///
/// # Safety
/// Options that the driver has just accepted.
pub unsafe fn loaded_bytes(mut bytes: Vec<u8>, library: Option<String>, options: Options) -> u128 {
    bytes.pop();
    // SAFETY: by this function's contract.
    let options = unsafe { options.that_matter() };
    let digest = digest_of(&bytes, &options);
    if !is_known(digest) {
        let place = match options.is_empty() {
            true => kept(bytes, library.as_deref()),
            false => ImagePlace::Nowhere,
        };
        add(digest, place, library);
    }
    digest
}

/// Whether an image stays as it is: it lies in a library's read-only memory.
pub fn is_in_library(image: *const u8) -> bool {
    span::of(image as usize).is_some_and(|span| is_read_only(span.start, span.bytes))
}

/// Whether an image is noted, and its bytes are at hand; if so, it has one more user.
fn is_known(digest: u128) -> bool {
    IMAGES.with(|images| match images.by_digest.get_mut(&digest) {
        // Not at hand so far. There may be room for a copy now.
        None | Some(Image { place: ImagePlace::Nowhere, .. }) => false,
        Some(image) => {
            image.users = image.users.saturating_add(1);
            true
        }
    })
}

fn kept(bytes: Vec<u8>, library: Option<&str>) -> ImagePlace {
    // No copy of a closed library's image: `tally_preempt::prepare` transforms none of its kernels.
    let is_left_alone = !takes_vendor() && library.is_some_and(|l| vendor::is_vendor("", Some(l)));
    let room = IMAGES.with(|images| COPIED_BYTES_MAX.saturating_sub(images.copied_bytes));
    if is_left_alone || bytes.len() > room {
        return ImagePlace::Nowhere;
    }
    ImagePlace::Copied(Arc::new(bytes))
}

fn add(digest: u128, place: ImagePlace, library: Option<String>) {
    let copied = if let ImagePlace::Copied(bytes) = &place { bytes.len() } else { 0 };
    IMAGES.with(|images| {
        // Another thread may have been faster, here and with the room.
        let has_room = copied <= COPIED_BYTES_MAX.saturating_sub(images.copied_bytes);
        if let Some(image) = images.by_digest.get_mut(&digest) {
            image.users = image.users.saturating_add(1);
            if matches!(image.place, ImagePlace::Nowhere) && has_room {
                image.place = place;
                images.copied_bytes += copied;
            }
        } else if images.by_digest.len() < IMAGES_MAX {
            let place = if has_room { place } else { ImagePlace::Nowhere };
            images.copied_bytes += if has_room { copied } else { 0 };
            images.by_digest.insert(digest, Image { place, library, users: 1, is_written: false });
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
        if let Some(Image { place: ImagePlace::Copied(bytes), .. }) =
            images.by_digest.remove(&digest)
        {
            images.copied_bytes -= bytes.len();
        }
        true
    })
}

/// The program may write constants of a module that was loaded from an image.
pub fn written(digest: u128) {
    IMAGES.with(|images| {
        if let Some(image) = images.by_digest.get_mut(&digest) {
            image.is_written = true;
        }
    });
}

/// File name of the library that holds an image, or whose code loaded it, if that is known.
///
/// # Errors
/// [`TransformRefusal::ImageGone`] if its bytes are not at hand, [`TransformRefusal::WritableGlobals`] if the program
/// may write its constants.
pub fn library(digest: u128) -> Result<Option<String>, TransformRefusal> {
    IMAGES.with(|images| match images.by_digest.get(&digest) {
        Some(Image { is_written: true, .. }) => Err(TransformRefusal::WritableGlobals),
        None | Some(Image { place: ImagePlace::Nowhere, .. }) => Err(TransformRefusal::ImageGone),
        Some(image) => Ok(image.library.clone()),
    })
}

/// The same, whether or not the bytes are at hand.
pub fn library_name(digest: u128) -> Option<String> {
    IMAGES.with(|images| images.by_digest.get(&digest)?.library.clone())
}

/// The very bytes that were loaded.
///
/// # Errors
/// [`TransformRefusal::ImageGone`] if they are not at hand any more.
pub fn bytes(digest: u128) -> Result<Arc<Vec<u8>>, TransformRefusal> {
    let (start, length) = match IMAGES.with(|images| {
        Some(match &images.by_digest.get(&digest)?.place {
            ImagePlace::Copied(bytes) => Ok(bytes.clone()),
            ImagePlace::InLibrary { start, bytes } => Err((*start, *bytes)),
            ImagePlace::Nowhere => return None,
        })
    }) {
        Some(Ok(copied)) => return Ok(copied),
        Some(Err(place)) => place,
        None => return Err(TransformRefusal::ImageGone),
    };
    // The library may be gone, and another be there: a read through the system fails where memory is
    // missing, and the digest tells the rest.
    let mut found = Vec::new();
    found.try_reserve_exact(length).map_err(|_| TransformRefusal::ImageGone)?;
    found.resize(length, 0);
    if span::read(start, &mut found) != length || digest_of(&found, &[]) != digest {
        return Err(TransformRefusal::ImageGone);
    }
    Ok(Arc::new(found))
}

/// Bytes of the images that are copied.
pub fn copied_bytes() -> usize {
    IMAGES.with(|images| images.copied_bytes)
}

/// File name of the library that an address belongs to; empty: the program's.
fn library_of(address: usize) -> Option<String> {
    objects::of(address).map(|object| object.name())
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

unsafe extern "C" {
    fn _Unwind_Backtrace(
        each: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// File name of the library whose code called us: the nearest that is neither ours
/// nor the driver.
fn caller() -> Option<String> {
    struct Search {
        own: String,
        found: Option<String>,
        frames_left: u32,
    }
    unsafe extern "C" fn look(context: *mut c_void, search: *mut c_void) -> c_int {
        /// Anything but `_URC_NO_REASON`: what is behind this frame is not looked at. A program may have made
        /// its stack itself, and its first frame need not return anywhere.
        const ENOUGH: c_int = 5;
        // SAFETY: as passed below; the unwinder's own context.
        let (search, at) = unsafe { (&mut *search.cast::<Search>(), _Unwind_GetIP(context)) };
        let name = library_of(at.saturating_sub(1));
        let is_ours = name.as_ref().is_some_and(|name| {
            *name == search.own
                || name.starts_with("libtally_preload")
                || name.starts_with("libcuda.")
        });
        search.frames_left = search.frames_left.saturating_sub(1);
        if is_ours && search.frames_left > 0 {
            return 0;
        }
        search.found = name.filter(|_| !is_ours);
        ENOUGH
    }
    let own = library_of(caller as *const () as usize)?;
    let mut search = Search { own, found: None, frames_left: 24 };
    // SAFETY: the function above, and what it takes. Our own frames can be unwound.
    unsafe { _Unwind_Backtrace(look, (&raw mut search).cast()) };
    search.found
}

/// Only in a forked child.
pub fn reset() {
    IMAGES.reset(Images { by_digest: BTreeMap::new(), copied_bytes: 0 });
}

/// As if the program had loaded an image with this digest.
#[cfg(test)]
pub fn load_for_a_test(digest: u128) {
    add(digest, ImagePlace::Copied(Arc::new(Vec::new())), None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::{ELF_MAGIC, FATBIN_MAGIC, WRAPPER_MAGIC};

    fn elf(fill: u8) -> Vec<u8> {
        let mut image = vec![fill; 4096];
        image[..5].copy_from_slice(&ELF_MAGIC);
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
        unsafe {
            match Snapshot::of(image.as_ptr()) {
                Some(copy) => copy.loaded(Options::NONE),
                None => loaded(image.as_ptr(), Options::NONE),
            }
        }
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
            Err(TransformRefusal::ImageGone),
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
        assert_eq!(bytes(first), Err(TransformRefusal::ImageGone));
        assert!(!unloaded(first));
    }

    #[test]
    fn what_changed_in_a_library_s_place_is_not_taken() {
        static TEXT: [u8; 40] = *b".version 8.4\n// in read-only data      \0";
        let digest = load(&TEXT);
        assert_eq!(bytes(digest).unwrap()[..], TEXT[..39]);
        let place = |start: usize| {
            add(digest ^ 2, ImagePlace::InLibrary { start, bytes: 39 }, None);
            bytes(digest ^ 2)
        };
        assert_eq!(place(TEXT.as_ptr() as usize), Err(TransformRefusal::ImageGone), "other bytes");
        add(digest ^ 4, ImagePlace::InLibrary { start: 4096, bytes: 39 }, None);
        assert_eq!(bytes(digest ^ 4), Err(TransformRefusal::ImageGone), "nothing is mapped there");
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
