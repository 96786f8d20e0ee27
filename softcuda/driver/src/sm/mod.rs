//! Who runs on which SM, across processes.
//!
//! One file in shared memory is the device: its SMs, and the kernels of all
//! processes that want one. [`layout`] says what is in it, [`file`] opens it,
//! [`lock`] is its robust mutex, [`process`] knows who lives, and [`arbiter`]
//! hands out SMs in the order in which kernels arrived.
//! A kernel may be confined to a [`set`] of SMs (the streams of a green
//! context): it waits for those only, and is in nobody's way on the others.
//!
//! Any process may die at any instruction. So every fact is one atomic word,
//! written last by whoever makes it true, and everything else is computed
//! again from those words under the lock.

mod arbiter;
mod file;
mod layout;
mod lock;
mod process;
mod set;

pub use arbiter::{Arbiter, Ticket, Waited};
pub use file::{AttachError, Wish};
pub use layout::{KERNELS_MAX, PROCESSES_MAX, SMS_MAX, VERSION as LAYOUT_VERSION};
pub use set::SmSet;
