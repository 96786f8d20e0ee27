//! Exports of the driver's `cuMemcpy*` and `cuMemset*` functions.

use crate::capture;
use crate::config::STAGING_BYTES_MAX;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, exports_per_thread};
use crate::memory::Place;
use crate::op::{Copy, Fill, Op};
use crate::stream::{NullStream, Stream, resolve};
use std::ffi::c_void;
use std::sync::Arc;

/// Which ends of a copy must be memory that the device knows.
#[derive(Clone, Copy)]
struct Ends {
    to_device: bool,
    from_device: bool,
}

const TO_DEVICE: Ends = Ends { to_device: true, from_device: false };
const TO_HOST: Ends = Ends { to_device: false, from_device: true };
const ON_DEVICE: Ends = Ends { to_device: true, from_device: true };
const ANY: Ends = Ends { to_device: false, from_device: false };

/// Bytes from the first to the last of a (possibly pitched) range.
fn extent(copy: &Copy, pitch: usize, slice: usize) -> CuResult<u64> {
    let rows = (copy.height - 1).checked_mul(pitch);
    let slices = (copy.depth - 1).checked_mul(slice);
    let total = rows.zip(slices).and_then(|(r, s)| r.checked_add(s)?.checked_add(copy.width));
    total.map(|t| t as u64).ok_or(CuError::INVALID_VALUE)
}

/// Checks both ends; says what they are.
fn places(copy: &Copy, ends: Ends) -> CuResult<(Place, Place)> {
    let memory = &driver()?.memory;
    let to = memory.place(copy.to, extent(copy, copy.to_pitch, copy.to_slice)?)?;
    let from = memory.place(copy.from, extent(copy, copy.from_pitch, copy.from_slice)?)?;
    let wrong = |must, place| must && place == Place::Pageable;
    if wrong(ends.to_device, to) || wrong(ends.from_device, from) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok((to, from))
}

fn is_empty(copy: &Copy) -> bool {
    copy.width == 0 || copy.height == 0 || copy.depth == 0
}

/// Runs `op` in the default stream and waits. If nothing is pending it is
/// done right here.
fn synchronously(op: Op, null: NullStream) -> CuResult {
    let stream = resolve(0, null)?;
    capture::forbid()?;
    if stream.could_start()? {
        match op {
            Op::Copy(copy) => copy.run(),
            Op::Fill(fill) => fill.run(),
            _ => {}
        }
        return Ok(());
    }
    stream.submit(op)?;
    wait(&stream)
}

fn wait(stream: &Stream) -> CuResult {
    stream.wait_all();
    stream.context.check()
}

fn copy_now(copy: Copy, ends: Ends, null: NullStream) -> CuResult {
    resolve(0, null)?;
    if is_empty(&copy) {
        return Ok(());
    }
    places(&copy, ends)?;
    synchronously(Op::Copy(copy), null)
}

/// Submits a copy. Pageable memory is read before the call returns, and
/// written before it returns, as the driver promises.
fn copy_async(mut copy: Copy, ends: Ends, stream: usize, null: NullStream) -> CuResult {
    let stream = resolve(stream, null)?;
    if is_empty(&copy) {
        return Ok(());
    }
    let (to, from) = places(&copy, ends)?;
    if capture::is_capturing(&stream) {
        return stream.submit(Op::Copy(copy));
    }
    let linear = copy.height == 1 && copy.depth == 1;
    let stage = from == Place::Pageable && linear && copy.width <= STAGING_BYTES_MAX;
    if stage {
        let source = In::new(copy.from as *const u8);
        copy.staged = Some(Arc::from(source.bytes(copy.width)?));
    }
    stream.submit(Op::Copy(copy))?;
    if (from == Place::Pageable && !stage) || to == Place::Pageable {
        return wait(&stream);
    }
    Ok(())
}

fn linear(to: u64, from: u64, bytes: usize) -> Copy {
    Copy::linear(to, from, bytes)
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memcpy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct End2d {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY3D`; also `CUDA_MEMCPY3D_PEER`, with contexts where this has
/// reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memcpy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct End3d {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    rows: usize,
}

/// Address and pitch of an end: `CU_MEMORYTYPE_HOST`, `_DEVICE`, `_UNIFIED`.
fn base(kind: u32, host: u64, device: u64) -> CuResult<u64> {
    match kind {
        1 => Ok(host),
        2 | 4 => Ok(device),
        // Arrays.
        3 => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

impl End3d {
    /// First byte, pitch and slice size.
    fn locate(&self, width: usize, height: usize, depth: usize) -> CuResult<(u64, usize, usize)> {
        let base = base(self.kind, self.host, self.device)?;
        let pitch = if self.pitch == 0 { self.x + width } else { self.pitch };
        let rows = if self.rows == 0 { self.y + height } else { self.rows };
        let too_narrow = (height > 1 && pitch < width) || (depth > 1 && rows < height);
        let slice = pitch.checked_mul(rows).ok_or(CuError::INVALID_VALUE)?;
        let offset = (self.z.checked_mul(slice))
            .and_then(|o| o.checked_add(self.y.checked_mul(pitch)?)?.checked_add(self.x));
        match offset.and_then(|o| base.checked_add(o as u64)) {
            Some(start) if !too_narrow && self.lod == 0 => Ok((start, pitch, slice)),
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

impl End3d {
    /// An end whose first byte is at `at`; rows and slices as the copy has them.
    fn describe(at: u64, pitch: usize, slice: usize) -> Self {
        let known = driver().ok().and_then(|d| d.memory.find(at));
        let kind = if known.is_some_and(|r| r.kind.on_device()) { 2 } else { 1 };
        let (host, device) = if kind == 1 { (at, 0) } else { (0, at) };
        let rows = slice.checked_div(pitch).unwrap_or(0);
        Self { x: 0, y: 0, z: 0, lod: 0, kind, host, device, array: 0, reserved: 0, pitch, rows }
    }
}

impl Memcpy3d {
    /// The structure that says what `copy` does. Not the one that it may have
    /// been made from: offsets are part of the addresses here.
    pub(super) fn describe(copy: &Copy) -> Self {
        Self {
            from: End3d::describe(copy.from, copy.from_pitch, copy.from_slice),
            to: End3d::describe(copy.to, copy.to_pitch, copy.to_slice),
            width: copy.width,
            height: copy.height,
            depth: copy.depth,
        }
    }

    pub(super) fn copy(&self) -> CuResult<Copy> {
        let (width, height, depth) = (self.width, self.height, self.depth);
        let (from, from_pitch, from_slice) = self.from.locate(width, height, depth)?;
        let (to, to_pitch, to_slice) = self.to.locate(width, height, depth)?;
        let staged = None;
        Ok(Copy {
            to,
            from,
            width,
            height,
            depth,
            to_pitch,
            to_slice,
            from_pitch,
            from_slice,
            staged,
        })
    }
}

impl End2d {
    fn as_3d(&self) -> End3d {
        let Self { x, y, kind, host, device, array, pitch } = *self;
        End3d { x, y, z: 0, lod: 0, kind, host, device, array, reserved: 0, pitch, rows: 0 }
    }
}

impl Memcpy2d {
    fn copy(&self) -> CuResult<Copy> {
        let (from, to) = (self.from.as_3d(), self.to.as_3d());
        Memcpy3d { from, to, width: self.width, height: self.height, depth: 1 }.copy()
    }
}

/// Checks a copy for a graph node, which is done much later.
pub(super) fn for_node(copy: Copy) -> CuResult<Op> {
    if is_empty(&copy) {
        return Ok(Op::Nop);
    }
    places(&copy, ANY)?;
    Ok(Op::Copy(copy))
}

/// Checks a fill's range; `None` if it has no bytes.
pub(super) fn fill(fill: Fill) -> CuResult<Option<Op>> {
    let element = fill.element as u64;
    let row = fill.width.checked_mul(fill.element).ok_or(CuError::INVALID_VALUE)?;
    if row == 0 || fill.height == 0 {
        return Ok(None);
    }
    let aligned = fill.to.is_multiple_of(element)
        && (fill.height == 1 || (fill.pitch as u64).is_multiple_of(element));
    if !aligned || (fill.height > 1 && fill.pitch < row) {
        return Err(CuError::INVALID_VALUE);
    }
    let before = (fill.height - 1).checked_mul(fill.pitch).ok_or(CuError::INVALID_VALUE)?;
    let bytes = before.checked_add(row).ok_or(CuError::INVALID_VALUE)?;
    driver()?.memory.check_device(fill.to, bytes as u64)?;
    Ok(Some(Op::Fill(fill)))
}

fn fill_now(what: Fill, null: NullStream) -> CuResult {
    resolve(0, null)?;
    fill(what)?.map_or(Ok(()), |op| synchronously(op, null))
}

fn fill_async(what: Fill, stream: usize, null: NullStream) -> CuResult {
    let stream = resolve(stream, null)?;
    fill(what)?.map_or(Ok(()), |op| stream.submit(op))
}

fn row(to: u64, element: usize, value: u32, width: usize) -> Fill {
    Fill { to, pitch: 0, element, value, width, height: 1 }
}

exports_per_thread! {
    fn cuMemcpy / cuMemcpy_ptds |null| (to: u64, from: u64, bytes: usize) {
        copy_now(linear(to, from, bytes), ANY, null)
    }

    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds |null| (to: u64, from: u64, bytes: usize) {
        copy_now(linear(to, from, bytes), TO_DEVICE, null)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds |null| (to: u64, from: u64, bytes: usize) {
        copy_now(linear(to, from, bytes), TO_HOST, null)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds |null| (to: u64, from: u64, bytes: usize) {
        copy_now(linear(to, from, bytes), ON_DEVICE, null)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds |null| (
        to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize
    ) {
        copy_now(linear(to, from, bytes), ON_DEVICE, null)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz |null| (to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async(linear(to, from, bytes), ANY, stream, null)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz |null| (
        to: u64, from: u64, bytes: usize, stream: usize
    ) {
        copy_async(linear(to, from, bytes), TO_DEVICE, stream, null)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz |null| (
        to: u64, from: u64, bytes: usize, stream: usize
    ) {
        copy_async(linear(to, from, bytes), TO_HOST, stream, null)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz |null| (
        to: u64, from: u64, bytes: usize, stream: usize
    ) {
        copy_async(linear(to, from, bytes), ON_DEVICE, stream, null)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz |null| (
        to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize, stream: usize
    ) {
        copy_async(linear(to, from, bytes), ON_DEVICE, stream, null)
    }

    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds |null| (copy: In<Memcpy2d>) {
        copy_now(copy.get()?.copy()?, ANY, null)
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds |null| (copy: In<Memcpy2d>) {
        copy_now(copy.get()?.copy()?, ANY, null)
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz |null| (copy: In<Memcpy2d>, stream: usize) {
        copy_async(copy.get()?.copy()?, ANY, stream, null)
    }

    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds |null| (copy: In<Memcpy3d>) {
        copy_now(copy.get()?.copy()?, ANY, null)
    }

    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz |null| (copy: In<Memcpy3d>, stream: usize) {
        copy_async(copy.get()?.copy()?, ANY, stream, null)
    }

    fn cuMemcpy3DPeer / cuMemcpy3DPeer_ptds |null| (copy: In<Memcpy3d>) {
        copy_now(copy.get()?.copy()?, ANY, null)
    }

    fn cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz |null| (copy: In<Memcpy3d>, stream: usize) {
        copy_async(copy.get()?.copy()?, ANY, stream, null)
    }

    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds |null| (to: u64, value: u8, count: usize) {
        fill_now(row(to, 1, value.into(), count), null)
    }

    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds |null| (to: u64, value: u16, count: usize) {
        fill_now(row(to, 2, value.into(), count), null)
    }

    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds |null| (to: u64, value: u32, count: usize) {
        fill_now(row(to, 4, value, count), null)
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz |null| (
        to: u64, value: u8, count: usize, stream: usize
    ) {
        fill_async(row(to, 1, value.into(), count), stream, null)
    }

    fn cuMemsetD16Async / cuMemsetD16Async_ptsz |null| (
        to: u64, value: u16, count: usize, stream: usize
    ) {
        fill_async(row(to, 2, value.into(), count), stream, null)
    }

    fn cuMemsetD32Async / cuMemsetD32Async_ptsz |null| (
        to: u64, value: u32, count: usize, stream: usize
    ) {
        fill_async(row(to, 4, value, count), stream, null)
    }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds |null| (
        to: u64, pitch: usize, value: u8, width: usize, height: usize
    ) {
        fill_now(Fill { to, pitch, element: 1, value: value.into(), width, height }, null)
    }

    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds |null| (
        to: u64, pitch: usize, value: u16, width: usize, height: usize
    ) {
        fill_now(Fill { to, pitch, element: 2, value: value.into(), width, height }, null)
    }

    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds |null| (
        to: u64, pitch: usize, value: u32, width: usize, height: usize
    ) {
        fill_now(Fill { to, pitch, element: 4, value, width, height }, null)
    }

    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz |null| (
        to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize
    ) {
        fill_async(Fill { to, pitch, element: 1, value: value.into(), width, height }, stream, null)
    }

    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz |null| (
        to: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize
    ) {
        fill_async(Fill { to, pitch, element: 2, value: value.into(), width, height }, stream, null)
    }

    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz |null| (
        to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize
    ) {
        fill_async(Fill { to, pitch, element: 4, value, width, height }, stream, null)
    }
}

#[allow(dead_code, reason = "keeps the layout of the structures in check")]
const _: () = {
    assert!(size_of::<Memcpy2d>() == 128);
    assert!(size_of::<Memcpy3d>() == 200);
    assert!(size_of::<*const c_void>() == 8);
};
