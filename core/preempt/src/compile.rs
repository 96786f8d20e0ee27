//! Compiling PTX while the program goes on launching: the driver's linker keeps nobody waiting, where loading PTX keeps
//! all launches of the context waiting until it is compiled (1.3 s for 20 000 instructions on an H200's host).
//!
//! On the worker's thread only, with a current context.

use crate::cuda::{LINK_INPUT_PTX, Ptr, SUCCESS, driver};
use crate::host::log;
use tally_rewriter::TransformRefusal;

/// The machine code of PTX, as this driver compiles it for the current device; the PTX if it does not, for loading it
/// tells why.
pub(crate) fn compiled_or_text(ptx: Vec<u8>) -> Vec<u8> {
    compiled(&ptx).unwrap_or_else(|error| {
        log!("PTX is compiled as it is loaded: {error}");
        ptx
    })
}

/// The machine code of PTX, as this driver compiles it for the current device.
///
/// # Errors
/// [`TransformRefusal::DriverRefused`]
pub(crate) fn compiled(ptx: &[u8]) -> Result<Vec<u8>, TransformRefusal> {
    let d = driver();
    let missing = TransformRefusal::DriverRefused;
    let (create, add) = (d.link_create.ok_or(missing)?, d.link_add.ok_or(missing)?);
    let (complete, destroy) = (d.link_complete.ok_or(missing)?, d.link_destroy.ok_or(missing)?);
    let mut text = ptx.to_vec();
    text.push(0);
    let check = |result: i32| if result == SUCCESS { Ok(()) } else { Err(missing) };
    let none: Ptr = std::ptr::null_mut();
    let (mut link, mut image, mut size) = (none, none, 0);
    // SAFETY: no options; a text with its NUL; the image belongs to the link until that is destroyed, and is copied
    // before.
    unsafe {
        check(create(0, std::ptr::null_mut(), none.cast(), &mut link))?;
        let data = text.as_ptr().cast_mut().cast();
        let name = c"tally.ptx".as_ptr();
        let nothing = std::ptr::null_mut();
        let added = add(link, LINK_INPUT_PTX, data, text.len(), name, 0, nothing, none.cast());
        let done = check(added).and_then(|()| check(complete(link, &mut image, &mut size)));
        let copy = done.map(|()| std::slice::from_raw_parts(image.cast::<u8>(), size).to_vec());
        destroy(link);
        copy
    }
}
