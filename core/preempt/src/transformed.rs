//! A kernel in its transformed form, and what the driver says of its functions.

use crate::cuda::{
    FUNC_MAX_DYNAMIC_SHARED, FUNC_REGISTERS, FUNC_REQUIRED_CLUSTER, FUNC_SETTABLE,
    LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_PROGRAMMATIC, LAUNCH_ATTRIBUTES_PLAIN, Ptr, SUCCESS,
    driver,
};
use crate::launch::KernelArguments;
use crate::occupancy::{self, resident, sm_count};
use crate::offset::OffsetForm;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize};

/// A kernel in its transformed form.
#[derive(Debug)]
pub struct Transformed {
    /// The context that it is loaded in.
    pub context: usize,
    /// The function with the prelude.
    pub function: usize,
    pub is_ptx: bool,
    /// The form with offset block indices.
    pub(crate) by_offset: OffsetForm,
    /// CUDA ordinal of the device of `context`.
    pub(crate) device: i32,
    /// Offset and size of each parameter of the original.
    pub parameters: Vec<(usize, usize)>,
    /// Offset of the control block in the parameters, bytes.
    pub control_offset: usize,
    /// Cluster dimensions fixed at compile time.
    pub cluster: Option<[u32; 3]>,
    /// Digest of the image that it was made from.
    pub image: u128,
    /// It reads its SM's number, or how many there are: never limited to some of them.
    pub reads_sm: bool,
    /// Cluster dimensions that the program requires by function attributes; 0: none.
    pub(crate) required_cluster: [AtomicI32; 3],
    /// The function or kernel that it was made from, and its function; 0 once unloaded.
    pub(crate) originals: [AtomicUsize; 2],
    /// Dynamic shared memory that the original may have now. Its own functions keep the most that the original ever
    /// might have: a launch that began with that may still need parts.
    pub(crate) shared_max: AtomicI32,
    /// [`attributes_set`] before its functions got the original's attributes.
    pub(crate) attributes_at: u32,
    /// Another handle of the same code, of an image that was loaded twice, say, whose attributes are the same; and one
    /// whose attributes are not. 0: none was compared since an attribute was set last.
    pub(crate) compared: [AtomicUsize; 2],
    /// Blocks of the launch that it was asked for at.
    pub wanted_blocks: u32,
    /// How long that one was expected to take, us; 0: unknown.
    pub wanted_us: u32,
}

/// Calls so far that set an attribute of a function.
static ATTRIBUTES_SET: AtomicU32 = AtomicU32::new(0);
/// [`Transformed::shared_max`] until the original's attributes are read in the form's context, by its next launch.
const STALE: i32 = -1;

/// Changes whenever the program sets an attribute.
pub(crate) fn attributes_set() -> u32 {
    ATTRIBUTES_SET.load(SeqCst)
}

/// The program has set an attribute of a function: what was compared is to be compared again.
pub(crate) fn attribute_was_set(all: impl Iterator<Item = &'static Transformed>) {
    ATTRIBUTES_SET.fetch_add(1, SeqCst);
    all.for_each(|transformed| transformed.forget_compared(|_| true));
}

/// The cluster dimensions of a launch, if it can be transformed as it is launched.
pub fn cluster(arguments: &KernelArguments, transformed: &Transformed) -> Option<[u32; 3]> {
    let required =
        || transformed.required_cluster.each_ref().map(|d| d.load(Relaxed).max(1) as u32);
    let mut cluster = transformed.cluster.unwrap_or_else(required);
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

/// Blocks of a grid in y and in z, at most: CUDA refuses larger ones.
const GRID_YZ_MAX: u32 = 65_535;

/// Blocks of a grid, if there are not too many to number, and CUDA does not refuse such a grid: its slices would run.
pub fn blocks(grid: [u32; 3]) -> Option<u32> {
    let all = grid.iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
    all.filter(|n| *n > 1 && *n < 1 << 31 && grid[1..].iter().all(|n| *n <= GRID_YZ_MAX))
}

/// Registers of a thread of a function that is being launched. `None`: the driver does not tell.
pub fn registers(function: usize) -> Option<u16> {
    u16::try_from(attribute(plain_function(function), FUNC_REGISTERS)?).ok()
}

pub(crate) fn attribute(function: usize, which: i32) -> Option<i32> {
    let mut value = 0;
    let get = driver().func_attribute?;
    // SAFETY: a live function; a valid out-pointer.
    (unsafe { get(&mut value, which, function as Ptr) } == SUCCESS).then_some(value)
}

/// Dynamic shared memory that launches of a function may have.
pub(crate) fn shared_max(function: usize) -> i32 {
    attribute(function, FUNC_MAX_DYNAMIC_SHARED).unwrap_or(STALE)
}

/// Give a transformed form what the program set for the original.
pub(crate) fn copy_attributes(original: usize, to: usize) {
    let Some(set) = driver().func_set_attribute else { return };
    for which in FUNC_SETTABLE {
        let has = |now: i32, value| match which {
            FUNC_MAX_DYNAMIC_SHARED => now >= value,
            _ => now == value,
        };
        if let Some(value) = attribute(original, which)
            && !attribute(to, which).is_some_and(|now| has(now, value))
        {
            // SAFETY: a function of ours. Refused: the launch that needs it fails,
            // and is made whole.
            unsafe { set(to as Ptr, which, value) };
        }
    }
    occupancy::forget();
}

/// The function behind a handle that may be a context-free kernel's.
pub fn plain_function(handle: usize) -> usize {
    let mut function: Ptr = std::ptr::null_mut();
    match driver().kernel_function {
        // SAFETY: a handle that was just launched; refused if it is a function already.
        Some(f) if unsafe { f(&mut function, handle as Ptr) } == SUCCESS => function as usize,
        _ => handle,
    }
}

impl Transformed {
    /// Whether blocks that the original runs at once run at once in this form, too, or there are too many
    /// for a program to rely on it.
    pub(crate) fn keeps_occupancy(&self, launch: &KernelArguments, blocks: u32) -> bool {
        let of = |function| resident(function, launch.block, launch.shared_bytes);
        let Some(sms) = sm_count() else { return false };
        match (of(launch.function as usize), of(self.function)) {
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

    /// Whether this form stands for launches of a handle: of what it was made from, or of the same code with the same
    /// attributes.
    pub(crate) fn serves(&self, handle: usize) -> bool {
        if self.is_of(handle) {
            if self.shared_max.load(Relaxed) == STALE {
                self.copy_from(plain_function(handle));
            }
            return self.shared_max.load(Relaxed) != STALE;
        }
        let [alike, unlike] = self.compared.each_ref().map(|h| h.load(Acquire));
        handle != 0 && handle != unlike && (handle == alike || self.compare(handle))
    }

    fn is_of(&self, handle: usize) -> bool {
        handle != 0 && self.originals.iter().any(|o| o.load(Relaxed) == handle)
    }

    #[cold]
    fn compare(&self, handle: usize) -> bool {
        let before = ATTRIBUTES_SET.load(SeqCst);
        let plain = plain_function(handle);
        let is_same = |which: &i32| match *which {
            FUNC_MAX_DYNAMIC_SHARED => {
                attribute(plain, *which) == Some(self.shared_max.load(Relaxed))
            }
            which => attribute(plain, which) == attribute(self.function, which),
        };
        let is_alike = self.is_of(plain) || FUNC_SETTABLE.iter().all(is_same);
        self.compared[usize::from(!is_alike)].store(handle, SeqCst);
        // Set meanwhile: `attribute_was_set` has forgotten it, or will, or we do.
        if ATTRIBUTES_SET.load(SeqCst) != before {
            self.forget_compared(|_| true);
        }
        is_alike
    }

    pub(crate) fn forget_compared(&self, is_gone: impl Fn(usize) -> bool) {
        for handle in &self.compared {
            let there = handle.load(SeqCst);
            if there != 0 && is_gone(there) {
                handle.store(0, SeqCst);
            }
        }
    }

    /// Whether a launch of `original` may have so much dynamic shared memory.
    pub fn allows_shared(&self, bytes: u32, original: Ptr) -> bool {
        let has = || bytes.min(i32::MAX as u32) as i32 <= self.shared_max.load(Relaxed);
        if has() {
            return true;
        }
        // Set while the transformed form was made.
        if self.is_of(original as usize) {
            self.copy_from(plain_function(original as usize));
        }
        has()
    }

    pub(crate) fn copy_from(&self, original: usize) {
        for to in std::iter::once(self.function).chain(self.by_offset.function()) {
            copy_attributes(original, to);
        }
        self.copied(shared_max(original));
    }

    /// Take over what launches need to know of the original's attributes, which are its own by now.
    pub(crate) fn copied(&self, shared_max: i32) {
        let of = |which| attribute(self.function, which);
        for (dimension, which) in self.required_cluster.iter().zip(FUNC_REQUIRED_CLUSTER) {
            // A driver without clusters has none.
            dimension.store(of(which).unwrap_or(0), Relaxed);
        }
        let is_readable = of(FUNC_MAX_DYNAMIC_SHARED).is_some();
        self.shared_max.store(if is_readable { shared_max } else { STALE }, Relaxed);
    }

    /// What the program set for the original is to be read again before its next launch.
    pub(crate) fn make_stale(&self) {
        self.shared_max.store(STALE, SeqCst);
    }
}
