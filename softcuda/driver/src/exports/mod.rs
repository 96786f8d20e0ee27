//! The driver API, by subject. Each function checks what it was given, finds
//! the objects behind the handles and calls the module that knows; the names
//! are the library's symbols, suffixes included.
#![allow(non_snake_case, reason = "the names are the ABI")]

mod capture;
mod context;
mod copy;
mod device;
mod event;
mod function;
mod graph;
mod graph_node;
mod graph_params;
mod green;
mod init;
mod launch;
mod library;
pub(crate) mod link;
mod memory;
mod module;
mod pointer;
mod pool;
mod proc_address;
mod stream;
mod unsupported;
mod value;
