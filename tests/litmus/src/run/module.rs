//! Loading modules in the ways that programs do.

use crate::cu::{Cuda, Done, Failed, Handle};
use crate::kernels::{NAMES, ptx};
use crate::program::{Module, Source};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use tally_rewriter::fatbin;

/// Longest text of a module.
const TEXT_BYTES_MAX: usize = 1 << 15;
/// Where texts of [`Source::Static`] lie, in the program's own data: one after the other.
static TEXT: Mutex<[u8; TEXT_BYTES_MAX]> = Mutex::new([0; TEXT_BYTES_MAX]);
static FILES: AtomicU32 = AtomicU32::new(0);
pub const SHARED_BYTES: u32 = 8;
/// Kernels of which there can be one block on an SM.
const SPREAD: [&str; 4] = ["barrier", "count", "streamk_gemm", "each_sm"];

/// A module and its kernels.
pub struct Loaded {
    module: Handle,
    library: Handle,
    functions: Vec<Handle>,
}

impl Loaded {
    /// Loads it into the current context, all kernels ready to be launched.
    ///
    /// # Errors
    /// Of the driver.
    pub fn new(
        cuda: &Cuda,
        wanted: Module,
        folder: &Path,
        shared_max: u32,
    ) -> Result<Self, Failed> {
        let text = ptx(wanted.constant);
        let mut loaded = Self { module: 0, library: 0, functions: Vec::new() };
        loaded.load(cuda, wanted, &text, folder)?;
        for name in NAMES {
            let function = loaded.look_up(cuda, name)?;
            // SAFETY: a function of ours, here and below.
            unsafe { cuda.cuFuncLoad(function) }?;
            if SPREAD.contains(&name) {
                // SAFETY: as above.
                unsafe { cuda.cuFuncSetAttribute(function, SHARED_BYTES, shared_max as i32) }?;
            }
            loaded.functions.push(function);
        }
        Ok(loaded)
    }

    fn load(&mut self, cuda: &Cuda, wanted: Module, text: &str, folder: &Path) -> Done {
        let zero_terminated = [text.as_bytes(), &[0]].concat();
        // SAFETY, for all: images that are complete and live through the call, and valid out pointers.
        match wanted.source {
            Source::Heap => {
                // SAFETY: see above.
                unsafe { cuda.cuModuleLoadData(&mut self.module, zero_terminated.as_ptr()) }
            }
            Source::Static => {
                let mut buffer = TEXT.lock().unwrap_or_else(PoisonError::into_inner);
                buffer[..zero_terminated.len()].copy_from_slice(&zero_terminated);
                // SAFETY: see above.
                unsafe { cuda.cuModuleLoadData(&mut self.module, buffer.as_ptr()) }
            }
            Source::File => self.load_file(cuda, wanted, text, folder),
            Source::Library => {
                let (none, nothing) = (std::ptr::null(), std::ptr::null());
                let image = zero_terminated.as_ptr();
                // SAFETY: see above; no options.
                unsafe {
                    cuda.cuLibraryLoadData(
                        &mut self.library,
                        image,
                        none,
                        nothing,
                        0,
                        none,
                        nothing,
                        0,
                    )
                }
            }
            Source::Fatbin => {
                let image = fatbin::pack(&[(fatbin::Kind::Ptx, 70, &zero_terminated)]);
                // SAFETY: see above.
                unsafe { cuda.cuModuleLoadData(&mut self.module, image.as_ptr()) }
            }
        }
    }

    /// From a file that is another program's right afterwards, of the same length.
    fn load_file(&mut self, cuda: &Cuda, wanted: Module, text: &str, folder: &Path) -> Done {
        let failed = |_| Failed { call: "writing a module's file", code: 0 };
        // Threads load at the same time.
        let number = FILES.fetch_add(1, SeqCst);
        let path: PathBuf = folder.join(format!("module-{}-{number}.ptx", std::process::id()));
        std::fs::write(&path, text).map_err(failed)?;
        let name = CString::new(path.to_string_lossy().as_bytes()).unwrap_or_default();
        // SAFETY: a C string and a valid out pointer.
        unsafe { cuda.cuModuleLoad(&mut self.module, name.as_ptr().cast()) }?;
        let next = path.with_extension("new");
        std::fs::write(&next, ptx(wanted.constant ^ 1)).map_err(failed)?;
        std::fs::rename(&next, &path).map_err(failed)
    }

    fn look_up(&self, cuda: &Cuda, name: &str) -> Result<Handle, Failed> {
        let name = CString::new(name).unwrap_or_default();
        let (mut function, mut kernel) = (0, 0);
        // SAFETY: a module or library of ours, C strings and valid out pointers.
        unsafe {
            if self.library == 0 {
                cuda.cuModuleGetFunction(&mut function, self.module, name.as_ptr().cast())?;
            } else {
                cuda.cuLibraryGetKernel(&mut kernel, self.library, name.as_ptr().cast())?;
                cuda.cuKernelGetFunction(&mut function, kernel)?;
            }
        }
        Ok(function)
    }

    /// A kernel by its name.
    pub fn function(&self, name: &str) -> Handle {
        let at = NAMES.iter().position(|known| *known == name);
        at.map_or(0, |at| self.functions[at])
    }

    /// Unloads it; its context is current.
    ///
    /// # Errors
    /// Of the driver.
    pub fn unload(&self, cuda: &Cuda) -> Done {
        // SAFETY: of ours, not used again.
        unsafe {
            if self.library == 0 {
                cuda.cuModuleUnload(self.module)
            } else {
                cuda.cuLibraryUnload(self.library)
            }
        }
    }
}
