//! Kernels as cudarc sees them: modules, launches, and how they fail. Each
//! test runs itself again in a child process in which `libcuda.so.1` is this
//! crate's library.

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use std::ffi::{CStr, CString, c_void};

#[test]
fn vector_add() {
    on_device("vector_add", 2, || {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Tally software device");
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        let stream = context.new_stream().unwrap();
        let module = load(&context);
        let n = 10_000usize;
        let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
        let (da, db) = (stream.clone_htod(&a).unwrap(), stream.clone_htod(&b).unwrap());
        let mut out = stream.alloc_zeros::<f32>(n).unwrap();
        let function = kernel(&module, "vector_add");
        let count = n as u32;
        let mut launch = stream.launch_builder(&function);
        launch.arg(&da).arg(&db).arg(&mut out).arg(&count);
        // SAFETY: the arguments are those of the kernel, of `n` elements each.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.unwrap();
        let got = stream.clone_dtoh(&out).unwrap();
        assert!(got.iter().enumerate().all(|(i, &v)| v == 1.5 * i as f32));
    });
}

#[test]
fn an_illegal_address_sticks_until_reset() {
    on_device("an_illegal_address_sticks_until_reset", 2, || {
        let context = CudaContext::new(0).unwrap();
        let module = load(&context);
        let stream = context.default_stream();
        let f = kernel(&module, "store_at");
        let (nowhere, value) = (0x10u64, 1u32);
        let mut launch = stream.launch_builder(&f);
        launch.arg(&nowhere).arg(&value);
        // SAFETY: the kernel is meant to fail, inside the software device.
        unsafe { launch.launch(shape(1, 1)) }.unwrap();
        let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        assert_eq!(code(stream.synchronize()), illegal);
        let mut at = 0;
        // SAFETY: a valid out pointer; then the context is reset.
        unsafe {
            assert_eq!(sys::cuMemAlloc_v2(&mut at, 4), illegal);
            assert_eq!(sys::cuCtxSynchronize(), illegal);
            sys::cuDevicePrimaryCtxReset_v2(0).result().unwrap();
            sys::cuCtxSynchronize().result().unwrap();
        }
        assert_eq!(fetch(zeros(4), 4), [0; 4]);
        std::mem::forget((module, context));
    });
}

#[test]
fn a_trap_is_a_launch_failure() {
    on_device("a_trap_is_a_launch_failure", 2, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let f = kernel(&load(&context), "stop");
        // SAFETY: no arguments.
        unsafe { stream.launch_builder(&f).launch(shape(100, 32)) }.unwrap();
        assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        std::mem::forget(context);
    });
}

#[test]
fn bad_launches_are_refused() {
    on_device("bad_launches_are_refused", 2, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let f = kernel(&load(&context), "empty");
        let launch = |shape| {
            // SAFETY: no arguments.
            code(unsafe { stream.launch_builder(&f).launch(shape) }.map(drop))
        };
        assert_eq!(launch(shape(1, 1)), CUresult::CUDA_SUCCESS);
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(launch(shape(0, 1)), invalid);
        assert_eq!(launch(shape(1, 0)), invalid);
        assert_eq!(launch(shape(1, 1025)), invalid);
        let shared = LaunchConfig { shared_mem_bytes: 49 << 10, ..shape(1, 1) };
        assert_eq!(launch(shared), invalid);
        let attribute =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        f.set_attribute(attribute, 100 << 10).unwrap();
        assert_eq!(launch(shared), CUresult::CUDA_SUCCESS);
        assert!(f.set_attribute(attribute, 300 << 10).is_err());
        stream.synchronize().unwrap();
        // SAFETY: an invented handle is refused, not followed.
        let invented = unsafe {
            let null: *mut c_void = std::ptr::null_mut();
            sys::cuLaunchKernel(
                0x1234 as _,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                null.cast(),
                null.cast(),
                null.cast(),
            )
        };
        assert_eq!(invented, CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn cooperative_blocks_all_run_at_once() {
    on_device("cooperative_blocks_all_run_at_once", 3, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let module = load(&context);
        let f = kernel(&module, "meet");
        for _ in 0..20 {
            let (arrived, expected) = (zeros(1), 3u32);
            let mut launch = stream.launch_builder(&f);
            launch.arg(&arrived).arg(&expected);
            // SAFETY: one counter, and as many blocks as are expected.
            unsafe { launch.launch_cooperative(shape(3, 1)) }.unwrap();
            stream.synchronize().unwrap();
            assert_eq!(fetch(arrived, 1), [3]);
        }
        // Also when the SMs come free one by one behind another kernel.
        let busy = context.new_stream().unwrap();
        let spin = kernel(&module, "spin");
        for blocks in [3u32, 7, 2, 5, 4] {
            let (arrived, expected, done) = (zeros(1), 3u32, zeros(1));
            let rounds = 3000 * blocks;
            let mut launch = busy.launch_builder(&spin);
            launch.arg(&done).arg(&rounds);
            // SAFETY: one counter.
            unsafe { launch.launch(shape(blocks, 1)) }.unwrap();
            let mut launch = stream.launch_builder(&f);
            launch.arg(&arrived).arg(&expected);
            // SAFETY: as above.
            unsafe { launch.launch_cooperative(shape(3, 1)) }.unwrap();
            context.synchronize().unwrap();
            assert_eq!((fetch(arrived, 1), fetch(done, 1)), (vec![3], vec![blocks]));
        }
        let (arrived, expected) = (zeros(1), 4u32);
        let mut launch = stream.launch_builder(&f);
        launch.arg(&arrived).arg(&expected);
        // SAFETY: refused.
        let refused = unsafe { launch.launch_cooperative(shape(4, 1)) }.map(drop);
        assert_eq!(code(refused), CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    });
}

#[test]
fn bad_modules_explain_themselves() {
    on_device("bad_modules_explain_themselves", 1, || {
        let _context = CudaContext::new(0).unwrap();
        let load = |source: &str| {
            let image = CString::new(source).unwrap();
            let mut log = [0i8; 512];
            let mut module = std::ptr::null_mut();
            let mut names = [
                sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
                sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            ];
            let mut values =
                [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(512)];
            // SAFETY: two options with their values, and room for the log.
            let result = unsafe {
                let (names, values) = (names.as_mut_ptr(), values.as_mut_ptr());
                sys::cuModuleLoadDataEx(&mut module, image.as_ptr().cast(), 2, names, values)
            };
            // SAFETY: the log is zero-terminated.
            let text = unsafe { CStr::from_ptr(log.as_ptr()) }.to_str().unwrap().to_owned();
            assert_eq!(values[1] as usize, text.len());
            (result, text)
        };
        let (result, text) = load(".version 7.0\n.target sm_70\n.address_size 64\nnonsense here;");
        assert_eq!(result, CUresult::CUDA_ERROR_INVALID_PTX);
        assert!(text.contains('4'), "{text}");
        let (result, text) = load(&ptx().replace("sm_70", "sm_100"));
        assert_eq!(result, CUresult::CUDA_ERROR_INVALID_PTX);
        assert!(text.contains("sm_100"), "{text}");
        assert_eq!(load("hello").0, CUresult::CUDA_ERROR_INVALID_IMAGE);
        assert_eq!(load("\x7fELF").0, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert_eq!(load(&ptx()), (CUresult::CUDA_SUCCESS, String::new()));
    });
}

/// A container with one PTX entry, uncompressed.
fn fatbin(arch: u32, text: &str) -> Vec<u8> {
    let mut content = text.as_bytes().to_vec();
    content.resize(content.len().next_multiple_of(8) + 8, 0);
    let mut entry = vec![0u8; 64];
    entry[0] = 1;
    entry[2..4].copy_from_slice(&0x0101u16.to_le_bytes());
    entry[4] = 64;
    entry[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
    entry[28..32].copy_from_slice(&arch.to_le_bytes());
    let mut out = 0xBA55_ED50u32.to_le_bytes().to_vec();
    out.extend([1, 0, 16, 0]);
    out.extend(((entry.len() + content.len()) as u64).to_le_bytes());
    out.extend(entry);
    out.extend(content);
    out
}

#[test]
fn modules_libraries_and_their_variables() {
    on_device("modules_libraries_and_their_variables", 1, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let out = zeros(4);
        // A module out of a fatbin inside a wrapper, as nvcc makes them.
        let container = fatbin(80, &ptx());
        let wrapper = [0x1_4662_43b1u64, container.as_ptr() as u64, 0];
        let mut module = std::ptr::null_mut();
        let (mut function, mut library) = (std::ptr::null_mut(), std::ptr::null_mut());
        let null: *mut c_void = std::ptr::null_mut();
        let mut params = [(&raw const out).cast_mut().cast::<c_void>()];
        // SAFETY: images that live through the calls, valid out pointers, and
        // the one parameter of `lookup`.
        unsafe {
            sys::cuModuleLoadData(&mut module, wrapper.as_ptr().cast()).result().unwrap();
            sys::cuModuleGetFunction(&mut function, module, c"lookup".as_ptr()).result().unwrap();
            let missing = sys::cuModuleGetFunction(&mut function, module, c"absent".as_ptr());
            assert_eq!(missing, CUresult::CUDA_ERROR_NOT_FOUND);
            let (mut at, mut bytes) = (0, 0);
            sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, module, c"counter".as_ptr())
                .result()
                .unwrap();
            assert_eq!((bytes, fetch(at, 1)), (4, vec![7]));
            sys::cuMemsetD32_v2(at, 100, 1).result().unwrap();
            let s = stream.cu_stream();
            sys::cuLaunchKernel(function, 1, 1, 1, 4, 1, 1, 0, s, params.as_mut_ptr(), null.cast())
                .result()
                .unwrap();
            assert_eq!(fetch(out, 4), [110, 120, 130, 140]);
            sys::cuModuleUnload(module).result().unwrap();

            // A library's kernel launched as it is; its variables are its own.
            let image = CString::new(ptx()).unwrap();
            let (options, values) = (null.cast(), null.cast());
            let data = image.as_ptr().cast();
            sys::cuLibraryLoadData(&mut library, data, options, values, 0, null.cast(), values, 0)
                .result()
                .unwrap();
            let mut kernel = std::ptr::null_mut();
            sys::cuLibraryGetKernel(&mut kernel, library, c"lookup".as_ptr()).result().unwrap();
            let as_function = kernel as sys::CUfunction;
            // Parameters in a buffer this time.
            let mut size = 8usize;
            let mut extra = [
                std::ptr::without_provenance_mut::<c_void>(1),
                params[0],
                std::ptr::without_provenance_mut(2),
                (&raw mut size).cast(),
                null,
            ];
            let extra = extra.as_mut_ptr();
            sys::cuLaunchKernel(as_function, 1, 1, 1, 4, 1, 1, 0, s, null.cast(), extra)
                .result()
                .unwrap();
            assert_eq!(fetch(out, 4), [17, 27, 37, 47]);
            let mut count = 0;
            sys::cuLibraryGetKernelCount(&mut count, library).result().unwrap();
            assert_eq!(count, 8);
            sys::cuLibraryUnload(library).result().unwrap();
        }
    });
}

#[test]
fn functions_are_found_by_version() {
    type Get = extern "C" fn(*const i8, *mut *mut c_void, i32, u64, *mut u32) -> u32;
    on_device("functions_are_found_by_version", 1, || {
        let _context = CudaContext::new(0).unwrap();
        let get = |name: &CStr, version: i32, flags: u64| {
            let mut at = std::ptr::null_mut();
            let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
            // SAFETY: a C string and valid out pointers.
            let result = unsafe {
                sys::cuGetProcAddress_v2(name.as_ptr(), &mut at, version, flags, &mut status)
            };
            (result, at, status as u32)
        };
        let (ok, own, _) = get(c"cuGetProcAddress", 12080, 0);
        assert_eq!(ok, CUresult::CUDA_SUCCESS);
        // SAFETY: asked for by a version that means the five-argument form.
        let own: Get = unsafe { std::mem::transmute(own) };
        let (mut at, mut status) = (std::ptr::null_mut(), 9);
        assert_eq!(own(c"cuLaunchKernel".as_ptr(), &mut at, 12080, 0, &mut status), 0);
        assert_eq!((at, status), (get(c"cuLaunchKernel", 12080, 1).1, 0));
        assert_ne!(at, get(c"cuLaunchKernel", 12080, 2).1, "per-thread default stream");
        assert!(!get(c"cuMemcpyHtoD", 12080, 2).1.is_null());
        assert!(!get(c"cuLinkCreate", 12080, 0).1.is_null());
        let absent = get(c"cuNoSuchThing", 12080, 0);
        assert_eq!(absent, (CUresult::CUDA_SUCCESS, std::ptr::null_mut(), 1));
        let early = get(c"cuLibraryLoadData", 11080, 0);
        assert_eq!(early, (CUresult::CUDA_SUCCESS, std::ptr::null_mut(), 2));
        assert_eq!(get(c"cuInit", 99_000, 0).0, CUresult::CUDA_ERROR_INVALID_VALUE);
        let (mut table, id) = (std::ptr::null(), sys::CUuuid { bytes: [1; 16] });
        // SAFETY: valid pointers.
        let none = unsafe { sys::cuGetExportTable(&mut table, &id) };
        assert_eq!(none, CUresult::CUDA_ERROR_NOT_FOUND);
    });
}
