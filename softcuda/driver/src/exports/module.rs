use crate::config::{IMAGE_BYTES_MAX, load_time};
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::exec::{LoadError, kernel_names};
use crate::ffi::{In, Out, exports};
use crate::image;
use crate::launch::wait_as_compiler;
use crate::module::Module;
use crate::registry::handle_of;
use std::ffi::{c_char, c_void};
use std::sync::LazyLock;

/// `CU_JIT_INFO_LOG_BUFFER` and its neighbours.
const INFO_LOG: u32 = 3;
const INFO_LOG_BYTES: u32 = 4;
const ERROR_LOG: u32 = 5;
const ERROR_LOG_BYTES: u32 = 6;
/// Whether the program wants kernels loaded one by one, by the environment as it was when first asked.
static LOADS_LAZILY: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "LAZY"));
/// Options that are looked at, at most.
const OPTIONS_MAX: u32 = 64;

/// The options of a load: where its messages go.
pub(super) struct JitOptions {
    count: u32,
    names: In<u32>,
    values: *mut *mut c_void,
}

impl JitOptions {
    pub(super) fn new(count: u32, names: In<u32>, values: *mut *mut c_void) -> CuResult<Self> {
        if count > OPTIONS_MAX {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(Self { count, names, values })
    }

    pub(super) fn none() -> Self {
        Self { count: 0, names: In::new(std::ptr::null()), values: std::ptr::null_mut() }
    }

    fn position(&self, name: u32) -> Option<usize> {
        (0..self.count as usize).find(|&i| self.names.at(i) == Ok(name))
    }

    fn value(&self, at: usize) -> CuResult<*mut c_void> {
        In::new(self.values.cast_const()).at(at)
    }

    /// Writes `text` to a log buffer, and how much was written over its size.
    fn write(&self, buffer: u32, size: u32, text: &str) -> CuResult {
        let Some(at) = self.position(size) else { return Ok(()) };
        let room = self.value(at)? as usize;
        let mut written = 0;
        if let Some(buffer) = self.position(buffer)
            && room > 0
        {
            let buffer = self.value(buffer)?;
            Out::new(buffer.cast::<c_char>()).set_text(text, room)?;
            written = text.len().min(room - 1);
        }
        // The size goes back in the option's value itself.
        let slot = Out::new(self.values.wrapping_add(at).cast::<usize>());
        slot.set(written)
    }

    /// Reports how a load went.
    pub(super) fn report<T>(&self, loaded: Result<T, LoadError>) -> CuResult<T> {
        match loaded {
            Ok(value) => {
                self.write(INFO_LOG, INFO_LOG_BYTES, "")?;
                self.write(ERROR_LOG, ERROR_LOG_BYTES, "")?;
                Ok(value)
            }
            Err(error) => {
                crate::config::log(format_args!("module refused: {}", error.text));
                self.write(INFO_LOG, INFO_LOG_BYTES, "")?;
                self.write(ERROR_LOG, ERROR_LOG_BYTES, &error.text)?;
                Err(error.code)
            }
        }
    }
}

/// Reads a file and finds the PTX in it.
pub(super) fn read_file(name: &In<c_char>) -> CuResult<Result<String, LoadError>> {
    let path = name.text()?;
    let length = std::fs::metadata(path).map_err(|_| CuError::FILE_NOT_FOUND)?.len();
    if length > IMAGE_BYTES_MAX {
        return Err(CuError::INVALID_IMAGE);
    }
    let bytes = std::fs::read(path).map_err(|_| CuError::FILE_NOT_FOUND)?;
    Ok(image::ptx_in_bytes(&bytes))
}

fn load(out: &Out<usize>, ptx: Result<String, LoadError>, options: &JitOptions) -> CuResult {
    let (driver, context) = (driver()?, current()?);
    let _alone = context.synchronize_alone()?;
    std::thread::sleep(load_time());
    let text = ptx.as_ref().ok().filter(|ptx| !ptx.starts_with(image::LINKED));
    if let Some(Ok(kernels)) = text.map(|ptx| kernel_names(ptx)) {
        wait_as_compiler(&kernels)?;
    }
    let module = ptx.and_then(|ptx| Module::load(driver, &context, &ptx, None));
    out.set(driver.modules.insert(&options.report(module)?))
}

exports! {
    fn cuModuleLoad(module: Out<usize>, name: In<c_char>) {
        current()?;
        module.check()?;
        load(&module, read_file(&name)?, &JitOptions::none())
    }

    fn cuModuleLoadData(module: Out<usize>, image: In<u8>) {
        current()?;
        module.check()?;
        load(&module, image::ptx_in_memory(&image), &JitOptions::none())
    }

    fn cuModuleLoadDataEx(
        module: Out<usize>,
        image: In<u8>,
        count: u32,
        names: In<u32>,
        values: *mut *mut c_void,
    ) {
        current()?;
        module.check()?;
        let options = JitOptions::new(count, names, values)?;
        load(&module, image::ptx_in_memory(&image), &options)
    }

    fn cuModuleLoadFatBinary(module: Out<usize>, image: In<u8>) {
        current()?;
        module.check()?;
        load(&module, image::ptx_in_memory(&image), &JitOptions::none())
    }

    fn cuModuleUnload(module: usize) {
        let driver = driver()?;
        let found = driver.modules.get(module)?;
        current()?;
        // Its kernels may still run, and its variables be in use; other threads may launch meanwhile.
        Context::synchronize_by_id(driver, found.context)?;
        driver.modules.remove(module)?;
        found.withdraw(driver);
        Ok(())
    }

    fn cuModuleGetLoadingMode(mode: Out<u32>) {
        driver()?;
        // CU_MODULE_EAGER_LOADING, CU_MODULE_LAZY_LOADING: one that loads early keeps to both.
        mode.set(1 + u32::from(*LOADS_LAZILY))
    }

    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: In<c_char>) {
        let module = driver()?.modules.get(module)?;
        function.check()?;
        function.set(handle_of(&module.function(name.text()?)?))
    }

    fn cuModuleGetFunctionCount(count: Out<u32>, module: usize) {
        count.set(driver()?.modules.get(module)?.code.names().len() as u32)
    }

    fn cuModuleEnumerateFunctions(functions: Out<usize>, count: u32, module: usize) {
        let module = driver()?.modules.get(module)?;
        let names = module.code.names();
        let handles: Vec<usize> = names
            .iter()
            .map(|name| Ok(handle_of(&module.function(name)?)))
            .collect::<CuResult<_>>()?;
        functions.check()?;
        functions.set_slice(handles, count as usize);
        Ok(())
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: usize, name: In<c_char>) {
        let module = driver()?.modules.get(module)?;
        let &(at, size) = module.globals.get(name.text()?).ok_or(CuError::NOT_FOUND)?;
        address.set_if(at);
        bytes.set_if(size as usize);
        Ok(())
    }
}
