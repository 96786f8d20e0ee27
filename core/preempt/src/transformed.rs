//! A kernel in its transformed form, and what the driver says of its functions.

use crate::cuda::{
    FUNC_MAX_DYNAMIC_SHARED, FUNC_REQUIRED_CLUSTER, FUNC_SETTABLE, LAUNCH_ATTRIBUTE_CLUSTER,
    LAUNCH_ATTRIBUTE_PROGRAMMATIC, LAUNCH_ATTRIBUTES_PLAIN, Ptr, SUCCESS, driver,
};
use crate::host::host;
use crate::launch::KernelArguments;
use crate::offset::SubGrid;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicI32, AtomicUsize};

/// A kernel in its transformed form.
#[derive(Debug)]
pub struct Transformed {
    /// The context that it is loaded in.
    pub context: usize,
    /// The function with the prelude.
    pub function: usize,
    /// Its code is PTX.
    pub is_ptx: bool,
    /// The form with offset block indices.
    pub(crate) sub_grid: SubGrid,
    /// Of its context.
    pub(crate) device: i32,
    /// Offset and size of each parameter of the original.
    pub parameters: Vec<(usize, usize)>,
    /// Where the control block goes.
    pub control_offset: usize,
    /// Cluster dimensions fixed at compile time.
    pub cluster: Option<[u32; 3]>,
    /// Digest of the image that it was made from.
    pub image: u128,
    /// It reads its SM's number, or how many there are: never limited to some of them.
    pub reads_sm: bool,
    /// Those that the program requires by function attributes; 0: none.
    pub(crate) required_cluster: [AtomicI32; 3],
    /// The function or kernel that it was made from, and its function; 0 once unloaded.
    pub(crate) originals: [AtomicUsize; 2],
    /// Dynamic shared memory that its functions may have.
    pub(crate) shared_max: AtomicI32,
    /// Blocks of the launch that it was asked for at.
    pub wanted_blocks: u32,
    /// How long that one was expected to take, us; 0: unknown.
    pub wanted_us: u32,
}

/// The cluster dimensions of a launch, if it can be transformed as it is launched.
pub fn cluster(arguments: &KernelArguments, cut: &Transformed) -> Option<[u32; 3]> {
    let required = || cut.required_cluster.each_ref().map(|d| d.load(Relaxed).max(1) as u32);
    let mut cluster = cut.cluster.unwrap_or_else(required);
    for a in arguments.attributes() {
        match a.id {
            LAUNCH_ATTRIBUTE_CLUSTER => {
                cluster = [a.value[0].max(1), a.value[1].max(1), a.value[2].max(1)];
            }
            LAUNCH_ATTRIBUTE_PROGRAMMATIC if a.value[0] == 0 => {}
            id if LAUNCH_ATTRIBUTES_PLAIN.contains(&id) => {}
            _ => return None,
        }
    }
    cluster.iter().all(|d| d.is_power_of_two()).then_some(cluster)
}

/// Blocks of a grid, if there are not too many to number.
pub fn blocks(grid: [u32; 3]) -> Option<u32> {
    grid.iter().try_fold(1_u32, |all, n| all.checked_mul(*n)).filter(|n| *n > 1 && *n < 1 << 31)
}

pub(crate) fn attribute(function: usize, which: i32) -> Option<i32> {
    let mut value = 0;
    let get = driver().func_attribute?;
    // SAFETY: a live function; a valid out-pointer.
    (unsafe { get(&mut value, which, function as Ptr) } == SUCCESS).then_some(value)
}

/// Give a transformed form what the program set for the original.
pub(crate) fn copy_attributes(original: usize, to: usize) {
    let Some(set) = driver().func_set_attribute else { return };
    for which in FUNC_SETTABLE {
        if let Some(value) = attribute(original, which)
            && attribute(to, which) != Some(value)
        {
            // SAFETY: a function of ours. Refused: the launch that needs it fails,
            // and is made whole.
            unsafe { set(to as Ptr, which, value) };
        }
    }
}

/// The function behind a handle that may be a context-free kernel's.
pub(crate) fn plain_function(handle: usize) -> usize {
    let mut function: Ptr = std::ptr::null_mut();
    match driver().kernel_function {
        // SAFETY: a handle that was just launched; refused if it is a function already.
        Some(f) if unsafe { f(&mut function, handle as Ptr) } == SUCCESS => function as usize,
        _ => handle,
    }
}

/// Blocks of a function that an SM holds at once. `None`: the driver does not tell.
fn resident(function: Ptr, block: [u32; 3], shared_bytes: u32) -> Option<u64> {
    let threads = block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n))?;
    let mut count = 0;
    // SAFETY: a function of the program's that is being launched, or one of ours; a valid out-pointer.
    let result = unsafe {
        driver().occupancy?(
            &mut count,
            function,
            i32::try_from(threads).ok()?,
            shared_bytes as usize,
        )
    };
    (result == SUCCESS).then_some(count.max(0) as u64)
}

/// Blocks of a launch that the whole GPU holds at once. `None`: the driver does not tell.
pub fn resident_on_all(launch: &KernelArguments) -> Option<u64> {
    let sms = host().client()?.report.sm_count.load(Acquire);
    Some(resident(launch.function, launch.block, launch.shared_bytes)? * u64::from(sms))
}

impl Transformed {
    /// Whether blocks that the original runs at once run at once in this form, too, or there are too many
    /// for a program to rely on it.
    pub(crate) fn keeps_occupancy(&self, launch: &KernelArguments, blocks: u32) -> bool {
        let of = |function| resident(function, launch.block, launch.shared_bytes);
        let sms = host().client().map_or(0, |client| client.report.sm_count.load(Acquire));
        if sms == 0 {
            return false;
        }
        match (of(launch.function), of(self.function as Ptr)) {
            (Some(before), Some(now)) => {
                now >= before || u64::from(blocks) > before * u64::from(sms)
            }
            _ => false,
        }
    }

    /// The function or kernel that it was made from, unless that was unloaded.
    pub fn original(&self) -> Option<Ptr> {
        Some(self.originals[0].load(Relaxed) as Ptr).filter(|original| !original.is_null())
    }

    /// See that a launch of `original` may have so much dynamic shared memory, if its
    /// own form may.
    pub fn allow_shared(&self, bytes: u32, original: Ptr) {
        if bytes.min(i32::MAX as u32) as i32 <= self.shared_max.load(Relaxed) {
            return;
        }
        // Set while the transformed form was made, or through another handle.
        self.copy_from(plain_function(original as usize));
    }

    pub(crate) fn copy_from(&self, original: usize) {
        for to in std::iter::once(self.function).chain(self.sub_grid.function()) {
            copy_attributes(original, to);
        }
        self.copied();
    }

    /// Take over what launches need to know of its attributes.
    pub(crate) fn copied(&self) {
        let of = |which| attribute(self.function, which).unwrap_or(0);
        self.shared_max.store(of(FUNC_MAX_DYNAMIC_SHARED), Relaxed);
        for (dimension, which) in self.required_cluster.iter().zip(FUNC_REQUIRED_CLUSTER) {
            dimension.store(of(which), Relaxed);
        }
    }
}
