//! Modules, libraries and the kernels in them.

use crate::config::{SHARED_BYTES_DEFAULT, SHARED_BYTES_OPTIN};
use crate::context::Context;
use crate::driver::{Driver, driver};
use crate::error::{CuError, CuResult};
use crate::exec::{Code, LoadError};
use crate::memory::Kind;
use crate::registry::handle_of;
use crate::sync::lock;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tally_softcuda_vm::GlobalVar;

/// A `CUmodule`: code with its variables in one context.
pub(crate) struct Module {
    pub(crate) context: u64,
    pub(crate) code: Code,
    /// Name to address and size.
    pub(crate) globals: HashMap<String, (u64, u64)>,
    /// Handles that were given out, by name.
    functions: Mutex<HashMap<String, usize>>,
    /// Set for the modules of a library: where attributes are kept.
    library: Option<Arc<Library>>,
}

impl Module {
    pub(crate) fn load(
        driver: &Driver,
        context: &Context,
        ptx: &str,
        library: Option<Arc<Library>>,
    ) -> Result<Arc<Self>, LoadError> {
        let mut globals = HashMap::new();
        let code = Code::load(ptx, |variables| {
            let addresses = place(driver, context.id, variables)?;
            for (variable, &address) in variables.iter().zip(&addresses) {
                globals.insert(variable.name.clone(), (address, variable.size));
            }
            Ok(addresses)
        });
        let code = code.inspect_err(|_| release(driver, globals.values().map(|g| g.0)))?;
        let functions = Mutex::default();
        Ok(Arc::new(Self { context: context.id, code, globals, functions, library }))
    }

    /// The kernel called `name`, the same object every time.
    ///
    /// # Errors
    /// `NOT_FOUND` if there is none.
    pub(crate) fn function(self: &Arc<Self>, name: &str) -> CuResult<Arc<Function>> {
        let driver = driver()?;
        let mut functions = lock(&self.functions);
        if let Some(known) = functions.get(name).and_then(|&h| driver.functions.find(h)) {
            return Ok(known);
        }
        self.code.kernel(name).ok_or(CuError::NOT_FOUND)?;
        let attributes = match &self.library {
            Some(library) => library.kernel(name)?.attributes.clone(),
            None => Arc::default(),
        };
        let c_name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let function = Arc::new(Function { module: self.clone(), c_name, attributes });
        functions.insert(name.to_owned(), driver.functions.insert(&function));
        Ok(function)
    }

    /// Withdraws the handles of its kernels.
    pub(crate) fn withdraw(self: &Arc<Self>, driver: &Driver) {
        for (_, handle) in lock(&self.functions).drain() {
            let _ = driver.functions.remove(handle);
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            release(driver, self.globals.values().map(|g| g.0));
        }
    }
}

fn release(driver: &Driver, addresses: impl Iterator<Item = u64>) {
    for address in addresses {
        // Gone already if the context was torn down first.
        let _ = driver.memory.release(&driver.arbiter, address);
    }
}

/// Allocates the variables and writes what they start as.
fn place(driver: &Driver, context: u64, variables: &[GlobalVar]) -> CuResult<Vec<u64>> {
    let mut addresses = Vec::with_capacity(variables.len());
    for variable in variables {
        let got =
            driver.memory.allocate(&driver.arbiter, variable.size, Kind::Global, context, None);
        match got {
            Ok(address) => addresses.push(address),
            Err(error) => {
                release(driver, addresses.into_iter());
                return Err(error);
            }
        }
    }
    let address_of: HashMap<&str, u64> =
        variables.iter().map(|v| v.name.as_str()).zip(addresses.iter().copied()).collect();
    for (variable, &address) in variables.iter().zip(&addresses) {
        let mut bytes = variable.init.clone();
        bytes.resize(variable.size as usize, 0);
        for (offset, name) in &variable.relocations {
            let target = address_of.get(name.as_str()).copied().unwrap_or(0);
            let at = *offset as usize;
            if let Some(slot) = bytes.get_mut(at..at.saturating_add(8)) {
                slot.copy_from_slice(&target.to_le_bytes());
            }
        }
        // SAFETY: an allocation of `size` bytes made above, which nothing
        // else knows yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    }
    Ok(addresses)
}

/// What a program may set about a kernel; shared between a library's kernel
/// and the functions made from it.
#[derive(Debug)]
pub(crate) struct Attributes {
    dynamic_shared_max: AtomicU32,
    pub(crate) carveout: AtomicI32,
    /// Width, height and depth that a launch's clusters must have; 0 unless set.
    pub(crate) required_cluster: [AtomicI32; 3],
    pub(crate) cluster_nonportable: AtomicI32,
    pub(crate) cluster_policy: AtomicI32,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            dynamic_shared_max: AtomicU32::new(u32::MAX),
            carveout: AtomicI32::new(-1),
            required_cluster: Default::default(),
            cluster_nonportable: AtomicI32::new(0),
            cluster_policy: AtomicI32::new(0),
        }
    }
}

pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    pub(crate) c_name: CString,
    pub(crate) attributes: Arc<Attributes>,
}

impl Function {
    /// What the interpreter knows about it.
    ///
    /// # Errors
    /// `NOT_FOUND`, which cannot happen for a function that was made.
    pub(crate) fn kernel(&self) -> CuResult<&tally_softcuda_vm::Kernel> {
        let name = self.c_name.to_str().map_err(|_| CuError::NOT_FOUND)?;
        self.module.code.kernel(name).ok_or(CuError::NOT_FOUND)
    }

    /// Dynamic shared memory that a launch may ask for.
    pub(crate) fn dynamic_shared_max(&self) -> CuResult<u32> {
        let default = SHARED_BYTES_DEFAULT.saturating_sub(self.kernel()?.static_shared_bytes);
        Ok(match self.attributes.dynamic_shared_max.load(SeqCst) {
            u32::MAX => default,
            set => set,
        })
    }

    /// Opts in to more (or less) dynamic shared memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it would not fit an SM.
    pub(crate) fn set_dynamic_shared_max(&self, bytes: i32) -> CuResult {
        let bytes = u32::try_from(bytes).map_err(|_| CuError::INVALID_VALUE)?;
        if bytes > SHARED_BYTES_OPTIN.saturating_sub(self.kernel()?.static_shared_bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        self.attributes.dynamic_shared_max.store(bytes, SeqCst);
        Ok(())
    }

    /// Blocks of that shape that an SM runs at one time: one, or none if they
    /// do not fit.
    pub(crate) fn blocks_per_sm(&self, threads: u64, dynamic_shared: u64) -> CuResult<u32> {
        let kernel = self.kernel()?;
        let shared = dynamic_shared.saturating_add(kernel.static_shared_bytes.into());
        let fits = threads <= u64::from(kernel.max_threads) && shared <= SHARED_BYTES_OPTIN.into();
        Ok(u32::from(fits))
    }
}

/// A `CUlibrary`: code that is loaded into a context when it is first used there.
pub(crate) struct Library {
    ptx: String,
    /// Emptied by unloading, which breaks the circle.
    kernels: Mutex<Vec<Arc<KernelHandle>>>,
    modules: Mutex<HashMap<u64, Arc<Module>>>,
}

pub(crate) struct KernelHandle {
    pub(crate) library: Arc<Library>,
    pub(crate) c_name: CString,
    pub(crate) attributes: Arc<Attributes>,
}

impl Library {
    /// Parses PTX; nothing is placed yet.
    pub(crate) fn load(driver: &Driver, ptx: String) -> Result<Arc<Self>, LoadError> {
        let names = crate::exec::kernel_names(&ptx)?;
        let library = Arc::new(Self { ptx, kernels: Mutex::default(), modules: Mutex::default() });
        let kernels = names.into_iter().filter_map(|name| {
            let c_name = CString::new(name).ok()?;
            let attributes = Arc::default();
            let kernel = Arc::new(KernelHandle { library: library.clone(), c_name, attributes });
            driver.kernels.insert(&kernel);
            Some(kernel)
        });
        let kernels = kernels.collect();
        *lock(&library.kernels) = kernels;
        Ok(library)
    }

    pub(crate) fn kernels(&self) -> Vec<Arc<KernelHandle>> {
        lock(&self.kernels).clone()
    }

    /// # Errors
    /// `NOT_FOUND` if there is no such kernel.
    pub(crate) fn kernel(&self, name: &str) -> CuResult<Arc<KernelHandle>> {
        let kernels = lock(&self.kernels);
        let found = kernels.iter().find(|k| k.c_name.to_bytes() == name.as_bytes());
        found.cloned().ok_or(CuError::NOT_FOUND)
    }

    /// The library in `context`, loaded now if it was not yet.
    pub(crate) fn module(self: &Arc<Self>, context: &Context) -> CuResult<Arc<Module>> {
        let driver = driver()?;
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&context.id)
            && driver.modules.find(handle_of(module)).is_some()
        {
            return Ok(module.clone());
        }
        let _alone = context.synchronize_alone()?;
        let module = Module::load(driver, context, &self.ptx, Some(self.clone()))
            .map_err(|error| error.code)?;
        driver.modules.insert(&module);
        modules.insert(context.id, module.clone());
        Ok(module)
    }

    /// Ids of the contexts that it is loaded in.
    pub(crate) fn contexts(&self) -> Vec<u64> {
        lock(&self.modules).keys().copied().collect()
    }

    /// Withdraws everything that was made from it.
    pub(crate) fn unload(&self, driver: &Driver) {
        for kernel in std::mem::take(&mut *lock(&self.kernels)) {
            let _ = driver.kernels.remove(handle_of(&kernel));
        }
        for (_, module) in lock(&self.modules).drain() {
            module.withdraw(driver);
            let _ = driver.modules.remove(handle_of(&module));
        }
    }
}

impl KernelHandle {
    pub(crate) fn function(&self, context: &Context) -> CuResult<Arc<Function>> {
        let name = self.c_name.to_str().map_err(|_| CuError::NOT_FOUND)?;
        self.library.module(context)?.function(name)
    }
}

/// What a `CUfunction` argument stands for: a function, or a library's kernel
/// in the current context.
///
/// # Errors
/// `INVALID_HANDLE` if it is neither.
pub(crate) fn resolve_function(handle: usize) -> CuResult<Arc<Function>> {
    let driver = driver()?;
    if let Some(function) = driver.functions.find(handle) {
        return Ok(function);
    }
    let kernel = driver.kernels.get(handle)?;
    kernel.function(&*crate::context::current()?)
}
