//! Which loaded object an address lies in.
//!
//! `dladdr` and `dlsym` wait for a lock that a thread holds while it runs a library's constructors, and those may wait
//! for the thread that asks. What is here waits only for lists to change.

use std::ffi::{CStr, c_int, c_void};

/// Bytes of a file's name that are kept.
const NAME_BYTES_MAX: usize = 128;

/// Type of the callback of [`libc::dl_iterate_phdr`].
pub type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;

/// An ELF object in the process.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// Address at which the object's first segment begins.
    pub start: usize,
    /// Address at which the object's last segment ends.
    pub end: usize,
    name: [u8; NAME_BYTES_MAX],
    name_bytes: usize,
}

impl Object {
    /// Its file's name without folders, as far as it is kept; empty: the program.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name[..self.name_bytes]).into_owned()
    }
}

/// Where the parts of an object that are mapped begin and end.
pub fn parts(object: &libc::dl_phdr_info) -> impl Iterator<Item = (usize, usize)> {
    let base = object.dlpi_addr as usize;
    let loaded = headers(object).iter().filter(|h| h.p_type == libc::PT_LOAD);
    loaded.map(move |h| {
        let start = base.wrapping_add(h.p_vaddr as usize);
        (start, start.wrapping_add(h.p_memsz as usize))
    })
}

/// An object's program headers.
pub fn headers(object: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    // SAFETY: the loader gives as many as it says.
    unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) }
}

/// Its file's name without folders; empty: the program.
fn name_of(object: &libc::dl_phdr_info) -> &[u8] {
    if object.dlpi_name.is_null() {
        return &[];
    }
    // SAFETY: the loader's own string, which stays as long as its description.
    let path = unsafe { CStr::from_ptr(object.dlpi_name) }.to_bytes();
    let name_at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    &path[name_at..]
}

/// The object that holds an address, if any does.
pub fn of(address: usize) -> Option<Object> {
    /// Neither allocates nor takes a lock: whoever holds it may wait for the loader's.
    unsafe extern "C" fn find(
        object: *mut libc::dl_phdr_info,
        _: usize,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's description and `of`'s own value.
        let (object, (address, found)) =
            unsafe { (&*object, &mut *found.cast::<(usize, Option<Object>)>()) };
        let parts = || parts(object);
        if !parts().any(|(start, end)| (start..end).contains(address)) {
            return 0;
        }
        let (start, end) = (parts().map(|p| p.0).min(), parts().map(|p| p.1).max());
        let from = name_of(object);
        let (mut name, name_bytes) = ([0; NAME_BYTES_MAX], from.len().min(NAME_BYTES_MAX));
        name[..name_bytes].copy_from_slice(&from[..name_bytes]);
        *found =
            Some(Object { start: start.unwrap_or(0), end: end.unwrap_or(0), name, name_bytes });
        1
    }
    let mut found = (address, None);
    let find: Visit = find;
    // SAFETY: `find` takes such a pair, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut found).cast()) };
    found.1
}

/// Whether an object is loaded whose file's name without folders begins with one of these.
pub fn is_any_named(beginnings: &[&str]) -> bool {
    /// Neither allocates nor takes a lock, as in [`of`].
    unsafe extern "C" fn look(
        object: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's description and `is_any_named`'s own value.
        let (object, (beginnings, found)) =
            unsafe { (&*object, &mut *search.cast::<(&[&str], bool)>()) };
        let name = name_of(object);
        *found = beginnings.iter().any(|beginning| name.starts_with(beginning.as_bytes()));
        c_int::from(*found)
    }
    let mut search = (beginnings, false);
    let look: Visit = look;
    // SAFETY: `look` takes such a pair, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.1
}

/// Bytes of thread-local data of all objects, which lie on the stack of each thread.
pub fn thread_local_bytes() -> usize {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
        // SAFETY: the loader's description and `thread_local_bytes`' own value.
        let (object, sum) = unsafe { (&*object, &mut *sum.cast::<usize>()) };
        let of_threads = headers(object).iter().filter(|h| h.p_type == libc::PT_TLS);
        *sum += of_threads.map(|h| (h.p_memsz + h.p_align) as usize).sum::<usize>();
        0
    }
    let mut sum = 0_usize;
    let add: Visit = add;
    // SAFETY: `add` takes such a number, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_told_apart_and_named() {
        let here = of(objects_are_told_apart_and_named as *const () as usize).unwrap();
        let libc = of(libc::getpid as *const () as usize).unwrap();
        assert!(here.start < here.end && here.start != libc.start);
        assert!(libc.name().starts_with("libc."), "{}", libc.name());
        assert_eq!(here.name(), "", "the program");
        assert!(of(16).is_none());
        assert!(is_any_named(&["libnone.", "libc."]));
        assert!(!is_any_named(&["libnone.", "ibc."]));
    }
}
