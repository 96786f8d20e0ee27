//! The linker: PTX goes in, and what comes out loads without being compiled again. Other inputs are not supported.

use crate::context::current;
use crate::driver::driver;
use crate::error::CuError;
use crate::exec::kernel_names;
use crate::ffi::{In, Out, exports};
use crate::image::{self, LINKED};
use crate::launch::wait_as_compiler;
use crate::sync::lock;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Mutex, OnceLock};

/// `CU_JIT_INPUT_PTX`: the text of one module.
const INPUT_PTX: u32 = 1;

/// What one link is made of, and its image once it is complete.
#[derive(Default)]
pub(crate) struct Link {
    ptx: Mutex<Option<String>>,
    image: OnceLock<CString>,
}

exports! {
    fn cuLinkCreate_v2(
        _count: u32,
        _names: In<u32>,
        _values: *mut *mut c_void,
        link: Out<usize>,
    ) {
        current()?;
        link.check()?;
        link.set(driver()?.links.insert(&Arc::new(Link::default())))
    }

    fn cuLinkAddData_v2(
        link: usize,
        kind: u32,
        data: In<u8>,
        bytes: usize,
        _name: In<c_char>,
        _count: u32,
        _names: In<u32>,
        _values: *mut *mut c_void,
    ) {
        let link = driver()?.links.get(link)?;
        let mut ptx = lock(&link.ptx);
        if kind != INPUT_PTX || ptx.is_some() {
            return Err(CuError::NOT_SUPPORTED);
        }
        let text = image::ptx_in_bytes(data.bytes(bytes)?).map_err(|error| error.code)?;
        kernel_names(&text).map_err(|error| error.code)?;
        *ptx = Some(text);
        Ok(())
    }

    fn cuLinkComplete(link: usize, image: Out<usize>, bytes: Out<usize>) {
        let link = driver()?.links.get(link)?;
        image.check()?;
        let text = lock(&link.ptx).take().ok_or(CuError::INVALID_VALUE)?;
        wait_as_compiler(&kernel_names(&text).map_err(|error| error.code)?)?;
        let linked = CString::new(format!("{LINKED}{text}")).map_err(|_| CuError::INVALID_IMAGE)?;
        let linked = link.image.get_or_init(|| linked);
        bytes.set_if(linked.as_bytes_with_nul().len());
        image.set(linked.as_ptr() as usize)
    }

    fn cuLinkDestroy(link: usize) {
        driver()?.links.remove(link)?;
        Ok(())
    }
}
