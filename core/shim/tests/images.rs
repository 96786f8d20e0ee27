//! Code images of libraries that come and go: used while they are there, and not after.

use std::ffi::CString;
use std::process::Command;
use tally_kernels::Refusal;
use tally_shim::cut::images;

const PTX: &[u8] = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k() { ret; }\n";

/// A library with an image in its read-only data.
struct Library {
    handle: *mut libc::c_void,
    image: *const u8,
}

impl Library {
    fn open(path: &CString) -> Library {
        // SAFETY: a library without constructors; a name that it has.
        unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!handle.is_null());
            let image = libc::dlsym(handle, c"image".as_ptr()).cast();
            Library { handle, image }
        }
    }

    fn close(self) {
        // SAFETY: opened once, and nothing of it is used any more.
        assert_eq!(unsafe { libc::dlclose(self.handle) }, 0);
    }
}

fn is_there(path: &CString) -> bool {
    // SAFETY: only asks.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_null()
}

fn build(dir: &std::path::Path, name: &str) -> CString {
    let source = dir.join("image.c");
    let text = std::str::from_utf8(PTX).unwrap().replace('\n', "\\n");
    std::fs::write(&source, format!("const char image[] = \"{text}\";\n")).unwrap();
    let path = dir.join(name);
    let built =
        Command::new("gcc").args(["-shared", "-fPIC", "-o"]).args([&path, &source]).status();
    assert!(built.expect("gcc runs").success());
    CString::new(path.to_str().unwrap()).unwrap()
}

#[test]
fn images_in_libraries_are_used_only_while_they_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let read = |hash| images::with(hash, <[u8]>::to_vec);

    let gone = build(dir.path(), "libgone.so");
    let library = Library::open(&gone);
    // SAFETY: text that ends with a NUL.
    unsafe { images::loaded(1, library.image) };
    assert_eq!(images::library(1).unwrap().as_deref(), Some("libgone.so"));
    library.close();
    assert!(!is_there(&gone), "noting an image does not keep its library");
    assert_eq!(read(1), Err(Refusal::ImageGone));

    let kept = build(dir.path(), "libkept.so");
    let library = Library::open(&kept);
    // SAFETY: as above.
    unsafe { images::loaded(2, library.image) };
    assert_eq!(read(2).unwrap(), PTX);
    library.close();
    assert!(is_there(&kept), "using one does");
    assert_eq!(read(2).unwrap(), PTX);
}

#[test]
fn images_in_memory_are_copied_and_files_are_read() {
    let mut text = PTX.to_vec();
    text.push(0);
    // SAFETY: text that ends with a NUL.
    unsafe { images::loaded(3, text.as_ptr()) };
    text.fill(b'x');
    drop(text);
    assert_eq!(images::with(3, <[u8]>::to_vec).unwrap(), PTX);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("module.ptx");
    std::fs::write(&path, PTX).unwrap();
    images::loaded_file(4, &CString::new(path.to_str().unwrap()).unwrap());
    assert_eq!(images::with(4, <[u8]>::to_vec).unwrap(), PTX);
    assert_eq!(images::library(4).unwrap().as_deref(), Some("module.ptx"));
    std::fs::remove_file(path).unwrap();
    assert_eq!(images::with(4, <[u8]>::to_vec), Err(Refusal::ImageGone));
    assert_eq!(images::with(5, <[u8]>::to_vec), Err(Refusal::ImageGone), "never seen");
}
