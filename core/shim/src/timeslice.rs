//! The hardware time slice of this process's channel groups.
//!
//! The driver allocates a channel group (class 0xA06C) for each engine of each
//! context through an ioctl on its device file; `ioctl` is watched for those, and
//! the helper thread sets their time slice a millisecond later, by the same kind of
//! ioctl. Structures and numbers are those of NVIDIA's open kernel modules
//! (`nvos.h`: NVOS00, NVOS21, NVOS54, NVOS64; `ctrla06c.h`). It takes about 1 ms
//! for a process's four groups and is not privileged (measured). It is set again
//! now and then ([`REPEATS`]): what is set while the driver still builds a context
//! seems not to last (on an H100, requests beside a training took 3.4 ms at p99, as
//! without slices, when it was set once, and 1.4 ms set again). Nothing puts the
//! old value back at exit: the groups end with the process.
//!
//! Must never change what an ioctl returns, nor errno, and must be silent for all
//! other files: every ioctl of the process comes through here.

use crate::news::{self, NUDGED};
use crate::{host, state};
use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::report_state;

/// Groups of one process that are followed.
const GROUPS_MAX: usize = 256;
/// Attempts before a group is given up.
const TRIES_MAX: u32 = 5;
/// From a group's allocation to its first attempt.
pub const DELAY: Duration = Duration::from_millis(1);
/// From one setting of all groups to the next; the last one repeats for ever.
pub const REPEATS: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(500),
    Duration::from_secs(3),
    Duration::from_secs(15),
];

const IOCTL_TYPE: c_ulong = b'F' as c_ulong;
const ESC_RM_FREE: c_ulong = 0x29;
const ESC_RM_CONTROL: c_ulong = 0x2a;
const ESC_RM_ALLOC: c_ulong = 0x2b;
const CLASS_CHANNEL_GROUP: u32 = 0xa06c;
const CONTROL_SET_TIMESLICE: u32 = 0xa06c_0103;
const CONTROL_GET_TIMESLICE: u32 = 0xa06c_0104;

/// NVOS21, then NVOS64 which has `rights` in front of the size.
#[repr(C)]
struct AllocHead {
    root: u32,
    parent: u32,
    object: u32,
    class: u32,
    params: u64,
}
const ALLOC_STATUS_NVOS21: usize = 28;
const ALLOC_STATUS_NVOS64: usize = 40;
const ALLOC_BYTES_NVOS21: usize = 32;
const ALLOC_BYTES_NVOS64: usize = 48;

#[repr(C)]
struct Free {
    root: u32,
    parent: u32,
    object: u32,
    status: u32,
}

#[repr(C)]
struct Control {
    client: u32,
    object: u32,
    command: u32,
    flags: u32,
    params: u64,
    params_bytes: u32,
    status: u32,
}

const EMPTY: u32 = 0;
const FILLING: u32 = 1;
/// Found, and its time slice is still to be set.
const NEW: u32 = 2;
/// Our time slice is in force.
const SET: u32 = 3;
const FAILED: u32 = 4;

struct Group {
    phase: AtomicU32,
    fd: AtomicI32,
    client: AtomicU32,
    parent: AtomicU32,
    object: AtomicU32,
    tries: AtomicU32,
    /// What the driver had set, us; 0: unknown.
    old_us: AtomicU64,
}

static GROUPS: [Group; GROUPS_MAX] = [const {
    Group {
        phase: AtomicU32::new(EMPTY),
        fd: AtomicI32::new(-1),
        client: AtomicU32::new(0),
        parent: AtomicU32::new(0),
        object: AtomicU32::new(0),
        tries: AtomicU32::new(0),
        old_us: AtomicU64::new(0),
    }
}; GROUPS_MAX];

/// Replaces `ioctl` for the whole process.
///
/// # Safety
/// As the real one. Variadic there; a third argument, where there is none, is a
/// register that the kernel ignores.
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's arguments. Sets errno as the real function does.
    let result = unsafe {
        match host::ioctl() {
            Some(real) => real(fd, request, argument),
            None => libc::ioctl(fd, request, argument),
        }
    };
    let number = request & 0xff;
    if result == 0
        && (request >> 8) & 0xff == IOCTL_TYPE
        && (number == ESC_RM_ALLOC || number == ESC_RM_FREE)
        && !argument.is_null()
        && state::mode() != state::MODE_OFF
    {
        // SAFETY: always valid; restored because what follows may call the system.
        let errno = unsafe { *libc::__errno_location() };
        let bytes = (request >> 16) as usize & 0x3fff;
        // SAFETY: the driver has just read and written a structure of this size.
        unsafe { watch(fd, number, bytes, argument) };
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
    }
    result
}

unsafe fn watch(fd: c_int, number: c_ulong, bytes: usize, argument: *const c_void) {
    if number == ESC_RM_FREE && bytes >= size_of::<Free>() {
        // SAFETY: by the caller.
        let free = unsafe { argument.cast::<Free>().read_unaligned() };
        if free.status == 0 {
            freed(&free);
        }
    }
    if number == ESC_RM_ALLOC && bytes >= ALLOC_BYTES_NVOS21 {
        let status_at =
            if bytes >= ALLOC_BYTES_NVOS64 { ALLOC_STATUS_NVOS64 } else { ALLOC_STATUS_NVOS21 };
        // SAFETY: by the caller.
        let (head, status) = unsafe {
            (
                argument.cast::<AllocHead>().read_unaligned(),
                argument.byte_add(status_at).cast::<u32>().read_unaligned(),
            )
        };
        if head.class == CLASS_CHANNEL_GROUP && status == 0 {
            allocated(fd, &head);
        }
    }
}

fn allocated(fd: c_int, head: &AllocHead) {
    let free = |g: &&Group| g.phase.compare_exchange(EMPTY, FILLING, AcqRel, Relaxed).is_ok();
    let Some(group) = GROUPS.iter().find(free) else { return };
    group.fd.store(fd, Relaxed);
    group.client.store(head.root, Relaxed);
    group.parent.store(head.parent, Relaxed);
    group.object.store(head.object, Relaxed);
    group.tries.store(0, Relaxed);
    group.old_us.store(0, Relaxed);
    group.phase.store(NEW, Release);
    news::notice(NUDGED);
}

/// An object, its parent or its whole client is freed.
fn freed(free: &Free) {
    for group in &GROUPS {
        if group.phase.load(Acquire) >= NEW
            && group.client.load(Relaxed) == free.root
            && [group.object.load(Relaxed), group.parent.load(Relaxed), free.root]
                .contains(&free.object)
        {
            group.phase.store(EMPTY, Release);
        }
    }
}

/// Run a control on a group.
///
/// # Errors
/// The driver's status, or errno.
fn control(group: &Group, command: u32, value_us: &mut u64) -> Result<(), u32> {
    let mut control = Control {
        client: group.client.load(Relaxed),
        object: group.object.load(Relaxed),
        command,
        flags: 0,
        params: std::ptr::from_mut(value_us) as u64,
        params_bytes: size_of::<u64>() as u32,
        status: 0,
    };
    let request =
        3 << 30 | (size_of::<Control>() as c_ulong) << 16 | IOCTL_TYPE << 8 | ESC_RM_CONTROL;
    // SAFETY: the driver's file as long as the group lives; the structure and its
    // parameter are valid. Any other file refuses the request's number.
    let result =
        unsafe { libc::syscall(libc::SYS_ioctl, group.fd.load(Relaxed), request, &mut control) };
    if result != 0 {
        // SAFETY: always valid.
        return Err(unsafe { *libc::__errno_location() } as u32);
    }
    if control.status == 0 { Ok(()) } else { Err(control.status) }
}

/// Set the slice of every group that does not have it yet. Returns whether some
/// are to be tried again.
pub fn apply(client: &ClientRegion, slice_us: u64) -> bool {
    apply_by(control, client, slice_us)
}

/// [`control`], or a test's.
type ControlBy = fn(&Group, u32, &mut u64) -> Result<(), u32>;

fn apply_by(control: ControlBy, client: &ClientRegion, slice_us: u64) -> bool {
    let report = &client.report;
    let (mut set, mut failed, mut again) = (0, 0, false);
    for group in &GROUPS {
        if group.phase.load(Acquire) == NEW {
            if group.old_us.load(Relaxed) == 0 {
                let mut old = 0;
                if control(group, CONTROL_GET_TIMESLICE, &mut old).is_ok() {
                    group.old_us.store(old, Relaxed);
                }
            }
            let mut value = slice_us;
            let next = match control(group, CONTROL_SET_TIMESLICE, &mut value) {
                Ok(()) => SET,
                Err(error) => {
                    report.time_slice_error.store(error, Relaxed);
                    if group.tries.fetch_add(1, Relaxed) + 1 < TRIES_MAX { NEW } else { FAILED }
                }
            };
            // Freed meanwhile: stays so.
            let _ = group.phase.compare_exchange(NEW, next, AcqRel, Relaxed);
        }
        match group.phase.load(Acquire) {
            SET => set += 1,
            FAILED => failed += 1,
            NEW => again = true,
            _ => {}
        }
    }
    report.time_slice_groups.store(set, Relaxed);
    let now = match (set, failed) {
        (_, 1..) => report_state::FAILED,
        (1.., _) => report_state::ACTIVE,
        _ => report_state::PENDING,
    };
    report.time_slice.store(now, Relaxed);
    again
}

/// Whether a group waits to be set.
pub fn has_new() -> bool {
    GROUPS.iter().any(|g| g.phase.load(Acquire) == NEW)
}

/// Have all groups set again.
pub fn renew() {
    for group in &GROUPS {
        for phase in [SET, FAILED] {
            if group.phase.compare_exchange(phase, NEW, AcqRel, Relaxed).is_ok() {
                group.tries.store(0, Relaxed);
            }
        }
    }
}

/// Put back what the driver had set: the core let this client go.
pub fn restore(client: &ClientRegion) {
    restore_by(control, client);
}

fn restore_by(control: ControlBy, client: &ClientRegion) {
    for group in &GROUPS {
        let mut old = group.old_us.load(Relaxed);
        // Also one that is to be set again: it may have ours.
        if group.phase.load(Acquire) >= NEW
            && old != 0
            && control(group, CONTROL_SET_TIMESLICE, &mut old).is_ok()
        {
            let _ = group.phase.compare_exchange(SET, NEW, AcqRel, Relaxed);
        }
    }
    client.report.time_slice_groups.store(0, Relaxed);
    client.report.time_slice.store(report_state::UNUSED, Relaxed);
}

/// Only in a forked child: the groups are the parent's.
pub fn reset() {
    for group in &GROUPS {
        group.phase.store(EMPTY, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};

    fn known() -> Vec<u32> {
        GROUPS
            .iter()
            .filter(|g| g.phase.load(Acquire) >= NEW)
            .map(|g| g.object.load(Relaxed))
            .collect()
    }

    /// The groups are the process's: one test at a time.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alloc(object: u32, class: u32, long: bool, status: u32) {
        #[repr(C)]
        struct Alloc([u32; 12]);
        let mut a = Alloc([0; 12]);
        (a.0[0], a.0[1], a.0[2], a.0[3]) = (0xc1, 0xd1, object, class);
        a.0[if long { 10 } else { 7 }] = status;
        let bytes = if long { 48 } else { 32 };
        // SAFETY: large enough for either form.
        unsafe { watch(-1, ESC_RM_ALLOC, bytes, (&raw const a).cast()) };
    }

    fn free(object: u32) {
        let f = Free { root: 0xc1, parent: 0xd1, object, status: 0 };
        // SAFETY: the structure itself.
        unsafe { watch(-1, ESC_RM_FREE, 16, (&raw const f).cast()) };
    }

    /// What the driver has for objects 1 and 2; its own value at first.
    static SLICES_US: [AtomicU64; 3] = [const { AtomicU64::new(2_048) }; 3];

    fn driver(group: &Group, command: u32, value_us: &mut u64) -> Result<(), u32> {
        let slice = &SLICES_US[group.object.load(Relaxed) as usize];
        match command {
            CONTROL_GET_TIMESLICE => *value_us = slice.load(Relaxed),
            _ => slice.store(*value_us, Relaxed),
        }
        Ok(())
    }

    #[test]
    fn slices_are_set_set_anew_and_put_back() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let slices = || [&SLICES_US[1], &SLICES_US[2]].map(|us| us.load(Relaxed));
        let (_fd, client) = tally_ipc::map::create_client().unwrap();
        let report = || {
            let r = &client.report;
            (r.time_slice.load(Relaxed), r.time_slice_groups.load(Relaxed))
        };
        alloc(1, CLASS_CHANNEL_GROUP, true, 0);
        assert!(!apply_by(driver, &client, 10));
        assert_eq!((slices(), report()), ([10, 2_048], (report_state::ACTIVE, 1)));
        // Set already: another value is for those to come.
        alloc(2, CLASS_CHANNEL_GROUP, true, 0);
        apply_by(driver, &client, 350);
        assert_eq!((slices(), report()), ([10, 350], (report_state::ACTIVE, 2)));
        renew();
        apply_by(driver, &client, 350);
        assert_eq!(slices(), [350, 350]);
        // In the middle of a change, too.
        renew();
        restore_by(driver, &client);
        assert_eq!((slices(), report()), ([2_048, 2_048], (report_state::UNUSED, 0)));
        apply_by(driver, &client, 10);
        restore_by(driver, &client);
        assert_eq!(slices(), [2_048, 2_048]);
        free(0xd1);
    }

    #[test]
    fn groups_are_known_from_both_forms_and_forgotten_when_freed() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        alloc(1, CLASS_CHANNEL_GROUP, true, 0);
        alloc(2, CLASS_CHANNEL_GROUP, false, 0);
        alloc(3, CLASS_CHANNEL_GROUP, true, 0x1f);
        alloc(4, 0xc86f, true, 0);
        assert_eq!(known(), [1, 2]);
        free(9);
        assert_eq!(known(), [1, 2]);
        free(1);
        assert_eq!(known(), [2]);
        // With no such file, setting fails, is tried again, and given up.
        let (_fd, client) = tally_ipc::map::create_client().unwrap();
        for _ in 0..TRIES_MAX - 1 {
            assert!(apply(&client, 50));
        }
        assert!(!apply(&client, 50));
        assert_eq!(client.report.time_slice.load(Relaxed), report_state::FAILED);
        assert_eq!(client.report.time_slice_error.load(Relaxed), libc::EBADF as u32);
        free(0xd1);
        assert!(known().is_empty(), "its parent is gone");
    }
}
