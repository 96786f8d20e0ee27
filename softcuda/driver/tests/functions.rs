//! What a program that launches rewritten copies of kernels asks and sets:
//! attributes, parameters, names, and parameter buffers.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUresult};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null_mut, without_provenance_mut};

/// `k(out, n)`, and the same with a control block behind its parameters, of
/// whose words it stores the first and the last.
const PTX: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 n) {
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    st.global.u32 [%rd1], %r1;
    ret;
}
.visible .entry k_transformed(.param .u64 out, .param .u32 n, .param .align 8 .b8 control[56]) {
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    ld.param.u32 %r2, [control];
    ld.param.u32 %r3, [control+52];
    st.global.u32 [%rd1], %r1;
    st.global.u32 [%rd1+4], %r2;
    st.global.u32 [%rd1+8], %r3;
    ret;
}
";

fn attribute(number: u32) -> CUfunction_attribute {
    assert!(number < 16);
    // SAFETY: one of the numbers that the enumeration has.
    unsafe { std::mem::transmute(number) }
}

fn get(f: CUfunction, number: u32) -> i32 {
    let mut value = -7;
    // SAFETY: a function of ours and a valid out pointer.
    unsafe { sys::cuFuncGetAttribute(&mut value, attribute(number), f) }.result().unwrap();
    value
}

fn set(f: CUfunction, number: u32, value: i32) -> CUresult {
    // SAFETY: a function of ours.
    unsafe { sys::cuFuncSetAttribute(f, attribute(number), value) }
}

/// Offset and size of every parameter.
fn params(f: CUfunction) -> Vec<(usize, usize)> {
    let mut list = Vec::new();
    let (mut offset, mut size) = (0, 0);
    // SAFETY: a function of ours and valid out pointers.
    while unsafe { sys::cuFuncGetParamInfo(f, list.len(), &mut offset, &mut size) }
        == CUresult::CUDA_SUCCESS
    {
        list.push((offset, size));
    }
    list
}

#[test]
fn attributes_are_kept() {
    on_device("attributes_are_kept", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = context.load_module(cudarc::nvrtc::Ptx::from_src(PTX)).unwrap();
        let (k, transformed) = (raw(&module, "k"), raw(&module, "k_transformed"));
        let all: [(u32, i32); 7] =
            [(8, 200 << 10), (9, 50), (11, 1), (12, 1), (13, 1), (14, 1), (15, 2)];
        let before: Vec<i32> = all.iter().map(|a| get(transformed, a.0)).collect();
        assert_eq!(before, [48 << 10, -1, 0, 0, 0, 0, 0]);
        for (number, value) in all {
            assert_eq!(set(k, number, value), CUresult::CUDA_SUCCESS);
            assert_eq!(get(k, number), value);
        }
        let after: Vec<i32> = all.iter().map(|a| get(transformed, a.0)).collect();
        assert_eq!(before, after, "each function has its own");
        // Read-only, too large, out of range.
        for (number, value) in
            [(10, 1), (0, 32), (8, 228 << 10), (8, -1), (9, 101), (14, 2), (15, 3)]
        {
            assert_eq!(set(k, number, value), CUresult::CUDA_ERROR_INVALID_VALUE, "{number}");
        }
        // Clusters of several blocks are refused at the launch.
        assert_eq!(set(transformed, 11, 2), CUresult::CUDA_SUCCESS);
        let (out, n, control) = (zeros(3), 5u32, [0u8; 56]);
        let mut list: [*mut c_void; 3] = [
            (&raw const out).cast_mut().cast(),
            (&raw const n).cast_mut().cast(),
            (&raw const control).cast_mut().cast(),
        ];
        // SAFETY: refused before anything is read.
        let refused = unsafe {
            let (none, stream) = (null_mut(), null_mut());
            sys::cuLaunchKernel(transformed, 1, 1, 1, 1, 1, 1, 0, stream, list.as_mut_ptr(), none)
        };
        assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
        // A library's kernel and the function made from it.
        let (mut library, mut kernel, mut f) = (null_mut(), null_mut(), null_mut());
        let image = CString::new(PTX).unwrap();
        // SAFETY: a PTX image and valid out pointers.
        unsafe {
            let (none, nothing) = (null_mut(), null_mut());
            let data = image.as_ptr().cast();
            sys::cuLibraryLoadData(&mut library, data, none, nothing, 0, null_mut(), null_mut(), 0)
                .result()
                .unwrap();
            sys::cuLibraryGetKernel(&mut kernel, library, c"k_transformed".as_ptr())
                .result()
                .unwrap();
            sys::cuKernelSetAttribute(attribute(8), 100_000, kernel, 0).result().unwrap();
            let mut value = 0;
            sys::cuKernelGetAttribute(&mut value, attribute(8), kernel, 0).result().unwrap();
            assert_eq!(value, 100_000);
            sys::cuKernelGetFunction(&mut f, kernel).result().unwrap();
            let (mut offset, mut size) = (0, 0);
            sys::cuKernelGetParamInfo(kernel, 2, &mut offset, &mut size).result().unwrap();
            assert_eq!((offset, size), (16, 56));
        }
        assert_eq!(get(f, 8), 100_000);
    });
}

#[test]
fn rewritten_kernels_are_described() {
    on_device("rewritten_kernels_are_described", 1, || {
        let _context = CudaContext::new(0).unwrap();
        let image = CString::new(PTX).unwrap();
        let mut module = null_mut();
        // SAFETY: a PTX image, and room for as many functions as there are.
        let functions = unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast()).result().unwrap();
            let mut count = 0;
            sys::cuModuleGetFunctionCount(&mut count, module).result().unwrap();
            let mut functions = vec![null_mut(); count as usize];
            sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module)
                .result()
                .unwrap();
            functions
        };
        let mut named = BTreeMap::new();
        for f in functions {
            let (mut name, mut owner) = (std::ptr::null(), null_mut());
            // SAFETY: valid out pointers; the name lives as long as the module.
            let name = unsafe {
                sys::cuFuncGetName(&mut name, f).result().unwrap();
                sys::cuFuncGetModule(&mut owner, f).result().unwrap();
                CStr::from_ptr(name).to_str().unwrap()
            };
            assert_eq!(owner, module);
            named.insert(name, f);
        }
        assert_eq!(named.keys().copied().collect::<Vec<_>>(), ["k", "k_transformed"]);
        let (k, transformed) = (named["k"], named["k_transformed"]);
        assert_eq!(params(k), [(0, 8), (8, 4)]);
        assert_eq!(params(transformed), [(0, 8), (8, 4), (16, 56)]);
        // SAFETY: valid handles and pointers; the buffer is larger than what
        // either kernel takes, and what it says of its size is true.
        unsafe {
            let mut found = null_mut();
            sys::cuModuleGetFunction(&mut found, module, c"k_transformed".as_ptr())
                .result()
                .unwrap();
            assert_eq!(found, transformed, "the same handle every time");
            let (out, stream) = (zeros(3), stream(1));
            // The program's own buffer, the control block behind it, and more.
            let mut buffer = out.to_ne_bytes().to_vec();
            buffer.extend(7u64.to_ne_bytes());
            buffer.extend([1u8; 56]);
            buffer.extend([9u8; 40]);
            for (f, size, want) in [
                (k, 12, Some([7, 0, 0])),
                (k, buffer.len(), Some([7, 0, 0])),
                (transformed, 72, Some([7, 0x0101_0101, 0x0101_0101])),
                (transformed, buffer.len(), Some([7, 0x0101_0101, 0x0101_0101])),
                (transformed, 16, None),
            ] {
                let mut size = size;
                sys::cuMemsetD32_v2(out, 0, 3).result().unwrap();
                let mut extra = [
                    without_provenance_mut(1),
                    buffer.as_mut_ptr().cast(),
                    without_provenance_mut(2),
                    (&raw mut size).cast::<c_void>(),
                    null_mut(),
                ];
                let (list, extra) = (null_mut(), extra.as_mut_ptr());
                let rc = sys::cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, list, extra);
                assert_eq!(rc == CUresult::CUDA_SUCCESS, want.is_some(), "{size} bytes");
                synchronize(stream);
                assert_eq!(fetch(out, 3), want.unwrap_or([0; 3]));
            }
        }
    });
}
