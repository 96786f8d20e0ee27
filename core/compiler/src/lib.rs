//! Compiles WebAssembly components in a child process, and takes over what came of it.
//!
//! A component is untrusted, and compiling one may take any amount of memory and time. So the
//! program that wants one starts itself again (`/proc/self/exe`) as a compiler: a process with limits on
//! memory, CPU time and output, with a system call filter, and with no descriptor but the component, the result and its
//! messages. Whatever happens to it, the program goes on and can say what happened
//! ([`CompileError`]). It can also be stopped at any time ([`Cancel`]).
//!
//! ```text
//! program                                     child: the same executable
//! bounds::check (nesting, counts)
//! memfd, sealed: the component      ------->  limits and filter, then reads it
//!                                             entry::shortened, Cranelift
//! header, version, settings checked <-------  memfd, bounded: native code
//! Component::deserialize
//! ```
//!
//! What the child does not protect from: the program runs the native code that the child made. A
//! component that takes over the compiler through a bug in it can therefore
//! hand over code of its choice. It could do the same if it was compiled in the program itself; what the child
//! takes from it is the memory, the time and the system calls of that moment.
//!
//! A program that loads components calls [`serve_if_child`] first thing in `main`.
#![deny(unsafe_code)]

mod bounds;
mod child;
mod confine;
#[cfg(test)]
mod corpus;
mod entry;
mod error;
mod parent;
mod settings;
mod threads;

pub use bounds::check;
pub use child::serve_if_child;
pub use error::{CompileError, TooMany};
pub use parent::{Cancel, CompileLimits, Compiler};
pub use settings::settings;
