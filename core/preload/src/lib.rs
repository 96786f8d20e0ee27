//! The library that `LD_PRELOAD` names. It passes everything through until the process uses the CUDA
//! driver; then it loads the shim, `libtally_shim.so` from its own folder, and hands over.
//!
//! It is loaded into every program that a governed one starts, so it must never need anything: no
//! library, no symbol version, no thread-local storage, no allocation, no output. `build.rs` compiles it
//! without the standard library (`cfg(preload)`) and puts it beside the other binaries: the workspace's
//! profile unwinds, which a crate without the standard library cannot. As an ordinary crate it is there
//! for unit tests. No code here may panic: no slice index, no division by what may be 0.
//! `tests/elf.rs` reads the outcome.
//!
//! | read | for |
//! | --- | --- |
//! | [`entry`] | the exported functions |
//! | [`route`] | `dlsym` |
//! | [`open`] | `dlopen` |
//! | [`load`] | loading the shim |
//! | [`objects`] | finding the real functions, with glibc and with musl |
//! | [`report`] | telling the core and the log why a program is not governed |
//! | [`abi`] | what this library and the shim give each other |

#![cfg_attr(preload, no_std)]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64")))]
compile_error!("the preloaded library is written for x86-64 Linux");

pub mod abi;
pub mod entry;
pub mod load;
pub mod objects;
pub mod open;
pub mod report;
pub mod route;
mod sys;

/// Never called: see above.
#[cfg(preload)]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the process.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}
