//! The exported functions. Each jumps through its slot; an empty slot is filled first.
//!
//! Registers that carry arguments are kept: nobody here knows the functions' signatures. None of them
//! takes floating-point arguments.

#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc)]

use crate::{load, objects};
use core::ffi::CStr;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Release};

const SYMBOL_NOT_FOUND: i32 = 302;

/// Where the entry points lead: one slot each, and the last one for `ioctl`. 0: not known yet.
static SLOTS: [AtomicUsize; COUNT + 1] = [const { AtomicUsize::new(0) }; COUNT + 1];

/// Addresses of the exports, in the table's order.
pub struct Exports(pub [*const (); COUNT]);

// SAFETY: addresses of functions.
unsafe impl Sync for Exports {}

macro_rules! through_slot {
    ($(#[$meta:meta])* $name:ident $index:expr) => {
        $(#[$meta])*
        #[cfg_attr(preload, unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "endbr64",
                "mov r11, qword ptr [rip + {slots} + {offset}]",
                "test r11, r11",
                "je 2f",
                "jmp r11",
                "2:",
                "mov r11d, {index}",
                "jmp {first}",
                slots = sym SLOTS,
                offset = const 8 * ($index),
                index = const $index,
                first = sym first,
            )
        }
    };
}

macro_rules! entry_points {
    ($($index:literal $name:ident;)*) => {
        $( through_slot!($name $index); )*

        /// The entry points' names, in the shim's order.
        pub static NAMES: [&CStr; COUNT] = [
            $( match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("NUL in a name"),
            }, )*
        ];

        /// The functions of these names here.
        pub static EXPORTS: Exports = Exports([ $( $name as *const () ),* ]);
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

through_slot! {
    /// `ioctl`: the shim watches the driver's. Here rather than in the shim, because the driver's
    /// references to it are bound to what was preloaded.
    ioctl COUNT
}

/// Fill the slot of the index in `r11` and go where it leads.
#[unsafe(naked)]
unsafe extern "C" fn first() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax",
        "mov edi, r11d",
        "call {fill}",
        "mov r11, rax",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp r11",
        fill = sym fill,
    )
}

unsafe extern "C" fn fill(index: usize) -> usize {
    let Some(slot) = SLOTS.get(index) else { return absent as *const () as usize };
    if index == COUNT {
        return fill_ioctl();
    }
    let target = match load::shim() {
        // SAFETY: the shim has as many functions as there are names.
        Some(shim) => unsafe { *shim.direct.add(index) as usize },
        None => match NAMES.get(index).and_then(|name| crate::route::in_driver(name.as_ptr())) {
            Some(real) => real,
            // A driver may come later.
            None => return absent as *const () as usize,
        },
    };
    slot.store(target, Release);
    target
}

/// Where `ioctl` leads before the shim is there.
pub fn fill_ioctl() -> usize {
    if let Some(slot) = SLOTS.last() {
        if slot.load(Acquire) == 0
            && let Some(real) = objects::next(c"ioctl")
        {
            // The shim may have come meanwhile.
            let _ = slot.compare_exchange(0, real, Release, Acquire);
        }
        let at = slot.load(Acquire);
        if at != 0 {
            return at;
        }
    }
    crate::sys::raw_ioctl as *const () as usize
}

/// The shim is there: calls of `ioctl` go to it.
pub fn lead_ioctl_to(shim: *const ()) {
    if let Some(slot) = SLOTS.last() {
        slot.store(shim as usize, Release);
    }
}

/// What a driver function does that is nowhere.
extern "C" fn absent() -> i32 {
    SYMBOL_NOT_FOUND
}
