//! The memory that programs' words are in.

use crate::cu::{Cuda, Done, Handle};
use crate::program::Word;
use anyhow::Result;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Words of the host that programs may have.
pub const HOST_WORDS: usize = 1 << 14;
/// Flags that a program may have.
pub const FLAGS: usize = 1 << 10;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`, and the same of registrations.
const PORTABLE_MAPPED: u32 = 3;

/// Words of the host, pinned and mapped, and flags, which the driver knows nothing of. With two
/// processes all of it is a file that both map.
pub struct HostMemory {
    words: &'static [AtomicU32],
    flags: &'static [AtomicU32],
    /// What the device calls the first word.
    address: u64,
}

impl HostMemory {
    /// Gets and pins it. A context is current.
    ///
    /// # Errors
    /// If the driver or the system has none.
    pub fn new(cuda: &Cuda, shared: Option<&Path>) -> Result<Self> {
        let bytes = 4 * HOST_WORDS;
        let mut at = std::ptr::null_mut();
        let flags = match shared {
            Some(path) => {
                let all = map(path, bytes + 4 * FLAGS)?;
                // SAFETY: a mapping of that size that is never unmapped.
                unsafe { cuda.cuMemHostRegister_v2(all, bytes, PORTABLE_MAPPED) }?;
                at = all;
                // SAFETY: as above: the flags lie behind the words.
                unsafe {
                    std::slice::from_raw_parts(all.cast::<AtomicU32>().add(HOST_WORDS), FLAGS)
                }
            }
            None => {
                // SAFETY: a valid out pointer. The memory is never freed.
                unsafe { cuda.cuMemHostAlloc(&mut at, bytes, PORTABLE_MAPPED) }?;
                (0..FLAGS).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().leak()
            }
        };
        let mut address = 0;
        // SAFETY: pinned memory of ours, and a valid out pointer.
        unsafe { cuda.cuMemHostGetDevicePointer_v2(&mut address, at, 0) }?;
        // SAFETY: of that size, aligned, and there for ever; whoever writes does so atomically
        // or by whole words.
        let words = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU32>(), HOST_WORDS) };
        Ok(Self { words, flags, address })
    }

    pub fn word(&self, at: u32) -> &'static AtomicU32 {
        &self.words[at as usize]
    }

    pub fn flag(&self, at: usize) -> &'static AtomicU32 {
        &self.flags[at]
    }

    /// Sets the first `words` words and `flags` flags to 0 again.
    pub fn clear(&self, words: u32, flags: usize) {
        let all = self.words[..words as usize].iter().chain(&self.flags[..flags]);
        all.for_each(|word| word.store(0, SeqCst));
    }

    /// The first `count` words as they are now.
    pub fn read(&self, count: u32) -> Vec<u32> {
        self.words[..count as usize].iter().map(|word| word.load(SeqCst)).collect()
    }
}

/// Maps a file, which gets that size.
fn map(path: &Path, bytes: usize) -> Result<*mut c_void> {
    let file =
        std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    file.set_len(bytes as u64)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (fd, null) = (file.as_raw_fd(), std::ptr::null_mut());
    // SAFETY: a new shared mapping of a file of that size; never unmapped.
    let at = unsafe { libc::mmap(null, bytes, protection, libc::MAP_SHARED, fd, 0) };
    anyhow::ensure!(at != libc::MAP_FAILED, "mapping {}", path.display());
    Ok(at)
}

/// A context's words and scratch memory.
pub struct DeviceMemory {
    address: u64,
    /// Words that it has room for, and where scratch memory starts.
    capacity: u32,
    scratch: u32,
}

impl DeviceMemory {
    /// In the current context, all zero.
    ///
    /// # Errors
    /// If there is not so much.
    pub fn new(cuda: &Cuda, words: u32, scratch_words: u32) -> Result<Self, crate::cu::Failed> {
        let capacity = (words + scratch_words).max(1);
        let mut memory = Self { address: 0, capacity, scratch: words };
        // SAFETY: a valid out pointer.
        unsafe { cuda.cuMemAlloc_v2(&mut memory.address, 4 * capacity as usize) }?;
        memory.clear(cuda)?;
        Ok(memory)
    }

    fn clear(&self, cuda: &Cuda) -> Done {
        // SAFETY: the whole of what was allocated.
        unsafe { cuda.cuMemsetD32_v2(self.address, 0, self.capacity as usize) }?;
        // The fill is asynchronous, and streams that do not block do not wait for it.
        // SAFETY: no pointers.
        unsafe { cuda.cuCtxSynchronize() }
    }

    /// Divides it anew for another program; `false` if it is too small.
    ///
    /// # Errors
    /// Of the driver.
    pub fn reuse(
        &mut self,
        cuda: &Cuda,
        words: u32,
        scratch: u32,
    ) -> Result<bool, crate::cu::Failed> {
        if words + scratch > self.capacity {
            return Ok(false);
        }
        self.scratch = words;
        self.clear(cuda)?;
        Ok(true)
    }

    /// The words; nothing works on them any more.
    ///
    /// # Errors
    /// Of the driver.
    pub fn read(&self, cuda: &Cuda) -> Result<Vec<u32>, crate::cu::Failed> {
        let mut words = vec![0_u32; self.scratch as usize];
        if !words.is_empty() {
            let bytes = 4 * words.len();
            // SAFETY: both sides have that many bytes.
            unsafe { cuda.cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), self.address, bytes) }?;
        }
        Ok(words)
    }

    /// The device's address of a word.
    pub fn word(&self, at: u32) -> u64 {
        self.address + 4 * u64::from(at)
    }

    /// The device's address of a word of scratch memory.
    pub fn scratch(&self, at: u32) -> u64 {
        self.word(self.scratch + at)
    }

    /// Gives it back.
    ///
    /// # Errors
    /// Of the driver.
    pub fn free(self, cuda: &Cuda) -> Done {
        // SAFETY: memory of ours, not used again.
        unsafe { cuda.cuMemFree_v2(self.address) }
    }
}

/// The device's address of a word of the host or of the device memory `of` a context.
pub fn address(host: &HostMemory, word: Word, of: impl Fn(usize) -> Option<u64>) -> Option<u64> {
    match word {
        Word::Host(at) => Some(host.address + 4 * u64::from(at)),
        Word::Device(context, at) => Some(of(context)? + 4 * u64::from(at)),
    }
}

/// A handle that a thread stores and others load.
#[derive(Default)]
pub struct Slot(std::sync::atomic::AtomicUsize);

impl Slot {
    pub fn get(&self) -> Handle {
        self.0.load(SeqCst)
    }

    /// Puts something in and returns what was there.
    pub fn set(&self, handle: Handle) -> Handle {
        self.0.swap(handle, SeqCst)
    }
}
