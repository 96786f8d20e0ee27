//! `cuLibrary*` and `cuKernel*`: code that belongs to no context.

use super::module::{JitOptions, read_file};
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::exec::LoadError;
use crate::ffi::{In, Out, exports};
use crate::image;
use crate::module::{KernelHandle, Library};
use crate::registry::handle_of;
use std::ffi::{c_char, c_void};
use std::sync::Arc;

fn load(out: &Out<usize>, ptx: Result<String, LoadError>, options: &JitOptions) -> CuResult {
    let driver = driver()?;
    let library = options.report(ptx.and_then(|ptx| Library::load(driver, ptx)))?;
    out.set(driver.libraries.insert(&library))
}

fn kernel(handle: usize) -> CuResult<Arc<KernelHandle>> {
    driver()?.kernels.get(handle)
}

fn global(address: &Out<u64>, bytes: &Out<usize>, library: usize, name: &In<c_char>) -> CuResult {
    let module = driver()?.libraries.get(library)?.module(&*current()?)?;
    let &(at, size) = module.globals.get(name.text()?).ok_or(CuError::NOT_FOUND)?;
    address.set_if(at);
    bytes.set_if(size as usize);
    Ok(())
}

exports! {
    fn cuLibraryLoadData(
        library: Out<usize>,
        image: In<u8>,
        names: In<u32>,
        values: *mut *mut c_void,
        count: u32,
        _library_names: *mut u32,
        _library_values: *mut *mut c_void,
        _library_count: u32,
    ) {
        driver()?;
        library.check()?;
        let options = JitOptions::new(count, names, values)?;
        load(&library, image::ptx_in_memory(&image), &options)
    }

    fn cuLibraryLoadFromFile(
        library: Out<usize>,
        name: In<c_char>,
        names: In<u32>,
        values: *mut *mut c_void,
        count: u32,
        _library_names: *mut u32,
        _library_values: *mut *mut c_void,
        _library_count: u32,
    ) {
        driver()?;
        library.check()?;
        let options = JitOptions::new(count, names, values)?;
        load(&library, read_file(&name)?, &options)
    }

    fn cuLibraryUnload(library: usize) {
        let driver = driver()?;
        let found = driver.libraries.get(library)?;
        for context in found.contexts() {
            Context::synchronize_by_id(driver, context)?;
        }
        driver.libraries.remove(library)?;
        found.unload(driver);
        Ok(())
    }

    fn cuLibraryGetKernel(kernel: Out<usize>, library: usize, name: In<c_char>) {
        let library = driver()?.libraries.get(library)?;
        kernel.set(handle_of(&library.kernel(name.text()?)?))
    }

    fn cuLibraryGetKernelCount(count: Out<u32>, library: usize) {
        count.set(driver()?.libraries.get(library)?.kernels().len() as u32)
    }

    fn cuLibraryEnumerateKernels(kernels: Out<usize>, count: u32, library: usize) {
        let library = driver()?.libraries.get(library)?;
        kernels.check()?;
        kernels.set_slice(library.kernels().iter().map(handle_of), count as usize);
        Ok(())
    }

    fn cuLibraryGetModule(module: Out<usize>, library: usize) {
        let library = driver()?.libraries.get(library)?;
        module.check()?;
        module.set(handle_of(&library.module(&*current()?)?))
    }

    fn cuLibraryGetGlobal(
        address: Out<u64>,
        bytes: Out<usize>,
        library: usize,
        name: In<c_char>,
    ) {
        global(&address, &bytes, library, &name)
    }

    fn cuLibraryGetManaged(
        _address: Out<u64>,
        _bytes: Out<usize>,
        library: usize,
        _name: In<c_char>,
    ) {
        driver()?.libraries.get(library)?;
        // PTX for this device has no managed variables that it knows of.
        Err(CuError::NOT_FOUND)
    }

    fn cuKernelGetFunction(function: Out<usize>, handle: usize) {
        let kernel = kernel(handle)?;
        function.check()?;
        function.set(handle_of(&kernel.function(&*current()?)?))
    }

    fn cuKernelGetLibrary(library: Out<usize>, handle: usize) {
        library.set(handle_of(&kernel(handle)?.library))
    }

    fn cuKernelGetName(name: Out<*const c_char>, handle: usize) {
        name.set(kernel(handle)?.c_name.as_ptr())
    }

    fn cuKernelGetAttribute(value: Out<i32>, attribute: u32, handle: usize, device: i32) {
        crate::device::check(device)?;
        let function = kernel(handle)?.function(&*current()?)?;
        value.set(super::function::attribute(&function, attribute)?)
    }

    fn cuKernelSetAttribute(attribute: u32, value: i32, handle: usize, device: i32) {
        crate::device::check(device)?;
        let function = kernel(handle)?.function(&*current()?)?;
        super::function::set_attribute(&function, attribute, value)
    }

    fn cuKernelSetCacheConfig(handle: usize, config: u32, device: i32) {
        crate::device::check(device)?;
        kernel(handle)?;
        if config > 3 { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuKernelGetParamInfo(handle: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        let function = kernel(handle)?.function(&*current()?)?;
        super::function::param(&function, index, &offset, &size)
    }

    fn cuKernelGetParamCount(handle: usize, count: Out<usize>) {
        let function = kernel(handle)?.function(&*current()?)?;
        count.set(function.kernel()?.params.len())
    }
}
