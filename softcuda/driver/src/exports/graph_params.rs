//! The structures in which a program says, and is told, what a graph's node
//! does; each converts to a node's work and back.

use super::copy::{Memcpy3d, fill, for_node};
use crate::context::{Current, current_green};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::In;
use crate::launch::{Launch, Shape};
use crate::module::resolve_function;
use crate::op::{Fill, HostFn, Op, UserData};
use crate::registry::handle_of;
use std::ffi::c_void;
use std::sync::Arc;

/// Parameters of one type of node.
pub(super) trait Params: Sized {
    /// What a node with these parameters does.
    fn op(&self) -> CuResult<Op>;

    /// The parameters of a node that does `op`; `None` if it is of another type.
    fn of(op: &Op) -> Option<Self>;
}

/// `CUDA_KERNEL_NODE_PARAMS`, as far as both versions agree.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelParams {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: *const *mut c_void,
    extra: *const *mut c_void,
}

/// What the second version adds.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelParams2 {
    common: KernelParams,
    kernel: usize,
    context: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct FillParams {
    to: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HostParams {
    function: Option<HostFn>,
    data: *mut c_void,
}

impl Params for KernelParams {
    fn op(&self) -> CuResult<Op> {
        let function = resolve_function(self.function)?;
        let Self { grid, block, shared_bytes, .. } = *self;
        let shape = Shape { grid, block, shared_bytes };
        let (params, extra) = (In::new(self.params), In::new(self.extra));
        let mut launch = Launch::prepare(function, shape, &params, &extra)?;
        launch.green = current_green();
        Ok(Op::Kernel(Arc::new(launch)))
    }

    /// The pointers are the node's own, as with the driver: valid until it is
    /// destroyed or gets other parameters.
    fn of(op: &Op) -> Option<Self> {
        let Op::Kernel(launch) = op else { return None };
        let Shape { grid, block, shared_bytes } = launch.shape;
        let (params, extra) = launch.param_lists();
        let function = handle_of(&launch.function);
        Some(Self { function, grid, block, shared_bytes, params, extra })
    }
}

impl Params for KernelParams2 {
    fn op(&self) -> CuResult<Op> {
        let function = if self.common.function == 0 { self.kernel } else { self.common.function };
        let op = KernelParams { function, ..self.common }.op()?;
        match op {
            Op::Kernel(launch) if self.context != 0 => {
                let mut launch = launch.twin();
                launch.green = Current::find(driver()?, self.context)?.green;
                Ok(Op::Kernel(Arc::new(launch)))
            }
            other => Ok(other),
        }
    }

    fn of(op: &Op) -> Option<Self> {
        let Op::Kernel(launch) = op else { return None };
        let common = KernelParams::of(op)?;
        let id = launch.function.module.context;
        let contexts = &driver().ok()?.contexts;
        let context = match &launch.green {
            Some(green) => green.context_handle(),
            None => contexts.find_map(|c| (c.id == id).then(|| handle_of(c))).unwrap_or(0),
        };
        Some(Self { common, kernel: 0, context })
    }
}

impl Params for FillParams {
    fn op(&self) -> CuResult<Op> {
        let Self { to, pitch, value, width, height, .. } = *self;
        let element = match self.element {
            1 | 2 | 4 => self.element as usize,
            _ => return Err(CuError::INVALID_VALUE),
        };
        Ok(fill(Fill { to, pitch, element, value, width, height })?.unwrap_or(Op::Nop))
    }

    fn of(op: &Op) -> Option<Self> {
        let Op::Fill(Fill { to, pitch, element, value, width, height }) = *op else { return None };
        Some(Self { to, pitch, value, element: element as u32, width, height })
    }
}

impl Params for Memcpy3d {
    fn op(&self) -> CuResult<Op> {
        for_node(self.copy()?)
    }

    fn of(op: &Op) -> Option<Self> {
        let Op::Copy(copy) = op else { return None };
        Some(Self::describe(copy))
    }
}

impl Params for HostParams {
    fn op(&self) -> CuResult<Op> {
        let function = self.function.ok_or(CuError::INVALID_VALUE)?;
        Ok(Op::Host { function, data: UserData(self.data) })
    }

    fn of(op: &Op) -> Option<Self> {
        let Op::Host { function, data } = op else { return None };
        Some(Self { function: Some(*function), data: data.0 })
    }
}
