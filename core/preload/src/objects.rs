//! Finding functions in the objects that the process has loaded, behind this one, by reading their
//! symbol tables: the C library's own look-ups cannot be named without a symbol version, and musl has no
//! `dlvsym`.

use crate::sys::{equal, length};
use core::ffi::{CStr, c_int, c_void};
use core::ptr::null;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Release};

/// `struct dl_phdr_info`, as far as it is used.
#[repr(C)]
pub struct Object {
    base: usize,
    name: *const u8,
    headers: *const Header,
    header_count: u16,
    /// Objects that were ever loaded; this and the next only if the C library gives so many bytes.
    _loaded: u64,
    unloaded: u64,
}

#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical: u64,
    file_bytes: u64,
    bytes: u64,
    align: u64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    bytes: u64,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const STT_FUNC: u8 = 2;
/// Bit of a version index: another version is the default one.
const VERSION_HIDDEN: u16 = 0x8000;

type Visit = unsafe extern "C" fn(*const Object, usize, *mut c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Visit, *mut c_void) -> c_int;

/// `dl_iterate_phdr`, if the process has a C library.
fn iterate() -> Option<Iterate> {
    let at: usize;
    // SAFETY: reads this library's own table, where the loader put the address or 0. Weak and without a
    // version, so that it binds whatever the C library is.
    unsafe {
        core::arch::asm!(
            ".weak dl_iterate_phdr",
            "mov {at}, qword ptr [rip + dl_iterate_phdr@GOTPCREL]",
            at = out(reg) at,
            options(nostack, pure, readonly, preserves_flags),
        );
        core::mem::transmute::<usize, Option<Iterate>>(at)
    }
}

struct Search {
    name: *const u8,
    /// Objects before this library are passed over.
    behind: bool,
    found: usize,
    /// This library's own file.
    own: *const u8,
}

/// The function of this name in the first object behind this library that has it.
pub fn next(name: &CStr) -> Option<usize> {
    let mut search = Search { name: name.as_ptr().cast(), behind: false, found: 0, own: null() };
    // SAFETY: `visit` takes a `Search`, which outlives the call.
    unsafe { iterate()?(visit, (&raw mut search).cast()) };
    (search.found != 0).then_some(search.found)
}

/// The file of this library, as the loader knows it; NUL-terminated, kept for the process's life.
pub fn own_file() -> Option<*const u8> {
    let mut search = Search { name: null(), behind: false, found: 0, own: null() };
    // SAFETY: as above.
    unsafe { iterate()?(visit, (&raw mut search).cast()) };
    (!search.own.is_null()).then_some(search.own)
}

/// Objects that the program began with, the first in the loader's order; 0: not counted.
static AT_START: AtomicU64 = AtomicU64::new(0);

/// The process has loaded nothing yet but what it began with.
pub fn note_start() {
    AT_START.store(counts().0, Release);
}

/// One look-up of an address.
struct Holder {
    address: usize,
    index: u64,
    is_found: bool,
}

/// Whether an address is in an object that the program began with.
pub fn was_there_at_start(address: usize) -> bool {
    let mut holder = Holder { address, index: 0, is_found: false };
    let Some(iterate) = iterate() else { return false };
    // SAFETY: `find_holder` takes a `Holder`, which outlives the call.
    unsafe { iterate(find_holder, (&raw mut holder).cast()) };
    holder.is_found && holder.index < AT_START.load(Acquire)
}

unsafe extern "C" fn find_holder(
    object: *const Object,
    _bytes: usize,
    holder: *mut c_void,
) -> c_int {
    // SAFETY: the loader's description, valid during the call, and `was_there_at_start`'s own value.
    let (object, holder) = unsafe { (&*object, &mut *holder.cast::<Holder>()) };
    holder.is_found = object.holds(holder.address);
    if !holder.is_found {
        holder.index += 1;
    }
    c_int::from(holder.is_found)
}

/// Objects that are loaded, and how many were unloaded since the process began; 0 where the C library does
/// not say.
pub fn counts() -> (u64, u64) {
    let mut counts = (0, 0);
    if let Some(iterate) = iterate() {
        // SAFETY: `count` takes such a pair, which outlives the call.
        unsafe { iterate(count, (&raw mut counts).cast()) };
    }
    counts
}

unsafe extern "C" fn count(object: *const Object, bytes: usize, counts: *mut c_void) -> c_int {
    // SAFETY: `counts`' own value; the loader's description has so many bytes.
    unsafe {
        let counts = &mut *counts.cast::<(u64, u64)>();
        counts.0 += 1;
        if bytes >= size_of::<Object>() {
            counts.1 = (*object).unloaded;
        }
    }
    0
}

unsafe extern "C" fn visit(object: *const Object, _bytes: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader's description, valid during the call, and `next`'s or `own_file`'s own value.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<Search>()) };
    if !search.behind {
        if object.is_this_library() {
            search.behind = true;
            search.own = object.name;
            return c_int::from(search.name.is_null());
        }
        return 0;
    }
    // SAFETY: a loaded object's tables are mapped.
    search.found = unsafe { object.find(search.name) }.unwrap_or(0);
    c_int::from(search.found != 0)
}

/// The tables of an object.
struct Tables {
    symbols: *const Symbol,
    strings: *const u8,
    versions: *const u16,
    gnu_hash: *const u32,
    hash: *const u32,
}

impl Object {
    fn header(&self, index: u16) -> &Header {
        // SAFETY: the loader gives as many as it says.
        unsafe { &*self.headers.add(index.into()) }
    }

    fn is_this_library(&self) -> bool {
        self.holds(is_here as *const () as usize)
    }

    fn holds(&self, address: usize) -> bool {
        (0..self.header_count).map(|i| self.header(i)).any(|h| {
            let start = self.base.wrapping_add(h.address as usize);
            h.kind == PT_LOAD && address.wrapping_sub(start) < h.bytes as usize
        })
    }

    fn tables(&self) -> Option<Tables> {
        let dynamic =
            (0..self.header_count).map(|i| self.header(i)).find(|h| h.kind == PT_DYNAMIC)?;
        let mut entry = self.base.wrapping_add(dynamic.address as usize) as *const [usize; 2];
        let mut t = Tables {
            symbols: null(),
            strings: null(),
            versions: null(),
            gnu_hash: null(),
            hash: null(),
        };
        loop {
            // SAFETY: the dynamic section ends with an entry of tag 0.
            let [tag, value] = unsafe { *entry };
            // glibc writes addresses into the section, musl leaves offsets.
            let at = if value < self.base { value.wrapping_add(self.base) } else { value };
            match tag {
                0 => break,
                4 => t.hash = at as *const u32,
                5 => t.strings = at as *const u8,
                6 => t.symbols = at as *const Symbol,
                0x6fff_fef5 => t.gnu_hash = at as *const u32,
                0x6fff_fff0 => t.versions = at as *const u16,
                _ => {}
            }
            // SAFETY: see above.
            entry = unsafe { entry.add(1) };
        }
        (!t.symbols.is_null() && !t.strings.is_null()).then_some(t)
    }

    unsafe fn find(&self, name: *const u8) -> Option<usize> {
        let t = self.tables()?;
        // SAFETY: by the caller.
        let value = unsafe {
            if !t.gnu_hash.is_null() {
                t.by_gnu_hash(name)
            } else if !t.hash.is_null() {
                t.by_hash(name)
            } else {
                None
            }
        }?;
        Some(self.base.wrapping_add(value))
    }
}

/// A function whose address lies in this library.
fn is_here() {}

impl Tables {
    /// The value of a symbol if it is a function of this name, in its default version, that is defined here.
    unsafe fn matching(&self, index: usize, name: *const u8) -> Option<usize> {
        // SAFETY: indices come from the object's own hash table.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let hidden =
                !self.versions.is_null() && *self.versions.add(index) & VERSION_HIDDEN != 0;
            let function =
                symbol.info & 0xf == STT_FUNC && symbol.section != 0 && symbol.value != 0;
            (function && !hidden && equal(self.strings.add(symbol.name as usize), name))
                .then_some(symbol.value as usize)
        }
    }

    unsafe fn by_gnu_hash(&self, name: *const u8) -> Option<usize> {
        let mut hash = 5381_u32;
        // SAFETY: `name` is NUL-terminated; the table is laid out as the format says.
        unsafe {
            for i in 0..length(name) {
                hash = hash.wrapping_mul(33).wrapping_add((*name.add(i)).into());
            }
            let table = self.gnu_hash;
            let (buckets, first, bloom) = (*table, *table.add(1) as usize, *table.add(2) as usize);
            if buckets == 0 {
                return None;
            }
            let bucket = table.add(4).add(bloom * 2);
            let chain = bucket.add(buckets as usize);
            let mut index = *bucket.add((hash % buckets) as usize) as usize;
            if index < first {
                return None;
            }
            loop {
                let other = *chain.add(index - first);
                if other | 1 == hash | 1
                    && let Some(value) = self.matching(index, name)
                {
                    return Some(value);
                }
                if other & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    unsafe fn by_hash(&self, name: *const u8) -> Option<usize> {
        let mut hash = 0_u32;
        // SAFETY: as above.
        unsafe {
            for i in 0..length(name) {
                hash = (hash << 4).wrapping_add((*name.add(i)).into());
                let high = hash & 0xf000_0000;
                hash = (hash ^ high >> 24) & !high;
            }
            let buckets = *self.hash;
            if buckets == 0 {
                return None;
            }
            let chain = self.hash.add(2).add(buckets as usize);
            let mut index = *self.hash.add(2).add((hash % buckets) as usize);
            while index != 0 {
                if let Some(value) = self.matching(index as usize, name) {
                    return Some(value);
                }
                index = *chain.add(index as usize);
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // In the test program `next` looks behind the program itself.
    #[test]
    fn functions_of_the_c_library_are_found() {
        for name in [c"dlsym", c"ioctl", c"dlopen", c"getpid"] {
            assert!(next(name).is_some(), "{name:?}");
        }
        assert!(next(c"cuInit").is_none());
        assert!(own_file().is_some());
    }

    #[test]
    fn both_hash_tables_lead_to_the_same_function() {
        struct Both([Option<usize>; 2]);
        unsafe extern "C" fn each(object: *const Object, _: usize, both: *mut c_void) -> c_int {
            // SAFETY: as in `visit`.
            let (object, both) = unsafe { (&*object, &mut *both.cast::<Both>()) };
            let Some(t) = object.tables() else { return 0 };
            // SAFETY: as in `find`.
            unsafe {
                if !t.gnu_hash.is_null() && both.0[0].is_none() {
                    both.0[0] = t.by_gnu_hash(c"getpid".as_ptr().cast());
                }
                if !t.hash.is_null() && both.0[1].is_none() {
                    both.0[1] = t.by_hash(c"getpid".as_ptr().cast());
                }
            }
            0
        }
        let mut both = Both([None, None]);
        // SAFETY: `each` takes a `Both`.
        unsafe { iterate().unwrap()(each, (&raw mut both).cast()) };
        let [gnu, sysv] = both.0;
        assert!(gnu.is_some());
        // glibc of Debian has only the GNU table; where there are both, they agree.
        assert!(sysv.is_none() || sysv == gnu);
    }
}
