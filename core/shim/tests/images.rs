//! Code images of libraries that come and go, in files and in buffers: read as they were loaded, or not at all.

use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use tally_rewriter::TransformRefusal;
use tally_shim::images::{self, Options, Snapshot};

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

fn load(image: *const u8) -> u128 {
    // SAFETY: text that ends with a NUL, no options.
    unsafe {
        match Snapshot::of(image) {
            Some(copy) => copy.loaded(Options::NONE),
            None => images::loaded(image, Options::NONE),
        }
    }
}

fn load_file(bytes: &[u8], name: Option<&str>) -> u128 {
    let bytes = [bytes, &[0]].concat();
    // SAFETY: no options.
    unsafe { images::loaded_bytes(bytes, name.map(str::to_owned), Options::NONE) }
}

fn is_there(path: &CString) -> bool {
    // SAFETY: only asks.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_null()
}

fn build(dir: &Path, name: &str, ptx: &[u8]) -> CString {
    let source = dir.join("image.c");
    let text = std::str::from_utf8(ptx).unwrap().replace('\n', "\\n");
    std::fs::write(&source, format!("const char image[] = \"{text}\";\n")).unwrap();
    let path = dir.join(name);
    let built =
        Command::new("gcc").args(["-shared", "-fPIC", "-o"]).args([&path, &source]).status();
    assert!(built.expect("gcc runs").success());
    CString::new(path.to_str().unwrap()).unwrap()
}

#[test]
fn an_image_in_a_library_is_read_only_while_it_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = build(dir.path(), "libcode.so", PTX);
    let library = Library::open(&path);
    let digest = load(library.image);
    assert_eq!(images::library(digest).unwrap().as_deref(), Some("libcode.so"));
    assert_eq!(images::bytes(digest).unwrap()[..], *PTX);
    assert_eq!(images::copied_bytes(), 0, "only its place is kept");
    library.close();
    assert!(!is_there(&path), "noting an image does not keep its library");
    assert_eq!(images::bytes(digest), Err(TransformRefusal::ImageGone));

    // Another library, most likely at the same place.
    let other = PTX.to_ascii_uppercase();
    let library = Library::open(&build(dir.path(), "libother.so", &other));
    assert_eq!(images::bytes(digest), Err(TransformRefusal::ImageGone));
    let second = load(library.image);
    assert_ne!(second, digest);
    assert_eq!(images::bytes(second).unwrap()[..], other);
    library.close();

    let library = Library::open(&path);
    assert_eq!(load(library.image), digest, "the same image again");
    library.close();
}

#[test]
fn a_buffer_that_is_used_again_and_a_file_that_is_replaced_change_nothing() {
    let with_nul = |text: &str| [text.as_bytes(), &[0]].concat();
    let mut buffer = with_nul(".version 7.1\n.target sm_70\n// first ");
    let first = load(buffer.as_ptr());
    let loaded = buffer.clone();
    buffer.copy_from_slice(&with_nul(".version 7.1\n.target sm_70\n// second"));
    let second = load(buffer.as_ptr());
    assert_ne!(first, second);
    for (digest, bytes) in [(first, &loaded), (second, &buffer)] {
        assert_eq!(images::bytes(digest).unwrap()[..], bytes[..bytes.len() - 1]);
    }

    let file = load_file(b"a module\n", Some("module.ptx"));
    let replaced = load_file(b"another \n", Some("module.ptx"));
    assert_ne!(file, replaced);
    assert_eq!(images::bytes(file).unwrap()[..], *b"a module\n");
    assert_eq!(images::library(file).unwrap().as_deref(), Some("module.ptx"));
    assert_eq!(images::bytes(file ^ 1), Err(TransformRefusal::ImageGone), "never loaded");
}

#[test]
fn copies_have_a_bound() {
    let big = |fill: u8| vec![fill; images::COPIED_BYTES_MAX / 2 - (1 << 20)];
    let digests = [b'a', b'b', b'c'].map(|fill| load_file(&big(fill), None));
    assert!(images::copied_bytes() <= images::COPIED_BYTES_MAX);
    let kept = digests.map(|digest| images::bytes(digest).is_ok());
    assert_eq!(kept, [true, true, false]);
    assert!(images::unloaded(digests[0]));
    assert_eq!(load_file(&big(b'c'), None), digests[2]);
    assert!(images::bytes(digests[2]).is_ok(), "loaded again, with room");
    assert!(images::unloaded(digests[1]) && !images::unloaded(digests[2]));
}
