//! Calls of the program's that reach the driver without the shim, beside others that reach it.
//!
//! The driver gives the handles of code that was unloaded to code that is loaded later. If the shim does not see
//! both, it takes a kernel for another one. So once such calls are possible, nothing is transformed any more.
//!
//! A library behind the preloaded one may pass on other code than the shim has seen, or hand out other handles: then,
//! too, nothing is transformed, and what the program loads is not copied.
//!
//! Noticed are libraries that stand before the preloaded one and have functions of its names, and libraries that
//! were opened with `RTLD_DEEPBIND`, or with one that was, and refer to functions of its names elsewhere.

use crate::objects::{self, Visit, headers, parts};
use crate::table;
use crate::{host, resolve};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Entries of an object's dynamic section that are read.
const DYNAMIC_MAX: usize = 4_096;
/// Symbolic references of an object that are read.
const REFERENCES_MAX: usize = 1 << 24;
/// Bytes of a symbol's name that are read; those of entry points are shorter.
const NAME_BYTES_MAX: usize = 128;

/// Such calls are possible: for the process's life, because what the shim knows stays wrong.
static FOUND: AtomicBool = AtomicBool::new(false);
/// `dlopen` is another library's: whether it is asked for `RTLD_DEEPBIND` is not seen.
static IS_OPEN_UNSEEN: AtomicBool = AtomicBool::new(false);
/// Objects that had been unloaded when that was found.
static UNLOADED: AtomicU64 = AtomicU64::new(0);
/// Objects that were ever loaded, at the last search.
static LOADED: AtomicU64 = AtomicU64::new(0);
/// Objects that need not be looked at again, the first in the loader's order.
static SEARCHED: AtomicU64 = AtomicU64::new(0);

/// A core took this client on.
pub fn look() {
    let Some(own) = host::address().map(object_of) else { return };
    if FOUND.load(Acquire) {
        return;
    }
    let mut names = table::all().iter().map(|entry_point| entry_point.name).chain(["dlsym"]);
    if let Some(name) = names.find(|name| is_anothers(name, own)) {
        crate::log!("{name} is another library's, which stands before the preloaded one");
        return FOUND.store(true, Release);
    }
    if is_anothers("dlopen", own) && !IS_OPEN_UNSEEN.load(Acquire) {
        UNLOADED.store(counts().1, Relaxed);
        IS_OPEN_UNSEEN.store(true, Release);
    }
}

/// A library stands between the program and the driver: it may pass other code on than it was given.
pub fn interposed() {
    FOUND.store(true, Release);
}

/// Whether such calls are possible. Must be asked while the program makes the call that would use what is known.
#[inline]
pub fn is_found() -> bool {
    FOUND.load(Acquire) || (is_to_be_searched() && search())
}

fn is_to_be_searched() -> bool {
    IS_OPEN_UNSEEN.load(Acquire)
        || host::deep_bind().is_some_and(|deep| deep.objects.load(Acquire) != 0)
}

/// Whether the program finds a function of a name elsewhere than in the preloaded library.
fn is_anothers(name: &str, own: usize) -> bool {
    let mut terminated = [0_u8; NAME_BYTES_MAX];
    let Some(place) = terminated.get_mut(..name.len()) else { return true };
    place.copy_from_slice(name.as_bytes());
    let Ok(name) = CStr::from_bytes_until_nul(&terminated) else { return true };
    // SAFETY: a NUL-terminated name.
    let found = unsafe { host::dlsym()(libc::RTLD_DEFAULT, name.as_ptr()) };
    !found.is_null() && object_of(found as usize) != own && !is_plt_entry(found as usize)
}

/// Where the object that holds an address begins; 0: nowhere.
fn object_of(address: usize) -> usize {
    described(address).map_or(0, |(object, _)| object)
}

/// Whether an address is not a function's but, in a program that is not position-independent, that of its call of
/// one: such an address leads where other calls lead.
fn is_plt_entry(address: usize) -> bool {
    described(address).is_some_and(|(_, section)| section == Some(0))
}

/// Where an address's object begins, and the section that its symbol is defined in; 0: in another object.
fn described(address: usize) -> Option<(usize, Option<u16>)> {
    const RTLD_DL_SYMENT: c_int = 1;
    unsafe extern "C" {
        fn dladdr1(a: *const c_void, i: *mut libc::Dl_info, e: *mut *mut c_void, f: c_int)
        -> c_int;
    }
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    let mut symbol: *mut c_void = std::ptr::null_mut();
    // SAFETY: valid out-pointers, of which the first is written if the result is not 0; the symbol is the object's
    // own, which stays loaded.
    unsafe {
        let address = address as *const c_void;
        (dladdr1(address, info.as_mut_ptr(), &mut symbol, RTLD_DL_SYMENT) != 0).then(|| {
            let symbol = symbol.cast::<libc::Elf64_Sym>().as_ref();
            (info.assume_init().dli_fbase as usize, symbol.map(|symbol| symbol.st_shndx))
        })
    }
}

/// Objects that were ever loaded, and that were unloaded.
fn counts() -> (u64, u64) {
    unsafe extern "C" fn first(
        object: *mut libc::dl_phdr_info,
        _: usize,
        counts: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's description and `counts`' own value.
        unsafe { *counts.cast() = ((*object).dlpi_adds, (*object).dlpi_subs) };
        1
    }
    let mut counts = (0_u64, 0_u64);
    let first: Visit = first;
    // SAFETY: `first` takes such a pair, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut counts).cast()) };
    counts
}

struct Search {
    /// Addresses in objects that are passed over: the preloaded library, the shim and the driver.
    passed: [usize; 3],
    /// Where the preloaded library begins and ends.
    own: (usize, usize),
    /// Objects that are not looked at, the first in the loader's order.
    skipped: u64,
    index: u64,
    loaded: u64,
    unloaded: u64,
    is_found: bool,
}

#[cold]
fn search() -> bool {
    // The loader's lock is held only for the counts, where nothing was loaded.
    let (loaded, unloaded) = counts();
    let (mut before, mut unloaded_before) = (0, UNLOADED.load(Relaxed));
    if !IS_OPEN_UNSEEN.load(Acquire)
        && let Some(deep) = host::deep_bind()
    {
        before = deep.objects.load(Acquire).saturating_sub(1);
        unloaded_before = deep.unloaded.load(Acquire);
    }
    // What was unloaded cannot be looked at, and the others' places have changed.
    let mut is_found = unloaded != unloaded_before;
    if !is_found && loaded != LOADED.load(Acquire) {
        let mut search = Search {
            passed: [
                host::address().unwrap_or(0),
                look as *const () as usize,
                resolve::driver_address(),
            ],
            own: host::address().and_then(objects::of).map_or((0, 0), |own| (own.start, own.end)),
            skipped: before.max(SEARCHED.load(Acquire)),
            index: 0,
            loaded,
            unloaded: unloaded_before,
            is_found: false,
        };
        let visit: Visit = visit;
        // SAFETY: `visit` takes a `Search`, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        is_found = search.is_found;
        if !is_found {
            SEARCHED.fetch_max(search.index, AcqRel);
            LOADED.fetch_max(search.loaded, AcqRel);
        }
    }
    if is_found && !FOUND.swap(true, SeqCst) {
        crate::log!("a library opened with RTLD_DEEPBIND may call the driver without the shim");
    }
    is_found
}

unsafe extern "C" fn visit(
    object: *mut libc::dl_phdr_info,
    _: usize,
    search: *mut c_void,
) -> c_int {
    // SAFETY: the loader's description, valid during the call, and `search`'s own value.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<Search>()) };
    if search.index == 0 {
        search.loaded = object.dlpi_adds;
        search.is_found = object.dlpi_subs != search.unloaded;
    }
    if search.index >= search.skipped && !search.is_found {
        // SAFETY: a loaded object's tables are mapped, and the loader has read them.
        search.is_found = unsafe { refers_elsewhere(object, search) };
    }
    search.index += 1;
    c_int::from(search.is_found)
}

/// Whether an object refers to a function of an entry point's name, or to `dlsym`, that is not the preloaded
/// library's. So does a reference that is not bound yet: it may lead anywhere.
///
/// # Safety
/// The object is loaded.
unsafe fn refers_elsewhere(object: &libc::dl_phdr_info, search: &Search) -> bool {
    let base = object.dlpi_addr as usize;
    if search
        .passed
        .iter()
        .any(|address| parts(object).any(|(start, end)| (start..end).contains(address)))
    {
        return false;
    }
    let dynamic = headers(object).iter().find(|h| h.p_type == libc::PT_DYNAMIC);
    let Some(dynamic) = dynamic else { return false };
    let dynamic = base.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
    let mut tables = Tables::default();
    for index in 0..DYNAMIC_MAX {
        // SAFETY: the section ends with an entry of tag 0.
        let [tag, value] = unsafe { *dynamic.add(index) };
        // The loader has written addresses into sections that can be written.
        let at = if value < base { value.wrapping_add(base) } else { value };
        match tag {
            0 => break,
            2 => tables.calls.1 = value,
            5 => tables.strings.0 = at,
            6 => tables.symbols = at,
            7 => tables.data.0 = at,
            8 => tables.data.1 = value,
            10 => tables.strings.1 = value,
            23 => tables.calls.0 = at,
            _ => {}
        }
    }
    if tables.symbols == 0 || tables.strings.0 == 0 {
        return false;
    }
    [tables.data, tables.calls].into_iter().any(|(at, bytes)| {
        let count = if at == 0 { 0 } else { bytes / size_of::<libc::Elf64_Rela>() };
        let references = at as *const libc::Elf64_Rela;
        count > REFERENCES_MAX
            || (0..count).any(|index| {
                // SAFETY: within the table.
                unsafe { tables.leads_elsewhere(base, &*references.add(index), search.own) }
            })
    })
}

/// Addresses, and bytes, of an object's tables.
#[derive(Default)]
struct Tables {
    symbols: usize,
    strings: (usize, usize),
    data: (usize, usize),
    calls: (usize, usize),
}

impl Tables {
    /// # Safety
    /// The tables are those of the loaded object at `base`, and `reference` is one of its.
    unsafe fn leads_elsewhere(
        &self,
        base: usize,
        reference: &libc::Elf64_Rela,
        own: (usize, usize),
    ) -> bool {
        const R_X86_64_64: u64 = 1;
        const R_X86_64_GLOB_DAT: u64 = 6;
        const R_X86_64_JUMP_SLOT: u64 = 7;
        let (symbol, kind) = (reference.r_info >> 32, reference.r_info & 0xffff_ffff);
        if symbol == 0 || ![R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT].contains(&kind) {
            return false;
        }
        // SAFETY: the loader has read the same symbol, and bound the same place.
        let (name, value) = unsafe {
            let symbol = &*(self.symbols as *const libc::Elf64_Sym).add(symbol as usize);
            let left = self.strings.1.saturating_sub(symbol.st_name as usize).min(NAME_BYTES_MAX);
            let name = (self.strings.0 + symbol.st_name as usize) as *const c_char;
            let name = std::slice::from_raw_parts(name.cast::<u8>(), left);
            if !matches!(name, [b'c', b'u', ..] | [b'd', b'l', ..]) {
                return false;
            }
            let place = base.wrapping_add(reference.r_offset as usize) as *const usize;
            (CStr::from_bytes_until_nul(name), place.read_unaligned())
        };
        match name.map(CStr::to_bytes) {
            Ok(name) if name == b"dlsym" || table::exact(name).is_some() => {
                !(own.0..own.1).contains(&value)
            }
            Ok(_) => false,
            Err(_) => false,
        }
    }
}

/// Only in a forked child: it has the parent's libraries.
pub fn reset() {
    LOADED.store(0, SeqCst);
    SEARCHED.store(0, SeqCst);
}
