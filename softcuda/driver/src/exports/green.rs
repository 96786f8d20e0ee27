//! `cuDevResource*`, `cuDevSmResource*`, `cuGreenCtx*`: partitions of the SMs.

use super::context::find;
use crate::context::Current;
use crate::device::check;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports};
use crate::green::{self, Descriptor, Green, granularity};
use crate::registry::handle_of;
use crate::sm::{SMS_MAX, SmSet};
use crate::stream::{NON_BLOCKING, NullStream, StreamKind, resolve_any};
use crate::sync::lock;
use std::sync::Arc;

/// `CU_DEV_RESOURCE_TYPE_SM`; 0 is invalid.
const SM: u32 = 1;
/// Marks a resource that this device made.
const MAGIC: [u8; 8] = *b"simSMset";
const IGNORE_COSCHEDULING: u32 = 1;
const SPLIT_FLAGS: u32 = 3;
const DEFAULT_STREAM: u32 = 1;
/// Resources in a descriptor, at most.
const RESOURCES_MAX: u32 = SMS_MAX as u32;

/// `CUdevResource`: a type, 92 bytes for the driver, and 48 that depend on the
/// type, of which CUDA 12 names the first four and CUDA 13 the first twelve.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Resource {
    kind: u32,
    magic: [u8; 8],
    set: [u8; SMS_MAX / 8],
    private: [u8; 52],
    sm_count: u32,
    min_partition: u32,
    alignment: u32,
    rest: [u8; 36],
}

const _: () = assert!(size_of::<Resource>() == 144);

impl Resource {
    fn new(set: &SmSet) -> CuResult<Self> {
        let step = granularity(driver()?.arbiter.sms(), false);
        let (sm_count, kind) = (set.count(), if set.is_empty() { 0 } else { SM });
        let (private, rest, set) = ([0; 52], [0; 36], set.to_bytes());
        let (min_partition, alignment) = (step, step);
        Ok(Self { kind, magic: MAGIC, set, private, sm_count, min_partition, alignment, rest })
    }

    /// # Errors
    /// `INVALID_RESOURCE_TYPE` unless it is SMs, `INVALID_VALUE` if it is not
    /// from this device.
    fn sms(&self) -> CuResult<SmSet> {
        if self.kind != SM {
            return Err(CuError::INVALID_RESOURCE_TYPE);
        }
        let set = SmSet::from_bytes(&self.set);
        let all = SmSet::first(driver()?.arbiter.sms());
        if self.magic != MAGIC || set.is_empty() || !set.without(&all).is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(set)
    }
}

fn describe(out: &Out<Resource>, kind: u32, set: &SmSet) -> CuResult {
    out.check()?;
    if kind != SM {
        return Err(CuError::INVALID_RESOURCE_TYPE);
    }
    out.set(Resource::new(set)?)
}

fn split(
    out: &Out<Resource>,
    groups: &Out<u32>,
    input: &In<Resource>,
    remaining: &Out<Resource>,
    flags: u32,
    min_count: u32,
) -> CuResult {
    let mut left = input.get()?.sms()?;
    if flags & !SPLIT_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let wanted = groups.get()?;
    let step = granularity(driver()?.arbiter.sms(), flags & IGNORE_COSCHEDULING != 0);
    let size = min_count.max(1).checked_next_multiple_of(step).ok_or(CuError::INVALID_VALUE)?;
    let possible = left.count() / size;
    if possible == 0 {
        return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
    }
    if out.is_null() {
        // Only asked how many there could be.
        return groups.set(possible);
    }
    if wanted == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let made = wanted.min(possible);
    let parts = (0..made).map(|_| Resource::new(&left.split_off(size)));
    let parts = parts.collect::<CuResult<Vec<_>>>()?;
    out.set_slice(parts, made as usize);
    remaining.set_if(Resource::new(&left)?);
    groups.set(made)
}

fn generate(out: &Out<usize>, resources: &In<Resource>, count: u32) -> CuResult {
    out.check()?;
    if count == 0 || count > RESOURCES_MAX {
        return Err(CuError::INVALID_VALUE);
    }
    let mut all = SmSet::default();
    for i in 0..count as usize {
        let set = resources.at(i)?.sms()?;
        if !all.and(&set).is_empty() {
            return Err(CuError::INVALID_RESOURCE_CONFIGURATION);
        }
        set.iter().for_each(|sm| all.insert(sm));
    }
    out.set(driver()?.descriptors.insert(&Arc::new(Descriptor(all))))
}

fn green(handle: usize) -> CuResult<Arc<Green>> {
    driver()?.greens.find(handle).ok_or(CuError::INVALID_CONTEXT)
}

exports! {
    fn cuDeviceGetDevResource(device: i32, resource: Out<Resource>, kind: u32) {
        let driver = driver()?;
        check(device)?;
        describe(&resource, kind, &SmSet::first(driver.arbiter.sms()))
    }

    fn cuCtxGetDevResource(context: usize, resource: Out<Resource>, kind: u32) {
        let sms = match find(context)?.green {
            Some(green) => green.sms,
            None => SmSet::first(driver()?.arbiter.sms()),
        };
        describe(&resource, kind, &sms)
    }

    fn cuGreenCtxGetDevResource(handle: usize, resource: Out<Resource>, kind: u32) {
        describe(&resource, kind, &green(handle)?.sms)
    }

    fn cuDevSmResourceSplitByCount(
        out: Out<Resource>,
        groups: Out<u32>,
        input: In<Resource>,
        remaining: Out<Resource>,
        flags: u32,
        min_count: u32,
    ) {
        driver()?;
        split(&out, &groups, &input, &remaining, flags, min_count)
    }

    fn cuDevResourceGenerateDesc(out: Out<usize>, resources: In<Resource>, count: u32) {
        driver()?;
        generate(&out, &resources, count)
    }

    fn cuGreenCtxCreate(out: Out<usize>, descriptor: usize, device: i32, flags: u32) {
        let driver = driver()?;
        check(device)?;
        out.check()?;
        let descriptor = driver.descriptors.get(descriptor)?;
        // Up to CUDA 13.2 the default stream had to be asked for.
        if flags != DEFAULT_STREAM {
            return Err(CuError::INVALID_VALUE);
        }
        if !driver.arbiter.reserve_bytes(green::BYTES) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        driver.retain_primary();
        out.set(driver.greens.insert(&Green::new(driver, descriptor.0)))
    }

    fn cuGreenCtxDestroy(handle: usize) {
        let driver = driver()?;
        let found = driver.greens.remove(handle).map_err(|_| CuError::INVALID_CONTEXT)?;
        found.close();
        driver.arbiter.release_bytes(green::BYTES);
        driver.release_primary()
    }

    fn cuCtxFromGreenCtx(context: Out<usize>, handle: usize) {
        context.set(green(handle)?.context_handle())
    }

    fn cuGreenCtxGetId(handle: usize, id: Out<u64>) {
        id.set(green(handle)?.id)
    }

    fn cuGreenCtxStreamCreate(out: Out<usize>, handle: usize, flags: u32, priority: i32) {
        let green = green(handle)?;
        green.context.check()?;
        out.check()?;
        if flags != NON_BLOCKING {
            return Err(CuError::INVALID_VALUE);
        }
        let priority = super::stream::clamped(priority);
        let stream = green.stream(StreamKind::Created, flags, priority)?;
        out.set(driver()?.streams.insert(&stream))
    }

    fn cuGreenCtxRecordEvent(handle: usize, event: usize) {
        let (green, event) = (green(handle)?, driver()?.events.get(event)?);
        green::record(&green.context, &green.streams(), &event)
    }

    fn cuGreenCtxWaitEvent(handle: usize, event: usize) {
        green(handle)?.wait_for(&*driver()?.events.get(event)?)
    }

    fn cuCtxRecordEvent(context: usize, event: usize) {
        let Current { context, green } = find(context)?;
        let event = driver()?.events.get(event)?;
        let streams = match green {
            Some(green) => green.streams(),
            None => lock(&context.streams).clone(),
        };
        green::record(&context, &streams, &event)
    }

    fn cuCtxWaitEvent(context: usize, event: usize) {
        let Current { context, green } = find(context)?;
        let event = driver()?.events.get(event)?;
        match green {
            Some(green) => green.wait_for(&event),
            None => {
                let streams = lock(&context.streams).clone();
                green::wait_for(&streams, event.record()?.as_ref())
            }
        }
    }

    fn cuStreamGetGreenCtx(stream: usize, out: Out<usize>) {
        let stream = resolve_any(stream, NullStream::Legacy)?;
        out.set(stream.green.as_ref().map_or(0, handle_of))
    }
}
