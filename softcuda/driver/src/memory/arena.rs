//! Address space for device memory. A device address is a host address; what
//! was handed out once stays mapped for good, so that a kernel that uses
//! freed memory reads stale bytes or is refused, but never brings the process
//! down.

use crate::config::{ALLOC_ALIGN_BYTES, COMMIT_CHUNK_BYTES, DISCARD_BYTES_MIN};
use std::collections::BTreeMap;

/// One reserved range with the free parts of it.
pub(crate) struct Arena {
    base: u64,
    len: u64,
    /// Start to length; neighbours are merged.
    free: BTreeMap<u64, u64>,
    /// Chunks that were made accessible.
    committed: Vec<bool>,
}

impl Arena {
    /// Reserves `len` bytes of address space, accessible to nobody yet.
    ///
    /// # Errors
    /// What the system says if there is no room.
    pub(crate) fn reserve(len: u64) -> std::io::Result<Self> {
        let len = len.next_multiple_of(COMMIT_CHUNK_BYTES);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address the system picks.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len as usize, libc::PROT_NONE, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the range was mapped just now. A forked child has no device.
        unsafe { libc::madvise(at, len as usize, libc::MADV_DONTFORK) };
        // Aligned starts; page alignment is more than enough.
        let base = at as u64;
        let chunks = (len / COMMIT_CHUNK_BYTES) as usize;
        Ok(Self { base, len, free: BTreeMap::from([(base, len)]), committed: vec![false; chunks] })
    }

    /// Addresses that are reserved, whether committed or not.
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.base..self.base + self.len
    }

    /// Takes `bytes` (already rounded, see [`rounded`]); `None` if no hole is
    /// large enough or the system has no memory.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&start, &len) = self.free.iter().find(|&(_, &len)| len >= bytes)?;
        if !self.commit(start, bytes) {
            return None;
        }
        self.free.remove(&start);
        if len > bytes {
            self.free.insert(start + bytes, len - bytes);
        }
        Some(start)
    }

    /// Gives back what [`take`](Self::take) gave.
    pub(crate) fn give(&mut self, mut start: u64, mut len: u64) {
        if len >= DISCARD_BYTES_MIN {
            let page = 4096;
            let (from, to) = (start.next_multiple_of(page), (start + len) / page * page);
            // SAFETY: whole pages inside one of our own accessible mappings
            // that no allocation covers any more; they read as zero afterwards.
            unsafe { libc::madvise(from as *mut _, (to - from) as usize, libc::MADV_DONTNEED) };
        }
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.free.remove(&before);
            start = before;
            len += before_len;
        }
        self.free.insert(start, len);
    }

    fn commit(&mut self, start: u64, bytes: u64) -> bool {
        let first = (start - self.base) / COMMIT_CHUNK_BYTES;
        let last = (start - self.base + bytes - 1) / COMMIT_CHUNK_BYTES;
        let chunks = &mut self.committed[first as usize..=last as usize];
        if chunks.iter().all(|&c| c) {
            return true;
        }
        let at = self.base + first * COMMIT_CHUNK_BYTES;
        let len = (last - first + 1) * COMMIT_CHUNK_BYTES;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range lies in our own reservation; making accessible
        // pages accessible again changes nothing.
        let done = unsafe { libc::mprotect(at as *mut _, len as usize, prot) } == 0;
        if done {
            chunks.fill(true);
        }
        done
    }
}

/// `bytes` as it is taken from the arena, `None` if absurd.
pub(crate) fn rounded(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(ALLOC_ALIGN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_merge_and_are_used_again() {
        let mut arena = Arena::reserve(4 << 20).unwrap();
        let a = arena.take(1 << 20).unwrap();
        let b = arena.take(1 << 20).unwrap();
        let c = arena.take(1 << 20).unwrap();
        assert_eq!(arena.take(2 << 20), None);
        arena.give(a, 1 << 20);
        arena.give(c, 1 << 20);
        arena.give(b, 1 << 20);
        assert_eq!(arena.free.len(), 1);
        let whole = arena.take(4 << 20).unwrap();
        // SAFETY: the arena handed out these bytes.
        unsafe { std::ptr::write_bytes(whole as *mut u8, 7, 4 << 20) };
    }

    proptest::proptest! {
        #[test]
        fn takes_never_overlap(sizes in proptest::collection::vec(1u64..300_000, 1..60)) {
            let mut arena = Arena::reserve(4 << 20).unwrap();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (i, size) in sizes.into_iter().enumerate() {
                let size = rounded(size).unwrap();
                if let Some(at) = arena.take(size) {
                    proptest::prop_assert!(held.iter().all(|&(b, l)| at + size <= b || b + l <= at));
                    held.push((at, size));
                }
                if i % 3 == 2 && !held.is_empty() {
                    let (at, len) = held.swap_remove(i % held.len());
                    arena.give(at, len);
                }
            }
        }
    }
}
